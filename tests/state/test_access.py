"""State dicts outside `gathered()`: answered where this rank has all, refused by name where others have a part."""

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, WATCHDOG_S, assert_same, run_cases
from tests.rotation import third


def made(stage: int, steps: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a stack that has made some steps. Runs on a rank."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    if stage >= 0:
        zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S), **options)
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train on the same data on each rank, so that a plain model on one rank is the oracle."""
    for step in steps:
        models.stack_loss(model, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()


def save_and_load(stage: int) -> tuple[Any, Any, Any]:
    """Save, train on, load, and train again; return what was saved and both ends. Runs on a rank."""
    model, optimizer = made(stage, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, range(2, 4))
    ends = [{name: value.clone() for name, value in model.state_dict().items()}]
    optimizer.load_state_dict(copy.deepcopy(saved))  # torch keeps and updates the given tensors themselves
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    train(model, optimizer, range(2, 4))
    ends.append({name: value.clone() for name, value in model.state_dict().items()})
    return saved, *ends


@functools.cache
def plain() -> tuple[Any, Any, Any]:
    """Return what one process without sharding has."""
    return save_and_load(-1)


@pytest.mark.product
@pytest.mark.parametrize(("world", "stages"), [(1, STAGES), (2, (0,))])
def test_where_all_is_here_states_are_torchs(world: int, stages: tuple[int, ...]) -> None:
    for (stage,), results in run_cases(save_and_load, world, third([(stage,) for stage in stages[::-1]])).items():
        for saved, first, second in results:
            assert_same(plain()[0], saved, f"stage {stage}")
            assert_same(first, second, f"stage {stage}")
            assert_same(plain()[1], first, f"stage {stage}")


def load_what_was_read(stage: int, precision: str) -> list[Any]:
    """Train with and without a load of the states that were just read; return both ends. Runs on a rank."""
    ends = []
    for loads in (False, True):
        model = models.build(models.Stack)
        optimizer = models.adamw(model, fused=True)
        zero = zs.shard(model, optimizer, stage=stage, precision=precision, settings=zs.Settings(watchdog_s=WATCHDOG_S))
        train(model, optimizer, range(2))
        if loads:
            with zero.gathered(states=True, writeback=True):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer, range(2, 4))
        with zero.gathered(states=True):
            ends.append(copy.deepcopy([model.state_dict(), optimizer.state_dict()]))
    return ends


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2])
def test_states_that_are_loaded_keep_the_dtype_of_master_weights(world: int) -> None:
    cases = [(stage, precision) for stage in (1, 3) for precision in ("fp32", "bf16", "fp16")]
    for case, by_rank in run_cases(load_what_was_read, world, third(cases[::-1])).items():
        for without, loaded in by_rank:
            assert_same(without, loaded, f"{case}")


def before_and_after(stage: int) -> list[str]:
    """Save and load before the first step, then after one; return the errors. Runs on a rank."""
    model, optimizer = made(stage, 0)
    empty = optimizer.state_dict()
    optimizer.load_state_dict(empty)
    train(model, optimizer, range(1))
    texts = []
    for call in (optimizer.state_dict, lambda: optimizer.load_state_dict(empty)):
        with pytest.raises(RuntimeError, match="gathered") as caught:
            call()
        texts.append(str(caught.value))
    train(model, optimizer, range(1, 2))
    return [*texts, str([len(group["params"]) for group in empty["param_groups"]])]


def test_before_the_first_step_there_is_nothing_to_gather() -> None:
    count = len(list(models.build(models.Stack).parameters()))
    for (stage,), results in run_cases(before_and_after, 2, third([(stage,) for stage in (3, 2, 1)])).items():
        for saving, loading, groups in results:
            assert "zero.gathered(states=True)" in saving, stage
            assert "zero.gathered(states=True, writeback=True)" in loading, stage
            assert groups == str([count]), stage


def whole_parameters(stage: int) -> dict[str, torch.Tensor]:
    """Return the model's state_dict, on rank 0 alone. Runs on a rank."""
    model, optimizer = made(stage, 2)
    found = {name: value.clone() for name, value in model.state_dict().items()} if dist.get_rank() == 0 else {}
    train(model, optimizer, range(2, 3))
    return found


@pytest.mark.product
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_that_stay_whole_are_saved_by_one_rank(stage: int) -> None:
    expected = made(-1, 2)[0].state_dict()
    assert_same(dict(expected), run_cases(whole_parameters, 2, [(stage,)])[stage,][0])


def assign(stage: int) -> tuple[bool, dict[str, torch.Tensor]]:
    """Load with `assign=True`; return whether parameters are the same objects, and their values. Runs on a rank."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    before = list(map(id, model.parameters()))
    other = {name: value + 1 for name, value in models.build(models.Stack).state_dict().items()}
    with zero.gathered(writeback=True):
        model.load_state_dict(other, assign=True)
    train(model, optimizer, range(1))
    with zero.gathered():
        return before == list(map(id, model.parameters())), {n: v.clone() for n, v in model.state_dict().items()}


def test_assign_copies_into_the_parameters_that_are_there() -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    train(model, optimizer, range(1))
    for results in run_cases(assign, 2, third([(stage,) for stage in STAGES[::-1]])).values():
        for is_same, found in results:
            assert is_same
            assert_same(dict(model.state_dict()), found)


def test_the_handle_is_not_the_model() -> None:
    zero = zs.shard(nn.Linear(2, 2))
    for call in (
        lambda: zero(torch.ones(2)),
        lambda: zero.train(),
        lambda: zero.named_modules(),
    ):
        with pytest.raises((TypeError, AttributeError), match=r"write `zero = zs\.shard\(model, optimizer\)`"):
            call()
    with pytest.raises(AttributeError, match="no attribute 'paramters'") as caught:
        zero.paramters  # noqa: B018
    assert "zs.shard" not in str(caught.value)


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_is_not_pickled(stage: int) -> None:
    _, optimizer = made(stage, 1)
    with pytest.raises(TypeError, match=r"'.*' is sharded, so its optimizer cannot be pickled. Call zero.save"):
        torch.save(optimizer, io.BytesIO())


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, lambda zero: torch.save(zero, io.BytesIO())])
def test_a_handle_is_not_copied_or_pickled(take: Callable[[zs.Zero], object]) -> None:
    zero = zs.shard(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"^Zero\(.*6 parameters\) cannot be copied or pickled: .* Use zero\.save"):
        take(zero)
    zero.detach()
