"""Checkpoints of pipes: one folder of the whole model, whose parts lie at the places, from any layout to any other.

The oracle is one process with the whole model, which reads what a pipe wrote.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, Adafactor, AdamW, Optimizer

import zeroshard as zs
from tests import models
from tests.engine.test_pipe import run_pass
from tests.oracle import assert_same
from tests.rotation import is_whole, third
from zeroshard.checkpoint.verify import verify
from zeroshard.testing import run_ranks

TIMEOUT_S = 240
WATCHDOG_S = 60.0
WORLD = 4
DEPTH = 4
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(models.Block):
    """A block with a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("level", torch.randn(3))


class Part(nn.Module):
    """The stem and the blocks before `cut`, or the other blocks and the head, under their names in the whole model."""

    def __init__(self, whole: models.Stack, place: int, cut: int) -> None:
        super().__init__()
        self.stem = whole.stem if place == 0 else nn.Identity()
        blocks = range(cut) if place == 0 else range(cut, DEPTH)
        self.blocks = nn.ModuleDict({str(index): whole.blocks[index] for index in blocks})
        self.head = whole.head if place == 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks.values():
            x = block(x)
        y: Tensor = self.head(x)
        return y


def grouped(model: nn.Module) -> list[Optimizer]:
    """Return two optimizers, one of which has two groups."""
    named = dict(model.named_parameters())
    norms = [p for name, p in named.items() if "norm" in name]
    matrices = [p for p in named.values() if p.ndim > 1]
    biases = [p for name, p in named.items() if p.ndim < 2 and "norm" not in name]
    return [AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": biases}], lr=0.01), SGD(norms, lr=0.01)]


OPTIMIZERS = {
    "grouped": grouped,
    "momentum": lambda model: [SGD(model.parameters(), lr=0.01, momentum=0.9)],
    "whole": lambda model: [Adafactor(model.parameters(), lr=0.01)],
}
Layout = tuple[tuple[tuple[str, int], ...], int, int]
"""The axes of a mesh with their sizes, the stage, and the block at which a pipe is cut."""
AXES: list[tuple[tuple[str, int], ...]] = [
    (("pipe", 2), ("shard", 2)),
    (("shard", 2), ("pipe", 2)),
    (("pipe", 2), ("replicate", 2), ("shard", 1)),
    (("pipe", 2), ("tensor", 2)),
    (("shard", 2), ("tensor", 2)),
    (("pipe", 2), ("shard", 1)),
    (("shard", 4),),
    (("shard", 3),),
    (("shard", 2),),
]
LAYOUTS: list[Layout] = [
    (axes, stage, 1 + (stage + place) % 3)
    for place, axes in enumerate(AXES)
    for stage in range(1 if "replicate" in dict(axes) else 4)
]
PIPES = [layout for layout in LAYOUTS if "pipe" in dict(layout[0])]


def laid(axes: tuple[tuple[str, int], ...]) -> DeviceMesh | None:
    """Return the mesh of the first ranks; None on the others."""
    names, sizes = zip(*axes, strict=True)
    numbers = torch.arange(torch.Size(sizes).numel())
    mesh = DeviceMesh("cpu", numbers.view(sizes), mesh_dim_names=names)
    return mesh if dist.get_rank() < len(numbers) else None


class Run:
    """A model, or a place's part of it, with its optimizers in a layout."""

    def __init__(self, mesh: DeviceMesh | None, layout: Layout, kind: str, seed: int, **options: Any) -> None:
        axes, stage, cut = layout
        torch.manual_seed(seed)
        whole = models.Stack(DEPTH, kind=Block)
        self.mesh, self.is_pipe = mesh, "pipe" in dict(axes)
        self.model = Part(whole, mesh.get_local_rank("pipe"), cut) if mesh and self.is_pipe else whole
        for block in self.model.modules() if mesh and "tensor" in dict(axes) else ():
            if isinstance(block, Block):
                parallelize_module(block, mesh["tensor"], PLAN)
        self.optimizers = OPTIMIZERS[kind](self.model)
        settings = zs.Settings(watchdog_s=WATCHDOG_S, **options.pop("settings", {}))
        self.zero = zs.shard(self.model, self.optimizers, stage=stage, mesh=mesh, settings=settings, **options)

    def train(self, steps: range) -> list[float]:
        """Train on the same data on all ranks; return the losses, which the first place of a pipe does not know."""
        losses = []
        for step in steps:
            if self.mesh and self.is_pipe:
                losses.append(run_pass(self.model, self.mesh, step, 0))
            else:
                loss = F.mse_loss(self.model(models.features(step, 0)), models.targets(step, 0))
                loss.backward()
                losses.append(loss.item())
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return losses if not self.is_pipe or self.mesh.get_local_rank("pipe") else []

    def values(self) -> dict[str, Any]:
        """Return the parameters, buffers and states of this rank's place."""
        with self.zero.gathered(states=True):
            found: dict[str, Any] = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            for name, parameter in self.model.named_parameters():
                found[name] = full(parameter)
                for one in self.optimizers:
                    for key, value in sorted(one.state.get(parameter, {}).items()):
                        found[f"{name}/{key}"] = full(value)
            return found


def full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, Tensor) else value


# -- moves ------------------------------------------------------------------------------------------------------------

Found = tuple[dict[str, Any], list[float]]


def move(folder: str, kind: str, pairs: list[tuple[Layout, Layout]], options: dict[str, Any]) -> list[list[Found]]:
    """Save in one layout and load in another; return values and next losses of both where ranks have them."""
    result = []
    for number, (first, second) in enumerate(pairs):
        path, found = f"{folder}/step-{number}", []
        if (mesh := laid(first[0])) is not None:
            run = Run(mesh, first, kind, seed=1, **options)
            run.train(range(2))
            run.zero.save(path, {"place": number}, asynchronous=bool(number % 2))
            values = run.values()
            run.zero.wait()
            found.append((values, run.train(range(2, 4))))
        dist.barrier()
        if (mesh := laid(second[0])) is not None:
            run = Run(mesh, second, kind, seed=2, **options)
            assert run.zero.load(path).extra == {"place": number}
            values = run.values()
            found.append((values, run.train(range(2, 4))))
        result.append(found)
    return result


def check_moves(tmp_path: Path, kind: str, pairs: list[tuple[Layout, Layout]], **options: Any) -> None:
    by_rank = run_ranks(move, WORLD, str(tmp_path), kind, pairs, options, timeout_s=TIMEOUT_S * (1 + len(pairs) // 8))
    for number, pair in enumerate(pairs):
        verify(path := tmp_path / f"step-{number}")
        alone = Run(None, ((), 1, 0), kind, seed=3)
        assert alone.zero.load(path).step == number
        expected, losses, named = alone.values(), alone.train(range(2, 4)), set[str]()
        for found in (found for rank in by_rank for found in rank[number]):
            values, next_losses = found
            named |= values.keys()
            assert_same({name: expected[name] for name in values}, values, str(pair))
            assert not next_losses or next_losses == pytest.approx(losses, rel=1e-5), pair
        assert named == expected.keys(), pair


def drawn(kind: str, count: int) -> list[tuple[Layout, Layout]]:
    """Return pairs of layouts, of which one at least is a pipe."""
    draw = random.Random(kind)
    can = [one for one in LAYOUTS if kind != "whole" or "tensor" not in dict(one[0])]
    pairs = [(draw.choice([one for one in PIPES if one in can]), draw.choice(can)) for _ in range(count)]
    return [pair if draw.random() < 0.7 else (pair[1], pair[0]) for pair in pairs]


@pytest.mark.product
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_layout_is_read_by_any_other(kind: str, tmp_path: Path) -> None:
    """30 moves of each kind of optimizers; a rotation has five of them."""
    check_moves(tmp_path, kind, drawn(kind, 30) if is_whole() else third(drawn(kind, 30))[1:6])
