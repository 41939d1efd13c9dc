"""Copies that ranks along the axis "tensor" hold of a split model: one bit that differs on one rank is found."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroshard as zs
from tests.state.test_copies import flip
from zeroshard.core.slot import slot_of
from zeroshard.testing import run_ranks

WORLD = 4


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(self.norm(x))) * self.scale[0]
        return y


def check_split(stage: int, where: str, options: dict[str, Any], axes: tuple[str, str]) -> str:
    """Train, break a bit on one rank of a model that torch splits, and return the error of the comparison."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    model = Split()
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters())
    zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, **options)
    model(torch.full((2, 8), 1.0 + mesh.get_local_rank(axes[0])) * torch.arange(8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    zero.check_copies()
    by_name = {slot_of(master).name: master for group in optimizer.param_groups for master in group["params"]}
    if dist.get_rank() == 1:
        name, _, kind = where.partition("/")
        slot = slot_of(model.get_parameter(name)) if name != "scale" else None
        if slot is None:
            flip(model.scale)
        elif kind == "state":
            flip(optimizer.state[by_name[name]]["exp_avg"])
        elif kind == "master":
            flip(by_name[name])
        elif stage < 3:
            flip(slot.bucket.views[slot.index])
        else:
            flip(slot.bucket.shard[slice(*slot.bucket.layout.parts(*slot.bucket.spec.shard)[slot.index])])
    try:
        zero.check_copies()
    except zs.RankMismatchError as error:
        return str(error)
    return ""


def train_rounded(cases: list[tuple[int, str]]) -> None:
    """Train with gradients that a codec rounds, and compare the copies."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    for stage, codec in cases:
        torch.manual_seed(0)
        model = Split()
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, precision=zs.Precision(reduce=codec))
        model((1.0 + mesh.get_local_rank("shard")) * torch.arange(16.0).view(2, 8)).square().mean().backward()
        optimizer.step()
        zero.check_copies()


SPLIT = {
    (0, "norm.weight", (), "shard"): "parameter 'norm.weight'",
    (2, "down.bias", (), "shard"): "parameter 'down.bias'",
    (3, "norm.weight", (), "shard"): "the part of 'norm.weight' in a shard",
    (3, "norm.weight/state", (), "shard"): "exp_avg of 'norm.weight'",
    (1, "down.bias/state", (), "replicate"): "exp_avg of 'down.bias'",
    (2, "norm.weight/master", (("precision", "bf16"),), "shard"): "the master values of 'norm.weight'",
    (3, "scale", (), "shard"): "buffer 'scale'",
    (3, "up.weight", (), "shard"): "",  # each rank has another part
}


def check_splits(cases: list[Any]) -> list[str]:
    return [check_split(stage, where, dict(options), (axis, "tensor")) for stage, where, options, axis in cases]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shared_memory", [True, False])
def test_what_ranks_along_tensor_have_alike_is_compared(shared_memory: bool) -> None:
    settings = ("settings", zs.Settings(shared_memory=shared_memory))
    cases = [(stage, where, (*options, settings), axis) for stage, where, options, axis in SPLIT]
    cases = cases[:: 1 if shared_memory else 4]
    for texts in run_ranks(check_splits, WORLD, cases, timeout_s=200.0):
        for (stage, where, options, axis), text in zip(cases, texts, strict=True):
            copy = SPLIT[stage, where, options[:-1], axis]
            assert (f"The copies of {copy} are no longer equal" in text) if copy else not text, (stage, where, text)


def test_rounded_gradients_of_what_ranks_have_alike_are_alike() -> None:
    run_ranks(train_rounded, WORLD, [(0, "scaled4"), (3, "scaled8")])
