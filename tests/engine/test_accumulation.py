"""Accumulation means what it means in torch: with and without `no_sync`, both `zero_grad`s, both forms, each stage."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, Run, Sharded, assert_matches, at_worlds
from zeroshard.testing import run_ranks


def start(run: Run, **options: Any) -> tuple[nn.Module, Optimizer]:
    """Build and shard a stack with AdamW."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer, **options)
    return model, optimizer


def backward(run: Run, model: nn.Module, step: int, micro: int = 0) -> None:
    """Run one micro-batch forward and backward."""
    loss = models.stack_loss(model, step, run.rank, micro)
    run.backward(loss)
    run.record(loss=loss)


def each_backward_reduces(run: Run) -> None:
    model, optimizer = start(run)
    for step in range(3):
        for micro in range(3):
            backward(run, model, step, micro)
        optimizer.step()
        optimizer.zero_grad()


def only_the_last_backward_reduces(run: Run) -> None:
    model, optimizer = start(run)
    for step in range(3):
        with run.no_sync():
            for micro in range(2):
                backward(run, model, step, micro)
        backward(run, model, step, 2)
        optimizer.step()
        optimizer.zero_grad()


def reduced_and_unreduced_mixed(run: Run) -> None:
    """Reduce, then hold back, then reduce again, within one step."""
    model, optimizer = start(run)
    for step in range(3):
        backward(run, model, step, 0)
        with run.no_sync():
            backward(run, model, step, 1)
        backward(run, model, step, 2)
        optimizer.step()
        optimizer.zero_grad()


def unsynced_then_dropped(run: Run) -> None:
    """Zero the gradients while they are unreduced: they must not come back at the next reduction."""
    model, optimizer = start(run)
    with run.no_sync():
        backward(run, model, 0, 0)
    optimizer.zero_grad()
    backward(run, model, 0, 1)
    optimizer.step()
    optimizer.zero_grad()


def forward_inside_no_sync_backward_outside(run: Run) -> None:
    """What counts is where the backward runs."""
    model, optimizer = start(run)
    with run.no_sync():
        backward(run, model, 0, 0)
        loss = models.stack_loss(model, 0, run.rank, 1)
    run.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def two_losses_of_one_forward_each(run: Run) -> None:
    """Several backwards before one step, of forwards that all ran before."""
    model, optimizer = start(run)
    for step in range(2):
        first = models.stack_loss(model, step, run.rank, 0)
        second = models.stack_loss(model, step, run.rank, 1)
        run.backward(first)
        run.backward(second)
        optimizer.step()
        optimizer.zero_grad()


def never_zeroed(run: Run) -> None:
    model, optimizer = start(run)
    for step in range(4):
        backward(run, model, step)
        optimizer.step()


def zeroed_before_backward(run: Run) -> None:
    model, optimizer = start(run)
    for step in range(3):
        optimizer.zero_grad()
        backward(run, model, step)
        optimizer.step()


def uneven_micro_batches_per_step(run: Run) -> None:
    model, optimizer = start(run)
    for step in range(4):
        for micro in range(1 + step % 3):
            backward(run, model, step, micro)
        optimizer.step()
        optimizer.zero_grad()


def forgotten_in_part(run: Run) -> None:
    """Forget some gradients of each unit between two backwards: the second sum is all there is of them."""
    model, optimizer = start(run)
    for step in range(2):
        backward(run, model, step, 0)
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.grad = None
        backward(run, model, step, 1)
        optimizer.step()
        optimizer.zero_grad()


def summed(run: Run) -> None:
    model, optimizer = start(run, reduction="sum")
    for step in range(3):
        backward(run, model, step, 0)
        with run.no_sync():
            backward(run, model, step, 1)
        backward(run, model, step, 2)
        optimizer.step()
        optimizer.zero_grad()


def some_forgotten_while_others_wait(run: Run) -> None:
    """Forget the sums of some parameters while gradients that are not reduced yet lie beside them."""
    model, optimizer = start(run)
    for step in range(2):
        backward(run, model, step, 0)
        with run.no_sync():
            backward(run, model, step, 1)
            for parameter in list(model.parameters())[::3]:
                run.forget(parameter)
            backward(run, model, step, 2)
        backward(run, model, step, 3)
        optimizer.step()
        optimizer.zero_grad()


SCRIPTS = [
    each_backward_reduces,
    only_the_last_backward_reduces,
    reduced_and_unreduced_mixed,
    unsynced_then_dropped,
    forward_inside_no_sync_backward_outside,
    two_losses_of_one_forward_each,
    never_zeroed,
    zeroed_before_backward,
    uneven_micro_batches_per_step,
    some_forgotten_while_others_wait,
    forgotten_in_part,
    summed,
]


@pytest.mark.product
@pytest.mark.parametrize(("script", "world"), at_worlds(SCRIPTS))
def test_accumulation(script: Callable[[Run], None], world: int) -> None:
    assert_matches(script, world)


def uneven_micro_batches_by_rank(run: Run) -> None:
    """Run another number of micro-batches on each rank before the one that reduces, also none."""
    model, optimizer = start(run)
    for step in range(3):
        with run.no_sync():
            for micro in range((step + run.rank) % 3):
                backward(run, model, step, micro)
        backward(run, model, step, 2)
        optimizer.step()
        optimizer.zero_grad()


def test_ranks_with_whole_parameters_may_make_different_numbers_of_passes_under_no_sync() -> None:
    assert_matches(uneven_micro_batches_by_rank, 2, stages=(0, 1, 2))


def uneven_where_parameters_are_sharded() -> str:
    """Run one micro-batch more on one rank; return the error."""
    with pytest.raises(zs.RankMismatchError) as error:
        uneven_micro_batches_by_rank(Sharded(3))
    return str(error.value)


def test_ranks_with_sharded_parameters_that_make_different_numbers_of_passes_under_no_sync_raise() -> None:
    for text in run_ranks(uneven_where_parameters_are_sharded, 2, timeout_s=TIMEOUT_S):
        assert "rank 0: the beginning of a training forward\n" in text
        assert "rank 1: the beginning of a training forward (no_sync)\n" in text
        assert "(at stage 3 equally many under no_sync())" in text


def zero_by(model: nn.Module, optimizer: Optimizer, how: str) -> None:
    """Clear the gradients in one of the ways that loops do."""
    if how == "p.grad = None":
        for p in model.parameters():
            p.grad = None
    else:
        owner = model if how.startswith("model") else optimizer
        owner.zero_grad(set_to_none=how.endswith("None"))


HOWS = ["model, None", "model, zeros", "optimizer, None", "optimizer, zeros", "p.grad = None"]


def zeroed(run: Run, how: str) -> None:
    """Run block 0, then block 1: with zeros block 0 goes on moving by its momentum and decay, with None it rests."""
    model = models.build(models.Routed, depth=2)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step, which in enumerate((0, 1, 1, 0)):
        loss = model(models.features(step, run.rank), [which]).square().mean()
        run.backward(loss)
        optimizer.step()
        zero_by(model, optimizer, how)
        run.record(loss=loss, kept=[p.grad is not None for p in model.parameters()])


@pytest.mark.product
@pytest.mark.parametrize(("how", "world"), at_worlds(HOWS))
def test_zero_grad(how: str, world: int) -> None:
    assert_matches(functools.partial(zeroed, how=how), world)


def zeroed_between_micro_batches(run: Run, how: str) -> None:
    model, optimizer = start(run)
    for step in range(2):
        backward(run, model, step, 0)
        zero_by(model, optimizer, how)
        backward(run, model, step, 1)
        optimizer.step()


@pytest.mark.product
@pytest.mark.parametrize("how", HOWS)
def test_zero_grad_between_backwards_forgets_what_was_reduced(how: str) -> None:
    assert_matches(functools.partial(zeroed_between_micro_batches, how=how), 2)


def change_what_waits(change: Callable[[nn.Module], None]) -> dict[tuple[int, bool], tuple[Any, Any]]:
    """Change gradients of which a part waits for its reduction; return them once all is reduced, and as they should be.

    They should be `change` of the first two micro-batches' sum, and the third's added.
    """
    found = {}
    for stage, shares_memory in itertools.product(STAGES, (True, False)):
        runs = [Sharded(stage, {"shared_memory": shares_memory}) for _ in range(2)]
        for run in runs:
            model, _ = start(run)
            backward(run, model, 0, 0)
            with run.no_sync() if run is runs[0] else contextlib.nullcontext():
                backward(run, model, 0, 1)
            change(model)
            backward(run, model, 0, 2)
        found[stage, shares_memory] = tuple([q.clone() for q in whole_grads(run.models[0])] for run in runs)
    return found


def whole_grads(model: nn.Module) -> Iterator[Tensor]:
    """Yield each parameter's whole gradient."""
    for p in model.parameters():
        assert p.grad is not None
        yield p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad


def zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def scale(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.mul_(0.5)


@pytest.mark.product
@pytest.mark.parametrize("change", [zero, scale])
def test_a_change_of_gradients_reaches_what_waits_for_its_reduction(change: Callable[[nn.Module], None]) -> None:
    for rank, found in enumerate(run_ranks(change_what_waits, 2, change, timeout_s=2 * TIMEOUT_S)):
        for where, (held_back, reduced) in found.items():
            for got, expected in zip(held_back, reduced, strict=True):
                assert torch.allclose(got, expected, rtol=1e-5, atol=1e-7), f"[rank {rank}/2] {where}"


def norm_of_what_waits(stage: int) -> str:
    """Ask for the norm of gradients that are not reduced; return the error."""
    run = Sharded(stage)
    model, _ = start(run)
    with run.no_sync():
        backward(run, model, 0)
    with pytest.raises(RuntimeError) as error:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return str(error.value)


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_wait_for_their_reduction_have_no_norm(stage: int) -> None:
    for text in run_ranks(norm_of_what_waits, 2, stage, timeout_s=TIMEOUT_S):
        assert "A norm needs reduced gradients" in text


def step_of_what_was_frozen(stage: int) -> str:
    """Freeze a unit whose gradients are not reduced yet, and step; return the error."""
    run = Sharded(stage)
    model, optimizer = start(run)
    with run.no_sync():
        backward(run, model, 0)
    model.get_submodule("blocks.1").requires_grad_(False)
    backward(run, model, 1)
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value)


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_wait_are_not_used_because_their_parameters_were_frozen(stage: int) -> None:
    for text in run_ranks(step_of_what_was_frozen, 2, stage, timeout_s=TIMEOUT_S):
        assert "optimizer.step() needs reduced gradients" in text


def grads_tell_the_truth(run: Run) -> None:
    model = models.build(models.Routed, depth=2)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    run.record(before=[p.grad is None for p in model.parameters()])
    for step in range(2):
        run.backward(model(models.features(step, run.rank), [0]).square().mean())
        run.record(
            is_none=[p.grad is None for p in model.parameters()],
            shapes=[None if p.grad is None else tuple(p.grad.shape) for p in model.parameters()],
            dtypes=[None if p.grad is None else p.grad.dtype for p in model.parameters()],
            devices=[None if p.grad is None else p.grad.device for p in model.parameters()],
            numels=[None if p.grad is None else p.grad.numel() for p in model.parameters()],
            is_tensor=[isinstance(p.grad, torch.Tensor) for p in model.parameters()],
        )
        optimizer.step()
        run.record(after_step=[p.grad is None for p in model.parameters()])
        optimizer.zero_grad(set_to_none=step == 1)
        run.record(after_zero=[p.grad is None for p in model.parameters()])


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 3])
def test_grad_has_the_global_shape_and_is_none_when_torchs_is(world: int) -> None:
    assert_matches(grads_tell_the_truth, world)


def norms_of_single_grads(run: Run) -> None:
    """Take the norm of each gradient by itself: every rank asks, and gets the norm of the reduced whole."""
    model, _ = start(run)
    run.backward(models.stack_loss(model, 0, run.rank))
    run.record(infinity=[p.grad.norm(float("inf")) for p in model.parameters()])


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 3])
def test_the_norm_of_one_grad_is_that_of_the_whole(world: int) -> None:
    assert_matches(norms_of_single_grads, world)


def by_a_reference_from_before(grad: Tensor, parameter: nn.Parameter) -> None:
    grad[0, 0] = float("inf")


def by_data(grad: Tensor, parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.data[0, 0] = float("nan")


def by_the_gradient(grad: Tensor, parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad[0, 0] = float("nan")


@pytest.mark.parametrize("reads_first", [True, False])
@pytest.mark.parametrize("change", [by_a_reference_from_before, by_data, by_the_gradient], ids=lambda one: one.__name__)
def test_one_rank_looks_again_at_gradients_that_were_changed_after_they_landed(
    change: Callable[[Tensor, nn.Parameter], None], reads_first: bool
) -> None:
    model = nn.Linear(256, 256)  # above HOT_NUMEL
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zs.shard(model, optimizer)
    model(torch.ones(1, 256)).sum().backward()
    grad = model.weight.grad if reads_first else torch.zeros(1, 1)
    model(torch.ones(1, 256)).sum().backward()
    if not reads_first and change is by_a_reference_from_before:
        grad = model.weight.grad
    change(grad, model.weight)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="'weight' is not finite; nothing was changed"):
        optimizer.step()
    assert torch.equal(model.weight, before)
