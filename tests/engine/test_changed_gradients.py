"""Optimizers that change their gradients in place: parameters and kept gradients are those of plain torch.

Owns updates at once and on the host. Owners of whole matrices change copies of the gradients. torch's SGD with
`nesterov=True, foreach=True` adds the momentum to the gradients; optimizers of other people add the weight decay.
Gradients are kept over some steps, so a change counts in the next one.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, Run, assert_matches

STEPS = 5
LOOKED_AT = ("stem.weight", "blocks.1.up.weight", "blocks.1.up.bias", "head.bias")
"""Gradients that are compared; each is a collective. The parameters tell of the others."""
KEPT = (0, 2, 3)
"""Steps whose gradients are kept for the next one."""


class Decayed(Optimizer):
    """Adds the weight decay to the gradients, as many optimizers do, and leaves half of them to the next step."""

    def __init__(self, params: Any, lr: float = 0.05, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(p, alpha=group["weight_decay"])
                    p.sub_(p.grad, alpha=group["lr"])
                    p.grad.mul_(0.5)


class DecayedTogether(Decayed):
    """Changes all gradients of a group by one kernel."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                grads = [p.grad for p in params]
                torch._foreach_add_(grads, params, alpha=group["weight_decay"])
                torch._foreach_add_(params, grads, alpha=-group["lr"])
                torch._foreach_mul_(grads, 0.5)


class Dropping(Decayed):
    """Drops each gradient that it has used."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])
                    p.grad = None


def sgd(**options: Any) -> Callable[[Any], Optimizer]:
    return functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, **options)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "foreach": sgd(foreach=True),
    "foreach, decay, maximize": sgd(foreach=True, weight_decay=0.1, maximize=True),
    "fused, decay": sgd(fused=True, weight_decay=0.1),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01, foreach=True, maximize=True, weight_decay=0.1),
    "own": Decayed,
    "own, together": DecayedTogether,
    "own, drops": Dropping,
}


def whole(p: nn.Parameter) -> Tensor | None:
    """Return a gradient as one tensor."""
    if p.grad is None:
        return None
    return p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad


def train(run: Run, name: str, **options: Any) -> None:
    """Train a stack with an optimizer; keep the gradients of some steps."""
    model = models.build(models.Stack)
    optimizer = OPTIMIZERS[name](model.parameters())
    run.shard(model, optimizer, **options)
    for step in range(STEPS):
        if step == 3:
            with run.no_sync():
                run.backward(models.stack_loss(model, step, run.rank, 1))
        run.backward(models.stack_loss(model, step, run.rank))
        optimizer.step()
        run.record(grads={key: whole(model.get_parameter(key)) for key in LOOKED_AT})
        if step == 2:
            optimizer.step()  # with the gradients that the last step has changed
            run.record(grads={key: whole(model.get_parameter(key)) for key in LOOKED_AT})
        if step not in KEPT:
            optimizer.zero_grad()


WAYS: dict[str, dict[str, Any]] = {
    "at once": {},
    "host": {"offload": zs.Offload()},
    "half on the host": {"offload": zs.Offload(states=0.5)},
    "gradients on the device": {"offload": zs.Offload(gradients=0)},
}


@pytest.mark.product
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_changed_gradients_are_those_of_plain_torch(way: str, name: str) -> None:
    """By messages where states are on the host, in memory of the host otherwise; `test_parity` has both."""
    stages = STAGES if way == "at once" else (1, 3)
    options = {"shared_memory": way in ("at once", "half on the host")}
    assert_matches(functools.partial(train, name=name, **WAYS[way]), 2, stages, options)
