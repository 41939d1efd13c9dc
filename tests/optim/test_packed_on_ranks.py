"""8-bit AdamW on slices: the bits of the update, bytes, whole states, and checkpoints at any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from tests.oracle import TIMEOUT_S, WATCHDOG_S, assert_same
from tools.settled import settled
from zeroshard.checkpoint.inventory import held_range
from zeroshard.core.slot import slot_of
from zeroshard.optim.blocks8 import BLOCK_NUMEL, code_of, to_rows
from zeroshard.testing import run_ranks

WIDTH = 20
STAGES = (0, 1, 2, 3)


def make(stage: int, **options: Any) -> tuple[nn.Module, zs.optim.AdamW8bit, zs.Zero]:
    model = models.build(models.Stack, depth=2, width=WIDTH)
    optimizer = zs.optim.AdamW8bit(model.parameters(), lr=1e-2)
    zero = zs.shard(model, optimizer, stage=stage, **settled({"watchdog_s": WATCHDOG_S, **options}))
    return model, optimizer, zero


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = models.stack_loss(model, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def masters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [entry for group in optimizer.param_groups for entry in group["params"]]


def step_beside_a_copy(stages: tuple[int, ...], precision: str) -> None:
    """Take steps with the sharded optimizer, and with one of its class on copies of the slices and their gradients."""
    for stage in stages:
        model, optimizer, zero = make(stage, precision=precision)
        copies = [nn.Parameter(master.detach().clone()) for master in masters_of(optimizer)]
        alone = zs.optim.AdamW8bit(copies, lr=1e-2)
        for step in range(3):
            models.stack_loss(model, step, zero.mesh.rank).backward()
            for copy, master in zip(copies, masters_of(optimizer), strict=True):
                copy.grad = None if master.grad is None else torch.empty_like(master).copy_(master.grad)
            optimizer.step()
            alone.step()
            memory = zero.memory()
            optimizer.zero_grad()
            for copy, master in zip(copies, masters_of(optimizer), strict=True):
                assert torch.equal(copy, master), f"stage {stage}, step {step}"
                assert_same(dict(alone.state[copy]), dict(optimizer.state[master]), f"stage {stage}, step {step}")
        assert memory.resident_bytes["states"] == memory.predicted_bytes["states"], f"stage {stage}"
        assert memory.resident_bytes["padding"] == memory.predicted_bytes["padding"], f"stage {stage}"
        zero.check_copies()


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_an_update_has_the_bits_of_one_process_on_the_same_slices(world: int) -> None:
    run_ranks(step_beside_a_copy, world, STAGES, "fp32", timeout_s=TIMEOUT_S, process_group=world > 1)


def test_an_update_of_masters_beside_bfloat16_parameters_has_these_bits_too() -> None:
    run_ranks(step_beside_a_copy, 2, STAGES, "bf16", timeout_s=TIMEOUT_S)


def moments(zero: zs.Zero, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    with zero.gathered(states=True):
        return {name: {k: v.clone() for k, v in optimizer.state[p].items()} for name, p in model.named_parameters()}


def packed_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    return [{k: v.clone() for k, v in optimizer.state[master].items()} for master in masters_of(optimizer)]


def write(folder: str) -> list[tuple[Any, ...]]:
    found = []
    for stage in STAGES:
        model, optimizer, zero = make(stage)
        rank = zero.mesh.rank
        train(model, optimizer, rank, 0, 3)
        zero.save(f"{folder}/{stage}")
        held, whole = packed_of(optimizer), moments(zero, model, optimizer)
        zero.save(f"{folder}/{stage}-later", asynchronous=True)
        assert_same(held, packed_of(optimizer), "gathered() and a save leave the states as they were")
        found.append((held, whole, train(model, optimizer, rank, 3, 5)))
        zero.wait()
    return found


def read(folder: str) -> list[tuple[Any, ...]]:
    found = []
    for stage in STAGES:
        model, optimizer, zero = make(stage)
        rank = zero.mesh.rank
        if stage % 2:
            train(model, optimizer, rank, 40, 41)
        zero.load(f"{folder}/{stage}")
        found.append((packed_of(optimizer), moments(zero, model, optimizer), train(model, optimizer, rank, 3, 5)))
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[tuple[Any, ...]]]]:
    folder = tmp_path_factory.mktemp("packed")
    return folder, run_ranks(write, 2, str(folder), timeout_s=TIMEOUT_S)


def test_the_same_ranks_read_the_same_bits(written: Any) -> None:
    folder, saved = written
    assert_same(saved, run_ranks(read, 2, str(folder), timeout_s=TIMEOUT_S), "read by the ranks that wrote")


def steps_apart(before: Tensor, codes: Tensor, scales: Tensor, *, is_signed: bool) -> float:
    """Return the distance of values before from what they were encoded as, in steps between codes there, at most."""
    code = code_of(is_signed=is_signed, device=torch.device("cpu"))
    step = torch.zeros(256)
    step[1:] = code.values.diff()
    step[:-1] = torch.maximum(step[:-1], code.values.diff())
    rows = to_rows(before if is_signed else before.sqrt())
    places = to_rows(codes, code.zero)
    each = step[places.int()] * scales[:, None]
    apart = (rows - code.numbers(places) * scales[:, None]).abs()
    assert (apart[each == 0] == 0).all()
    return (apart / each)[each > 0].max().item() if each.any() else 0.0


def read_beside(folder: str, wholes: list[dict[str, dict[str, Tensor]]]) -> float:
    """Return how far this rank's moments are from those that were saved, in steps between codes, at most."""
    found = [0.0]
    for stage, whole in zip(STAGES, wholes, strict=True):
        model, optimizer, zero = make(stage)
        zero.load(f"{folder}/{stage}")
        for master in masters_of(optimizer):
            slot, state = slot_of(master), optimizer.state[master]
            start, stop = held_range(slot)
            assert torch.equal(state["step"], whole[slot.name]["step"])
            for key, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
                before = whole[slot.name][key].reshape(-1)[start:stop]
                if len(before):
                    found.append(steps_apart(before, state[key], state[f"{key}_scales"], is_signed=is_signed))
        train(model, optimizer, zero.mesh.rank, 3, 4)
    return max(found)


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 3])
def test_other_ranks_quantize_anew_within_one_code(written: Any, world: int) -> None:
    folder, saved = written
    wholes = [whole for _, whole, _ in saved[0]]
    assert any(moment["exp_avg"].numel() > 2 * BLOCK_NUMEL for moment in wholes[0].values())
    apart = run_ranks(read_beside, world, str(folder), wholes, timeout_s=TIMEOUT_S, process_group=world > 1)
    assert 0.0 < max(apart) <= 0.5 + 1e-4
