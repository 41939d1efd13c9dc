"""On a device gradients are converted for a bf16 message as they land, and no whole gradient is there in fp32."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from tests.oracle import TIMEOUT_S
from tools.emulated import gpu
from zeroshard.core.slot import slot_of
from zeroshard.testing import run_ranks
from zeroshard.wire.buffers import Pool

RANKS, DEPTH, STEPS, WIDTH = 2, 3, 3, 8
HOW = ("one micro-batch", "two sums", "two micro-batches, one sum")


def rounded(values: Tensor) -> Tensor:
    return values.bfloat16().float()


def expected(how: str) -> list[Tensor]:
    """Return the mean gradients, as a backend sums messages in bf16, by plain backwards on the data of each rank."""
    grads = []
    for rank in range(RANKS):
        of_rank = []
        for micro in range(1 if how == "one micro-batch" else 2):
            model = models.build(models.Stack, depth=DEPTH)
            models.stack_loss(model, 0, rank, micro).backward()
            of_rank.append([p.grad for p in model.parameters()])
        grads.append(of_rank)
    if how == "two micro-batches, one sum":
        grads = [[[a + b for a, b in zip(*of_rank, strict=True)]] for of_rank in grads]
    sums = [
        [rounded(rounded(a) + rounded(b)) / RANKS for a, b in zip(*of_ranks, strict=True)]
        for of_ranks in zip(*grads, strict=True)
    ]
    return [sum(parts[1:], parts[0]) for parts in zip(*sums, strict=True)]


def train(stage: int, how: str, options: dict[str, Any]) -> tuple[list[Tensor], set[str], dict[str, int]]:
    """Return gradients of the first step and the buffers that were taken; the peak, and what was predicted."""
    taken: list[tuple[int, str]] = []
    take = Pool.take

    def note(self: Pool, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        taken.append((numel, str(dtype).removeprefix("torch.")))
        return take(self, numel, dtype, device)

    with gpu(stage), patch.object(Pool, "take", note):
        model = models.build(models.Stack, depth=DEPTH)
        optimizer = models.adamw(model)
        precision = zs.Precision(reduce=torch.bfloat16)
        zero = zs.shard(model, optimizer, stage=stage, units=list(model.blocks), precision=precision, **options)
        for step in range(STEPS):
            for micro in range(1 if how == "one micro-batch" else 2):
                is_last = micro == 1 or how != "two micro-batches, one sum"
                with nullcontext() if is_last else zero.no_sync():
                    models.stack_loss(model, step, zero.mesh.rank, micro).backward()
            if step == 0:
                grads = [p.grad.full_tensor().clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        blocks = {unit.buckets[0].layout.full_numel for unit in zero.units[1:]}
        memory = zero.memory()
        with zero.gathered():  # what stage 2 publishes is waited for
            pass
    of_blocks = {dtype for numel, dtype in taken if numel in blocks}
    peaks = {"peak": memory.peak_bytes["transient"], "predicted": memory.predicted_bytes["transient"]}
    return grads, of_blocks, peaks


@pytest.mark.product
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("stage", [2, 3])
def test_sums_are_those_of_messages_in_bf16(stage: int, how: str) -> None:
    means = expected(how)
    for grads, of_blocks, peaks in run_ranks(train, RANKS, stage, how, {}, timeout_s=TIMEOUT_S):
        for grad, mean in zip(grads, means, strict=True):
            assert torch.equal(grad, mean)
        # What is added over micro-batches before its sum is added in fp32, and converted then.
        assert of_blocks == ({"bfloat16", "float32"} if how == HOW[2] else {"bfloat16"})
        if how == HOW[0]:
            assert peaks["peak"] == peaks["predicted"]


@pytest.mark.parametrize("offload", ["states=1,gradients=1"])
def test_sums_that_leave_for_the_host_are_the_same(offload: str) -> None:
    means = expected(HOW[1])
    for grads, of_blocks, _ in run_ranks(train, RANKS, 3, HOW[1], {"offload": offload}, timeout_s=TIMEOUT_S):
        assert of_blocks == {"bfloat16"}
        for grad, mean in zip(grads, means, strict=True):
            assert torch.equal(grad.cpu(), mean)


def again() -> tuple[Tensor, Tensor, Tensor]:
    """Return a gradient that waits as a message, to which another one is added before it is sent; and both."""
    with gpu(3):
        model = models.build(models.Stack, depth=DEPTH)
        zs.shard(model, models.adamw(model), stage=3, units=list(model.blocks),
                 precision=zs.Precision(reduce=torch.bfloat16))  # fmt: skip
        slot = slot_of(next(model.blocks[0].parameters()))
        grads, first, second = slot.bucket.flat, torch.randn(slot.shape), torch.randn(slot.shape) / 1000
        grads.land(slot.index, first)
        grads.copy_arrived(is_sent=True)
        grads.land(slot.index, second)
        grads.copy_arrived()
        (found,) = grads.parts(slot.index)
        found = found.clone()
        grads.clear(slot.index)
    return found, first, second


def test_a_gradient_that_comes_later_is_added_in_fp32() -> None:
    for found, first, second in run_ranks(again, RANKS, timeout_s=TIMEOUT_S):
        assert torch.equal(found, rounded(first) + second)
        assert not torch.equal(found, rounded(rounded(first) + second))


class Routed(nn.Module):
    """Blocks of two layers, of which a rank runs some, in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(3))

    def forward(self, x: Tensor, route: Sequence[tuple[int, int]]) -> Tensor:
        for block, layers in route:
            for layer in self.blocks[block][:layers]:
                x = x + torch.tanh(layer(x))
        return x


ROUTES = {
    "a layer less on one rank": (((0, 2), (1, 2), (2, 2)), ((0, 2), (1, 1), (2, 2))),
    "a block less on one rank": (((0, 2), (1, 2), (2, 2)), ((0, 2), (2, 2))),
    "another order": (((0, 2), (1, 2), (2, 2)), ((2, 2), (1, 2), (0, 2))),
}


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def routed(stage: int, routes: Sequence[Sequence[tuple[int, int]]], skipped: bool) -> list[list[Tensor]]:
    """Return the gradients of three steps; with `skipped`, each also has a micro-batch that is not summed at once."""
    found = []
    with gpu(stage):
        model = models.build(Routed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        precision = zs.Precision(reduce=torch.bfloat16)
        zero = zs.shard(model, optimizer, stage=stage, units=list(model.blocks), precision=precision)
        rank = zero.mesh.rank
        for step in range(3):
            if skipped:
                with zero.no_sync():
                    model(batch_of(rank, step), ROUTES["a block less on one rank"][rank]).square().mean().backward()
            model(batch_of(rank, step), routes[rank]).square().mean().backward()
            found.append([p.grad.full_tensor().clone() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered():
            pass
    return found


@pytest.mark.product
@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("which", ROUTES)
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_whose_gradients_land_differently_have_one_sum(stage: int, which: str, skipped: bool) -> None:
    routes = ROUTES[which]
    by_rank = run_ranks(routed, RANKS, stage, routes, skipped, timeout_s=TIMEOUT_S)
    for step in range(3):
        model = models.build(Routed)
        for rank in range(RANKS):
            if skipped:
                more = ROUTES["a block less on one rank"][rank]
                (model(batch_of(rank, step), more).square().mean() / RANKS).backward()
            (model(batch_of(rank, step), routes[rank]).square().mean() / RANKS).backward()
        for found in by_rank:
            for grad, p in zip(found[step], model.parameters(), strict=True):
                assert torch.linalg.vector_norm(grad - p.grad) < 0.01 * torch.linalg.vector_norm(p.grad)
