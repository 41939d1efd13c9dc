"""Many parameters, written by 64 ranks.

No 64 processes are started: the plan of a save is a function of items and ranks, so each rank's part of it is written
here in turn, by the code that ranks run, from the layouts that 64 ranks would have.

    python -m tests.checkpoint.many 200000 64
"""

import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from zeroshard.checkpoint.commit import check_limits, write_manifest, write_tensors
from zeroshard.checkpoint.contents import Plan
from zeroshard.checkpoint.cuts import RowExchange
from zeroshard.checkpoint.inventory import Item
from zeroshard.checkpoint.manifest import join_state
from zeroshard.checkpoint.ranges import Spec
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.values import bytes_of
from zeroshard.checkpoint.verify import verify
from zeroshard.table.layout import plan_layout
from zeroshard.wire.mesh import Mesh

SHAPE = (5, 8)


def names_of(experts: int, layers: int) -> list[str]:
    """Return names as mixtures of experts have them."""
    parts = ("gate_proj", "up_proj", "down_proj")
    return [
        f"model.layers.{n}.mlp.experts.{e}.{p}.weight" for n in range(layers) for e in range(experts) for p in parts
    ]


def plan_of(path: Path, names: list[str], world_size: int, extra: bytes = b"{}") -> Plan:
    """Return what so many ranks would save of parameters of 40 elements and their two states, in buckets of 1,001."""
    items: list[Item] = []
    values = torch.arange(40, dtype=torch.float32)
    for start in range(0, len(names), 1001):
        several = names[start : start + 1001]
        layout = plan_layout((40,) * len(several), 4, world_size)
        bucket: Any = SimpleNamespace(layout=layout)
        for index, name in enumerate(several):
            slot: Any = SimpleNamespace(bucket=bucket, index=index, name=name)
            for spec in (
                Spec("model", name, "F32", SHAPE),
                Spec("state", join_state(0, "exp_avg", name), "F32", SHAPE),
                Spec("state", join_state(0, "exp_avg_sq", name), "F32", SHAPE),
            ):
                items.append(Item(spec, values, (0, 40), slot, layouts=(layout,)))
    mesh = Mesh(0, world_size, 0, torch.device("cpu"))
    return Plan(path, 7, mesh, tuple(items), {}, extra, None)


def write(plan: Plan) -> None:
    """Do what all ranks of a save do, one after the other."""
    check_limits(plan)
    plan.path.mkdir()
    written = {}
    engine: Any = SimpleNamespace(order=SimpleNamespace(next_number=lambda: 1))
    for rank in range(plan.world_size):
        rows = RowExchange(engine, [])
        for name in plan.files_of(rank):
            parts: Iterator[memoryview] = (bytes_of(value) for value in plan.values(name, rows))
            written[name] = write_tensors(plan, plan.path, name, parts)
    write_manifest(plan, plan.path, written)


def read(path: Path, name: str) -> None:
    """Require the values of a parameter, and of a tensor that the boundary between two ranks cuts."""
    reader = CheckpointReader(path)
    tensors, chunks = reader.manifest.tensors, reader.manifest.chunks
    assert torch.frombuffer(reader.read(name, 3, 9), dtype=torch.float32).tolist() == [3, 4, 5, 6, 7, 8]
    cut = next(place for place in range(len(tensors)) if chunks.first[place + 1] - chunks.first[place] == 2)
    read_one = reader.read if tensors[cut].kind == "model" else reader.read_state
    data = read_one(tensors[cut].name, 0, 40)
    assert torch.frombuffer(data, dtype=torch.float32).tolist() == list(range(40))


def measure(folder: Path, parameters: int, world_size: int) -> dict[str, float]:
    """Save, verify and read a checkpoint; return seconds of the processor, and by how much memory grew."""
    names = names_of(1024, -(-parameters // 3072))[:parameters]
    plan = plan_of(folder / "step-7", names, world_size)
    before, found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, {}
    for what, call in (
        ("save", lambda: write(plan)),
        ("verify", lambda: verify(plan.path)),
        ("load", lambda: read(plan.path, names[-1])),
    ):
        begin_s = time.process_time()
        call()
        found[f"{what}_s"] = round(time.process_time() - begin_s, 2)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return found | {"memory_bytes": grown << 10, "parts": len(list(plan.path.glob("index-*.json")))}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(measure(Path(folder), int(sys.argv[1]), int(sys.argv[2])))
