"""Islands beside other features: clipping, loss scales, accumulation, averages, offload, whole matrices, evaluation.

Islands that get equal data train as one of them does alone, but for the rounding of an exchange; islands that get
different data are equal after an exchange, and only then.
"""

import tempfile
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from tests.oracle import assert_same, randn
from tests.outer.plain import mesh_of, whole
from zeroshard.testing import run_ranks

TIMEOUT_S = 120.0
STEPS, EVERY = 6, 2


def batch(step: int, island: int, place: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a rank."""
    return randn(4, 5, key=(step, island, place, micro)), randn(4, 3, key=(step, island, place, micro, 1))


def loss_of(model: nn.Module, *key: int) -> Tensor:
    """Return the loss of a batch."""
    inputs, targets = batch(*key)
    return (model(inputs) - targets).square().mean()


def plainly(zero: zs.Zero, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, island: int) -> list[float]:
    """Make a step."""
    loss_of(model, step, island, dist.get_rank() % 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    return []


def clipped(zero: zs.Zero, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, island: int) -> list[float]:
    """Make a step with clipped gradients; norms are those of an island."""
    loss_of(model, step, island, dist.get_rank() % 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return [norm.item(), zero.grad_norm().item()]


def accumulated(
    zero: zs.Zero, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, island: int
) -> list[float]:
    """Make a step of two micro-batches."""
    with zero.no_sync():
        loss_of(model, step, island, dist.get_rank() % 2).backward()
    loss_of(model, step, island, dist.get_rank() % 2, 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    return []


def evaluated(zero: zs.Zero, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, island: int) -> list[float]:
    """Make a step, and evaluate on one rank of each island."""
    plainly(zero, model, optimizer, step, island)
    found = []
    for _ in zero.on_first_rank():
        with torch.no_grad():
            found.append(loss_of(model, 99, island, 0).item())
    return found


Step = Callable[[zs.Zero, nn.Module, torch.optim.Optimizer, int, int], list[float]]
Made = Callable[[nn.Module], torch.optim.Optimizer]


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer of whole matrices."""
    return zs.optim.Adafactor(model.parameters(), lr=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make the usual optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


CASES: MappingProxyType[str, tuple[Step, Made, dict[str, Any]]] = MappingProxyType(
    {
        "clipped": (clipped, adamw, {"stage": 3}),
        "clipped at stage 0": (clipped, adamw, {"stage": 0}),
        "fp16": (plainly, adamw, {"stage": 2, "precision": "fp16"}),
        "bf16": (plainly, adamw, {"stage": 3, "precision": "bf16"}),
        "accumulated": (accumulated, adamw, {"stage": 1}),
        "evaluated": (evaluated, adamw, {"stage": 3}),
        "states on the host": (plainly, adamw, {"stage": 2, "offload": "host"}),
        "parameters on the host": (plainly, adamw, {"stage": 3, "offload": zs.Offload(states=1.0, parameters=1.0)}),
        "in files": (plainly, adamw, {"stage": 3, "offload": "folder"}),
        "whole matrices": (plainly, adafactor, {"stage": 3}),
        "whole until the step": (accumulated, adamw, {"stage": 3, "parameters": "until-step"}),
    }
)


def train(names: list[str], as_islands: bool, same_data: bool) -> list[Any]:
    """Train each case on islands, or on one alone; return what each step, an average and the last exchange leave."""
    found = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            found.append(one_case(name, as_islands, same_data, folder))
    return found


def one_case(name: str, as_islands: bool, same_data: bool, folder: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Train one case."""
    step_of, make, options = CASES[name]
    island = 0 if same_data else dist.get_rank() // 2
    model = models.build(models.Stack)
    optimizer = make(model)
    if options.get("offload") == "folder":
        options = {**options, "offload": folder}
    mesh = mesh_of(2)
    outer = zs.Outer(every=EVERY) if as_islands else None
    zero = zs.shard(model, optimizer, mesh=mesh if as_islands else mesh["shard"], outer=outer, **options)
    average, found = zero.ema(0.5), []
    for step in range(STEPS):
        numbers = step_of(zero, model, optimizer, step, island)
        average.update()
        found.append((numbers, whole(zero, model)))
    if as_islands:
        zero.check_copies()
    with average.swapped():
        found.append(([], whole(zero, model)))
    return found


@pytest.mark.rotates
@pytest.mark.parametrize("half", [0, 1])
def test_islands_with_equal_data_train_as_one(half: int) -> None:
    names = [*CASES][half::2]
    expected, actual = (run_ranks(train, 4, names, is_split, True, timeout_s=TIMEOUT_S) for is_split in (False, True))
    for rank in range(4):
        for name, one, other in zip(names, expected[rank], actual[rank], strict=True):
            for step, ((numbers, values), (these, now)) in enumerate(zip(one, other, strict=True)):
                assert numbers == pytest.approx(these, rel=1e-3, abs=1e-6), f"{name}, step {step}, rank {rank}"
                for key, value in values.items():
                    off = (value.float() - now[key].float()).abs().max().item()
                    assert off <= (2e-2 if name == "bf16" else 1e-5), f"{name}, step {step}, {key}, rank {rank}: {off}"


@pytest.mark.rotates
def test_islands_with_other_data_are_equal_after_an_exchange() -> None:
    names = [*CASES][::3]
    by_rank = run_ranks(train, 4, names, True, False, timeout_s=TIMEOUT_S)
    for place, name in enumerate(names):
        for step in range(STEPS):
            values = [by_rank[rank][place][step][1] for rank in (0, 2)]
            is_equal = all(torch.equal(values[0][key], values[1][key]) for key in values[0])
            assert is_equal is ((step + 1) % EVERY == 0), f"{name}, step {step}"


def overflowed() -> list[tuple[float, bool, int]]:
    """Train with a loss scale; the gradients of one rank of island 1 overflow at step 2."""
    model = models.build(models.Stack)
    optimizer = adamw(model)
    zero = zs.shard(model, optimizer, stage=2, precision="fp16", mesh=mesh_of(2), outer=zs.Outer(every=4))
    assert zero._engine.loss_scale is not None and zero._islands is not None
    zero._engine.loss_scale.value = 256.0  # the first one overflows
    found = []
    for step in range(4):
        before = whole(zero, model)
        loss = loss_of(model, step, dist.get_rank(), 0)
        (loss * (torch.inf if (step, dist.get_rank()) == (2, 3) else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = whole(zero, model)
        has_moved = any(not torch.equal(before[key], after[key]) for key in before)
        found.append((zero.loss_scale or 0.0, has_moved, sum(zero._islands.comm.sent_bytes.values())))
    zero.check_copies()
    return found


def test_an_overflow_stays_on_its_island() -> None:
    by_rank = run_ranks(overflowed, 4, timeout_s=TIMEOUT_S)
    for rank, steps in enumerate(by_rank):
        scales, moves, sent = zip(*steps, strict=True)
        is_skipped = rank >= 2
        assert scales[2] == scales[1] / (2 if is_skipped else 1), rank
        assert moves == (True, True, not is_skipped, True), rank
        assert sent[0] == sent[1] == sent[2] < sent[3], rank


def buffers() -> dict[str, list[Tensor]]:
    """Train a batch norm on islands; return its statistics before and after."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    nn.init.normal_(model[1].running_mean, std=float(dist.get_rank() + 1))
    zero = zs.shard(model, optimizer := adamw(model), stage=1, mesh=mesh_of(2), outer=zs.Outer(every=1))
    found = {"start": [one.clone() for one in model.buffers()]}
    loss_of(model, 0, dist.get_rank(), 0).backward()
    optimizer.step()
    zero.finish()
    return found | {"end": [one.clone() for one in model.buffers()]}


def test_buffers_begin_alike_and_stay_each_island_s_own() -> None:
    by_rank = run_ranks(buffers, 4, timeout_s=TIMEOUT_S)
    assert_same([by_rank[0]["start"]] * 4, [one["start"] for one in by_rank])
    assert_same(by_rank[0]["end"], by_rank[1]["end"])
    assert not torch.equal(by_rank[0]["end"][0], by_rank[2]["end"][0])
