"""A hook of a user that raises in a backward: after `zero_grad()` the next step is torch's."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from tests.oracle import STAGES
from zeroshard.testing import run_ranks

RANKS = 2


def raise_once() -> Iterator[None]:
    """Raise at the first call of `next`, and do nothing at each later one."""
    raised: list[bool] = []

    class Once(Iterator[None]):
        def __next__(self) -> None:
            if not raised:
                raised.append(True)
                raise ValueError("a hook of the user")

    return Once()


def train(model: nn.Module, make: Any) -> dict[str, Tensor]:
    """Take a step after a backward that a hook before the engine's own interrupts; return the gradients."""
    (once, parameter) = (raise_once(), model.get_parameter("0.weight"))
    parameter.register_post_accumulate_grad_hook(lambda _: next(once))
    make(model)
    data = torch.arange(8.0).reshape(2, 4)
    with pytest.raises(ValueError, match="a hook of the user"):
        model(data).sum().backward()
    model.zero_grad()
    model(data).sum().backward()
    grads: dict[str, Any] = {name: one.grad for name, one in model.named_parameters()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone() for name, grad in grads.items()}


def differences(stage: int, shared_memory: bool) -> list[str]:
    """Return the parameters whose gradient after the error differs from a plain model's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    def make(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zs.shard(model, optimizer, stage=stage, settings=zs.Settings(shared_memory=shared_memory))

    plain = train(copy.deepcopy(model), lambda _: None)
    sharded = train(model, make)
    return [name for name, grad in plain.items() if not torch.equal(grad, sharded[name])]


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_what_a_hook_kept_from_landing_is_dropped_by_zero_grad(stage: int, shared_memory: bool) -> None:
    assert run_ranks(differences, RANKS, stage, shared_memory) == [[]] * RANKS
