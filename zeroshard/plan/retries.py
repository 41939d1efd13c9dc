"""What the caching allocator of a full device does step by step, and what that costs.

Owns the count of retries by step, and their price. Must not know what a step is made of (`film.py`), nor how the
allocator works (`allocator.py`). Read `play_steps`.

Note: where retries come from
    A retry returns all free segments to the driver, so it also clears away a layout in which they did not fit together.
    A step that repeats the one before it asks for the same sizes in the same order. So a layout that served one step
    serves the next one as well, and retries end with the first steps, unless parts of a step that cannot share segments
    (streams, small and large blocks) take turns in filling the device.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

from zeroshard.plan.allocator import Allocator, Event, Rules
from zeroshard.plan.hardware import Device

__all__ = ["NO_RETRIES", "Retries", "play_steps"]


@final
@dataclass(frozen=True)
class Retries:
    """What became of a sequence of steps.

    Args:
        by_step: retries of each step; the last one is the step that was out of memory, where one was.
        is_served: whether all requests were served.
        steady_s: that the device waits in the last step because of its retries; 0 where it was out of memory.
    """

    by_step: tuple[int, ...] = ()
    is_served: bool = True
    steady_s: float = 0.0

    @property
    def steady(self) -> int:
        """Retries of a steady step: the last one; 0 where memory did not last until then."""
        return self.by_step[-1] if self.by_step and self.is_served else 0

    def __str__(self) -> str:
        until = sum(self.by_step) - self.steady
        if not self.is_served:
            return f"out of memory in step {len(self.by_step)} (retries: {until}): what is free lies in pieces"
        return f"retries: {until} in the first steps, {self.steady} in a steady step"


NO_RETRIES: Final = Retries()
"""Of a device with room for all that the allocator reserves."""


def play_steps(steps: Iterable[Iterable[Event]], rules: Rules, device: Device) -> Retries:
    """Run the allocator's calls of some steps, the last of which counts as a steady one.

    Raises:
        ValueError: an event allocates a key that is allocated, or frees or records one that is not.

    >>> from zeroshard.plan.allocator import Action, Event, Rules
    >>> from zeroshard.plan.hardware import DEVICES
    >>> from zeroshard.plan.retries import play_steps
    >>> step = [Event("a", 24 << 20), Event("a", 0, action=Action.FREE), Event("b", 30 << 20)]
    >>> str(play_steps([step], Rules(device_bytes=40 << 20), DEVICES["h100-80"]))
    'retries: 0 in the first steps, 1 in a steady step'
    """
    allocator = Allocator(rules)
    counts = list[int]()
    done = 0
    for step in steps:
        is_served = all(map(allocator.play, step))
        counts.append(allocator.retries - done)
        if not is_served:
            return Retries(tuple(counts), is_served=False)
        done = allocator.retries
    last = allocator.returned[done - counts[-1] :] if counts else ()
    waits_s = (device.retry_s(one.returned_segments + one.taken_segments, one.taken_bytes) for one in last)
    return Retries(tuple(counts), steady_s=sum(waits_s))
