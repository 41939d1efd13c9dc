"""Nested spans of one rank on one clock: the time of each, less that of what it called.

Owns the arithmetic and nothing of what is timed (`report/probe.py`) or shown (`report/profile.py`).

Note: rest
    What runs while no span is open is the program's: the model's forward and backward, the loss, the data. It is not
    called by anything that could be timed, so whoever sees a change of it says so (`rest`), or says afterwards what it
    was that ended just now (`was`). Every nanosecond between `start` and `stop` is so counted once.
"""

import time
from collections import Counter
from typing import NamedTuple, final

__all__ = [
    "BACKWARD",
    "CATEGORIES",
    "COPIES",
    "FORWARD",
    "HOOKS",
    "NO_UNIT",
    "OPTIMIZER",
    "OTHER",
    "SENDING",
    "Slice",
    "Timeline",
    "WAITING",
]

FORWARD, BACKWARD, WAITING, SENDING = "forward", "backward", "waiting", "sending"
COPIES, HOOKS, OPTIMIZER, OTHER = "copies", "hooks", "optimizer", "other"
CATEGORIES = (FORWARD, BACKWARD, WAITING, SENDING, COPIES, HOOKS, OPTIMIZER, OTHER)
NO_UNIT = "(no unit)"


class Slice(NamedTuple):
    """A span, or a stretch of rest: nanoseconds since the epoch, those of what it called included."""

    label: str
    category: str
    unit: str
    start_ns: int
    duration_ns: int


@final
class Timeline:
    """What one rank spent its time on, while it runs; it may be started and stopped again and again."""

    def __init__(self) -> None:
        self.spent_ns: Counter[tuple[str, str]] = Counter()
        """By category and unit, without what was called."""
        self.slices: list[Slice] = []
        self.is_running = False
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._open: list[tuple[str, str, str, int]] = []
        self._rest = OTHER, NO_UNIT
        self._rest_start_ns = self._last_ns = 0

    def start(self) -> None:
        """Begin to count."""
        self._rest, self.is_running = (OTHER, NO_UNIT), True
        self._rest_start_ns = self._last_ns = time.perf_counter_ns()

    def stop(self) -> None:
        """Count no more."""
        self._count()
        self._end_rest()
        self._open, self.is_running = [], False

    def begin(self, label: str, category: str, unit: str | None) -> None:
        """Open a span inside the open one; without a unit it has that of what it is in."""
        self._count()
        if not self._open:
            self._end_rest()
        self._open.append((label, category, self.unit if unit is None else unit, self._last_ns))

    def end(self) -> None:
        """Close the last span that was opened."""
        if not self._open:
            # Counting was stopped inside the span.
            return
        self._count()
        label, category, unit, start_ns = self._open.pop()
        self._add(label, category, unit, start_ns)
        self._rest_start_ns = self._last_ns

    def rest(self, category: str, unit: str) -> None:
        """Note what runs from now on while no span is open."""
        if not self._open:
            self._count()
            self._end_rest()
            self._rest_start_ns = self._last_ns
        self._rest = category, unit

    def was(self, category: str, unit: str) -> None:
        """Note what ran since the last event, if no span is open, and runs on."""
        self._rest = category, unit

    @property
    def unit(self) -> str:
        """The unit of the open span, or of the rest."""
        return self._open[-1][2] if self._open else self._rest[1]

    @property
    def resting(self) -> tuple[str, str]:
        """The category and the unit of what runs while no span is open."""
        return self._rest

    def _count(self) -> None:
        now_ns = time.perf_counter_ns()
        self.spent_ns[self._open[-1][1:3] if self._open else self._rest] += now_ns - self._last_ns
        self._last_ns = now_ns

    def _end_rest(self) -> None:
        if not self._open:
            self._add(self._rest[0], *self._rest, self._rest_start_ns)

    def _add(self, label: str, category: str, unit: str, start_ns: int) -> None:
        self.slices.append(Slice(label, category, unit, self._epoch_ns + start_ns, self._last_ns - start_ns))
