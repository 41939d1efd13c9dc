"""What an optimizer's slice and its gradient answer: this rank's elements, norms of the whole, never a lone sum."""

import copy
import math

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
