"""Dimensions that the ranks along "tensor" do not divide: each rank's part has its own size."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroshard as zs
from tests.oracle import TIMEOUT_S, WATCHDOG_S, randn
from tests.rotation import third
from zeroshard.testing import run_ranks

STEPS = 4
CLIP = 0.1
# torch takes local tensors that leave or enter a split layer for equal parts of the whole.
WHOLE_OUT = ColwiseParallel(output_layouts=Replicate())
PLAN = {
    "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    "1": WHOLE_OUT,
    "3": RowwiseParallel(input_layouts=Replicate()),
    "4": WHOLE_OUT,
}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4), nn.Linear(4, 5))


def loss_of(model: nn.Module, step: int, place: int) -> Tensor:
    words = torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(100 * step + place))
    return (model(words) - randn(3, 6, 5, key=(step, place))).square().mean()


@dataclasses.dataclass(frozen=True)
class Trained:
    norms: list[float]
    parameters: dict[str, Tensor]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(sizes: tuple[int, int], cases: list[tuple[int, bool]]) -> list[Trained]:
    mesh, found = init_device_mesh("cpu", sizes, mesh_dim_names=("shard", "tensor")), []
    for stage, shared in cases:
        model = build()
        parallelize_module(model, mesh["tensor"], PLAN)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        settings = zs.Settings(watchdog_s=WATCHDOG_S, shared_memory=shared)
        zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, settings=settings)
        norms = []
        for step in range(STEPS):
            loss_of(model, step, mesh.get_local_rank("shard")).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            if step == STEPS - 1:
                held = zero.memory()
                assert {**held.resident_bytes, "transient": 0} == {**held.predicted_bytes, "transient": 0}
            optimizer.zero_grad()
        zero.check_copies()
        with zero.gathered():
            found.append(Trained(norms, {name: whole(p) for name, p in model.named_parameters()}))
    return found


def alone(shards: int) -> Trained:
    model, norms = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        (sum(loss_of(model, step, place) for place in range(shards)) / shards).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(norms, {name: p.detach() for name, p in model.named_parameters()})


@pytest.mark.product
@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)], ids=str)
def test_training_equals_a_single_process(sizes: tuple[int, int]) -> None:
    cases = third([(stage, shared) for stage in range(4) for shared in (True, False)])
    expected = alone(sizes[0])
    for by_case in run_ranks(train, sizes[0] * sizes[1], sizes, cases, timeout_s=2 * TIMEOUT_S):
        for actual in by_case:
            assert actual.norms == pytest.approx(expected.norms, rel=1e-5)
            for name, parameter in expected.parameters.items():
                torch.testing.assert_close(actual.parameters[name], parameter, rtol=0, atol=1e-6)
