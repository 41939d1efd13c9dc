"""The segments and blocks of a simulated allocator, as tests compare them."""

from collections.abc import Hashable
from dataclasses import dataclass

from zeroshard.plan.machine.allocator import Allocator

__all__ = ["Piece", "Segment", "segments_of"]


@dataclass(frozen=True)
class Piece:
    """A block: `offset` in bytes from the start of its segment, `key` of its allocation, None for a free one."""

    offset: int
    num_bytes: int
    is_free: bool
    key: Hashable


@dataclass(frozen=True)
class Segment:
    """A segment with its blocks by address."""

    address: int
    is_small: bool
    pieces: tuple[Piece, ...]

    @property
    def reserved_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


def segments_of(allocator: Allocator) -> list[Segment]:
    """Return all segments by address; a block that is neither live nor in a pool would leave a gap."""
    keys = {block: key for key, block in allocator._live.items() if block is not None}
    free = {block for pool in allocator._pools.values() for _, _, block in pool.free}
    found = []
    for head in sorted((one for one in (*keys, *free) if one.prev is None), key=lambda one: one.address):
        pieces, block = [], head
        while block is not None:
            assert block.is_free == (block in free) == (block not in keys)
            pieces.append(Piece(block.address - head.address, block.size, block.is_free, keys.get(block)))
            block = block.next
        found.append(Segment(head.address, head.pool.is_small, tuple(pieces)))
    return found
