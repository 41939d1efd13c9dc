"""Other libraries' loops, as they are: HF Trainer and Accelerate train a sharded model with a plain one's losses."""

import functools
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

import zeroshard as zs
from tests.oracle import STAGES, WATCHDOG_S, randint, run_cases, seed
from tests.rotation import third

from . import tiny

PLAIN = -1


def windows() -> list[dict[str, torch.Tensor]]:
    """Return a data set of 32 windows of 12 tokens."""
    ids = [randint(64, 12, key=(5, place)) for place in range(32)]
    return [{"input_ids": one, "labels": one} for one in ids]


def made(stage: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return a small Llama and its optimizer, sharded unless `stage` is `PLAIN`."""
    seed(99)
    model = tiny.kinds()["llama"].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if stage != PLAIN:
        zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    return model, optimizer


def train_with_trainer(stage: int, folder: Path) -> list[float]:
    """Train with the Trainer of Transformers; return its log of losses."""
    model, optimizer = made(stage)
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=4, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=windows(), optimizers=(optimizer, None))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_the_trainer_trains_on_one_rank(stage: int, tmp_path: Path) -> None:
    assert train_with_trainer(stage, tmp_path) == train_with_trainer(PLAIN, tmp_path)


def test_the_trainer_trains_on_two_ranks(tmp_path: Path) -> None:
    """DDP is what the Trainer makes of a plain model there."""
    cases = [(stage, tmp_path) for stage in (PLAIN, *third(STAGES[::-1]))]
    plain, *sharded = run_cases(train_with_trainer, 2, cases).values()
    for found in sharded:
        assert found == plain


def train_with_accelerate(stage: int, prepares_model: bool) -> list[float]:
    """Train as Accelerate's documentation does; return the losses. Runs on a rank."""
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = made(stage)
    loader: Any = DataLoader(windows(), batch_size=4)  # type: ignore[arg-type]
    if prepares_model:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:
        optimizer, loader = accelerator.prepare(optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@functools.cache
def accelerated(world: int) -> dict[tuple[Any, ...], list[Any]]:
    """Run all stages on one group of ranks; DDP is what Accelerate makes of a plain model on several ranks."""
    cases = [(PLAIN, True), *((stage, world == 1) for stage in STAGES)]
    if world == 1:  # no launcher: with one Accelerate wraps a model in DDP for one rank, too
        return {case: [train_with_accelerate(*case)] for case in cases}
    return run_cases(train_with_accelerate, world, cases)


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2])
def test_accelerate_trains(world: int, stage: int) -> None:
    """On one rank with the model prepared, too; on two without, as where a release of Accelerate would wrap it."""
    found = accelerated(world)
    for expected, losses in zip(found[PLAIN, True], found[stage, world == 1], strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)


def train_in_mixed_precision(stage: int, how: str, precision: str) -> list[str]:
    """Train two steps by the documented recipe with Accelerate's autocast; return what each linear layer computes in.

    Runs on a rank.
    """
    accelerate.state.AcceleratorState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="no" if how == "plain" else "bf16")
    seed(99)
    model: Any = tiny.kinds()["llama"].build()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zs.shard(model, optimizer, stage=stage, precision=precision, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(windows(), batch_size=4))  # type: ignore[arg-type]
    if how in ("prepared", "evaluated"):
        model = accelerator.prepare(model)
    seen: set[str] = set()
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *given: seen.add(str(given[2].dtype)))
    for batch, _ in zip(loader, range(2), strict=False):
        try:
            with accelerator.autocast() if how == "autocast" else torch.set_grad_enabled(how != "evaluated"):
                loss = model(**batch).loss
        except RuntimeError as error:
            return [str(error)]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerate.state.AcceleratorState._reset_state()
    return sorted(seen)


def test_an_autocast_that_accelerate_does_not_apply_is_refused() -> None:
    refused = [(0, "recipe", "fp32"), (3, "prepared", "fp32"), (1, "prepared", "fp32"), (2, "evaluated", "fp32")]
    trains = {(3, "plain", "fp32"): "float32", (3, "autocast", "fp32"): "bfloat16", (0, "prepared", "bf16"): "bfloat16"}
    found = run_cases(train_in_mixed_precision, 2, [*refused, *trains])
    for case in refused:
        assert all("precision='bf16'" in text for texts in found[case] for text in texts), found[case]
    for case, dtype in trains.items():
        assert found[case] == [[f"torch.{dtype}"]] * 2, case


def test_on_one_rank_accelerate_applies_its_autocast() -> None:
    assert train_in_mixed_precision(3, "prepared", "fp32") == ["torch.bfloat16"]


def wrap(stage: int) -> str:
    """Wrap a sharded model in DDP; return the error. Runs on a rank."""
    model = nn.Linear(4, 4)
    zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    with pytest.raises(RuntimeError) as caught:
        nn.parallel.DistributedDataParallel(model)
    return str(caught.value)


def test_ddp_around_a_sharded_model_is_refused() -> None:
    for texts in run_cases(wrap, 2, third([(stage,) for stage in STAGES[::-1]])).values():
        assert all("accelerator.prepare(optimizer, loader)" in text for text in texts), texts


def test_an_optimizer_after_prepare_is_refused_by_the_order_of_calls() -> None:
    model, optimizer = accelerate.Accelerator(cpu=True).prepare(*made(PLAIN))
    with pytest.raises(ValueError, match=r"AcceleratedOptimizer .* before accelerator\.prepare\(\)"):
        zs.shard(model, optimizer, settings=zs.Settings(elementwise=True))
    assert "_zeroshard" not in vars(next(model.parameters()))
    assert type(next(model.parameters())) is nn.Parameter
