"""Ranks that have not come yet: the others name them, and end by a signal at once, whatever waits."""

import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from tests.processes import is_running
from tools.settled import settled
from zeroshard.testing import RankFailure, run_ranks

END_S = 2.0
"""From a signal to the end of the process."""
HEARTBEAT_S = 0.5


def choose_store(port: int) -> None:
    """Have rank 0 keep the store at a port, as without torchrun; 0 leaves it to the launcher."""
    if port:
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        os.environ["MASTER_PORT"] = str(port)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_at_the_start(folder: str, port: int, place: str, number: int, late: int) -> float:
    """Wait for a rank that does not come, and get a signal; the late rank returns how long the others took to end."""
    rank, path = int(os.environ["RANK"]), Path(folder)
    choose_store(port)
    if place == "shard":
        zs.init()
    if rank == late:
        while len(told := list(path.glob("told-*"))) < int(os.environ["WORLD_SIZE"]) - 1:
            time.sleep(0.01)
        for one in told:
            process = int(one.read_text().split()[0])
            while is_running(process):
                time.sleep(0.01)
        return max(time.time() - float(one.read_text().split()[1]) for one in told)
    # A handler that only takes notice, as one for pre-emption does.
    signal.signal(number, lambda *_: None)

    def tell() -> None:
        time.sleep(0.5)
        (path / f"part-{rank}").write_text(f"{os.getpid()} {time.time()}")
        (path / f"part-{rank}").rename(path / f"told-{rank}")
        os.kill(os.getpid(), number)

    threading.Thread(target=tell, daemon=True).start()
    if place == "init":
        zs.init()
    else:
        zs.shard(torch.nn.Linear(4, 4))
    return 0.0


@pytest.mark.product
@pytest.mark.parametrize(
    ("place", "number", "late", "has_store"),
    [
        ("init", signal.SIGINT, 1, True),
        ("init", signal.SIGTERM, 0, False),
        ("init", signal.SIGINT, 1, False),
        ("shard", signal.SIGTERM, 1, True),
    ],
)
def test_a_signal_ends_a_rank_that_waits_for_a_late_one(
    tmp_path: Path, place: str, number: signal.Signals, late: int, has_store: bool
) -> None:
    port = 0 if has_store else free_port()
    # With more ranks, those that learn that rank 0, and the store with it, has ended may be faster than their signal.
    world = 3 if has_store or late == 0 else 2
    arguments = (str(tmp_path), port, place, int(number), late)
    with pytest.raises(RankFailure) as failure:
        run_ranks(wait_at_the_start, world, *arguments, process_group=False, timeout_s=60.0, grace_s=20.0)
    assert {rank: error.type_name for rank, error in failure.value.errors.items()} == {
        rank: number.name for rank in range(world) if rank != late
    }
    assert failure.value.results[late] <= END_S


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def name_the_late(port: int, late: int, place: str, comes: bool) -> tuple[list[str], str]:
    """Wait for a rank that comes late or never; return what is logged meanwhile, and the error."""
    rank, heard = int(os.environ["RANK"]), Heard()
    logging.getLogger("zeroshard").addHandler(heard)
    choose_store(port)
    options: dict[str, Any] = {"heartbeat_s": HEARTBEAT_S, "watchdog_s": 60.0 if comes else 1.5}
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    if place == "shard":
        zs.init()
    if rank == late:
        time.sleep(1.0 if comes else 3.0)
        if not comes:
            return [], ""
    try:
        zs.init(**options) if place == "init" else zs.shard(torch.nn.Linear(4, 4), **settled(options))
    except RuntimeError as error:
        return heard.texts, str(error)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    dist.barrier()
    return heard.texts, ""


def lose_the_store(port: int) -> str:
    """Wait for a rank that does not come while rank 0, which keeps the store, is killed."""
    rank = int(os.environ["RANK"])
    choose_store(port)
    if rank == 0:
        killer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL))
        killer.start()
    if rank == 2:
        time.sleep(1.5)
        return ""
    try:
        zs.init()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_the_end_of_rank_0_is_told_to_those_that_wait_with_it() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(lose_the_store, 3, free_port(), process_group=False, timeout_s=60.0, grace_s=20.0)
    assert failure.value.errors.keys() == {0}
    assert failure.value.results[1].startswith("[rank 1/3] The store of the process group does not answer any more")


@pytest.mark.product
@pytest.mark.parametrize(
    ("late", "place", "comes", "has_store"),
    [(2, "init", False, True), (0, "init", False, False), (1, "init", True, False), (1, "shard", False, True)],
)
def test_who_has_not_come_is_named(late: int, place: str, comes: bool, has_store: bool) -> None:
    port = 0 if has_store else free_port()
    results = run_ranks(name_the_late, 3, port, late, place, comes, process_group=False, timeout_s=60.0)
    for rank, (logged, error) in enumerate(results):
        if rank == late:
            continue
        named = f"[rank {rank}/3] rank {late} of 3 has not come to zs.{place}() for "
        assert logged and logged[0].startswith(named), logged
        assert len(logged) == 1, "said more than once"
        assert error == "" if comes else error.startswith(named) and "watchdog_s=1.5 seconds are over" in error
