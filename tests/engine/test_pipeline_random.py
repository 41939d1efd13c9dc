"""Dropout in pipelines: each rank has a random stream, checkpoints hold all, and recomputed modules draw as before."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from tests import models
from tests.rotation import third
from zeroshard.testing import run_ranks

TIMEOUT_S = 300
WATCHDOG_S = 60.0
MICRO, DEPTH, STEPS = 4, 4, 4
SAVED = 2
"""Steps before the checkpoint."""
Case = tuple[str, int]
"""A schedule and a stage."""
CASES: list[Case] = [("1f1b", 3), ("interleaved", 0), ("gpipe", 2), ("1f1b", 1)]


class Dropping(models.Block):
    """A block with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class Run:
    """A model with dropout in a pipeline, each rank seeded by itself."""

    def __init__(self, case: Case, seed: int, **options: Any) -> None:
        schedule, stage = case
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "shard"))
        torch.manual_seed(7)
        self.model = models.Stack(DEPTH, kind=Dropping)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        options |= {"stage": stage, "settings": zs.Settings(watchdog_s=WATCHDOG_S)}
        options |= {"micro_batches": MICRO, "schedule": schedule, "loss": F.mse_loss}
        self.pipe = zs.pipeline(self.model, self.optimizer, mesh=mesh, **options)
        torch.manual_seed(100 * seed + dist.get_rank())

    def train(self, steps: range) -> list[float]:
        losses, data = [], self.pipe.zero.mesh.rank
        for step in steps:
            inputs = torch.cat([models.features(step, data, micro) for micro in range(MICRO)])
            targets = torch.cat([models.targets(step, data, micro) for micro in range(MICRO)])
            losses.append(self.pipe.step(inputs, targets).item())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def end(self) -> dict[str, Tensor]:
        self.pipe.zero.detach()
        return {name: p.detach() for name, p in self.model.named_parameters()}


def run(folder: str, cases: list[Case]) -> list[dict[str, Any]]:
    found = []
    for number, case in enumerate(cases):
        path = f"{folder}/{number}"
        first = Run(case, seed=1)
        first.train(range(SAVED))
        first.pipe.zero.save(path)
        after = first.train(range(SAVED, STEPS)), first.end()
        second = Run(case, seed=2)
        second.pipe.zero.load(path)
        resumed = second.train(range(SAVED, STEPS)), second.end()
        recomputing = Run(case, seed=1, activations="recompute")
        recomputed = recomputing.train(range(STEPS))[SAVED:], recomputing.end()
        other = Run(case, seed=2)
        others = other.train(range(STEPS))[SAVED:], other.end()
        found.append({"after": after, "resumed": resumed, "recomputed": recomputed, "others": others})
    return found


def is_same(one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> bool:
    (losses, values), (other_losses, others) = one, other
    return losses == other_losses and all(torch.equal(value, others[name]) for name, value in values.items())


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_dropout_resumes_and_recomputes_to_the_bit(tmp_path: Path) -> None:
    cases = third(CASES)
    for rank, found in enumerate(run_ranks(run, 4, str(tmp_path), cases, timeout_s=TIMEOUT_S)):
        for case, one in zip(cases, found, strict=True):
            assert is_same(one["after"], one["resumed"]), (rank, case)
            assert is_same(one["after"], one["recomputed"]), (rank, case)
            # Another seed has other losses: masks matter here.
            assert one["after"][0] != one["others"][0], (rank, case)
