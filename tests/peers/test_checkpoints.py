"""What is saved and loaded, evaluated, compiled and recomputed."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests import models
from tests.models import WIDTH
from tests.oracle import Run, assert_same, seed
from tools.settled import settled

from .shapes import raises_on_all, tried


def rank_of() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield a folder that all ranks see, while the first one keeps it."""
    with tempfile.TemporaryDirectory(prefix="zeroshard-peers-") as own:
        folders = [own]
        if torch.distributed.is_initialized():
            torch.distributed.broadcast_object_list(folders)
        yield Path(folders[0])
        if torch.distributed.is_initialized():
            torch.distributed.barrier()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        models.stack_loss(model, step, rank_of()).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(zero: zs.Zero, model: nn.Module) -> list[Tensor]:
    with zero.gathered():
        return [p.detach().clone() for p in model.parameters()]


@tried(worlds=(1, 2))
def test_a_model_that_was_frozen_in_part_resumes(stage: int, options: dict[str, Any]) -> None:
    """A checkpoint of a model whose layers were frozen first left out what the user's optimizer still had.

    https://github.com/deepspeedai/DeepSpeed/issues/6771 2024
    """

    def build() -> tuple[nn.Module, torch.optim.Optimizer, zs.Zero]:
        model = models.build(models.Stack)
        model.blocks[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, zs.shard(model, optimizer, stage=stage, **settled(options))

    with shared_folder() as folder:
        model, optimizer, zero = build()
        train(model, optimizer, range(2))
        zero.save(folder / "step-2")
        train(model, optimizer, range(2, 4))
        again, other, loaded = build()
        loaded.load(folder / "step-2")
        train(again, other, range(2, 4))
        assert_same(values(zero, model), values(loaded, again))


@tried(worlds=(1, 2))
def test_states_of_a_part_that_was_frozen_later_are_kept(stage: int, options: dict[str, Any]) -> None:
    """Loading dropped the optimizer's states of parameters that were trained and then frozen.

    https://github.com/pytorch/pytorch/issues/192202 2026
    """

    def build() -> tuple[nn.Module, torch.optim.Optimizer, zs.Zero]:
        model = models.build(models.Stack)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, zs.shard(model, optimizer, stage=stage, **settled(options))

    with shared_folder() as folder:
        model, optimizer, zero = build()
        train(model, optimizer, range(2))
        model.blocks[1].requires_grad_(False)
        train(model, optimizer, range(2, 3))
        zero.save(folder / "step-3")
        again, other, loaded = build()
        again.blocks[1].requires_grad_(False)
        loaded.load(folder / "step-3")
        for one, its in ((model, optimizer), (again, other)):
            one.blocks[1].requires_grad_(True)
            train(one, its, range(3, 5))
        assert_same(values(zero, model), values(loaded, again))


@tried(worlds=(1, 2))
def test_the_first_learning_rate_is_saved(stage: int, options: dict[str, Any]) -> None:
    """A loaded optimizer lost `initial_lr`, without which a scheduler cannot continue.

    https://github.com/pytorch/pytorch/issues/126948 2024
    """
    with shared_folder() as folder:
        model = models.build(models.Stack)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        zero = zs.shard(model, optimizer, stage=stage, **settled(options))
        train(model, optimizer, range(1))
        schedule.step()
        zero.save(folder / "step-1", extra={"schedule": schedule.last_epoch})
        again = models.build(models.Stack)
        other = torch.optim.Adam(again.parameters(), lr=1.0)
        loaded = zs.shard(again, other, stage=stage, **settled(options))
        last = loaded.load(folder / "step-1").extra["schedule"]
        (group,) = other.param_groups
        assert (group["initial_lr"], group["lr"], last) == (1e-2, 5e-3, 1)
        torch.optim.lr_scheduler.LambdaLR(other, lambda epoch: 0.5**epoch, last_epoch=last)
        assert other.param_groups[0]["lr"] == 2.5e-3


@tried(worlds=(1, 2))
def test_the_loss_scale_is_loaded_as_it_was_saved(stage: int, options: dict[str, Any]) -> None:
    """Loading took a step with the loss scale just restored, which doubled it.

    https://github.com/huggingface/accelerate/issues/4289 2026
    """
    with shared_folder() as folder:
        model = models.build(models.Stack)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        zero = zs.shard(model, optimizer, stage=stage, precision="fp16", **settled(options))
        (models.stack_loss(model, 0, rank_of()) * float("inf")).backward()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, range(2))
        zero.save(folder / "step-2")
        again = models.build(models.Stack)
        other = torch.optim.AdamW(again.parameters(), lr=1e-3)
        loaded = zs.shard(again, other, stage=stage, precision="fp16", **settled(options))
        fresh = loaded.loss_scale
        loaded.load(folder / "step-2")
        assert loaded.loss_scale == zero.loss_scale != fresh
        train(model, optimizer, range(2, 4))
        train(again, other, range(2, 4))
        assert_same(values(zero, model), values(loaded, again))


@tried(worlds=(1, 2))
def test_a_loaded_checkpoint_is_used_by_the_next_forward(stage: int, options: dict[str, Any]) -> None:
    """A load filled the weights that are updated, and the first step still computed with random ones.

    https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3397 2026
    """
    with shared_folder() as folder:
        outputs = []
        for value in (1, 2):
            seed(value)
            model = models.Stack()
            zero = zs.shard(model, models.adamw(model), stage=stage, precision="bf16", **settled(options))
            model(models.features(0, rank_of()))
            if value == 1:
                zero.save(folder / "step-0")
            else:
                zero.load(folder / "step-0")
            outputs.append(model(models.features(1, rank_of())).detach())
        assert torch.equal(*outputs)


@tried()
def test_a_checkpoint_of_a_compiled_model_has_its_names(stage: int, options: dict[str, Any]) -> None:
    """Saving a model that was compiled after it was sharded failed on the names of its parameters.

    https://github.com/pytorch/pytorch/issues/119980 2024
    """
    with shared_folder() as folder:
        model = models.build(models.Stack)
        optimizer = models.adamw(model)
        zero = zs.shard(model, optimizer, stage=stage, **settled(options))
        model.compile(backend="eager")
        train(model, optimizer, range(2))
        zero.save(folder / "step-2")
        plain = models.build(models.Stack)
        loaded = zs.shard(plain, stage=0, **settled(options))
        loaded.load(folder / "step-2", model_only=True)
        assert_same(values(zero, model), values(loaded, plain))


class Dropped(nn.Module):
    """A block that is recomputed, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.block = models.Block()
        self.compiled = torch.compile(self.drop, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compiled, x, use_reentrant=False)

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(self.block(x), 0.5, self.training)


@tried()
def test_dropout_in_recomputed_blocks_draws_the_same_numbers(run: Run) -> None:
    """A compiled function with dropout inside a recomputed region failed in the backward.

    https://github.com/pytorch/pytorch/issues/121966 2024
    """
    model = models.build(models.Stack, kind=lambda _: Dropped())
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        seed(step, run.rank)
        run.backward(models.stack_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()


class Renamed(models.Stack):
    """A stack whose state dict has other names than its parameters, and values of its own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {f"mine.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({name[5:]: value for name, value in state_dict.items()}, *args, **kwargs)


@tried(worlds=(1, 2))
def test_a_state_dict_of_its_own_does_not_disturb_a_checkpoint(stage: int, options: dict[str, Any]) -> None:
    """A module with its own `state_dict()` could not be saved or restored when it was sharded.

    https://github.com/Lightning-AI/pytorch-lightning/issues/21124 2025
    """
    with shared_folder() as folder:
        model = models.build(Renamed)
        optimizer = models.adamw(model)
        zero = zs.shard(model, optimizer, stage=stage, **settled(options))
        train(model, optimizer, range(1))
        zero.save(folder / "step-1")
        expected = values(zero, model)
        with zero.gathered():
            own = {name: value.clone() for name, value in model.state_dict().items()}
        train(model, optimizer, range(1, 2))
        zero.load(folder / "step-1")
        assert_same(expected, values(zero, model))
        train(model, optimizer, range(1, 2))
        with zero.gathered(writeback=True):
            model.load_state_dict(own)
        assert_same(expected, values(zero, model))


@tried(worlds=(1, 2))
def test_a_state_dict_of_one_process_is_loaded_into_a_sharded_model(stage: int, options: dict[str, Any]) -> None:
    """A checkpoint in one file could not be loaded into a model that was already sharded.

    https://github.com/Lightning-AI/pytorch-lightning/issues/21357 2025
    """
    source = models.build(models.Stack)
    state = {name: value * 2 for name, value in source.state_dict().items()}
    model = models.build(models.Stack)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zs.shard(model, optimizer, stage=stage, **settled(options))
    train(model, optimizer, range(1))
    with zero.gathered(writeback=True):
        model.load_state_dict(state)
    source.load_state_dict(state)
    x = models.features(0, rank_of())
    assert torch.equal(model(x), source(x))


@tried(worlds=(1, 2, 3))
def test_a_forward_after_training_sees_whole_weights(run: Run) -> None:
    """A forward after the end of training, or after one that was tested, met weights of the wrong shape.

    https://github.com/Lightning-AI/pytorch-lightning/issues/20255 2024
    """
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(2):
        run.backward(models.stack_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        run.record(y=model(models.features(7, run.rank)), of_a_part=model.blocks[0](torch.ones(2, WIDTH)))
    with torch.inference_mode():
        run.record(y=model(models.features(8, run.rank)).clone())
    model.train()
    run.backward(models.stack_loss(model, 2, run.rank))


class Generating(models.GPT):
    """A language model with a method that generates, and looks at a weight before the first forward."""

    def generate(self, ids: Tensor) -> Tensor:
        offset = self.head.weight.sum() * 0
        for _ in range(3):
            ids = torch.cat([ids, (self(ids) + offset)[:, -1:].argmax(-1)], 1)
        return ids


@tried(stages=(3,), here="refused, and right in `with zero.gathered():`: values read outside a forward")
def test_generating_reads_whole_weights(stage: int, options: dict[str, Any]) -> None:
    """Generating with a sharded model read weights without memory.

    https://github.com/huggingface/trl/issues/2796 2025
    """
    model, alone = models.build(Generating), models.build(Generating)
    zero = zs.shard(model, models.adamw(model), stage=stage, **settled(options))
    ids = models.tokens(0, rank_of(), length=4)
    with raises_on_all(RuntimeError, "'embedding.weight'", "with zero.gathered():"), torch.no_grad():
        model.generate(ids)
    with zero.gathered(), torch.no_grad():
        assert torch.equal(model.generate(ids), alone.generate(ids))


class Copied(nn.Module):
    """A layer whose trained copy is used, and whose original is kept frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.original = nn.Linear(5, WIDTH).requires_grad_(False)
        self.copy = nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.copy(x)


@tried(worlds=(2, 3))
def test_a_trained_copy_beside_its_frozen_original_is_saved_whole(stage: int, options: dict[str, Any]) -> None:
    """Copies of layers that adapters train in full were saved as tensors without elements under ZeRO-3.

    https://github.com/huggingface/peft/issues/2450 2025
    """
    model = models.build(models.Stack)
    model.stem = Copied()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    zero = zs.shard(model, optimizer, stage=stage, **settled(options))
    train(model, optimizer, range(1))
    with zero.gathered():
        assert_same(expected, {name: value.clone() for name, value in model.state_dict().items()})


class Wrapping(nn.Module):
    """A model that names layers of its inner model again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.Stack()
        self.head = self.inner.head

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@tried(worlds=(2, 3))
def test_an_inner_state_dict_has_layers_that_are_named_twice(stage: int, options: dict[str, Any]) -> None:
    """The state dict of an inner model lacked the layers to which the outer model gave a second name.

    https://github.com/pytorch/pytorch/issues/126310 2024
    """
    model = models.build(Wrapping)
    expected = {name: value.clone() for name, value in model.inner.state_dict().items()}
    zero = zs.shard(model, stage=stage, **settled(options))
    with zero.gathered():
        assert_same(expected, {name: value.clone() for name, value in model.inner.state_dict().items()})
        assert set(model.state_dict()) == {*(f"inner.{name}" for name in expected), "head.weight", "head.bias"}


@tried(activations="offload")
def test_offloaded_activations_are_not_freed_before_they_are_copied(run: Run) -> None:
    """Activations that were copied to the host on a stream of their own were freed too early: NaN.

    https://github.com/meta-pytorch/torchtune/issues/1867 2024
    """
    model = models.build(models.GPT)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        for micro in range(2):
            loss = models.gpt_loss(model, step, run.rank, micro)
            run.backward(loss)
            run.record(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
