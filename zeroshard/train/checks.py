"""What can be known to fail before ranks start: folders, space on disks, devices.

Owns these checks, with one line for each. `config.py` refuses settings that do not go together, `run.py` inputs. It
must not change anything. Read `check_places` first.
"""

import os
import shutil
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from zeroshard.describe.offload import offload_of
from zeroshard.table.sizes import size_text
from zeroshard.train.config import AUTO, Config
from zeroshard.train.run import make_model
from zeroshard.train.tokenizer import Tokenizer

__all__ = ["check_devices", "check_places", "check_space", "checkpoint_bytes"]

_HOST: Final = "host"
_STATES: Final = MappingProxyType(
    {"adamw": 2.0, "muon": 1.2, "adafactor": 0.1, "adamw8bit": 0.6, "sgd": 1.0, "lion": 1.0}
)
"""What an optimizer keeps in a checkpoint, in fp32 numbers a trained parameter: at least about so much."""


def check_places(config: Config) -> None:
    """Raise ValueError if a folder that the run writes to cannot be written."""
    _check_writable(config.folder, "run.folder")
    if config.data.cache:
        _check_writable(config.cache, "data.cache")
    if config.zero.offload in ("", AUTO):
        return
    asked = offload_of(config.zero.offload)
    for place in {str(asked.to), str(asked.parameters_to or _HOST)} - {_HOST} if asked is not None else ():
        if not Path(place).is_dir():
            raise ValueError(
                f"zero.offload: there is no folder {place!r}; give one that exists, on a disk of each host, or host"
            )
        _check_writable(Path(place), "zero.offload")


def _check_writable(folder: Path, setting: str) -> None:
    there = next((one for one in (folder, *folder.absolute().parents) if one.exists()), Path("/"))
    if not there.is_dir():
        raise ValueError(f"{setting}: {str(there)!r} is a file, and {str(folder)!r} must become a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{setting}: {str(there)!r} cannot be written by this user; give another folder")


def check_devices(config: Config) -> None:
    """Raise ValueError if this host has GPUs, and fewer than ranks, each of which needs its own."""
    count = torch.cuda.device_count()
    if count and config.run.ranks > count:
        raise ValueError(
            f"run.ranks={config.run.ranks}: this host has {count} GPU(s), and each rank needs its own; give --ranks "
            f"{count}, or start torchrun on several hosts"
        )


def checkpoint_bytes(config: Config, tokenizer: Tokenizer) -> int:
    """Return about how many bytes a checkpoint of the run takes: parameters and optimizer states in fp32."""
    parameters = list(make_model(config, tokenizer).module.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return int(4 * (sum(p.numel() for p in parameters) + _STATES[config.train.optimizer] * trained))


def check_space(config: Config, tokenizer: Tokenizer) -> None:
    """Raise ValueError if the disk of the run's folder has less free space than one checkpoint takes."""
    there = next(one for one in (config.folder, *config.folder.absolute().parents) if one.exists())
    needed, free = checkpoint_bytes(config, tokenizer), shutil.disk_usage(there).free
    if free < needed:
        raise ValueError(
            f"run.folder: the disk of {str(there)!r} has {size_text(free)} free, and a checkpoint of this run "
            f"takes {size_text(needed)}; free space, or give another run.folder"
        )
