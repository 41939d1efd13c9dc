"""Programs around the step: evaluation, hooks, groups, optimizers of other kinds, offload, memory that must go."""

import copy
import gc
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from tests.models import WIDTH
from tests.oracle import Run, assert_same, seed
from tools.settled import settled

from .shapes import raises_on_all, tried
from .test_checkpoints import rank_of, shared_folder, train, values


def steps(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, count: int, micros: int = 1) -> None:
    for step in range(count):
        for micro in range(micros):
            run.backward(models.stack_loss(model, step, run.rank, micro) / micros)
        optimizer.step()
        optimizer.zero_grad()


@tried(relative=1e-6, offload="host")  # kernels for parts of tensors may round otherwise
def test_states_on_the_host_do_not_change_the_loss(run: Run) -> None:
    """Without sharding, and with states on the CPU, the losses differed from those without offload.

    https://github.com/pytorch/pytorch/issues/118245 2024
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model, fused=True)
    run.shard(model, optimizer)
    for step in range(4):
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)


@tried(relative=1e-6, offload="host")  # as above
def test_gradients_are_accumulated_where_states_are_on_the_host(run: Run) -> None:
    """With offload to the CPU a new gradient replaced the accumulated one, unless it was made in `no_sync()`.

    https://github.com/instructlab/training/issues/414 2025
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model, fused=True)
    run.shard(model, optimizer)
    steps(run, model, optimizer, count=3, micros=3)


class EndsEmpty(models.Stack):
    """A stack whose last parameters are smaller than what every rank could have a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.none = nn.Parameter(torch.ones(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.none.sum()


@tried(worlds=(1, 2, 3))
def test_a_group_that_ends_with_an_empty_slice_is_updated(run: Run) -> None:
    """A fused Adam skipped the update of all parameters of a group that ends with one without elements.

    https://github.com/NVIDIA/TransformerEngine/issues/3207 2026
    """
    model = models.build(EndsEmpty)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    run.shard(model, optimizer)
    steps(run, model, optimizer, count=2)


@tried()
def test_gradients_of_activations_in_evaluation_mode(run: Run) -> None:
    """A backward through a model in evaluation mode, to get gradients of activations, was refused.

    https://github.com/deepspeedai/DeepSpeed/issues/7354 2025
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    steps(run, model, optimizer, count=1)
    seen: list[Tensor] = []
    hook = model.blocks[1].register_forward_hook(lambda module, args, output: seen.append(output))
    model.eval()
    loss = models.stack_loss(model, 5, run.rank)
    run.record(of_activations=torch.autograd.grad(loss, seen)[0])
    hook.remove()
    model.train()
    steps(run, model, optimizer, count=2)


@tried()
def test_evaluation_before_training_changes_nothing(run: Run) -> None:
    """An evaluation before the first step was refused, or left what training needs in a wrong state.

    https://github.com/huggingface/transformers/pull/44889 2026
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    model.eval()
    with torch.no_grad():
        run.record(before=model(models.features(9, run.rank)))
    model.train()
    steps(run, model, optimizer, count=3)


@tried()
def test_inference_mode_between_steps(run: Run) -> None:
    """After an evaluation in `inference_mode()`, training under ZeRO-3 failed on tensors of inference.

    https://github.com/snowflakedb/ArcticTraining/pull/265 2025
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for _ in range(2):
        model.eval()
        with torch.inference_mode():
            model(models.features(9, run.rank))
        model.train()
        steps(run, model, optimizer, count=2)


@tried(worlds=(1, 2))
def test_a_deleted_model_is_freed(stage: int, options: dict[str, Any]) -> None:
    """After whole state dicts had been taken, a sharded model that the program deleted kept its memory.

    https://github.com/pytorch/pytorch/issues/149100 2025
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, stage=stage, **settled(options))
    before = None
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        with zero.gathered():
            state = {name: value.clone() for name, value in model.state_dict().items()}
        held = zero.memory().resident_bytes
        assert step < 2 or held == before
        before = held
    kept = [weakref.ref(one) for one in (model, optimizer, zero, *model.parameters(), *state.values())]
    del model, optimizer, zero, state
    gc.collect()
    assert not [one() for one in kept if one() is not None]


@tried()
def test_hooks_of_parameters_see_each_gradient(run: Run) -> None:
    """Hooks that a program put on sharded parameters were never called, without a word.

    https://github.com/meta-pytorch/torchrec/pull/4268 2026
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    calls: list[str] = []
    for name, p in list(model.named_parameters())[::2]:
        p.register_hook(lambda grad, name=name: calls.append(name) or grad * 3)
    run.shard(model, optimizer)
    for name, p in list(model.named_parameters())[1::2]:
        p.register_hook(lambda grad, name=name: calls.append(name) or grad * 5)
    steps(run, model, optimizer, count=2, micros=2)
    assert len(calls) == 4 * len(list(model.parameters())), calls


@tried(worlds=(1, 2))
def test_gradients_are_there_after_a_backward(stage: int, options: dict[str, Any]) -> None:
    """After a backward `p.grad` was None for every parameter, at each stage.

    https://github.com/deepspeedai/DeepSpeed/issues/6768 2024
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zs.shard(model, optimizer, stage=stage, **settled(options))
    models.stack_loss(model, 0, rank_of()).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape and p.grad.norm() > 0 for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@tried(worlds=(1, 2), here="right in `with zero.gathered(states=True):`, refused outside where states are sharded")
def test_states_that_an_optimizer_makes_at_once_follow_the_parameters(run: Run) -> None:
    """The states that Adagrad makes when it is built belonged to parameters from before: an error in `state_dict()`.

    https://github.com/huggingface/accelerate/issues/3855 2025
    """
    model = models.build(models.Stack)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)
    run.shard(model, optimizer)
    steps(run, model, optimizer, count=2)
    with run.gathered(states=True):
        run.record(saved=copy.deepcopy(optimizer.state_dict()["state"]))


@tried(worlds=(1, 2))
def test_the_step_counter_is_loaded(stage: int, options: dict[str, Any]) -> None:
    """States were saved, and their load failed for want of the counter of steps.

    https://github.com/huggingface/accelerate/issues/3971 2026
    """
    with shared_folder() as folder:
        runs = []
        for _ in range(2):
            model = models.build(models.Stack)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            runs.append((model, optimizer, zs.shard(model, optimizer, stage=stage, **settled(options))))
        (model, optimizer, zero), (again, other, loaded) = runs
        train(model, optimizer, range(3))
        zero.save(folder / "step-3")
        loaded.load(folder / "step-3")
        assert {float(one["step"]) for one in other.state.values()} == {3.0}
        train(model, optimizer, range(3, 5))
        train(again, other, range(3, 5))
        assert_same(values(zero, model), values(loaded, again))


class Adapter(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.base(x) + self.up(self.down(x)))


@tried(worlds=(2, 3))
def test_adapters_are_saved_with_their_elements(run: Run) -> None:
    """The file of the adapters of a model that ZeRO-3 had trained was empty.

    https://github.com/deepspeedai/DeepSpeed/issues/7900 2026
    """
    model = models.build(models.Stack, kind=lambda _: Adapter())
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    steps(run, model, optimizer, count=2)
    with run.gathered():
        adapters = {name: value.clone() for name, value in model.state_dict().items() if ".up." in name}
    assert adapters and all(value.numel() for value in adapters.values())
    run.record(adapters=adapters)


class Dropped(nn.Module):
    """A block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.block = models.Block()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.block(x), 0.5, self.training)


@tried(activations="recompute")
def test_recomputation_draws_the_masks_of_the_forward(run: Run) -> None:
    """Recomputation did not restore the random state, so gradients were of other dropout masks than the loss.

    https://github.com/allenai/OLMo-core/pull/828 2026
    """
    model = models.build(models.Stack, kind=lambda _: Dropped())
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        seed(step, run.rank)
        run.backward(models.stack_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()


@tried()
def test_groups_of_an_optimizer_stay_apart(run: Run) -> None:
    """Groups of the optimizer were cleared, and all parameters put into one with the default options.

    https://github.com/NVIDIA/Megatron-LM/pull/2471 2025
    """
    model = models.build(models.Stack)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "lr": 1e-2}, {"params": vectors, "weight_decay": 0.0}], lr=1e-1)
    run.shard(model, optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(matrices), len(vectors)]
    steps(run, model, optimizer, count=2)
    optimizer.param_groups[0]["lr"] = 1e-3
    steps(run, model, optimizer, count=2)


@tried(worlds=(1, 2))
def test_names_of_compiled_modules_in_recomputed_ones(stage: int, options: dict[str, Any]) -> None:
    """Where a recomputed module was compiled inside, the names in its checkpoint had a part that loading lacks.

    https://github.com/pytorch/torchtitan/issues/2622 2026
    """
    with shared_folder() as folder:
        model = models.build(models.Stack)
        for block in model.blocks:
            block.compile(backend="eager")
        optimizer = models.adamw(model)
        zero = zs.shard(model, optimizer, stage=stage, activations="recompute", **settled(options))
        train(model, optimizer, range(2))
        zero.save(folder / "step-2")
        plain = models.build(models.Stack)
        loaded = zs.shard(plain, stage=0, **settled(options))
        loaded.load(folder / "step-2", model_only=True)
        assert_same(values(zero, model), values(loaded, plain))


class Rotary(models.Stack):
    """A stack that multiplies its inputs by a buffer that is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0, 1, 5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.angles)


@tried(worlds=(2, 3))
def test_buffers_outside_the_state_dict_are_equal_on_all_ranks(stage: int, options: dict[str, Any]) -> None:
    """Ranks whose models had other rotary angles, in buffers, computed other probabilities from equal parameters.

    https://github.com/oumi-ai/oumi/pull/2647 2026
    """
    model = models.build(Rotary)
    expected = model.angles.clone()
    model.angles += rank_of()
    zs.shard(model, models.adamw(model), stage=stage, **settled(options))
    assert torch.equal(model.angles, expected)


@tried(worlds=(1, 2), here="refused: a buffer on the meta device whose values nothing gives")
def test_buffers_on_the_meta_device_do_not_get_any_values(stage: int, options: dict[str, Any]) -> None:
    """Buffers outside the state dict got memory without values where a model came from the meta device.

    https://github.com/hiyouga/LlamaFactory/pull/10820 2026
    """
    with torch.device("meta"):
        model = Rotary()
    with raises_on_all((RuntimeError, ValueError), "angles"):
        zs.shard(model, models.adamw(model), stage=stage, **settled(options))


@tried(worlds=(1, 2))
def test_weights_alone_are_loaded_into_masters_too(stage: int, options: dict[str, Any]) -> None:
    """Weights that were loaded without states gave one right loss, and then the masters from before the load.

    https://github.com/deepspeedai/DeepSpeed/issues/4944 2024
    """
    with shared_folder() as folder:
        results = []
        for value in (0, 1):
            seed(value)
            model = models.Stack()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            zero = zs.shard(model, optimizer, stage=stage, precision="bf16", **settled(options))
            if value:
                train(model, optimizer, range(2))
                zero.load(folder / "start", model_only=True)
            else:
                zero.save(folder / "start")
            train(model, optimizer, range(3))
            results.append(values(zero, model))
        assert_same(*results)


@tried()
def test_autocast_around_the_forward(run: Run) -> None:
    """A forward in the program's own `torch.autocast` was refused, since another setting has to turn it on.

    https://github.com/deepspeedai/DeepSpeed/issues/7529 2025
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = models.stack_loss(model, step, run.rank)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)


@tried(worlds=(2, 3))
def test_all_slices_are_updated_where_ranks_use_other_layers(run: Run) -> None:
    """Where ranks used different layers, a gradient was set on some ranks alone, and slices grew apart.

    https://github.com/pytorch/pytorch/pull/174862 2026
    """
    model = models.build(models.Routed)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        run.backward(model(models.features(step, run.rank), [(step + run.rank) % 3]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
