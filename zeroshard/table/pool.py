"""The choice of a buffer for a request: the pool of constant buffers (C_B in the paper), in integers.

Owns the choice, which the engine's pool (`wire/buffers.py`) and predictions share, so that they cannot differ. The
engine attaches memory to the buffers; predictions add up their sizes.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final

__all__ = ["Buffer", "Buffers", "choose_buffer"]


@final
@dataclass(eq=False, slots=True)
class Buffer:
    """One buffer. `memory` belongs to the user of the pool."""

    numel: int
    kind: Hashable
    memory: Any = None


@final
class Buffers:
    """Reusable buffers; units of similar size share the buffers of the largest."""

    def __init__(self) -> None:
        self.free: dict[Hashable, list[Buffer]] = defaultdict(list)

    def take(self, numel: int, kind: Hashable) -> tuple[Buffer, Buffer | None]:
        """Return a buffer of at least `numel` elements, and the discarded buffer that it replaces, or None."""
        free = self.free[kind]
        place, replaced = choose_buffer([buffer.numel for buffer in free], numel)
        gone = None if replaced is None else free.pop(replaced)
        return (Buffer(numel, kind) if place is None else free.pop(place)), gone

    def give(self, buffer: Buffer) -> None:
        """Return a buffer to the pool."""
        self.free[buffer.kind].append(buffer)


def choose_buffer(free: Sequence[int], numel: int) -> tuple[int | None, int | None]:
    """Choose a pooled buffer for `numel` elements.

    Args:
        free: number of elements of each free buffer.

    Returns: (index of the buffer to use, index of the buffer that a new one replaces); either may be None. The buffer
        to use is the smallest that fits and is at most twice as large. The replaced buffer is the largest that is at
        least half as large.
    """
    fits = [(size, place) for place, size in enumerate(free) if numel <= size <= 2 * numel]
    close = [(size, place) for place, size in enumerate(free) if size < numel <= 2 * size]
    return (min(fits)[1], None) if fits else (None, max(close)[1] if close else None)
