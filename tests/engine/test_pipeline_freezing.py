"""Pipelines of which the first parts are frozen, thawed and frozen again: the parameters of one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from tests.rotation import third
from zeroshard.testing import run_ranks

BLOCKS, MICRO, WIDTH = 6, 3, 4
FROZEN = (3, 3, 0, 5, 2, 0)
"""In each step, how many blocks from the first on: chunks behind frozen ones send no gradients."""
Case = tuple[str, int, bool]
"""A schedule, a stage, whether chunks run twice."""


def whole_model() -> nn.Sequential:
    torch.manual_seed(3)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
    return nn.Sequential(*blocks).double()


def train(case: Case | None, places: int) -> dict[str, Tensor]:
    """Train on the same rows in each step; return the parameters of this place.

    Args:
        case: of the pipeline; None for one process.
    """
    model = whole_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[: FROZEN[0]].requires_grad_(False)
    if case is not None:
        schedule, stage, recompute = case
        mesh = init_device_mesh("cpu", (places, 1), mesh_dim_names=("pipe", "shard"))
        asked = {"micro_batches": MICRO * (2 if places == 2 else 1), "schedule": schedule, "recompute": recompute}
        pipe = zs.pipeline(model, optimizer, mesh=mesh, stage=stage, loss=F.mse_loss, **asked)  # type: ignore[arg-type]
    inputs, targets = torch.randn(2, 6 * MICRO, WIDTH, generator=torch.Generator().manual_seed(5)).double()
    for frozen in FROZEN:
        for number, block in enumerate(model):
            block.requires_grad_(number >= frozen)
        if case is not None:
            pipe.step(inputs, targets)
        else:
            F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    if case is not None:
        pipe.zero.detach()
    return {name: value.detach() for name, value in model.named_parameters()}


CASES = [("1f1b", 1, False), ("1f1b", 3, False), ("gpipe", 2, True), ("1f1b", 3, True), ("naive", 1, False)]


@pytest.mark.parametrize("case", third(CASES))
def test_what_is_frozen_at_first_may_be_trained_later(case: Case) -> None:
    """Over three places: the middle one learns from the first what its input needs."""
    expected = train(None, 1)
    for found in run_ranks(train, 3, case, 3):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


def test_chunks_of_a_place_may_be_frozen_each_for_itself() -> None:
    expected = train(None, 1)
    first, second = run_ranks(train, 2, ("interleaved", 3, False), 2)
    assert first.keys() | second.keys() == expected.keys()
    for name, value in (first | second).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)
