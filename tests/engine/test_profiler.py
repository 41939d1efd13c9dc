"""Ranges in torch's profiler: what the engine does for each unit, by name."""

import torch

from tests import models
from tests.oracle import Sharded, run_cases
from tests.rotation import third


def names(stage: int, shared_memory: bool) -> set[str]:
    """Train under the profiler, and return the names of our ranges."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run = Sharded(stage, {"shared_memory": shared_memory})
    run.shard(model, optimizer, units=[models.Block])
    models.stack_loss(model, 0, run.rank).backward()
    optimizer.step()
    with torch.profiler.profile() as profile:
        models.stack_loss(model, 1, run.rank).backward()
        optimizer.step()
    return {event.key for event in profile.key_averages() if event.key.startswith("zeroshard::")}


def test_each_unit_has_its_ranges() -> None:
    units = ("(root)", "blocks.0", "blocks.1", "blocks.2")
    cases = third([(3, True), (1, False), (1, True), (3, False)])
    for (stage, shared), by_rank in run_cases(names, 2, cases).items():
        kinds = ["reduce", "wait for the reduce of"]
        kinds += ["gather", "release", "wait for the gather of"] if stage == 3 else ["publish"]
        for found in by_rank:
            assert found == {f"zeroshard::{kind} {unit}" for kind in kinds for unit in units}, (stage, shared)
