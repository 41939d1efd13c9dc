"""What rank 0 warns of while training goes on: ranks that are slow, and waits that are long.

Owns the comparison and the texts. It must not know how ranks publish: the watchdog passes their pages.

Note: slow ranks
    A step takes the same time on all ranks, because they wait for the slowest. The pace of a rank is the time that it
    did not wait. The median over the last steps excludes occasional work of one rank, such as writing a file. The lower
    median over ranks identifies the slower of two ranks. A slow device is not detected, because waits of devices take
    no time on the host.
Note: long waits
    A rank that waits for another one, which waits for something else, is not wrong before `watchdog_s`: the other one
    may be compiling, or writing a file. So what each rank does is told early, once for each such wait.
"""

import logging
import statistics
from collections.abc import Callable, Sequence
from typing import Final, final

from zeroshard.watch.pages import numbers_of

__all__ = ["Warnings", "slow_ranks"]

SLOW: Final = 2.0
EASED: Final = 1.5
"""A rank becomes slow above the first multiple of the median, and stops being slow below the second."""
FELT: Final = 0.1
"""Minimum fraction of a step that the others wait for a slow rank, for a warning."""


@final
class Warnings:
    """Warns once of each rank that became slow, and of each wait that is long.

    Args:
        numbers: the number of each rank in the process group.
        heartbeat_s: seconds after which a wait is long.
        limit_s: seconds after which it ends, for the text.
    """

    def __init__(self, numbers: Sequence[int], heartbeat_s: float, limit_s: float) -> None:
        self._numbers, self._heartbeat_s, self._limit_s = numbers, heartbeat_s, limit_s
        self._slow, self._waits_long = frozenset[int](), False

    def look(self, pages: Sequence[str], step_s: float, report: Callable[[], str]) -> None:
        """Warn of what is new.

        Args:
            pages: the page of each rank, empty before its first one.
            step_s: seconds of a step.
            report: returns what each rank does.
        """
        told = [numbers_of(page) for page in pages if page]
        if len(told) < len(pages):
            return
        if all(numbers[3] for numbers in told):
            self._compare([float(numbers[3]) for numbers in told], step_s)
        waits = [float(numbers[2]) for numbers in told]
        longest_s, before = max(waits), self._waits_long
        self._waits_long = longest_s > self._heartbeat_s
        if self._waits_long and not before:
            logging.getLogger(__name__).warning(
                f"rank {self._numbers[waits.index(longest_s)]} has waited for {longest_s:.0f} s, of "
                f"watchdog_s={self._limit_s:g}. What each rank does:\n{report()}"
            )

    def _compare(self, paces: list[float], step_s: float) -> None:
        median_s, slow = statistics.median_low(paces), slow_ranks(paces, self._slow, step_s)
        for rank in sorted(slow - self._slow):
            logging.getLogger(__name__).warning(
                f"rank {self._numbers[rank]} is slow: its own part of a step takes {paces[rank]:.3g} s, that of the "
                f"median rank {median_s:.3g} s, and {len(paces) - 1} rank(s) wait for it."
            )
        self._slow = slow


def slow_ranks(paces: Sequence[float], before: frozenset[int], step_s: float) -> frozenset[int]:
    """Return the ranks that are slow.

    Args:
        paces: by rank, the seconds of a step in which it does not wait.
        before: the ranks that were slow.
        step_s: seconds of a step.
    """
    median_s = statistics.median_low(paces)
    slow = {rank for rank, own_s in enumerate(paces) if own_s >= (EASED if rank in before else SLOW) * median_s}
    return frozenset(rank for rank in slow if paces[rank] - median_s >= FELT * step_s)
