"""200,000 parameters written by 64 ranks, and what limits are checked before anything is written.

No 64 processes are started: the plan of a save is a function of items and ranks, so each rank's part of it is written
here in turn, by the code that ranks run, from the layouts that 64 ranks would have.
"""

import resource
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zeroshard as zs
from zeroshard.checkpoint.commit import check_limits, write_manifest, write_tensors
from zeroshard.checkpoint.contents import Plan
from zeroshard.checkpoint.described import pack, unpack
from zeroshard.checkpoint.inventory import Item
from zeroshard.checkpoint.manifest import EXTRA, MANIFEST, join_state
from zeroshard.checkpoint.ranges import Spec
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.strict import MAX_BYTES, dumps, loads
from zeroshard.checkpoint.values import bytes_of
from zeroshard.checkpoint.verify import verify
from zeroshard.core.layout import plan_layout

EXPERTS, LAYERS, WORLD = 1024, 65, 64
SHAPE = (3, 5)


def names_of(experts: int, layers: int) -> list[str]:
    """Return names as mixtures of experts have them."""
    parts = ("gate_proj", "up_proj", "down_proj")
    return [f"model.layers.{n}.mlp.experts.{e}.{p}.weight" for n in range(layers) for e in range(experts) for p in parts]


def plan_of(path: Path, names: list[str], world_size: int, extra: bytes = b"{}") -> Plan:
    """Return what so many ranks would save of parameters of 15 elements and their two states, in buckets of 3,072."""
    items: list[Item] = []
    values = torch.arange(15, dtype=torch.float32)
    for start in range(0, len(names), 3072):
        several = names[start : start + 3072]
        layout = plan_layout((15,) * len(several), 4, world_size)
        bucket: Any = SimpleNamespace(layout=layout)
        for index, name in enumerate(several):
            slot: Any = SimpleNamespace(bucket=bucket, index=index, name=name)
            for spec in (
                Spec("model", name, "F32", SHAPE),
                Spec("state", join_state(0, "exp_avg", name), "F32", SHAPE),
                Spec("state", join_state(0, "exp_avg_sq", name), "F32", SHAPE),
            ):
                items.append(Item(spec, values, (0, 15), slot))
    return Plan(path, 7, world_size, tuple(items), {}, extra, None)


def write(plan: Plan) -> None:
    """Do what all ranks of a save do, one after the other."""
    check_limits(plan)
    plan.path.mkdir()
    written = {}
    for rank in range(plan.world_size):
        for name in plan.files_of(rank):
            parts: Iterator[memoryview] = (bytes_of(value) for value in plan.values(name))
            written[name] = write_tensors(plan, plan.path, name, parts)
    write_manifest(plan, plan.path, written)


@pytest.mark.timeout(300)
def test_two_hundred_thousand_parameters_of_64_ranks(tmp_path: Path) -> None:
    """Times are of the processor, and several times what they are on an idle machine; memory is the peak of each."""
    names = names_of(EXPERTS, LAYERS)[:200_000]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan, begin_s = plan_of(tmp_path / "a", names, WORLD), time.process_time()
    write(plan)
    saved_s = time.process_time() - begin_s
    index = [path for path in plan.path.iterdir() if path.suffix == ".json"]
    assert len(index) > 3
    assert max(path.stat().st_size for path in index) <= MAX_BYTES
    begin_s = time.process_time()
    assert len(verify(plan.path).tensors) == 600_000
    verified_s = time.process_time() - begin_s
    reader = CheckpointReader(plan.path)
    assert torch.frombuffer(reader.read(names[-1], 3, 9), dtype=torch.float32).tolist() == [3, 4, 5, 6, 7, 8]
    # A range that the boundary between two ranks cuts.
    chunks = reader.manifest.chunks
    cut = next(t for t in range(len(reader.manifest.tensors)) if chunks.first[t + 1] - chunks.first[t] == 2)
    spec = reader.manifest.tensors[cut]
    read = reader.read if spec.kind == "model" else reader.read_state
    assert torch.frombuffer(read(spec.name, 0, 15), dtype=torch.float32).tolist() == list(range(15))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert (saved_s, verified_s, grown) < (90.0, 45.0, 2 << 30), (saved_s, verified_s, grown)
    print(f"saved {saved_s:.1f} s, verified {verified_s:.1f} s, {grown / 1e6:.0f} MB")
