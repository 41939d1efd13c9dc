"""Training with each treatment of activations equals training without: recomputation, random numbers, inputs."""

import gc
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests import models
from tests.models import WIDTH
from tests.oracle import STAGES, TIMEOUT_S, Run, Sharded, assert_matches, at_worlds, seed
from zeroshard.testing import run_ranks

DEPTH = 5


class Keyed(nn.Module):
    """A block with dropout, whose inputs come by name, in a tuple, and as numbers; it counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.runs = 0

    def forward(self, x: Tensor, *, scales: tuple[Tensor, Tensor], power: int = 2) -> tuple[Tensor, Tensor]:
        self.runs += 1
        hidden = F.dropout(F.relu(self.up(self.norm(x) * scales[0])) ** power, 0.3, self.training)
        x = x + self.down(hidden)
        return x, x.sum(-1, keepdim=True) * scales[1]


class Keys(nn.Module):
    """A stack of these, and something else between some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Keyed() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        scales, total = (x.detach().tanh(), x[:1].mean(-1, keepdim=True)), x.new_zeros(())
        for index, block in enumerate(self.blocks):
            x, one = block(x, scales=scales)
            total = total + one.mean()
            if index == 2:
                x = x * 1.5
        return self.head(x) + total


def script(run: Run) -> None:
    """Accumulate, clip, evaluate, and look at gradients of an input."""
    model = models.build(Keys)
    run.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), units=[Keyed])
    for step in range(3):
        for part in range(2):
            seed(step, part, run.rank)
            x = torch.randn(4, 5, requires_grad=True)
            loss = model(x).square().mean()
            run.backward(loss)
            run.record(loss=loss, input=x.grad)
        run.record(norm=nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=math.inf))
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()
        with torch.no_grad():
            run.record(evaluated=model(torch.ones(2, 5)).sum())


RECOMPUTED: dict[str | None, Any] = {
    "every unit": "recompute",
    "every second": zs.Recomputed(every=2),
    "all together": zs.Recomputed(every=DEPTH),
    "root of the count": "recompute-sqrt",
    "but for products": "recompute-rest",
    "some units": {"blocks.[13]": "recompute", "blocks.4": zs.Recomputed(every=2)},
}


TREATED = {
    "compressed": "compress",
    "offloaded": "offload",
    "half offloaded": zs.Offloaded(0.5),
    "all of it": "recompute+compress+offload",
}


@pytest.mark.product
@pytest.mark.parametrize(("name", "world"), at_worlds([*RECOMPUTED, *TREATED]))
def test_treatments_change_no_bit(name: str, world: int) -> None:
    how = {**RECOMPUTED, **TREATED}[name]
    assert_matches(script, world, STAGES if world == 2 else (), {"activations": how})


def count_runs(activations: Any, stage: int) -> list[int]:
    """Return how often each block ran in one step."""
    model = models.build(Keys)
    zs.shard(model, stage=stage, units=[Keyed], activations=activations)
    model(torch.ones(2, 5)).sum().backward()
    return [block.runs for block in model.blocks]


@pytest.mark.product
@pytest.mark.parametrize("stage", [0, 3])
def test_each_module_runs_once_more_and_no_other_does(stage: int) -> None:
    expected = {
        None: [1] * DEPTH,
        "every unit": [2] * DEPTH,
        "every second": [2] * DEPTH,
        "all together": [2] * DEPTH,
        "root of the count": [2] * DEPTH,
        "but for products": [2] * DEPTH,
        "some units": [1, 2, 1, 2, 2],
    }
    for name, runs in expected.items():
        found = run_ranks(count_runs, 2, RECOMPUTED.get(name), stage, timeout_s=TIMEOUT_S)
        assert found == [runs, runs], name


class Ours(models.Stack):
    """A stack whose blocks the model itself recomputes."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def own_script(run: Run) -> None:
    model = models.build(Ours)
    run.shard(model, models.adamw(model))
    for step in range(2):
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss)
        run.record(loss=loss)
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()


@pytest.mark.product
@pytest.mark.parametrize("activations", ["recompute", "recompute-sqrt"])
def test_recomputation_by_the_model_itself_goes_on_beside_it(activations: str) -> None:
    assert_matches(own_script, 2, STAGES, {"activations": activations})


def saved_bytes(activations: Any) -> int:
    """Return the bytes that one forward leaves for its backward, parameters aside, each memory once."""
    model = models.build(models.Stack)
    run = Sharded(0, {"activations": activations})
    run.shard(model, units=[models.Block])
    x, seen = torch.randn(64, 5), {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    if activations is None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            loss = model(x).sum()
    else:
        real = run.zeros[0]._engine.saved.pack
        run.zeros[0]._engine.saved.pack = lambda tensor: real(pack(tensor))  # type: ignore[method-assign]
        loss = model(x).sum()
    loss.backward()
    return sum(nbytes for address, nbytes in seen.items() if address not in held)


def test_recomputed_modules_keep_their_inputs_alone() -> None:
    kept, inputs, all_together = (saved_bytes(how) for how in (None, "recompute", zs.Recomputed(every=3)))
    row = 64 * 4
    # The stem's input, three inputs of blocks and the head's input; or the first of the blocks' alone.
    assert inputs == row * (5 + 4 * WIDTH)
    assert all_together == row * (5 + 2 * WIDTH)
    assert kept > 2 * inputs


class Between(nn.Module):
    """A stack that changes what its blocks return in place, some of it after the next block has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(5, WIDTH), nn.ModuleList(models.Block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            y = block(x)
            if index == 3:
                y += 1.0
            elif index == 4:
                y = y + block(y) + self.blocks[0](x)
            x = y
        return x[:, :3]


def between_script(run: Run) -> None:
    model = models.build(Between)
    run.shard(model, models.adamw(model), units=[models.Block])
    for step in range(2):
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss, retain_graph=True)
        run.backward(loss)
        run.record(loss=loss)
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()


@pytest.mark.product
@pytest.mark.parametrize("activations", ["recompute", zs.Recomputed(every=2), zs.Recomputed(every=6)])
def test_outputs_may_be_changed_in_place_and_backward_repeated(activations: Any) -> None:
    assert_matches(between_script, 2, STAGES, {"activations": activations})


class Again(nn.Module):
    """A stack that runs each block twice in a row, as models do that share layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(5, WIDTH), nn.ModuleList(models.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(block(x))
        return x[:, :3]


def later_script(run: Run) -> None:
    """Make the forwards of all micro-batches before the first backward."""
    model = models.build(Again)
    run.shard(model, models.adamw(model), units=[models.Block])
    for step in range(2):
        losses = [models.stack_loss(model, 3 * step + part, run.rank) for part in range(3)]
        for loss in losses:
            run.backward(loss)
            run.record(loss=loss)
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()


@pytest.mark.product
@pytest.mark.parametrize("activations", ["recompute-sqrt", "recompute", zs.Recomputed(every=8)])
def test_backwards_may_follow_later_forwards(activations: Any) -> None:
    """The second backward of two forwards must not release a unit whose earlier call is recomputed already."""
    for shared_memory in (False, True):
        assert_matches(later_script, 2, STAGES, {"activations": activations, "shared_memory": shared_memory})


@pytest.mark.parametrize("activations", ["recompute", zs.Recomputed(every=2), "compress"])
def test_a_graph_that_nobody_wants_leaves_nothing(activations: Any) -> None:
    model = models.build(models.Stack)
    zero = zs.shard(model, stage=0, activations=activations, units=[models.Block])
    loss = models.stack_loss(model, 0, 0)
    assert zero.memory().peak_bytes["activations"] > 0
    del loss
    gc.collect()
    assert zero.memory().resident_bytes["activations"] == 0
    models.stack_loss(model, 0, 0).backward()
    assert zero.memory().resident_bytes["activations"] == 0
