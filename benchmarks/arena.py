"""Arenas: contiguous memory for long-lived tensors, which prevents fragmentation of other memory (ZeRO-R, M_D).

Owns the plan of an arena, which is an offset for each tensor of a step, and the effect of arenas on the allocations of
a run. It must not know the purpose of tensors, and holds no memory: only sizes and times. Read `plan_arena`, then
`replay`; `plan/machine/allocator.py` has the allocator.

Note: why arenas, and when not
    The caching allocator gives a tensor the best block that is free at that time. A long-lived tensor (a checkpointed
    input, a gradient, an optimizer state) then splits contiguous memory, among short-lived neighbours. Later, larger
    tensors find enough free memory, but not in one piece. Long-lived tensors are known before a step, so they can share
    one separate allocation, made first.
    An arena has a cost: other tensors cannot use its idle parts. Parameters and optimizer states are never idle.
    Gradients are idle during the forward, when activations peak. On the traces of benchmarks/fragments.py, most
    fragments come from short-lived tensors whose sizes change between steps, and arenas of long-lived tensors do not
    affect these. There, one segment for all other tensors, allocated at the start (`reserved_bytes` of `replay`),
    helps. Therefore a planner simulates the choices, and takes the one that reserves least.

Note: how a program would use one
    The arena is one flat tensor of bytes, allocated first. Each planned tensor is a view of the arena, at its offset,
    with its dtype and shape. Saved tensors are copied in (by a saved-tensors hook at the input of a checkpoint, which
    packs the view), and so are gradients (by a post-accumulate hook); the original lives only until the copy. The views
    are assigned by role: the input of block 3, the gradient of a parameter.
    The allocator serves a tensor that is larger than its place: the step is correct, and reserves more. A smaller
    tensor uses the front of its place. If later steps are generally larger, the program plans the arena again between
    steps, when it is empty: it frees the old arena before it allocates the new arena, so that other tensors can reuse
    the memory. A view may outlive its step (a user keeps a gradient); the program detects this by the reference count
    of its storage before it writes the place again, and then uses the allocator for that tensor.
    The segment for other tensors is an allocation that is freed at once. The allocator keeps and splits it.

Source: Rajbhandari et al. 2020, section 6.3 (memory defragmentation).
"""

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from zeroshard.plan.machine.allocator import Allocator, simulate
from zeroshard.plan.machine.rules import BLOCK_BYTES, Action, Event

__all__ = ["Arena", "Lifetime", "Replay", "needed_bytes", "peak_bytes", "place_events", "plan_arena", "replay"]

ROUNDS: Final = 8
"""Maximum number of improvements of an order of placement; stack-like lifetimes need none."""


@final
@dataclass(frozen=True)
class Lifetime:
    """A tensor's size and lifetime, in times of a step that repeats.

    Args:
        num_bytes: size in bytes.
        start: the time of the first write.
        stop: the time from which its place is free. At or before `start`, the tensor lives across the end of the step,
            to that time of the next step.
    """

    num_bytes: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.num_bytes < 0 or self.start < 0 or self.stop < 0:
            raise ValueError(f"Lifetime: bytes and times must not be negative, got {self}")

    def meets(self, other: "Lifetime") -> bool:
        """Return whether both lifetimes overlap."""
        if self.start < self.stop and other.start < other.stop:
            return self.start < other.stop and other.start < self.stop
        if self.start < self.stop:
            return self.stop > other.start or self.start < other.stop
        return True if other.start >= other.stop else other.meets(self)


@final
@dataclass(frozen=True)
class Arena:
    """A plan.

    Args:
        offsets: offset of each tensor in bytes, a multiple of the alignment.
        sizes: size of each tensor's place in bytes.
        total_bytes: size of the arena.
        least_bytes: maximum of the live bytes, in aligned sizes; a lower bound of any arena.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    total_bytes: int
    least_bytes: int

    @property
    def excess(self) -> float:
        """Return the relative excess of the arena over the lower bound."""
        return self.total_bytes / self.least_bytes - 1 if self.least_bytes else 0.0


def plan_arena(tensors: Sequence[Lifetime], align_bytes: int = BLOCK_BYTES) -> Arena:
    """Give each tensor of a step a place in one arena; tensors with overlapping lifetimes do not overlap in memory.

    For stack-like lifetimes (last in, first out), the arena is as large as the maximum of the live bytes. Otherwise
    several orders of placement are tried and the best is kept: by start, each at the lowest place; longest lifetime
    first, largest first, and largest product first, each at the tightest place. The best order is then improved by
    moving the topmost tensors forward in the order.

    Args:
        align_bytes: alignment of offsets and sizes.

    Raises:
        ValueError: `align_bytes` is not positive.

    >>> from benchmarks.arena import Lifetime, plan_arena
    >>> plan_arena([Lifetime(1000, 0, 9), Lifetime(500, 1, 4), Lifetime(300, 5, 8)])
    Arena(offsets=(0, 1024, 1024), sizes=(1024, 512, 512), total_bytes=1536, least_bytes=1536)
    """
    if align_bytes <= 0:
        raise ValueError(f"plan_arena: align_bytes must be positive, got {align_bytes}")
    sizes = tuple(-(-tensor.num_bytes // align_bytes) * align_bytes for tensor in tensors)
    least = peak_bytes(tensors, sizes)
    period = max((max(tensor.start, tensor.stop) for tensor in tensors), default=0) + 1
    lengths = [(tensor.stop - tensor.start - 1) % period + 1 for tensor in tensors]
    places = range(len(tensors))
    meets = [[other for other in places if other != one and tensors[one].meets(tensors[other])] for one in places]
    orders = [
        sorted(places, key=lambda i: (tensors[i].start < tensors[i].stop, tensors[i].start, -lengths[i])),
        sorted(places, key=lambda i: (-lengths[i], -sizes[i], tensors[i].start)),
        sorted(places, key=lambda i: (-sizes[i], -lengths[i], tensors[i].start)),
        sorted(places, key=lambda i: (-sizes[i] * lengths[i], tensors[i].start)),
    ]
    best: tuple[int, list[int], list[int]] | None = None
    for number, order in enumerate(orders):
        offsets = _place(order, sizes, meets, is_tightest=number > 0)
        total = _total(offsets, sizes)
        if best is None or total < best[0]:
            best = total, offsets, order
        if best[0] == least:
            break
    assert best is not None
    total, offsets, order = best
    tried = order
    for _ in range(ROUNDS):
        if total == least:
            break
        # The topmost tensors found all lower places occupied: they are placed first in the next round.
        reach = _total(attempt := _place(tried, sizes, meets, is_tightest=True), sizes)
        if reach < total:
            total, offsets = reach, attempt
        top = [i for i in tried if attempt[i] + sizes[i] > least]
        first = set(top)
        before, tried = tried, top + [i for i in tried if i not in first]
        if tried == before:
            break
    return Arena(tuple(offsets), sizes, total, least)


def peak_bytes(tensors: Sequence[Lifetime], sizes: Sequence[int] | None = None) -> int:
    """Return the maximum of the live bytes.

    Args:
        sizes: sizes to use instead of the tensors' sizes.
    """
    changes: list[tuple[int, int]] = []
    now = 0
    for tensor, size in zip(tensors, sizes or [tensor.num_bytes for tensor in tensors], strict=True):
        changes += [(tensor.start, size), (tensor.stop, -size)]
        now += size * (tensor.start >= tensor.stop)  # live from the previous step
    most = now
    for _, size in sorted(changes):  # at equal times, releases come first
        now += size
        most = max(most, now)
    return most


def _place(
    order: Sequence[int], sizes: Sequence[int], meets: Sequence[Sequence[int]], *, is_tightest: bool
) -> list[int]:
    """Return offsets: each tensor in turn gets the lowest gap in which it fits, or the tightest."""
    offsets = [-1] * len(sizes)
    for one in order:
        taken = sorted((offsets[other], offsets[other] + sizes[other]) for other in meets[one] if offsets[other] >= 0)
        found, slack, end = -1, 0, 0
        for start, stop in taken:
            gap = start - end - sizes[one]
            if gap >= 0 and (found < 0 or (is_tightest and gap < slack)):
                found, slack = end, gap
            end = max(end, stop)
        offsets[one] = end if found < 0 else found
    return offsets


def _total(offsets: Sequence[int], sizes: Sequence[int]) -> int:
    return max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0)


# -- a run with arenas ------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Replay:
    """The result of a run's allocations.

    Args:
        needed_bytes: `needed_bytes` of the run, without arenas.
        outcome: result of the simulation.
    """

    needed_bytes: int
    outcome: Allocator

    @property
    def excess(self) -> float:
        """Return peak reserved memory over peak needed memory, minus 1."""
        return self.outcome.peak_reserved_bytes / self.needed_bytes - 1 if self.needed_bytes else 0.0


def replay(
    events: Sequence[Event],
    arenas: Mapping[Hashable, Arena] | None = None,
    places: Mapping[Hashable, tuple[Hashable, int]] | None = None,
    device_bytes: int | None = None,
    copied: Mapping[Hashable, int] | None = None,
    reserved_bytes: int = 0,
) -> Replay:
    """Run a sequence of allocations through the simulated allocator, with some tensors in arenas.

    Args:
        arenas: arenas by name, allocated first.
        places: for the key of an allocation, the arena and the index of the tensor in its plan. The allocator serves
            allocations that are larger than their place, or whose place is occupied.
        copied: for the key of an allocation in an arena, the number of events after which the tensor is copied to the
            arena and freed; without an entry, the tensor is written to the arena directly.
        reserved_bytes: size of an allocation that is made after the arenas and freed at once: one segment for all
            unplanned tensors.
    """
    kept = list(place_events(events, arenas or {}, places or {}, copied or {}))
    first = [Event(("arena", name), arena.total_bytes) for name, arena in (arenas or {}).items()]
    if reserved_bytes:
        first += [Event(("reserve",), reserved_bytes), Event(("reserve",), 0, 0, Action.FREE)]
    return Replay(needed_bytes(events), simulate([*first, *kept], device_bytes))


def place_events(
    events: Sequence[Event],
    arenas: Mapping[Hashable, Arena],
    places: Mapping[Hashable, tuple[Hashable, int]],
    copied: Mapping[Hashable, int],
) -> Iterator[Event]:
    """Yield the allocator's events: those of tensors without a place, or whose place is occupied."""
    taken: dict[Hashable, list[tuple[int, int]]] = {name: [] for name in arenas}  # by arena, live ranges in order
    within: dict[Hashable, tuple[Hashable, tuple[int, int]]] = {}
    arriving: dict[int, list[Hashable]] = {}
    originals: set[Hashable] = set()  # not yet copied to their places

    def enter(key: Hashable) -> bool:
        """Occupy a tensor's place, if it is free."""
        name, index = places[key]
        arena, ranges = arenas[name], taken[name]
        wanted = arena.offsets[index], arena.offsets[index] + arena.sizes[index]
        at = bisect_left(ranges, wanted)
        if (at and ranges[at - 1][1] > wanted[0]) or (at < len(ranges) and ranges[at][0] < wanted[1]):
            return False
        ranges.insert(at, wanted)
        within[key] = name, wanted
        return True

    for number, event in enumerate(events):
        for key in arriving.pop(number, ()):
            if key in originals and enter(key):
                yield Event(key, 0, event.stream, Action.FREE)
            originals.discard(key)
        key = event.key
        if event.action is Action.ALLOC and key in places:
            name, index = places[key]
            if 0 < event.num_bytes <= arenas[name].sizes[index]:
                if key in copied:
                    originals.add(key)
                    arriving.setdefault(max(copied[key], number + 1), []).append(key)
                elif enter(key):
                    continue
        elif key in within:
            if event.action is Action.FREE:
                name, wanted = within.pop(key)
                del taken[name][bisect_left(taken[name], wanted)]
            continue
        elif event.action is Action.FREE:
            originals.discard(key)  # freed before the copy
        yield event


def needed_bytes(events: Iterable[Event]) -> int:
    """Return the maximum of a run's live bytes, in sizes rounded to 512 bytes."""
    sizes: dict[Hashable, int] = {}
    now = most = 0
    for key, num_bytes, _, action in events:
        if action is Action.ALLOC:
            sizes[key] = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
            now += sizes[key]
            most = max(most, now)
        elif action is Action.FREE:
            now -= sizes.pop(key)
    return most
