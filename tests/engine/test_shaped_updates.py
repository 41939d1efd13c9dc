"""Where each rank updates whole parameters, an optimizer that is not known sees what plain torch gives it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard as zs
from tests.oracle import TIMEOUT_S, Run, assert_matches, assert_same, randn
from zeroshard.testing import run_ranks


class Factored(Optimizer):
    """Keeps row and column means of squares of what has several dimensions, and counts its calls in the groups."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                square = p.grad.square() + 1e-8
                if p.ndim > 1:
                    state = self.state[p]
                    state["calls"] = [*state.get("calls", []), group["calls"]]
                    for dim in (0, 1):
                        state[f"mean_{dim}"] = square.mean(dim, keepdim=True) + state.get(f"mean_{dim}", 0.0)
                    square = state["mean_0"] * state["mean_1"] / square.mean()
                p.sub_(group["lr"] / group["calls"] * p.grad / square.sqrt())


class Averaged(Optimizer):
    """Element-wise, with a state of each element and a number."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state["mean"] = p.grad.lerp(state.get("mean", torch.zeros_like(p)), 0.9)
                    p.sub_(state["mean"] / state["count"], alpha=group["lr"])


class Mixed(nn.Module):
    """Parameters of four to no dimensions, one that is not row-major, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(5, 3)
        self.spare = nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        hidden: Tensor = self.conv(images).tanh().mean((2, 3)) * self.scale
        return self.head(hidden).square().sum()


def build() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    loss: Tensor = model(randn(2, 3, 5, 5, key=(step, rank)))
    return loss


def factored(run: Run) -> None:
    model = build()
    optimizer = Factored([{"params": [*model.conv.parameters(), model.scale]}, {"params": [*model.head.parameters()]}])
    optimizer.add_param_group({"params": [*model.spare.parameters()], "lr": 0.1})
    run.shard(model, optimizer)
    for step in range(3):
        run.backward(loss_of(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()
        run.record(calls=optimizer.param_groups[0]["calls"])


@pytest.mark.parametrize("world", [1, 2])
def test_an_optimizer_sees_shapes_and_one_call_a_step(world: int) -> None:
    assert_matches(factored, world, stages=(0,))


def resumed(
    cls: type[Optimizer], parts: tuple[tuple[int, int], ...], path: Path, options: dict[str, Any]
) -> tuple[dict[str, Tensor], Any]:
    """Train parts of (stage, steps), each from the checkpoint before; return the parameters and the whole states."""
    first = 0
    for place, (stage, steps) in enumerate(parts):
        model = build()
        optimizer = cls(model.parameters())
        zero = zs.shard(model, optimizer, stage=stage, **options)
        if place:
            zero.load(path / str(place - 1))
        for step in range(first, first + steps):
            loss_of(model, step, zero.mesh.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        zero.save(path / str(place))
        first += steps
    with zero.gathered(states=True):
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        return parameters, optimizer.state_dict()["state"]


OPTIONS: list[dict[str, Any]] = [{}, {"precision": "bf16"}, {"offload": "host"}]


def assert_resumes(
    cls: type[Optimizer], parts: tuple[tuple[int, int], ...], path: Path, options: dict[str, Any]
) -> None:
    whole = ((0, sum(steps for _, steps in parts)),)
    at_once, in_parts = (
        run_ranks(resumed, 2, cls, each, path / str(len(each)), options, timeout_s=TIMEOUT_S)[0]
        for each in (whole, parts)
    )
    assert_same(at_once, in_parts)


@pytest.mark.parametrize("options", OPTIONS)
def test_states_of_any_shape_are_saved_where_nothing_is_cut(options: dict[str, Any], tmp_path: Path) -> None:
    assert_resumes(Factored, ((0, 2), (0, 2)), tmp_path, options)


@pytest.mark.parametrize("options", OPTIONS[:2])
def test_states_of_elements_move_between_stages(options: dict[str, Any], tmp_path: Path) -> None:
    """An element-wise optimizer that is not known gets whole parameters at stage 0, and slices at stage 3."""
    assert_resumes(Averaged, ((0, 2), (3, 2), (0, 2)), tmp_path, options)
