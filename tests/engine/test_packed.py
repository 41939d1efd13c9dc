"""Weights that hold a gate and an up projection, of which each rank along "tensor" has rows of both."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import zeroshard as zs
from tests.engine.test_tensor_axis import whole
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, assert_same, randn
from tests.packed import Packed, split_packed
from tests.rotation import third
from zeroshard.testing import run_ranks

WIDTH, STEPS, CLIP = 6, 4, 0.05


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(Packed(WIDTH, 4 * n, experts=1 + n), nn.Linear(WIDTH, WIDTH)) for n in (1, 2))
    return nn.Sequential(*blocks)


def loss_of(model: nn.Module, step: int, place: int) -> Tensor:
    return (model(randn(3, WIDTH, key=(step, place))) - randn(3, WIDTH, key=(step, place, 1))).square().mean()


@dataclasses.dataclass(frozen=True)
class Trained:
    norms: list[float]
    values: dict[str, Tensor]
    """By name, parameters; by name and key, states."""


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: whole(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": whole(value) for key, value in optimizer.state[parameter].items()}
    return found


def train(sizes: tuple[int, int], cases: list[tuple[int, str, bool]]) -> list[Trained]:
    mesh, found = init_device_mesh("cpu", sizes, mesh_dim_names=("shard", "tensor")), []
    for stage, activations, shared in cases:
        model = build()
        for block in model:
            split_packed(block[0], mesh["tensor"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        settings = zs.Settings(watchdog_s=WATCHDOG_S, shared_memory=shared)
        zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, activations=activations, settings=settings)
        norms = []
        for step in range(STEPS):
            loss_of(model, step, mesh.get_local_rank("shard")).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
        zero.check_copies()
        with zero.gathered(states=True):
            found.append(Trained(norms, values_of(model, optimizer)))
        zero.detach()
    return found


def alone(ranks: int) -> Trained:
    model, norms = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        (sum(loss_of(model, step, place) for place in range(ranks)) / ranks).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(norms, values_of(model, optimizer))


@pytest.mark.product
@pytest.mark.parametrize("sizes", [(2, 2), (1, 4)])
def test_training_equals_a_single_process(sizes: tuple[int, int]) -> None:
    """Values, states and norms."""
    cases = third(list(itertools.product(STAGES, ("keep", "recompute"), (True, False))))
    expected = alone(sizes[0])
    by_rank = run_ranks(train, 4, sizes, cases, timeout_s=TIMEOUT_S)
    for rank, of_rank in enumerate(by_rank):
        for case, trained in zip(cases, of_rank, strict=True):
            assert trained.norms == pytest.approx(expected.norms, rel=1e-5), (rank, case)
            assert_same(expected.values, trained.values, f"rank {rank}, {case}", relative=1e-5)


def write_whole(stage: int) -> list[Tensor]:
    """Change plain whole values, and return what the parameter has then, and what it should have."""
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor")), build()
    expected = model[0][0].into.detach().clone() * torch.arange(1, 9)[:, None]
    split_packed(model[0][0], mesh["tensor"])
    zero = zs.shard(model, stage=stage, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    with zero.gathered(whole=True, writeback=True), torch.no_grad():
        assert not isinstance(model[0][0].into, DTensor)
        model[0][0].into.mul_(torch.arange(1, 9)[:, None])
    with zero.gathered():
        return [whole(model[0][0].into), expected]


@pytest.mark.parametrize("stage", [0, 3])
def test_whole_values_are_read_and_written(stage: int) -> None:
    for found, expected in run_ranks(write_whole, 4, stage, timeout_s=TIMEOUT_S):
        assert torch.equal(found, expected)


def refuse() -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    model = nn.Linear(WIDTH, 6, bias=False)
    odd = distribute_tensor(
        model.weight.detach(), mesh["tensor"], [_StridedShard(0, split_factor=2)], src_data_rank=None
    )
    model.weight = nn.Parameter(odd)
    with pytest.raises(ValueError, match="weight") as error:
        zs.shard(model, mesh=mesh, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    assert model.weight.placements == odd.placements
    return str(error.value)


def test_groups_without_equal_parts_are_refused() -> None:
    for text in run_ranks(refuse, 2, timeout_s=TIMEOUT_S):
        assert "'weight' (6, 6) has 6 indices of dimension 0 in 2 groups, which 2 ranks do not divide" in text
