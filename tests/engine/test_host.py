"""Ranks of one host exchange through its memory: the same bits as by messages, no more memory, and no messages."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, assert_heard, assert_same
from tools.settled import settled
from zeroshard.testing import run_ranks
from zeroshard.wire.board import is_supported
from zeroshard.wire.comm import Tag

pytestmark = pytest.mark.skipif(not is_supported(), reason="shared memory needs Linux on x86-64")

WIDTH = 1024
MIB = 2**20


def train(stage: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps of two micro-batches with clipping; return all that came of it, and what torch sent."""
    model = models.build(models.GPT)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, stage=stage, **settled({"watchdog_s": WATCHDOG_S, **options}))
    sent, isend = 0, dist.isend

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes * (kwargs["tag"] < Tag.VOTES)  # what ranks tell one another is no value
        return isend(tensor, *args, **kwargs)

    dist.isend = counting
    losses = []
    try:
        for step in range(4):
            with zero.no_sync() if step % 2 else zero.no_sync("replicate"):
                models.gpt_loss(model, step, dist.get_rank(), 0).backward()
            loss = models.gpt_loss(model, step, dist.get_rank(), 1)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append((loss.detach(), norm.clone()))
    finally:
        dist.isend = isend
    with zero.gathered(states=True):
        result = {"model": {n: p.clone() for n, p in model.state_dict().items()}, "losses": losses}
        result["states"] = {k: v.clone() for k, v in sorted(_tensors(optimizer.state_dict()["state"]))}
    counted = zero.traffic().sent_bytes
    del counted["agree"]  # ranks of one host tell each other where their files are
    return {**result, "counted": counted, "sent": sent}


def _tensors(states: dict[int, dict[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [(f"{number}/{key}", value) for number, state in states.items() for key, value in state.items()]


def train_both_ways(options: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [
        (train(stage, {"shared_memory": True, **options}), train(stage, {"shared_memory": False, **options}))
        for stage in STAGES
        if stage or "mesh" not in options
    ]


@pytest.mark.product
@pytest.mark.parametrize(
    ("world", "options"),
    [(2, {}), (3, {}), (4, {"mesh": 2}), (2, {"precision": "bf16"}), (3, {"precision": "fp16"})],
)
def test_shared_memory_and_messages_give_the_same_bits(world: int, options: dict[str, Any]) -> None:
    for runs in run_ranks(train_both_ways, world, options, timeout_s=TIMEOUT_S):
        for shared, sent in runs:
            # Only what copies of the state exchange goes over the wire.
            assert shared.pop("sent") == shared["counted"].get("replicate", 0)
            assert sent.pop("sent") == sum(sent["counted"].get(kind, 0) for kind in ("gather", "reduce", "replicate"))
            assert_same(sent, shared)


class Wide(nn.Module):
    """Eight blocks of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def shared_bytes() -> int:
    """Return the bytes of shared memory that this process has mapped in."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem")]
    return int(line.split()[1]) * 1024


def most_mapped() -> tuple[int, int]:
    """Return the most shared memory that is mapped in at any hook, and between steps."""
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zs.shard(model, optimizer, stage=3, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    before, most = shared_bytes(), 0

    def look(*args: Any) -> None:
        nonlocal most
        most = max(most, shared_bytes())

    for block in model.blocks:
        block.register_forward_hook(look)
        block.register_full_backward_hook(look)
    for _ in range(3):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, most


def test_two_units_and_their_gradients_are_mapped_at_most() -> None:
    block = 4 * MIB
    for before, most in run_ranks(most_mapped, 2, timeout_s=TIMEOUT_S):
        shards = 8 * block // 2
        assert before <= shards + MIB
        # Two units whole; a stage of gradients; half a stage that is read of the other rank.
        assert shards + block < most <= shards + 2 * block + 1.5 * block + MIB


class Headed(Wide):
    """The same blocks between an embedding of 32 MiB and a head that shares it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(super().forward(self.table(x)), self.table.weight)


def mapped_behind_the_head() -> tuple[int, int]:
    """Return the most shared memory that is mapped in between steps, and when the backward comes to the first block."""
    model = Headed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zs.shard(model, optimizer, stage=3, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    between, behind = 0, 0

    def look(*args: Any) -> None:
        nonlocal behind
        behind = shared_bytes()

    model.blocks[0].register_full_backward_hook(look)
    for _ in range(3):
        model(torch.arange(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        between = max(between, shared_bytes())
    return between, behind


def test_a_shared_head_is_mapped_only_while_it_is_read() -> None:
    for between, behind in run_ranks(mapped_behind_the_head, 2, timeout_s=TIMEOUT_S):
        # Two units whole, and a stage that one of them is reduced in; the table is 32 MiB.
        assert behind <= between + 3 * 4 * MIB + MIB


def change_everywhere() -> tuple[Tensor, Tensor]:
    """Change parameters in place in a forward and under gathered(); return what is left of it."""
    model = Wide()
    nn.init.ones_(model.blocks[3].weight)
    zero = zs.shard(model, stage=3, settings=zs.Settings(watchdog_s=WATCHDOG_S))

    def double(module: nn.Module, *args: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(2)

    handle = model.blocks[3].register_forward_hook(double)
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    handle.remove()
    with zero.gathered():
        after_forward = model.blocks[3].weight.detach().clone()
    with zero.gathered(writeback=True), torch.no_grad():
        model.blocks[3].weight.add_(dist.get_rank() + 1)
    with zero.gathered():
        return after_forward, model.blocks[3].weight.detach().clone()


def test_a_change_in_place_is_made_by_no_rank_for_another() -> None:
    for after_forward, written in run_ranks(change_everywhere, 2, timeout_s=TIMEOUT_S):
        assert after_forward.unique().tolist() == [2.0]  # made by both ranks alike, and kept once
        assert written.unique().tolist() == [3.0]  # rank 0's, once


class Table(nn.Module):
    """An embedding whose gradient fills its bucket, larger than what ranks show each other at once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2304, WIDTH)
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, *, uses_table: bool = True) -> Tensor:
        return self.out(self.table.weight[:8] + x if uses_table else x)


def look_up(stage: int, options: dict[str, Any], user: int | None) -> dict[str, Tensor]:
    """Train with a table that only rank `user` uses in some steps; return the parameters."""
    model = models.build(Table)
    optimizer = models.adamw(model)
    zero = zs.shard(
        model, optimizer, stage=stage, units=[model.table, model.out], **settled({"watchdog_s": WATCHDOG_S, **options})
    )
    assert_heard(zero, model, stage, **options)
    for step in range(3):
        x = torch.full((8, WIDTH), 0.1 * (step + dist.get_rank()))
        is_first = step % 2 == 0
        for uses_table in (True, user is None or dist.get_rank() == user or is_first):
            model(x, uses_table=uses_table).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        return {name: p.clone() for name, p in model.state_dict().items()}


def look_up_both_ways(stage: int, user: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return look_up(stage, {"shared_memory": True}, user), look_up(stage, {"shared_memory": False}, user)


@pytest.mark.product
@pytest.mark.parametrize("user", [None, 1])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_is_its_own_stage_is_shown_in_parts(stage: int, user: int | None) -> None:
    for shared, sent in run_ranks(look_up_both_ways, 2, stage, user, timeout_s=TIMEOUT_S):
        assert_same(sent, shared)


class Flat(nn.Module):
    """Its output is a view of its parameter, so the parameter's gradient is a view of the output's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self) -> Tensor:
        return self.weight.view(-1)


def keep_upstream(stage: int) -> tuple[Tensor, Tensor]:
    """Return the gradient that backward was given, before and after two micro-batches."""
    model = Flat()
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, stage=stage, units=[model], settings=zs.Settings(watchdog_s=WATCHDOG_S))
    given = torch.ones(64 * 64)
    before = given.clone()
    with zero.no_sync():
        model().backward(given)
        model().backward(given)
    return before, given


@pytest.mark.product
@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_that_shares_memory_is_copied(stage: int) -> None:
    for before, after in run_ranks(keep_upstream, 2, stage, timeout_s=TIMEOUT_S):
        assert torch.equal(after, before), "the user's tensor was added to"
