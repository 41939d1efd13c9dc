"""Non-reentrant activation checkpointing, inside and around units, with and without dropout: no extra reductions."""

import functools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import models
from tests.models import WIDTH
from tests.oracle import STAGES, TIMEOUT_S, Run, Sharded, assert_matches, at_worlds, seed
from zeroshard.testing import run_ranks

remember = functools.partial(checkpoint, use_reentrant=False)


class Inside(models.Block):
    """A block that recomputes its own inner layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + remember(self.inner, self.norm(x))

    def inner(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Dropping(models.Block):
    """A block with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.3, self.training)


class Recomputed(nn.Module):
    """A stack that recomputes blocks, in one of several ways."""

    def __init__(self, how: str, kind: type[nn.Module] = models.Block, depth: int = 4) -> None:
        super().__init__()
        self.how = how
        self.stem = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.how == "in pairs":
            for start in range(0, len(self.blocks), 2):
                x = remember(self.run, start, start + 2, x)
        elif self.how == "nested":
            x = remember(self.run_remembered, x)
        elif self.how == "some":
            for index, block in enumerate(self.blocks):
                x = remember(block, x) if index % 2 else block(x)
        elif self.how == "each":
            for block in self.blocks:
                x = remember(block, x)
        else:
            x = self.run(0, len(self.blocks), x)
        return self.head(x)

    def run(self, start: int, stop: int, x: Tensor) -> Tensor:
        for block in self.blocks[start:stop]:
            x = block(x)
        return x

    def run_remembered(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = remember(block, x)
        return x


WAYS = ["no", "each", "some", "in pairs", "nested"]


def train(run: Run, model: nn.Module, steps: int = 3) -> None:
    """Train with a generator of each rank's own."""
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(steps):
        seed(step, run.rank)
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss, draw=torch.rand(2))


def recomputed(run: Run, kind: type[nn.Module]) -> None:
    for how in WAYS:
        train(run, models.build(Recomputed, how, kind), steps=2)


@pytest.mark.product
@pytest.mark.parametrize(("kind", "world"), at_worlds([models.Block, Inside, Dropping]))
def test_recomputation_around_and_inside_units(kind: type[nn.Module], world: int) -> None:
    assert_matches(functools.partial(recomputed, kind=kind), world)


class Whole(nn.Module):
    """A model that recomputes the sharded stack inside it as one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = models.Stack()

    def forward(self, x: Tensor) -> Tensor:
        return remember(self.stack, x)


def whole_model(run: Run) -> None:
    train(run, models.build(Whole))


def around_the_root(run: Run) -> None:
    """The caller recomputes the sharded model itself."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        output = remember(model, models.features(step, run.rank))
        loss = (output - models.targets(step, run.rank)).square().mean()
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)


def dropout_without_recomputation(run: Run) -> None:
    train(run, models.build(Recomputed, "no", Dropping))


def accumulated(run: Run) -> None:
    model = models.build(Recomputed, "each")
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(2):
        with run.no_sync():
            run.backward(models.stack_loss(model, step, run.rank, 0))
        run.backward(models.stack_loss(model, step, run.rank, 1))
        optimizer.step()
        optimizer.zero_grad()


SCRIPTS = [whole_model, around_the_root, dropout_without_recomputation, accumulated]


@pytest.mark.product
@pytest.mark.parametrize(("script", "world"), at_worlds(SCRIPTS))
def test_recomputation(script: Callable[[Run], None], world: int) -> None:
    assert_matches(script, world)


def count_reductions(how: str, stage: int) -> tuple[Counter[tuple[int, str]], int]:
    """Return how often each unit is reduced in the third step, and the bytes it sends."""
    run = Sharded(stage)
    model = models.build(Recomputed, how)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    zero = run.zeros[0]
    for step in range(3):
        before = zero.traffic().sent_bytes.get("reduce", 0)
        models.stack_loss(model, step, run.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    last = max(event.step for event in zero.trace.events if event.kind == "reduce")
    reduces = Counter(event.unit for event in zero.trace.events if (event.step, event.kind) == (last, "reduce"))
    return reduces, zero.traffic().sent_bytes.get("reduce", 0) - before


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_recomputation_adds_no_reduction(stage: int) -> None:
    plain, sent = run_ranks(count_reductions, 2, "no", stage, timeout_s=TIMEOUT_S)[0]
    assert plain and set(plain.values()) == {1}, f"units reduced {plain} times in a step"
    for how in WAYS[1:]:
        assert run_ranks(count_reductions, 2, how, stage, timeout_s=TIMEOUT_S)[0] == (plain, sent), how
