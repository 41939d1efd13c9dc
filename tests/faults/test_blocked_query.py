"""A query of a device that blocks, as while the driver frees memory, is no silence: the rank's heartbeat goes on."""

import time

import torch.distributed as dist

from tests.oracle import TIMEOUT_S
from zeroshard.testing import run_ranks
from zeroshard.torch_groups import default_store
from zeroshard.watch.watchdog import Watchdog

HEARTBEAT_S, BLOCKED_S = 2.0, 6.0


def watch(rank_blocks: bool) -> tuple[str, str]:
    """Return the cause and the report, seen after a query of rank 0 has blocked for three heartbeats."""
    rank, ended_s = dist.get_rank(), time.monotonic() + BLOCKED_S

    def query() -> bool:
        if rank == 0 and rank_blocks:
            time.sleep(max(0.0, ended_s - time.monotonic()))
        return True

    watchdog = Watchdog(default_store(), rank, (0, 1), f"[rank {rank}/2]", 60.0, HEARTBEAT_S)
    watchdog.record = lambda: query
    watchdog.queues_behind("the gather of unit '3'")
    watchdog.mark()
    # Just before the query returns: rank 1 sees a rank that has been asking its device for long.
    time.sleep(BLOCKED_S - 0.5)
    found = watchdog.cause(is_closed=False), watchdog.report()
    dist.barrier()
    watchdog.close()
    return found


def test_nobody_is_blamed_for_a_query_that_blocks() -> None:
    for cause, report in run_ranks(watch, 2, True, timeout_s=TIMEOUT_S):
        assert cause == ""
        first, second = report.splitlines()
        assert "rank 0: waits for the gather of unit '3', behind which its device is queued" in first
        assert "rank 1: in user code since the gather of unit '3'" in second


def test_a_query_that_returns_leaves_nothing() -> None:
    for cause, report in run_ranks(watch, 2, False, timeout_s=TIMEOUT_S):
        assert cause == ""
        assert "queued" not in report
