"""Retries of the caching allocator on a full device, by step, and their cost.

Owns the count of retries by step, and their cost. It must not know the contents of a step (`film.py`) or the allocator
(`allocator.py`). Read `play_steps`.

Note: where retries come from
    A retry returns all free segments to the driver, and thereby removes a layout in which they did not fit together. A
    steady step requests the same sizes in the same order as the step before it, so a layout that served one step serves
    the next. Therefore retries end with the first steps, unless parts of a step that cannot share segments (streams,
    small and large blocks) alternately fill the device.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

from zeroshard.plan.machine.allocator import Allocator, Event
from zeroshard.plan.machine.hardware import Device

__all__ = ["NO_RETRIES", "Retries", "play_steps"]


@final
@dataclass(frozen=True)
class Retries:
    """The result of a sequence of steps.

    Args:
        by_step: number of retries of each step; the last step may have run out of memory.
        is_served: whether all requests were served.
        steady_s: seconds that the device waits for retries in the last step; 0 if it ran out of memory.
        reserved_bytes: bytes of all segments after the last step.
    """

    by_step: tuple[int, ...] = ()
    is_served: bool = True
    steady_s: float = 0.0
    reserved_bytes: int = 0

    @property
    def steady(self) -> int:
        """Retries of a steady step, which is the last step; 0 if memory ran out earlier."""
        return self.by_step[-1] if self.by_step and self.is_served else 0

    def __str__(self) -> str:
        until = sum(self.by_step) - self.steady
        if not self.is_served:
            return f"out of memory in step {len(self.by_step)} (retries: {until}): free memory is fragmented"
        return f"retries: {until} in the first steps, {self.steady} in a steady step"


NO_RETRIES: Final = Retries()
"""The retries of a device with enough memory for all reserved memory."""


def play_steps(steps: Iterable[Iterable[Event]], device_bytes: int, device: Device) -> Retries:
    """Simulate the allocator's calls in some steps; the last step counts as steady.

    Raises:
        ValueError: an event allocates a key that is already allocated, or frees an unallocated key.

    >>> from zeroshard.plan.machine.allocator import Action, Event
    >>> from zeroshard.plan.machine.presets import DEVICES
    >>> from zeroshard.plan.machine.retries import play_steps
    >>> step = [Event("a", 24 << 20), Event("a", 0, action=Action.FREE), Event("b", 30 << 20)]
    >>> str(play_steps([step], 40 << 20, DEVICES["h100-80"]))
    'retries: 0 in the first steps, 1 in a steady step'
    """
    allocator = Allocator(device_bytes)
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
    return Retries(tuple(counts), steady_s=sum(waits_s), reserved_bytes=allocator.reserved_bytes)
