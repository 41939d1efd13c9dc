"""A rank that ends too early, and is content: the others say that it ended while they needed it, and after what."""

import atexit
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

import zeroshard as zs
from zeroshard.testing import RankFailure, run_ranks

from .job import loss_of, make

WORLD = 3
PROMPT_S = 15.0
"""Half the limit of a wait: two seconds, and much more where the cores are busy with something else."""


def end_as_interpreters_do() -> NoReturn:
    """End this process with status 0 as a program's last line, or `sys.exit()`, does: a child would skip its exits."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(0)


def leave_early(folder: str, culprit: int, shared_memory: bool, port: int) -> str:
    """Train; one rank is done after two steps of four. Return how the others end. Runs on a rank."""
    if port:
        # Without a launcher: rank 0 holds the store.
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        os.environ["MASTER_PORT"] = str(port)
        dist.init_process_group("gloo")
    model, optimizer, zero = make(3, watchdog_s=30.0, shared_memory=shared_memory)
    rank = zero.mesh.rank
    os.dup2(os.open(f"{folder}/{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    for step in range(4):
        if step == 2 and rank == culprit:
            Path(folder, "ended").write_text(repr(time.time()))
            end_as_interpreters_do()
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return "nothing was raised"


@pytest.mark.product
@pytest.mark.parametrize(
    ("culprit", "shared_memory", "holds_store"),
    [(2, True, False), (1, False, False), (0, True, True), (0, False, True)],
)
def test_an_early_end_is_called_that(tmp_path: Path, culprit: int, shared_memory: bool, holds_store: bool) -> None:
    port = 0
    if holds_store:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
    with pytest.raises(RankFailure) as failure:
        run_ranks(
            leave_early,
            WORLD,
            str(tmp_path),
            culprit,
            shared_memory,
            port,
            process_group=not holds_store,
            timeout_s=40.0,
            grace_s=10.0,
        )
    seconds = time.time() - float((tmp_path / "ended").read_text())
    errors = failure.value.errors
    assert errors.pop(culprit).message == "the process ended with exit code 0 without a report"
    assert set(errors) == set(range(WORLD)) - {culprit}, failure.value
    for rank, error in errors.items():
        # The watchdog ends a rank that cannot be told by an exception in time, with the same words.
        assert error.type_name in (zs.RankMismatchError.__name__, "ProcessExit"), error
        said = (tmp_path / f"{rank}.err").read_text()
        assert f"rank {culprit}: it ended while others needed it; before that it was " in said, said
        assert "in user code since step 1 of optimizer 0" in said, said
        assert "killed" not in said
        assert "(unknown)" not in said
    assert seconds < PROMPT_S


def end_together(seconds: float) -> float:
    """Take a step; rank 1 ends some seconds after the others. Return how long each took. Runs on a rank."""
    model, optimizer, zero = make(2)
    loss_of(model, 0, zero.mesh.rank).backward()
    optimizer.step()
    begin_s = time.monotonic()
    if zero.mesh.rank == 1:
        time.sleep(seconds)
    threading._shutdown()
    atexit._run_exitfuncs()
    return time.monotonic() - begin_s


def test_a_rank_that_is_done_does_not_wait_for_those_that_do_not_need_it() -> None:
    first, second = run_ranks(end_together, 2, 8.0, timeout_s=40.0)
    assert first < 6.0 < second
