"""The optimizer object stays the user's: torch's element-wise optimizers, groups, schedulers, hooks, existing state."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from tests import models
from tests.oracle import TIMEOUT_S, Run, Sharded, assert_matches, at_worlds
from zeroshard.testing import run_ranks

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{}],
    "Adadelta": [{"lr": 0.5}],
    "Adagrad": [{"lr": 1e-2}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1}],
    "AdamW": [{}, {"maximize": True}],
    "Adamax": [{}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
    "Rprop": [{}],
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
}
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")


def implementations(name: str) -> list[dict[str, bool]]:
    """List the ways in which torch runs one optimizer: loop, foreach and, where it has it, fused."""
    return [{"foreach": False}, {"foreach": True}] + ([{"fused": True}] if name in FUSED else [])


def train(run: Run, model: nn.Module, *optimizers: Optimizer, steps: int = 3, first: int = 0) -> None:
    """Train a stack with everything that `optimizers` holds."""
    for step in range(first, first + steps):
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        run.record(loss=loss)


def one_optimizer(run: Run, name: str) -> None:
    for implementation in implementations(name):
        for setting in SETTINGS[name]:
            model = models.build(models.Stack, depth=2)
            optimizer = getattr(torch.optim, name)(model.parameters(), **implementation, **setting)
            run.shard(model, optimizer)
            train(run, model, optimizer)


# What is element-wise asks for no third rank; every other one has it nonetheless, for uneven shards.
@pytest.mark.product
@pytest.mark.parametrize(
    ("name", "world"), [*((name, 2) for name in SETTINGS), *((name, 3) for name in list(SETTINGS)[::2])]
)
def test_torchs_elementwise_optimizers(name: str, world: int) -> None:
    assert_matches(functools.partial(one_optimizer, name=name), world)


def test_every_optimizer_of_torch_is_tested_or_refused() -> None:
    names = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    assert names - set(SETTINGS) == {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


def several_optimizers(run: Run) -> None:
    model = models.build(models.Stack)
    adam = torch.optim.AdamW([*model.blocks.parameters()], lr=1e-2)
    sgd = torch.optim.SGD([*model.stem.parameters(), *model.head.parameters()], lr=0.1, momentum=0.9)
    run.shard(model, adam, sgd)
    train(run, model, adam, sgd)


def alternating_optimizers(run: Run) -> None:
    """Step two optimizers in turn, so that each step leaves the other's gradients to accumulate."""
    model = models.build(models.Stack)
    adam = torch.optim.AdamW([*model.blocks.parameters()], lr=1e-2)
    sgd = torch.optim.SGD([*model.stem.parameters(), *model.head.parameters()], lr=0.1, momentum=0.9)
    run.shard(model, adam, sgd)
    for step in range(4):
        run.backward(models.stack_loss(model, step, run.rank))
        optimizer = (adam, sgd)[step % 2]
        optimizer.step()
        optimizer.zero_grad()


def a_unit_split_between_optimizers(run: Run) -> None:
    model = models.build(models.Stack)
    named = list(model.named_parameters())
    adam = torch.optim.AdamW([p for name, p in named if "up" in name or "norm" in name], lr=1e-2)
    sgd = torch.optim.SGD([p for name, p in named if not ("up" in name or "norm" in name)], lr=0.1)
    run.shard(model, adam, sgd)
    train(run, model, adam, sgd)


def groups_by_ndim(run: Run) -> None:
    model = models.build(models.GPT)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.2},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-2},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    run.shard(model, optimizer)
    for step in range(3):
        run.backward(models.gpt_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()
    run.record(groups=[{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
    run.record(lengths=[len(group["params"]) for group in optimizer.param_groups])


def groups_by_name(run: Run) -> None:
    model = models.build(models.Stack)
    named = list(model.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named if n.endswith("bias") or "norm" in n], "weight_decay": 0.0},
        {"params": [(n, p) for n, p in named if not (n.endswith("bias") or "norm" in n)], "weight_decay": 0.3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    run.shard(model, optimizer)
    train(run, model, optimizer)
    run.record(names=[group["param_names"] for group in optimizer.param_groups])


def groups_built_after(run: Run) -> None:
    """Choose the groups from the sharded model, by the shapes and names that its parameters still have."""
    model = models.build(models.Stack)
    run.shard(model)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2]},
        {"params": [p for name, p in model.named_parameters() if name.endswith("bias") or "norm" in name], "lr": 0.05},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    run.attach(optimizer)
    train(run, model, optimizer)


def several_built_after(run: Run) -> None:
    model = models.build(models.Stack)
    run.shard(model)
    adam = torch.optim.AdamW(model.blocks.parameters(), lr=1e-2)
    sgd = torch.optim.SGD([*model.stem.parameters(), *model.head.parameters()], lr=0.1)
    run.attach(adam)
    run.attach(sgd)
    train(run, model, adam, sgd)


def a_group_added_later(run: Run) -> None:
    """Thaw the head after two steps and give it to the optimizer in a group of its own."""
    model = models.build(models.Stack)
    model.head.requires_grad_(False)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    train(run, model, optimizer, steps=2)
    model.head.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 5e-2})
    train(run, model, optimizer, steps=2, first=2)
    run.record(lengths=[len(group["params"]) for group in optimizer.param_groups])


def a_named_group_added_later(run: Run) -> None:
    """Entries may be pairs of a name and a parameter, which torch takes apart; some alone are refused."""
    model = models.build(models.Stack)
    model.head.requires_grad_(False)
    optimizer = torch.optim.AdamW([(name, p) for name, p in model.named_parameters() if p.requires_grad], lr=1e-2)
    run.shard(model, optimizer)
    train(run, model, optimizer, steps=1)
    model.head.requires_grad_(True)
    with pytest.raises(ValueError, match="names"):
        optimizer.add_param_group({"params": [("head.weight", model.head.weight), model.head.bias]})
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": {model.head.weight}})
    with pytest.raises(TypeError, match="only optimize Tensors"):
        optimizer.add_param_group({"params": [model.head.weight, "head.bias"]})
    optimizer.add_param_group({"params": model.head.named_parameters(prefix="head"), "lr": 5e-2})
    train(run, model, optimizer, steps=2, first=1)
    run.record(names=[group["param_names"] for group in optimizer.param_groups])


class Prepared(torch.optim.AdamW):
    """Gives new parameters a state, of which ranks cannot join slices, if told to."""

    is_odd = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.is_odd:
            self.state[param_group["params"][-1]]["parts"] = [torch.ones(2)]


def a_group_added_after_failures(run: Run) -> None:
    """A group that is refused, at once or when half of it is cut, leaves the optimizer as it was."""
    model = models.build(models.Stack)
    model.head.requires_grad_(False)
    optimizer = Prepared([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    run.shard(model, optimizer)
    train(run, model, optimizer, steps=1)
    weight, bias = model.head.parameters()
    if isinstance(run, Sharded):
        for bad in ([weight, weight], [weight, bias, model.stem.weight]):
            with pytest.raises(ValueError, match=r"is in more than one group or optimizer, or twice in one group"):
                optimizer.add_param_group({"params": bad})
        optimizer.is_odd = True
        with pytest.raises(TypeError, match=r"'head.bias', the state 'parts', a list"):
            optimizer.add_param_group({"params": [weight, bias]})
        optimizer.is_odd = False
        assert len(optimizer.param_groups) == 1
        assert optimizer.state.pop(bias).keys() == {"parts"}
    model.head.requires_grad_(True)
    optimizer.add_param_group({"params": [weight, bias], "lr": 5e-2})
    train(run, model, optimizer, steps=2, first=1)
    run.record(lengths=[len(group["params"]) for group in optimizer.param_groups])


def a_group_removed_and_added_again(run: Run) -> None:
    """Leave the head out for some steps; its momentum stays, and another optimizer may have it meanwhile."""
    model = models.build(models.Stack)
    head, rest = list(model.head.parameters()), [*model.stem.parameters(), *model.blocks.parameters()]
    optimizer = torch.optim.SGD([{"params": rest}, {"params": head}], lr=0.1, momentum=0.9)
    run.shard(model, optimizer)
    train(run, model, optimizer, steps=2)
    del optimizer.param_groups[1]
    train(run, model, optimizer, steps=1, first=2)
    other = torch.optim.SGD(head, lr=0.05)
    run.attach(other)
    train(run, model, optimizer, other, steps=1, first=3)
    other.param_groups.clear()
    optimizer.add_param_group({"params": head, "lr": 5e-2})
    train(run, model, optimizer, steps=2, first=4)


def a_block_added_later(run: Run) -> None:
    model = models.build(models.Stack)
    model.blocks[0].requires_grad_(False)
    optimizer = models.sgd(model)
    run.shard(model, optimizer)
    train(run, model, optimizer, steps=2)
    model.blocks[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model.blocks[0].parameters())})
    train(run, model, optimizer, steps=3, first=2)


def existing_state(run: Run) -> None:
    """Take steps without the engine first: their moments and step counts must be sharded, not lost."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model, amsgrad=True)
    for step in range(2):
        models.stack_loss(model, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.shard(model, optimizer)
    train(run, model, optimizer, first=2)


def existing_state_of_some(run: Run) -> None:
    """Leave one block without state: it was never used before sharding."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    model.stem(models.features(0, 0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    run.shard(model, optimizer)
    train(run, model, optimizer, first=1)


def learning_rate_changed_by_hand(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
            group["betas"] = (0.9 - 0.1 * step, 0.99)
        train(run, model, optimizer, steps=1, first=step)


def learning_rate_in_a_tensor(run: Run) -> None:
    for implementation in ({"foreach": False}, {"fused": True}):
        model = models.build(models.Stack)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), **implementation)
        run.shard(model, optimizer)
        for step in range(3):
            optimizer.param_groups[0]["lr"].mul_(0.5)
            train(run, model, optimizer, steps=1, first=step)


def step_hooks(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before sharding, pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("before sharding, post"))
    run.shard(model, optimizer)
    optimizer.register_step_pre_hook(lambda *_: calls.append("after sharding, pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after sharding, post"))
    train(run, model, optimizer, steps=2)
    run.record(calls=sorted(calls))


def a_step_with_no_gradient(run: Run) -> None:
    """Step before any backward: nothing to do, and no state appears."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    train(run, model, optimizer, steps=2)
    optimizer.step()


SCRIPTS = [
    several_optimizers,
    alternating_optimizers,
    a_unit_split_between_optimizers,
    groups_by_ndim,
    groups_by_name,
    groups_built_after,
    several_built_after,
    a_group_added_later,
    a_named_group_added_later,
    a_group_added_after_failures,
    a_group_removed_and_added_again,
    a_block_added_later,
    existing_state,
    existing_state_of_some,
    learning_rate_changed_by_hand,
    learning_rate_in_a_tensor,
    step_hooks,
    a_step_with_no_gradient,
]


@pytest.mark.product
@pytest.mark.parametrize(("script", "world"), at_worlds(SCRIPTS))
def test_the_same_optimizer_object(script: Callable[[Run], None], world: int) -> None:
    assert_matches(script, world)


def _step_lr(optimizer: Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def _lambda_lr(optimizer: Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, _warmup)


def _warmup(step: int) -> float:
    return min(1.0, (step + 1) / 3)


def _one_cycle(optimizer: Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=5e-2, total_steps=6)


def _chained(optimizer: Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 3)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def schedule(run: Run, make: Callable[[Optimizer], Any], is_before: bool) -> None:
    model = models.build(models.Stack)
    optimizer = models.sgd(model)
    scheduler = make(optimizer) if is_before else None
    run.shard(model, optimizer)
    scheduler = scheduler or make(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if it believes that the optimizer has not stepped
        for step in range(4):
            train(run, model, optimizer, steps=1, first=step)
            scheduler.step()
            run.record(lr=[group["lr"] for group in optimizer.param_groups])


@pytest.mark.product
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("make", [_step_lr, _lambda_lr, _one_cycle, _chained], ids=lambda make: make.__name__)
def test_schedulers_built_before_and_after(make: Callable[[Optimizer], Any], is_before: bool) -> None:
    assert_matches(functools.partial(schedule, make=make, is_before=is_before), 2)


class Lion(Optimizer):
    """An element-wise optimizer that torch does not have; the probe at `shard()` must admit it."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["beta"])
                p.add_(momentum.sign(), alpha=-group["lr"])


class Decayed(Lion):
    """An element-wise optimizer that is promised to be one: no trial can build another, so none may be made."""

    def __init__(self, params: Any, lr: float, *, untold: str) -> None:
        super().__init__(params, lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"]).sub_(p.grad, alpha=group["lr"])


def probed(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = Lion(model.parameters(), lr=1e-2)
    run.shard(model, optimizer)
    train(run, model, optimizer)


def promised(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = Decayed(model.parameters(), lr=1e-2, untold="")
    run.shard(model, optimizer, elementwise=True)
    train(run, model, optimizer)


def subclassed(run: Run) -> None:
    """A subclass of a known optimizer that adds nothing but a name."""
    model = models.build(models.Stack)
    optimizer = NamedAdamW(model.parameters(), lr=1e-2)
    run.shard(model, optimizer)
    train(run, model, optimizer)


class NamedAdamW(torch.optim.AdamW):
    """A known optimizer under another name."""


class Assigning(Lion):
    """An optimizer that computes new values instead of changing values in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data = p.data - self.param_groups[0]["lr"] * p.grad


def assigned(run: Run) -> None:
    """What an optimizer, or a hook before its update, assigns to `.data` is the new value."""
    for kind in (Assigning, torch.optim.SGD):
        model = models.build(models.Stack)
        optimizer = kind(model.parameters(), lr=1e-2)
        run.shard(model, optimizer)
        optimizer.register_step_pre_hook(clamp)
        train(run, model, optimizer)


def clamp(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data = parameter.data.clamp(-0.1, 0.1)


@pytest.mark.product
@pytest.mark.parametrize(("script", "world"), at_worlds([probed, promised, subclassed, assigned]))
def test_optimizers_of_others(script: Callable[[Run], None], world: int) -> None:
    assert_matches(script, world)


def probe_leaves_no_trace(run: Run) -> None:
    """The probe must neither step the user's optimizer nor draw from the user's generator."""
    model = models.build(models.Stack)
    optimizer = Lion(model.parameters(), lr=1e-2)
    torch.manual_seed(5)
    run.shard(model, optimizer)
    run.record(draw=torch.rand(3), state=len(optimizer.state))


def test_the_probe_changes_nothing() -> None:
    assert_matches(probe_leaves_no_trace, 2)


def held_elements(stage: int) -> tuple[int, list[int], list[int]]:
    """Return the elements of states on this rank, and each entry's numel before and after sharding."""
    run = Sharded(stage)
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    before = [p.numel() for group in optimizer.param_groups for p in group["params"]]
    run.shard(model, optimizer)
    train(run, model, optimizer, steps=1)
    held = sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.ndim > 0)
    return held, before, [p.numel() for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.product
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_entries_and_states_are_one_ranks_slices(stage: int, world: int) -> None:
    by_rank = run_ranks(held_elements, world, stage, timeout_s=TIMEOUT_S)
    whole = by_rank[0][1]
    assert [sum(numels) for numels in zip(*(slices for _, _, slices in by_rank), strict=True)] == whole
    assert [held for held, _, _ in by_rank] == [2 * sum(slices) for _, _, slices in by_rank]
    assert all(0 < held < 2 * sum(whole) for held, _, _ in by_rank), f"held {[held for held, _, _ in by_rank]}"
