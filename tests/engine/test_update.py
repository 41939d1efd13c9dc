"""An update in pieces is one update: hooks, schedulers, scalers and errors see a step as torch makes it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from zeroshard import handle
from zeroshard.optim.pieces import Piece, Resident, update_in_pieces
from zeroshard.update.sources import Source

LOG: list[str] = []


class Logged(Piece):
    """Some of the entries, in a piece that tells what is asked of it."""

    def __init__(self, name: str, groups: Sequence[list[Tensor]]) -> None:
        self.name, self.groups = name, groups

    def start(self) -> None:
        LOG.append(f"start {self.name}")

    def entries(self) -> Sequence[list[Tensor]]:
        LOG.append(f"update {self.name}")
        return self.groups

    def finish(self) -> None:
        LOG.append(f"finish {self.name}")

    def close(self) -> None:
        LOG.append(f"close {self.name}")


def pieces_of(optimizer: torch.optim.Optimizer, count: int) -> Iterator[Piece]:
    """Deal the entries of each group out to pieces in turn."""
    groups = [group["params"] for group in optimizer.param_groups]
    return (Logged(str(place), [entries[place::count] for entries in groups]) for place in range(count))


class InPieces(Source):
    """A source of three pieces."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @contextmanager
    def update(self) -> Iterator[Iterator[Piece]]:
        yield pieces_of(self.optimizer, 3)


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each sharded optimizer update in three pieces."""
    LOG.clear()
    monkeypatch.setattr(handle, "source_of", lambda engine, stores, optimizer, per_element: InPieces(optimizer))


class Extended(torch.optim.AdamW):
    """A class whose step calls the step of the class that it extends, as many do."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def build(cls: Any = torch.optim.AdamW, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = models.build(models.Stack)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if "norm" in name], "weight_decay": 0.0},
        {"params": [p for name, p in named if "norm" not in name]},
    ]
    return model, cls(groups, lr=1e-2, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        loss = models.stack_loss(model, step, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, Extended])
@pytest.mark.parametrize("foreach", [False, True])
def test_pieces_give_the_bits_of_one_update(cls: Any, foreach: bool) -> None:
    plain, sharded = build(cls, foreach=foreach), build(cls, foreach=foreach)
    zs.shard(*sharded)
    assert train(*sharded) == train(*plain)
    assert LOG


def test_each_piece_starts_while_the_one_before_is_updated() -> None:
    model, optimizer = build()
    zs.shard(model, optimizer)
    train(model, optimizer, steps=1)
    assert [
        *("start 0", "start 1", "update 0", "finish 0"),
        *("start 2", "update 1", "finish 1", "close 0"),
        *("update 2", "finish 2", "close 1", "close 2"),
    ] == LOG


def test_hooks_of_user_code_run_once_and_see_all_entries() -> None:
    model, optimizer = build()
    calls: list[tuple[str, list[int]]] = []

    def note(name: str) -> Any:
        return lambda one, *_: calls.append((name, [len(group["params"]) for group in one.param_groups]))

    optimizer.register_step_pre_hook(note("pre, before sharding"))
    optimizer.register_step_post_hook(note("post, before sharding"))
    zs.shard(model, optimizer)
    pre = optimizer.register_step_pre_hook(note("pre, after sharding"))
    optimizer.register_step_post_hook(note("post, after sharding"))
    train(model, optimizer, steps=1)
    lengths = [len(group["params"]) for group in optimizer.param_groups]
    names = ["pre, before sharding", "pre, after sharding", "post, before sharding", "post, after sharding"]
    assert min(lengths) > 0
    assert calls == [(name, lengths) for name in names]
    pre.remove()
    calls.clear()
    train(model, optimizer, steps=1)
    assert "pre, after sharding" not in [name for name, _ in calls]


def test_a_hook_registered_after_sharding_runs_before_the_update() -> None:
    """Such a hook may clip: an update that was made before it would be another one."""
    plain, sharded = build(), build()
    zs.shard(*sharded)
    for _, optimizer in (plain, sharded):
        optimizer.register_step_pre_hook(lambda one, *_: one.param_groups[0].update(lr=0.1))
    assert train(*sharded) == train(*plain)


def test_a_scheduler_counts_a_step_as_one() -> None:
    results = []
    for is_sharded, is_early in ((False, True), (True, True), (True, False)):
        model, optimizer = build()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2) if is_early else None
        if is_sharded:
            zs.shard(model, optimizer)
        scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 2)
        rates = []
        for _ in range(4):
            train(model, optimizer, steps=1)
            scheduler.step()
            rates.append(scheduler.get_last_lr())
        results.append((rates, [p.tolist() for p in model.parameters()]))
    assert results[1] == results[0]
    assert results[2] == results[0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_skips_the_update_of_all_pieces(fused: bool) -> None:
    results = []
    for is_sharded in (False, True):
        model, optimizer = build(fused=fused)
        if is_sharded:
            zs.shard(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
        for step in range(4):
            loss = models.stack_loss(model, step, 0) * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append((scaler.get_scale(), [p.tolist() for p in model.parameters()]))
    assert results[0] == results[1]


class Failing(torch.optim.SGD):
    """An optimizer that fails in its second piece."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise OSError("a disk is full")
        return super().step(closure)


def test_an_exception_puts_the_entries_back() -> None:
    model, optimizer = build(Failing)
    zs.shard(model, optimizer, settings=zs.Settings(elementwise=True))
    before = [list(group["params"]) for group in optimizer.param_groups]
    models.stack_loss(model, 0, 0).backward()
    with pytest.raises(OSError, match="a disk is full"):
        optimizer.step()
    after = [group["params"] for group in optimizer.param_groups]
    assert [[*map(id, group)] for group in before] == [[*map(id, group)] for group in after]
    optimizer.zero_grad()
    train(model, optimizer, steps=1)


def test_a_closure_runs_before_any_piece() -> None:
    model, optimizer = build()
    zs.shard(model, optimizer)
    assert optimizer.step(lambda: LOG.append("closure") or 3.0) == 3.0
    assert LOG[:2] == ["closure", "start 0"]
    assert LOG.count("closure") == 1


def test_an_optimizer_without_an_engine_can_be_updated_in_pieces() -> None:
    plain, pieced = build(), build()
    results = []
    for model, optimizer in (plain, pieced):
        models.stack_loss(model, 0, 0).backward()
        if optimizer is pieced[1]:
            groups = [group["params"] for group in optimizer.param_groups]
            cut = [Resident([groups[0], []]), Resident([[], groups[1]])]
            update_in_pieces(optimizer, nullcontext(cut))()
            assert [group["params"] for group in optimizer.param_groups] == groups
        else:
            optimizer.step()
        results.append([p.tolist() for p in model.parameters()])
    assert results[0] == results[1]


def test_a_step_of_no_piece_updates_nothing() -> None:
    model, optimizer = build()
    models.stack_loss(model, 0, 0).backward()
    before = [p.tolist() for p in model.parameters()]
    update_in_pieces(optimizer, nullcontext([]))
    optimizer.step()
    assert before == [p.tolist() for p in model.parameters()]
