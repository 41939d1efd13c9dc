"""A process that gives no sign of life, whether its connections stay open or not: the others name it and end."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tools.emulated import gpu
from zeroshard.testing import RankFailure, run_ranks

from .job import loss_of, make

HEARTBEAT_S = 2.0
KILLED_S = 3.0
"""Until a killed rank is named: the time that it had to tell a cause, a beat, and what two busy cores take."""
WORLD = 3


def hold_the_lock(seconds: float) -> None:
    """Keep every other thread of this process from running."""
    import ctypes

    # PyDLL, unlike CDLL, calls without releasing the interpreter's lock.
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def train_until(folder: str, fault: str, culprit: int, device: str = "cpu") -> None:
    """Train; one rank falls silent in its third step. What ranks print goes to files. Runs on a rank.

    Args:
        device: "gpu" is an emulated one: it hangs in its stream, where no wait of the host fails.
    """
    with gpu() if device == "gpu" else contextlib.nullcontext():
        train_there(folder, fault, culprit)


def train_there(folder: str, fault: str, culprit: int) -> None:
    rank = dist.get_rank()
    os.dup2(os.open(f"{folder}/{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    model, optimizer, _ = make(3, watchdog_s=40.0, heartbeat_s=HEARTBEAT_S)
    for step in range(6):
        loss = loss_of(model, step, rank)
        if step == 3 and rank == culprit:
            Path(folder, "silent").write_text(repr(time.time()))
            if fault == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "locked":
                hold_the_lock(30.0)
            else:
                time.sleep(2 * HEARTBEAT_S)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.product
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("fault", ["stopped", "locked"])
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_silent_rank_is_named_within_its_heartbeat(tmp_path: Path, fault: str, culprit: int, device: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(train_until, WORLD, str(tmp_path), fault, culprit, device, timeout_s=30.0, grace_s=1.0)
    began = float((tmp_path / "silent").read_text())
    for rank in range(WORLD):
        error = failure.value.errors[rank]
        if rank == culprit:
            assert error.type_name == "TimeoutError", error
            continue
        assert error.message == "the process ended with exit code 1 without a report", error
        said = tmp_path / f"{rank}.err"
        assert f"rank {culprit}: no sign of life for {HEARTBEAT_S:g} s" in said.read_text()
        assert said.stat().st_mtime - began <= HEARTBEAT_S + 1.0


@pytest.mark.product
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_killed_rank_is_named_by_all_others(tmp_path: Path, culprit: int, device: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(train_until, WORLD, str(tmp_path), "killed", culprit, device, timeout_s=30.0, grace_s=KILLED_S)
    began, errors = float((tmp_path / "silent").read_text()), failure.value.errors
    assert errors.pop(culprit).type_name == "SIGKILL"
    assert len(errors) == WORLD - 1
    for rank, error in errors.items():
        assert error.type_name in ("RankMismatchError", "ProcessExit"), error
        said = tmp_path / f"{rank}.err"
        end = "its process exited without reporting an error (a signal, a crash, os._exit)"
        cause = f"rank {culprit}: {end}; it was last seen"
        assert cause in said.read_text()
        assert said.stat().st_mtime - began <= KILLED_S


@pytest.mark.product
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_rank_that_is_busy_is_left_alone(tmp_path: Path, device: str) -> None:
    assert run_ranks(train_until, WORLD, str(tmp_path), "busy", 1, device, timeout_s=30.0) == [None] * WORLD
