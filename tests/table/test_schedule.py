"""What a pass issues: known lists for three units, and what holds for any record and any marks."""

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from zeroshard.table.schedule import (
    ROOT,
    WINDOW,
    Action,
    Mark,
    Record,
    Request,
    Schedule,
    hoist,
    plain_marks,
    replay,
)

DRAWS = 3000


def peak_units(actions: Iterable[Action], full_bytes: tuple[int, ...], carried: Iterable[int] = ()) -> int:
    """Return the peak bytes of gathered units while `actions` run.

    Args:
        full_bytes: bytes of each gathered unit.
        carried: units that are gathered before the first action.
    """
    now = peak = sum(full_bytes[unit] for unit in carried)
    for kind, unit in actions:
        now += {"gather": full_bytes[unit], "release": -full_bytes[unit], "reduce": 0}[kind]
        peak = max(peak, now)
    return peak


def test_three_units_forward_and_backward() -> None:
    (forward, marks_forward), (backward, marks_backward) = plain_marks(3)
    assert replay(forward, marks_forward) == [
        ("gather", 0),
        ("gather", 1),  # both in the window
        ("gather", 2),
        ("release", 1),
        ("release", 2),
        ("release", 0),
    ]
    assert backward.requests == (
        ("gather", 0),
        ("gather", 2),
        ("gather", 1),  # on its way while unit 2 is computed
        ("reduce", 2),
        ("reduce", 1),
        ("reduce", 0),
    )
    assert replay(backward, marks_backward) == [
        ("gather", 0),
        ("gather", 2),
        ("gather", 1),
        ("reduce", 2),
        ("release", 2),
        ("reduce", 1),
        ("release", 1),
        ("reduce", 0),
        ("release", 0),
    ]


def test_the_fourth_unit_waits_for_room() -> None:
    (forward, marks), _ = plain_marks(4)
    assert replay(forward, marks) == [
        ("gather", 0),
        ("gather", 1),
        ("gather", 2),
        ("release", 1),
        ("gather", 3),
        ("release", 2),
        ("release", 3),
        ("release", 0),
    ]


def test_a_held_unit_is_released_when_its_backward_has_used_it_and_not_gathered_there() -> None:
    (forward, marks), (backward, back) = plain_marks(4, held=frozenset([0, 2]))
    assert replay(forward, marks) == [
        ("gather", 0),
        ("gather", 1),
        ("gather", 2),
        ("release", 1),
        ("gather", 3),
        ("release", 3),
    ]
    assert replay(backward, back) == [
        ("gather", 3),
        ("gather", 1),
        ("reduce", 3),
        ("release", 3),
        ("reduce", 2),
        ("release", 2),
        ("reduce", 1),
        ("release", 1),
        ("reduce", 0),
        ("release", 0),
    ]
    sizes = (1, 10, 100, 1000)
    assert peak_units(replay(forward, marks), sizes) == 1 + 100 + 1000
    assert peak_units(replay(backward, back), sizes, backward.carried) == sum(sizes)


def test_a_held_unit_that_a_rank_skips_stays_whole_too() -> None:
    (forward, _), _ = plain_marks(3, held=frozenset([1]))
    # So all ranks carry the same units into the backward.
    schedule = Schedule(forward, lambda unit: False)
    for unit in (0, 2):
        schedule.need(unit)
    assert schedule.close() == [("release", 0), ("release", 2)]
    assert [*schedule.whole] == [1]


def test_a_rank_that_skips_a_unit_takes_part_in_its_gather() -> None:
    (forward, _), _ = plain_marks(4)
    marks: list[Mark] = [("need", 0), ("need", 3), ("leave", 3), ("close", 0)]
    assert replay(forward, marks) == [
        ("gather", 0),
        ("gather", 1),
        ("gather", 2),
        ("release", 1),  # never used here
        ("release", 2),
        ("gather", 3),
        ("release", 3),
        ("release", 0),
    ]


def test_what_a_rank_skips_at_the_end_takes_no_more_room_than_the_window() -> None:
    (forward, _), _ = plain_marks(5)
    actions = replay(forward, [("need", 0), ("close", 0)])
    assert actions == [
        ("gather", 0),
        ("gather", 1),
        ("gather", 2),
        ("release", 0),
        ("release", 1),
        ("release", 2),
        ("gather", 3),  # for the others
        ("release", 3),
        ("gather", 4),
        ("release", 4),
    ]
    assert peak_units(actions, (0, 1, 1, 1, 1)) == WINDOW


def test_a_tied_unit_stays_whole_and_takes_no_room() -> None:
    record = Record((("gather", 0), ("gather", 1), ("gather", 2), ("gather", 3)), pinned=frozenset([1]))
    marks: list[Mark] = [("need", 0), ("need", 1), ("leave", 1), ("need", 2), ("leave", 2), ("need", 3), ("leave", 3)]
    marks += [("need", 1), ("leave", 1), ("close", 0)]
    assert replay(record, marks) == [
        ("gather", 0),
        ("gather", 1),
        ("gather", 2),
        ("gather", 3),
        ("release", 2),
        ("release", 3),
        ("release", 0),
        ("release", 1),
    ]


def test_what_is_not_recorded_is_not_issued() -> None:
    record = Record((("gather", 0), ("gather", 1)))
    with pytest.raises(ValueError, match="unit 2 is needed but not recorded"):
        replay(record, [("need", 0), ("need", 2)])


def draw(number: int) -> tuple[random.Random, Record, int]:
    """Return a record as passes agree on them: each unit gathered once, reductions behind it in any order."""
    r = random.Random(number)
    units = r.randrange(1, 7)
    order = [ROOT, *r.sample(range(1, units), units - 1)]
    requests: list[Request] = []
    for unit in order:
        requests.append(("gather", unit))
        if r.random() < 0.7:
            requests.insert(r.randrange(requests.index(("gather", unit)) + 1, len(requests) + 1), ("reduce", unit))
    chosen = frozenset(unit for unit in range(1, units) if r.random() < 0.2)
    return r, Record(hoist(requests), pinned=chosen), units


def live(r: random.Random, record: Record, units: int) -> tuple[list[Action], Schedule, list[int]]:
    """Return what a rank issues that uses units as it likes, and how many of them are whole after each action."""
    lands = {unit for unit in range(units) if r.random() < 0.7}
    schedule = Schedule(record, lambda unit: unit not in lands)
    actions: list[Action] = []
    counts: list[int] = []

    def do(more: list[Action] | None, unit: int) -> None:
        if more is None:
            more = [*schedule.flush(), ("gather", unit)]
            schedule.grant(unit)
        actions.extend(more)
        counts.append(len(schedule.whole.keys() - schedule.staying))

    do(schedule.need(ROOT), ROOT)
    for unit in r.sample(range(1, units), r.randrange(units)):
        for _ in range(r.choice([1, 1, 1, 2])):
            do(schedule.need(unit), unit)
            if unit in lands and r.random() < 0.8:
                do(schedule.land(unit), unit)
            do(schedule.leave(unit), unit)
    do(schedule.close(), ROOT)
    return actions, schedule, counts


@pytest.mark.parametrize("start", range(0, DRAWS, DRAWS // 4))
def test_ranks_issue_one_sequence_whatever_they_use(start: int) -> None:
    for number in range(start, start + DRAWS // 4):
        _, record, units = draw(number)
        for rank in range(3):
            actions, schedule, _ = live(random.Random(f"{number} {rank}"), record, units)
            sent = [action for action in actions if action[0] != "release"]
            # First what is recorded, in its order; what one rank alone asks for again comes after that.
            assert tuple(sent[: len(record.requests)]) == record.requests, number
            assert all(kind == "gather" for kind, _ in sent[len(record.requests) :]), number
            assert schedule.whole == {}, number


def test_what_is_gathered_is_released_once_and_reduced_at_most_once() -> None:
    for number in range(DRAWS):
        r, record, units = draw(number)
        actions, _, counts = live(r, record, units)
        whole: set[int] = set()
        for kind, unit in actions:
            if kind == "gather":
                assert unit not in whole, number
                whole.add(unit)
            elif kind == "release":
                whole.remove(unit)
        assert not whole, number
        assert max(Counter(unit for kind, unit in actions if kind == "reduce").values(), default=0) <= 1, number
        # Where a rank left its record, what was gathered ahead stays for its turn beside what it asked for.
        has_left = sum(kind == "gather" for kind, _ in actions) > sum(kind == "gather" for kind, _ in record.requests)
        assert max(counts) <= WINDOW * (1 + has_left), number


def test_the_peak_is_that_of_the_actions() -> None:
    sizes = (1, 10, 100, 1000)
    (forward, marks), _ = plain_marks(4)
    assert peak_units(replay(forward, marks), sizes) == 1 + 100 + 1000
    assert peak_units([("gather", 1), ("reduce", 1), ("release", 1), ("gather", 2)], sizes) == 100
