"""A clock of an emulated bus that does not sleep, for tests and benchmarks.

Owns the clock. Read `zeroshard/store/bus.py` first.
"""

from collections.abc import Callable
from typing import final

from zeroshard.store.bus import Clock

__all__ = ["VirtualClock"]


@final
class VirtualClock(Clock):
    """A virtual time that waits advance without sleeping.

    Args:
        compute: returns the duration of the computation so far, to which waits are added.
    """

    def __init__(self, compute: Callable[[], float] = lambda: 0.0) -> None:
        self._compute = compute
        self.waited_s = 0.0

    def now(self) -> float:
        """Return the time."""
        return self._compute() + self.waited_s

    def wait_until(self, time_s: float) -> None:
        """Move on."""
        self.waited_s += max(0.0, time_s - self.now())
