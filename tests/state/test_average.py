"""An average over sharded masters equals torch's own on one process, and the parameters are as before afterwards."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, Run, Sharded, assert_matches, assert_same
from zeroshard.testing import RankFailure, run_ranks

DECAY = 0.9


def frozen_stack() -> nn.Module:
    model = models.build(models.Stack)
    model.blocks[1].norm.requires_grad_(False)
    return model


def averaged_training(run: Run) -> None:
    """Average after each step; look at losses and parameters of the average in the middle and at the end."""
    model = frozen_stack()
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    average: Any = None
    if isinstance(run, Sharded):
        average = run.zeros[-1].ema(DECAY)
    else:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        average.update_parameters(model)
    for step in range(4):
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(run, Sharded):
            average.update()
            with average.swapped():
                loss = models.stack_loss(model, 50 + step, run.rank)
                with run.gathered():
                    run.record(loss=loss, parameters=dict(model.named_parameters()))
        else:
            average.update_parameters(model)
            other = average.module
            run.record(loss=models.stack_loss(other, 50 + step, run.rank), parameters=dict(other.named_parameters()))


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_average_is_that_of_one_process(world: int) -> None:
    assert_matches(averaged_training, world)


def cycle(stage: int, precision: str) -> list[dict[str, Tensor]]:
    """Return the parameters before, inside and after a swap, and after one that an exception ended."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, stage=stage, precision=precision, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    rank = zero.mesh.rank
    average = zero.ema(0.5)
    seen = []

    def look() -> None:
        with zero.gathered():
            seen.append({name: p.detach().clone() for name, p in model.named_parameters()})

    def step(number: int) -> None:
        models.stack_loss(model, number, rank).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(2):
        step(number)
        average.update()
    look()
    with average.swapped():
        look()
    look()
    with contextlib.suppress(ZeroDivisionError), average.swapped():
        1 / 0  # noqa: B018
    average.restore()
    look()
    with average.swapped():
        look()
    step(2)
    look()
    return seen


def without_swaps(stage: int, precision: str) -> list[dict[str, Tensor]]:
    """Return the parameters after two and after three steps."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, stage=stage, precision=precision, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    seen = []
    for number in range(3):
        models.stack_loss(model, number, zero.mesh.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        with zero.gathered():
            seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return seen[1:]


def both_at_all_stages(precision: str) -> list[tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]]:
    """Return, by stage, the parameters of training with and without swaps."""
    return [(cycle(stage, precision), without_swaps(stage, precision)) for stage in STAGES]


@pytest.mark.product
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_are_what_they_were(precision: str) -> None:
    for by_stage in run_ranks(both_at_all_stages, 2, precision, timeout_s=TIMEOUT_S):
        for (before, inside, after, restored, again, trained), (second, third) in by_stage:
            assert_same([second] * 3, [before, after, restored])
            assert_same(inside, again)
            assert any(not torch.equal(inside[name], before[name]) for name in before)
            assert_same(third, trained)


def counted(stage: int) -> tuple[int, dict[str, int], dict[str, int]]:
    model = models.build(models.Stack)
    zero = zs.shard(model, models.adamw(model), stage=stage)
    without = zero.memory().resident_bytes
    average = zero.ema(DECAY)
    sent = dict(zero.traffic().sent_bytes)
    average.update()
    assert dict(zero.traffic().sent_bytes) == sent, "update() must not communicate"
    counts = zero.memory().resident_bytes
    nbytes = average.nbytes
    del average
    assert zero.memory().resident_bytes == without
    return nbytes, without, counts


def counted_at_all_stages() -> list[tuple[int, dict[str, int], dict[str, int]]]:
    return [counted(stage) for stage in STAGES]


def test_the_average_is_counted_and_sharded_like_states() -> None:
    numel = sum(p.numel() for p in models.Stack().parameters())
    for stage, by_rank in enumerate(zip(*run_ranks(counted_at_all_stages, 2, timeout_s=TIMEOUT_S), strict=True)):
        for nbytes, without, counts in by_rank:
            assert counts == {**without, "states": without["states"] + nbytes}
        assert sum(nbytes for nbytes, _, _ in by_rank) == 4 * numel * (2 if stage == 0 else 1)


def change_inside() -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, stage=2, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    with zero.ema(DECAY).swapped():
        models.stack_loss(model, 0, 0).backward()
        optimizer.step()


def test_a_step_inside_is_an_error() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(change_inside, 2, timeout_s=TIMEOUT_S)
    for error in caught.value.errors.values():
        assert "changed inside swapped()" in error.message


@pytest.mark.parametrize("model_only", [False, True])
def test_a_load_inside_is_refused_before_it_reads(model_only: bool, tmp_path: Path) -> None:
    model = models.build(models.Stack)
    zero = zs.shard(model, optimizer := models.adamw(model), stage=3)
    average = zero.ema(DECAY)
    models.stack_loss(model, 0, 0).backward()
    optimizer.step()
    average.update()
    path = zero.save(tmp_path / "step-1")
    with average.swapped():
        with zero.gathered():
            expected = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(RuntimeError, match=r"zero\.load\(\) inside swapped\(\) of an average.*leave the context"):
            zero.load(path, model_only=model_only)
        with zero.gathered():
            assert_same(expected, {name: p.detach().clone() for name, p in model.named_parameters()})
    zero.load(path, model_only=model_only)


def test_what_is_out_of_place_is_refused() -> None:
    model = models.build(models.Stack)
    zero = zs.shard(model, models.adamw(model))
    for decay in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="decay must be in"):
            zero.ema(decay)
    average = zero.ema(DECAY)
    with average.swapped():
        with pytest.raises(RuntimeError, match="parameters are already the average"), average.swapped():
            pass
        with pytest.raises(RuntimeError, match=r"update\(\) inside swapped\(\)"):
            average.update()
    with zero.gathered(), pytest.raises(RuntimeError, match=r"inside gathered\(\)"), average.swapped():
        pass


@pytest.mark.parametrize("is_frozen", [True, False])
def test_what_is_trained_later_is_averaged_or_refused(is_frozen: bool) -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer)
    model.blocks[0].requires_grad_(not is_frozen)
    average = zero.ema(DECAY)
    model.blocks[0].requires_grad_(False)
    average.update()
    model.blocks[0].requires_grad_(True)
    with zero.gathered():
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
    models.stack_loss(model, 0, 0).backward()
    optimizer.step()
    if is_frozen:
        with pytest.raises(RuntimeError, match=r"'blocks\.0\..*' was trained; zero\.ema\(\) left it out as frozen"):
            average.update()
        return
    with zero.gathered():
        expected = {name: before[name].lerp(p.detach(), 1 - DECAY) for name, p in model.named_parameters()}
    average.update()
    with average.swapped(), zero.gathered():
        assert_same(expected, {name: p.detach().clone() for name, p in model.named_parameters()})


def thawed(stage: int, is_used: bool) -> list[str]:
    """Thaw a block for the second of three steps, and use it there, or not; return what the average says then."""
    model = models.build(models.Stack)
    optimizer, found = models.adamw(model), list[str]()
    block = model.blocks[0].requires_grad_(False)
    zero = zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    average = zero.ema(DECAY)
    for number in range(3):
        block.requires_grad_(is_used and number == 1)
        models.stack_loss(model, number, zero.mesh.rank).backward()
        block.requires_grad_(number == 1)
        optimizer.step()
        optimizer.zero_grad()
    block.requires_grad_(False)
    with zero.gathered(writeback=True):
        block.norm.weight.data.mul_(2)  # changed, but not trained
    for use in (average.update, average.swapped().__enter__):
        try:
            use()
            found.append("")
        except RuntimeError as error:
            found.append(str(error))
    return found


def thawed_at_all_stages() -> list[tuple[list[str], list[str]]]:
    return [(thawed(stage, True), thawed(stage, False)) for stage in STAGES]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_trained_between_updates_and_is_frozen_again_is_refused(ranks: int) -> None:
    for by_stage in run_ranks(thawed_at_all_stages, ranks, timeout_s=TIMEOUT_S):
        for used, unused in by_stage:
            for text in used:
                assert "'blocks.0.norm.weight'" in text and "was trained; zero.ema() left it out as frozen" in text
            assert unused == ["", ""]


def average_apart() -> list[str]:
    """Make averages that differ between ranks: in their decay, then in how often they were updated."""
    texts = []
    for decays, updates in (((0.9, 0.99), (0, 0)), ((0.9, 0.9), (1, 2))):
        model = models.build(models.Stack)
        zero = zs.shard(model, models.adamw(model), stage=2, settings=zs.Settings(watchdog_s=WATCHDOG_S))
        with pytest.raises(zs.RankMismatchError) as caught:
            average = zero.ema(decays[zero.mesh.rank])
            for _ in range(updates[zero.mesh.rank]):
                average.update()
            with average.swapped():
                pass
        texts.append(str(caught.value))
    return texts


def test_averages_that_differ_between_ranks_are_named() -> None:
    for decay, updates in run_ranks(average_apart, 2, timeout_s=TIMEOUT_S):
        assert "rank 0: ema(decay=0.9)" in decay and "rank 1: ema(decay=0.99)" in decay
        assert "rank 0: swapped() after 1 update(s)" in updates and "rank 1: swapped() after 2 update(s)" in updates
