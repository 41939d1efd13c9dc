"""Every file operation may fail, and every process may be killed: one error everywhere, and no checkpoint is lost."""

import errno
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zeroshard as zs
from tests.engine.oracle import assert_same
from zeroshard.checkpoint import files
from zeroshard.checkpoint.verify import latest, verify
from zeroshard.testing import RankFailure, run_ranks

from .rig import TIMEOUT_S, Trainer

OPERATIONS = (
    "close create free_bytes make_folder names_in open_file read_at rename size_of sync sync_folder write".split()
)


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


def write_half(name: str, args: tuple[Any, ...]) -> int | None:
    """Take a part of what is written, which is no failure: the rest must follow."""
    return os.write(args[0], args[1][: len(args[1]) // 2]) if name == "write" and len(args[1]) > 1 else None


def report_full(name: str, args: tuple[Any, ...]) -> int | None:
    """Say that hardly a byte is free."""
    return 7 if name == "free_bytes" else None


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
            assert failing.name in ("", "create", "write", "sync", "close", "rename", "sync_folder"), failing.name
            assert "committing" in text, (failing.name, text)
        if not text:
            verify(target)
        verify(f"{folder}/step-1")
        assert not [name for name in os.listdir(folder) if name.startswith(".tmp-step")]
        found.append((failing.name, text))
        is_over = int(rank == culprit and failing.count < number)
        if trainer.zero._engine.comm.agree([-is_over], "the end of the test")[0]:
            return found
    raise AssertionError("a save needs more than 100 operations")


@pytest.mark.parametrize("culprit", [0, 1])
def test_each_file_operation_of_a_save_may_fail(tmp_path: Path, culprit: int) -> None:
    args = (str(tmp_path), culprit, refuse)
    by_rank = run_ranks(fail_each_operation_of_save, 2, *args, timeout_s=TIMEOUT_S)
    operations = [name for name, _ in by_rank[culprit]]
    texts = [[text for _, text in found] for found in by_rank]
    assert texts[0] == texts[1]
    # All but the last, which fails nothing, and the question for free bytes, which is answered.
    assert [name for name, text in zip(operations, texts[0], strict=True) if not text] == (
        ["free_bytes", ""] if culprit == 0 else [""]
    )
    expected = {"create", "write", "sync", "close"}
    assert set(operations) >= (expected | {"rename", "sync_folder", "make_folder"} if culprit == 0 else expected)
    assert all(f"failed on rank {culprit}: OSError: [Errno " in text for text in texts[0] if text)


def test_a_short_write_is_continued(tmp_path: Path) -> None:
    found = run_ranks(fail_each_operation_of_save, 2, str(tmp_path), 0, write_half, timeout_s=TIMEOUT_S)
    assert [text for rank in found for _, text in rank if text] == []
    assert "write" in [name for name, _ in found[0]]


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    found = run_ranks(fail_each_operation_of_save, 2, str(tmp_path), 0, report_full, timeout_s=TIMEOUT_S)
    texts = [text for _, text in found[1] if text]
    assert len(texts) == 1
    assert "has 7 free bytes, and the checkpoint needs" in texts[0]


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


def test_each_file_operation_of_a_load_may_fail(tmp_path: Path) -> None:
    by_rank = run_ranks(fail_each_operation_of_load, 2, str(tmp_path), 1, timeout_s=TIMEOUT_S)
    texts = [[text for _, text in found] for found in by_rank]
    assert texts[0] == texts[1]
    assert sum(1 for text in texts[0] if "Nothing in memory was changed." in text) > 20
    assert {name for name, _ in by_rank[1]} >= {"open_file", "read_at", "size_of", "names_in", "close"}
    assert texts[0][-1] == ""


# -- kill -------------------------------------------------------------------------------------------------------------


def die(name: str, args: tuple[Any, ...]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_until_killed(folder: str, culprit: int, operation: int, after_s: float) -> None:
    """Train and save step after step; one rank is killed at an operation of the second save, or after some time."""
    trainer = Trainer.make(3)
    trainer.train(0, 1)
    trainer.zero.save(f"{folder}/step-1")
    is_culprit = trainer.zero.mesh.rank == culprit
    if is_culprit and after_s:
        threading.Timer(after_s, die, ("", ())).start()
    with Failing(operation if is_culprit else -1, die):
        for step in range(2, 1000):
            trainer.train(step - 1, step)
            trainer.zero.save(f"{folder}/step-{step}")


def undisturbed(last: int) -> list[dict[str, Any]]:
    """Return the state after each step."""
    trainer = Trainer.make(3)
    states = []
    for step in range(last):
        trainer.train(step, step + 1)
        states.append(trainer.state())
    return states


def resume(path: str, first: int, last: int) -> dict[str, Any]:
    """Load and train to `last`, saving once on the way where the killed run would have."""
    trainer = Trainer.make(3, key=1)
    assert trainer.zero.load(path).step == first
    if first + 1 <= last:
        trainer.train(first, first + 1)
        trainer.zero.save(Path(path).parent / f"step-{first + 1}")
        trainer.train(first + 1, last)
    return trainer.state()


@pytest.mark.parametrize("world", [1, 2])
def test_a_kill_loses_no_checkpoint(tmp_path: Path, world: int) -> None:
    draw = random.Random(world)
    expected = run_ranks(undisturbed, world, 6, timeout_s=TIMEOUT_S, process_group=world > 1)
    kills = [(culprit, draw.randint(1, 30 if culprit == 0 else 12), 0.0) for culprit in range(world) for _ in range(3)]
    kills += [(draw.randrange(world), -1, draw.uniform(0.0, 0.15)) for _ in range(3)]
    for number, (culprit, operation, after_s) in enumerate(kills):
        folder = tmp_path / str(number)
        args = (str(folder), culprit, operation, after_s)
        with pytest.raises(RankFailure) as caught:
            run_ranks(save_until_killed, world, *args, timeout_s=TIMEOUT_S, process_group=world > 1)
        assert caught.value.errors[culprit].type_name == "SIGKILL", caught.value
        found = latest(folder)
        assert found is not None
        step = int(found.name.removeprefix("step-"))
        listed = {int(name.removeprefix("step-")) for name in os.listdir(folder) if name.startswith("step-")}
        assert listed == set(range(1, step + 1)), "a committed checkpoint was lost"
        for kept in listed:
            verify(folder / f"step-{kept}")
        if step < 6:
            args = (str(found), step, 6)
            states = run_ranks(resume, world, *args, timeout_s=TIMEOUT_S, process_group=world > 1)
            for rank, state in enumerate(states):
                mine = dict(expected[rank][-1])
                if rank:
                    del mine["buffers"], state["buffers"]
                assert_same(mine, state, f"{args}, rank {rank}")
            assert not [name for name in os.listdir(folder) if name.startswith(".tmp-step")]
