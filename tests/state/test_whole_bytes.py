"""Bytes of optimizers that need whole matrices: states are with owners, exactly as predicted."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adafactor, Muon, Optimizer

import zeroshard as zs
from tests import models
from tests.oracle import STAGES
from tools.settled import settled
from zeroshard.core.slot import slot_of
from zeroshard.table.spec import UnitSpec
from zeroshard.testing import run_ranks


def adafactor(model: nn.Module) -> list[Optimizer]:
    return [Adafactor(model.parameters(), lr=0.05)]


def muon(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [Muon(matrices, lr=0.02), torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)]


MAKERS = {"adafactor": adafactor, "muon": muon}


def bytes_of(name: str, stage: int, options: dict[str, Any]) -> tuple[Any, Any, Any, int, int, int, str]:
    """Train a little; return what is held, what was predicted before, and what the owners' states must be."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = models.build(models.Stack, depth=4, width=48)
    optimizers = MAKERS[name](model)
    zero = zs.shard(model, optimizers, stage=stage, **settled({"watchdog_s": 5.0, **options}))
    before = zero.memory().predicted_bytes
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        models.stack_loss(model, step, rank).backward()
        for optimizer in optimizers:
            optimizer.step()
    sent = zero.traffic().sent_bytes.get("update", 0) // 3
    zero.check_copies()
    memory = zero.memory()
    expected = 0
    for optimizer in optimizers:
        for master in [m for group in optimizer.param_groups for m in group["params"]]:
            slot = slot_of(master)
            n, m = (*slot.shape, 0)[:2] if len(slot.shape) == 2 else (slot.shape.numel(), 0)
            if slot.updater is None:
                expected += 2 * 4 * master.numel()  # AdamW's, of the slice
            elif slot.has_whole_states:
                expected += 4 * (n + m) if name == "adafactor" else 4 * n * m
    of_exchange = zero.traffic().predicted_step_bytes - sum(
        u.sent_bytes(kind) for u in _specs(zero) for kind in _kinds(u)
    )
    return before, memory.resident_bytes, memory.peak_bytes, expected, sent, of_exchange, zero.summary()


def _specs(zero: zs.Zero) -> list[UnitSpec]:
    return [unit.described() for unit in zero.units]


def _kinds(unit: UnitSpec) -> list[str]:
    # A backward finds what its forward used last.
    return ["gather"] * (0 if unit.is_whole else 1 if unit.is_last else 2) + ["reduce", "publish"]


@pytest.mark.product
@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_states_are_exact_and_buffers_as_predicted(name: str, world: int, shared_memory: bool) -> None:
    options = {"shared_memory": shared_memory}
    for stage in STAGES:
        results = run_ranks(bytes_of, world, name, stage, options, process_group=world > 1)
        for before, resident, peak, expected, sent, of_exchange, summary in results:
            assert resident["states"] == expected
            assert before["states"] == expected
            assert resident["padding"] == before["padding"]
            assert sent == of_exchange
            assert math.isclose(peak["transient"], before["transient"], rel_tol=0.02, abs_tol=64), (stage, world)
            assert "updated whole by" in summary


def sent_elements(stage: int) -> tuple[float, int, int]:
    """Return the elements that all ranks exchange in a step, those that are elsewhere than at owners, and all."""
    model = models.build(models.Stack, depth=4, width=48)
    optimizer = Adafactor(model.parameters(), lr=0.05)
    zero = zs.shard(model, optimizer, stage=stage, **settled({"watchdog_s": 5.0}))
    models.stack_loss(model, 0, dist.get_rank()).backward()
    optimizer.step()
    slots = [slot_of(master) for master in optimizer.param_groups[0]["params"]]
    numel = sum(slot.shape.numel() for slot in slots)
    away = numel - sum(slot.bucket.layout.numels_by_rank(slot.index)[slot.updater] for slot in slots)
    total = torch.tensor(zero.traffic().sent_bytes["update"] / 4)
    dist.all_reduce(total)
    return total.item(), away, numel


@pytest.mark.product
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_and_values_go_to_owners_once_and_values_come_back(stage: int) -> None:
    for world in (2, 4):
        total, away, numel = run_ranks(sent_elements, world, stage)[0]
        assert total == 3 * away
        assert total <= 3 * numel
