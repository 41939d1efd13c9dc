"""Nested spans of one rank on one clock: the time of each span without the spans inside it.

Owns the arithmetic. `report/probe.py` chooses the timed events, `report/profile.py` shows the result.

Note: rest
    The time without an open span belongs to the program: the model's forward and backward, the loss, the data. No timed
    function contains it. Therefore the probe reports each change in advance (`rest`), or the category of the time that
    just ended (`was`). Every nanosecond between `start` and `stop` is counted once.
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
    """A span, or an interval of rest: nanoseconds since the epoch, including inner spans."""

    label: str
    category: str
    unit: str
    start_ns: int
    duration_ns: int


@final
class Timeline:
    """The time of one rank by category and unit; `start` and `stop` may be called repeatedly."""

    def __init__(self) -> None:
        self.spent_ns: Counter[tuple[str, str]] = Counter()
        """By category and unit, without inner spans."""
        self.slices: list[Slice] = []
        self.is_running = False
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._open: list[tuple[str, str, str, int]] = []
        self._rest = OTHER, NO_UNIT
        self._rest_start_ns = self._last_ns = 0

    def start(self) -> None:
        """Start counting."""
        self._rest, self.is_running = (OTHER, NO_UNIT), True
        self._rest_start_ns = self._last_ns = time.perf_counter_ns()

    def stop(self) -> None:
        """Stop counting."""
        self._count()
        self._end_rest()
        self._open, self.is_running = [], False

    def begin(self, label: str, category: str, unit: str | None) -> None:
        """Open a span inside the open span; without a unit, it inherits the unit."""
        self._count()
        if not self._open:
            self._end_rest()
        self._open.append((label, category, self.unit if unit is None else unit, self._last_ns))

    def end(self) -> None:
        """Close the innermost open span."""
        if not self._open:
            # Counting stopped inside the span.
            return
        self._count()
        label, category, unit, start_ns = self._open.pop()
        self._add(label, category, unit, start_ns)
        self._rest_start_ns = self._last_ns

    def rest(self, category: str, unit: str) -> None:
        """Set the category of the time without an open span, from now on."""
        if not self._open:
            self._count()
            self._end_rest()
            self._rest_start_ns = self._last_ns
        self._rest = category, unit

    def was(self, category: str, unit: str) -> None:
        """Set the category of the time since the last event, if no span is open, and from now on."""
        self._rest = category, unit

    @property
    def unit(self) -> str:
        """The unit of the open span, or of the rest."""
        return self._open[-1][2] if self._open else self._rest[1]

    @property
    def resting(self) -> tuple[str, str]:
        """The category and the unit of the time without an open span."""
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
