"""Which buffer serves a request: the pool of constant buffers (C_B in the paper), in integers.

Owns the choice alone, so that the engine's pool (`wire/pool.py`), which hangs memory on the buffers, and predictions,
which add up their sizes, cannot differ.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final

__all__ = ["Buffer", "Buffers", "choose_buffer"]


@final
@dataclass(eq=False, slots=True)
class Buffer:
    """One buffer. `memory` is whatever its user keeps of it."""

    numel: int
    kind: Hashable
    memory: Any = None


@final
class Buffers:
    """Buffers that are used again and again: units of about one size share those of the largest."""

    def __init__(self) -> None:
        self.free: dict[Hashable, list[Buffer]] = defaultdict(list)

    def take(self, numel: int, kind: Hashable) -> tuple[Buffer, Buffer | None]:
        """Return a buffer of at least `numel` elements, and one that it replaces, which nobody will use again."""
        free = self.free[kind]
        place, replaced = choose_buffer([buffer.numel for buffer in free], numel)
        gone = None if replaced is None else free.pop(replaced)
        return (Buffer(numel, kind) if place is None else free.pop(place)), gone

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back."""
        self.free[buffer.kind].append(buffer)


def choose_buffer(free: Sequence[int], numel: int) -> tuple[int | None, int | None]:
    """Choose a pooled buffer for `numel` elements.

    Args:
        free: elements of each buffer that nobody uses.

    Returns:
        The place of the one to use, the smallest that fits and is not more than twice as large; or None, and the place
        of the one that a new buffer replaces, the largest of those that are half as large at least, or None.
    """
    fits = [(size, place) for place, size in enumerate(free) if numel <= size <= 2 * numel]
    close = [(size, place) for place, size in enumerate(free) if size < numel <= 2 * size]
    return (min(fits)[1], None) if fits else (None, max(close)[1] if close else None)
