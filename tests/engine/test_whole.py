"""Optimizers that need whole matrices give the bits of one process, at any stage and number of ranks."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adafactor, Muon, Optimizer

from tests import models
from tests.oracle import Run, assert_matches, at_worlds


class Trust(Optimizer):
    """An optimizer that looks at the norm of each whole parameter, as LARS and LAMB do."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state["mean"] = p.grad.mean() + state.get("mean", 0.0)
                    p.data = p.data - p.grad * p.norm() / (p.grad.norm() + 1e-6) * group["lr"] / state["count"]


def muon_and_adamw(model: nn.Module, **options: Any) -> list[Optimizer]:
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embedding" not in name and "position" not in name]
    others = [p for _, p in named if not any(p is one for one in matrices)]
    return [Muon(matrices, lr=0.02, **options), torch.optim.AdamW(others, lr=1e-2)]


def train(run: Run, model: nn.Module, *optimizers: Optimizer, steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + steps):
        loss = (models.gpt_loss if isinstance(model, models.GPT) else models.stack_loss)(model, step, run.rank)
        run.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        run.record(loss=loss)


def muon(run: Run) -> None:
    model = models.build(models.GPT)
    optimizers = muon_and_adamw(model)
    run.shard(model, *optimizers)
    train(run, model, *optimizers)


def adafactor(run: Run) -> None:
    for foreach in (False, True):
        model = models.build(models.GPT)
        optimizer = Adafactor(model.parameters(), lr=0.05, weight_decay=0.1, foreach=foreach)
        run.shard(model, optimizer)
        train(run, model, optimizer)


SCRIPTS = [muon, adafactor]


@pytest.mark.parametrize(("script", "world"), at_worlds(SCRIPTS))
def test_whole_matrices(script: Any, world: int) -> None:
    assert_matches(script, world)
