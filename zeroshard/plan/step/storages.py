"""The memory of a simulated rank: storages, and the pool of its buffers.

Owns events of memory. It must not know what the storages are for. Needs no torch.
"""

from collections import deque
from collections.abc import Iterable
from typing import final

from zeroshard.plan.step.clock import Clock
from zeroshard.plan.step.film import Event
from zeroshard.table.pool import Buffer, Buffers
from zeroshard.table.spec import itemsize

__all__ = ["Storages"]


@final
class Storages:
    """Storages by number.

    Args:
        keeps: `Wire.keeps_buffers`.
        is_mapped: whether pooled buffers are pages that the ranks of a host map together.
    """

    def __init__(self, clock: Clock, *, keeps: bool, is_mapped: bool) -> None:
        self._clock, self._keeps, self._is_mapped = clock, keeps, is_mapped
        self.events: list[Event] = []
        self.open: dict[int, Event] = {}
        """The first event of each storage that is there."""
        self._next = 0
        self._queued = 0
        self._late: deque[tuple[int, int]] = deque()
        """Storages that a collective used, with the number of kernels after whose queueing their memory is free."""
        self._buffers = Buffers()

    def make(
        self, nbytes: int, column: str, unit: str, what: str, *, is_mapped: bool = False, memory: str = "device"
    ) -> int:
        """Take memory, and return its number."""
        while self._late and self._late[0][0] <= self._queued:
            self.drop(self._late.popleft()[1])
        number, self._next = self._next, self._next + 1
        self._begin(Event(self._clock.now_s, nbytes, number, column, unit, what, is_mapped, memory))
        return number

    def _begin(self, event: Event) -> None:
        if event.nbytes:
            self.open[event.storage] = event
            self.events.append(event)

    def drop(self, number: int) -> None:
        """Give memory back; nothing for a storage without memory."""
        event = self.open.pop(number, None)
        if event is not None:
            self.events.append(Event(self._clock.now_s, -event.nbytes, *event[2:]))

    def drop_all(self, numbers: Iterable[int]) -> None:
        """Give the memory of several back."""
        for one in numbers:
            self.drop(one)

    def drop_late(self, number: int, kernels: int) -> None:
        """Give memory back when the host has queued so many kernels more, or waits for the device."""
        self._late.append((self._queued + kernels, number))

    def queue(self, kernels: int) -> None:
        """Note that the host queues kernels."""
        self._queued += kernels

    def synchronize(self) -> None:
        """Note that the device has made all that is queued."""
        while self._late:
            self.drop(self._late.popleft()[1])

    def pass_by(self, nbytes: int, column: str, unit: str, what: str) -> None:
        """Take memory, and give it back at once."""
        self.drop(self.make(nbytes, column, unit, what))

    def turn(self, number: int, column: str, unit: str, what: str) -> None:
        """Let a storage be something else from here on."""
        event = self.open.get(number)
        if event is not None:
            self.drop(number)
            self._begin(event._replace(at_s=self._clock.now_s, column=column, unit=unit, what=what))

    # -- pooled buffers ---------------------------------------------------------------------------------------------

    def take(self, numel: int, dtype: str, unit: str, what: str) -> Buffer:
        """Take a pooled buffer."""
        buffer, gone = self._buffers.take(numel, dtype) if self._keeps else (Buffer(numel, None), None)
        if gone is not None:
            self.drop(gone.memory)
        if buffer.memory is None:
            nbytes = numel * itemsize(dtype)
            buffer.memory = self.make(nbytes, "transient", unit, what, is_mapped=self._is_mapped)
        return buffer

    def give(self, buffers: Iterable[Buffer]) -> None:
        """Give buffers back: to the pool, or their memory where that came from autograd or the allocator."""
        for buffer in buffers:
            if buffer.kind is None:
                self.drop(buffer.memory)
            else:
                self._buffers.give(buffer)

    def stock(self, numel: int, dtype: str) -> None:
        """Put a buffer that an earlier step left into the pool."""
        memory = self.make(numel * itemsize(dtype), "transient", "", "pooled buffer", is_mapped=self._is_mapped)
        self._buffers.give(Buffer(numel, dtype, memory))

    def pooled(self) -> list[tuple[int, str]]:
        """Return elements and dtype of each buffer in the pool."""
        return [(one.numel, str(kind)) for kind, free in self._buffers.free.items() for one in free]
