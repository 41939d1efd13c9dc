"""Gradients: accumulation, modules used twice or on one rank alone, slow ranks, ranks without peers."""

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from tests.models import WIDTH
from tests.oracle import Run, assert_same, randn
from tools.settled import settled

from .shapes import raises_on_all, tried


@tried(stages=(2, 3))
def test_each_backward_between_two_steps_counts(run: Run) -> None:
    """ZeRO-2 kept the gradient of the last backward only, so the norms that were logged fell to a third.

    https://github.com/deepspeedai/DeepSpeed/issues/7718 2025
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        for micro in range(3):
            run.backward(models.stack_loss(model, step, run.rank, micro) / 3)
        run.record(norm=run.grad_norm())
        optimizer.step()
        optimizer.zero_grad()


class TwoViews(nn.Module):
    """An encoder that encodes two inputs of a step; the second one is compared with the first without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(models.Block() for _ in range(2))
        self.stem = nn.Linear(5, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.encode(x), self.encode(other)
        return self.head(one), (one.detach() - two).square().mean()

    def encode(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.encoder:
            x = block(x)
        return x


@tried(stages=(2, 3))
def test_a_module_that_is_used_twice_gets_both_gradients(run: Run) -> None:
    """ZeRO-2 lost one of two parts of a gradient when a module ran twice before a backward.

    https://github.com/deepspeedai/DeepSpeed/issues/8224 2026
    """
    model = models.build(TwoViews)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        for micro in range(2):
            x, other = models.features(step, run.rank, micro), models.features(step, run.rank, micro + 5)
            y, distance = model(x, other)
            run.backward(F.mse_loss(y, models.targets(step, run.rank, micro)) + distance)
        optimizer.step()
        optimizer.zero_grad()


@tried(stages=(2, 3), relative=1e-5)  # sums of 2 and of 8 rows round differently
def test_the_number_of_micro_batches_does_not_matter(run: Run) -> None:
    """ZeRO-2 trained to other losses the more micro-batches a batch was cut into.

    https://github.com/huggingface/accelerate/issues/3877 2025
    """
    model = models.build(models.Stack)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.shard(model, optimizer)
    rows = 8 if type(run).__name__ == "Plain" else 2
    for step in range(3):
        x, y = models.features(step, run.rank, rows=8), models.targets(step, run.rank, rows=8)
        for part, target in zip(x.split(rows), y.split(rows), strict=True):
            run.backward(F.mse_loss(model(part), target) * (rows / 8))
        optimizer.step()
        optimizer.zero_grad()


@tried(worlds=(1,))
def test_gradients_on_one_rank_are_not_doubled(run: Run) -> None:
    """Where the ranks of a gradient were one, each micro-batch doubled what had been accumulated before.

    https://github.com/NVIDIA/Megatron-LM/issues/6660 2026
    """
    model = models.build(models.Stack)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.shard(model, optimizer)
    for micro in range(16):
        run.backward(models.stack_loss(model, 0, run.rank, micro) / 16)
    run.record(norm=run.grad_norm())
    optimizer.step()


@tried(stages=(3,), here="refused: a mesh whose shards are of one rank")
def test_shards_of_one_rank_are_refused(stage: int, options: dict[str, Any]) -> None:
    """A mesh of (n, 1) fell back to no sharding and left the gradients of the n copies unsummed.

    https://github.com/pytorch/pytorch/issues/154888 2025
    """
    model = models.build(models.Stack)
    with raises_on_all(ValueError, "leave one rank per replica, so nothing would be sharded"):
        zs.shard(model, models.adamw(model), stage=stage, mesh=2, **settled(options))


@tried()
def test_gradients_are_scaled_once(run: Run) -> None:
    """The scale of one over the ranks was applied to what was accumulated, and not to what was added.

    https://github.com/NVIDIA/Megatron-LM/pull/3023 2026
    """
    model = models.build(models.Stack)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.shard(model, optimizer)
    for step in range(2):
        for micro in range(4):
            if micro % 2:
                run.backward(models.stack_loss(model, step, run.rank, micro))
            else:
                with run.no_sync():
                    run.backward(models.stack_loss(model, step, run.rank, micro))
        optimizer.step()
        optimizer.zero_grad()


class Scaled(nn.Module):
    """A block with a scale of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.block = models.Block()
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x) * self.scale.exp()


@tried(worlds=(1, 2, 3))
def test_a_parameter_of_one_element_has_a_gradient(run: Run) -> None:
    """On one rank, a parameter of one element in a nested module had the gradient 0, and never moved.

    https://github.com/pytorch/pytorch/issues/144045 2025
    """
    model = models.build(models.Stack, kind=lambda _: Scaled())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.shard(model, optimizer)
    for step in range(2):
        run.backward(models.stack_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()


class WithImages(nn.Module):
    """A model whose encoder runs for ranks that have an image."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = models.Stack(depth=2)
        self.stack = models.Stack(depth=2)

    def forward(self, x: Tensor, image: Tensor | None) -> Tensor:
        y = self.stack(x)
        return y if image is None else y + self.encoder(image)


@tried(worlds=(2, 3))
def test_an_encoder_may_run_on_some_ranks_alone(run: Run) -> None:
    """An encoder that one rank skips hung; with a pass over zeros for it, gradients differed from those expected.

    https://github.com/pytorch/pytorch/issues/148334 2025
    """
    model = models.build(WithImages)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(4):
        has_image = (step + run.rank) % 3 == 0
        image = models.features(step, run.rank, 7) if has_image else None
        y = model(models.features(step, run.rank), image)
        run.backward(F.mse_loss(y, models.targets(step, run.rank)))
        optimizer.step()
        optimizer.zero_grad()


@tried(stages=(2, 3), relative=1e-6, offload="host")  # the norm's last bit
def test_an_unused_parameter_with_states_on_the_host_does_not_break_the_norm(run: Run) -> None:
    """With states on the CPU, the norm of the gradients needed one of each parameter, and failed without.

    https://github.com/deepspeedai/DeepSpeed/issues/5241 2024
    """
    model = models.build(models.Routed)
    optimizer = models.adamw(model, fused=True)
    run.shard(model, optimizer)
    for step in range(2):
        loss = model(models.features(step, run.rank), [0, 2]).square().mean()
        run.backward(loss)
        run.record(norm=nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()


class Late(torch.autograd.Function):
    """The identity, which waits in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wait_s: float) -> Tensor:
        ctx.wait_s = wait_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.wait_s)
        return grad, None


class Slow(models.Stack):
    """A stack whose rank is slow in the backward of one block."""

    def forward(self, x: Tensor, slow: int = -1) -> Tensor:
        x = self.stem(x)
        for place, block in enumerate(self.blocks):
            x = Late.apply(block(x), 0.01 if place == slow else 0.0)
        return self.head(x)


def train_slowly(run: Run, depth: int) -> None:
    """Train many small units; in each step another rank is slow, in another block."""
    model = models.build(Slow, depth=depth)
    optimizer = models.sgd(model)
    run.shard(model, optimizer, units=list(model.blocks))
    for step in range(3):
        for micro in range(2):
            slow = (step + micro) % depth if run.rank == step % run.world else -1
            y = model(models.features(step, run.rank, micro), slow)
            run.backward(F.mse_loss(y, models.targets(step, run.rank, micro)))
        run.record(norm=run.grad_norm())
        optimizer.step()
        optimizer.zero_grad()


@tried(relative=1e-6)  # the norm's last bit
def test_a_gradient_is_not_overwritten_while_it_is_sent(run: Run) -> None:
    """A buffer of gradients was filled again while its sum still ran on another stream.

    https://github.com/deepspeedai/DeepSpeed/issues/5545 2024
    """
    train_slowly(run, 6)


@tried(worlds=(3,), stages=(2, 3), relative=1e-6)  # the norm's last bit
def test_overlap_and_one_buffer_for_gradients_give_no_nan(run: Run) -> None:
    """With overlapped communication and gradients in one buffer, the norm was NaN or constant.

    https://github.com/deepspeedai/DeepSpeed/issues/7188 2025
    """
    train_slowly(run, 4)


@tried(stages=(2,), relative=1e-6)  # the norm's last bit
def test_overlap_does_not_change_gradients(run: Run) -> None:
    """ZeRO-2 had other gradients, and so other norms, with overlapped communication than without.

    https://github.com/deepspeedai/DeepSpeed/issues/5294 2024
    """
    train_slowly(run, 5)


class Steps(nn.Module):
    """A model that is trained through a method, not through `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = models.Stack()

    def training_step(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.stack(x), y)


@tried(worlds=(2, 3), forward_methods=("training_step",))
def test_a_training_step_that_is_no_forward_is_reduced(run: Run) -> None:
    """With static_graph=True, each rank trained a model of its own, because the step was not the wrapper's forward.

    https://github.com/Lightning-AI/pytorch-lightning/issues/20704 2025
    """
    model = models.build(Steps)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        run.backward(model.training_step(models.features(step, run.rank), models.targets(step, run.rank)))
        optimizer.step()
        optimizer.zero_grad()


class Manual(models.Stack):
    """A model whose forward runs its own backward, as manual optimization in a training step does."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x).square().mean()
        loss.backward()
        return loss.detach()


@tried(stages=(3,), here="refused at stage 3: a backward inside a forward")
def test_a_backward_inside_the_forward_is_refused(stage: int, options: dict[str, Any]) -> None:
    """A backward inside the forward, as manual optimization runs it, ended in an assertion of the library.

    https://github.com/Lightning-AI/pytorch-lightning/issues/19626 2024
    """
    model = models.build(Manual)
    zs.shard(model, models.adamw(model), stage=stage, **settled(options))
    with raises_on_all(RuntimeError, "inside the forward", "call backward() after the forward"):
        model(models.features(0, 0))


@tried(worlds=(2, 3))
def test_losses_weighted_by_tokens_are_those_of_the_whole_batch(stage: int, options: dict[str, Any]) -> None:
    """Means over micro-batches were averaged, as if all had the same number of tokens, in each of 18 trainers.

    https://github.com/huggingface/trl/issues/2617 2025
    """
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    lengths = {(one, micro): 1 + (3 * one + 5 * micro) % 7 for one in range(world) for micro in range(2)}
    total = sum(lengths.values())
    alone, model = (models.build(models.Stack).double() for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zs.shard(model, optimizer, stage=stage, reduction="sum", **settled(options))

    def loss(module: nn.Module, one: int, micro: int) -> Tensor:
        x = randn(lengths[one, micro], 5, key=(4, one, micro), dtype=torch.float64)
        return module(x).square().sum() / total

    for micro in range(2):
        loss(model, rank, micro).backward()
    optimizer.step()
    torch.stack([loss(alone, *key) for key in lengths]).sum().backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    with zero.gathered():
        assert_same(list(alone.parameters()), list(model.parameters()), relative=1e-14)


@tried()
def test_a_second_forward_without_gradients_leaves_those_of_the_first(run: Run) -> None:
    """A module that ran again under no_grad before its backward made the count of remaining gradients negative.

    https://github.com/deepspeedai/DeepSpeed/pull/6726 2024
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        y = model(models.features(step, run.rank))
        with torch.no_grad():
            reference = model(models.features(step, run.rank, 1))
        run.backward(F.mse_loss(y, models.targets(step, run.rank)) + (y - reference).square().mean())
        optimizer.step()
        optimizer.zero_grad()
