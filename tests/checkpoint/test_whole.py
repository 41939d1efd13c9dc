"""States of parameters that one rank updates whole: saved by their owners, read by other owners."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adafactor, Muon, Optimizer

import zeroshard as zs
from tests import models
from tests.oracle import TIMEOUT_S, WATCHDOG_S, assert_same
from zeroshard.checkpoint.verify import verify
from zeroshard.optim.whole import whole_matrix
from zeroshard.testing import run_ranks

PLACES = [(1, 0), (2, 3), (4, 1), (2, 0), (4, 2), (1, 3)]
"""Numbers of ranks, and stages. All ranks train on the same data, so that powers of two of them have the same bits."""


def adafactor(model: nn.Module) -> list[Optimizer]:
    return [Adafactor(model.parameters(), lr=0.05)]


def muon(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [Muon(matrices, lr=0.02), torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)]


def some_whole(model: nn.Module) -> list[Optimizer]:
    return [whole_matrix(torch.optim.AdamW(model.parameters(), lr=0.01), takes=lambda shape: len(shape) == 2)]


def sliced(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.01)]


MAKERS = {"adafactor": adafactor, "muon": muon, "some whole": some_whole, "sliced": sliced}


class Mixed(models.Stack):
    """A stack with a convolution whose weight lies in another order."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.convolution = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = super().forward(x).view(-1, 3, 1, 1).contiguous(memory_format=torch.channels_last)
        return self.convolution(image).flatten(1)


def built(name: str, stage: int) -> tuple[nn.Module, list[Optimizer], zs.Zero]:
    model = models.build(Mixed)
    optimizers = MAKERS[name](model)
    return model, optimizers, zs.shard(model, optimizers, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S))


def train(model: nn.Module, optimizers: list[Optimizer], steps: range) -> None:
    for step in steps:
        models.stack_loss(model, step, 0).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def content(zero: zs.Zero, model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    with zero.gathered(states=True):
        return {
            "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
            "states": [torch.utils._pytree.tree_map(_copied, one.state_dict()) for one in optimizers],
        }


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def uninterrupted(name: str, stage: int) -> dict[str, Any]:
    model, optimizers, zero = built(name, stage)
    train(model, optimizers, range(4))
    return content(zero, model, optimizers)


def save(name: str, stage: int, path: Path, asynchronous: bool) -> dict[str, Any]:
    model, optimizers, zero = built(name, stage)
    train(model, optimizers, range(2))
    zero.save(path, asynchronous=asynchronous)
    zero.wait()
    verify(path) if not dist.is_initialized() or dist.get_rank() == 0 else None
    return content(zero, model, optimizers)


def resume(name: str, stage: int, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizers, zero = built(name, stage)
    train(model, optimizers, range(7, 8))  # what is here before is gone
    zero.load(path)
    loaded = content(zero, model, optimizers)
    train(model, optimizers, range(2, 4))
    return loaded, content(zero, model, optimizers)


def on_ranks(world: int, target: Any, *args: Any) -> list[Any]:
    return run_ranks(target, world, *args, timeout_s=TIMEOUT_S, process_group=world > 1)


@functools.cache
def reference(name: str) -> dict[str, Any]:
    return on_ranks(1, uninterrupted, name, 0)[0]


@pytest.mark.product
@pytest.mark.parametrize("place", range(len(PLACES)))
@pytest.mark.parametrize("name", ["adafactor", "muon", "some whole"])
def test_a_resumed_job_has_the_bits_of_one_that_was_not_interrupted(name: str, place: int, tmp_path: Path) -> None:
    (world, stage), (next_world, next_stage) = PLACES[place], PLACES[(place + 1) % len(PLACES)]
    saved = on_ranks(world, save, name, stage, tmp_path / "step-2", bool(place % 2))
    for loaded, after in on_ranks(next_world, resume, name, next_stage, tmp_path / "step-2"):
        assert_same(saved[0], loaded)
        assert_same(reference(name), after)


@pytest.mark.product
@pytest.mark.parametrize(("first", "second"), [("some whole", "sliced"), ("sliced", "some whole")])
def test_states_are_read_whole_that_were_cut_and_the_other_way(first: str, second: str, tmp_path: Path) -> None:
    on_ranks(2, save, first, 3, tmp_path / "step-2", False)
    for _, after in on_ranks(4, resume, second, 2, tmp_path / "step-2"):
        assert_same(reference("sliced"), after)


def unsaveable(path: Path) -> str:
    model, optimizers, zero = built("adafactor", 3)
    train(model, optimizers, range(1))
    for master in optimizers[0].param_groups[0]["params"][:1]:
        if master in optimizers[0].state:
            optimizers[0].state[master]["object"] = object()
    with pytest.raises(zs.CheckpointError) as error:
        zero.save(path)
    return str(error.value)


def test_a_state_that_no_other_rank_can_learn_of_is_refused_on_all(tmp_path: Path) -> None:
    texts = on_ranks(2, unsaveable, tmp_path / "step-1")
    assert all("The state 'object' of 'stem.weight' is a object" in text for text in texts)
