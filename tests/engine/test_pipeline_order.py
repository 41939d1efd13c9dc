"""Pipelines on simulated ranks: a part of what `tools/explore --pipes` runs by the hundred thousand.

The runner, the engine and autograd run as they are, over messages and collectives that are matched in memory. What must
hold is in `tools/explore/pipe_run.py`. Faults that are planted in the product must be found.
"""

import types
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest

from tools.explore import cli, pipe_run
from tools.explore.pipe_program import (
    Departure,
    PipeFailure,
    PipeProgram,
    draw_pipe,
    plain_programs,
    with_one_departure,
)
from tools.explore.pipe_run import failures_of, run_pipe
from tools.explore.work import crew, pipes_randomly, shrink
from zeroshard.core import order, votes
from zeroshard.parallel import mail, runner, tied

from .changed import changed

NESTED = (1, 2, -2, -1)
"""Its forward follows the record of `(1, 2)`, one after the other, and its backward leaves that."""


@pytest.mark.product
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_pipelines_without_departures_end_right(micro_batches: int) -> None:
    for program in plain_programs(micro_batches):
        outcome = run_pipe(program, crew())
        assert (outcome.verdict, outcome.faults) == ("right", []), program


@pytest.mark.product
@pytest.mark.parametrize("part", range(3))
def test_departures_of_one_rank_end_right(part: int) -> None:
    programs = [program for plain in plain_programs(2) for program in with_one_departure(plain)]
    for program in islice(programs, part * 67, None, 201):
        outcome = run_pipe(program, crew())
        assert (outcome.verdict, outcome.faults) == ("right", []), program


@pytest.mark.product
@pytest.mark.parametrize("part", range(3))
def test_failures_of_one_rank_end_in_one_error(part: int) -> None:
    verdicts = set()
    for number, program in enumerate(plain_programs(2)):
        outcome = run_pipe(program, crew())
        for failed in islice(failures_of(program, outcome, [number % 2]), 83 * part, None, 249):
            found = run_pipe(failed, crew())
            assert found.faults == [], failed
            verdicts.add(found.verdict)
    assert verdicts == {"failed step", "broken"}


@pytest.mark.product
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_random_pipelines_end_right_or_with_one_error(micro_batches: int) -> None:
    counts = pipes_randomly(micro_batches, 1000, 24, 1, lambda *_: None)
    assert counts.bad == []
    assert counts.verdicts["right"] > 6


@pytest.mark.parametrize("seed", range(10))
def test_a_pipeline_is_drawn_alike_from_its_seed_and_written_as_json(seed: int) -> None:
    assert draw_pipe(seed, 2) == draw_pipe(seed, 2) == PipeProgram.from_json(draw_pipe(seed, 2).to_json())


# -- planted faults ---------------------------------------------------------------------------------------------------


Plant = Callable[[pytest.MonkeyPatch], None]


def planted(module: types.ModuleType, name: str, place: types.ModuleType, right: str, wrong: str) -> Plant:
    """Return what puts a changed class of a module where another one has it."""
    return lambda patch: patch.setattr(place, name, changed(module, right, wrong)[name])


NO_SLACK = PipeProgram("naive", 2, departures=(Departure(3, 1, 1, 0, NESTED),))
"""Behind its backward, a place waits at once for a message that follows from the other place's backward."""
FAULTS = {
    "votes-unread": (
        planted(votes, "Votes", order, "for one in (comm, comm.across):", "for one in (comm,):"),
        NO_SLACK,
        "ranks ended with watchdog",
    ),
    "kind-without-chunk": (
        planted(runner, "Runner", pipe_run, 'Chunk(f"chunk {chunk}",', 'Chunk("chunk",'),
        PipeProgram("interleaved", 2),
        "of unit",
    ),
    "wrong-rank": (
        planted(mail, "Mail", runner, "self._ranks[chunk % len(self._ranks)]", "self._ranks[-1 - chunk % 2]"),
        PipeProgram("1f1b", 2),
        "ranks ended with",
    ),
    "wrong-chunk": (
        planted(
            mail, "Mail", runner, "(chunk - 1, Kind.RECEIVE_GRADIENT) if is", "(chunk + 1, Kind.RECEIVE_GRADIENT) if is"
        ),
        PipeProgram("1f1b", 2),
        "ranks ended with",
    ),
    "tied-twice": (
        planted(tied, "Tied", runner, "for one in others:", "for one in [first, *others]:"),
        PipeProgram("gpipe", 2, is_tied=True),
        "holds",
    ),
    "released-in-flight": (
        planted(
            runner,
            "Runner",
            pipe_run,
            "        if is_final and not self._has_grad:",
            "        self._messages.give(arrived, is_read=True)\n        if is_final and not self._has_grad:",
        ),
        PipeProgram("gpipe", 2),
        "is of no micro-batch",
    ),
    "no-pass": (
        planted(runner, "Runner", pipe_run, "if engine.order.count == before:", "if False:"),
        PipeProgram("1f1b", 2, failure=PipeFailure(3, 1, 5)),
        "ranks ended with",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, program, told = FAULTS[name]
    assert run_pipe(program, crew()).faults == []
    plant(monkeypatch)
    outcome = run_pipe(program, crew())
    assert any(told in fault for fault in outcome.faults), outcome.faults


def test_the_failure_of_the_planted_pass_is_before_the_model() -> None:
    _, program, _ = FAULTS["no-pass"]
    assert program.failure is not None
    outcome = run_pipe(replace(program, failure=None), crew())
    marks = outcome.marks[program.failure.rank][program.failure.step]
    assert marks[program.failure.mark] == "begin the forward of chunk 1"


def test_a_rank_that_has_not_read_votes_waits_for_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, program, told = FAULTS["votes-unread"]
    plant(monkeypatch)
    more = replace(program, departures=(*program.departures, Departure(0, 0, 0, 1, (1, -1))), is_tied=True)
    less, outcome = shrink(more, None)
    assert (less, outcome.faults[0][: len(told)]) == (replace(program, steps=2), told)
    assert outcome.ranks[2].marks[1][-1].startswith("wire: wait for the activation of micro-batch 1")
    assert cli.main(["--replay", less.to_json()]) == 1
    assert outcome.faults[0] in capsys.readouterr().out
