"""The simulated caching allocator: each rule by hand, and all of them against a model that is slow and plain."""

import random
from dataclasses import astuple, dataclass, field
from itertools import pairwise

import pytest

from tests.plan.segments import segments_of
from zeroshard.plan.machine.allocator import Action, Allocator, Event, Retry, simulate
from zeroshard.plan.machine.rules import round_bytes

MIB = 2**20


def alloc(key: object, num_bytes: float, stream: int = 0) -> Event:
    return Event(key, int(num_bytes), stream)


def free(*keys: object) -> list[Event]:
    return [Event(key, 0, 0, Action.FREE) for key in keys]


def blocks(allocator: Allocator) -> list[list[tuple[object, int]]]:
    """Return key and size of each segment's blocks; None is a key for free ones."""
    return [[(p.key, p.num_bytes) for p in segment.pieces] for segment in segments_of(allocator)]


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "block"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512), (10 * MIB + 1, 10 * MIB + 512)],
)
def test_sizes_are_rounded_to_512_bytes(asked: int, block: int) -> None:
    assert round_bytes(asked) == block


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segments_come_in_three_sizes(asked: int, segment: int) -> None:
    assert simulate([alloc("a", asked)]).reserved_bytes == segment


def test_nothing_is_asked_for_zero_bytes() -> None:
    outcome = simulate([alloc("a", 0), *free("a"), alloc("a", 1)])
    assert (outcome.allocated_bytes, outcome.reserved_bytes) == (512, 2 * MIB)


# -- which block ------------------------------------------------------------------------------------------------------


def test_small_and_large_share_no_segment() -> None:
    outcome = simulate([alloc("large", 2 * MIB), alloc("small", MIB)])
    assert blocks(outcome) == [[("large", 2 * MIB), (None, 18 * MIB)], [("small", MIB), (None, MIB)]]
    assert [segment.is_small for segment in segments_of(outcome)] == [False, True]


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    made = [alloc(key, size * MIB) for key, size in (("a", 16), ("b", 12), ("c", 14))]
    outcome = simulate([*made, *free("a", "b", "c"), alloc("d", 11.5 * MIB)])
    assert blocks(outcome)[1] == [("d", 12 * MIB)]
    assert outcome.reserved_bytes == 42 * MIB


def test_among_equals_the_lowest_address_is_taken() -> None:
    outcome = simulate([alloc("a", 12 * MIB), alloc("b", 12 * MIB), *free("b", "a"), alloc("c", 12 * MIB)])
    assert blocks(outcome) == [[("c", 12 * MIB)], [(None, 12 * MIB)]]


# -- splitting and joining --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "asked", "kept"),
    [
        # Large: what remains is split off above 1 MiB. The block is one of 12 MiB.
        (12 * MIB, 11 * MIB, 12 * MIB),
        (12 * MIB, 11 * MIB - 512, 11 * MIB - 512),
    ],
)
def test_a_large_block_is_split_above_one_mebibyte(held: int, asked: int, kept: int) -> None:
    outcome = simulate([alloc("a", held), *free("a"), alloc("b", asked)])
    assert outcome.allocated_bytes == kept
    assert outcome.reserved_bytes == held


def test_a_small_block_is_split_from_512_bytes_on() -> None:
    outcome = simulate([alloc("a", MIB), alloc("b", MIB - 512), alloc("c", 512)])
    assert blocks(outcome) == [[("a", MIB), ("b", MIB - 512), ("c", 512)]]


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_free_neighbours_join(order: str) -> None:
    made = [alloc(key, 2 * MIB) for key in "abc"]
    assert blocks(simulate([*made, *free(*order)])) == [[(None, 20 * MIB)]]
    left = simulate([*made, *free(*order[:2])])
    assert left.allocated_bytes == 2 * MIB
    assert not any(one.is_free and other.is_free for one, other in pairwise(segments_of(left)[0].pieces))


def test_segments_do_not_join() -> None:
    outcome = simulate([alloc("a", 10 * MIB), alloc("b", 10 * MIB), *free("a", "b"), alloc("c", 20 * MIB)])
    assert outcome.reserved_bytes == 40 * MIB


# -- the device is full -----------------------------------------------------------------------------------------------


def test_free_segments_are_returned_when_the_device_is_full() -> None:
    made = [alloc("a", 12 * MIB), alloc("b", 12 * MIB), alloc("small", 1), *free("a", "b")]
    outcome = simulate([*made, alloc("c", 24 * MIB)], 40 * MIB)
    assert (outcome.retries, outcome.reserved_bytes, outcome.failed) == (1, 26 * MIB, None)
    assert outcome.peak_reserved_bytes == 26 * MIB
    assert simulate([*made, alloc("c", 24 * MIB)], 50 * MIB).retries == 0


def test_a_retry_says_what_went_to_the_driver_and_came_from_it_again() -> None:
    device_bytes = 40 * MIB
    made = [alloc("a", 12 * MIB), alloc("b", 12 * MIB), alloc("small", 1), *free("a", "b")]
    (one,) = simulate([*made, alloc("c", 24 * MIB)], device_bytes).returned
    # Both large segments go; the small one is in use. "c" takes one segment.
    assert one == Retry("c", 2, 24 * MIB, 1, 24 * MIB)
    # What is taken later counts for the retry before it, until the next one: "d" finds 14 MiB, "e" does not.
    more = [alloc("d", 13 * MIB), *free("c"), alloc("e", 25 * MIB)]
    first, second = simulate([*made, alloc("c", 24 * MIB), *more], device_bytes).returned
    assert first == Retry("c", 2, 24 * MIB, 2, 38 * MIB)
    assert second == Retry("e", 1, 24 * MIB, 0, 0)  # 26 MiB beside 16: out of memory
    assert simulate(made, device_bytes).returned == ()


def test_a_segment_with_one_block_in_use_stays() -> None:
    made = [alloc("a", 5 * MIB), alloc("b", 5 * MIB), *free("a")]
    outcome = simulate([*made, alloc("c", 16 * MIB)], 35 * MIB)
    assert outcome.failed == alloc("c", 16 * MIB)
    assert (outcome.allocated_bytes, outcome.reserved_bytes) == (5 * MIB, 20 * MIB)
    assert outcome.retries == 1
    assert blocks(outcome) == [[(None, 5 * MIB), ("b", 5 * MIB), (None, 10 * MIB)]]
    assert simulate([*made, alloc("c", 16 * MIB)], 36 * MIB).failed is None


def test_a_program_may_go_on_after_it() -> None:
    allocator = Allocator(20 * MIB)
    assert allocator.allocate("a", 12 * MIB)
    assert not allocator.allocate("b", 12 * MIB)
    allocator.free("a")
    assert allocator.allocate("b", 14 * MIB)
    assert (allocator.retries, allocator.reserved_bytes) == (2, 14 * MIB)


# -- streams ----------------------------------------------------------------------------------------------------------


def test_a_block_belongs_to_its_stream() -> None:
    outcome = simulate([alloc("a", 12 * MIB, 1), *free("a"), alloc("b", 12 * MIB, 2)])
    assert outcome.reserved_bytes == 24 * MIB
    assert simulate([alloc("a", 12 * MIB, 1), *free("a"), alloc("b", 12 * MIB, 1)]).reserved_bytes == 12 * MIB


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([alloc("a", 1), alloc("a", 1)], "allocation 'a' of 1 bytes: this key is already allocated"),
        ([alloc("a", -1)], "allocation 'a': bytes must not be negative, got -1"),
        (free("a"), "free of 'a': this key is not allocated"),
    ],
)
def test_events_that_cannot_be(events: list[Event], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(events)


# -- against a model that is slow and plain ---------------------------------------------------------------------------


@dataclass
class Plain:
    """Fixed segments: a list of [segment, offset, size, key, state] in order of address, and nothing else."""

    device_bytes: int | None
    rows: list[list] = field(default_factory=list)
    segments: list[tuple[int, bool, int]] = field(default_factory=list)  # stream, is small, size; never reused
    returned: list[list] = field(default_factory=list)  # as in `Retry`

    @property
    def retries(self) -> int:
        return len(self.returned)

    def reserved(self) -> int:
        return sum(row[2] for row in self.rows)

    def join(self) -> None:
        joined: list[list] = []
        for row in self.rows:
            if joined and joined[-1][0] == row[0] and joined[-1][4] == row[4] == "free":
                joined[-1][2] += row[2]
            else:
                joined.append(row)
        self.rows = joined

    def allocate(self, key: object, num_bytes: int, stream: int) -> bool:
        size = max(512, -(-num_bytes // 512) * 512)
        small = size <= MIB
        fits = [
            row
            for row in self.rows
            if row[4] == "free" and self.segments[row[0]][:2] == (stream, small) and row[2] >= size
        ]
        row = min(fits, key=lambda row: (row[2], row[0], row[1]), default=None)
        if row is None:
            row = self.make(key, stream, small, size)
        if row is None:
            return False
        rest = row[2] - size
        if rest >= 512 if small else rest > MIB:
            self.rows.insert(self.rows.index(row) + 1, [row[0], row[1] + size, rest, None, "free"])
            row[2] = size
        row[3:] = key, "allocated"
        return True

    def make(self, key: object, stream: int, small: bool, size: int) -> list | None:
        wanted = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        device = self.device_bytes or 2**60
        if self.reserved() + wanted > device:
            gone = [r for r in self.rows if r[4] == "free" and r[2] == self.segments[r[0]][2]]
            self.rows = [r for r in self.rows if not any(r is one for one in gone)]
            self.returned.append([key, len(gone), sum(r[2] for r in gone), 0, 0])
        if self.reserved() + wanted > device:
            return None
        self.segments.append((stream, small, wanted))
        self.rows.append([len(self.segments) - 1, 0, wanted, None, "free"])
        if self.returned:
            self.returned[-1][3] += 1
            self.returned[-1][4] += wanted
        return self.rows[-1]

    def free(self, key: object) -> None:
        row = next(row for row in self.rows if row[3] == key and row[4] == "allocated")
        row[3:] = None, "free"
        self.join()


def draw_events(r: random.Random, *, length: int, num_streams: int) -> list[Event]:
    """Return events of a program that allocates many sizes, often the same ones, on some streams."""
    sizes = [int(2 ** r.uniform(6, 26)) for _ in range(12)]
    live: dict[int, int] = {}
    events = []
    for number in range(length):
        kind = r.random()
        if kind < 0.5 and live:
            key = r.choice(list(live))
            live.pop(key)
            events.append(Event(key, 0, 0, Action.FREE))
        else:
            num_bytes = r.choice(sizes) if r.random() < 0.6 else int(2 ** r.uniform(0, 26))
            live[number] = num_bytes
            events.append(Event(number, num_bytes, r.randrange(num_streams)))
    return events


def step(allocator: Allocator | Plain, event: Event) -> bool:
    if event.action is Action.ALLOC:
        return allocator.allocate(event.key, event.num_bytes, event.stream)
    allocator.free(event.key)
    return True


def shown(allocator: Allocator) -> list[tuple[int, int, object, str]]:
    """Return offset, size, key and state of all blocks, by address."""
    pieces = [piece for segment in segments_of(allocator) for piece in segment.pieces]
    return [(p.offset, p.num_bytes, p.key, "free" if p.is_free else "allocated") for p in pieces]


@pytest.mark.product
@pytest.mark.parametrize("is_limited", [False, True])
@pytest.mark.parametrize("number", range(20))
def test_all_rules_together_are_those_of_the_plain_model(number: int, is_limited: bool) -> None:
    r = random.Random(number)
    device_bytes = r.randrange(150, 500) * MIB if is_limited else None
    fast, plain = Allocator(device_bytes), Plain(device_bytes)
    for event in draw_events(r, length=300, num_streams=r.choice([1, 1, 3])):
        went_well = step(fast, event)
        assert went_well == step(plain, event)
        assert shown(fast) == [(row[1], row[2], row[3], row[4]) for row in plain.rows]
        assert (fast.reserved_bytes, fast.retries) == (plain.reserved(), plain.retries)
        assert [list(astuple(one)) for one in fast.returned] == plain.returned
        if not went_well:
            break


@pytest.mark.product
@pytest.mark.parametrize("number", range(12))
def test_what_holds_at_each_moment(number: int) -> None:
    r = random.Random(1000 + number)
    device = r.choice([None, r.randrange(200, 600) * MIB])
    allocator, asked = Allocator(device), {}
    events = draw_events(r, length=400, num_streams=r.choice([1, 2]))
    for place, event in enumerate(events):
        if not step(allocator, event):
            events = events[:place]
            break
        if event.action is Action.ALLOC:
            asked[event.key] = event.num_bytes
        elif event.action is Action.FREE:
            asked.pop(event.key)
        segments = segments_of(allocator)
        pieces = [piece for segment in segments for piece in segment.pieces]
        # Every live allocation has one block that holds it, and blocks tile their segments.
        live = {piece.key: piece.num_bytes for piece in pieces if not piece.is_free}
        assert live.keys() == {key for key, num_bytes in asked.items() if num_bytes}
        assert all(live[key] >= asked[key] for key in live)
        assert sum(live.values()) == allocator.allocated_bytes
        ends = {}
        for segment in segments:
            for one, other in pairwise(segment.pieces):
                assert one.offset + one.num_bytes == other.offset
                assert not (one.is_free and other.is_free)
            last = segment.pieces[-1]
            ends[segment.address] = segment.address + last.offset + last.num_bytes
            assert segment.reserved_bytes % (2 * MIB) == 0
        starts = sorted(ends)
        assert all(ends[start] <= after for start, after in pairwise(starts))
        assert allocator.reserved_bytes == sum(segment.reserved_bytes for segment in segments)
        assert allocator.reserved_bytes >= allocator.allocated_bytes
        assert device is None or allocator.reserved_bytes <= device
        assert allocator.peak_reserved_bytes >= allocator.reserved_bytes
    # The same events give the same end, and everything freed is whole segments.
    assert blocks(simulate(events, device)) == blocks(simulate(iter(events), device))
    rest = [Event(key, 0, 0, Action.FREE) for key in asked]
    end = simulate([*events, *rest, Event("last", 512), Event("last", 0, 0, Action.FREE)], device)
    assert end.allocated_bytes == 0
    for segment in segments_of(end):
        assert [piece.is_free for piece in segment.pieces] == [True]
