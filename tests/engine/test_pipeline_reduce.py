"""When a pipe reduces gradients: once a step, if model states and whole gradients fit, each chunk with its last one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, not_written_is_nan, run_cases
from zeroshard.testing import run_ranks

WHOLE = 4 * 50 * 60
"""Bytes of the parameters of a place, and of their whole gradients."""
WATCHDOG_S = 20.0
PADDING = 512
"""More than a bucket is padded by."""


def reduced(stage: int, device_bytes: int | None, reduce: str) -> tuple[str, int, int]:
    """Return when gradients are reduced, by the handle's text and the messages of a step, and the predicted bytes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "shard"))
    model = nn.Sequential(nn.Linear(50, 60, bias=False), nn.Linear(60, 50, bias=False))
    pipe = zs.pipeline(
        model,
        mesh=mesh,
        micro_batches=4,
        cut=["1"],
        stage=stage,
        reduce=reduce,
        loss=nn.functional.mse_loss,
        settings=zs.Settings(device_bytes=device_bytes, shared_memory=False),
    )
    predicted = sum(pipe.zero.memory().predicted_bytes.values())
    pipe.step(torch.ones(8, 50), torch.zeros(8, 50))
    when = repr(pipe).partition("reduce='")[2].partition("'")[0]
    count = sum(event.kind == "reduce" for event in pipe.zero.trace.events)
    return when, count, predicted


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_reduced_once_where_whole_ones_fit(stage: int) -> None:
    def answers(device_bytes: int | None, reduce: str = "auto") -> list[tuple[str, int]]:
        return [found[:2] for found in run_ranks(reduced, 4, stage, device_bytes, reduce)]

    (_, _, states), *_ = run_ranks(reduced, 4, stage, None, "last")
    once, each = [("last", 1)] * 4, [("each", 4)] * 4
    assert answers(None) == answers(2 * (states + WHOLE + PADDING)) == once
    assert answers(2 * (states + WHOLE - PADDING)) == (once if stage < 2 else each)
    assert answers(None, "each") == each


class Kept(nn.Linear):
    """A layer that keeps the first number, which routes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1], super().forward(x)[:, 1:]], 1)


class Routed(nn.Module):
    """Two experts, chosen by the sign of the first number."""

    def __init__(self, negative: nn.Module) -> None:
        super().__init__()
        self.experts = nn.ModuleList([negative, Kept(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(x[0, 0] > 0)](x)


def of_experts() -> nn.Module:
    return nn.Sequential(Routed(Kept(4, 4)), *(Kept(4, 4) for _ in range(3)))


def of_a_block_that_may_rest() -> nn.Module:
    return nn.Sequential(Kept(4, 4), Kept(4, 4), Routed(nn.Identity()), Kept(4, 4))


def routed(data: int) -> Tensor:
    """Return inputs of four micro-batches: only the first one of the second rank has negative first numbers."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(data)).abs()
    x[:2] *= 1 - 2 * data
    return x


def step_interleaved(build: Callable[[], nn.Module], stage: int) -> dict[str, Tensor]:
    """Return parameters after a step of a pipe that sums gradients of its third chunk before those of the first."""
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "shard")), models.build(build)
    optimizer = models.sgd(model)
    pipe = zs.pipeline(
        model,
        optimizer,
        mesh=mesh,
        micro_batches=4,
        schedule="interleaved",
        stage=stage,
        reduce="last",
        loss=nn.functional.mse_loss,
        settings=zs.Settings(watchdog_s=WATCHDOG_S),
    )
    with not_written_is_nan():
        pipe.step(routed(pipe.zero.mesh.rank), torch.zeros(8, 4))
        optimizer.step()
    pipe.zero.detach()
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_plain(build: Callable[[], nn.Module], *stages: int) -> None:
    """Compare with one process that adds up the gradients of all micro-batches of both ranks."""
    model = models.build(build)
    optimizer = models.sgd(model)
    for x in (one for data in range(2) for one in routed(data).split(2)):
        (nn.functional.mse_loss(model(x), torch.zeros(2, 4)) / 8).backward()
    optimizer.step()
    cases = run_cases(step_interleaved, 4, [(build, stage) for stage in stages])
    for found in (one for ranks in cases.values() for one in ranks):
        own = {name: p for name, p in found.items() if p.numel()}
        assert own
        torch.testing.assert_close(own, {name: model.get_parameter(name).detach() for name in own})


def test_an_expert_of_one_early_micro_batch_has_its_sum_with_the_last() -> None:
    """As another chunk of its place is summed, ranks agree that one of them used the expert, and have no sum of it."""
    assert_plain(of_experts, 3, 2)


def test_a_chunk_may_return_its_input_in_one_micro_batch_of_one_rank() -> None:
    """Its backward there reaches no parameter, and is the same pass as on the other rank."""
    assert_plain(of_a_block_that_may_rest, 3, 1)
