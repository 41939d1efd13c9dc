"""Profiles of machines: their files and names.

Owns the file format; `report/doctor.py` measures. Needs no torch. A profile is a `Device` (`hardware.py`).
"""

import dataclasses
import json
import os
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from zeroshard.plan.machine.hardware import Device
from zeroshard.plan.machine.presets import device_named
from zeroshard.text_files import write_whole

__all__ = ["device_for", "host_device", "profile_path", "read_profile", "write_profile"]

VERSION: Final = 1
LATER: Final = frozenset(
    "host_memory_bytes_per_s disk_bytes_per_s sustained_part cudnn_part node_part queue_s exchange_s".split()
)
"""Fields that profiles of earlier releases lack; values of presets replace them."""


def profile_path() -> Path:
    """Return the path of this machine's profile."""
    return Path.home() / ".cache" / "zeroshard" / "device.json"


def device_for(name: str | Device) -> Device:
    """Return the device of a name: a preset, the file of a profile, or "this" for the profile of this machine.

    A device is returned as it is.

    Raises:
        ValueError: no preset has this name, or the file is not a profile.

    ```python
    from zeroshard.plan.machine.profiles import device_for

    assert device_for("h100-80").memory_bytes > device_for("a100-40").memory_bytes
    ```
    """
    if name == "this":
        if not profile_path().exists():
            raise ValueError(
                f"device='this': {profile_path()} does not exist; run `zeroshard doctor`, which writes it."
            )
        return read_profile(profile_path())
    return read_profile(Path(name)) if isinstance(name, str) and Path(name).is_file() else device_named(name)


def host_device() -> Device:
    """Return this host as a device with known memory and unmeasured speed: predicted times are meaningless.

    ```python
    from zeroshard.plan.machine.profiles import host_device

    device = host_device()
    assert device.is_cpu and device.memory_bytes == device.host_bytes
    ```
    """
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    unknown = MappingProxyType({"float32": 1e11})
    return Device(
        "cpu, not measured",
        unknown,
        host_bytes,
        1e10,
        1e10,
        1e10,
        1e10,
        node_ranks=os.cpu_count() or 1,
        host_bytes=host_bytes,
        multiprocessors=1,
        context_bytes=0,
        communicator_bytes=0,
        node_part=0.8,
    )


def write_profile(device: Device, path: Path) -> None:
    """Write a profile as JSON; create its folder."""
    values = {one.name: getattr(device, one.name) for one in dataclasses.fields(device)}
    values["peak_flops"] = dict(device.peak_flops)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"version": VERSION, "device": values}, indent=2) + "\n")


def read_profile(path: Path) -> Device:
    """Read a profile.

    Raises:
        ValueError: the file is not a profile.
    """
    try:
        stored = json.loads(path.read_text())
        values: dict[str, Any] = dict(stored["device"])
        version = stored["version"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a profile of `zeroshard doctor`: {error!r}") from error
    names = {one.name for one in dataclasses.fields(Device)}
    if version != VERSION or not names - LATER <= values.keys() <= names:
        raise ValueError(f"{path} is a profile of another version ({version!r}); run `zeroshard doctor` again.")
    try:
        return Device(**values | {"peak_flops": MappingProxyType(values["peak_flops"])})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a profile of `zeroshard doctor`: {error}") from error
