"""Arenas: one contiguous piece of memory for tensors that live long, so that they do not cut up the rest (ZeRO-R, M_D).

Owns the plan of an arena, which is an offset for each tensor of a step, and what a run's allocations come to with the
planned tensors in arenas. It must not know what a tensor is, nor hold memory: sizes and moments only. Read
`plan_arena`, then `replay`; `plan/allocator.py` has the allocator.

Note: why arenas, and when not
    The caching allocator gives a tensor the best block that is free at that moment. A tensor that stays (a checkpointed
    input, a gradient, an optimizer state) then lies in the middle of memory that was whole, among neighbours that go.
    Later and larger tensors find enough memory free and none in one piece. Tensors that stay are known before a step
    begins, so they can get one allocation of their own, made before anything else.
    An arena has a price: what is idle in it serves nobody else. Parameters and optimizer states are never idle.
    Gradients are, during the forward, which is when activations are at their peak; and on the traces of
    benchmarks/fragments.py most fragments come from tensors that go, of sizes that change from step to step, which no
    arena of long-lived tensors touches. There one segment for all the rest, made at the beginning (`reserved_bytes` of
    `replay`), is what helps. So a planner simulates the choices, and takes the one that reserves least.

Note: how a program would use one
    The arena is one flat tensor of bytes, allocated first. Each planned tensor is a view of it, at its offset, with its
    own dtype and shape. What autograd saves is copied in (a saved-tensors hook at the input of a checkpoint, which
    packs the view), and a gradient where it lands (a post-accumulate hook), so the tensor that the kernel made lives
    only until the copy is made. The views are handed out by role: block 3's input, the gradient of a parameter.
    A tensor that is larger than its place is left to the allocator: the step is right, and reserves more. A smaller one
    takes the front of its place. Where a later step is larger as a rule, the arena is planned anew between steps, when
    nothing lives in it: the old one is freed before the new one is allocated, so that it can be reused for what is not
    planned. A view that outlives its step (a user keeps a gradient) must be found by its storage's reference count
    before its place is written again: then that tensor goes to the allocator as well.
    The segment for the rest is an allocation that is freed at once. The allocator keeps it, and cuts it up.

Source: Rajbhandari et al. 2020, section 6.3 (memory defragmentation).
"""

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from zeroshard.plan.allocator import Outcome, simulate
from zeroshard.plan.rules import BLOCK_BYTES, Action, Event, Rules

__all__ = ["Arena", "Lifetime", "Replay", "needed_bytes", "peak_bytes", "place_events", "plan_arena", "replay"]

ROUNDS: Final = 8
"""How often an order of placing is improved; a plan of stack-like lifetimes needs none."""


@final
@dataclass(frozen=True)
class Lifetime:
    """A tensor and when it is there, in moments of a step that repeats.

    Args:
        num_bytes: its size.
        start: the moment that it is written.
        stop: the moment from which on its place is free. At or before `start`, it lives over the end of the step to
            that moment of the next one.
    """

    num_bytes: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.num_bytes < 0 or self.start < 0 or self.stop < 0:
            raise ValueError(f"Lifetime: bytes and moments must not be negative, got {self}")

    def meets(self, other: "Lifetime") -> bool:
        """Return whether both are there at some moment."""
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
        offsets: in bytes, of each tensor, multiples of the alignment.
        sizes: in bytes, of each tensor's place.
        total_bytes: of the arena.
        least_bytes: the most that is alive at a moment, in aligned sizes; no arena can be smaller.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    total_bytes: int
    least_bytes: int

    @property
    def excess(self) -> float:
        """Return by which share the arena is larger than what any arena needs."""
        return self.total_bytes / self.least_bytes - 1 if self.least_bytes else 0.0


def plan_arena(tensors: Sequence[Lifetime], align_bytes: int = BLOCK_BYTES) -> Arena:
    """Give each tensor of a step a place in one arena; tensors that are there at one moment do not overlap.

    The arena is as large as the most that is alive where lifetimes are like a stack (the last to come is the first to
    go). Elsewhere several orders of placing are tried, and the best is kept: as they come, each at the lowest place;
    longest lives first, largest first, and largest product first, each at the tightest place. The best order is then
    improved by placing earlier what ended up at the top.

    Args:
        align_bytes: offsets and sizes are multiples of it.

    Raises:
        ValueError: `align_bytes` is not positive.

    >>> from zeroshard.plan.arena import Lifetime, plan_arena
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
        # What is at the top found all lower places taken: it goes first in the next round.
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
    """Return the most bytes that are there at one moment.

    Args:
        sizes: in place of the tensors' own.
    """
    changes: list[tuple[int, int]] = []
    now = 0
    for tensor, size in zip(tensors, sizes or [tensor.num_bytes for tensor in tensors], strict=True):
        changes += [(tensor.start, size), (tensor.stop, -size)]
        now += size * (tensor.start >= tensor.stop)  # from the step before
    most = now
    for _, size in sorted(changes):  # at one moment, what goes goes first
        now += size
        most = max(most, now)
    return most


def _place(
    order: Sequence[int], sizes: Sequence[int], meets: Sequence[Sequence[int]], *, is_tightest: bool
) -> list[int]:
    """Return offsets: each tensor in turn gets the lowest gap that it fits in, or the tightest."""
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
    """What a run's allocations come to.

    Args:
        needed_bytes: `needed_bytes` of the run, without any arena.
        outcome: of the simulation.
    """

    needed_bytes: int
    outcome: Outcome

    @property
    def excess(self) -> float:
        """Return reserved over needed memory, both at their peaks, less 1."""
        return self.outcome.peak_reserved_bytes / self.needed_bytes - 1 if self.needed_bytes else 0.0


def replay(
    events: Sequence[Event],
    arenas: Mapping[Hashable, Arena] | None = None,
    places: Mapping[Hashable, tuple[Hashable, int]] | None = None,
    rules: Rules | None = None,
    copied: Mapping[Hashable, int] | None = None,
    reserved_bytes: int = 0,
) -> Replay:
    """Run a sequence of allocations through the simulated allocator, with some of them in arenas.

    Args:
        arenas: allocated before everything else, by name.
        places: for the key of an allocation, the arena and the number of the tensor in its plan. An allocation that is
            larger than that place, or finds something there, is left to the allocator.
        copied: for the key of an allocation in an arena, the number of events after which it was copied there, and the
            tensor itself dropped; without an entry, the tensor is written to the arena directly.
        reserved_bytes: allocated and freed at once after the arenas: one segment for all that is not planned.
    """
    kept = list(place_events(events, arenas or {}, places or {}, copied or {}))
    first = [Event(("arena", name), arena.total_bytes) for name, arena in (arenas or {}).items()]
    if reserved_bytes:
        first += [Event(("reserve",), reserved_bytes), Event(("reserve",), 0, 0, Action.FREE)]
    return Replay(needed_bytes(events), simulate([*first, *kept], rules))


def place_events(
    events: Sequence[Event],
    arenas: Mapping[Hashable, Arena],
    places: Mapping[Hashable, tuple[Hashable, int]],
    copied: Mapping[Hashable, int],
) -> Iterator[Event]:
    """Yield the events that are left to the allocator: those of tensors that have no place, or whose place is taken."""
    taken: dict[Hashable, list[tuple[int, int]]] = {name: [] for name in arenas}  # by arena, live ranges in order
    within: dict[Hashable, tuple[Hashable, tuple[int, int]]] = {}
    arriving: dict[int, list[Hashable]] = {}
    originals: set[Hashable] = set()  # what is not copied to its place yet

    def enter(key: Hashable) -> bool:
        """Take a tensor's place, if nothing is there."""
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
        elif event.action is not Action.DONE and key in within:
            if event.action is Action.FREE:
                name, wanted = within.pop(key)
                del taken[name][bisect_left(taken[name], wanted)]
            continue
        elif event.action is Action.FREE:
            originals.discard(key)  # it went before it was copied
        yield event


def needed_bytes(events: Iterable[Event]) -> int:
    """Return the most that a run has alive at a moment, in sizes rounded to 512 bytes."""
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
