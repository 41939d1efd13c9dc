"""Decisions that all ranks make alike, and what becomes of data that end on one rank first."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

import zeroshard as zs
from tests.faults.job import loss_of, make
from zeroshard.testing import RankFailure, run_ranks

WORLD = 3
BATCHES = (3, 5, 4)


def decide(stage: int) -> list[bool]:
    """Return what ranks agree on, at rest and after a backward. Runs on a rank."""
    model, optimizer, zero = make(stage)
    rank = zero.mesh.rank
    decided = [zero.agree(True), zero.agree(rank != 1), zero.agree(rank == 1), zero.agree(False)]
    loss_of(model, 0, rank).backward()
    decided.append(zero.agree(rank != 0, "after a backward"))
    optimizer.step()
    return decided


@pytest.mark.parametrize("stage", [0, 3])
def test_only_what_all_ranks_say_is_true(stage: int) -> None:
    assert run_ranks(decide, WORLD, stage) == [[True, False, False, False, False]] * WORLD


def test_one_process_agrees_with_itself() -> None:
    assert decide(3) == [True, True, False, False, False]


class Steps:
    """Takes steps, and counts them."""

    def __init__(self) -> None:
        self.model, self.optimizer, self.zero = make(3, watchdog_s=10.0)
        self.batches: list[int] = []

    def __call__(self, batch: int) -> None:
        loss_of(self.model, batch, self.zero.mesh.rank).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.batches.append(batch)


def loader() -> Iterator[int]:
    """Return this rank's batches; ranks have different numbers of them."""
    return iter(range(BATCHES[dist.get_rank()]))


def stop() -> list[int]:
    step, batches = Steps(), loader()
    while step.zero.agree((batch := next(batches, None)) is not None):
        step(batch)
    return step.batches


def drop() -> list[int]:
    step = Steps()
    for _ in range(2):
        batches = loader()
        while step.zero.agree((batch := next(batches, None)) is not None):
            step(batch)
    return step.batches


def fail() -> list[int]:
    step, batches = Steps(), loader()
    zero = step.zero
    while not zero.agree((batch := next(batches, None)) is None):
        if not zero.agree(batch is not None):
            raise ValueError(f"rank {zero.mesh.rank} has {'no' if batch is None else 'a'} batch, and another differs")
        step(batch)
    return step.batches


def test_the_first_rank_without_a_batch_stops_all() -> None:
    assert run_ranks(stop, WORLD) == [[0, 1, 2]] * WORLD


def test_it_ends_the_epoch_of_all() -> None:
    assert run_ranks(drop, WORLD) == [[0, 1, 2, 0, 1, 2]] * WORLD


def test_it_is_an_error_on_all() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(fail, WORLD)
    errors = failure.value.errors
    assert set(errors) == set(range(WORLD))
    # The first error may reach another rank before its own.
    assert any(error.message == "rank 0 has no batch, and another differs" for error in errors.values())
    assert {error.type_name for error in errors.values()} <= {"ValueError", "RankMismatchError"}


def test_ranks_that_end_together_are_none() -> None:
    assert run_ranks(fail, 1) == [list(range(BATCHES[0]))]


def ask_alone(other: str) -> None:
    """Ask for something while rank 1 does or asks for something else. Runs on a rank."""
    model, _, zero = make(3, watchdog_s=10.0)
    if zero.mesh.rank == 1 and other == "a forward":
        loss_of(model, 0, 1)
    else:
        zero.agree(True, "save?" if zero.mesh.rank == 1 and other == "another question" else "stop?")


@pytest.mark.parametrize(
    ("other", "words"), [("a forward", "the beginning of a training forward"), ("another question", "agree('save?')")]
)
def test_ranks_at_different_places_do_not_agree(other: str, words: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(ask_alone, 2, other)
    for error in failure.value.errors.values():
        assert error.type_name == zs.RankMismatchError.__name__
        assert "agree('stop?')" in error.message and words in error.message


def ask_inside_a_forward() -> str:
    """Return what a question inside a forward gets. Runs on a rank."""
    model, _, zero = make(3)

    def ask(*_: object) -> None:
        zero.agree(True)

    model.blocks[1].register_forward_pre_hook(ask)
    with pytest.raises(RuntimeError) as caught:
        loss_of(model, 0, 0)
    return str(caught.value)


def test_a_question_inside_a_forward_is_refused() -> None:
    for text in run_ranks(ask_inside_a_forward, 2):
        assert "agree() inside a forward of the model" in text
