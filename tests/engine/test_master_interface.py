"""What an optimizer's slice and its gradient answer: this rank's elements, norms of the whole, never a lone sum."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from tests.oracle import TIMEOUT_S, WATCHDOG_S
from zeroshard.core.gradient import LogicalGradient
from zeroshard.testing import run_ranks

from .test_gradient_interface import Shapes, gradients

SINGLE = ("sum", "mean", "std", "var", "prod", "nansum", "count_nonzero")
"""Functions of one number that torch has for 0 elements, too, which is what a rank may have."""


def slices(stage: int, shared_memory: bool, precision: zs.Precision | str) -> None:
    """Ask the gradients of an optimizer's slices for what a clip or a log would."""
    plain = models.build(Shapes)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    gradients(plain, torch.float32)
    model = models.build(Shapes)
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    zs.shard(
        model,
        mine,
        stage=stage,
        precision=precision,
        settings=zs.Settings(shared_memory=shared_memory, watchdog_s=WATCHDOG_S),
    )
    gradients(model, torch.float32)
    for order in (2.0, 1.0, 0.5, 0.0, -1.0, math.inf, -math.inf):
        expected = nn.utils.get_total_norm([p.grad for p in of(optimizer) if p.grad is not None and p.numel()], order)
        entries = [m for m, p in zip(of(mine), of(optimizer), strict=True) if p.grad is not None and p.numel()]
        actual = nn.utils.get_total_norm([m.grad for m in entries], order)
        if precision == "fp32":
            torch.testing.assert_close(actual, expected, rtol=2e-6, atol=0.0)
        # A slice of 0 elements is no gradient of 0 elements.
        nn.utils.clip_grad_norm_(entries, 1e9, norm_type=order)
    first, whole = mine.param_groups[0]["params"][0].grad, next(model.parameters()).grad
    assert isinstance(whole, LogicalGradient)
    for name in SINGLE:
        with pytest.raises(RuntimeError, match=f"'matrix'.*`{name}`.*full_tensor"):
            getattr(first, name)()
    before = whole.full_tensor()
    if precision != "fp32":
        first.add_(1.0)  # on a copy in fp32
        assert torch.equal(whole.full_tensor(), before + 1.0)
        first, before = mine.param_groups[0]["params"][0].grad, whole.full_tensor()
    expected_part = first.clone().mul_(0.5)
    first.mul_(0.5)
    assert torch.equal(torch.as_tensor(first.clone()), expected_part), "the gradient that was asked changes, too"
    assert torch.equal(whole.full_tensor(), before * 0.5)
    with pytest.raises(RuntimeError, match="'matrix' cannot be replaced"):
        mine.param_groups[0]["params"][0].grad = torch.ones(3)


def of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return an optimizer's entries."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def all_rows() -> None:
    for stage, shared_memory in ((1, True), (2, False), (3, True), (3, False)):
        slices(stage, shared_memory, "fp32")
    slices(3, True, zs.Precision(param=torch.bfloat16, grad=torch.bfloat16, master=torch.float32))


def test_the_gradients_of_slices_answer_for_the_whole_or_refuse() -> None:
    run_ranks(all_rows, 2, timeout_s=TIMEOUT_S)


def a_copy() -> None:
    model = models.build(Shapes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zs.shard(model, optimizer, stage=1, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    of(optimizer)[0].requires_grad = False
    for entry, copied in zip(of(optimizer), of(copy.deepcopy(optimizer)), strict=True):
        assert type(copied) is nn.Parameter
        assert torch.equal(copied, entry)
        assert copied.requires_grad is entry.requires_grad is not (entry is of(optimizer)[0])
        assert copied.grad is None


def test_a_copied_optimizer_has_plain_parameters() -> None:
    """Which are apart from the model: a copied slice without its parameter had no `.grad` at all."""
    run_ranks(a_copy, 2, timeout_s=TIMEOUT_S)


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm of it": lambda g: g.norm(),
    "torch 1's clip": lambda g: torch.norm(g.detach(), 2.0),
    "of .data": lambda g: g.data.norm(),
    "of .detach().data": lambda g: g.detach().data.norm(1),
    "of a view": lambda g: g.view(-1).norm(),
    "of flat ones": lambda g: g.flatten().norm() + g.reshape(-1).norm(math.inf),
    "of linalg": lambda g: torch.linalg.vector_norm(g.detach(), 1.0),
    "of a list": lambda g: nn.utils.get_total_norm([g.detach(), g.data]),
}
NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "norm of a clone": lambda g: g.clone().norm(),
    "norm of a copy": lambda g: copy.deepcopy(g).norm(),
    "sum of products": lambda g: (g * g).sum(),
    "norm of a multiple": lambda g: (2 * g.detach()).norm(),
    "sum of powers": lambda g: g.pow(2).sum(),
    "largest": lambda g: g.data.abs().max(),
    "largest and its place": lambda g: g.abs().max(dim=0),
    "kept dimension": lambda g: g.abs().sum(0, keepdim=True),
    "kept dimension of it": lambda g: g.sum(0, keepdim=True),
    "parts of a sum": lambda g: torch.softmax(g, 0),
    "check": lambda g: torch.isnan(g).any(),
    "norm of a concatenation": lambda g: torch.cat([g.view(-1), g.view(-1)]).norm(),
    "norm of a difference": lambda g: (torch.zeros_like(g) - g).norm(),
    "norms of a list": lambda g: torch._foreach_norm(torch._foreach_mul([g], 2.0)),
    "product with a plain tensor": lambda g: torch.dot(torch.ones(g.numel()), g),
}


def by_hand(stage: int, precision: zs.Precision | str) -> None:
    """Clip over an optimizer's groups as programs do, and compare with one process."""
    plain, model = models.build(Shapes), models.build(Shapes)
    optimizer, mine = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model))
    zs.shard(model, mine, stage=stage, precision=precision, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    for one in (plain, model):
        gradients(one, torch.float32)
    close: dict[str, float] = {} if precision == "fp32" else {"rtol": 1e-2, "atol": 1e-2}
    pairs = [(m, p) for m, p in zip(of(mine), of(optimizer), strict=True) if p.grad is not None and p.numel()]
    for master, parameter in pairs:
        for name, norm in NORMS.items():
            torch.testing.assert_close(norm(master.grad).float(), norm(parameter.grad), **close, msg=name)  # type: ignore[arg-type]
        for number in NUMBERS.values() if master.numel() else ():  # torch itself finds no largest of none
            with pytest.raises(RuntimeError, match=r"is distributed over ranks, so .*full_tensor"):
                number(master.grad)  # type: ignore[arg-type]
    for entries in zip(*pairs, strict=True):
        total = torch.norm(torch.stack([torch.norm(p.grad.detach()) for p in entries]))  # type: ignore[union-attr]
        for p in entries:
            assert p.grad is not None
            p.grad.detach().mul_((0.05 / total).clamp(max=1.0).to(p.grad.dtype))
            p.grad.data.clamp_(-0.01, 0.01)
            p.grad.data.add_(p.grad.data * 0.5)
            p.grad.data *= 2.0
    wholes = [p for p in model.parameters() if p.grad is not None and p.numel()]
    for (master, parameter), whole in zip(pairs, wholes, strict=True):
        assert isinstance(whole.grad, LogicalGradient)
        expected = whole.grad.full_tensor().float()
        torch.testing.assert_close(expected, parameter.grad, **close)  # type: ignore[arg-type]
        assert type(master.grad.new_zeros(2).sum() + torch.ones_like(master.grad).sum()) is Tensor  # type: ignore[union-attr, arg-type]


class Inside(torch.optim.SGD):
    """Reduces functions of its gradients in its step, where they are as its entries are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in of(self):
            if p.grad is not None:
                assert type(p.grad.detach()) is type(p.grad * 2.0) is Tensor
                assert torch.isfinite(p.grad).all() and self.state[p].pop("kept").abs().sum().isfinite()
        super().step()


def keep(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Keep gradients as states, as hooks before a step do."""
    for p in of(optimizer):
        if p.grad is not None:
            optimizer.state[p]["kept"] = p.grad.clone()


def by_hand_everywhere() -> None:
    for stage in (1, 2, 3):
        by_hand(stage, "fp32")
    by_hand(3, zs.Precision(param=torch.bfloat16, grad=torch.bfloat16, master=torch.float32))
    model = models.build(Shapes)
    optimizer = Inside(model.parameters(), lr=0.1)
    settings = zs.Settings(watchdog_s=WATCHDOG_S, elementwise=True)
    zs.shard(model, optimizer, stage=2, settings=settings)
    optimizer.register_step_pre_hook(keep)
    gradients(model, torch.float32)
    optimizer.step()
    gradients(model, torch.float32)
    with pytest.raises(RuntimeError, match="full_tensor"):
        (of(optimizer)[0].grad * 2.0).sum()  # type: ignore[operator]


def test_what_is_computed_from_the_gradient_of_a_slice_is_of_the_whole_or_refused() -> None:
    """Programs clip over `param_groups`; norms of `.detach()` were those of this rank's elements."""
    run_ranks(by_hand_everywhere, 2, timeout_s=TIMEOUT_S)
