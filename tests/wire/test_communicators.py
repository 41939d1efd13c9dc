"""The communicators of NCCL: those that ranks make are those that plans count."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zeroshard as zs
from zeroshard.table.trace import Ledger
from zeroshard.wire.nccl import NcclComm


class Recording:
    """Process groups that are asked for and not made."""

    def __init__(self, mesh: zs.Mesh) -> None:
        self.mesh, self.made, self.groups = mesh, list[str](), dict[str, Any]()
        self.watchdog = SimpleNamespace()

    def new_group(self, name: str, backend: str, *axes: str) -> None:
        self.made += [name] * (backend == "nccl")
        self.groups[name] = axes


def made_by(axes: tuple[tuple[str, int], ...]) -> list[str]:
    links = Recording(zs.Mesh(0, math.prod(size for _, size in axes), 0, torch.device("cuda", 0), axes))
    NcclComm(links, Ledger())  # type: ignore[arg-type]
    return links.made


@pytest.mark.parametrize(
    "sizes",
    [
        {"shard": 8},
        {"replicate": 2, "shard": 4},
        {"shard": 4, "tensor": 2},
        {"replicate": 2, "shard": 2, "tensor": 2},
        {"pipe": 2, "shard": 4},
        {"pipe": 2, "shard": 2, "tensor": 2},
    ],
    ids=str,
)
def test_a_plan_counts_the_communicators_that_ranks_make(sizes: dict[str, int]) -> None:
    place = tuple((name, size) for name, size in sizes.items() if name != "pipe")
    made = made_by(place) + (made_by(tuple(sizes.items())) if "pipe" in sizes else [])
    plan = zs.plan(
        "gpt2",
        world_size=8,
        seq=256,
        tensor=sizes.get("tensor", 1),
        mesh=sizes.get("replicate"),
        pipe=sizes.get("pipe", 1),
        micro_batches=2 * sizes.get("pipe", 1),
    )
    device = plan.asked.device
    # The first is that of the default process group.
    assert plan.outside_bytes == device.context_bytes + (1 + len(made)) * device.communicator_bytes


def test_one_rank_has_none() -> None:
    plan = zs.plan("gpt2", world_size=1, seq=256)
    assert plan.outside_bytes == plan.asked.device.context_bytes


def test_other_programs_have_one_for_each_axis() -> None:
    plan = zs.plan("gpt2", world_size=8, seq=256, tensor=2, system="fsdp2")
    device = plan.asked.device
    assert plan.outside_bytes == device.context_bytes + 2 * device.communicator_bytes
