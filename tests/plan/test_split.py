"""Plans of modules whose products torch splits over a tensor axis: what is counted, and what is refused."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroshard as zs
from tests.oracle import TIMEOUT_S
from zeroshard.testing import RankFailure, run_ranks

WIDTH, DEPTH, ROWS = 64, 4, 32
INPUT_BYTES = ROWS * WIDTH * 4
CPU = zs.Device("cpu", {"float32": 1e11}, 8 * 10**9, 1e10, 1e10, 1e10, 1e10, multiprocessors=1)
PRODUCTS = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))


def make() -> nn.Module:
    return nn.Sequential(*(block() for _ in range(DEPTH)))


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    for one in model.children():
        parallelize_module(one, mesh, PRODUCTS)


def planned(model: nn.Module | None = None, **options: Any) -> zs.Plan:
    if model is None:
        with torch.device("meta"):
            model = make()
    asked: dict[str, Any] = {"world_size": 4, "tensor": 2, "parallelize": split, "stage": 3} | options
    inputs = [torch.zeros(ROWS, WIDTH)]
    return zs.plan(model, device=CPU, precision="fp32", inputs=inputs, units=[nn.Sequential], **asked)


def test_a_rank_has_its_part_of_what_is_split_and_all_of_the_rest() -> None:
    model = make()
    before = list(model.parameters())
    plan = planned(model, stage=0, world_size=2)
    # Of each block both weights and the first bias.
    own = DEPTH * (2 * 4 * WIDTH * WIDTH // 2 + 4 * WIDTH // 2 + WIDTH)
    assert plan.ranks[0].resident_bytes["parameters"] == 4 * own
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("activations", "reduced", "gathered"),
    # An input that wants no gradient needs no sum: the first block has one sum less.
    [("keep", 2 * DEPTH - 1, 0), ("recompute", 2 * DEPTH - 1, 0), ("recompute+partition", 2 * DEPTH - 1, DEPTH)],
)
def test_collectives_of_activations_are_counted(activations: str, reduced: int, gathered: int) -> None:
    sent = planned(activations=activations).film.sent_bytes
    assert sent["tensor all-reduce"] == reduced * INPUT_BYTES
    assert sent.get("tensor gather", 0) == gathered * INPUT_BYTES // 2


def test_partitioned_inputs_take_their_part_of_memory() -> None:
    whole, parts = (planned(activations=how).film for how in ("recompute", "recompute+partition"))
    kept = [
        sum(one.nbytes for one in film.events if one.at_s <= film.phases[0].stop_s and one.column == "activations")
        for film in (whole, parts)
    ]
    # The first block's input is the step's, which stays beside its part.
    assert kept[0] - kept[1] == (DEPTH - 1) * INPUT_BYTES // 2 - INPUT_BYTES // 2


def told(plan: zs.Plan) -> Sequence[Any]:
    return plan.film.events, dict(plan.film.sent_bytes), [dict(one.resident_bytes) for one in plan.ranks]


def plan_of_split() -> Sequence[Any]:
    """Plan on the first rank alone: whatever communicated would wait for the other."""
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    model = make()
    split(model, mesh["tensor"])
    if mesh.get_rank():
        return ()
    plan = planned(model, world_size=2, mesh=mesh, tensor=1, parallelize=None, activations="recompute+partition")
    return told(plan)


def test_a_module_that_is_split_already_has_the_same_plan_and_communicates_nothing() -> None:
    plan = planned(world_size=2, activations="recompute+partition")
    found = run_ranks(plan_of_split, 2, timeout_s=TIMEOUT_S)[0]
    assert found == told(plan)


class Sending(nn.Module):
    """Sends its input from the first rank to all, by a functional collective of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.one.weight, DTensor)
        group = self.one.weight.device_mesh.get_group().group_name
        out: Tensor = self.one(torch.ops._c10d_functional.broadcast(x, 0, group))
        return out


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"parallelize": None}, "tensor=2: no parameter of this Sequential is split"),
        ({"tensor": 1, "activations": "recompute+partition", "parallelize": None}, "axis 'tensor', but the mesh has"),
        ({"sequence_parallel": True}, "sequence_parallel=True is for shapes"),
        ({"tensor": 4, "parallelize": lambda model, mesh: None}, "tensor=4: no parameter of this Sequential is split"),
        ({"tensor": 70, "world_size": 70}, r"'0.0.weight' \(256, 64\) has no part for 6 of 70 ranks"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        planned(**options)
    assert not dist.is_initialized()


def test_a_collective_that_is_not_known_is_named() -> None:
    model = nn.Sequential(Sending(), Sending())
    with pytest.raises(RuntimeError, match=r"runs the collective _c10d_functional.broadcast.default, which a plan"):
        zs.plan(
            model,
            world_size=2,
            tensor=2,
            device=CPU,
            precision="fp32",
            inputs=[torch.zeros(ROWS, WIDTH)],
            parallelize=lambda model, mesh: parallelize_module(model, mesh, {"*.one": ColwiseParallel()}),
        )


def plan_with_a_group() -> None:
    planned()


def test_splitting_needs_a_process_without_a_group() -> None:
    with pytest.raises(RankFailure, match="parallelize= emulates a process group, but the process already has one"):
        run_ranks(plan_with_a_group, 2, timeout_s=TIMEOUT_S)
