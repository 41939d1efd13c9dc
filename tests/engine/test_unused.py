"""Parameters without gradients: unused here or there, branches, frozen, adapted, frozen and thawed between steps.

Ranks that run different units, or one order each, get the bits of plain data parallelism all the same: each gradient is
one sum in rank order, made when all ranks have theirs.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from tests.models import WIDTH
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, Run, assert_matches, at_worlds, not_written_is_nan
from zeroshard.core.states import Presence
from zeroshard.testing import run_ranks


def routed(run: Run, route: Callable[[int, int], list[int]], steps: int = 4) -> None:
    """Train a routed model and record which gradients are None at each step."""
    model = models.build(models.Routed)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(steps):
        output = model(models.features(step, run.rank), route(step, run.rank))
        loss = (output - models.targets(step, run.rank)).square().mean()
        run.backward(loss)
        run.record(loss=loss, unused=[name for name, p in model.named_parameters() if p.grad is None])
        optimizer.step()
        optimizer.zero_grad()


def never_used_by_any_rank(run: Run) -> None:
    routed(run, lambda step, rank: [0, 1])


def other_blocks_on_each_rank(run: Run) -> None:
    """Rank r skips block r: every block is used by some rank."""
    routed(run, lambda step, rank: [block for block in range(4) if block != rank])


def one_block_on_one_rank_only(run: Run) -> None:
    routed(run, lambda step, rank: [0, 1, 2, 3] if rank == 0 else [0])


def other_blocks_at_each_step(run: Run) -> None:
    routed(run, lambda step, rank: [[0, 1], [2, 3], [0, 1, 2, 3], [3]][step])


def other_blocks_on_each_rank_at_each_step(run: Run) -> None:
    routed(run, lambda step, rank: [b for b in range(4) if (b + rank + step) % 3], steps=6)


def other_orders_on_each_rank(run: Run) -> None:
    """The ranks run the same blocks in different orders."""
    routed(run, lambda step, rank: [0, 1, 2, 3] if rank % 2 == 0 else [3, 2, 1, 0])


def no_block_on_some_ranks(run: Run) -> None:
    routed(run, lambda step, rank: [] if rank else [0, 1, 2, 3])


def a_block_twice_on_some_ranks(run: Run) -> None:
    routed(run, lambda step, rank: [0, 1, 0, 2] if rank else [0, 1, 2, 3])


def new_blocks_after_the_order_was_recorded(run: Run) -> None:
    """The first steps teach an order that later ones leave."""
    routed(run, lambda step, rank: [0, 1] if step < 2 else [3, 1, 2], steps=5)


class Conditional(nn.Module):
    """A block whose second layer runs only for some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        return x + (self.sometimes(y).tanh() if y.sum() > 0 else y.sigmoid())


def branches_that_depend_on_the_data(run: Run) -> None:
    model = models.build(models.Stack, depth=0)
    model.blocks.extend(models.build(Conditional) for _ in range(4))
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(5):
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss)
        run.record(loss=loss, unused=[name for name, p in model.named_parameters() if p.grad is None])
        optimizer.step()
        optimizer.zero_grad()


class Cut(models.Stack):
    """A stack whose backward ends in the middle on all ranks but the first."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = block(x.detach() if index == 2 and torch.distributed.get_rank() else x)
        return self.head(x)


def a_backward_that_ends_early_on_some_ranks(run: Run) -> None:
    """A rank that computed with a unit does not need it again, and takes part in its gather for the others."""
    list(train(run, models.build(Cut)))


def accumulated_over_branches(run: Run) -> None:
    """A block that only the second micro-batch of one rank uses."""
    model = models.build(models.Routed)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        for micro in range(2):
            route = [0, 1, 2] if (micro, run.rank) == (1, 0) else [0]
            run.backward(model(models.features(step, run.rank, micro), route).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def accumulated_over_branches_without_sync(run: Run) -> None:
    """Blocks that only unreduced micro-batches use: they must reach the reduction all the same."""
    model = models.build(models.Routed)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        first, second = (models.features(step, run.rank, micro) for micro in range(2))
        with run.no_sync():
            run.backward(model(first, [1] if run.rank == 0 else [2]).square().mean())
        run.backward(model(second, [0]).square().mean())
        run.record(unused=[name for name, p in model.named_parameters() if p.grad is None])
        optimizer.step()
        optimizer.zero_grad()


def train(run: Run, model: nn.Module, steps: int = 3, first: int = 0) -> Iterator[int]:
    """Train a stack, yielding before each step."""
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(first, first + steps):
        yield step
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss)
        run.record(loss=loss, unused=[name for name, p in model.named_parameters() if p.grad is None])
        optimizer.step()
        optimizer.zero_grad()


def a_frozen_block(run: Run) -> None:
    model = models.build(models.Stack)
    model.blocks[1].requires_grad_(False)
    for _ in train(run, model):
        assert not any(p.requires_grad for p in model.blocks[1].parameters())


def partly_frozen_blocks(run: Run) -> None:
    model = models.build(models.Stack)
    for block in model.blocks:
        block.norm.requires_grad_(False)
        block.up.bias.requires_grad_(False)
    list(train(run, model))


def everything_frozen_but_the_head(run: Run) -> None:
    model = models.build(models.Stack)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    list(train(run, model))


def the_first_blocks_frozen(run: Run) -> None:
    """No gradient flows into the first blocks at all, so their backward never runs."""
    model = models.build(models.Stack)
    model.stem.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)
    list(train(run, model))


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank trainable addition."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def adapters(run: Run) -> None:
    model = models.build(models.Stack)
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    list(train(run, model))


def frozen_and_thawed_between_steps(run: Run) -> None:
    """All parameters are the optimizer's; what is frozen has no gradient and rests."""
    model = models.build(models.Stack)
    for step in train(run, model, steps=6):
        model.blocks[0].requires_grad_(step % 2 == 0)
        model.blocks[1].up.weight.requires_grad_(step % 3 != 1)
        model.head.bias.requires_grad_(step > 2)


def frozen_on_the_way_through_accumulation(run: Run) -> None:
    """Freeze between two backwards of one step: what was accumulated before stays and is applied."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        run.backward(models.stack_loss(model, step, run.rank, 0))
        model.blocks[1].requires_grad_(False)
        run.backward(models.stack_loss(model, step, run.rank, 1))
        model.blocks[1].requires_grad_(True)
        optimizer.step()
        optimizer.zero_grad()


def thawed_before_its_sum(run: Run) -> None:
    """A block that one rank used under `no_sync()` is frozen as ranks agree on its use, and thawed for its sum."""
    model = models.build(models.Routed)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    with not_written_is_nan():
        for step in range(2):
            with run.no_sync():
                run.backward(model(models.features(step, run.rank), [0, 1] if run.rank == 0 else [0]).square().mean())
            for is_trained in (False, True):
                model.blocks[1].requires_grad_(is_trained)
                run.backward(model(models.features(step, run.rank, 1), [0]).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def frozen_parameters_in_the_optimizer(run: Run) -> None:
    model = models.build(models.Stack)
    model.blocks[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.shard(model, optimizer)
    for step in range(3):
        run.backward(models.stack_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return zs.optim.Muon(zs.optim.muon_groups(model))


def frozen_and_thawed_through_groups(run: Run, make: Callable[..., Any] = models.adamw, **options: Any) -> None:
    """The groups hold slices once a model is sharded; what code freezes through them are the parameters."""
    model = models.build(models.Stack)
    optimizer = make(model)
    run.shard(model, optimizer, **options)
    for step in range(4):
        entries = [entry for group in optimizer.param_groups for entry in group["params"]]
        for number, entry in enumerate(entries):
            entry.requires_grad = number % 3 != step % 3
        entries[-1].requires_grad_(step > 2).requires_grad_(step > 1)
        run.backward(models.stack_loss(model, step, run.rank))
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        run.record(frozen=frozen, told=[entry.requires_grad for entry in entries])
        optimizer.step()
        optimizer.zero_grad()


ALIKE = [
    never_used_by_any_rank,
    other_blocks_at_each_step,
    new_blocks_after_the_order_was_recorded,
    a_frozen_block,
    partly_frozen_blocks,
    everything_frozen_but_the_head,
    the_first_blocks_frozen,
    adapters,
    frozen_and_thawed_between_steps,
    frozen_and_thawed_through_groups,
    frozen_on_the_way_through_accumulation,
    frozen_parameters_in_the_optimizer,
]
BY_RANK = [
    other_blocks_on_each_rank,
    one_block_on_one_rank_only,
    other_blocks_on_each_rank_at_each_step,
    other_orders_on_each_rank,
    no_block_on_some_ranks,
    a_block_twice_on_some_ranks,
    branches_that_depend_on_the_data,
    a_backward_that_ends_early_on_some_ranks,
    accumulated_over_branches,
    accumulated_over_branches_without_sync,
    thawed_before_its_sum,
]


@pytest.mark.product
@pytest.mark.parametrize(("script", "world"), at_worlds(ALIKE))
def test_unused_and_frozen(script: Callable[[Run], None], world: int) -> None:
    assert_matches(script, world)


@pytest.mark.product
@pytest.mark.parametrize("way", ["host", "files", "whole matrices"])
def test_groups_freeze_wherever_slices_lie(way: str, tmp_path: Path) -> None:
    options = {"host": {"offload": "host"}, "files": {"offload": tmp_path}, "whole matrices": {"make": muon}}[way]
    assert_matches(functools.partial(frozen_and_thawed_through_groups, **options), 2, (1, 3))


@pytest.mark.product
@pytest.mark.parametrize(("script", "world"), at_worlds(BY_RANK))
def test_ranks_that_use_different_units(script: Callable[[Run], None], world: int) -> None:
    assert_matches(script, world)


def test_the_routes_leave_some_parameters_unused() -> None:
    """The scripts above mean what they say: None where no rank used a parameter, and only there."""
    for result in assert_matches(never_used_by_any_rank, 2)[0].values():
        unused = set(result["records"][0]["unused"])
        names = set(result["parameters"][0])
        assert unused == {n for n in names if n.startswith(("blocks.2", "blocks.3", "spare"))}
    for result in assert_matches(one_block_on_one_rank_only, 2)[1].values():
        assert set(result["records"][0]["unused"]) == {"spare.weight", "spare.bias"}


def left_whole() -> list[list[str]]:
    """Return the units that this rank has whole after each backward, which ends early on all ranks but the first."""
    model, found = models.build(Cut), list[list[str]]()
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, stage=3, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    for step in range(3):
        models.stack_loss(model, step, zero.mesh.rank).backward()
        found.append([str(unit) for unit in zero._engine.units if unit.presence is not Presence.RELEASED])
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_what_a_rank_gathers_for_others_after_its_backward_is_released() -> None:
    assert run_ranks(left_whole, 2) == [[[]] * 3] * 2


def forgets(stage: int) -> tuple[str, dict[str, bool]]:
    """Get a gradient that is no number, forget it, and go on without its block: which parameters changed, by name."""
    model = models.build(models.Routed)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    x = models.features(0, zero.mesh.rank)
    handle = model.blocks[1].up.weight.register_hook(lambda grad: grad * torch.nan)
    model(x, [0, 1]).square().mean().backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    handle.remove()
    optimizer.zero_grad()
    with zero.gathered():
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(x, [0, 2]).square().mean().backward()
    optimizer.step()
    with zero.gathered():
        assert all(p.isfinite().all() for p in model.parameters())
        return str(caught.value), {name: not torch.equal(p, before[name]) for name, p in model.named_parameters()}


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_was_forgotten_stops_no_step(stage: int) -> None:
    for text, changed in run_ranks(forgets, 2, stage, timeout_s=TIMEOUT_S):
        assert "The gradient of 'blocks.1.up.weight' is not finite; nothing was changed on any rank" in text
        assert {name for name, is_changed in changed.items() if is_changed} == {
            name for name in changed if name.startswith(("stem", "head", "blocks.0", "blocks.2"))
        }


class Lost(torch.autograd.Function):
    """What it returns wants a gradient, and what it is given never gets one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class Losing(nn.Module):
    """A scale that may lose its gradient, around a block that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor, *, is_first: bool) -> Tensor:
        y = self.blocks[0](x) if is_first else x
        return y * (Lost.apply(self.scale) if is_first else self.scale)


def loses(stage: int) -> list[list[float]]:
    """Train where autograd promises rank 0 a gradient that does not come; return the scale and its gradients."""
    model = models.build(Losing)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    # A unit of its own, so that the scale is the only parameter of the root.
    settings = zs.Settings(watchdog_s=WATCHDOG_S)
    zero = zs.shard(model, optimizer, stage=stage, units=[nn.Linear], settings=settings)
    found = []
    for step in range(3):
        x = models.randn(4, WIDTH, key=(step, zero.mesh.rank))
        model(x, is_first=zero.mesh.rank == 0).sum().backward()
        grad = model.scale.grad
        found.append((grad.full_tensor() if hasattr(grad, "full_tensor") else grad).tolist())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_a_promised_gradient_that_does_not_come_keeps_no_sum_waiting(stage: int) -> None:
    expected = [(models.randn(4, WIDTH, key=(step, 1)).sum(0) / 2).tolist() for step in range(3)]
    for found in run_ranks(loses, 2, stage, timeout_s=TIMEOUT_S):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-6)
