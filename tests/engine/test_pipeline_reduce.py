"""When a pipe reduces gradients, where nothing is asked: once a step, if model states and whole gradients fit."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from tests.oracle import STAGES
from zeroshard.testing import run_ranks

WHOLE = 4 * 50 * 60
"""Bytes of the parameters of a place, and of their whole gradients."""
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
