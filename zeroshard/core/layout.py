"""Where each element of a unit lies in its bucket, and which rank keeps it. Integers only.

Owns the arithmetic of buckets and shards, and nothing else: it imports no torch, so that the planner can run it for any
world size on any machine. Read `docs/design.md` ("Bucket") first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ALIGN_BYTES", "CUTS", "Layout", "choose_buffer", "plan_layout"]

ALIGN_BYTES = 64
"""Parameters and shards start at multiples of this: one cache line, and the widest vector load."""

CUTS = ("element", "row", "tensor")
"""Where the boundary between two ranks may fall: anywhere, between rows (first dimension), or between parameters."""


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
        """Elements of the whole bucket, padding included."""
        return self.shard_numel * self.world_size

    @property
    def numel(self) -> int:
        """Elements of the parameters alone."""
        return sum(self.numels)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the elements of the bucket that `rank` keeps, as (start, stop)."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def overlap(self, index: int, start: int, stop: int) -> tuple[int, int]:
        """Return the part of parameter `index` that lies in `[start, stop)` of the bucket, as (start, stop) in the
        bucket.

        The part may be empty; it is then (start, start) clamped into the range, so that slicing with it is safe.
        """
        first = min(max(self.offsets[index], start), stop)
        last = min(max(self.offsets[index] + self.numels[index], first), stop)
        return first, last

    def owned_numel(self, start: int, stop: int) -> int:
        """Return how many elements of `[start, stop)` belong to parameters; the rest is padding."""
        return sum(b - a for a, b in (self.overlap(i, start, stop) for i in range(len(self.numels))))


def plan_layout(
    numels: tuple[int, ...],
    itemsize: int,
    world_size: int,
    row_numels: tuple[int, ...] = (),
    cut: str = "element",
    pieces: int = 1,
) -> Layout:
    """Lay parameters out in one bucket, in the given order, with as little padding as the cut allows.

    Args:
        numels: elements of each parameter.
        itemsize: bytes of one element.
        world_size: number of shards.
        row_numels: elements of one row of each parameter; read only when `cut="row"`.
        cut: one of `CUTS`.
        pieces: equal aligned pieces that a shard must fall into: one for each replica of it.

    Raises:
        ValueError: an unknown cut.
    """
    if cut not in CUTS:
        raise ValueError(f"cut must be one of {', '.join(CUTS)}; got {cut!r}.")
    align = max(1, ALIGN_BYTES // itemsize)
    granules = {"element": (1,) * len(numels), "row": row_numels, "tensor": numels}[cut]
    packed = sum(_round_up(n, align) for n in numels)
    step = align * pieces
    shard = _round_up(-(-packed // world_size), step)
    while (offsets := _place(numels, granules, align, shard, world_size)) is None:
        # Every step tries about half a percent more padding; a shard that holds everything always succeeds.
        shard += _round_up(max(1, shard // 256), step)
    return Layout(world_size, itemsize, numels, offsets, shard)


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


def _place(
    numels: tuple[int, ...], granules: tuple[int, ...], align: int, shard: int, world_size: int
) -> tuple[int, ...] | None:
    """Return aligned offsets for which every rank boundary falls between granules; None where `shard` is too small."""
    end, offsets = 0, []
    for numel, granule in zip(numels, granules, strict=True):
        start = end
        while not _is_cut_between(start, numel, max(1, granule), shard):
            if start % shard == 0 and start > end:
                return None
            start += align
        offsets.append(start)
        end = _round_up(start + numel, align)
    return tuple(offsets) if end <= shard * world_size else None


def _is_cut_between(start: int, numel: int, granule: int, shard: int) -> bool:
    """Tell whether all rank boundaries inside `[start, start + numel)` fall between granules."""
    first = (start // shard + 1) * shard if shard else start + numel
    if granule == 1 or first >= start + numel:
        return True
    has_several = first + shard < start + numel
    return (first - start) % granule == 0 and (not has_several or shard % granule == 0)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
