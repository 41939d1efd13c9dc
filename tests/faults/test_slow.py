"""A rank that is slower than the others: it is named, once, and nothing else happens."""

import logging
import time

import pytest
import torch.distributed as dist

from zeroshard.testing import run_ranks
from zeroshard.watch import paces as warnings
from zeroshard.watch import watchdog

from .job import loss_of, make

WORLD = 3
OWN_S = 0.03
STEPS = 36
SLOW = 8.0
"""A machine that is busy with other tests makes steps longer by 50 ms: the slow rank stays slow beside that."""


def train_at_paces(factors: list[float], late: tuple[int, ...]) -> list[str]:
    """Train where each rank's own part of a step takes its factor; return what this rank warned of. Runs on a rank.

    Args:
        late: steps in which the last rank takes a second for something else, as one does that writes a file.
    """
    watchdog.PACE_S = 0.6
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(warnings.__name__).addHandler(handler)
    model, optimizer, _ = make(3)
    rank = dist.get_rank()
    for step in range(STEPS):
        time.sleep(OWN_S * factors[rank])
        if step in late and rank == WORLD - 1:
            time.sleep(1.0)
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return warned


@pytest.mark.product
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_whose_steps_take_long_is_named_once_by_rank_0(culprit: int) -> None:
    factors = [1.0, 1.0, 1.0]
    factors[culprit] = SLOW
    warned = run_ranks(train_at_paces, WORLD, factors, (), timeout_s=60.0)
    assert [len(lines) for lines in warned] == [1, 0, 0], warned
    assert warned[0][0].startswith(f"rank {culprit} is slow: its own part of a step takes 0.2")
    assert warned[0][0].endswith("and 2 rank(s) wait for it.")


@pytest.mark.rotates
def test_of_two_ranks_the_slower_one_is_named() -> None:
    warned = run_ranks(train_at_paces, 2, [1.0, SLOW], (), timeout_s=60.0)
    assert [line.split(":")[0] for line in warned[0]] == ["rank 1 is slow"], warned


@pytest.mark.rotates
def test_equal_ranks_and_what_one_does_now_and_then_are_not_named() -> None:
    assert run_ranks(train_at_paces, WORLD, [2.0, 2.0, 2.0], (20, 30), timeout_s=60.0) == [[], [], []]


@pytest.mark.parametrize(
    ("paces", "before", "slow"),
    [
        ([1.0, 1.0, 1.99, 1.0], set(), set()),
        ([1.0, 1.0, 2.0, 1.0], set(), {2}),
        ([3.0, 1.0, 2.0, 1.0], set(), {0, 2}),
        ([1.0, 1.0, 1.6, 1.0], {2}, {2}),
        ([1.0, 1.0, 1.4, 1.0], {2}, set()),
        # Three times the median, but nobody feels it: a step takes two seconds.
        ([0.01, 0.01, 0.03, 0.01], set(), set()),
        ([0.01, 0.01, 0.31, 0.01], set(), {2}),
    ],
)
def test_what_counts_as_slow(paces: list[float], before: set[int], slow: set[int]) -> None:
    assert warnings.slow_ranks(paces, frozenset(before), step_s=2.0) == slow
