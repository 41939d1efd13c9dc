"""Checkpoints of `zs.pipeline`: the whole model under its own names, from any layout and schedule to any other."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroshard as zs
from tests import models
from tests.oracle import TIMEOUT_S, WATCHDOG_S, assert_same
from tests.rotation import is_whole
from zeroshard.testing import run_ranks

from .wholes import mesh_of, whole_of

WORLD, MICRO, ROWS = 4, 4, 16
MOVES, SOME = 120, 10
Layout = tuple[tuple[tuple[str, int], ...], int, str, str]
"""The axes of a mesh with their sizes, the stage, the schedule and the optimizer's class."""
LAYOUTS = [
    (axes, stage, schedule)
    for axes in (
        (("pipe", 1), ("shard", 4)),
        (("pipe", 2), ("shard", 2)),
        (("shard", 2), ("pipe", 2)),
        (("pipe", 4), ("shard", 1)),
        (("pipe", 2), ("shard", 1), ("tensor", 2)),
        (("pipe", 1), ("shard", 2), ("tensor", 2)),
    )
    for stage in range(4)
    for schedule in ("naive", "gpipe", "1f1b", "interleaved")
    if schedule != "interleaved" or axes[0][1] == 2 or axes[1] == ("pipe", 2)
]
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-6),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Run:
    """A language model with a tied head and its optimizer in a layout."""

    def __init__(self, layout: Layout, seed: int) -> None:
        axes, stage, schedule, kind = layout
        names, sizes = zip(*axes, strict=True)
        self.mesh = mesh_of(sizes, names)
        torch.manual_seed(seed)
        self.model = models.GPT(depth=4).double()
        if "tensor" in names:
            for block in self.model.blocks:
                parallelize_module(block.mlp, self.mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        options = {"stage": stage, "settings": zs.Settings(watchdog_s=2 * WATCHDOG_S)}
        self.pipe = zs.pipeline(
            self.model,
            self.optimizer,
            mesh=self.mesh,
            micro_batches=MICRO,
            schedule=schedule,
            loss=loss_of,
            **options,
        )

    def train(self, steps: range) -> list[float]:
        losses, size = [], dict(zip(self.mesh.mesh_dim_names, self.mesh.shape, strict=True))["shard"]
        for step in steps:
            rows = torch.cat([models.tokens(step, row) for row in range(ROWS // 2)])
            own = self.mesh.get_local_rank("shard") * ROWS // size
            ids = rows[own : own + ROWS // size]
            losses.append(self.pipe.step(ids, ids).item())
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def whole(self) -> dict[str, Any]:
        """Return what this place has, whole, by name."""
        return whole_of(self.pipe.zero, self.model, self.optimizer)


def move(folder: str, pairs: list[tuple[Layout, Layout]]) -> list[tuple[Any, ...]]:
    found = []
    for number, (first, second) in enumerate(pairs):
        run = Run(first, seed=1)
        run.train(range(2))
        before, path = run.whole(), f"{folder}/step-{number}"
        run.pipe.zero.save(path, asynchronous=bool(number % 2))
        run.pipe.zero.wait()
        losses = run.train(range(2, 4))
        other = Run(second, seed=2)
        other.pipe.zero.load(path)
        found.append((before, other.whole(), losses, other.train(range(2, 4))))
    return found


@pytest.mark.rotates
@pytest.mark.timeout(21 * TIMEOUT_S)
def test_any_layout_loads_any_other(tmp_path: Any) -> None:
    draw, pairs = random.Random(29), []
    for number in range(MOVES if is_whole() else SOME):
        kind = sorted(OPTIMIZERS)[number % 2]
        first, second = (draw.choice(LAYOUTS) for _ in range(2))
        pairs.append(((*first, kind), (*(first if number % 5 == 0 else second), kind)))
    by_rank = run_ranks(move, WORLD, str(tmp_path), pairs, timeout_s=20 * TIMEOUT_S)
    for number, pair in enumerate(pairs):
        before, after = ({k: v for found in by_rank for k, v in found[number][at].items()} for at in (0, 1))
        assert before.keys() == after.keys(), pair
        for name, value in before.items():
            assert_same(after[name], value)
        for *_, losses, resumed in (found[number] for found in by_rank):
            if pair[0] == pair[1]:
                assert losses == resumed, pair
            assert resumed == pytest.approx(losses, rel=1e-9), pair
