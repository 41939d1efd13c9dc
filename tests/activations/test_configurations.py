"""The paper's configurations C1 to C5: rows by name, in the order of the bytes that they keep."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import zeroshard as zs
from tests import models
from tests.activations.test_partition import PLAN, WIDTH, Block, Net
from tests.oracle import TIMEOUT_S, WATCHDOG_S, randn
from zeroshard.testing import run_ranks

NAMES = ("C1", "C2", "C3", "C4", "C5")
BATCH, LENGTH = 4, 64
BUDGET_BYTES = 2_000_000
"""Of a rank, for what is kept between forward and backward: about forty blocks."""


def run(name: str, depth: int) -> tuple[int, list[float]]:
    """Return what a rank keeps at the end of a forward and after a backward, at most; and losses."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = models.build(Net)
    model.blocks.extend(Block() for _ in range(depth - len(model.blocks)))
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = zs.Settings(watchdog_s=WATCHDOG_S)
    zero = zs.shard(model, optimizer, residency=name, mesh=mesh, units=[Block], settings=settings)
    losses, states, gradients, activations = [], 0, 0, 0
    for step in range(2):
        loss = model(randn(BATCH, LENGTH, WIDTH, key=(step, mesh.get_local_rank("shard")))).square().mean()
        activations = zero.memory().resident_bytes["activations"]
        loss.backward()
        optimizer.step()
        held = zero.memory().resident_bytes
        gradients, states = held["gradients"], held["states"] + held["parameters"]
        optimizer.zero_grad()
        losses.append(loss.item())
    return states + gradients + activations, losses


def run_all(depth: int) -> dict[str, tuple[int, list[float]]]:
    return {name: run(name, depth) for name in NAMES}


@pytest.mark.rotates
def test_the_rows_keep_bytes_in_the_order_of_the_paper() -> None:
    assert BATCH * LENGTH > 6 * WIDTH, "else gradients are more than inputs, and C2 and C3 change places"
    few, many = (run_ranks(run_all, 4, depth, timeout_s=TIMEOUT_S) for depth in (4, 8))
    for rank in range(4):
        nbytes = {name: many[rank][name][0] for name in NAMES}
        assert nbytes["C1"] > nbytes["C3"] > nbytes["C2"] > nbytes["C4"] >= nbytes["C5"]
        assert all(many[rank][name][1] == many[rank]["C1"][1] for name in NAMES), "they train alike"
        # Each further block costs the same, so the largest model that fits follows.
        of_block = {name: (nbytes[name] - few[rank][name][0]) / 4 for name in NAMES}
        largest = {name: 8 + (BUDGET_BYTES - nbytes[name]) // of_block[name] for name in NAMES}
        assert largest["C5"] >= largest["C4"] > largest["C2"] > largest["C3"] > largest["C1"] > 8


def test_a_row_without_the_axis_it_needs_is_refused() -> None:
    with pytest.raises(ValueError, match="over the ranks along the axis 'tensor', but the mesh has no such axis"):
        zs.shard(models.build(Net), residency="C4")
