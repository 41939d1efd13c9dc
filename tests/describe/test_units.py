"""Which parameters form a unit: small neighbours are joined, and nothing else."""

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S
from zeroshard.describe.units import SMALL_BYTES, SMALL_PART, plan_units
from zeroshard.testing import run_ranks


class Deep(models.Stack):
    """A stack of so many blocks that each is a small part of the model."""

    def __init__(self) -> None:
        super().__init__(depth=3 * SMALL_PART)


class Skipping(Deep):
    """A stack of which the last block of some units does not run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = block(x) if index % 4 != 3 else x
        return self.head(x)


class Backwards(Deep):
    """A stack that runs from its last block to its first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


class Recomputed(Deep):
    """A stack that recomputes its blocks in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class TwoLists(nn.Module):
    """Small blocks in two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.ModuleList(models.Block() for _ in range(20))
        self.two = nn.ModuleList(models.Block() for _ in range(20))


OTHERS = (Skipping, Backwards, Recomputed)


def names(model: nn.Module, units: list[object] | None = None) -> list[str]:
    return [plan.name for plan in plan_units(model, units)]


def test_small_neighbours_are_joined() -> None:
    model = models.build(Deep)
    plans = plan_units(model, None)
    assert [plan.name for plan in plans[:3]] == ["", "blocks.0-3", "blocks.4-7"]
    assert [block for plan in plans[1:] for block in plan.blocks] == list(model.blocks)
    assert sorted(n for plan in plans for n, _ in plan.parameters) == sorted(n for n, _ in model.named_parameters())
    total = sum(p.nbytes for p in model.parameters())
    largest = max(sum(p.nbytes for p in block.parameters()) for block in model.blocks)
    assert all(plan.nbytes < total / SMALL_PART + largest for plan in plans)


def test_large_blocks_are_units_of_their_own() -> None:
    with torch.device("meta"):
        model = models.Stack(depth=2 * SMALL_PART, width=400)
    assert sum(p.nbytes for p in model.blocks[0].parameters()) > SMALL_BYTES
    assert len(names(model)) == 1 + 2 * SMALL_PART


def test_a_part_of_a_small_model_is_not_small() -> None:
    assert names(models.build(models.Stack)) == ["", "blocks.0", "blocks.1", "blocks.2"]


def test_units_that_are_asked_for_are_not_joined() -> None:
    assert names(models.build(Deep), [models.Block])[:3] == ["", "blocks.0", "blocks.1"]


def test_blocks_of_two_lists_are_not_joined() -> None:
    found = names(models.build(TwoLists))
    assert "one.18-19" in found
    assert "two.0-2" in found


def train(kind: type[nn.Module], stage: int, joins: bool) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    model = models.build(kind)
    optimizer = models.adamw(model)
    units = None if joins else [models.Block]
    zero = zs.shard(model, optimizer, stage=stage, units=units, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    losses = []
    # A first forward keeps the last unit by the order of parameters: see `Trace.predicted`.
    settled = 2 if kind is Backwards else 1
    for step in range(3):
        loss = models.stack_loss(model, step, zero.mesh.rank)
        predicted = zero.trace.predicted() if step >= settled else None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if predicted is not None:
            assert predicted == zero.trace.step_events(zero.trace.events[-1].step)
    events = [f"{e.kind} {e.unit}" for e in zero.trace.step_events(zero.trace.events[-1].step)]
    memory = zero.memory()
    if kind in (Deep, Skipping):
        # A unit whose last block did not run is left all the same.
        assert memory.peak_bytes["transient"] <= memory.predicted_bytes["transient"]
    with zero.gathered():
        return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, events


@pytest.mark.product
@pytest.mark.parametrize(("kind", "stage"), [*((Deep, n) for n in STAGES), *((k, 3) for k in OTHERS)])
def test_joined_blocks_train_to_the_same_bits(kind: type[nn.Module], stage: int) -> None:
    joined = run_ranks(train, 2, kind, stage, True, timeout_s=TIMEOUT_S)
    apart = run_ranks(train, 2, kind, stage, False, timeout_s=TIMEOUT_S)
    for (losses, parameters, events), (other_losses, other_parameters, _) in zip(joined, apart, strict=True):
        assert losses == other_losses
        assert all(torch.equal(parameters[name], other_parameters[name]) for name in other_parameters)
        if stage == 3 and kind is Deep:
            assert events.count("gather blocks.4-7") == events.count("release blocks.4-7") == 2
            assert events.count("reduce blocks.4-7") == 1
