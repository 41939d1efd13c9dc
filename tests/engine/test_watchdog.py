"""What cannot work ends, on every rank, within the limit, in an error that says what each rank waits for."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, Sharded
from zeroshard.testing import RankFailure, run_ranks
from zeroshard.watch.pages import TEXT_BYTES, Pages
from zeroshard.watch.watchdog import PATIENCE_S

LIMIT_S = WATCHDOG_S + 2.0  # the wait itself, and what it takes to notice and to say so on two busy cores

Step = Callable[[int], None]


def start(stage: int) -> tuple[Sharded, nn.Module, Optimizer, Step]:
    """Shard a stack and return what takes one ordinary step of it, after two such steps."""
    run = Sharded(stage)
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)

    def step_once(step: int) -> None:
        models.stack_loss(model, step, run.rank).backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(2):
        step_once(step)
    return run, model, optimizer, step_once


def ends(action: Callable[[], Any]) -> tuple[str, str, float]:
    """Run something that must raise; return the error's type and text, and the seconds it took."""
    begin = time.monotonic()
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "nothing raised", "", time.monotonic() - begin


def evaluate(model: nn.Module, rank: int) -> None:
    """Run a forward without gradients."""
    with torch.no_grad():
        models.stack_loss(model, 50, rank)


def evaluation_on_one_rank_while_another_idles() -> tuple[str, str, float]:
    run, model, _, step_once = start(3)
    if run.rank == 0:
        return ends(lambda: evaluate(model, 0))
    time.sleep(WATCHDOG_S + 1.0)
    return ends(lambda: step_once(2))


def evaluation_on_one_rank_while_another_trains() -> tuple[str, str, float]:
    run, model, _, step_once = start(3)

    def go_on() -> None:
        if run.rank == 0:
            evaluate(model, 0)
        for step in range(2, 5):
            step_once(step)

    return ends(go_on)


def norm_on_one_rank_while_another_idles() -> tuple[str, str, float]:
    run, model, _, _ = start(2)
    models.stack_loss(model, 2, run.rank).backward()
    if run.rank == 0:
        return ends(run.grad_norm)
    time.sleep(WATCHDOG_S + 1.0)
    return ends(run.grad_norm)


def norm_on_one_rank_while_another_trains() -> tuple[str, str, float]:
    run, model, optimizer, step_once = start(2)

    def go_on() -> None:
        models.stack_loss(model, 2, run.rank).backward()
        if run.rank == 0:
            run.grad_norm()
        optimizer.step()
        optimizer.zero_grad()
        for step in range(3, 6):
            step_once(step)

    return ends(go_on)


def one_rank_without_a_batch(stage: int) -> tuple[str, str, float]:
    """Rank 1's data ends one batch early: it leaves the loop while rank 0 takes another step."""
    run, _, _, step_once = start(stage)
    if run.rank == 0:
        return ends(lambda: step_once(2))
    time.sleep(WATCHDOG_S + 1.0)
    return ends(lambda: step_once(2))


def one_rank_skips_forward_and_backward(stage: int) -> tuple[str, str, float]:
    """Rank 1 has no batch in one step, but steps its optimizer with the others."""
    run, model, optimizer, step_once = start(stage)

    def go_on() -> None:
        if run.rank == 0:
            models.stack_loss(model, 2, run.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        for step in range(3, 5):
            step_once(step)

    return ends(go_on)


def gathered_on_one_rank(stage: int) -> tuple[str, str, float]:
    run, model, _, step_once = start(stage)

    def go_on() -> None:
        if run.rank == 0:
            with run.gathered():
                model.state_dict()
        for step in range(2, 4):
            step_once(step)

    return ends(go_on)


ONE_IDLES = [evaluation_on_one_rank_while_another_idles, norm_on_one_rank_while_another_idles]
ALL_GO_ON = [evaluation_on_one_rank_while_another_trains, norm_on_one_rank_while_another_trains]


def assert_named(result: tuple[str, str, float], rank: int, waits: tuple[str, ...]) -> None:
    """Require the named error, within the limit, that says where every rank is."""
    kind, text, seconds = result
    assert kind == zs.RankMismatchError.__name__, f"rank {rank}: {kind}: {text}"
    assert seconds <= LIMIT_S, f"rank {rank} took {seconds:.1f} s: {text}"
    assert f"[rank {rank}/2]" in text, text
    assert "rank 0" in text and "rank 1" in text, text
    assert any(word in text for word in waits), text


@pytest.mark.product
@pytest.mark.parametrize("target", ONE_IDLES, ids=lambda target: target.__name__)
def test_a_wait_for_an_idle_rank_ends_in_the_watchdogs_error(target: Callable[[], Any]) -> None:
    results = run_ranks(target, 2, timeout_s=TIMEOUT_S)
    assert_named(results[0], 0, ("gather", "norm"))
    assert f"{WATCHDOG_S:g} seconds" in results[0][1], results[0][1]
    assert "in user code" in results[0][1], results[0][1]
    kind, text, seconds = results[1]
    assert kind == zs.RankMismatchError.__name__, f"the late rank: {kind}: {text}"
    assert seconds <= LIMIT_S, f"the late rank took {seconds:.1f} s: {text}"


@pytest.mark.product
@pytest.mark.parametrize("target", ALL_GO_ON, ids=lambda target: target.__name__)
def test_ranks_at_different_places_end_in_a_named_error(target: Callable[[], Any]) -> None:
    for rank, result in enumerate(run_ranks(target, 2, timeout_s=TIMEOUT_S)):
        assert_named(result, rank, ("forward", "norm", "gather", "backward", "step"))


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_whose_data_ended_early(stage: int) -> None:
    results = run_ranks(one_rank_without_a_batch, 2, stage, timeout_s=TIMEOUT_S)
    assert_named(results[0], 0, ("gather", "reduc", "forward", "backward"))
    assert "in user code" in results[0][1], results[0][1]


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_only_steps(stage: int) -> None:
    for rank, result in enumerate(run_ranks(one_rank_skips_forward_and_backward, 2, stage, timeout_s=TIMEOUT_S)):
        assert_named(result, rank, ("gather", "reduc", "forward", "backward", "step"))


@pytest.mark.product
@pytest.mark.parametrize("stage", [1, 3])
def test_gathered_entered_by_one_rank(stage: int) -> None:
    for rank, result in enumerate(run_ranks(gathered_on_one_rank, 2, stage, timeout_s=TIMEOUT_S)):
        assert_named(result, rank, ("gather", "forward", "step"))


def one_rank_raises(where: str) -> float:
    """Rank 1 fails in user code; the time it takes rank 0 to end is what counts."""
    run, model, optimizer, step_once = start(3)
    dist.barrier()
    if run.rank == 1:
        if where == "forward":
            model.blocks[1].register_forward_hook(_raise)
        elif where == "backward":
            model.blocks[1].up.register_full_backward_hook(_raise)
        else:
            optimizer.register_step_pre_hook(_raise)
    step_once(2)
    step_once(3)
    return 0.0


def _raise(*args: Any) -> None:
    raise ArithmeticError("planted on rank 1")


@pytest.mark.product
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_the_error_of_one_rank_ends_the_others_within_seconds(where: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(one_rank_raises, 2, where, timeout_s=TIMEOUT_S)
    assert time.monotonic() - begin <= 15.0
    errors = failure.value.errors
    assert errors[1].type_name == "ArithmeticError", errors[1].message
    assert errors[0].type_name == "RankMismatchError", f"{errors[0].type_name}: {errors[0].message}"
    assert "[rank 0/2]" in errors[0].message and "rank 1" in errors[0].message


def one_rank_raises_and_the_other_handles_it() -> tuple[str, str, float]:
    run, model, _, step_once = start(3)
    if run.rank == 1:
        model.blocks[1].register_forward_hook(_raise)
        step_once(2)
    result = ends(lambda: step_once(2))
    time.sleep(3 * PATIENCE_S)
    return result


def test_a_rank_that_handles_the_error_lives_on() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(one_rank_raises_and_the_other_handles_it, 2, timeout_s=TIMEOUT_S, grace_s=20.0)
    assert set(failure.value.errors) == {1}, failure.value
    assert failure.value.results[0][0] == zs.RankMismatchError.__name__, failure.value.results


def test_a_text_that_is_being_read_is_not_overwritten() -> None:
    pages = Pages(dist.HashStore(), 0, 1, "the first")
    page = pages._pages[0]
    first = 8 + page[0] * (TEXT_BYTES + 2)
    for text in ("the second", "the third"):
        read, before = pages.read(0), bytes(page[first : first + 2 + TEXT_BYTES])
        pages.write(text)
        assert bytes(page[first : first + 2 + TEXT_BYTES]) == before
        assert pages.read(0) == text != read
        first = 8 + page[0] * (TEXT_BYTES + 2)
