"""Schedules of a pipeline: complete, without circles, with the idle time of the papers and the memory of their kind."""

from dataclasses import replace

import pytest

from tests.rotation import third
from zeroshard.table.pipeline import Action, Kind, Schedule, check, play, schedule_of

NAMES = {"naive": [1], "gpipe": [1], "1f1b": [1], "interleaved": [2, 3, 4], "forward": [1, 2, 3, 4]}
SIZES = [(places, micro) for places in range(1, 9) for micro in range(1, 33)]


def made(name: str, places: int, micro: int, chunks: int) -> Schedule | None:
    """Return a schedule; None where the numbers are refused, as they should be."""
    is_refused = (name in ("1f1b", "interleaved") and micro < places) or (
        name == "interleaved" and micro % max(1, micro // places) > 0
    )
    if not is_refused:
        return schedule_of(name, places, micro, chunks)
    with pytest.raises(ValueError, match=rf"micro_batches={micro}"):
        schedule_of(name, places, micro, chunks)
    return None


def idle_of(schedule: Schedule, recompute_s: float = 0.0) -> float:
    """Return the part of the time in which places wait, where a backward takes twice as long as a forward."""
    each = 1 / schedule.chunks
    seconds = {Kind.FORWARD: [each] * schedule.all_chunks, Kind.BACKWARD: [2 * each] * schedule.all_chunks}
    seconds[Kind.RECOMPUTE] = [recompute_s] * schedule.all_chunks
    spans = play(schedule, seconds)
    total = max(place[-1][-1] for place in spans)
    return 1 - 3 * schedule.micro_batches / total


@pytest.mark.parametrize("name", NAMES)
def test_schedules_are_complete_and_idle_as_the_papers_say(name: str) -> None:
    for places, micro in third(SIZES):
        for chunks in NAMES[name]:
            schedule = made(name, places, micro, chunks)
            if schedule is None:
                continue
            check(schedule)
            d, m, v = places, micro, chunks
            known = {"naive": (d - 1) / d, "gpipe": (d - 1) / (m + d - 1), "1f1b": (d - 1) / (m + d - 1)}
            known["interleaved"] = (d - 1) / (v * m + d - 1)
            if name != "forward":
                idle = idle_of(schedule)
                assert idle >= known[name] - 1e-9, schedule
                if name != "interleaved" or m % d == 0:
                    assert idle == pytest.approx(known[name], abs=1e-9), schedule
            live = [schedule.live(place) for place in range(d)]
            if name == "naive":
                assert live == [1] * d
            elif name == "1f1b":
                assert live == [min(m, d - place) for place in range(d)]
            elif name == "gpipe":
                assert live == [m] * d
            elif name == "interleaved":
                # As Megatron-LM has it: a round in all chunks but the last, and two for each place behind.
                size = m // max(1, m // d)
                assert live == [min(v * m, (v - 1) * size + 2 * (d - 1 - place) + 1) for place in range(d)]


def test_a_recomputation_fills_the_wait_for_a_gradient() -> None:
    places, micro = 4, 16
    plain, every = schedule_of("gpipe", places, micro), range(places)
    recomputed = schedule_of("gpipe", places, micro, recomputed=every)
    check(recomputed)
    # The first micro-batch keeps its graph: no other one exists before its backward.
    for actions in recomputed.actions:
        assert [one.micro_batch for one in actions if one.kind is Kind.RECOMPUTE] == [*range(1, micro)]
    seconds = {kind: [length] * places for kind, length in ((Kind.FORWARD, 1.0), (Kind.BACKWARD, 2.0))}
    seconds[Kind.RECOMPUTE] = [1.0] * places
    total = max(place[-1][-1] for place in play(recomputed, seconds))
    # Without point 6 a backward with its recomputation takes 3: (m + d - 1) * (1 + 3).
    assert total < (micro + places - 1) * 4.0
    assert max(place[-1][-1] for place in play(plain, seconds)) == (micro + places - 1) * 3.0
    after = schedule_of("1f1b", places, micro, recomputed=every)
    check(after)
    assert not any(one.kind is Kind.RECOMPUTE for one in after.actions[-1])


def broken(schedule: Schedule, place: int, change: str) -> Schedule:
    """Return a schedule with one change at a place."""
    actions = [*schedule.actions[place]]
    sends = [at for at, one in enumerate(actions) if one.kind is Kind.SEND_OUTPUT]
    if change == "a message that is not sent":
        del actions[sends[1]]
    elif change == "a message that is sent twice":
        actions.insert(sends[1], actions[sends[1]])
    elif change == "messages in another order":
        actions[sends[0]], actions[sends[1]] = actions[sends[1]], actions[sends[0]]
    elif change == "a backward before its gradient":
        at = next(at for at, one in enumerate(actions) if one.kind is Kind.BACKWARD)
        actions[at - 1], actions[at] = actions[at], actions[at - 1]
    elif change == "backwards in another order":
        turns = [at for at, one in enumerate(actions) if one.kind is Kind.BACKWARD]
        actions[turns[0]], actions[turns[1]] = actions[turns[1]], actions[turns[0]]
    elif change == "a forward of another place":
        actions.append(Action(Kind.FORWARD, place + 1, 0))
    rows = [*schedule.actions]
    rows[place] = tuple(actions)
    return replace(schedule, actions=tuple(rows))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            "a message that is not sent",
            "place 1 waits in the receive input of chunk 1, micro-batch 1",
        ),
        ("a message that is sent twice", "send output of chunk 0, micro-batch 1 twice"),
        ("messages in another order", "Places cannot go on"),
        ("a backward before its gradient", "Places cannot go on"),
        ("backwards in another order", "backwards of chunk 0 for micro-batches"),
        ("a forward of another place", "forward of chunk 1, micro-batch 0 twice, or it is that of another place"),
    ],
)
def test_what_is_wrong_is_found(change: str, text: str) -> None:
    for name in ("gpipe", "1f1b"):
        with pytest.raises(ValueError, match=text):
            check(broken(schedule_of(name, 2, 4), 0, change))


def test_the_order_of_receives_counts() -> None:
    schedule = schedule_of("gpipe", 2, 4)
    actions = [*schedule.actions[1]]
    turns = [at for at, one in enumerate(actions) if one.kind is Kind.FORWARD]
    for at in (turns[0], turns[0] - 1):
        actions[at], actions[at + 2] = actions[at + 2], actions[at]
    changed = replace(schedule, actions=(schedule.actions[0], tuple(actions)))
    with pytest.raises(ValueError, match="forwards of chunk 1 for micro-batches"):
        check(changed)


@pytest.mark.parametrize("name", ["zero-bubble", "ZBVZeroBubble", "DualPipeV", "ScheduleInterleavedZeroBubble"])
def test_split_backwards_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"schedule='{name}' is not one of .* splits backwards"):
        schedule_of(name, 2, 4)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("2f2b", 2, 4), "schedule='2f2b' is not one of 'naive'"),
        (("1f1b", 2, 0), "micro_batches must be a number of at least 1"),
        (("1f1b", 0, 4), "places must be a number"),
        (("gpipe", 2, 4, 2), "'1f1b' has one chunk at each place"),
        (("interleaved", 2, 4, 1), "'interleaved' two or more"),
        (("interleaved", 2, 4, 2.0), "chunks must be a number"),
    ],
)
def test_other_numbers_are_refused(arguments: tuple[object, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        schedule_of(*arguments)  # type: ignore[arg-type]


def test_messages_take_their_time_between_places() -> None:
    places, micro = 4, 6
    spans = play(schedule_of("forward", places, micro), {Kind.FORWARD: [2.0] * places}, message_s=0.5)
    # The last place begins after the forwards and the messages of those before it.
    assert [place[-1][-1] for place in spans] == [at * (2.0 + 0.5) + micro * 2.0 for at in range(places)]
