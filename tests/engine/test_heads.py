"""The gradients of an embedding that is the head, too, are added up in place: no third one, and the same bits."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, assert_same
from zeroshard.testing import run_ranks

ROWS, WIDTH = 1024, 16


class TwoModules(nn.Module):
    """The head is a module of its own, which shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mid = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Any:
        return self.head(self.mid(self.table(x)))


class OneModule(TwoModules):
    """The model uses the embedding's weight itself, and returns its loss beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, x: Tensor) -> Any:
        logits = F.linear(self.mid(self.table(x)), self.table.weight)
        return {"logits": logits, "loss": F.cross_entropy(logits, x)}


class TwoHeads(OneModule):
    """The model uses the embedding's weight three times."""

    def forward(self, x: Tensor) -> Any:
        y = self.mid(self.table(x))
        losses = [F.cross_entropy(F.linear(one, self.table.weight), x) for one in (y, torch.tanh(y))]
        return {"loss": losses[0] + losses[1]}


def loss_of(output: Any, x: Tensor) -> Tensor:
    return F.cross_entropy(output, x) if isinstance(output, Tensor) else output["loss"]


def sums_in(profile: torch.autograd.profiler.profile) -> list[str]:
    """Name, in order, what added two tensors of the table's shape."""
    events = [event for event in profile.function_events or [] if event.name in ("aten::add", "aten::add_")]
    return [event.name for event in events if event.input_shapes[:2] == [[ROWS, WIDTH]] * 2]


def train(kind: Callable[[], nn.Module], stage: int | None) -> tuple[list[str], dict[str, Tensor]]:
    """Train two steps; return how the table's gradients were added in backward, and the parameters."""
    model = models.build(kind)
    optimizer = models.adamw(model)
    units = [model.table, model.mid]
    zero = (
        None
        if stage is None
        else zs.shard(model, optimizer, stage=stage, units=units, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    )
    names = []
    for step in range(2):
        x = torch.arange(8) + 8 * step
        loss = loss_of(model(x), x)
        with torch.autograd.profiler.profile(record_shapes=True) as profile:
            loss.backward()
        names += sums_in(profile)
        optimizer.step()
        optimizer.zero_grad()
    with nullcontext() if zero is None else zero.gathered():
        return names, {name: p.detach().clone() for name, p in model.state_dict().items()}


@pytest.mark.parametrize("kind", [TwoModules, OneModule])
def test_autograd_alone_takes_memory_for_the_sum(kind: Callable[[], nn.Module]) -> None:
    assert train(kind, None)[0] == ["aten::add", "aten::add"], "torch needs no help any more: setup/heads.py can go"


@pytest.mark.product
@pytest.mark.parametrize("kind", [TwoModules, OneModule, TwoHeads])
@pytest.mark.parametrize("stage", STAGES)
def test_the_gradients_are_added_in_place(stage: int, kind: Callable[[], nn.Module]) -> None:
    whole = train(kind, None)[1]
    # Both ranks have the same data, so that their mean is what one has.
    for names, parameters in run_ranks(train, 2, kind, stage, timeout_s=TIMEOUT_S):
        assert names == ["aten::add_"] * (4 if kind is TwoHeads else 2)
        assert_same(whole, parameters)


def test_higher_derivatives_keep_their_graph() -> None:
    model = models.build(TwoModules)
    zs.shard(model, stage=0, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    x = torch.arange(8)
    (first,) = torch.autograd.grad(loss_of(model(x), x), [model.table.weight], create_graph=True)
    plain = models.build(TwoModules)
    (expected,) = torch.autograd.grad(loss_of(plain(x), x), [plain.table.weight], create_graph=True)
    second = torch.autograd.grad(first.square().sum(), [model.mid.weight])
    assert_same(torch.autograd.grad(expected.square().sum(), [plain.mid.weight])[0], second[0])
