"""Batch norm under treatments of activations: training and evaluation, before one another and in one forward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from tests.oracle import TIMEOUT_S, WATCHDOG_S
from zeroshard.testing import RankFailure, run_ranks

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

    def __init__(self, kind: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.norms, self.steps = nn.ModuleList(kind(WIDTH) for _ in range(2)), 0

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


class OwnNorm(nn.Module):
    """Keeps a mean in place, as user code does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.mean = nn.Parameter(torch.ones(width)), nn.Buffer(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return (x - self.mean) * self.weight


def on_one_rank(kind: type[nn.Module], activations: Any, shared: bool) -> list[Tensor]:
    """Use the second norm late, on rank 1 alone. Runs on a rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Late(kind), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = zs.Settings(shared_memory=shared, watchdog_s=WATCHDOG_S)
    zero = zs.shard(model, optimizer, stage=2, activations=activations, units=[Late], settings=settings)
    for _ in range(3):
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model[1].steps += zero.mesh.rank
    return [one.detach().clone() for one in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("shared", [True, False])
def test_a_norm_may_be_used_late_on_one_rank(shared: bool) -> None:
    kept, again = (
        run_ranks(on_one_rank, 2, nn.BatchNorm1d, activations, shared, timeout_s=TIMEOUT_S)
        for activations in ("keep", "recompute")
    )
    for rank in range(2):
        assert all(map(torch.equal, kept[rank], again[rank]))


@pytest.mark.parametrize("shared", [True, False])
def test_buffers_that_one_rank_changes_late_end_all_ranks_with_the_cause(shared: bool) -> None:
    """Their values before are lost, on one rank alone, which raises while the other waits in its backward."""
    with pytest.raises(RankFailure) as failure:
        run_ranks(on_one_rank, 2, OwnNorm, "recompute", shared, timeout_s=TIMEOUT_S)
    errors = failure.value.errors
    assert set(errors) == {0, 1}
    for error in errors.values():
        assert "[rank 1/2] A forward of '1' (Late), which is recomputed, changed buffers (mean)" in error.message
