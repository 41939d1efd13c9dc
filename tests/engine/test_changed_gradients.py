"""Optimizers that change their gradients in place: parameters and kept gradients are those of plain torch.

Owns updates at once, on the host, from files, in the background, by owners, and of gradients in another dtype. torch's
SGD with `nesterov=True, foreach=True` adds the momentum to the gradients; optimizers of other people add the weight
decay. Gradients are kept over some steps, so a change counts in the next one.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, Run, Sharded, assert_matches, assert_same, run_cases
from tests.rotation import third
from zeroshard.testing import run_ranks
from zeroshard.update import background

STEPS = 5
LOOKED_AT = ("stem.weight", "blocks.1.up.weight", "blocks.1.up.bias", "head.bias")
"""Gradients that are compared; each is a collective. The parameters tell of the others."""
KEPT = (0, 2, 3)
"""Steps whose gradients are kept for the next one."""


class Decayed(Optimizer):
    """Adds the weight decay to the gradients, as many optimizers do, and leaves half of them to the next step."""

    def __init__(self, params: Any, lr: float = 0.05, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(p, alpha=group["weight_decay"])
                    p.sub_(p.grad, alpha=group["lr"])
                    p.grad.mul_(0.5)


class DecayedTogether(Decayed):
    """Changes all gradients of a group by one kernel."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                grads = [p.grad for p in params]
                torch._foreach_add_(grads, params, alpha=group["weight_decay"])
                torch._foreach_add_(params, grads, alpha=-group["lr"])
                torch._foreach_mul_(grads, 0.5)


class Dropping(Decayed):
    """Drops each gradient that it has used."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])
                    p.grad = None


class Replacing(Decayed):
    """Puts a new tensor in the place of each gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad + p * group["weight_decay"]
                    p.sub_(p.grad, alpha=group["lr"])


def sgd(**options: Any) -> Callable[[Any], Optimizer]:
    return functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, **options)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "foreach": sgd(foreach=True),
    "foreach, decay, maximize": sgd(foreach=True, weight_decay=0.1, maximize=True),
    "fused, decay": sgd(fused=True, weight_decay=0.1),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01, foreach=True, maximize=True, weight_decay=0.1),
    "own": Decayed,
    "own, together": DecayedTogether,
    "own, drops": Dropping,
    "own, replaces": Replacing,
}


OF_SLICES = tuple(name for name in OPTIMIZERS if name != "own, replaces")
"""A gradient of a slice has its place, and cannot be replaced."""
OF_FILES = ("foreach, decay, maximize",)
OF_OWNERS = ("foreach", "own", "own, together", "own, drops", "own, replaces")


def whole(p: nn.Parameter) -> Tensor | None:
    """Return a copy of a gradient as one tensor."""
    if p.grad is None:
        return None
    return p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()


def train(run: Run, name: str, *, is_whole: bool = False, **options: Any) -> None:
    """Train a stack with an optimizer; keep the gradients of some steps."""
    model = models.build(models.Stack)
    optimizer = OPTIMIZERS[name](model.parameters())
    optimizer = zs.optim.whole_matrix(optimizer) if is_whole else optimizer
    run.shard(model, optimizer, **options)
    for step in range(STEPS):
        if step == 3:
            with run.no_sync():
                run.backward(models.stack_loss(model, step, run.rank, 1))
        run.backward(models.stack_loss(model, step, run.rank))
        optimizer.step()
        run.record(grads={key: whole(model.get_parameter(key)) for key in LOOKED_AT})
        if step == 2:
            optimizer.step()  # with the gradients that the last step has changed
            run.record(grads={key: whole(model.get_parameter(key)) for key in LOOKED_AT})
        if step not in KEPT:
            optimizer.zero_grad()


def train_each(run: Run, names: tuple[str, ...], **options: Any) -> None:
    for name in names:
        train(run, name, **options)


WAYS: dict[str, dict[str, Any]] = {
    "at once": {},
    "host": {"offload": zs.Offload()},
    "half on the host": {"offload": zs.Offload(states=0.5)},
    "gradients on the device": {"offload": zs.Offload(gradients=0)},
}


@pytest.mark.product
@pytest.mark.parametrize("name", OF_SLICES)
@pytest.mark.parametrize("way", WAYS)
def test_changed_gradients_are_those_of_plain_torch(way: str, name: str) -> None:
    """By messages where states are on the host, in memory of the host otherwise; `test_parity` has both."""
    stages = STAGES if way == "at once" else (1, 3)
    options = {"shared_memory": way in ("at once", "half on the host")}
    assert_matches(functools.partial(train, name=name, **WAYS[way]), 2, stages, options)


def test_gradients_that_an_update_from_files_changes(tmp_path: Path) -> None:
    assert_matches(functools.partial(train_each, names=OF_FILES, offload=str(tmp_path)), 2, (1, 3))


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_that_owners_change_where_each_rank_updates_all(world: int) -> None:
    assert_matches(functools.partial(train_each, names=OF_OWNERS, is_whole=True), world, (0, 3) if world == 1 else (0,))


def train_owned(run: Run) -> None:
    """Look at gradients around each step; no step uses changed ones."""
    for name in OF_OWNERS:
        model = models.build(models.Stack)
        optimizer = zs.optim.whole_matrix(OPTIMIZERS[name](model.parameters()))
        run.shard(model, optimizer)
        for step in range(3):
            run.backward(models.stack_loss(model, step, run.rank))
            before = {key: whole(model.get_parameter(key)) for key in LOOKED_AT}
            optimizer.step()
            if isinstance(run, Sharded):
                assert_same(before, {key: whole(model.get_parameter(key)) for key in LOOKED_AT}, name)
            optimizer.zero_grad()


def test_owners_of_shards_change_copies_of_gradients() -> None:
    """As docs/optimizers.md says: the update is that of plain torch, and the gradients stay."""
    assert_matches(train_owned, 2, (1, 2, 3))


HALF = zs.Precision(param=torch.bfloat16, grad=torch.bfloat16, master=torch.float32)


def converted(stage: int, place: str | None, names: tuple[str, ...], is_whole: bool) -> None:
    """Compare gradients after a step with what the optimizer has made of them in fp32, rounded to bf16."""
    for name in names:
        model = models.build(models.Stack)
        values = {key: model.get_parameter(key).detach().clone() for key in LOOKED_AT}
        optimizer = OPTIMIZERS[name](model.parameters())
        optimizer = zs.optim.whole_matrix(optimizer) if is_whole else optimizer
        offload = "host" if place == "in the background" else place
        with patch.object(background, "is_worthwhile", lambda device: place == "in the background"):
            zs.shard(model, optimizer, stage=stage, precision=HALF, offload=offload)
        models.stack_loss(model, 0, dist.get_rank()).backward()
        before = {key: whole(model.get_parameter(key)).float() for key in LOOKED_AT}
        optimizer.step()
        for key, grad in before.items():
            if name == "foreach":
                torch._foreach_add_([grad], [grad.clone()], alpha=0.9)
            else:
                grad = grad.add(values[key], alpha=0.1).bfloat16().mul(0.5)
            assert_same(grad.bfloat16(), whole(model.get_parameter(key)), f"{name}, stage {stage}, {place}, {key}")


def test_gradients_that_are_converted_for_an_update_keep_its_changes(tmp_path: Path) -> None:
    sliced = ("foreach", "own", "own, together")
    cases = [(0, None, sliced, False), (3, None, sliced, False), (3, "host", sliced, False)]
    cases += [(2, str(tmp_path), ("foreach",), False), (3, "in the background", ("foreach",), False)]
    cases += [(0, None, sliced, True)]
    run_cases(converted, 2, third(cases))


def halve(p: nn.Parameter) -> None:
    """Assign half of a gradient to its `.data`, of a matrix with other strides."""
    assert p.grad is not None
    half = p.grad.data * 0.5
    p.grad.data = half.mT.contiguous().mT if p.dim() == 2 else half


def assign_data(keeps: bool, precision: Any) -> None:
    """Assign to `.data` of gradients before another backward adds to them, and before the step."""
    plain, model = models.build(models.Stack), models.build(models.Stack)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
    zero = zs.shard(model, ours, stage=0, precision=precision)
    for _ in range(2):
        for one, optimizer in ((model, ours), (plain, theirs)):
            optimizer.zero_grad(set_to_none=not keeps)
            for _ in range(2):
                one(torch.ones(2, 5)).square().mean().backward()
                for p in one.parameters():
                    halve(p)
            optimizer.step()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        for p in model.parameters():
            halve(p)
        torch.testing.assert_close(zero.grad_norm(), norm / 2)
    rtol, atol = (1e-5, 1e-6) if precision == "fp32" else (0.02, 0.01)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=rtol, atol=atol, check_dtype=False)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("world", "keeps"), [(1, True), (1, False), (2, True), (2, False)])
def test_data_that_code_assigns_to_whole_gradients_is_used(world: int, keeps: bool, precision: str) -> None:
    run_ranks(assign_data, world, keeps, precision)


def clear_by_hand() -> None:
    """Clear gradients as loops over a model or an optimizer's groups once did."""
    cases: list[tuple[int, Any, dict[str, float]]] = [(0, "fp32", {}), (0, "bf16", {"rtol": 0.05, "atol": 0.01})]
    for stage, precision, tolerance in [*cases, (2, "fp32", {})]:
        plain, model = models.build(models.Stack), models.build(models.Stack)
        ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
        zero = zs.shard(model, ours, stage=stage, precision=precision)
        for one, optimizer in ((model, ours), (plain, theirs)):
            of_groups = [p for group in optimizer.param_groups for p in group["params"]]
            for step in range(4):
                one(torch.ones(2, 5) + step).square().mean().backward()
                optimizer.step()
                for p in [*one.parameters()] if step % 2 else of_groups:
                    assert p.grad is not None
                    p.grad.detach_()
                    p.grad.zero_()
                assert all(p.grad is not None and p.grad.norm() == 0 for p in one.parameters())
        with zero.gathered():
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(q.detach().float(), p.detach(), **tolerance)


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_that_are_detached_and_zeroed_in_place(world: int) -> None:
    run_ranks(clear_by_hand, world)


def read_early() -> None:
    """Read gradients before their reduction, and step after it."""
    plain, model = models.build(models.Stack), models.build(models.Stack)
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, plain))
    zero = zs.shard(model, ours, stage=0)
    for one, optimizer in ((model, ours), (plain, theirs)):
        for _ in range(2):
            with zero.no_sync() if one is model else nullcontext():
                one(torch.ones(2, 5)).square().mean().backward()
                assert all(p.grad is not None for p in one.parameters())
            one(torch.ones(2, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach())


def test_gradients_that_were_read_before_their_reduction_are_used() -> None:
    run_ranks(read_early, 2)
