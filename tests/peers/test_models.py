"""Several models, parts of models, averages of models: what belongs to which optimizer, and whose gradient is whose."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import zeroshard as zs
from tests import models
from tests.oracle import Run, assert_same
from tools.settled import settled

from .shapes import raises_on_all, tried
from .test_checkpoints import rank_of, train, values
from .test_loops import steps


@tried(worlds=(1, 2), here="refused: trainable parameters that are in no optimizer")
def test_an_optimizer_of_a_part_is_not_given_the_rest(stage: int, options: dict[str, Any]) -> None:
    """An optimizer that was built for some parameters had all of the model's once the model was wrapped.

    https://github.com/mosaicml/composer/pull/3502 2024
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model.blocks)
    with raises_on_all(ValueError, "4 trainable parameter(s) are in no optimizer", "requires_grad_(False)"):
        zs.shard(model, optimizer, stage=stage, **settled(options))
    for part in (model.stem, model.head):
        part.requires_grad_(False)
    before = [p.clone() for p in model.head.parameters()]
    zero = zs.shard(model, optimizer, stage=stage, **settled(options))
    train(model, optimizer, range(2))
    with zero.gathered():
        assert_same(before, list(model.head.parameters()))


@tried(worlds=(1, 2), stages=(1, 2, 3), here="refused: ignored parameters in an optimizer of sharded ones")
def test_ignored_parameters_in_an_optimizer_of_sharded_ones(stage: int, options: dict[str, Any]) -> None:
    """The foreach update of SGD failed for a group of sharded and of ignored parameters.

    https://github.com/pytorch/pytorch/issues/183207 2026
    """
    model = models.build(models.Stack)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    with raises_on_all(ValueError, "'head.bias' is ignored", "an optimizer of their own"):
        zs.shard(model, optimizer, stage=stage, ignored=[model.head.bias], **settled(options))


@tried(worlds=(1, 2))
def test_averages_of_a_sharded_model(run: Run) -> None:
    """A sharded model could not be averaged by `AveragedModel`, which copies and reads all of it.

    https://github.com/pytorch/pytorch/issues/149138 2025
    """
    model = models.build(models.Stack)
    average = AveragedModel(model)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for _ in range(3):
        steps(run, model, optimizer, count=1)
        with run.gathered():
            average.update_parameters(model)
    run.record(average=[p.detach().clone() for p in average.parameters()])


@tried(worlds=(1, 2))
def test_copies_of_a_sharded_model_are_averaged(run: Run) -> None:
    """Averages of a sharded model needed all of its values, and whether the copy has its own was not clear.

    https://github.com/Lightning-AI/pytorch-lightning/pull/21414 2025
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    with run.gathered():
        average = copy.deepcopy(model)
    for _ in range(2):
        steps(run, model, optimizer, count=1)
        with run.gathered(), torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
    run.record(average=[p.detach().clone() for p in average.parameters()], y=average(models.features(0, run.rank)))


class Critic(nn.Module):
    """A discriminator of a generator's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@tried()
def test_a_generator_and_its_critic(run: Run) -> None:
    """With two models, a backward through both left a gradient where only one of them was stepped, and failed.

    https://github.com/deepspeedai/DeepSpeed/issues/4923 2024
    """
    generator, critic = models.build(models.Stack), models.build(Critic)
    makes, judges = models.adamw(generator), models.adamw(critic)
    run.shard(generator, makes)
    run.shard(critic, judges)
    for step in range(3):
        fake = generator(models.features(step, run.rank))
        run.backward((critic(models.targets(step, run.rank)) - critic(fake.detach())).mean())
        judges.step()
        judges.zero_grad()
        run.backward(critic(fake).mean())
        makes.step()
        makes.zero_grad()
        judges.zero_grad()


class StepsInside(nn.Module):
    """A module whose forward computes a loss and runs its backward, as a training step does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = models.Stack()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(self.net(x), y)
        loss.backward()
        return loss.detach()


@tried(worlds=(2, 3), stages=(3,), here="refused at stage 3: a backward inside the forward of a sharded model")
def test_a_backward_inside_the_forward_of_an_outer_module(stage: int, options: dict[str, Any]) -> None:
    """A backward inside the forward of the wrapped module, as manual optimization makes it, was not possible.

    https://github.com/Lightning-AI/pytorch-lightning/issues/19685 2024
    """
    model = models.build(StepsInside)
    zs.shard(model, models.adamw(model), stage=stage, **settled(options))
    with raises_on_all(RuntimeError, "backward() reached 'net.head.bias' inside the forward", "after the forward"):
        model(models.features(0, rank_of()), models.targets(0, rank_of()))


@tried()
def test_two_forwards_before_a_backward(run: Run) -> None:
    """Two forwards of a step, of what was chosen and rejected, and one backward were an error under ZeRO-2.

    https://github.com/xfactlab/orpo/issues/9 2024
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        chosen, rejected = (model(models.features(step, run.rank, micro)) for micro in range(2))
        run.backward(F.softplus(rejected - chosen).mean())
        optimizer.step()
        optimizer.zero_grad()


@tried()
def test_a_step_without_gradients_is_that_of_plain_training(run: Run) -> None:
    """Gradients were in a place that the optimizer did not read, and its step did nothing, without a word.

    https://github.com/NVIDIA/Megatron-LM/pull/4426 2026
    """
    model = models.build(models.Stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    run.shard(model, optimizer)
    optimizer.step()
    steps(run, model, optimizer, count=1)
    optimizer.step()
    steps(run, model, optimizer, count=1)


@tried(stages=(2, 3))
def test_stages_have_the_losses_of_each_other(stage: int, options: dict[str, Any]) -> None:
    """The same fine-tuning had a loss of 1.5 under ZeRO-2 and 1.8 under ZeRO-3.

    https://github.com/deepspeedai/DeepSpeed/issues/5188 2024
    """
    losses = []
    for one in (0, stage):
        model = models.build(models.GPT)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        zs.shard(model, optimizer, stage=one, precision="bf16", **settled(options))
        losses.append([])
        for step in range(6):
            loss = models.gpt_loss(model, step, rank_of())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.detach())
    assert_same(*losses, relative=1e-5)  # the norm's last bit, in updates of bf16


@tried(worlds=(1, 2))
def test_a_reference_takes_the_weights_of_the_policy(stage: int, options: dict[str, Any]) -> None:
    """A reference model that ZeRO-3 had divided could not be given the weights of the trained model.

    https://github.com/deepspeedai/DeepSpeed/issues/6411 2024
    """
    policy = models.build(models.Stack)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = models.adamw(policy)
    zero = zs.shard(policy, optimizer, stage=stage, precision="bf16", **settled(options))
    other = zs.shard(reference, stage=stage, precision="bf16", **settled(options))
    for step in range(2):
        train(policy, optimizer, range(step, step + 1))
        with zero.gathered(), other.gathered(writeback=True):
            reference.load_state_dict(policy.state_dict())
        x = models.features(step, rank_of())
        assert torch.equal(reference(x), policy(x).detach())
        assert_same(values(zero, policy), values(other, reference))


@tried(relative=1e-5)  # sums of a rank's gradients round otherwise than sums over ranks
def test_precision_and_accumulation_without_sums(run: Run) -> None:
    """Gradients accumulated without sums between ranks had a dtype that the update refused.

    https://github.com/huggingface/transformers/pull/34645 2024
    """
    model = models.build(models.Stack)
    optimizer = models.sgd(model)
    run.shard(model, optimizer)
    for step in range(2):
        with run.no_sync(), torch.autocast("cpu", dtype=torch.bfloat16):
            loss = models.stack_loss(model, step, run.rank)
            run.backward(loss)
        run.backward(models.stack_loss(model, step, run.rank, 1))
        optimizer.step()
        optimizer.zero_grad()


def matrices_and_rest(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of blocks, and AdamW for what remains."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


@tried(worlds=(1, 2, 3))
def test_muon_updates_whole_matrices(run: Run) -> None:
    """Muon orthogonalized matrices that were reduced in part, another one on each rank, without a word.

    https://github.com/deepspeedai/DeepSpeed/pull/8090 2026
    """
    model = models.build(models.GPT)
    optimizers = matrices_and_rest(model)
    run.shard(model, *optimizers)
    for step in range(3):
        run.backward(models.gpt_loss(model, step, run.rank))
        for one in optimizers:
            one.step()
            one.zero_grad()


@tried(worlds=(1, 2))
def test_muon_of_a_model_on_the_meta_device(stage: int, options: dict[str, Any]) -> None:
    """Muon took the matrices of a model that was built without memory for vectors, and was never used.

    https://github.com/deepspeedai/DeepSpeed/pull/8438 2026
    """
    results = []
    for device in ("cpu", "meta"):
        torch.manual_seed(3)
        with torch.device(device):
            model = models.Stack()
        if device == "cpu":
            torch.manual_seed(7)
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        torch.manual_seed(7)
        optimizers = matrices_and_rest(model)
        zero = zs.shard(model, optimizers, stage=stage, **settled(options))
        for step in range(2):
            models.stack_loss(model, step, rank_of()).backward()
            for one in optimizers:
                one.step()
                one.zero_grad()
        results.append(values(zero, model))
    assert_same(*results)


@tried()
def test_each_group_has_its_learning_rate(run: Run) -> None:
    """Learning rates of groups had no effect under ZeRO-3: all parameters had the same one.

    https://github.com/deepspeedai/DeepSpeed/issues/6873 2024
    """
    model = models.build(models.Stack)
    groups = [{"params": list(model.blocks.parameters()), "lr": 0.0}, {"params": [*model.stem.parameters()]}]
    optimizer = torch.optim.AdamW([*groups, {"params": [*model.head.parameters()], "lr": 1e-1}], lr=1e-3)
    run.shard(model, optimizer)
    steps(run, model, optimizer, count=2)
    with run.gathered():
        start = models.build(models.Stack)
        assert_same(list(start.blocks.parameters()), list(model.blocks.parameters()))


@tried(worlds=(1, 2))
def test_an_empty_group_and_a_schedule(run: Run) -> None:
    """An empty group of the optimizer was dropped, and the schedule had one learning rate too many.

    https://github.com/huggingface/transformers/pull/43692 2026
    """
    model = models.build(models.Stack)
    optimizer = torch.optim.AdamW([{"params": [*model.parameters()]}, {"params": [], "weight_decay": 0.0}], lr=1e-2)
    run.shard(model, optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(3):
        steps(run, model, optimizer, count=1)
        schedule.step()


class Swapping(torch.optim.SGD):
    """SGD that evaluates with the parameters' average, as schedule-free optimizers do."""

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["kept"] = p.clone()
                p.mul_(0.5)

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p].pop("kept"))


@tried(worlds=(1, 2), here="mended: evaluation used the weights of training; such an optimizer is refused now")
def test_an_optimizer_that_swaps_the_weights_for_evaluation(stage: int, options: dict[str, Any]) -> None:
    """The switch of a schedule-free optimizer to evaluation did nothing, and weights of training were saved.

    https://github.com/huggingface/accelerate/issues/4159 2026
    """
    model = models.build(models.Stack)
    optimizer = Swapping(model.parameters(), lr=0.1)
    with raises_on_all(ValueError, "Swapping.eval()", "AveragedModel", "with zero.gathered():"):
        zs.shard(model, optimizer, stage=stage, **settled(options))
    zero = zs.shard(model, stage=stage, **settled(options))
    with raises_on_all(ValueError, "Swapping.eval()"):
        zero.attach(optimizer)
