"""Treatments of activations: passes are seen at every row, and cost nothing where no treatment is asked for."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
import zeroshard.activations
from tests import models
from tests.oracle import STAGES, TIMEOUT_S
from zeroshard.core.saved import Treatment
from zeroshard.table.cells import Activations
from zeroshard.table.stages import row_of_stage
from zeroshard.testing import run_ranks

STEPS = 2
WHOLE_STAGES = (0, 1, 2)


class Apart(Treatment):
    """Keeps each tensor in other memory, and counts by unit."""

    packed: dict[int, int]
    unpacked: int

    def pack(self, value: Tensor, unit: int) -> Any:
        self.packed[unit] = self.packed.get(unit, 0) + 1
        return "apart", value.double().clone(), value.dtype

    def unpack(self, packed: Any) -> Tensor:
        type(self).unpacked += 1
        kind, value, dtype = packed
        assert kind == "apart"
        return value.to(dtype)


class Negated(Treatment):
    """Works on what the treatment before it returned."""

    def pack(self, value: Any, unit: int) -> Any:
        kind, tensor, dtype = value
        return kind, -tensor, dtype

    def unpack(self, packed: Any) -> Any:
        kind, tensor, dtype = packed
        return kind, -tensor, dtype


class Both(Activations):
    """A cell of the two."""

    word = "apart"
    treatments = ("apart", "negated")


def train(stage: int, is_treated: bool, is_alone: bool = False) -> dict[str, Any]:
    """Train a stack of blocks; return what it came to, what was treated, and what was sent."""
    Apart.packed, Apart.unpacked = {}, 0
    zeroshard.activations.TREATMENTS = {"apart": Apart, "negated": Negated}
    row = row_of_stage(stage)
    if is_treated:
        row = zs.Residency(row.states, row.gradients, row.parameters, Both())
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, residency=row, settings=zs.Settings(watchdog_s=10.0))
    losses = []
    for step in range(STEPS):
        loss = models.stack_loss(model, step, zero.mesh.rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if is_alone and zero.mesh.rank == 0:
            with torch.no_grad():
                models.stack_loss(model, step, 0)
            models.stack_loss(model, step, 0)  # whose backward never comes
    with zero.gathered():
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {
        "losses": losses,
        "weights": weights,
        "packed": set(Apart.packed),
        "unpacked": Apart.unpacked,
        "units": {unit.number for unit in zero.units},
        "sent": dict(zero.traffic().sent_bytes),
    }


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2])
def test_a_chain_of_treatments_sees_every_unit_and_changes_no_bit(stage: int, world: int) -> None:
    plain = run_ranks(train, world, stage, False, timeout_s=TIMEOUT_S)
    treated = run_ranks(train, world, stage, True, timeout_s=TIMEOUT_S)
    for before, after in zip(plain, treated, strict=True):
        assert before["packed"] == set()
        assert after["packed"] == after["units"]
        assert after["unpacked"] > 0
        assert after["losses"] == before["losses"]
        assert all(torch.equal(after["weights"][name], weight) for name, weight in before["weights"].items())
        assert after["sent"] == before["sent"], "passes of a treatment agree on nothing more"


@pytest.mark.parametrize("stage", WHOLE_STAGES)
def test_a_rank_may_make_passes_alone_where_nothing_is_gathered(stage: int) -> None:
    together = run_ranks(train, 2, stage, True, timeout_s=TIMEOUT_S)
    alone = run_ranks(train, 2, stage, True, True, timeout_s=TIMEOUT_S)
    for before, after in zip(together, alone, strict=True):
        assert after["losses"] == before["losses"]
        assert all(torch.equal(after["weights"][name], weight) for name, weight in before["weights"].items())


@pytest.mark.parametrize("stage", STAGES)
def test_no_module_tells_of_its_forward_where_nothing_asks_for_it(stage: int) -> None:
    model = models.build(models.Stack)
    zs.shard(model, models.adamw(model), stage=stage)  # one rank: all is whole
    assert all(not block._forward_pre_hooks and not block._forward_hooks for block in model.blocks)


def test_saved_tensor_hooks_are_set_only_with_a_treatment() -> None:
    seen = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
            return x * x

    for cell in (zs.Residency().activations, Both()):
        zeroshard.activations.TREATMENTS = {"apart": Apart, "negated": Negated}  # type: ignore[misc]
        Apart.packed, Apart.unpacked = {}, 0
        model = nn.Sequential(nn.Linear(3, 3), Watch())
        zs.shard(model, residency=zs.Residency(activations=cell))
        model(torch.ones(1, 3))
    assert seen == [False, True]


def test_a_treatment_that_nobody_knows_is_refused() -> None:
    class Unknown(Activations):
        word = "frozen in ice"
        treatments = ("ice",)

    with pytest.raises(ValueError, match=r"'frozen in ice' asks for 'ice'; known treatments: "):
        zs.shard(nn.Linear(2, 2), residency=zs.Residency(activations=Unknown()))
