"""A machine measured: its products, its memory, its collectives; and the profile that plans then use.

Owns the measurements, the fit of a collective's curve, and the file. Needs torch for measuring only: reading a profile
does not. `hardware.py` has what a profile is: a `Device`.
"""

import dataclasses
import functools
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from zeroshard.plan.hardware import Device, device_named

if TYPE_CHECKING:
    import torch

__all__ = ["device_for", "fit_line", "measure_device", "measure_ranks", "profile_path", "read_profile", "write_profile"]

VERSION: Final = 1
ROUNDS: Final = 7
PRODUCT: Final = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the products that are timed."""
COPY_BYTES: Final = {"cpu": 1 << 28, "cuda": 1 << 30}
SENT_BYTES: Final = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Of the collectives that are timed."""


def measure_device() -> Device:
    """Measure this process's device: products in each dtype, and copies. Takes some seconds.

    Source: the least of several rounds, since other programs can only slow a kernel down.
    """
    import torch

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    dtypes = [torch.float32, torch.bfloat16, torch.float16] if kind == "cuda" else [torch.float32, torch.bfloat16]
    peaks = {str(dtype).removeprefix("torch."): _product_flops(device, dtype) for dtype in dtypes}
    moved_bytes_per_s = _copy_bytes_per_s(device)
    return Device(
        f"{platform.node()}-{torch.cuda.get_device_name(device) if kind == 'cuda' else 'cpu'}",
        MappingProxyType(peaks),
        _memory_bytes(device),
        moved_bytes_per_s,
        moved_bytes_per_s,
        moved_bytes_per_s,
        _host_bytes_per_s(device, moved_bytes_per_s),
        node_ranks=torch.cuda.device_count() if kind == "cuda" else os.cpu_count() or 1,
        host_bytes=_host_bytes(),
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count if kind == "cuda" else 1,
        # What is measured is what is reached.
        matmul_part=1.0,
        attention_part=1.0,
        memory_part=1.0,
        link_part=1.0,
        launch_s=_launch_s(device),
        context_bytes=_context_bytes(device),
        communicator_bytes=Device.communicator_bytes if kind == "cuda" else 0,
    )


def measure_ranks(device: Device) -> Device:
    """Return a device with the collectives of the ranks that have joined: latency of a hop, and bandwidth of a link.

    Collective: gathers of up to 16 MB from each rank; every rank must call.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return device
    ranks = dist.get_world_size()
    where = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    times: list[float] = []
    for nbytes in SENT_BYTES:
        own = torch.zeros(nbytes, dtype=torch.uint8, device=where)
        whole = torch.zeros(nbytes * ranks, dtype=torch.uint8, device=where)
        parts = list(whole.chunk(ranks))
        times.append(_least_s(functools.partial(dist.all_gather, parts, own), where))
    hop_s, bytes_per_s = fit_line([nbytes * (ranks - 1) for nbytes in SENT_BYTES], times)
    slowest = torch.tensor([hop_s / (ranks - 1), -bytes_per_s], dtype=torch.float64, device=where)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    hop_s, bytes_per_s = float(slowest[0]), -float(slowest[1])
    return dataclasses.replace(
        device,
        link_bytes_per_s=bytes_per_s,
        node_bytes_per_s=bytes_per_s,
        hop_s=hop_s,
        node_hop_s=hop_s,
        half_bytes=0.0,
    )


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Return (seconds at no bytes, bytes a second) of the line that is nearest in relative error.

    >>> from zeroshard.plan.doctor import fit_line
    >>> start_s, rate = fit_line([1e3, 1e6, 1e9], [1e-3 + size / 1e9 for size in (1e3, 1e6, 1e9)])
    >>> round(start_s, 6), round(rate)
    (0.001, 1000000000)
    """
    weights = [1 / took_s**2 for took_s in times]
    total = sum(weights)
    x = sum(w * s for w, s in zip(weights, sizes, strict=True)) / total
    y = sum(w * t for w, t in zip(weights, times, strict=True)) / total
    above = sum(w * (s - x) * (t - y) for w, s, t in zip(weights, sizes, times, strict=True))
    below = sum(w * (s - x) ** 2 for w, s in zip(weights, sizes, strict=True))
    slope = max(above / below, 1e-15)
    return max(0.0, y - slope * x), 1 / slope


def profile_path() -> Path:
    """Return where the profile of this machine lies."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zeroshard" / "device.json"


def device_for(name: str) -> Device:
    """Return a preset by name, a profile by its file, or with "this" the profile of this machine.

    Raises:
        ValueError: there is no such preset, or the file is no profile.
    """
    if name == "this":
        return read_profile(profile_path())
    return read_profile(Path(name)) if Path(name).is_file() else device_named(name)


def write_profile(device: Device, path: Path) -> None:
    """Write a profile as JSON, and make its folder."""
    values = {one.name: getattr(device, one.name) for one in dataclasses.fields(device)}
    values["peak_flops"] = dict(device.peak_flops)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": VERSION, "device": values}, indent=2) + "\n")


def read_profile(path: Path) -> Device:
    """Read a profile.

    Raises:
        ValueError: the file is not one.
    """
    try:
        stored = json.loads(path.read_text())
        values: dict[str, Any] = stored["device"]
        version = stored["version"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a profile of `zeroshard doctor`: {error!r}") from error
    names = {one.name for one in dataclasses.fields(Device)}
    if version != VERSION or values.keys() != names:
        raise ValueError(f"{path} is a profile of another version ({version!r}); run `zeroshard doctor` again.")
    return Device(**values | {"peak_flops": MappingProxyType(values["peak_flops"])})


def _least_s(run: Callable[[], object], device: "torch.device") -> float:
    """Return the least seconds of several rounds, after one that does not count."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    wait()
    found = []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - start_s)
    return min(found)


def _product_flops(device: "torch.device", dtype: "torch.dtype") -> float:
    import torch

    size = PRODUCT[device.type]
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _least_s(lambda: one @ other, device)


def _copy_bytes_per_s(device: "torch.device") -> float:
    """Return bytes read and written a second by a copy."""
    import torch

    nbytes = COPY_BYTES[device.type]
    source, target = (torch.zeros(nbytes // 4, device=device) for _ in range(2))
    return 2 * nbytes / _least_s(lambda: target.copy_(source), device)


def _host_bytes_per_s(device: "torch.device", otherwise: float) -> float:
    import torch

    if device.type != "cuda":
        return otherwise
    nbytes = COPY_BYTES["cpu"]
    source, target = (
        torch.zeros(nbytes, dtype=torch.uint8).pin_memory(),
        torch.zeros(nbytes, dtype=torch.uint8, device=device),
    )
    return nbytes / _least_s(lambda: target.copy_(source, non_blocking=True), device)


def _launch_s(device: "torch.device") -> float:
    """Return the seconds of the smallest operation, one of many in a row."""
    import torch

    x, many = torch.zeros(1, device=device), 1000

    def run() -> None:
        for _ in range(many):
            x.add_(1)

    return _least_s(run, device) / many


def _memory_bytes(device: "torch.device") -> int:
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else _host_bytes()


def _context_bytes(device: "torch.device") -> int:
    """Return what this process took of the device outside torch's allocator, as the driver tells."""
    import torch

    if device.type != "cuda":
        return 0
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return max(0, total_bytes - free_bytes - torch.cuda.memory_reserved(device))


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
