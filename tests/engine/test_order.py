"""The order of collectives on simulated ranks: a part of what `tools/explore` runs by the million.

`core/order.py` itself runs, on units that hold numbers and over collectives that are matched in memory. What must hold
is in `tools/explore/run.py`. Faults that are planted in the protocol must be found, in seconds.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tools.explore import cli
from tools.explore.exhaustive import Class, Size, first_steps, second_steps
from tools.explore.program import TRANSPORTS, Failure, Op, Path, Program, draw, flat, train
from tools.explore.run import Outcome, chooser, order_module, run
from tools.explore.work import crew, exhaust, randomly, shrink
from zeroshard.core import passes
from zeroshard.table.schedule import ROOT, Schedule

from .changed import changed

PARTS, PROGRAMS = 4, 750
"""Random programs in each part: what ten seconds of a processor allow."""


def events(outcome: Outcome, rank: int, step: int, phase: str) -> list[str]:
    """Return what a rank issued in one pass, as "gather 1"; the root is 0."""
    found = outcome.ranks[rank].order.history.trace.step_events(step)
    return [f"{one.kind} {one.unit.removeprefix('unit') or 0}" for one in found if one.phase == phase]


# -- known lists ------------------------------------------------------------------------------------------------------

ONE_AFTER_THE_OTHER = train(2, 4, [(1, 2, 3)] * 2, [(1, 2, 3)] * 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_first_pass_has_each_unit_by_itself(rank: int) -> None:
    outcome = run(ONE_AFTER_THE_OTHER, crew())
    assert outcome.verdict == "right"
    assert events(outcome, rank, 0, "forward") == [
        "gather 0",
        "gather 1",
        "release 1",
        "gather 2",
        "release 2",
        "gather 3",
        "release 3",
        "release 0",
    ]
    assert events(outcome, rank, 0, "backward") == [
        "gather 0",
        "gather 3",
        "reduce 3",
        "release 3",
        "gather 2",
        "reduce 2",
        "release 2",
        "gather 1",
        "reduce 1",
        "release 1",
        "reduce 0",
        "release 0",
    ]


def recorded_pass_is_one_unit_ahead(rank: int) -> None:
    outcome = run(ONE_AFTER_THE_OTHER, crew())
    assert outcome.verdict == "right"
    assert events(outcome, rank, 1, "forward") == [
        "gather 0",
        "gather 1",
        "gather 2",  # on its way while unit 1 is computed
        "release 1",
        "gather 3",
        "release 2",
        "release 3",
        "release 0",
    ]
    assert events(outcome, rank, 1, "backward") == [
        "gather 0",
        "gather 3",
        "gather 2",
        "reduce 3",  # behind the gather that the next unit waits for
        "release 3",
        "gather 1",
        "reduce 2",
        "release 2",
        "reduce 1",
        "release 1",
        "reduce 0",
        "release 0",
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_recorded_pass_is_one_unit_ahead(rank: int) -> None:
    recorded_pass_is_one_unit_ahead(rank)


def test_a_pass_that_leaves_its_record() -> None:
    # Rank 1 uses unit 3 where the record has units 1 and 2 alone.
    outcome = run(train(2, 4, [(1, 2)] * 2, [(1, 2), (1, 3)]), crew())
    assert outcome.verdict == "right"
    assert [events(outcome, rank, 1, "forward") for rank in range(2)] == [
        [
            "gather 0",
            "gather 1",
            "gather 2",
            "release 1",
            "release 2",
            "release 0",
            "gather 3",  # for the other
            "release 3",
        ],
        [
            "gather 0",
            "gather 1",
            "gather 2",
            "release 1",
            "gather 3",  # unit 2 stays for its turn
            "release 3",
            "release 0",
            "release 2",
        ],
    ]


def test_a_rank_in_another_order_postpones_a_sum() -> None:
    outcome = run(train(2, 3, [(1, 2), (2, 1)]), crew())
    assert outcome.verdict == "right"
    for rank in range(2):
        found = [one for one in events(outcome, rank, 0, "backward") if one.split()[0] in ("reduce", "postpone")]
        # Rank 1 has no gradient of unit 2 when rank 0 has, nor of the root; both sums are made when the pass closes.
        assert found == [
            "reduce 2",
            "postpone 2",
            "reduce 1",
            "reduce 0",
            "postpone 0",
            "reduce 2",
            "reduce 0",
        ]


# -- answers before ranks have agreed ---------------------------------------------------------------------------------


def normed(*steps: Sequence[Path], is_whole: bool) -> Program:
    """Return the program that takes a norm before each step; of each step the paths, by rank."""
    ops = [op for paths in steps for op in (Op("forward", tuple(paths)), Op("backward"), Op("norm"), Op("step"))]
    return Program(2, 3, tuple(ops), is_whole=is_whole)


A_NEW_UNIT = normed(*[(flat((1,)), flat((1,)))] * 5, (flat((1,)), flat((1, 2))), is_whole=True)
"""One rank uses a unit for the first time."""
ANOTHER_BACKWARD = normed(*[(flat((1, 2)), flat((1, 2)))] * 6, (flat((1, 2)), (1, 2, -2, -1)), is_whole=False)
"""One rank's forward is as those before, and its backward meets units in another order."""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_norm_has_what_a_rank_could_not_foresee(transport: Any) -> None:
    assert run(replace(A_NEW_UNIT, transport=transport), crew()).verdict == "right"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_norm_that_was_too_early_is_an_error_on_all_ranks(transport: Any) -> None:
    outcome = run(replace(ANOTHER_BACKWARD, transport=transport), crew())
    assert outcome.verdict == ("early" if transport == "nccl" else "right")
    assert {len(rank.per_step) for rank in outcome.ranks} == {6 if transport == "nccl" else 7}


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_users_collective_between_forward_and_backward_may_follow_a_departure(transport: Any, is_whole: bool) -> None:
    ops = [Op("forward", (flat((1,)), flat((1,)))), Op("backward"), Op("step")]
    ops += [Op("forward", (flat((1,)), flat((1, 2)))), Op("meet"), Op("backward"), *[Op("meet")] * is_whole, Op("step")]
    assert run(Program(2, 3, tuple(ops), None, transport, is_whole), crew()).verdict == "right"


# -- defects that the exploration found -------------------------------------------------------------------------------


def test_gradients_that_another_rank_promised_and_never_had_are_summed() -> None:
    # Rank 0 says that it is not ready for the root, and has no gradient of it in the end: rank 1 must not wait for it.
    steps = (Op("forward", (flat([1]), ())), Op("backward", lost=((0,), ())), Op("step"))
    outcome = run(Program(2, 2, steps), crew())
    assert (outcome.verdict, outcome.faults) == ("right", [])
    assert "postpone" in [event.kind for event in outcome.ranks[1].order.history.trace.events]


def test_gradients_are_summed_though_a_rank_raised_before_it_had_its_own() -> None:
    steps = (Op("forward", (flat([3]), ())), Op("backward"), Op("step"))
    outcome = run(Program(2, 4, steps, Failure(rank=0, op=1, mark=3)), crew())
    assert (outcome.verdict, outcome.faults) == ("right", [])


def test_what_one_copy_has_summed_and_another_has_not_is_recorded_alike() -> None:
    # Gradients stay within copies first, so a copy learns of its own ranks alone whether they are ready for unit 2.
    first = Op("forward", ((), (), (), flat([2, 2])))
    second = Op("forward", ((), flat([1, 1]), flat([1]), flat([2])))
    last = Op("backward", lost=((0,), (2,), (), (0,)))
    outcome = run(Program(4, 3, (first, Op("copies"), second, last, Op("step")), copies=2), crew())
    assert (outcome.verdict, outcome.faults) == ("right", [])


# -- random and all programs ------------------------------------------------------------------------------------------


@pytest.mark.product
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs_end_right_or_with_one_error(part: int) -> None:
    counts = randomly(part * PROGRAMS, PROGRAMS, 0, 1, lambda *_: None)
    assert counts.bad == []
    assert counts.verdicts["right"] > PROGRAMS / 2
    assert min(counts.verdicts[f"one fails: {verdict}"] for verdict in ("right", "mismatch", "watchdog")) > 10


@pytest.mark.product
@pytest.mark.parametrize("transport", ["messages", "host", "nccl"])
def test_all_programs_of_two_ranks_and_two_units(transport: Any) -> None:
    counts = exhaust(Size(2, 2, transport), 1, lambda *_: None)
    assert counts.bad == []
    assert counts.programs > 250


@pytest.mark.rotates
def test_what_a_rank_does_depends_on_no_order_of_completions() -> None:
    program = train(3, 3, [(1, 2), (2, 1), (2,)], [(1,), (2, 1, 2), ()])
    first = run(program, crew())
    told = [(rank.comm.sequence, rank.order.history.trace.events) for rank in first.ranks]
    for choices in itertools.product(range(2), repeat=8):
        left = list(choices)
        other = run(program, crew(), lambda count, left=left: left.pop() if left else count - 1)  # type: ignore[misc]
        assert other.verdict == "right"
        assert [(rank.comm.sequence, rank.order.history.trace.events) for rank in other.ranks] == told


@pytest.mark.rotates
def test_first_steps_that_leave_one_state_have_the_same_second_steps() -> None:
    size = Size(2, 3, "messages")
    classes: dict[Any, list[Outcome]] = {}
    for program in first_steps(size):
        outcome = run(program, crew(), keeps_states=True)
        if outcome.verdict == "right":
            classes.setdefault(outcome.states[0], []).append(outcome)
    assert max(map(len, classes.values())) > 10
    for state, members in classes.items():
        one, other = (member.ranks[0].program for member in (members[0], members[-1]))
        seconds = [second_steps(Class(first, len({*state}) == 1, other=1), size) for first in (one, other)]
        for (program, _), (alike, _) in itertools.islice(zip(*seconds, strict=True), 0, None, 5):
            told = second_events(run(program, crew()))
            assert told == second_events(run(alike, crew())) == second_events(run(program, crew(), behind=members[0]))


def second_events(outcome: Outcome) -> list[list[Any]]:
    """Return what each rank did in the second step."""
    return [[replace(event, step=0) for event in rank.order.history.trace.step_events(1)] for rank in outcome.ranks]


# -- planted faults ---------------------------------------------------------------------------------------------------


def without_flush(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Schedule, "flush", lambda self: [])


def not_ready_is_ignored(patch: pytest.MonkeyPatch) -> None:
    right = "is_ready = pass_.is_closing or not self._comm.can_postpone or unit.is_complete()"
    patch.setattr(order_module, "Order", changed(order_module, right, "is_ready = True")["Order"])


def pinned_is_ignored(patch: pytest.MonkeyPatch) -> None:
    begin: Any = Schedule.__init__

    def begin_without(self: Any, *args: Any) -> None:
        begin(self, *args)
        self._kept = frozenset([ROOT])

    patch.setattr(Schedule, "__init__", begin_without)


def own_requests_are_recorded(patch: pytest.MonkeyPatch) -> None:
    merge: Any = passes.Pass.next_record

    def merge_own(self: Any, record: Any) -> Any:
        kinds = {"need": "gather", "land": "reduce"}
        self.agreed = [(kinds[kind], unit, False) for kind, unit in self.marks if kind in kinds]
        return merge(self, record)

    patch.setattr(passes.Pass, "next_record", merge_own)


def nobody_is_served_at_the_end(patch: pytest.MonkeyPatch) -> None:
    end: Any = order_module.Order._end

    def end_at_once(self: Any, pass_: Any, told: Any) -> None:
        end(self, pass_, told and replace(told, request=None))

    patch.setattr(order_module.Order, "_end", end_at_once)


def planted_in_order(right: str, wrong: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(order_module, "Order", changed(order_module, right, wrong)["Order"])

    return plant


norms_are_always_sure = planted_in_order(
    "is_sure = not self._comm.is_on_host and all(pass_.is_sure for pass_ in self._ended)", "is_sure = True"
)
nothing_is_left_over = planted_in_order("for unit in self._left_over(pass_)), None)", "for unit in ()), None)")
passes_begin_unread = planted_in_order(
    "            self.catch_up()\n            # Ranks may make different", "            # Ranks may make different"
)
steps_vote_once = planted_in_order("        if self._has_made_rounds:", "        if False:")


@pytest.mark.product
@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (without_flush, "ranks ended with"),
        (not_ready_is_ignored, "twice in a pass"),
        (pinned_is_ignored, "and ranks agreed on"),
        (own_requests_are_recorded, ""),
        (nobody_is_served_at_the_end, "ranks ended with"),
        (nothing_is_left_over, ""),
        (passes_begin_unread, ""),
    ],
    ids="flush ready pinned own served left unread".split(),
)
def test_a_planted_fault_is_found_and_shrunk(
    plant: Callable[[pytest.MonkeyPatch], None], told: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    plant(monkeypatch)
    for seed in range(200):
        program = draw(seed)
        outcome = run(program, crew(), chooser(seed))
        if any(told in fault for fault in outcome.faults):
            break
    else:
        pytest.fail("no program found it")
    less, outcome = shrink(program, seed)
    assert outcome.faults
    assert less.ranks <= 3
    assert len(less.ops) <= 2 * less.units + 4
    assert cli.main(["--replay", less.to_json(), "--choices", str(seed)]) == 1
    assert outcome.faults[0] in capsys.readouterr().out


def test_a_norm_that_is_always_sure_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    norms_are_always_sure(monkeypatch)
    assert run(replace(A_NEW_UNIT, transport="nccl"), crew()).verdict == "fault"


def test_a_step_without_a_second_vote_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_vote_once(monkeypatch)
    assert run(replace(ANOTHER_BACKWARD, transport="nccl"), crew()).verdict == "fault"


def test_a_lost_hoist_is_in_the_known_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "hoist", tuple)
    with pytest.raises(AssertionError, match="reduce 3"):
        recorded_pass_is_one_unit_ahead(0)


@pytest.mark.parametrize("seed", range(20))
def test_a_program_is_drawn_alike_from_its_seed_and_written_as_json(seed: int) -> None:
    assert draw(seed) == draw(seed) == Program.from_json(draw(seed).to_json())
