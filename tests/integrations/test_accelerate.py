"""Accelerate with a sharded model: what its own DDP computes, saves and resumes, on two ranks."""

import copy
import os
import pickle
import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import zeroshard as zs
from tests.contract.blocks import examples, run_block
from tests.contract.source import REPOSITORY
from tests.oracle import STAGES, WATCHDOG_S, assert_close, randint, randn, seed
from tests.rotation import third
from zeroshard import accelerate_private
from zeroshard.integrations.accelerate import Accelerator
from zeroshard.testing import RankFailure, run_ranks

TIMEOUT_S = 120
STEPS = 20
TOKENS = 16
Made = dict[str, Any]


class Net(nn.Module):
    """A small model with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, 12)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(12, TOKENS)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.table(ids)))
        return logits


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def pairs(count: int, key: int) -> Any:
    ids = randint(TOKENS, count, 6, key=(key,))
    return [(row[:-1], row[1:]) for row in ids]


def fresh(kind: Any = accelerate.Accelerator, **options: Any) -> Any:
    """Return an Accelerator that knows nothing of earlier ones."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return kind(cpu=True, **options)


def made(stage: int | None, accelerator: Any, *, shuffles: bool = False) -> tuple[Any, ...]:
    """Return a prepared model, optimizer, loaders and schedule, and the handle: None for a model that DDP wraps."""
    seed(99)
    model: Any = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    loader, tests = DataLoader(pairs(160, 5), batch_size=2, shuffle=shuffles), DataLoader(pairs(10, 6), batch_size=2)
    zero = None
    if stage is not None:
        # The only line that a stock loop gets.
        zero = zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    prepared = accelerator.prepare(model, optimizer, loader, tests, schedule)
    assert (prepared[0] is model) == (zero is not None)
    assert accelerator.unwrap_model(prepared[0]) is model
    return *prepared, zero


def values_of(model: Any, zero: zs.Zero | None) -> dict[str, Tensor]:
    if zero is None:
        return {name.removeprefix("module."): one.clone() for name, one in model.state_dict().items()}
    with zero.gathered():
        return {name: one.clone() for name, one in model.state_dict().items()}


def train(accelerator: Any, things: tuple[Any, ...], steps: int, *, max_norm: float = 0.0, skipped: int = 0) -> Made:
    """Train by the loop of Accelerate's documentation, and evaluate every 5 steps; return what it told."""
    model, optimizer, loader, tests, schedule, zero = things
    told: Made = {"loss": [], "norm": [], "eval": [], "rate": []}
    for ids, targets in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
        with accelerator.accumulate(model):
            loss = loss_of(model(ids), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients and max_norm:
                told["norm"].append(accelerator.clip_grad_norm_(model.parameters(), max_norm).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        told["loss"].append(loss.item())
        told["rate"].append(schedule.get_last_lr())
        if len(told["loss"]) % 10 == 0:
            model.eval()
            with torch.no_grad():
                losses = [accelerator.gather_for_metrics(loss_of(model(ids), targets)) for ids, targets in tests]
            told["eval"].append(torch.cat([one.reshape(-1) for one in losses]).mean().item())
            model.train()
        if len(told["loss"]) == 2 * steps:
            break
    return told | {"model": values_of(model, zero)}


def run(stages: list[int | None], max_norm: float) -> list[Made]:
    found = []
    for stage in stages:
        accelerator = fresh(gradient_accumulation_steps=2)
        found.append(train(accelerator, made(stage, accelerator, shuffles=True), STEPS, max_norm=max_norm))
    return found


def assert_equal(one: Made, other: Made) -> None:
    for key in ("loss", "eval", "rate"):
        assert one[key] == other[key], key
    assert_same_values(one["model"], other["model"])


def assert_same_values(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_a_stock_loop_computes_what_ddp_computes() -> None:
    for plain, *sharded in run_ranks(run, 2, [None, *third(STAGES[::-1])], 0.0, timeout_s=TIMEOUT_S):
        assert (len(plain["loss"]), len(plain["eval"])) == (2 * STEPS, 4)
        for found in sharded:
            assert_equal(found, plain)


def train_with_states_from_the_start(kind: str) -> list[Made]:
    """Train by an optimizer whose constructor makes its states, which Accelerate then copies to its device."""
    found = []
    for stage in (None, *STAGES):
        accelerator = fresh(Accelerator if kind == "ours" else accelerate.Accelerator)
        seed(99)
        model: Any = Net()
        optimizer: Any = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
        zero = None if stage is None else zs.shard(model, optimizer, stage=stage)
        model, optimizer = accelerator.prepare(model, optimizer)
        for ids, targets in DataLoader(pairs(6, 5), batch_size=2):
            accelerator.backward(loss_of(model(ids), targets))
            optimizer.step()
            optimizer.zero_grad()
        if zero is not None and stage:
            with pytest.raises(RuntimeError, match=r"gathered\(states=True\)"):  # which the copy alone does without
                optimizer.optimizer.state_dict()
        found.append({"model": values_of(model, zero)})
    return found


def test_states_are_there_before_the_first_step() -> None:
    for kind in ("stock", "ours"):
        for plain, *sharded in run_ranks(train_with_states_from_the_start, 2, kind, timeout_s=TIMEOUT_S):
            for found in sharded:
                assert_same_values(found["model"], plain["model"])


def test_clipping_is_global() -> None:
    for plain, *sharded in run_ranks(run, 2, [None, *third(STAGES[::-1])], 0.3, timeout_s=TIMEOUT_S):
        assert min(plain["norm"]) > 0.3  # clipping takes effect
        for found in sharded:
            assert_close(found, plain, "loss", "norm", "eval")


def count_bytes(stage: int) -> list[int]:
    """Return the bytes that a step of two micro-batches sends for gradients, and those if each is reduced."""
    found = []
    for each in (False, True):
        plugin = accelerate.utils.GradientAccumulationPlugin(num_steps=2, sync_each_batch=each)
        accelerator = fresh(gradient_accumulation_plugin=plugin)
        *_, zero = things = made(stage, accelerator)
        train(accelerator, things, 1)
        found.append(zero.traffic().sent_bytes["reduce"])
    return found


def test_accumulation_reduces_once_a_step() -> None:
    for once, each in run_ranks(count_bytes, 2, 3, timeout_s=TIMEOUT_S):
        assert each == 2 * once > 0


def step_inside_no_sync(stage: int | None) -> torch.Tensor:
    """Sum the last of two backwards whose forwards both ran under `no_sync()`; return the weights after the step."""
    accelerator = fresh(accelerate.Accelerator if stage is None else Accelerator)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = None if stage is None else zs.shard(model, optimizer, stage=stage)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(accelerator.process_index)
    with accelerator.no_sync(model):
        first, second = (model(torch.randn(4, 8)).square().mean() for _ in range(2))
        accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
    optimizer.step()
    with nullcontext() if zero is None else zero.gathered():
        return accelerator.unwrap_model(model).weight.detach().clone()


def test_a_backward_inside_no_sync_may_sum() -> None:
    expected, _ = run_ranks(step_inside_no_sync, 2, None, timeout_s=TIMEOUT_S)
    for stage in third([3, 1, 0]):
        for found in run_ranks(step_inside_no_sync, 2, stage, timeout_s=TIMEOUT_S):
            assert torch.equal(found, expected)


# -- files ------------------------------------------------------------------------------------------------------------


def save(stage: int | None, folder: Path) -> Made:
    """Train 4 steps, save, and train 4 more; return what those told, and what was saved."""
    kind = accelerate.Accelerator if stage is None else Accelerator
    accelerator = fresh(kind, gradient_accumulation_steps=2)
    things = made(stage, accelerator)
    train(accelerator, things, 4)
    accelerator.save_state(str(folder))
    accelerator.save_state(str(folder))  # in the place of the first
    saved = values_of(things[0], things[-1])
    return train(accelerator, things, 4, skipped=8) | {"saved": saved}


def resume(stage: int, folder: Path) -> Made:
    accelerator = fresh(Accelerator, gradient_accumulation_steps=2)
    things = made(stage, accelerator)
    accelerator.load_state(str(folder))
    return train(accelerator, things, 4, skipped=8)


def test_a_loop_resumes_to_the_bit(tmp_path: Path) -> None:
    for stage, other in third([(3, 1), (0, 3), (2, 0)]):
        folder = tmp_path / str(stage)
        expected = run_ranks(save, 2, stage, folder, timeout_s=TIMEOUT_S)
        assert sorted(path.name for path in folder.iterdir()) == [
            "random_states_0.pkl", "random_states_1.pkl", "scheduler.bin", "zeroshard"
        ]  # fmt: skip
        assert [path.name for path in (folder / "zeroshard").iterdir() if path.is_dir()] == ["state"]
        for found, one in zip(run_ranks(resume, 2, other, folder, timeout_s=TIMEOUT_S), expected, strict=True):
            assert_equal(found, one)
        model, *_, zero = made(other, accelerator := fresh(Accelerator))  # in one process
        accelerator.load_state(str(folder))
        assert_same_values(values_of(model, zero), expected[0]["saved"])


def test_a_checkpoint_of_ddp_goes_on_sharded(tmp_path: Path) -> None:
    expected = run_ranks(save, 2, None, tmp_path, timeout_s=TIMEOUT_S)
    for found, one in zip(run_ranks(resume, 2, 3, tmp_path, timeout_s=TIMEOUT_S), expected, strict=True):
        assert_equal(found, one)


def with_two_models(folder: Path) -> None:
    """Save and load two sharded models and a plain one, under names that Accelerate chooses."""
    project = accelerate.utils.ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = fresh(Accelerator, project_config=project)
    models = [nn.Linear(3, 3) for _ in range(3)]
    zeros = [zs.shard(one, torch.optim.Adam(one.parameters())) for one in models[:2]]
    accelerator.prepare(*models)
    for _ in range(3):
        accelerator.save_state()
    before = [values_of(one, zero) for one, zero in zip(models, [*zeros, None], strict=True)]
    for zero, one in zip(zeros, models, strict=False):
        with zero.gathered(writeback=True), torch.no_grad():
            one.weight.zero_()
    nn.init.zeros_(models[2].weight)
    accelerator.load_state()
    for values, one, zero in zip(before, models, [*zeros, None], strict=True):
        assert_same_values(values_of(one, zero), values)


def test_several_models_are_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(with_two_models, 2, tmp_path, timeout_s=TIMEOUT_S)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    assert sorted(path.name for path in (tmp_path / "checkpoints" / "checkpoint_2").iterdir()) == [
        "model.safetensors", "model_1", "random_states_0.pkl", "random_states_1.pkl", "zeroshard"
    ]  # fmt: skip


class Broken:
    """A registered object whose state cannot be saved."""

    def state_dict(self) -> dict[str, Any]:
        raise OSError("the disk is full")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_an_earlier_save_is_not_loaded_with_later_files(tmp_path: Path) -> None:
    accelerator = fresh(Accelerator)
    things = made(3, accelerator)
    accelerator.save_state(str(tmp_path))
    train(accelerator, things, 1)
    accelerator.register_for_checkpointing(Broken())
    with pytest.raises(OSError, match="the disk is full"):
        accelerator.save_state(str(tmp_path))
    accelerator._custom_objects.clear()
    with pytest.raises(ValueError, match="its save did not end"):
        accelerator.load_state(str(tmp_path))


def export(stage: int | None, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save a model for others; return its values, and what `get_state_dict` returned."""
    accelerator = fresh(accelerate.Accelerator if stage is None else Accelerator)
    model, *_, zero = made(stage, accelerator)
    accelerator.save_model(model, str(folder), max_shard_size=2000)
    return values_of(model, zero), {name: one.clone() for name, one in accelerator.get_state_dict(model).items()}


def test_a_model_is_saved_for_others(tmp_path: Path) -> None:
    run_ranks(export, 2, None, tmp_path / "ddp", timeout_s=TIMEOUT_S)
    for stage in third([3, 1]):
        (values, whole), (_, nothing) = run_ranks(export, 2, stage, tmp_path / str(stage), timeout_s=TIMEOUT_S)
        assert_same_values(whole, values)
        assert nothing == {}
        names = sorted(path.name for path in (tmp_path / "ddp").iterdir())
        assert names == sorted(path.name for path in (tmp_path / str(stage)).iterdir())
        assert len(names) > 1  # several files
        for name in names:
            if name.endswith(".safetensors"):
                assert_same_values(load_file(tmp_path / str(stage) / name), load_file(tmp_path / "ddp" / name))


# -- what is refused --------------------------------------------------------------------------------------------------


def with_the_stock_class(folder: Path) -> dict[tuple[int, str], str]:
    """Call what needs whole values on all ranks; return the errors."""
    errors = {}
    for stage in STAGES:
        accelerator = fresh(gradient_accumulation_steps=2)
        model, *_, zero = things = made(stage, accelerator)
        train(accelerator, things, 1)
        calls = {
            "save_state": lambda to, one=accelerator: one.save_state(str(to)),
            "save_model": lambda to, one=accelerator, it=model: one.save_model(it, str(to)),
            "get_state_dict": lambda to, one=accelerator, it=model: one.get_state_dict(it),
        }
        for name, call in calls.items():
            try:
                call(folder / f"{stage} {name}")
            except RuntimeError as error:
                errors[stage, name] = str(error)
        with zero.gathered(states=True):
            accelerator.save_state(str(folder / f"{stage}"))
        with zero.gathered(states=True, writeback=True):
            accelerator.load_state(str(folder / f"{stage}"))
    return errors


def test_the_stock_class_names_what_saves_and_loads(tmp_path: Path) -> None:
    for errors in run_ranks(with_the_stock_class, 2, tmp_path, timeout_s=TIMEOUT_S):
        calls = ("save_state", "save_model", "get_state_dict")
        # Others have all values here.
        assert errors.keys() == {(1, "save_state"), (2, "save_state"), *((3, name) for name in calls)}
        for text in errors.values():
            assert "zero.save(path)" in text
            assert "zero.gathered(" in text


def on_rank_0_alone(name: str, kind: str, folder: Path) -> None:
    accelerator = fresh(Accelerator if kind == "ours" else accelerate.Accelerator)
    model, *_ = things = made(3, accelerator)
    train(accelerator, things, 1)
    if accelerator.is_main_process:
        getattr(accelerator, name)(*([model] if name != "save_state" else []), *[str(folder)] * (name[0] == "s"))
    train(accelerator, things, 1)


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("save_state", "ours", "Accelerator.save_state()"),
        ("save_model", "ours", "Accelerator.get_state_dict()"),
        ("get_state_dict", "ours", "Accelerator.get_state_dict()"),
        ("save_state", "stock", "zero.save(path)"),
        ("save_model", "stock", "zero.save(path)"),
    ],
)
@pytest.mark.product
def test_a_call_of_rank_0_alone_ends_in_a_named_error(name: str, kind: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=re.escape(text)):
        run_ranks(on_rank_0_alone, 2, name, kind, tmp_path, timeout_s=TIMEOUT_S)


def test_an_accelerator_that_shards_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = fresh()
    model = nn.Linear(2, 2)
    for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        monkeypatch.setitem(accelerator.state._shared_state, "distributed_type", DistributedType(kind))
        with pytest.raises(ValueError, match=f"distributed_type {kind}, which shards, too: leave the plugin out"):
            zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert type(model.weight) is nn.Parameter


def evaluate_uncompiled() -> list[str]:
    """Evaluate a model whose Accelerator was asked to compile; return the warnings."""
    accelerator = fresh(dynamo_backend="eager")
    model, *_ = made(3, accelerator)
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(2):
            model(randint(TOKENS, 2, 5, key=(1,)))
    return [str(one.message) for one in told if "dynamo_backend='EAGER'" in str(one.message)]


def test_a_compilation_that_accelerate_does_not_make_is_told() -> None:
    assert [len(one) for one in run_ranks(evaluate_uncompiled, 2)] == [1, 0]
    fresh(dynamo_backend="eager")
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match=re.escape("Call model.compile() after zs.shard()")):
        accelerate_private.warn_if_uncompiled(model)
    model.compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerate_private.warn_if_uncompiled(model)
    fresh()


# -- the mark ---------------------------------------------------------------------------------------------------------


def prepare(name: str, kind: str) -> list[Any]:
    """Prepare a sharded model and a plain one with a name of the mark; return the classes, or the error."""
    accelerate_private.PREPARED = name  # type: ignore[misc]
    accelerator = fresh(Accelerator if kind == "ours" else accelerate.Accelerator)
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    zs.shard(models[0], torch.optim.SGD(models[0].parameters(), lr=0.1))
    try:
        return [type(accelerator.prepare(one)).__name__ for one in models]
    except RuntimeError as error:
        return [str(error)]


def test_the_installed_release_knows_the_mark() -> None:
    """The self-test of a private name; with another one the model would be wrapped, which is refused."""
    mark, other, as_it_is = accelerate_private.PREPARED, "_is_marked_otherwise", ["Linear", "DistributedDataParallel"]
    for world in (2, 1):
        assert run_ranks(prepare, world, mark, "stock") == [as_it_is] * world
        assert run_ranks(prepare, world, other, "ours") == [as_it_is] * world
        for (text,) in run_ranks(prepare, world, other, "stock"):
            assert "DistributedDataParallel around a model of zs.shard()" in text
            assert "`optimizer, loader = accelerator.prepare(optimizer, loader)`" in text


class WithMethod(nn.Linear):
    """A model with a method of the name that Accelerate looks up, and its own way to be copied."""

    def no_sync(self) -> str:
        return "the user's"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "is_copied": True}


def look_at_copies() -> list[list[str]]:
    """Return the marks of a sharded model, of its copies, and of the detached model."""
    accelerator, found = fresh(), []
    for kind in (nn.Linear, WithMethod):
        model = kind(2, 2)
        zero = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
        accelerator.prepare(model)
        own = ("_is_accelerate_prepared", "no_sync", "__getstate__", "is_copied")
        with zero.gathered():
            copies = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        wrapped = type(accelerator.prepare(copies[1])).__name__
        assert model.no_sync() == "the user's" if kind is WithMethod else model.no_sync.__self__ is zero
        marks = [[name for name in own if name in vars(one)] for one in copies]
        zero.detach()
        found += [*marks, [name for name in own if name in vars(model)], [wrapped]]
        assert type(accelerator.prepare(model)) is nn.parallel.DistributedDataParallel
    return found


def test_copies_and_a_detached_model_have_no_mark() -> None:
    mark, end = "_is_accelerate_prepared", [[], ["DistributedDataParallel"]]
    plain = [[mark, "no_sync", "__getstate__"], [], [], *end]
    users = [[mark, "__getstate__"], ["is_copied"], ["is_copied"], *end]
    assert run_ranks(look_at_copies, 2) == [plain + users] * 2


def test_accelerate_prepares_a_model_of_one_process_itself() -> None:
    accelerator = fresh(mixed_precision="bf16")
    model = nn.Linear(2, 2)
    zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "_is_accelerate_prepared" not in vars(model)
    assert accelerator.prepare(model) is model
    assert accelerate_private.AUTOCAST in vars(model)
    assert model(randn(2, 2, key=(1,))).dtype is torch.float32
    fresh()


# -- the page ---------------------------------------------------------------------------------------------------------


def run_page(folder: Path) -> None:
    os.chdir(folder)
    fresh()
    program = examples((REPOSITORY / "docs/trainers.md").read_text())[1]
    run_block(program, "docs/trainers.md")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.product
def test_the_program_of_the_page_runs(world: int, tmp_path: Path) -> None:
    run_ranks(run_page, world, tmp_path, process_group=False, timeout_s=TIMEOUT_S)
