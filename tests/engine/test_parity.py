"""The engine computes what data parallelism computes: against DDP, one process, between stages, between runs."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs
from tests import models
from tests.oracle import (
    STAGES,
    TIMEOUT_S,
    WATCHDOG_S,
    WORLDS,
    Case,
    Run,
    assert_matches,
    assert_same,
    ddp_run,
    engine_run,
    single_run,
)
from tools.emulated import gpu
from tools.settled import settled
from zeroshard.testing import run_ranks


def build_stack() -> nn.Module:
    return models.build(models.Stack)


def build_stack64() -> nn.Module:
    return models.build(models.Stack).double()


def build_gpt() -> nn.Module:
    return models.build(models.GPT)


CASES = {
    "stack-adamw": Case(build_stack, models.stack_loss, models.adamw),
    "stack-sgd": Case(build_stack, models.stack_loss, models.sgd),
    "stack-adamw-fp64": Case(build_stack64, models.stack_loss, models.adamw),
    "gpt-adamw": Case(build_gpt, models.gpt_loss, models.adamw),
    "gpt-adamw-fused": Case(build_gpt, models.gpt_loss, functools.partial(models.adamw, fused=True)),
    "gpt-sgd": Case(build_gpt, models.gpt_loss, models.sgd),
}


DEVICES = ("cpu", "gpu")
"""The second one in emulation: NCCL's code, on streams that are behind."""


def case_of(name: str, device: str) -> Case:
    """Return a case with the kernels of a device: fused ones, which the engine chooses there."""
    case = CASES[name]
    return replace(case, optimizer=functools.partial(case.optimizer, fused=True)) if device == "gpu" else case


def train_engine(name: str, device: str = "cpu") -> dict[int, Any]:
    results = {}
    for stage in STAGES:
        with gpu(stage) if device == "gpu" else contextlib.nullcontext():
            results[stage] = engine_run(case_of(name, device), stage)
    return results


def train_both(name: str, device: str = "cpu") -> tuple[Any, dict[int, Any]]:
    return ddp_run(case_of(name, device)), train_engine(name, device)


def launch(target: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    return run_ranks(target, world, *args, timeout_s=TIMEOUT_S, process_group=world > 1)


@pytest.mark.product
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_ddp_bit_for_bit_over_ten_steps(name: str, device: str) -> None:
    for rank, (ddp, engine) in enumerate(launch(train_both, 2, name, device)):
        assert len(ddp["losses"]) == 10
        for stage in STAGES:
            where = f"[rank {rank}/2] stage {stage}"
            assert_same(ddp["losses"], engine[stage]["losses"], f"{where} losses")
            assert_same(ddp["parameters"], engine[stage]["parameters"], f"{where} parameters")
            assert_same(ddp["states"], engine[stage]["states"], f"{where} states")


@pytest.mark.product
@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("name", ["stack-sgd", "stack-adamw-fp64", "gpt-sgd"])
def test_three_and_four_ranks_stay_within_one_in_a_million_of_ddp(name: str, world: int) -> None:
    # DDP sums in another order, so the last bit differs; fp32 AdamW amplifies that where a true gradient is zero.
    for ddp, engine in launch(train_both, world, name):
        for stage in STAGES:
            for expected, actual in zip(ddp["losses"], engine[stage]["losses"], strict=True):
                assert abs(actual - expected) <= 1e-6 * abs(expected), f"stage {stage}: {actual}, DDP {expected}"
            for key, expected in ddp["parameters"].items():
                error = torch.linalg.vector_norm(engine[stage]["parameters"][key] - expected)
                limit = 1e-6 * torch.linalg.vector_norm(expected)
                assert error <= limit, f"stage {stage} {key}: {error:.3e} from DDP, limit {limit:.3e}"


@pytest.mark.product
@pytest.mark.parametrize(("world", "device"), [*((world, "cpu") for world in WORLDS), (3, "gpu")])
@pytest.mark.parametrize("name", CASES)
def test_equals_single_process_bit_for_bit(name: str, world: int, device: str) -> None:
    expected = single_run(case_of(name, device), world)
    for rank, engine in enumerate(launch(train_engine, world, name, device)):
        for stage in STAGES:
            where = f"[rank {rank}/{world}] stage {stage}"
            assert_same(expected["losses"][rank], engine[stage]["losses"], f"{where} losses")
            assert_same(expected["parameters"], engine[stage]["parameters"], f"{where} parameters")
            assert_same(expected["states"], engine[stage]["states"], f"{where} states")


@pytest.mark.product
@pytest.mark.parametrize("world", WORLDS)
def test_stages_are_equal_to_one_another_and_two_runs_to_each_other(world: int) -> None:
    first, second = (launch(train_engine, world, "gpt-adamw") for _ in range(2))
    assert_same(first, second, "second run")
    for rank, engine in enumerate(first):
        for stage in STAGES[1:]:
            assert_same(engine[0], engine[stage], f"[rank {rank}/{world}] stage {stage} against stage 0")
    losses = [first[0][stage]["losses"] for stage in STAGES]
    assert all(run[-1] < run[0] for run in losses), f"the model does not learn: {losses}"


def train_with_units(how: str) -> dict[int, Any]:
    results = {}
    for stage in STAGES:
        model = build_gpt()
        units = {
            "modules": [*model.blocks, model.embedding],
            "class": [models.Attention],
            "name": ["Attention"],
            "inner": [models.Block],
            "none": [],
        }[how]
        optimizer = models.adamw(model)
        zero = zs.shard(model, optimizer, stage=stage, units=units, settings=zs.Settings(watchdog_s=WATCHDOG_S))
        for step in range(3):
            models.gpt_loss(model, step, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
        with zero.gathered():
            parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        results[stage] = ([unit.name for unit in zero.units], parameters)
    return results


@pytest.mark.product
@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("modules", {"blocks.0", "blocks.1", "embedding"}),
        ("class", {"blocks.0", "blocks.1"}),
        ("name", {"blocks.0", "blocks.1"}),
        ("inner", {"blocks.0.mlp", "blocks.1.mlp"}),
        ("none", set()),
    ],
)
def test_units_may_be_modules_classes_or_class_names(how: str, named: set[str]) -> None:
    expected = single_run(Case(build_gpt, models.gpt_loss, models.adamw, steps=3), 2)
    for results in launch(train_with_units, 2, how):
        for stage, (units, parameters) in results.items():
            assert set(units) == {"", *named}, f"stage {stage}: units {units}"
            assert_same(expected["parameters"], parameters, f"stage {stage}")


def find_units() -> list[tuple[str, int]]:
    model = build_gpt()
    zero = zs.shard(model, models.adamw(model), settings=zs.Settings(watchdog_s=WATCHDOG_S))
    return [(unit.name, unit.numel) for unit in zero.units]


def test_blocks_of_a_module_list_are_found_and_cover_the_model_once() -> None:
    (units,) = launch(find_units, 1)
    names = [name for name, _ in units]
    assert {"blocks.0", "blocks.1"} <= set(names), f"units {names}"
    assert len(names) == len(set(names)), f"units {names}"
    assert sum(numel for _, numel in units) == sum(p.numel() for p in build_gpt().parameters())


def start_apart() -> dict[int, dict[str, Tensor]]:
    results = {}
    for stage in STAGES:
        torch.manual_seed(100 + dist.get_rank())
        model = models.Stack()
        zero = zs.shard(model, models.adamw(model), stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S))
        with zero.gathered():
            results[stage] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return results


@pytest.mark.product
@pytest.mark.parametrize("world", [2, 4])
def test_parameters_start_equal_on_all_ranks(world: int) -> None:
    torch.manual_seed(100)
    expected = {name: p.detach() for name, p in models.Stack().named_parameters()}
    for rank, results in enumerate(launch(start_apart, world)):
        for stage in STAGES:
            assert_same(expected, results[stage], f"[rank {rank}/{world}] stage {stage}")


def several_dtypes(run: Run) -> None:
    model = models.build(models.Stack)
    model.blocks[1].up.double()  # one block of mixed dtypes
    model.blocks[1].forward = functools.partial(mixed_forward, model.blocks[1])
    optimizer = models.adamw(model, foreach=False)
    run.shard(model, optimizer)
    for step in range(3):
        run.backward(models.stack_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()


def mixed_forward(block: nn.Module, x: Tensor) -> Tensor:
    return x + block.down(block.up(block.norm(x).double()).float())


@pytest.mark.product
@pytest.mark.parametrize("world", WORLDS)
def test_a_unit_of_several_dtypes(world: int) -> None:
    assert_matches(several_dtypes, world)


def train_residency(stage: int) -> tuple[Any, Any]:
    """Train by stage, then by the residency row that this stage named."""
    results = []
    choice: dict[str, Any] = {"stage": stage}
    for _ in range(2):
        model = build_stack()
        optimizer = models.adamw(model)
        zero = zs.shard(model, optimizer, **settled({"watchdog_s": WATCHDOG_S, **choice}))
        assert isinstance(zero.residency, zs.Residency)
        for step in range(2):
            models.stack_loss(model, step, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
        resident = zero.memory().resident_bytes
        with zero.gathered():
            results.append((dict(resident), {name: p.detach().clone() for name, p in model.named_parameters()}))
        choice = {"residency": zero.residency}
    return results[0], results[1]


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_a_residency_row_means_what_its_stage_means(stage: int) -> None:
    for by_stage, by_row in launch(train_residency, 2, stage):
        assert_same(by_stage, by_row, f"stage {stage}")
