"""What the handle of a model on islands says and does: memory, later optimizers, the end."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from tests.outer.plain import build, loss_of, mesh_of, nesterov
from zeroshard.testing import run_ranks

TIMEOUT_S = 60.0


def made(stage: int, inner: torch.optim.Optimizer | None, model: nn.Module, **options: Any) -> zs.Zero:
    """Shard a model on two islands."""
    return zs.shard(model, inner, stage=stage, mesh=mesh_of(2), outer=zs.Outer(**options))


def step(model: nn.Module, number: int, *optimizers: torch.optim.Optimizer) -> None:
    """Make a step of each optimizer."""
    loss_of(model, number, dist.get_rank(), torch.float32).backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()


# -- memory -----------------------------------------------------------------------------------------------------------


def held(stage: int, memory: str) -> tuple[list[dict[str, int]], int]:
    """Return the bytes by column of a synchronous run, and of islands before and after an exchange; and of a shard."""
    found = []
    model = build(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = zs.shard(model, optimizer, stage=stage, mesh=mesh_of(2)["shard"])
    found.append(plain.memory().predicted_bytes)
    model = build(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = made(stage, optimizer, model, every=1, bits=8, optimizer=nesterov, memory=memory)
    found += [zero.memory().resident_bytes, zero.memory().predicted_bytes]
    step(model, 0, optimizer)
    found += [zero.memory().resident_bytes, zero.memory().predicted_bytes]
    shards = [bucket.layout.shard_numel for unit in zero.units for bucket in unit.buckets]
    return found, 4 * sum(shards)


@pytest.mark.parametrize(("stage", "memory", "column"), [(0, "device", "states"), (3, "host", "host")])
def test_memory_has_anchors_outer_states_and_what_rounding_lost(stage: int, memory: str, column: str) -> None:
    for found, nbytes in run_ranks(held, 4, stage, memory, timeout_s=TIMEOUT_S):
        plain, before, predicted, after, again = found
        rest = plain.get(column, 0)
        assert before.get(column, 0) - rest == 2 * nbytes  # an anchor, and what rounding lost
        assert predicted[column] - rest == after[column] - rest == again[column] - rest == 3 * nbytes


# -- optimizers -------------------------------------------------------------------------------------------------------


def attached() -> list[int]:
    """Attach the optimizers one after the other; return the exchanges after each step."""
    model, found = build(torch.float32), []
    zero = made(2, None, model, every=2)
    zero.attach(first := torch.optim.AdamW(model.blocks.parameters(), lr=0.01))
    for number in range(3):
        step(model, number, first)
        found.append(zero._islands.exchanges)  # type: ignore[union-attr]
    others = [p for name, p in model.named_parameters() if not name.startswith("blocks")]
    zero.attach(second := torch.optim.SGD(others, lr=0.01))
    for number in range(3, 6):
        step(model, number, first, second)
        found.append(zero._islands.exchanges)  # type: ignore[union-attr]
    zero.check_copies()
    return found


def test_optimizers_that_are_attached_later_count_from_then_on() -> None:
    assert run_ranks(attached, 4, timeout_s=TIMEOUT_S) == [[0, 1, 1, 2, 2, 3]] * 4


def attached_otherwise() -> str:
    """Attach another optimizer on one island."""
    model = build(torch.float32)
    zero = made(2, None, model, every=2)
    kind = torch.optim.SGD if dist.get_rank() >= 2 else torch.optim.Adam
    try:
        zero.attach(kind(model.parameters(), lr=0.1))
    except zs.RankMismatchError as error:
        return str(error)
    return "nothing was raised"


def test_another_optimizer_on_one_island_is_told() -> None:
    for text in run_ranks(attached_otherwise, 4, timeout_s=TIMEOUT_S):
        assert "optimizer: SGD" in text and "optimizer: Adam" in text


def unfrozen(is_frozen_before: bool) -> tuple[str, torch.Tensor]:
    """Train a block that was frozen before islands were made, or after that; return an error and its values."""
    model = build(torch.float32)
    model.blocks[0].requires_grad_(not is_frozen_before)
    optimizer, text = torch.optim.AdamW(model.parameters(), lr=0.01), ""
    zero = made(1, optimizer, model, every=2)
    try:
        for number in range(4):
            model.blocks[0].requires_grad_(number > 0)
            step(model, number, optimizer)
        zero.check_copies()
    except RuntimeError as error:
        text = str(error)
    with zero.gathered():
        return text, torch.cat([p.detach().flatten() for p in model.blocks[0].parameters()])


@pytest.mark.parametrize("is_frozen_before", [True, False])
def test_what_is_trained_later_is_exchanged_or_refused(is_frozen_before: bool) -> None:
    by_rank = run_ranks(unfrozen, 4, is_frozen_before, timeout_s=TIMEOUT_S)
    for text, values in by_rank:
        if is_frozen_before:
            assert "was trained; zs.shard(outer=) left it out as frozen: freeze it after that." in text
        else:
            assert not text and torch.equal(values, by_rank[0][1])


# -- values that the program writes -----------------------------------------------------------------------------------


def fill(zero: zs.Zero, model: nn.Module, value: float) -> None:
    """Write other values on each rank."""
    with zero.gathered(writeback=True), torch.no_grad():
        for one in (*model.parameters(), *model.buffers()):
            one.fill_(value + dist.get_rank())


def written(stage: int, path: str) -> tuple[str, list[set[float]]]:
    """Write at the start, between exchanges and at the end; return the error, and the values that there are then."""
    model, found, text = build(torch.float32), list[set[float]](), ""
    model.register_buffer("seen", torch.zeros(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    zero = made(stage, optimizer, model, every=2, bits=4, optimizer=nesterov)

    def look(zero: zs.Zero) -> None:
        with zero.gathered():
            found.append({number for one in model.state_dict().values() for number in one.flatten().tolist()})

    fill(zero, model, 2.0)
    zero.save(path)
    for number in range(3):
        step(model, number, optimizer)
    look(zero)
    try:
        fill(zero, model, 3.0)
    except RuntimeError as error:
        text = str(error)
    zero.finish()
    fill(zero, model, 4.0)
    step(model, 3, optimizer)
    zero.finish()
    zero.check_copies()
    look(zero)
    zero.detach()
    other = zs.shard(model, optimizer, mesh=mesh_of(2)["shard"])
    other.load(path, model_only=True)
    look(other)
    return text, found


@pytest.mark.parametrize("stage", [1, 3])
def test_values_that_the_program_writes_are_those_of_the_first_island_on_all(stage: int, tmp_path: Path) -> None:
    for text, found in run_ranks(written, 4, stage, str(tmp_path / "saved"), timeout_s=TIMEOUT_S):
        assert found == [{2.0}, {4.0}, {2.0}]
        assert "gathered(writeback=True) at step 3, between exchanges" in text and "Call zero.finish() before" in text


# -- the end ----------------------------------------------------------------------------------------------------------


def ended() -> tuple[str, dict[str, torch.Tensor]]:
    """Detach during an exchange, and after the last one."""
    model = build(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero = made(3, optimizer, model, every=4, delay=2)
    for number in range(3):
        step(model, number, optimizer)
    try:
        zero.detach()
    except RuntimeError as error:
        text = str(error)
    zero.finish()
    zero.finish()
    zero.detach()
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return text, first


def test_a_model_is_plain_after_the_last_exchange() -> None:
    by_rank = run_ranks(ended, 4, timeout_s=TIMEOUT_S)
    for text, values in by_rank:
        assert "zero.detach() during exchange 1 between islands" in text
        assert all(torch.equal(value, values[name]) for name, value in by_rank[0][1].items())
