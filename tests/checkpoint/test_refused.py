"""What cannot be saved or loaded is refused on every rank, before anything changes, and the text says what to do."""

import os
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint.values import decode, encode
from zeroshard.testing import run_ranks

from . import small
from .rig import TIMEOUT_S, Trainer


def same_text(by_rank: list[str]) -> str:
    assert len(set(by_rank)) == 1
    return by_rank[0]


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(zs.CheckpointError) as caught:
        call()
    return str(caught.value)


def save_different_extra(folder: str) -> str:
    trainer = Trainer.make(2)
    return error_of(lambda: trainer.zero.save(f"{folder}/a", {"loss": dist.get_rank()}))


def save_different_paths(folder: str) -> str:
    trainer = Trainer.make(2)
    return error_of(lambda: trainer.zero.save(f"{folder}/a-{dist.get_rank()}"))


def save_different_rates(folder: str) -> str:
    trainer = Trainer.make(2)
    trainer.optimizers[0].param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
    return error_of(lambda: trainer.zero.save(f"{folder}/a"))


def save_different_copies(folder: str) -> str:
    """At stage 0 every rank has all weights; a stray bit on one is a fault that nothing else would show."""
    trainer = Trainer.make(0)
    # Past torch, which counts the changes that it makes itself.
    gain = trainer.model.gain.detach().numpy()
    gain += dist.get_rank()
    return error_of(lambda: trainer.zero.save(f"{folder}/a"))


def save_different_replicas(folder: str) -> str:
    """Ranks 1 and 3 keep the same shards, and rank 3 has lost something of its."""
    trainer = Trainer.make(3, mesh=2)
    trainer.train(0, 1)
    for state in trainer.optimizers[0].state.values():
        state["exp_avg"].add_(dist.get_rank() // 3)
    return error_of(lambda: trainer.zero.save(f"{folder}/a"))


def save_an_object(folder: str) -> str:
    trainer = Trainer.make(1)
    extra = {"model": trainer.model} if dist.get_rank() else {}
    return error_of(lambda: trainer.zero.save(f"{folder}/a", extra))


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (save_different_extra, "extra, or the optimizers' hyper-parameters or step counters, differ between ranks"),
        (save_different_paths, "ranks were given different paths, steps or options"),
        (save_different_paths, "\n  rank 1: path='"),
        (save_different_rates, "extra, or the optimizers' hyper-parameters or step counters, differ between ranks"),
        (save_different_copies, "ranks hold different copies of parameters or states"),
        (save_different_replicas, "made the same steps: rank 3 differs from rank 1"),
        (
            save_an_object,
            "failed on rank 1: extra['model'] is a tests.checkpoint.rig.Zoo, which cannot be saved without",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ranks_that_differ_save_nothing(target: Callable[[str], str], text: str, tmp_path: Path) -> None:
    world_size = 4 if target is save_different_replicas else 2
    found = same_text(run_ranks(target, world_size, str(tmp_path), timeout_s=TIMEOUT_S))
    assert text in found
    assert "Nothing was committed" in found
    assert list(tmp_path.iterdir()) == []


def load_different(folder: str) -> str:
    """Ranks see different folders under one name, as without a shared file system."""
    one = Trainer.make(2)
    for name in ("0", "1"):
        one.train(0, 1)
        one.zero.save(f"{folder}/{name}/step-1")
    os.chdir(f"{folder}/{dist.get_rank()}")
    return error_of(lambda: one.zero.load("step-1"))


def test_ranks_that_read_different_checkpoints(tmp_path: Path) -> None:
    by_rank = run_ranks(load_different, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    assert all("ranks read different checkpoints" in text for text in by_rank)


class Other(nn.Linear):
    """A linear layer with something else about it."""

    def __init__(self, shape: tuple[int, int] = (2, 1), more: bool = False) -> None:
        super().__init__(*shape)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        if more:
            self.more = nn.Parameter(torch.ones(2))


def sharded(model: nn.Module, *optimizers: torch.optim.Optimizer) -> small.Small:
    made = small.Small.__new__(small.Small)
    made.model, made.optimizer = model, optimizers[0]
    made.zero = zs.shard(model, list(optimizers), stage=2)
    return made


def others() -> dict[str, tuple[small.Small, str]]:
    """Return models and optimizers that the checkpoint is not of, with what is said about each."""
    model, more, wide = Other(), Other(more=True), Other((3, 1))
    half, halves = Other(), Other()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = [{"params": [halves.weight]}, {"params": [halves.bias]}]
    tied = Other()
    tied.again = nn.Linear(2, 1)
    tied.again.weight, tied.again.bias = tied.weight, tied.bias
    return {
        "optimizer": (sharded(model, sgd), "the optimizers are ['AdamW'] in the checkpoint and ['SGD'] here"),
        "parameter": (sharded(more, torch.optim.AdamW(more.parameters())), "'more' is in the model and not in"),
        "shape": (sharded(wide, torch.optim.AdamW(wide.parameters())), "shape (1, 3) in the model and (1, 2) in the"),
        "groups": (sharded(halves, torch.optim.AdamW(groups)), "group 0 of optimizer 0 holds other parameters"),
        "dtype": (
            sharded(half.bfloat16(), torch.optim.AdamW(half.parameters())),
            "is BF16 in the model and F32 in the checkpoint",
        ),
        "ties": (sharded(tied, torch.optim.AdamW(tied.parameters())), "is tied to 'bias' in only one of them"),
    }


MATRICES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "zs.optim": lambda p: zs.optim.Adafactor(p, lr=0.02),
    "torch": lambda p: torch.optim.Adafactor(p, lr=0.02),
    "transformers": lambda p: transformers.optimization.Adafactor(
        p, lr=0.02, relative_step=False, scale_parameter=False
    ),
}


@pytest.mark.parametrize("saved", MATRICES)
def test_another_class_of_the_same_name_is_refused(saved: str, tmp_path: Path) -> None:
    """What torch and zeroshard call Adafactor is one optimizer; that of Transformers has other states."""

    def trained(kind: str) -> tuple[zs.Zero, Callable[[], list[float]]]:
        model = nn.Linear(6, 4, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.arange(24.0).view(4, 6) / 24)
        optimizer = MATRICES[kind](list(model.parameters()))

        def step() -> list[float]:
            model(torch.ones(2, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return model.weight.flatten().tolist()

        return zs.shard(model, optimizer, stage=0), step

    zero, step = trained(saved)
    step()
    path = zero.save(tmp_path / "step-1")
    expected = step()
    for kind in MATRICES:
        other, go_on = trained(kind)
        if (kind == "transformers") == (saved == "transformers"):
            other.load(path)
            assert go_on() == expected
        else:
            found = error_of(partial(other.load, path))
            assert "optimizer 0 is another Adafactor than here: its options have '" in found
            assert "Nothing in memory was changed" in found


def test_options_of_a_scheduler_and_of_a_newer_version_are_no_other_class(tmp_path: Path) -> None:
    trainer, other = small.Small(), small.Small()
    torch.optim.lr_scheduler.OneCycleLR(trainer.optimizer, max_lr=0.5, total_steps=9)
    (group,) = trainer.optimizer.param_groups
    del group["decoupled_weight_decay"]  # as torch had it before
    assert {"initial_lr", "max_lr", "base_momentum"} <= group.keys()
    other.zero.load(trainer.zero.save(tmp_path / "step-1"))
    assert other.optimizer.param_groups[0]["max_lr"] == 0.5


@pytest.mark.parametrize("what", ["optimizer", "parameter", "shape", "groups", "dtype", "ties"])
def test_another_model_is_refused(what: str, tmp_path: Path) -> None:
    path = small.write(tmp_path)
    trainer, text = others()[what]
    before = trainer.model_bytes() if hasattr(trainer, "model_bytes") else None
    found = error_of(lambda: trainer.zero.load(path))
    assert text in found
    assert str(path) in found
    assert "Nothing in memory was changed." in found
    assert before is None


def test_calls_out_of_order(tmp_path: Path) -> None:
    trainer = small.Small().train(1)
    with trainer.zero.gathered():
        with pytest.raises(RuntimeError, match=r"zero.save\(\) under gathered\(\)"):
            trainer.zero.save(tmp_path / "a")
        with pytest.raises(RuntimeError, match=r"zero.wait\(\) under gathered\(\)"):
            trainer.zero.wait()
        with pytest.raises(RuntimeError, match=r"zero.load\(\) under gathered\(\)"):
            trainer.zero.load(tmp_path / "a")
    found = error_of(lambda: trainer.zero.load(tmp_path / "a"))
    assert f"{tmp_path / 'a'}: is not a checkpoint: the folder does not exist" in found
    (tmp_path / "a").mkdir()
    assert "so it was never finished" in error_of(lambda: trainer.zero.load(tmp_path / "a"))
    for name, loaded, clue in (
        ("runs/step-7/manifest.json", "runs", "name one of the 1 checkpoints that it has, such as step-7"),
        ("fsdp2/.metadata", "fsdp2", "`zeroshard checkpoint import` reads"),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
        assert clue in error_of(partial(trainer.zero.load, tmp_path / loaded))
    assert "does not begin with a dot" in error_of(lambda: trainer.zero.save(tmp_path / ".a"))
    assert "keep must be at least 2" in error_of(lambda: trainer.zero.save(tmp_path / "a-1", keep=1))


@pytest.mark.parametrize("wrong", [3, b"runs"])
def test_what_is_no_path_is_refused_by_name(wrong: Any) -> None:
    zero = small.Small().zero
    calls: dict[str, Callable[[Any], Any]] = {
        "zero.save(path)": zero.save,
        "zero.load(path)": zero.load,
        "zs.latest(folder)": zs.latest,
        "zs.list_checkpoints(folder)": zs.list_checkpoints,
    }
    for what, call in calls.items():
        with pytest.raises(TypeError, match=re.escape(f"{what} takes a path, ") + f".*; got {wrong!r}"):
            call(wrong)


@pytest.mark.parametrize("extra", [3, 0, [("epoch", 1)]])
def test_extra_that_is_no_mapping_is_refused_by_name(extra: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=re.escape(f"such as {{'epoch': 2}}; got {extra}.")):
        small.Small().zero.save(tmp_path / "a", extra)
    assert list(tmp_path.iterdir()) == []


VALUES = [
    None,
    True,
    -3,
    2.5,
    float("inf"),
    "text",
    (1, [2, (3,)]),
    {"a": {1: "int", 2.5: "float", False: None}},
    Counter({3: 2, "a": 1}),
    {"$tuple": "a key like a word"},
    {},
    [],
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_come_back_as_they_were(value: Any) -> None:
    import json

    found = decode(json.loads(json.dumps(encode(value, "extra"))), "extra.json")
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors_come_back_as_they_were(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.arange(6)[: max(1, torch.Size(shape).numel())][: torch.Size(shape).numel()].to(dtype).reshape(shape)
    found = decode(encode({"t": value}, "extra"), "extra.json")["t"]
    assert (found.dtype, found.shape) == (dtype, torch.Size(shape))
    assert torch.equal(found, value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, {2}]}, r"extra\['a'\]\[1\] is a builtins.set"),
        ({"a": {(1, 2): 3}}, r"extra\['a'\] has the key \(1, 2\)"),
        ({"a": torch.zeros(1 << 20)}, "is a tensor of 4194304 bytes; at most 1048576"),
        ({"a": torch.zeros(1, dtype=torch.complex128)}, "torch.complex128, which safetensors cannot hold"),
        ({"a": float}, "is a builtins.type"),
    ],
)
def test_what_is_no_value_is_named(value: Any, text: str) -> None:
    with pytest.raises(zs.CheckpointError, match=text):
        encode(value, "extra")


def test_deep_values_are_refused() -> None:
    value: Any = 1
    for _ in range(100):
        value = [value]
    with pytest.raises(zs.CheckpointError, match="nested deeper than 64"):
        encode(value, "extra")


def test_schedulers_are_restored_from_extra(tmp_path: Path) -> None:
    rates = []
    for is_resumed in (False, True):
        trainer = small.Small()
        scheduler = torch.optim.lr_scheduler.MultiStepLR(trainer.optimizer, [2, 4], gamma=0.5)
        for step in range(6):
            if is_resumed and step == 3:
                path = trainer.zero.save(tmp_path / "step-3", {"scheduler": scheduler.state_dict()})
                trainer = small.Small(1)
                scheduler = torch.optim.lr_scheduler.MultiStepLR(trainer.optimizer, [2, 4], gamma=0.5)
                scheduler.load_state_dict(trainer.zero.load(path).extra["scheduler"])
            trainer.train(1)
            scheduler.step()
            rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates[:6] == rates[6:]
