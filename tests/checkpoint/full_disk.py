"""Saves on a disk of a given size that fills up. Runs in mount and user namespaces of its own (`test_full_disk.py`)."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

import zeroshard as zs
from zeroshard.checkpoint import files
from zeroshard.checkpoint.verify import verify
from zeroshard.testing import run_ranks

from .rig import TIMEOUT_S, Trainer

DISK_BYTES = 1 << 20
PAGE_BYTES = 4096


def fill(disk: Path) -> None:
    """Leave one page of a disk."""
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * PAGE_BYTES)
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - PAGE_BYTES)


def text_of_save(trainer: Trainer, path: Path, asynchronous: bool) -> str:
    """Save, and return the error."""
    try:
        trainer.zero.save(path, asynchronous=asynchronous)
        trainer.zero.wait()
    except zs.CheckpointError as error:
        return str(error)
    return ""


def save_on_a_full_disk(folder: str, asynchronous: bool) -> list[str]:
    """Save, save where there is no room, save where room ends on the way, save with room again; return the errors."""
    disk = Path(folder)
    trainer = Trainer.make(2)
    trainer.train(0, 1)
    rank = trainer.zero.mesh.rank
    texts = [text_of_save(trainer, disk / "step-1", asynchronous)]
    dist.barrier()
    if rank == 0:
        fill(disk)
    texts.append(text_of_save(trainer, disk / "step-2", asynchronous))
    if rank == 0:
        (disk / "filler").unlink()
    dist.barrier()
    create = files.create
    if rank == 1:

        def fill_and_create(path: Path, *mode: int | None) -> int:
            fill(disk)
            return create(path, *mode)

        files.create = fill_and_create
    texts.append(text_of_save(trainer, disk / "step-2", asynchronous))
    files.create = create
    dist.barrier()
    if rank == 0:
        (disk / "filler").unlink()
    verify(disk / "step-1")
    dist.barrier()
    assert trainer.zero.load(disk / "step-1").step == 1
    texts.append(text_of_save(trainer, disk / "step-2", asynchronous))
    verify(disk / "step-2")
    return texts


def main() -> None:
    """Mount a disk in a folder, save on it, and print what each rank was told."""
    folder, asynchronous = sys.argv[1:]
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", folder], check=True)
    found: list[Any] = run_ranks(save_on_a_full_disk, 2, folder, asynchronous == "True", timeout_s=TIMEOUT_S)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
