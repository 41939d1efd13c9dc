"""Parameters of every shape and layout: 0-d, empty, odd, fewer elements than ranks, strides that are not row-major."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import models
from tests.models import WIDTH
from tests.oracle import WORLDS, Run, assert_matches


class Odd(nn.Module):
    """A block with parameters of awkward shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0))
        self.no_rows = nn.Parameter(torch.empty(0, 3))
        self.one = nn.Parameter(torch.full((1,), 0.3))
        self.prime = nn.Parameter(torch.linspace(-1, 1, 7))
        self.cube = nn.Parameter(torch.linspace(-1, 1, 105).view(3, 5, 7))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gain = self.scale * self.one + self.prime.sin().sum() + self.empty.sum() + self.no_rows.sum()
        return x + self.linear(x) * gain * self.cube.cos().mean()


def train(
    run: Run, model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer] = models.adamw, **options: Any
) -> None:
    """Train three steps and record shapes and strides as the user sees them."""
    optimizer = make(model)
    run.shard(model, optimizer, **options)
    for step in range(3):
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss)
        run.record(
            loss=loss,
            shapes=[tuple(p.shape) for p in model.parameters()],
            strides=[p.stride() for p in model.parameters()],
            used=[p.grad is not None for p in model.parameters()],
        )
        optimizer.step()
        optimizer.zero_grad()
        run.record(shapes=[tuple(p.shape) for p in model.parameters()])


def odd_blocks(run: Run) -> None:
    model = models.build(models.Stack, depth=0)
    model.blocks.extend(models.build(Odd) for _ in range(3))
    train(run, model)


def odd_blocks_with_sgd(run: Run) -> None:
    model = models.build(models.Stack, depth=0)
    model.blocks.extend(models.build(Odd) for _ in range(3))
    train(run, model, models.sgd)


class Scalars(nn.Module):
    """A model of scalars only: fewer elements than ranks in each of its units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scalar() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x[:, :3]


class Scalar(nn.Module):
    """One number and one vector of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.9))
        self.shift = nn.Parameter(torch.tensor([0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.gain + self.shift)


def more_ranks_than_elements(run: Run) -> None:
    train(run, models.build(Scalars))


class OnlyEmpty(nn.Module):
    """A block whose only parameter holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum()


def units_of_no_elements(run: Run) -> None:
    model = models.build(models.Stack)
    model.blocks = nn.ModuleList(OnlyEmpty() for _ in range(2))
    train(run, model, units=list(model.blocks))


class Convolution(nn.Module):
    """A convolution in channels-last layout and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(WIDTH, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        image = x.repeat(1, 3).view(-1, 3, 3, 4)
        image = self.convolution(image.contiguous(memory_format=torch.channels_last))
        return F.linear(F.linear(image.mean(1).view(-1, WIDTH), self.transposed), self.transposed.t())


def other_strides(run: Run) -> None:
    model = models.build(models.Stack, depth=0)
    model.blocks.extend(models.build(Convolution) for _ in range(2))
    train(run, model)


def root_only(run: Run) -> None:
    """A model without any unit but the root."""
    train(run, models.build(nn.Linear, 5, 3))


class OneParameter(nn.Module):
    """A model that is one parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 15).view(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def one_parameter(run: Run) -> None:
    train(run, models.build(OneParameter))


def many_small_units(run: Run) -> None:
    train(run, models.build(models.Stack, depth=12))


SCRIPTS = [
    odd_blocks,
    odd_blocks_with_sgd,
    more_ranks_than_elements,
    units_of_no_elements,
    other_strides,
    root_only,
    one_parameter,
    many_small_units,
]


@pytest.mark.product
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_shapes(script: Callable[[Run], None], world: int) -> None:
    assert_matches(script, world)
