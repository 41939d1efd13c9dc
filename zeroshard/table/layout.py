"""The offset of each element of a unit in its bucket, and the rank that keeps it.

Integers only. Owns the arithmetic of buckets and shards. It imports no torch: the planner runs it for any world size on
any machine. Read `docs/design.md` ("Bucket") first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["ALIGN_BYTES", "Layout", "plan_layout"]

ALIGN_BYTES = 64
"""Parameters and shards start at multiples of this: one cache line, and the widest vector load."""


@dataclass(frozen=True)
class Layout:
    """One bucket: parameters in order, each at an aligned offset, cut into `world_size` shards of `shard_numel`.

    Rank r keeps elements `[r * shard_numel, (r + 1) * shard_numel)`. All numbers are elements, not bytes.
    """

    world_size: int
    itemsize: int
    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    shard_numel: int

    @property
    def full_numel(self) -> int:
        """Number of elements of the full bucket, including padding."""
        return self.shard_numel * self.world_size

    @property
    def numel(self) -> int:
        """Number of elements of the parameters, without padding."""
        return sum(self.numels)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the elements of the bucket that `rank` keeps, as (start, stop)."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def overlap(self, index: int, start: int, stop: int) -> tuple[int, int]:
        """Return the intersection of parameter `index` with `[start, stop)`, as (start, stop) in the bucket.

        An empty intersection is (start, start), clamped into the range, and safe for slicing.
        """
        first = min(max(self.offsets[index], start), stop)
        last = min(max(self.offsets[index] + self.numels[index], first), stop)
        return first, last

    def parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the intersection of each parameter with `[start, stop)`, as (start, stop) in that range."""
        return [(a - start, b - start) for a, b in (self.overlap(i, start, stop) for i in range(len(self.numels)))]

    def numels_by_rank(self, index: int) -> list[int]:
        """Return the number of elements of parameter `index` in each rank's shard."""
        cuts = (self.overlap(index, *self.shard_range(rank)) for rank in range(self.world_size))
        return [last - first for first, last in cuts]

    def shards_of(self, index: int) -> range:
        """Return the ranks whose shards have elements of parameter `index`."""
        offset, numel = self.offsets[index], self.numels[index]
        return range(offset // self.shard_numel, (offset + numel - 1) // self.shard_numel + 1) if numel else range(0)

    def owned_numel(self, start: int, stop: int) -> int:
        """Return the number of elements of `[start, stop)` that belong to parameters; the others are padding."""
        return sum(b - a for a, b in (self.overlap(i, start, stop) for i in range(len(self.numels))))


def plan_layout(numels: Sequence[int], itemsize: int, world_size: int, pieces: int = 1) -> Layout:
    """Lay parameters out in one bucket, in the given order; a boundary between ranks falls anywhere.

    Padding: less than `ALIGN_BYTES` behind each parameter, and less than `pieces` times that in each shard.

    Args:
        numels: elements of each parameter.
        itemsize: bytes of one element.
        world_size: number of shards.
        pieces: number of equal aligned pieces of a shard: one for each replica.
    """
    align = max(1, ALIGN_BYTES // itemsize)
    offsets = tuple(accumulate((_round_up(numel, align) for numel in numels), initial=0))
    shard = _round_up(-(-offsets[-1] // world_size), align * pieces)
    return Layout(world_size, itemsize, tuple(numels), offsets[:-1], shard)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
