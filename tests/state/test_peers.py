"""Names of other libraries, and habits from them: each is refused with what to write instead."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests import models
from zeroshard import peers


def stack() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = models.build(models.Stack)
    return model, models.adamw(model)


def test_no_name_of_another_library_is_a_name_of_ours() -> None:
    ours = inspect.signature(zs.shard).parameters.keys() | set(zs.Settings.__dataclass_fields__)
    assert not peers.ARGUMENTS.keys() & ours
    assert not peers.METHODS.keys() & set(dir(zs.Zero))
    assert not peers.FUNCTIONS.keys() & set(zs.__all__)


SHARDED: dict[str, tuple[Callable[[nn.Module, torch.optim.Optimizer], Any], str]] = {
    "DeepSpeed's config": (
        lambda model, optimizer: zs.shard(model, optimizer, config={}),  # type: ignore[call-arg]
        r"shard\(\) has no argument config=: settings of DeepSpeed's JSON are arguments here, such as stage=3",
    ),
    "the same by position": (
        lambda model, optimizer: zs.shard(model, optimizer, {}),  # type: ignore[misc]
        r"all else by name, such as stage=3; got a third argument, of type dict\. See docs/coming-from\.md",
    ),
    "the same as the optimizer": (
        lambda model, optimizer: zs.shard(model, {"zero_optimization": {}}),  # type: ignore[arg-type]
        r"got dict\. If these are settings of DeepSpeed: settings of DeepSpeed's JSON are arguments here",
    ),
    "FSDP's strategy": (
        lambda model, optimizer: zs.shard(model, optimizer, sharding_strategy="FULL_SHARD"),  # type: ignore[call-arg]
        r"no argument sharding_strategy=: write stage=3 for FULL_SHARD, stage=2 for SHARD_GRAD_OP",
    ),
    "DDP's search": (
        lambda model, optimizer: zs.shard(model, optimizer, find_unused_parameters=True),  # type: ignore[call-arg]
        r"find_unused_parameters=: parameters that no rank used always keep grad None; leave it out",
    ),
    "an engine's backward": (
        lambda model, optimizer: zs.shard(model, optimizer).backward(model(torch.ones(1, 5)).sum()),
        r"'Zero' object has no attribute 'backward'\. Write loss\.backward\(\), as in plain PyTorch\.",
    ),
    "an engine's step": (
        lambda model, optimizer: zs.shard(model, optimizer).step(),
        r"no attribute 'step'\. Write optimizer\.step\(\), then optimizer\.zero_grad\(\)\.",
    ),
    "a wrapper's module": (
        lambda model, optimizer: zs.shard(model, optimizer).module,
        r"no attribute 'module'\. Write `model`, which zs\.shard\(\) has sharded in place",
    ),
    "DeepSpeed's entry": (lambda *_: zs.initialize, r"no attribute 'initialize'\. Write zero = zs\.shard\(model"),
    "FSDP2's entry": (lambda *_: zs.fully_shard, r"no attribute 'fully_shard'\. Write zero = zs\.shard\(model"),
}


@pytest.mark.parametrize("what", SHARDED)
def test_what_other_libraries_write_is_refused_with_what_to_write(what: str) -> None:
    action, words = SHARDED[what]
    with pytest.raises((TypeError, AttributeError), match=words):
        action(*stack())


@pytest.mark.parametrize(
    ("stage", "meant"),
    [
        (3.0, 3),
        ("3", 3),
        ("zero2", 2),
        ("ZeRO-1", 1),
        ("stage 0", 0),
        ("FULL_SHARD", 3),
        ("ShardingStrategy.SHARD_GRAD_OP", 2),
    ],
)
def test_a_stage_by_another_name_is_refused_with_its_number(stage: Any, meant: int) -> None:
    with pytest.raises(ValueError, match=rf"^stage must be one of .*; got {stage!r}\. Write stage={meant}\.$"):
        zs.shard(*stack(), stage=stage)


@pytest.mark.parametrize("stage", [4, 2.5, "33", "huge"])
def test_what_is_no_stage_is_refused_without_a_guess(stage: Any) -> None:
    with pytest.raises(ValueError, match=rf"; got {stage!r}\.$"):
        zs.shard(*stack(), stage=stage)


def test_a_load_of_nothing_and_of_torch_s_own_file_say_what_to_write(tmp_path: Path) -> None:
    model, optimizer = stack()
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    zero = zs.shard(model, optimizer)
    with pytest.raises(TypeError, match=r"zero\.load\(None\): .*`if \(path := zs\.latest\(folder\)\) is not None"):
        zero.load(zs.latest(tmp_path / "runs"))  # type: ignore[arg-type]
    with pytest.raises(zs.CheckpointError, match=r"it is a file\. .*`with zero\.gathered\(writeback=True\):` and"):
        zero.load(path)
    with zero.gathered(writeback=True):
        model.load_state_dict(torch.load(path))


@pytest.mark.parametrize(
    ("size", "rank"),
    [
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
    ],
)
def test_processes_of_another_launcher_do_not_train_apart(
    size: str, rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(size, "1")
    assert zs.init().world_size == 1
    monkeypatch.setenv(size, "2")
    monkeypatch.setenv(rank, "1")
    with pytest.raises(
        RuntimeError, match=rf"{size} is 2, and WORLD_SIZE is not set: 2 .*\(this is {rank}=1\)\. Start"
    ):
        zs.init()
    monkeypatch.setenv("WORLD_SIZE", "1")  # it trains alone on purpose
    assert zs.init().world_size == 1
