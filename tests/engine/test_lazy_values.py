"""Tensors whose values torch conjugates or negates when they are read: gradients, activations, buffers, checkpoints."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from tests.oracle import STAGES, run_cases
from zeroshard.testing import run_ranks


class Phase(nn.Module):
    """The gradient of its real parameter is negated."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.complex(x, self.phase).conj() * (x + 1j)).imag


class Tied(nn.Module):
    """The gradient of its complex parameter is conjugated, as are tensors that autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.complex64)
        return (wide @ self.weight.conj() @ (self.weight.mH + 1j)).real + (wide * 1j).conj().imag


class Buffers(nn.Module):
    """Two buffers, of which one is conjugated and one negated, and which a training forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("conjugated", torch.randn(4, 4, dtype=torch.complex64).conj())
        self.register_buffer("negated", torch.randn(4, 4, dtype=torch.complex64).conj().imag)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.conjugated.mul_(1 + 0.5j)
            self.negated.add_(x.detach())
        return (self.linear(x) * self.conjugated).real * self.negated


MODULES = {one.__name__: one for one in (Phase, Tied, Buffers)}


def make(kind: str, count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(MODULES[kind]() for _ in range(count)))


def train(kind: str, count: int, stage: int | None, **options: Any) -> list[Tensor]:
    """Return the parameters and buffers after three steps; those of a plain model without a stage."""
    model = make(kind, count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if stage is not None:
        zero = zs.shard(model, optimizer, stage=stage, units=[MODULES[kind]], **options)
    for step in range(3):
        model(torch.arange(16.0).view(4, 4) / 8 - 1 + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if stage is None:
        return [one.detach().clone() for one in (*model.parameters(), *model.buffers())]
    with zero.gathered():
        return [one.detach().clone() for one in (*model.parameters(), *model.buffers())]


CASES = [(kind, count, stage) for kind in MODULES for count in (1, 2) for stage in STAGES]


@cache
def trained(world: int) -> dict[tuple[Any, ...], list[list[Tensor]]]:
    return run_cases(train, world, CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_values_are_those_of_plain_torch(world: int, case: tuple[str, int, int]) -> None:
    expected = train(*case[:2], None)
    for found in trained(world)[case]:
        torch.testing.assert_close(found, expected)


def reductions(stage: int | None) -> list[Tensor]:
    """Return reductions over the elements of a complex gradient."""
    model = make("Tied", 1)
    if stage is not None:
        zs.shard(model, torch.optim.AdamW(model.parameters()), stage=stage)
    model(torch.arange(16.0).view(4, 4) / 8 - 1).square().mean().backward()
    grad = next(model.parameters()).grad
    return [grad.sum(), grad.mean(), grad.std(), grad.var(), grad.square().sum(), grad.norm()]


@pytest.mark.parametrize("stage", [1, 3])
def test_reductions_of_complex_gradients_are_torchs(stage: int) -> None:
    for found in run_ranks(reductions, 2, stage):
        torch.testing.assert_close(found, reductions(None))


@pytest.mark.parametrize("activations", ["offload", "compress"])
def test_saved_tensors_come_back(activations: str) -> None:
    torch.testing.assert_close(train("Tied", 2, 0, activations=activations), train("Tied", 2, None))


def reload(folder: str, asynchronous: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Save, change all buffers, and load; return them as they were and as they are."""
    model = make("Buffers", 1)
    zero = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
    zero.save(f"{folder}/one", asynchronous=asynchronous)
    zero.wait()
    before = [buffer.clone() for buffer in model.buffers()]
    for buffer in model.buffers():
        buffer.zero_()
    zero.load(f"{folder}/one")
    assert all(buffer.is_conj() or buffer.is_neg() for buffer in model.buffers())
    return before, [*model.buffers()]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_has_the_values(asynchronous: bool, tmp_path: Path) -> None:
    for before, after in run_ranks(reload, 2, str(tmp_path), asynchronous):
        torch.testing.assert_close(after, before, rtol=0, atol=0)
