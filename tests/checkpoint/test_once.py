"""What a file holds and what its checksum says are of one reading, though the values change meanwhile."""

import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint import files
from zeroshard.checkpoint.verify import verify
from zeroshard.checkpoint.writer import FileWriter
from zeroshard.testing import run_ranks

from .rig import TIMEOUT_S


def save_what_changes(folder: str) -> None:
    """Save while values change with every write, as by a thread that keeps an average, at the worst moment."""
    for stage in range(4):
        for shared in (True, False):
            model = nn.Linear(64, 64)
            zero = zs.shard(model, stage=stage, settings=zs.Settings(shared_memory=shared))
            slots = list(zero._engine.slots.values())
            write = files.write

            def changing(descriptor: int, data: memoryview, slots: list = slots, write=write) -> int:
                for slot in slots:
                    slot.bucket.master(slot.index).detach().add_(1.0)
                return write(descriptor, data)

            files.write = changing
            try:
                path = zero.save(Path(folder, f"{stage}-{shared}"))
            finally:
                files.write = write
            verify(path)
            zero.load(path)


def test_a_save_of_changing_values_verifies(tmp_path: Path) -> None:
    run_ranks(save_what_changes, 2, str(tmp_path), timeout_s=TIMEOUT_S)


def test_the_checksum_is_of_the_bytes_that_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.zeros(5 << 20, dtype=torch.uint8)
    write = files.write

    def changing(descriptor: int, data: memoryview) -> int:
        values.add_(1)
        return write(descriptor, data)

    monkeypatch.setattr(files, "write", changing)
    with FileWriter(tmp_path / "a") as writer:
        writer.write(values.numpy().data)
    data = (tmp_path / "a").read_bytes()
    assert list(writer.entry().crc32) == [zlib.crc32(data[: 4 << 20]), zlib.crc32(data[4 << 20 :])]
