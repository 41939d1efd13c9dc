"""Host memory of asynchronous saves: what each rank copies is at most what its plan says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.oracle import run_cases
from zeroshard.checkpoint.background import Snapshot

CASES = ((0, "adamw"), (1, "adamw"), (3, "adamw"), (0, "muon"), (2, "muon"))


def build() -> nn.Module:
    """Return layers of several sizes, with buffers that a checkpoint has, and one that it has not."""
    model = nn.Sequential(nn.Linear(24, 40), nn.BatchNorm1d(40), nn.Linear(40, 56, bias=False), nn.Linear(56, 8))
    model.register_buffer("table", torch.zeros(300))
    model.register_buffer("cache", torch.zeros(5000), persistent=False)
    return model


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return zs.optim.Muon(zs.optim.muon_groups(model)) if name == "muon" else torch.optim.AdamW(model.parameters())


def taken(stage: int, name: str, folder: Path) -> int:
    """Return the bytes that this rank copies, without those of random generators."""
    model = build()
    optimizer = optimizer_of(name, model)
    zero, found = zs.shard(model, optimizer, stage=stage), list[int]()
    model(torch.ones(4, 24)).sum().backward()
    optimizer.step()
    take = Snapshot.take

    def watched(self: Snapshot, plan: Any, rows: Any) -> Any:
        made, rank = take(self, plan, rows), plan.mesh.across.rank
        found.extend(map(len, made.values()))
        found.extend(-item.spec.numel for item in plan.items if item.spec.kind == "rng" and item.owner == rank)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshot, "take", watched)
        zero.save(folder / f"{name}-{stage}", asynchronous=True)
    zero.wait()
    return sum(found)


@pytest.mark.product
def test_a_plan_has_the_bytes_that_the_fullest_rank_copies(tmp_path: Path) -> None:
    for (stage, name, _), by_rank in run_cases(taken, 2, [(*case, tmp_path) for case in CASES]).items():
        model = build()
        plan = zs.plan(
            model, world_size=2, stage=stage, optimizer=optimizer_of(name, model), inputs=[torch.ones(4, 24)],
            precision="fp32", device="a100-40",
        )  # fmt: skip
        assert plan.save_bytes == max(by_rank), (stage, name)
