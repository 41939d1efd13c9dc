"""Plans of islands: the bytes that a run counts, of memory and over the axis."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from tests.outer.plain import adamw, build, loss_of, mesh_of, nesterov
from zeroshard.plan.machine.profiles import host_device
from zeroshard.testing import run_ranks

CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"bits": 32}),
    (2, {"bits": 8, "optimizer": nesterov, "fragments": 2}),
    (2, {"bits": 4, "memory": "host"}),
    (4, {"bits": 32, "fragments": 2}),
]


def _measured(islands: int, stage: int, outer: dict[str, Any]) -> tuple[dict[str, int], int]:
    """Train until all was exchanged; return what this rank holds by column, and the bytes it sent to other islands."""
    model = build(torch.float32)
    optimizer = adamw(model.parameters())
    zero = zs.shard(model, optimizer, stage=stage, mesh=mesh_of(islands), outer=zs.Outer(every=2, **outer))
    for step in range(2):
        loss_of(model, step, dist.get_rank(), torch.float32).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(zero.memory().resident_bytes), zero.traffic().sent_bytes["replicate"]


@pytest.mark.parametrize(("islands", "outer"), CASES)
def test_a_plan_has_the_anchors_and_the_bytes_of_a_run(islands: int, outer: dict[str, Any]) -> None:
    for stage in (0, 3):
        found = run_ranks(_measured, 4, islands, stage, outer)
        plan = zs.plan(
            build(torch.float32),
            world_size=4,
            device=host_device(),
            inputs=[torch.zeros(4, 5, device="meta")],
            loss=lambda output: output.square().mean(),
            stage=stage,
            precision="fp32",
            mesh=islands,
            outer=zs.Outer(every=2, **outer),
        )
        held = {**plan.ranks[0].resident_bytes, **plan.ranks[0].elsewhere_bytes}
        for column in ("states", "host"):
            assert held.get(column, 0) == found[0][0].get(column, 0), (stage, column)
        assert plan.outer.sent_bytes == found[0][1], stage
        assert plan.outer.islands == islands
