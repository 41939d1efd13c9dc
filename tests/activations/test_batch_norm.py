"""Batch norm under treatments of activations: training and evaluation, before one another and in one forward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs

WIDTH, ROWS = 512, 8
"""A buffer has 2 KiB, so that offload would take it."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, is_mixed: bool) -> None:
        super().__init__()
        self.blocks, self.is_mixed = nn.ModuleList(Block() for _ in range(2)), is_mixed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (block.eval()(x) if self.is_mixed else 0.0) + block.train(self.training)(x)
        return x


def trained(activations: Any, is_mixed: bool = False) -> list[Tensor]:
    """Evaluate with gradients, train, evaluate and train again; return parameters and buffers."""
    torch.manual_seed(0)
    model = Net(is_mixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zs.shard(model, optimizer, stage=2, activations=activations, units=[Block])
    x = torch.randn(ROWS, WIDTH)
    for is_training in (False, True, True, False, True):
        model.train(is_training)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [one.detach().clone() for one in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("name", ["recompute", "recompute-rest", "offload", "compress", "recompute+offload"])
def test_evaluation_may_come_before_training(name: str) -> None:
    """The buffers that change were learned from the first forward of a module, in whatever mode it was."""
    assert all(map(torch.equal, trained("keep"), trained(name)))


@pytest.mark.parametrize("name", ["offload", "compress", "compress+offload"])
def test_both_modes_in_one_forward(name: str) -> None:
    """Kernels change running statistics without a new version: a copy of them had their values of before."""
    assert all(map(torch.equal, trained("keep", True), trained(name, True)))


@pytest.mark.parametrize("name", ["recompute", "recompute-rest"])
def test_both_modes_in_one_forward_cannot_be_recomputed(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"The recomputation of 'blocks\.1' \(Block\)"):
        trained(name, True)


class Late(nn.Module):
    """A unit whose second norm has its first forward at the second step, in a mode that the unit knows."""

    def __init__(self) -> None:
        super().__init__()
        self.norms, self.steps = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2)), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.norms[int(self.steps > 0)](x).tanh()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["recompute", "recompute-rest"])
def test_a_norm_may_be_used_late(name: str) -> None:
    """Its statistics were not copied before, and its recomputation was refused, on the rank that took the path."""

    def run(activations: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Late(), nn.Linear(WIDTH, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zs.shard(model, optimizer, stage=2, activations=activations, units=[Late])
        for _ in range(3):
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model[1].steps += 1
        return [one.detach().clone() for one in (*model.parameters(), *model.buffers())]

    assert all(map(torch.equal, run("keep"), run(name)))
