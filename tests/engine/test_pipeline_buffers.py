"""Batch norms in pipelines: each rank has the statistics of one process on the first data rank's micro-batches."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from tests import models
from tests.oracle import assert_same
from tests.rotation import third
from zeroshard.testing import run_ranks

TIMEOUT_S = 300
WATCHDOG_S = 60.0
DATA, MICRO, DEPTH, STEPS = 2, 4, 4, 2
Case = tuple[str, int, str | None]
"""A schedule, a stage, a treatment of activations."""
CASES: list[Case] = [
    ("1f1b", 3, "recompute"),
    ("interleaved", 0, None),
    ("1f1b", 0, "recompute"),
    ("interleaved", 3, "recompute"),
    ("gpipe", 2, None),
    ("1f1b", 1, "recompute-rest"),
]


class Normed(nn.Module):
    """A residual block with a batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)).relu())


def build() -> nn.Module:
    torch.manual_seed(7)
    return models.Stack(DEPTH, kind=Normed)


def batch(step: int, data: int) -> tuple[Tensor, Tensor]:
    rows = range(MICRO)
    return (
        torch.cat([models.features(step, data, micro) for micro in rows]),
        torch.cat([models.targets(step, data, micro) for micro in rows]),
    )


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the statistics of the batch norms that this process has."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def train(cases: list[Case]) -> list[list[dict[str, Tensor]]]:
    """Return, by case, the statistics after each step, in which ranks take those of the first data rank."""
    mesh, found = init_device_mesh("cpu", (2, DATA), mesh_dim_names=("pipe", "shard")), []
    for schedule, stage, activations in cases:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"stage": stage, "activations": activations, "schedule": schedule}
        options |= {"settings": zs.Settings(watchdog_s=WATCHDOG_S), "loss": F.mse_loss}
        pipe = zs.pipeline(model, optimizer, mesh=mesh, micro_batches=MICRO, **options)
        after = []
        for step in range(STEPS):
            pipe.step(*batch(step, pipe.zero.mesh.rank))
            optimizer.step()
            optimizer.zero_grad()
            after.append(statistics(model))
        found.append(after)
    return found


def plain() -> list[dict[str, Tensor]]:
    """Train the whole model in this process; its statistics are those of the first rank's micro-batches."""
    model, after = build(), list[dict[str, Tensor]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for data in reversed(range(DATA)):
            model.load_state_dict(after[-1] if after else statistics(build()), strict=False)
            for micro in range(MICRO):
                (models.stack_loss(model, step, data, micro) / MICRO / DATA).backward()
        optimizer.step()
        optimizer.zero_grad()
        after.append(statistics(model))
    return after


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_statistics_are_those_of_the_first_data_rank() -> None:
    cases, expected = third(CASES), plain()
    by_rank = run_ranks(train, 2 * DATA, cases, timeout_s=TIMEOUT_S)
    for number, case in enumerate(cases):
        for step, right in enumerate(expected):
            names = set[str]()
            for rank, found in enumerate(by_rank):
                actual = found[number][step]
                counts = {name for name in actual if name.endswith("num_batches_tracked")}
                assert {actual[name].item() for name in counts} == {MICRO * (step + 1)}, (case, rank, step)
                some = {name: right[name] for name in actual}
                assert_same(some, actual, f"rank {rank}, step {step}, {case}", relative=1e-6)
                names |= some.keys()
            assert names == right.keys()
