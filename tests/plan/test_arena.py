"""Arenas: nothing overlaps, a stack is planned exactly, and a run with arenas allocates what is left."""

import random
from itertools import permutations

import pytest

from benchmarks.arena import Arena, Lifetime, peak_bytes, place_events, plan_arena, replay
from tests.plan.segments import segments_of
from zeroshard.plan.machine.allocator import Action, Event

MIB = 2**20
ALIGN = 512


def moments(tensor: Lifetime, period: int) -> set[int]:
    """Return when a tensor is there."""
    if tensor.start < tensor.stop:
        return set(range(tensor.start, tensor.stop))
    return {*range(tensor.start, period), *range(tensor.stop)}


def check(tensors: list[Lifetime], arena: Arena) -> None:
    """Compare all pairs at all moments; and the bound with a sum at each moment."""
    period = max(max(t.start, t.stop) for t in tensors) + 1
    there = [moments(tensor, period) for tensor in tensors]
    ends = [offset + size for offset, size in zip(arena.offsets, arena.sizes, strict=True)]
    for one, tensor in enumerate(tensors):
        assert arena.offsets[one] % ALIGN == 0
        assert tensor.num_bytes <= arena.sizes[one] < tensor.num_bytes + ALIGN
        for other in range(one):
            if there[one] & there[other] and arena.sizes[one] and arena.sizes[other]:
                assert ends[one] <= arena.offsets[other] or ends[other] <= arena.offsets[one], (one, other)
    assert arena.total_bytes == max(ends)
    live = [sum(size for size, when in zip(arena.sizes, there, strict=True) if at in when) for at in range(period)]
    assert arena.least_bytes == max(live) <= arena.total_bytes


def draw(r: random.Random, number: int, *, wraps: bool) -> list[Lifetime]:
    tensors = []
    while len(tensors) < number:
        start, stop = r.randrange(30), r.randrange(31)
        if start < stop or (wraps and start > stop):
            tensors.append(Lifetime(r.choice([r.randrange(4000), 512 * r.randrange(1, 40)]), start, stop))
    return tensors


def nested(r: random.Random, depth: int) -> list[Lifetime]:
    """Return lifetimes of a random sequence of pushes and pops."""
    tensors, stack = [], []
    for moment in range(depth):
        if stack and r.random() < 0.45:
            start, size = stack.pop()
            tensors.append(Lifetime(size, start, moment))
        else:
            stack.append((moment, r.randrange(1, 100_000)))
    tensors += [Lifetime(size, start, depth) for start, size in stack]
    r.shuffle(tensors)
    return tensors


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("number", range(25))
def test_tensors_of_one_moment_do_not_overlap(number: int, wraps: bool) -> None:
    r = random.Random(number)
    tensors = draw(r, r.randrange(1, 40), wraps=wraps)
    arena = plan_arena(tensors)
    check(tensors, arena)
    assert plan_arena(tensors) == arena


@pytest.mark.parametrize("number", range(15))
def test_a_stack_is_planned_exactly(number: int) -> None:
    tensors = nested(random.Random(number), 120)
    arena = plan_arena(tensors)
    check(tensors, arena)
    assert arena.total_bytes == arena.least_bytes


def test_checkpoints_and_gradients_of_a_step_share_an_arena() -> None:
    # Inputs of 12 blocks, and as the backward passes them, two gradients a block, which stay to the end of the step.
    blocks, size = 12, 1000 * ALIGN
    inputs = [Lifetime(size, block, 2 * blocks - block) for block in range(blocks)]
    gradients = [
        Lifetime(part * ALIGN, 2 * blocks - block, 2 * blocks + 1) for block in range(blocks) for part in (150, 350)
    ]
    arena = plan_arena([*inputs, *gradients])
    check([*inputs, *gradients], arena)
    assert arena.excess <= 0.02


def test_few_tensors_are_planned_nearly_as_well_as_can_be() -> None:
    exact, worst = 0, 1.0
    for number in range(40):
        tensors = draw(random.Random(number), 5, wraps=number % 2 == 1)
        sizes = plan_arena(tensors).sizes
        # Some order of placing each at the lowest gap gives the smallest arena there is.
        best = min(lowest(tensors, sizes, order) for order in permutations(range(5)))
        ratio = plan_arena(tensors).total_bytes / best
        exact, worst = exact + (ratio == 1), max(worst, ratio)
    assert exact >= 39
    assert worst < 1.2


def lowest(tensors: list[Lifetime], sizes: tuple[int, ...], order: tuple[int, ...]) -> int:
    period = max(max(t.start, t.stop) for t in tensors) + 1
    there = [moments(tensor, period) for tensor in tensors]
    placed: dict[int, int] = {}
    for one in order:
        others = [(placed[other], placed[other] + sizes[other]) for other in placed if there[one] & there[other]]
        starts = sorted({0, *(stop for _, stop in others)})
        placed[one] = next(at for at in starts if all(at + sizes[one] <= start or stop <= at for start, stop in others))
    return max(placed[one] + sizes[one] for one in order)


def test_many_tensors_are_planned_within_an_eighth() -> None:
    excess = sorted(plan_arena(draw(random.Random(n), 60, wraps=n % 2 == 1)).excess for n in range(20))
    assert excess[10] <= 0.05
    assert excess[-1] <= 0.125


def test_a_known_plan() -> None:
    tensors = [Lifetime(1000, 0, 9), Lifetime(500, 1, 4), Lifetime(300, 5, 8)]
    assert plan_arena(tensors) == Arena((0, 1024, 1024), (1024, 512, 512), 1536, 1536)
    assert plan_arena(tensors, 4096).total_bytes == 8192
    assert plan_arena([]) == Arena((), (), 0, 0)
    assert peak_bytes(tensors) == 1500


def test_what_ends_makes_room_for_what_begins_at_that_moment() -> None:
    assert plan_arena([Lifetime(512, 0, 3), Lifetime(512, 3, 5)]).total_bytes == 512
    assert plan_arena([Lifetime(512, 0, 4), Lifetime(512, 3, 5)]).total_bytes == 1024


def test_a_tensor_may_live_into_the_next_step() -> None:
    # From 8 over the end of the step to 2.
    over = Lifetime(512, 8, 2)
    assert not over.meets(Lifetime(512, 2, 8))
    assert not Lifetime(512, 2, 8).meets(over)
    for other in (Lifetime(512, 1, 3), Lifetime(512, 7, 9), Lifetime(512, 9, 1), Lifetime(512, 0, 10)):
        assert over.meets(other)
        assert other.meets(over)


@pytest.mark.parametrize("wrong", [(-1, 0, 1), (1, -1, 1), (1, 0, -1)])
def test_what_cannot_be_a_lifetime(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        Lifetime(*wrong)
    with pytest.raises(ValueError, match="align_bytes must be positive, got 0"):
        plan_arena([], 0)


# -- replay -----------------------------------------------------------------------------------------------------------


def test_what_stays_no_longer_cuts_up_what_goes() -> None:
    # A small tensor of each step is allocated while 24 MiB are free in a segment, and stays: the next 24 MiB need a
    # segment of their own, each time.
    events = []
    for number in range(4):
        events += [Event(("big", number), 24 * MIB), Event(("big", number), 0, 0, Action.FREE)]
        events.append(Event(("kept", number), 2 * MIB))
    without = replay(events)
    assert without.needed_bytes == (24 + 6) * MIB
    assert without.outcome.peak_reserved_bytes == (24 + 24) * MIB  # the other ones find room beside the first
    arena = plan_arena([Lifetime(2 * MIB, 0, 1)] * 4)
    places = {("kept", number): ("kept", number) for number in range(4)}
    with_arena = replay(events, {"kept": arena}, places)
    assert with_arena.needed_bytes == without.needed_bytes
    assert with_arena.outcome.peak_reserved_bytes == (24 + 20) * MIB


def test_a_tensor_that_is_too_large_is_left_to_the_allocator() -> None:
    arena = plan_arena([Lifetime(1000, 0, 1)])
    events = [Event("a", 1024), Event("a", 0, 0, Action.FREE), Event("b", 1025), Event("b", 0, 0, Action.FREE)]
    left = list(place_events(events, {"x": arena}, {"a": ("x", 0), "b": ("x", 0)}, {}))
    assert left == events[2:]


def test_a_copied_tensor_is_there_until_it_is_copied() -> None:
    arena = plan_arena([Lifetime(1000, 0, 1)])
    other = [Event("b", 7), Event("c", 7)]
    events = [Event("a", 1000), *other, Event("a", 0, 0, Action.FREE)]
    left = list(place_events(events, {"x": arena}, {"a": ("x", 0)}, {"a": 2}))
    assert left == [events[0], Event("b", 7), Event("a", 0, 0, Action.FREE), Event("c", 7)]
    # It may go before: then nothing else frees it.
    early = [Event("a", 1000), Event("a", 0, 0, Action.FREE), *other]
    assert list(place_events(early, {"x": arena}, {"a": ("x", 0)}, {"a": 3})) == early


def test_a_tensor_whose_place_is_taken_is_left_to_the_allocator() -> None:
    # "b" was planned for when "a" is gone; here "a" stays longer.
    arena = plan_arena([Lifetime(1000, 0, 1), Lifetime(800, 1, 2)])
    assert arena.offsets == (0, 0)
    places = {"a": ("x", 0), "b": ("x", 1), "c": ("x", 1)}
    ends = [Event(key, 0, 0, Action.FREE) for key in "abc"]
    events = [Event("a", 1000), Event("b", 800), ends[0], Event("c", 800), *ends[1:]]
    assert list(place_events(events, {"x": arena}, places, {})) == [events[1], ends[1]]
    # A copy is not made: the tensor stays where it is, until it is freed.
    late = [Event("a", 1000), Event("b", 800), Event("d", 7), ends[1], ends[0]]
    assert list(place_events(late, {"x": arena}, places, {"b": 2})) == [*late[1:3], ends[1]]


def test_arenas_come_first_and_a_reserve_after_them() -> None:
    arena = plan_arena([Lifetime(30 * MIB, 0, 1)])
    outcome = replay([Event("a", 11 * MIB)], {"x": arena}, {}, reserved_bytes=50 * MIB).outcome
    segments = segments_of(outcome)
    assert [segment.reserved_bytes for segment in segments] == [30 * MIB, 50 * MIB]
    assert [[p.key for p in segment.pieces] for segment in segments] == [[("arena", "x")], ["a", None]]
    assert replay([Event("a", 11 * MIB)], device_bytes=10 * MIB).outcome.failed is not None
