"""Pipelines: the losses and parameters of one process that accumulates the same micro-batches.

The oracle is a plain loop over micro-batches and ranks, in order.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from tests import models
from tests.contract.source import REPOSITORY
from tests.contract.test_all import examples, run_block
from tests.rotation import is_whole, third
from zeroshard.testing import run_ranks

TIMEOUT_S = 480
WATCHDOG_S = 60.0
MICRO, STEPS, DEPTH = 4, 4, 8
Case = tuple[str, int, bool, str]
"""A schedule, a stage, whether ranks share memory, when gradients are reduced."""


def whole_model() -> nn.Module:
    torch.manual_seed(7)
    return models.Stack(depth=DEPTH)


def batch(step: int, data: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = range(MICRO)
    return (
        torch.cat([models.features(step, data, micro) for micro in rows]),
        torch.cat([models.targets(step, data, micro) for micro in rows]),
    )


def train(places: int, data: int, cases: list[Case]) -> list[dict[str, Any]]:
    mesh, found = init_device_mesh("cpu", (places, data), mesh_dim_names=("pipe", "shard")), []
    for schedule, stage, shared, reduce in cases:
        model = whole_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings = zs.Settings(watchdog_s=WATCHDOG_S, shared_memory=shared)
        pipe = zs.pipeline(
            model,
            optimizer,
            mesh=mesh,
            micro_batches=MICRO,
            schedule=schedule,
            loss=F.mse_loss,
            reduce=reduce,
            stage=stage,
            settings=settings,
        )
        losses = []
        for step in range(STEPS):
            losses.append(pipe.step(*batch(step, pipe.zero.mesh.rank)).item())
            optimizer.step()
            optimizer.zero_grad()
        evaluated = pipe.evaluate(*batch(STEPS, pipe.zero.mesh.rank)).item()
        pipe.zero.detach()
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        found.append({"losses": losses, "evaluated": evaluated, "parameters": parameters})
    return found


def plain(data: int, each: bool) -> dict[str, Any]:
    """Train the whole model in this process.

    Args:
        each: whether each backward's gradients are summed over ranks, or the sum of all micro-batches.
    """
    model = whole_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        rows, summed = [], dict[str, torch.Tensor]()
        for micros in [[micro] for micro in range(MICRO)] if each else [[*range(MICRO)]]:
            by_rank = []
            for rank in range(data):
                for micro in micros:
                    loss = models.stack_loss(model, step, rank, micro) / MICRO
                    loss.backward()
                    rows.append(loss.item())
                by_rank.append([p.grad for p in model.parameters()])
                optimizer.zero_grad()
            for (name, _), *grads in zip(model.named_parameters(), *by_rank, strict=True):
                total = sum(grads[1:], grads[0]).mul_(1 / data)
                summed[name] = summed[name] + total if name in summed else total
        losses.append(sum(rows) / data)
        for name, p in model.named_parameters():
            p.grad = summed[name]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        last = [models.stack_loss(model, STEPS, rank, micro) for rank in range(data) for micro in range(MICRO)]
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    return {"losses": losses, "evaluated": sum(last).item() / len(last), "parameters": parameters}


REDUCES = ("last", "each")
CASES = [
    (schedule, stage, shared, reduce)
    for schedule in ("naive", "gpipe", "1f1b", "interleaved")
    for stage in range(4)
    for shared in (True, False)
    for reduce in REDUCES
]
SOME = [
    (schedule, stage, (number + stage) % 2 == 0, REDUCES[(number + stage // 2) % 2])
    for number, schedule in enumerate(("naive", "gpipe", "1f1b", "interleaved"))
    for stage in range(4)
]
"""Each schedule with each stage, and each with each transport and each kind of reduction."""


def cases_of(some: list[Case]) -> list[Case]:
    return CASES if is_whole() else third(some)


@pytest.mark.parametrize(("places", "data"), [(2, 1), (4, 1), (2, 2)])
def test_a_pipeline_has_the_bits_of_a_plain_loop(places: int, data: int) -> None:
    cases = cases_of(SOME if data > 1 else [case for case in SOME if case[1] in (0, 3)])
    expected = {reduce: plain(data, reduce == "each") for reduce in ("last", "each")}
    names = set[str]()
    for found in run_ranks(train, places * data, places, data, cases, timeout_s=TIMEOUT_S):
        for case, actual in zip(cases, found, strict=True):
            oracle = expected[case[3]]
            assert actual["losses"] == pytest.approx(oracle["losses"], rel=1e-6), case
            assert actual["evaluated"] == pytest.approx(oracle["evaluated"], rel=1e-6), case
            for name, value in actual["parameters"].items():
                assert torch.equal(value, oracle["parameters"][name]), (case, name)
            names |= actual["parameters"].keys()
    assert names == oracle["parameters"].keys()


# -- a language model: a tied head, a loose parameter, clipping -------------------------------------------------------


def language_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(7)
    return models.GPT(depth=4).to(dtype)


def tokens(step: int, data: int) -> torch.Tensor:
    return torch.cat([models.tokens(step, data, micro) for micro in range(MICRO)])


def language_optimizer(model: nn.Module, dtype: torch.dtype) -> torch.optim.Optimizer:
    # The gradients of the keys' biases are zeros but for rounding, which AdamW would turn into updates in fp32.
    if dtype is torch.float32:
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)


def language_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train_language(places: int, data: int, cases: list[Case], dtype: torch.dtype) -> list[dict[str, Any]]:
    mesh, found = init_device_mesh("cpu", (places, data), mesh_dim_names=("pipe", "shard")), []
    for schedule, stage, shared, reduce in cases:
        model = language_model(dtype)
        optimizer = language_optimizer(model, dtype)
        settings = zs.Settings(watchdog_s=WATCHDOG_S, shared_memory=shared)
        options = {"schedule": schedule, "loss": language_loss, "reduce": reduce, "stage": stage, "settings": settings}
        pipe = zs.pipeline(model, optimizer, mesh=mesh, micro_batches=MICRO, **options)
        losses, norms = [], []
        for step in range(STEPS):
            ids = tokens(step, pipe.zero.mesh.rank)
            losses.append(pipe.step(ids, ids).item())
            half = pipe.zero.grad_norm().item() / 2
            norms += [half, nn.utils.clip_grad_norm_(model.parameters(), half).item()]
            optimizer.step()
            optimizer.zero_grad()
        pipe.zero.check_copies()
        pipe.zero.detach()
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        found.append({"losses": losses, "norms": norms, "parameters": parameters})
    return found


def plain_language(data: int, dtype: torch.dtype) -> dict[str, Any]:
    model, losses, norms = language_model(dtype), [], []
    optimizer = language_optimizer(model, dtype)
    for step in range(STEPS):
        batches = [models.tokens(step, rank, micro) for rank in range(data) for micro in range(MICRO)]
        loss = sum(language_loss(model(ids), ids) for ids in batches) / len(batches)
        loss.backward()
        losses.append(loss.item())
        half = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item() / 2
        norms += [half, nn.utils.clip_grad_norm_(model.parameters(), half).item()]
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "parameters": {n: p.detach() for n, p in model.named_parameters()}}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_a_tied_head_is_one_parameter(dtype: torch.dtype, tolerance: float) -> None:
    cases = cases_of(SOME)
    expected, names = plain_language(2, dtype), set[str]()
    for found in run_ranks(train_language, 4, 2, 2, cases, dtype, timeout_s=TIMEOUT_S):
        for case, actual in zip(cases, found, strict=True):
            for key in ("losses", "norms"):
                assert actual[key] == pytest.approx(expected[key], rel=tolerance), (case, key)
            for name, value in actual["parameters"].items():
                torch.testing.assert_close(value, expected["parameters"][name], rtol=tolerance, atol=tolerance)
            names |= actual["parameters"].keys()
    assert names == expected["parameters"].keys()


# -- the page ---------------------------------------------------------------------------------------------------------


def run_page() -> None:
    (program,) = examples((REPOSITORY / "docs/pipelines.md").read_text())
    run_block(program, "docs/pipelines.md")


@pytest.mark.parametrize("world", [2, 4])
def test_the_program_of_the_page_runs(world: int) -> None:
    run_ranks(run_page, world, process_group=False, timeout_s=TIMEOUT_S)
