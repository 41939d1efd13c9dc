"""Blocks of a segment, and pools of free blocks: splitting, merging and order.

Owns the chain of a segment's blocks and the order within a pool. It must not know sizes of segments, settings or the
device: `plan/machine/allocator.py` does, and documents torch's allocator.
"""

from bisect import bisect_left, insort
from typing import final

__all__ = ["Block", "Pool"]


@final
class Block:
    """A range of addresses of one segment. When blocks merge, the leftmost block remains."""

    __slots__ = ("address", "is_free", "next", "pool", "prev", "size")

    def __init__(self, address: int, size: int, pool: "Pool") -> None:
        self.address, self.size, self.pool, self.is_free = address, size, pool, True
        self.prev: Block | None = None
        self.next: Block | None = None

    @property
    def is_whole(self) -> bool:
        """Whether this block is the only block of its segment."""
        return self.prev is None and self.next is None

    def cut(self, size: int) -> "Block":
        """Keep `size` bytes; return the rest as a separate free block outside all pools."""
        rest = Block(self.address + size, self.size - size, self.pool)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next, self.size = rest, size
        return rest

    def absorb_next(self) -> None:
        """Merge the right neighbour into this block."""
        gone = self.next
        assert gone is not None
        self.size += gone.size
        self.next = gone.next
        if gone.next is not None:
            gone.next.prev = self


@final
class Pool:
    """Free blocks of one stream and size class by size, then address."""

    __slots__ = ("free", "is_small")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.free: list[tuple[int, int, Block]] = []

    def add(self, block: Block) -> None:
        """Add a free block without merging."""
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def join(self, block: Block) -> Block:
        """Merge a block that became free with free neighbours, then add it."""
        left, right = block.prev, block.next
        if left is not None and left.is_free:
            self.remove(left)
            left.absorb_next()
            block = left
        if right is not None and right.is_free:
            self.remove(right)
            block.absorb_next()
        self.add(block)
        return block
