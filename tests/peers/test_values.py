"""Values: frozen, tied and added parameters, optimizers, dtypes, buffers, norms and clipping."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from tests.models import WIDTH
from tests.oracle import STAGES, Run, assert_same
from tools.settled import settled

from .shapes import raises_on_all, tried


def rank_of() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


@tried(worlds=(2, 3), relative=1e-6)  # the norm's last bit
def test_clipping_by_torchs_function_is_global(run: Run) -> None:
    """`clip_grad_norm_` used the norm of a rank's own shards, and scaled by it.

    https://github.com/pytorch/pytorch/issues/170862 2025
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        run.backward(models.stack_loss(model, step, run.rank))
        run.record(norm=nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()


@tried(stages=STAGES, relative=1e-6)  # the norm's last bit
def test_each_stage_has_the_same_norm(run: Run) -> None:
    """Only the stage was changed, and the norm at stage 0 was a multiple of that at stages 1 to 3.

    https://github.com/deepspeedai/DeepSpeed/issues/7837 2026
    """
    model = models.build(models.GPT)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        for micro in range(2):
            run.backward(models.gpt_loss(model, step, run.rank, micro))
        run.record(two=run.grad_norm(), largest=run.grad_norm(float("inf")), one=run.grad_norm(1.0))
        optimizer.step()
        optimizer.zero_grad()


@tried(worlds=(1, 2))
def test_the_norm_is_not_zero(stage: int, options: dict[str, Any]) -> None:
    """After an update of the library the norm of the gradients was reported as zero.

    https://github.com/deepspeedai/DeepSpeed/issues/5692 2024
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, stage=stage, precision="bf16", **settled(options))
    models.stack_loss(model, 0, rank_of()).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = zero.grad_norm()
    assert norm > 0.01 and torch.isclose(nn.utils.clip_grad_norm_(model.parameters(), 1.0), norm) and grads


@tried(relative=1e-6)  # the norm's last bit
def test_clipping_by_value_then_by_norm(run: Run) -> None:
    """Clipping by norm was not possible with sharded parameters, clipping by value was.

    https://github.com/Lightning-AI/pytorch-lightning/issues/19235 2024
    """
    model = models.build(models.Stack)
    optimizer = models.sgd(model)
    run.shard(model, optimizer)
    for step in range(3):
        run.backward(models.stack_loss(model, step, run.rank))
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        run.record(norm=nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()


@tried(worlds=(3,))
def test_tied_weights_are_updated_on_the_last_rank(run: Run) -> None:
    """Tied weights whose rows the ranks do not divide were never updated on the last rank.

    https://github.com/pytorch/pytorch/issues/176076 2026
    """
    model = models.build(models.GPT)  # 19 rows
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        run.backward(models.gpt_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()
    with run.gathered():
        start = models.build(models.GPT).embedding.weight
        assert (model.embedding.weight != start).any(dim=1).all()


@tried(worlds=(1, 2))
def test_tied_weights_of_a_model_on_the_meta_device_stay_tied(stage: int, options: dict[str, Any]) -> None:
    """Filling modules of the meta device one by one gave each of two tied modules a weight of its own.

    https://github.com/huggingface/accelerate/pull/3154 2024
    """
    with torch.device("meta"):
        model = models.GPT()
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, stage=stage, weights=_fill, **settled(options))
    for step in range(2):
        models.gpt_loss(model, step, rank_of()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered():
        assert model.head.weight is model.embedding.weight
        assert torch.equal(model.head.weight, model.embedding.weight)


def _fill(module: nn.Module) -> None:
    for p in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        nn.init.constant_(p, 0.125)


@tried(worlds=(1, 2))
def test_a_model_on_the_meta_device_has_the_values_of_one_process(stage: int, options: dict[str, Any]) -> None:
    """Parameters from the meta device were given memory, and never the values that their modules draw.

    https://github.com/NVIDIA/Megatron-LM/pull/6799 2026
    """
    with torch.device("meta"):
        model = models.Stack()
    expected = models.Stack()
    torch.manual_seed(7)
    for module in expected.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    torch.manual_seed(7)
    zero = zs.shard(model, models.adamw(model), stage=stage, **settled(options))
    with zero.gathered():
        assert_same(list(expected.parameters()), list(model.parameters()))


@tried()
def test_a_forward_before_the_optimizer_is_built_changes_nothing(run: Run) -> None:
    """After a forward, `parameters()` gave an optimizer other objects than those that are trained.

    https://github.com/pytorch/pytorch/issues/149205 2025
    """
    model = models.build(models.Stack)
    run.shard(model)
    with torch.no_grad():
        run.record(before=model(models.features(0, run.rank, 9)))
    optimizer = models.adamw(model)
    run.attach(optimizer)
    for step in range(3):
        run.backward(models.stack_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()


@tried()
def test_an_optimizer_that_was_built_first_updates_the_model(run: Run) -> None:
    """The optimizer kept parameters from before the model was wrapped, and updated nothing that computes.

    https://github.com/huggingface/accelerate/issues/3209 2024
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    run.backward(models.stack_loss(model, 0, run.rank))
    optimizer.step()
    run.record(after=model(models.features(1, run.rank)))


@tried()
def test_the_loss_falls(run: Run) -> None:
    """With flattened parameters the model and the optimizer had different ones, and the loss stayed constant.

    https://github.com/huggingface/accelerate/issues/3256 2024
    """
    model = models.build(models.Stack)
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == is_matrix]} for is_matrix in (True, False)]
    optimizer = torch.optim.AdamW([{**groups[0], "weight_decay": 0.1}, {**groups[1], "weight_decay": 0.0}], lr=1e-2)
    run.shard(model, optimizer)
    losses = []
    for _ in range(6):
        loss = models.stack_loss(model, 0, run.rank)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert losses[-1] < losses[0]
    run.record(losses=losses)


@tried()
def test_an_update_is_as_large_as_that_of_plain_training(run: Run) -> None:
    """The same gradients moved the parameters by a half to three quarters of what DDP moves them.

    https://github.com/NVIDIA/Megatron-LM/issues/5974 2026
    """
    model = models.build(models.Stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.shard(model, optimizer)
    run.backward(models.stack_loss(model, 0, run.rank))
    optimizer.step()
    run.record(probe=model(models.features(5, 0)))


@tried(stages=(2, 3))
def test_adamw_of_many_steps_has_the_losses_of_plain_training(run: Run) -> None:
    """Two ways of sharding gave different losses with AdamW, for no reason that was found.

    https://github.com/pytorch/torchtitan/issues/724 2024
    """
    model = models.build(models.GPT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    run.shard(model, optimizer)
    for step in range(20):
        loss = models.gpt_loss(model, step, run.rank)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        run.record(loss=loss)


@tried(worlds=(1, 2))
def test_a_part_that_was_frozen_in_the_first_forward_trains_later(stage: int, options: dict[str, Any]) -> None:
    """Unfreezing after a first frozen forward failed in mixed precision, or reduced in a dtype not asked for.

    https://github.com/pytorch/pytorch/issues/186998 2026
    """
    results = []
    for begins_frozen in (True, False):
        model = models.build(models.Stack)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        zero = zs.shard(model, optimizer, stage=stage, precision="bf16", **settled(options))
        model.blocks[1].requires_grad_(not begins_frozen)
        with torch.no_grad():
            model(models.features(9, rank_of()))
        model(models.features(9, rank_of()))
        model.blocks[1].requires_grad_(True)
        for step in range(2):
            models.stack_loss(model, step, rank_of()).backward()
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered():
            results.append([p.detach().clone() for p in model.parameters()])
    assert_same(results[1], results[0])


@tried(worlds=(1, 2))
def test_small_updates_of_a_model_in_bf16_are_not_lost(stage: int, options: dict[str, Any]) -> None:
    """The copy in fp32 that was to take the updates was made and dropped, so bf16 rounded small updates away.

    https://github.com/huggingface/accelerate/issues/3979 2026
    """
    model = nn.Linear(8, 8, bias=False).bfloat16()
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    zs.shard(model, optimizer, stage=stage, precision="bf16", **settled(options))
    for _ in range(16):  # each moves the weights by 2**-12, a 32nd of the distance of two numbers in bf16 below one
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model(torch.eye(8)).detach(), torch.full((8, 8), 1.0 - 2.0**-8).to(torch.bfloat16).float())


@tried(worlds=(1, 2))
def test_many_micro_batches_are_accumulated_in_fp32(stage: int, options: dict[str, Any]) -> None:
    """In bf16, the losses of a run that accumulates gradients departed from those of a run that does not.

    https://github.com/deepspeedai/DeepSpeed/issues/5898 2024
    """
    model = nn.Linear(8, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)
    zero = zs.shard(model, optimizer, stage=stage, precision="bf16", **settled(options))
    for value in (256.0, *[1.0] * 16):  # in bf16, 256 + 1 is 256
        model(torch.full((1, 8), value)).sum().backward()
    optimizer.step()
    with zero.gathered():
        assert_same([torch.full((1, 8), -272.0).bfloat16()], [model.weight.detach()])


class Filtered(nn.Module):
    """A fixed filter in a buffer, which multiplies the outputs of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.register_buffer("kernel", torch.linspace(0, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.head(F.linear(self.stem(x), self.kernel))


@tried(worlds=(1, 2), here="as there: torch's error, which names both dtypes; a buffer keeps the dtype it was given")
def test_a_buffer_keeps_its_dtype(stage: int, options: dict[str, Any]) -> None:
    """Buffers kept their dtype in mixed precision although another was asked for, and the forward failed.

    https://github.com/pytorch/pytorch/issues/143900 2024
    """
    model = models.build(Filtered)
    optimizer = models.adamw(model)
    zs.shard(model, optimizer, stage=stage, precision="bf16", **settled(options))
    with raises_on_all(RuntimeError, "to have the same dtype", "BFloat16 != float"):
        models.stack_loss(model, 0, rank_of())
    model.kernel = model.kernel.bfloat16()
    models.stack_loss(model, 0, rank_of()).backward()


class WithoutOutputs(models.Stack):
    """A stack with a layer that has no outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Linear(3, 0, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.none(y).sum()


@tried(worlds=(1, 2, 3))
def test_parameters_without_elements_keep_their_shape(run: Run) -> None:
    """A trainable parameter without elements at the end of a group was an error, or lost its shape.

    https://github.com/deepspeedai/DeepSpeed/issues/8279 2026
    """
    model = models.build(WithoutOutputs)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(2):
        run.backward(models.stack_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()


@tried(worlds=(1, 2), here="refused: gradients that are not finite")
def test_a_step_that_is_not_finite_is_not_skipped_in_silence(stage: int, options: dict[str, Any]) -> None:
    """In bf16, steps with gradients that were not finite were skipped without a word, all of them in one run.

    https://github.com/deepspeedai/DeepSpeed/issues/8415 2026
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zs.shard(model, optimizer, stage=stage, precision="bf16", **settled(options))
    (models.stack_loss(model, 0, rank_of()) * float("inf")).backward()
    with raises_on_all(RuntimeError, "not finite", "nothing was changed"):
        optimizer.step()


@tried(stages=(3,), here="refused: layers that are replaced after zs.shard")
def test_a_head_that_is_replaced_after_sharding_is_refused(stage: int, options: dict[str, Any]) -> None:
    """A head that was rebuilt after a resize of the embedding had none of what ZeRO-3 needs, and failed in training.

    https://github.com/huggingface/transformers/issues/41959 2025
    """
    model = models.build(models.Stack)
    zs.shard(model, models.adamw(model), stage=stage, **settled(options))
    model.head = nn.Linear(WIDTH, 4)
    with raises_on_all(RuntimeError, "'head' was replaced after zs.shard()", "before zs.shard()"):
        model(models.features(0, rank_of()))


@tried(stages=(3,), worlds=(2, 3))
def test_parameters_are_divided(stage: int, options: dict[str, Any]) -> None:
    """ZeRO-3 left all parameters whole on each rank, which was seen by the memory alone.

    https://github.com/deepspeedai/DeepSpeed/issues/5819 2024
    """
    model = models.build(models.Stack, depth=8)
    zero = zs.shard(model, models.adamw(model), stage=stage, **settled(options))
    whole = sum(4 * p.numel() for p in model.parameters())
    kept = []
    for _ in range(2):
        models.stack_loss(model, 0, rank_of()).backward()
        kept.append(zero.memory().resident_bytes["parameters"])
    shares = [one * torch.distributed.get_world_size() / whole for one in kept]
    assert max(shares) < 1.3, shares  # padding of small layers


@tried(worlds=(1, 2))
def test_a_reference_model_is_sharded_beside_the_trained_one(stage: int, options: dict[str, Any]) -> None:
    """The frozen reference model of DPO could not be sharded in the way of the trained one.

    https://github.com/huggingface/trl/issues/3581 2025
    """
    policy = models.build(models.GPT)
    reference = copy.deepcopy(policy).requires_grad_(False)
    alone = copy.deepcopy(policy)
    optimizer = models.adamw(policy)
    zs.shard(policy, optimizer, stage=stage, precision="bf16", **settled(options))
    zs.shard(reference, stage=stage, precision="bf16", **settled(options))
    tokens = models.tokens(0, rank_of())
    with torch.no_grad():
        first = reference(tokens)
        assert torch.equal(first, policy(tokens))
    for _ in range(2):
        (policy(tokens) - reference(tokens)).square().mean().add(policy(tokens).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        assert torch.equal(first, reference(tokens)) and not torch.equal(first, policy(tokens))
        assert torch.allclose(first, alone(tokens), atol=0.2, rtol=0.05)
