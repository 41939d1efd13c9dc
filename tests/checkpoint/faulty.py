"""Making the n-th file operation of this process do something else, and saves and loads under that.

Owns what is required of them: `test_faults.py` and `tools/damage.py` run it.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import zeroshard as zs
from tests.oracle import assert_same
from zeroshard.checkpoint import files
from zeroshard.checkpoint.verify import verify

from .rig import Trainer

OPERATIONS = [
    *("close", "create", "free_bytes", "identity_of", "make_folder", "names_in", "open_file"),
    *("read_at", "remove", "rename", "size_of", "sync", "sync_folder", "write"),
]
HINT = ["create", "write", "sync", "close", "rename"]
"""What writes LATEST, which is for people."""


class Failing:
    """Counts file operations of this process from now on, and does something at the n-th."""

    def __init__(self, number: int, act: Callable[[str, tuple[Any, ...]], Any]) -> None:
        self.number, self.act, self.count, self.name = number, act, 0, ""

    def __enter__(self) -> "Failing":
        self.originals = {name: getattr(files, name) for name in OPERATIONS}
        for name, original in self.originals.items():
            setattr(files, name, self.wrapped(name, original))
        return self

    def __exit__(self, *exception: object) -> None:
        for name, original in self.originals.items():
            setattr(files, name, original)

    def wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any) -> Any:
            self.count += 1
            if self.count == self.number:
                self.name = name
                try:
                    if (answer := self.act(name, args)) is not None:
                        return answer
                except OSError:
                    if name == "close":
                        original(*args)  # a descriptor is gone even where closing it reports an error
                    raise
            return original(*args)

        return operation


def refuse(name: str, args: tuple[Any, ...]) -> None:
    """Fail as a disk does: full when it is written to, broken when it is read."""
    number = errno.ENOSPC if name in ("create", "write", "make_folder", "sync") else errno.EIO
    if name == "free_bytes":
        return
    raise OSError(number, os.strerror(number))


def fail_each_operation_of_save(folder: str, culprit: int, act: Callable[..., Any]) -> list[tuple[str, str]]:
    """Save again and again, with the n-th operation of one rank failing; return operations and errors."""
    trainer = Trainer.make(3)
    trainer.train(0, 1)
    trainer.zero.save(f"{folder}/step-1")
    rank = trainer.zero.mesh.rank
    found = []
    for number in range(1, 100):
        target = Path(folder, f"step-{number + 1}")
        text = ""
        with Failing(number if rank == culprit else -1, act) as failing:
            try:
                trainer.zero.save(target)
            except zs.CheckpointError as error:
                text = str(error)
        dist.barrier()
        if text and target.exists():
            verify(target)
            assert failing.name in ("", "sync_folder"), failing.name
            assert "committing" in text, (failing.name, text)
        if not text:
            verify(target)
        verify(f"{folder}/step-1")
        assert not [name for name in os.listdir(folder) if name.startswith(".tmp-")]
        found.append((failing.name, text))
        is_over = int(rank == culprit and failing.count < number)
        if trainer.zero._engine.comm.agree([-is_over], "the end of the test")[0]:
            return found
    raise AssertionError("a save needs more than 100 operations")


def fail_each_operation_of_load(folder: str, culprit: int) -> list[tuple[str, str]]:
    """Load again and again, with the n-th operation of one rank failing; what is in memory is whole or said not to."""
    trainer = Trainer.make(2)
    trainer.train(0, 1)
    trainer.zero.save(f"{folder}/step-1")
    saved = trainer.state()
    trainer.train(1, 2)
    before = trainer.state()
    rank = trainer.zero.mesh.rank
    found = []
    for number in range(1, 400):
        text = ""
        with Failing(number if rank == culprit else -1, refuse) as failing:
            try:
                trainer.zero.load(f"{folder}/step-1")
            except zs.CheckpointError as error:
                text = str(error)
        found.append((failing.name, text))
        if "Nothing in memory was changed." in text:
            assert_same(before, trainer.state(), f"{failing.name}, operation {number}")
        elif text:
            assert "Memory is partly changed now" in text
        is_over = int(rank == culprit and failing.count < number)
        if text == "" or is_over:
            after = trainer.state()
            for part in ("parameters", "optimizers"):
                assert_same(saved[part], after[part])
        if trainer.zero._engine.comm.agree([-is_over], "the end of the test")[0]:
            return found
        if "partly changed" in text or not text:
            before = trainer.state()
    raise AssertionError("a load needs more than 400 operations")
