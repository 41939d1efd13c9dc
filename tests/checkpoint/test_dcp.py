"""torch.distributed.checkpoint reads our checkpoints into an FSDP2 job, value by value, and refuses what is damaged."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zeroshard as zs
from tests.oracle import randn, seed
from zeroshard.checkpoint.dcp import DcpReader
from zeroshard.testing import run_ranks

from . import small
from .rig import TIMEOUT_S


class Net(nn.Module):
    """Rows that do not divide by the ranks, tied weights, buffers; FSDP2 does not take channels-last parameters."""

    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3).to(memory_format=memory_format)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.norm = nn.BatchNorm1d(5)
        self.head, self.twin = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.twin.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean((2, 3))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.twin(self.head(self.norm(x)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    model(randn(3, 2, 4, 4, key=(number, dist.get_rank()))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def write(folder: str) -> dict[str, Any]:
    seed(3)
    model = Net(torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zero = zs.shard(model, optimizer, stage=3, settings=zs.Settings(watchdog_s=8))
    for number in range(2):
        step(model, optimizer, number)
    zero.save(f"{folder}/step-2")
    with zero.gathered(states=True):
        names = [name for name, _ in model.named_parameters()]
        states = optimizer.state_dict()["state"]
        return {
            "model": {name: value.clone() for name, value in model.state_dict().items()},
            "states": {name: {key: value.clone() for key, value in states[n].items()} for n, name in enumerate(names)},
        }


def read(folder: str) -> dict[str, Any]:
    """Load into FSDP2; return whole tensors."""
    seed(4)
    model = Net()
    shard_by_fsdp2(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    groups = state["optim"].pop("param_groups")
    reader = DcpReader(f"{folder}/step-2", model="model", optimizers=["optim"])
    dcp.load(state, storage_reader=reader)
    set_optimizer_state_dict(model, optimizer, {**state["optim"], "param_groups": groups})
    loaded = {name: whole(value) for name, value in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = {
        names[id(parameter)]: {key: whole(value) for key, value in of_one.items()}
        for parameter, of_one in optimizer.state.items()
    }
    return {"model": loaded, "states": states}


def shard_by_fsdp2(model: Any) -> None:
    """Shard each block of a model, and the rest, over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


@pytest.mark.product
@pytest.mark.parametrize("world", [2, 3])
def test_fsdp2_loads_a_checkpoint(tmp_path: Path, world: int) -> None:
    expected = run_ranks(write, 2, str(tmp_path), timeout_s=TIMEOUT_S)[0]
    for found in run_ranks(read, world, str(tmp_path), timeout_s=TIMEOUT_S):
        for part in ("model", "states"):
            assert found[part].keys() == expected[part].keys()
        for name, value in expected["model"].items():
            assert torch.equal(found["model"][name], value), name
        for name, state in expected["states"].items():
            assert found["states"][name].keys() == state.keys()
            for key, value in state.items():
                assert torch.equal(found["states"][name][key], value), (name, key)


def load_plain(path: Path, model: nn.Module, **options: bool) -> None:
    dcp.load(model.state_dict(), storage_reader=DcpReader(path, **options), no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = small.write(tmp_path)

    def model() -> nn.Module:
        return small.Small.plain(1)

    load_plain(path, model())
    with pytest.raises(
        dcp.api.CheckpointException, match=r"is torch\.bfloat16 in the state dict and torch\.float32 in"
    ):
        load_plain(path, model().bfloat16())
    load_plain(path, model().bfloat16(), cast=True)
    data = path / "params-00001-of-00001.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    with small.changed(data, bytes(content)), pytest.raises(dcp.api.CheckpointException, match=f"{data.name}: bytes "):
        load_plain(path, model())
    with pytest.raises(dcp.api.CheckpointException, match="is not a checkpoint"):
        load_plain(tmp_path, model())
    assert (DcpReader.validate_checkpoint_id(path), DcpReader.validate_checkpoint_id(tmp_path)) == (True, False)
