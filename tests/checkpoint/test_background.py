"""Saving in the background: what is written is the moment of the call, and a failure is never lost."""

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from tests.contract.source import REPOSITORY
from tests.oracle import assert_same
from zeroshard.checkpoint import files
from zeroshard.checkpoint.diff import diff
from zeroshard.checkpoint.verify import latest, verify
from zeroshard.testing import run_ranks
from zeroshard.tree import find

from .faulty import HINT, Failing, refuse
from .rig import TIMEOUT_S, Trainer


class Gate:
    """Holds back every write to a file until it is opened."""

    def __enter__(self) -> "Gate":
        self.write, self.is_open = files.write, threading.Event()
        files.write = self.held
        return self

    def held(self, descriptor: int, data: memoryview) -> int:
        assert self.is_open.wait(TIMEOUT_S)
        return self.write(descriptor, data)

    def __exit__(self, *exception: object) -> None:
        self.is_open.set()
        files.write = self.write


def visible(folder: str) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def save_while_training(folder: str, stage: int) -> dict[str, Any]:
    """Save at once and in the background, train while nothing is written yet, and look when it appears."""
    trainer = Trainer.make(stage)
    trainer.train(0, 2)
    before = trainer.state()
    trainer.zero.save(f"{folder}/at-once-2", {"a": 1})
    seen = []
    with Gate() as gate:
        trainer.zero.save(f"{folder}/later-2", {"a": 1}, asynchronous=True)
        losses = trainer.train(2, 5)
        seen.append(visible(folder))
        dist.barrier()
        gate.is_open.set()
        trainer.zero.wait()
        seen.append(visible(folder))
    trainer.zero.save(f"{folder}/again-2", asynchronous=True)
    losses += trainer.train(5, 6)
    trainer.zero.wait()
    trainer.zero.wait()
    other = Trainer.make(stage, key=1)
    other.zero.load(f"{folder}/later-2")
    return {"seen": seen, "losses": losses, "other": (before, other.state()), "rerun": other.train(2, 6)}


@pytest.mark.product
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_training_goes_on_while_the_moment_of_the_call_is_written(tmp_path: Path, stage: int) -> None:
    for result in run_ranks(save_while_training, 2, str(tmp_path), stage, timeout_s=TIMEOUT_S):
        assert result["seen"] == [["LATEST", "at-once-2"], ["LATEST", "at-once-2", "later-2"]]
        before, other = result["other"]
        for part in ("parameters", "optimizers", "draws"):
            assert_same(before[part], other[part], part)
        assert result["rerun"] == result["losses"]
    assert diff(tmp_path / "at-once-2", tmp_path / "later-2") == []
    assert diff(tmp_path / "at-once-2", tmp_path / "again-2") != []
    for name in ("at-once-2", "later-2", "again-2"):
        verify(tmp_path / name)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_path_means_what_it_meant_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    zero = zs.shard(torch.nn.Linear(4, 1))
    assert zero.save("step-1", asynchronous=True) == Path("step-1")
    monkeypatch.chdir("other")
    zero.wait()
    assert sorted(one.name for one in tmp_path.iterdir() if not one.name.startswith(".")) == [
        "LATEST",
        "other",
        "step-1",
    ]


def count_agreements(folder: str) -> tuple[int, int, int]:
    """Return what a step sends for agreement before, during and after a save in the background."""
    trainer = Trainer.make(2)
    trainer.train(0, 2)
    sent = trainer.zero._engine.comm.sent_bytes

    def step(number: int) -> int:
        before = sent["agree"]
        trainer.train(number, number + 1)
        return sent["agree"] - before

    first = step(2)
    with Gate():
        trainer.zero.save(f"{folder}/a-1", asynchronous=True)
        during = step(3)
        dist.barrier()
    trainer.zero.wait()
    return first, during, step(4)


def test_a_step_asks_only_while_there_is_a_save(tmp_path: Path) -> None:
    for first, during, after in run_ranks(count_agreements, 2, str(tmp_path), timeout_s=TIMEOUT_S):
        optimizers = 2
        assert (during, after) == (first + optimizers * 40, first)


# -- failures ---------------------------------------------------------------------------------------------------------


def no_space(name: str, args: tuple[Any, ...]) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def by_step(trainer: Trainer, folder: str) -> None:
    for step in range(1, 1000):
        trainer.train(step, step + 1)


def by_save(trainer: Trainer, folder: str) -> None:
    trainer.zero.save(f"{folder}/c-3")


def by_load(trainer: Trainer, folder: str) -> None:
    trainer.zero.load(f"{folder}/a-1")


def by_wait(trainer: Trainer, folder: str) -> None:
    trainer.zero.wait()


WAYS = [by_step, by_save, by_load, by_wait]


def fail_in_background(folder: str, culprit: int, way: Callable[[Trainer, str], None]) -> tuple[str, list[str], Any]:
    """Fail on one rank; return the error, what is there, and whether training and saving go on after it."""
    trainer = Trainer.make(3)
    trainer.train(0, 1)
    trainer.zero.save(f"{folder}/a-1")
    # The first file operations are those of rank 0's main thread, which makes the folder.
    with Failing(10 if dist.get_rank() == culprit == 0 else 2 if dist.get_rank() == culprit else -1, no_space):
        trainer.zero.save(f"{folder}/b-2", asynchronous=True)
        with pytest.raises(zs.CheckpointError) as caught:
            way(trainer, folder)
    dist.barrier()
    found = sorted(os.listdir(folder))
    dist.barrier()
    trainer.train(1, 2)
    trainer.zero.save(f"{folder}/d-4", asynchronous=True)
    trainer.zero.wait()
    return str(caught.value), found, trainer.state()["parameters"]


@pytest.mark.product
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_failure_is_raised_on_every_rank(tmp_path: Path, way: Callable[..., None], culprit: int) -> None:
    by_rank = run_ranks(fail_in_background, 2, str(tmp_path), culprit, way, timeout_s=TIMEOUT_S)
    assert by_rank[0][0] == by_rank[1][0]
    text = f"in the background: writing tensors failed on rank {culprit}: OSError: [Errno 28] No space left on device"
    assert text in by_rank[0][0]
    assert "Nothing was committed" in by_rank[0][0]
    assert by_rank[0][1] == ["LATEST", "a-1"]
    verify(tmp_path / "a-1")
    verify(tmp_path / "d-4")


def fail_in_a_step(folder: str, culprit: int) -> tuple[bool, bool]:
    """Fail on one rank; return whether the step that raises left everything as it was, and whether it trains on."""
    trainer = Trainer.make(3)
    trainer.train(0, 1)
    before = trainer.state()
    with Failing(2 if dist.get_rank() == culprit else -1, no_space):
        trainer.zero.save(f"{folder}/b-2", asynchronous=True)
        for step in range(1, 1000):
            before = trainer.state()
            try:
                trainer.train(step, step + 1)
            except zs.CheckpointError:
                break
    is_same = same(before, trainer.state())
    trainer.train(step, step + 1)
    return is_same, same(before, trainer.state())


def same(one: Any, other: Any) -> bool:
    """Tell whether two states have the same bits."""
    pairs = [find([state["parameters"], state["optimizers"]], torch.Tensor) for state in (one, other)]
    return all(map(torch.equal, *pairs))


def test_a_step_that_raises_has_changed_nothing(tmp_path: Path) -> None:
    assert run_ranks(fail_in_a_step, 2, str(tmp_path), 1, timeout_s=TIMEOUT_S) == [(True, False)] * 2


def fail_each_operation(folder: str, culprit: int, keep: int | None) -> list[tuple[str, str]]:
    """Save in the background again and again, with the n-th operation of one rank failing."""
    trainer = Trainer.make(3)
    trainer.train(0, 1)
    trainer.zero.save(f"{folder}/step-1")
    found = []
    is_culprit = dist.get_rank() == culprit
    for number in range(1, 200):
        target, text = Path(folder, f"step-{number + 1}"), ""
        with Failing(number if is_culprit else -1, refuse) as failing:
            try:
                trainer.zero.save(target, asynchronous=True, keep=keep)
                trainer.zero.wait()
            except zs.CheckpointError as error:
                text = str(error)
        dist.barrier()
        if "Look with" not in text:
            assert target.exists() == ("Nothing was committed" not in text), text
        if target.exists():
            verify(target)
        verify(f"{folder}/step-1")
        assert not [name for name in os.listdir(folder) if name.startswith(".tmp-step")]
        found.append((failing.name, text))
        if trainer.zero._engine.comm.agree([-int(is_culprit and failing.count < number)], "the end")[0]:
            return found
    raise AssertionError("a save needs more than 200 operations")


# Of a checkpoint that cannot be read, retention does not know that it may remove it.
READING = {"open_file", "size_of", "read_at", "close"}


@pytest.mark.product
@pytest.mark.parametrize(("culprit", "keep"), [(0, None), (1, None), (0, 2)])
def test_each_file_operation_may_fail(tmp_path: Path, culprit: int, keep: int | None) -> None:
    by_rank = run_ranks(fail_each_operation, 2, str(tmp_path), culprit, keep, timeout_s=TIMEOUT_S)
    texts = [[text for _, text in found] for found in by_rank]
    assert texts[0] == texts[1]
    operations = [name for name, _ in by_rank[culprit]]
    passed = [name for name, text in zip(operations, texts[0], strict=True) if not text]
    if culprit == 0:
        assert passed[:6] == ["free_bytes", *HINT]
        del passed[:6]
    assert set(passed) <= {""} | (READING if keep else set())
    assert {"create", "write", "sync", "close", "rename"} <= set(operations)
    reasons = "OSError: [Errno 5]", "OSError: [Errno 28]", "(Input/output error)"
    for text in filter(None, texts[0]):
        assert f"failed on rank {culprit}: " in text
        assert any(reason in text for reason in reasons)


EXIT_S = 10.0
"""Until a rank has ended after another rank of its host was killed during a save."""

# -- exit -------------------------------------------------------------------------------------------------------------

PROGRAM = """
import errno, os, signal, sys
import torch, zeroshard as zs
from zeroshard.checkpoint import files
folder, case = sys.argv[1:]
mesh = zs.init(seed=0, watchdog_s=20)
model = torch.nn.Linear(64, 64)
zero = zs.shard(model, torch.optim.AdamW(model.parameters()))
write = files.write
def refuse(descriptor, data):
    files.write = write
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
def die(descriptor, data):
    open(folder + ".died", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
if case == "failure" and mesh.rank == 1:
    files.write = refuse
if case == "kill" and mesh.rank == 1:
    files.write = die
zero.save(folder + "/step-1", asynchronous=True)
torch.distributed.destroy_process_group()
"""


def run_program(folder: Path, case: str) -> list[tuple[int, str]]:
    """Run the program on two ranks; return exit statuses and what they wrote to standard error."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = []
    for rank in range(2):
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-c", PROGRAM, str(folder), case]
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        errors = [rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, error) for rank, error in zip(ranks, errors, strict=True)]


def test_exit_waits_for_a_save(tmp_path: Path) -> None:
    assert [status for status, _ in run_program(tmp_path, "nothing")] == [0, 0]
    found = latest(tmp_path)
    assert found is not None
    assert found.name == "step-1"


@pytest.mark.rotates
def test_exit_reports_a_failure_on_every_rank(tmp_path: Path) -> None:
    for status, error in run_program(tmp_path, "failure"):
        assert status == 1
        assert f"The save of {tmp_path}/step-1: writing tensors failed on rank 1: OSError: [Errno 28]" in error
    assert visible(str(tmp_path)) == []


@pytest.mark.rotates
def test_exit_does_not_wait_for_the_dead(tmp_path: Path) -> None:
    (status, error), (killed, _) = run_program(tmp_path, "kill")
    assert (status, killed) == (1, -9)
    assert "receipt-00002 did not appear, and the process of rank 1 has ended" in error
    assert time.time() - os.stat(f"{tmp_path}.died").st_mtime < EXIT_S
    assert list(tmp_path.iterdir()) == []
