"""torch's utilities on a sharded model, at each stage: what they do on plain data parallelism, or a named remedy."""

import copy
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests import models
from tests.oracle import STAGES, TIMEOUT_S, Plain, Run, Sharded, assert_same, run_cases
from tests.oracle import _copied as copied

DECAY, LIMIT = 0.75, 1e-3


def step(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    run.backward(models.stack_loss(model, number, run.rank))
    optimizer.step()
    optimizer.zero_grad()


def average(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Keep torch's average over two steps; return its values, and what it computes."""
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for number in range(2):
        step(run, model, optimizer, number)
        ema.update_parameters(model)
    return [*ema.module.parameters(), ema(models.features(0, run.rank))]


def average_gathered(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Do the same where parameters are whole."""
    with run.gathered():
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for number in range(2):
        step(run, model, optimizer, number)
        with run.gathered():
            ema.update_parameters(model)
    return [*ema.module.parameters(), ema(models.features(0, run.rank))]


def norm(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return [p.norm() for p in model.parameters()]


def vector(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return nn.utils.parameters_to_vector(model.parameters())


def same_type(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Convert to what the parameters are; return what a step makes of them."""
    assert model.type(torch.float32) is model
    step(run, model, optimizer, 0)
    with run.gathered():
        return copied(model.state_dict())


def other_type(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Convert to another dtype, in which the optimizer would not know the parameters."""
    model.type(torch.float64)


def set_states(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Double the optimizer's averages by torch's functions for state dicts; return what the next step makes of them."""
    step(run, model, optimizer, 0)
    with run.gathered(states=True):
        states = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    for state in states["state"].values():
        state["exp_avg"].mul_(2)
    with run.gathered(states=True, writeback=True):
        set_optimizer_state_dict(model, optimizer, states)
    step(run, model, optimizer, 1)
    with run.gathered():
        return copied(model.state_dict())


def clip_values(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Clip each gradient by value; return its norm and what a step makes of it."""
    run.backward(models.stack_loss(model, 0, run.rank))
    nn.utils.clip_grad_value_(model.parameters(), LIMIT)
    largest = [p.grad.abs().max().item() for p in model.parameters() if p.grad is not None]
    assert max(largest) == pytest.approx(LIMIT)
    optimizer.step()
    with run.gathered():
        return [largest, copied(model.state_dict())]


HABITS = (average, average_gathered, norm, vector, same_type, other_type, set_states, clip_values)
RELEASED = {
    average: "AveragedModel keeps full copies of parameters. zero.ema(decay) keeps a sharded average",
    norm: "so `norm` cannot read its values. Use `with zero.gathered():`",
    vector: "so `view` cannot read its values. Use `with zero.gathered():`",
    other_type: "so `type` cannot read its values. Move and convert the model before zs.shard()",
}
"""What is an error where parameters are released, and says."""


def observed(stage: int | None) -> dict[str, Any]:
    """Return what each habit comes to, or its error. Runs on a rank."""
    found: dict[str, Any] = {}
    for habit in HABITS:
        run: Run = Plain() if stage is None else Sharded(stage)
        model = models.build(models.Stack)
        optimizer = models.adamw(model)
        run.shard(model, optimizer)
        try:
            found[habit.__name__] = copied(habit(run, model, optimizer))
        except RuntimeError as error:
            found[habit.__name__] = str(error)
    return found


@functools.cache
def results() -> Mapping[tuple[Any, ...], list[Any]]:
    return run_cases(observed, 2, [(None,), *((stage,) for stage in STAGES)], timeout_s=2 * TIMEOUT_S)


@pytest.mark.parametrize("habit", [habit for habit in HABITS if habit is not other_type])
def test_utilities_do_what_they_do_on_plain_data_parallelism_or_name_the_remedy(habit: Any) -> None:
    for stage in STAGES:
        for rank in range(2):
            expected, actual = (results()[(key,)][rank][habit.__name__] for key in (None, stage))
            where = f"[rank {rank}/2] stage {stage}, {habit.__name__}"
            if stage == 3 and habit in RELEASED:
                assert RELEASED[habit] in actual and f"[rank {rank}/2]" in actual and "'stem.weight'" in actual, actual
            else:
                assert not isinstance(expected, str) and not isinstance(actual, str), f"{where}: {actual}"
                assert_same(expected, actual, where)


def test_another_dtype_is_refused_at_each_stage() -> None:
    for stage in STAGES:
        for rank in range(2):
            text = results()[(stage,)][rank]["other_type"]
            words = RELEASED[other_type] if stage == 3 else "Convert, move and resize the model before zs.shard()"
            assert words in text and "'stem.weight'" in text, text
