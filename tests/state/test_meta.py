"""A model on the meta device gets the values that it would get in one process, unit by unit, from any source."""

import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, Run, Sharded, assert_matches, assert_same, seed
from zeroshard.testing import run_ranks
from zeroshard.values import weights

WORLDS = (1, 2, 3)


class Rotary(nn.Module):
    """A buffer that no state dict has, computed anew where it is lost."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(7), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table = torch.arange(7.0).cos()


class Picture(nn.Module):
    """Buffers of two dtypes, channels-last weights, a lone parameter's module, attention, a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(6)
        self.blocks = nn.ModuleList(nn.MultiheadAttention(6, 2, batch_first=True) for _ in range(3))
        self.rotary = Rotary()
        self.words = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.convolution(x)).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x, x, x)[0]
        return self.head(x.mean(1) + self.words.weight[0] + self.rotary.table[:6])


class Wide(nn.Module):
    """Blocks of a size worth counting."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(40, 40) for _ in range(depth))
        self.head = nn.Linear(40, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def reset(module: nn.Module) -> None:
    """Initialize a module as its class says."""
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, name):
            getattr(module, name)()


def scaled(module: nn.Module) -> None:
    """Initialize a module's own parameters by another rule than its class; a block scales a weight of its child."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.5)
        module.bias.data.uniform_(-1, 1)
    elif isinstance(module, models.Block):
        module.down.weight.mul_(0.25)
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()


def from_above(module: nn.Module) -> None:
    """Draw some weights of blocks once more from the root, after all others."""
    reset(module)
    if isinstance(module, models.Stack):
        for block in module.blocks[1:]:
            block.up.weight.data.normal_(std=0.1)
            nn.init.normal_(block.norm.bias[:3])


def measured(module: nn.Module) -> None:
    """Scale by what only values tell, and draw with the other generators, too."""
    reset(module)
    if isinstance(module, models.Block):
        module.down.weight.mul_(1 / float(module.down.weight.norm()))
        module.down.bias.fill_(random.random() + np.random.rand())


def on_meta(kind: Callable[[], nn.Module]) -> nn.Module:
    """Build a model without values."""
    with torch.device("meta"):
        return kind()


def seed_all(number: int) -> None:
    """Seed every generator that an initializer may use."""
    seed(number)
    random.seed(number)
    np.random.seed(number)


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copy every parameter and buffer, under each of its names."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone(memory_format=torch.preserve_format) for name, tensor in tensors}


def one_process(kind: Callable[[], nn.Module], initialize: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    """Give a model its values where nothing is sharded."""
    model = kind()
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.zero_()
    seed_all(5)
    with torch.no_grad():
        model.apply(initialize)
    return values(model)


def shard_values(kind: Callable[[], nn.Module], stage: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Shard a model that has no values, with another seed on each rank, and return what rank 0 drew."""
    run = Sharded(stage)
    model = on_meta(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    seed_all(5 + run.rank)
    run.shard(model, optimizer, **options)
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == before
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    with run.gathered():
        return values(model)


def at_all_stages(kind: Callable[[], nn.Module], options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Return the values of a model that had none, stage by stage."""
    return [shard_values(kind, stage, options) for stage in STAGES]


@pytest.mark.product
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("kind", "init_fn"),
    [
        (models.Stack, None),
        (Picture, None),
        (models.Stack, scaled),
        (models.Stack, from_above),
        (models.Stack, measured),
    ],
)
def test_values_are_those_of_one_process(
    kind: type[nn.Module], init_fn: Callable[[nn.Module], None] | None, world: int
) -> None:
    expected = one_process(kind, init_fn or reset)
    options = {"weights": init_fn}
    by_rank = run_ranks(at_all_stages, world, kind, options, timeout_s=TIMEOUT_S, process_group=world > 1)
    for rank, found in enumerate(by_rank):
        for stage, actual in zip(STAGES, found, strict=True):
            assert_same(expected, actual, f"[rank {rank}/{world}] stage {stage}")


@pytest.mark.parametrize("kind", [models.Stack, Wide])
def test_values_are_those_of_the_constructor(kind: type[nn.Module]) -> None:
    seed(5)
    expected = values(kind())
    model = on_meta(kind)
    seed(5)
    zs.shard(model)
    assert_same(expected, values(model))


def train(run: Run, is_meta: bool, **options: Any) -> None:
    """Train with an optimizer that was built before the model had values."""
    if is_meta:
        model = on_meta(models.Stack)
        optimizer = models.adamw(model)
        seed(5)
    else:
        model = models.Stack()
        optimizer = models.adamw(model)
        seed(5)
        model.apply(reset)
    run.shard(model, optimizer, **options)
    for step in range(3):
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)


def train_from_meta(run: Run) -> None:
    train(run, isinstance(run, Sharded))


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2])
def test_an_optimizer_of_the_meta_model_trains_it(world: int) -> None:
    assert_matches(train_from_meta, world)


def test_precision_rounds_the_values() -> None:
    low, _ = run_ranks(at_all_stages, 2, models.Stack, {"precision": "bf16"}, timeout_s=TIMEOUT_S)
    expected = {name: tensor.bfloat16() for name, tensor in one_process(models.Stack, reset).items()}
    assert_same([expected] * len(STAGES), low)


def most_alive(stage: int) -> tuple[int, int, int]:
    """Return bytes of tensors at the worst moment of materialization, of the shards, and of one unit."""
    peak = 0

    def look(module: nn.Module) -> None:
        nonlocal peak
        reset(module)
        peak = max(peak, tensor_bytes())

    model = on_meta(Wide)
    zero = zs.shard(model, stage=stage, weights=look, settings=zs.Settings(shared_memory=False))
    shards = sum(bucket.shard.nbytes for unit in zero.units for bucket in unit.buckets)
    return peak, shards, max(unit.spec.full_bytes for unit in zero.units)


def tensor_bytes() -> int:
    """Return the bytes of the tensors that are alive now."""
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            with torch._C.DisableTorchFunction():  # also for what watches initializers
                if not thing.is_meta:
                    storages[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def test_no_rank_ever_holds_the_whole_model() -> None:
    for peak, shards, unit in run_ranks(most_alive, 3, 3, timeout_s=TIMEOUT_S):
        root = unit // 4  # the head's 82 elements, padded, and what the test itself keeps
        assert peak <= shards + 2 * unit + root, (peak, shards, unit)
        assert 6 * unit > shards + 2 * unit + root, "the model is too small for the test to say anything"


def mixtral() -> nn.Module:
    """Build a model whose experts lie one by one in files, and stacked in the model."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape |= {"vocab_size": 8, "num_hidden_layers": 6, "num_local_experts": 8}
    return transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(**shape))


def most_alive_of_files(folder: str) -> tuple[int, int, int, int]:
    """Return bytes of tensors at the worst moment of reading joined files, of the shards, of one unit and the model."""
    gc.collect()
    gc.freeze()  # what is imported is no tensor of the model
    peak, pieces = 0, weights.Weights._pieces

    def watched(self: weights.Weights, name: str) -> Iterator[tuple[Any, Tensor]]:
        nonlocal peak
        for piece in pieces(self, name):
            peak = max(peak, tensor_bytes())
            yield piece

    weights.SLICE_BYTES, weights.Weights._pieces = 1, watched  # type: ignore[method-assign]
    model = on_meta(mixtral)
    model_bytes = sum(p.nbytes for p in model.parameters())
    zero = zs.shard(model, stage=3, weights=folder, settings=zs.Settings(shared_memory=False))
    shards = sum(bucket.shard.nbytes for unit in zero.units for bucket in unit.buckets)
    return peak, shards, max(unit.spec.full_bytes for unit in zero.units), model_bytes


@pytest.mark.rotates
def test_no_rank_holds_the_whole_model_where_transformers_joins_tensors_of_files(tmp_path: Path) -> None:
    seed(31)
    mixtral().save_pretrained(tmp_path)
    first, *others = run_ranks(most_alive_of_files, 3, str(tmp_path), timeout_s=TIMEOUT_S)
    assert not any(peak for peak, *_ in others), "rank 0 reads"
    peak, shards, unit, model = first
    root = unit // 4
    assert 0 < peak <= shards + 2 * unit + root < model, first


def save(kind: Callable[[], nn.Module], folder: Path) -> dict[str, Tensor]:
    """Write a model's state in two files, and return all its values."""
    seed(31)
    model = kind()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "head.weight"}
    if isinstance(model, models.Stack):
        state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for number in range(2):
        part = {name: tensor for place, (name, tensor) in enumerate(state.items()) if place % 2 == number}
        save_file(part, folder / f"model-{number}.safetensors")
    return values(model)


def shard_loaded(kind: Callable[[], nn.Module], folder: str, slice_bytes: int) -> list[dict[str, Tensor]]:
    """Shard from files at each stage, read in slices of a few rows."""
    weights.SLICE_BYTES = slice_bytes
    return at_all_stages(kind, {"weights": folder})


@pytest.mark.product
@pytest.mark.parametrize("kind", [models.Stack, Picture])
def test_weights_come_from_a_directory(kind: type[nn.Module], tmp_path: Path) -> None:
    expected = save(kind, tmp_path)
    for found in run_ranks(shard_loaded, 2, kind, str(tmp_path), 100, timeout_s=TIMEOUT_S):
        assert_same([expected] * len(STAGES), found)


class Odd(nn.Module):
    """A parameter that nothing initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))


def nothing(module: nn.Module) -> None:
    """Initialize nothing."""


def half(module: nn.Module) -> None:
    """Leave one element of each bias."""
    if isinstance(module, (nn.Linear, nn.LayerNorm)):
        nn.init.ones_(module.weight)
        module.bias[1:].zero_()


def replace(module: nn.Module) -> None:
    """Put a new parameter in the place of the old one."""
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(torch.zeros(2, 2))


def late(module: nn.Module) -> None:
    """Write from the root to a block, but only when it has values."""
    reset(module)
    if isinstance(module, models.Stack) and not module.stem.weight.is_meta:
        module.blocks[0].up.weight.zero_()


def refuse(kind: Callable[[], nn.Module], init_fn: Any) -> list[tuple[str, str, str]]:
    """Shard what cannot be sharded, at each stage; return the errors' types, texts and notes."""
    found = []
    for stage in STAGES:
        try:
            zs.shard(on_meta(kind), stage=stage, weights=init_fn, settings=zs.Settings(watchdog_s=WATCHDOG_S))
        except Exception as error:
            found.append((type(error).__name__, str(error), "".join(getattr(error, "__notes__", []))))
    return found


@pytest.mark.parametrize(
    ("kind", "init_fn", "error", "words"),
    [
        (Odd, None, "ValueError", ["'scale'", "Odd", "weights=function", "weights=directory"]),
        (Odd, nothing, "ValueError", ["'scale' of the model (Odd), (2,)", "weights= did not write"]),
        (Odd, replace, "ValueError", ["'inner' (Linear)", "replaced the parameter 'weight'", "in place"]),
        (models.Stack, half, "ValueError", ["'bias' of 'stem' (Linear), (12,)"]),
        (models.Stack, late, "RuntimeError", ["blocks.0.up.weight", "while the model (Stack) was initialized"]),
    ],
)
def test_what_has_no_values_is_named_on_every_rank(
    kind: type[nn.Module], init_fn: Callable[[nn.Module], None] | None, error: str, words: list[str]
) -> None:
    for found in run_ranks(refuse, 2, kind, init_fn, timeout_s=TIMEOUT_S):
        assert [name for name, _, _ in found] == [error] * len(STAGES)
        for _, text, note in found:
            assert all(word in text + note for word in words), text + note


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("stem.bias"), ["has no 'stem.bias' (12,)"]),
        (lambda state: state.update({"stem.bias": torch.zeros(3)}), ["'stem.bias' has shape (3,)", "(12,)"]),
        (lambda state: state.update({"other": torch.zeros(3)}), ["1 tensor(s)", "'other' first"]),
    ],
)
def test_files_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Tensor]], Any], words: list[str], tmp_path: Path
) -> None:
    state = {name: tensor.clone() for name, tensor in models.Stack().state_dict().items()}
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    model = on_meta(models.Stack)
    with pytest.raises(ValueError) as caught:
        zs.shard(model, weights=tmp_path)
    assert all(word in str(caught.value) for word in words), caught.value
    assert all(p.is_meta for p in model.parameters()), "a refusal must leave the model as it was"


def test_a_directory_without_files_and_a_name_in_two_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*\.safetensors file"):
        zs.shard(on_meta(models.Stack), weights=tmp_path)
    for name in ("a", "b"):
        save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"'x' is in .*a\.safetensors and in .*b\.safetensors"):
        zs.shard(on_meta(models.Stack), weights=tmp_path)


def two_values(state: dict[str, Tensor]) -> None:
    """Give the head of a model that ties it values of its own."""
    state["head.weight"] = state["words.weight"] + 1


def codes(state: dict[str, Tensor]) -> None:
    """Hold a weight in a byte each."""
    state["words.weight"] = state["words.weight"].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (two_values, ["'words.weight' and 'head.weight' are one tensor", "have different values"]),
        (codes, ["'words.weight' is I8 in", "model.safetensors", "torch.float32: quantized values"]),
    ],
)
def test_files_whose_values_are_not_the_models_are_refused(
    change: Callable[[dict[str, Tensor]], None], words: list[str], tmp_path: Path
) -> None:
    state = {
        name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in Picture().state_dict().items()
    }
    save_file(state, tmp_path / "model.safetensors")
    weights.SLICE_BYTES, before = 100, weights.SLICE_BYTES
    try:
        zs.shard(on_meta(Picture), weights=tmp_path)  # both names, with the same values
        change(state)
        save_file(state, tmp_path / "model.safetensors")
        with pytest.raises(ValueError) as caught:
            zs.shard(on_meta(Picture), weights=tmp_path)
    finally:
        weights.SLICE_BYTES = before
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(100)}, tmp_path / "a.safetensors")
    whole = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(whole[:-8])
    with pytest.raises(ValueError, match=r"a\.safetensors cannot be read as safetensors"):
        zs.shard(on_meta(models.Stack), weights=tmp_path)


def test_a_model_with_values_takes_no_source() -> None:
    with pytest.raises(ValueError, match="this one has values"):
        zs.shard(models.Stack(), weights=reset)


def test_a_part_on_the_meta_device_leaves_the_rest_alone() -> None:
    model = models.build(models.Stack)
    expected = values(model)
    with torch.device("meta"):
        model.blocks[1] = models.Block()
    seed(5)
    zs.shard(model)
    seed(5)
    block = models.Block()
    expected.update({f"blocks.1.{name}": tensor for name, tensor in values(block).items()})
    assert_same(expected, values(model))


def test_a_loss_is_finite_at_once() -> None:
    model = on_meta(Picture)
    zs.shard(model)
    assert F.mse_loss(model(torch.ones(2, 3, 5, 5)), torch.zeros(2, 11)).isfinite()


def test_buffers_alone_may_be_on_the_meta_device() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False, device="meta"))
    zs.shard(model)
    assert torch.equal(model[1].running_var, torch.ones(4))
    assert model(torch.ones(2, 3)).isfinite().all()


def test_the_last_piece_of_a_file_may_have_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SLICE_BYTES", 32)  # two rows
    expected = torch.arange(20.0).view(5, 4)
    save_file({"weight": expected}, tmp_path / "a.safetensors")
    found = torch.zeros(5, 4)
    weights.Weights(tmp_path, nn.Linear(4, 5, bias=False)).read("weight", found)
    assert torch.equal(found, expected)
