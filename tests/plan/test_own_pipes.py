"""Own runs over a pipe beside their plans: resident bytes exact, peaks of torch's allocator within 2% on every rank."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from benchmarks.predicted import Case, Found, compare
from tests import models
from zeroshard.testing import run_ranks

SMALL = Case(depth=4, context=64, batch=2, pipe=2, micro_batches=4, shared_memory=False)
CASES: list[dict[str, Any]] = [
    {"stage": 3, "ranks": 4, "activations": "recompute"},
    {"stage": 0, "ranks": 4},
    {"stage": 1, "ranks": 2, "schedule": "gpipe", "activations": "recompute"},
    {"stage": 3, "ranks": 4, "reduce": "each", "vocabulary": 8192},
    {"stage": 1, "ranks": 2, "schedule": "interleaved", "chunks": 2},
    {"stage": 3, "ranks": 4, "pipe": 4, "activations": "recompute"},
    {"stage": 1, "ranks": 2, "schedule": "gpipe", "recompute": True},
    {"stage": 3, "ranks": 4, "pipe": 4, "recompute": True},
    {"stage": 2, "ranks": 2, "schedule": "interleaved", "chunks": 2, "recompute": True},
]


def compared(case: Case) -> list[Found]:
    """Return what the ranks of a run have, after a comparison with their plans."""
    pairs = compare(case)
    for predicted, measured in pairs:
        assert measured.resident_bytes == predicted.resident_bytes
        assert abs(predicted.peak_bytes / measured.peak_bytes - 1) <= 0.02
    return [measured for _, measured in pairs]


@pytest.mark.product
@pytest.mark.parametrize("options", CASES, ids=lambda options: str(dataclasses.replace(SMALL, **options)))
def test_a_run_takes_what_its_plan_says(options: dict[str, Any]) -> None:
    assert compared(dataclasses.replace(SMALL, **options))


@pytest.mark.rotates
def test_1f1b_takes_no_more_than_an_input_for_four_times_as_many_micro_batches() -> None:
    case = dataclasses.replace(SMALL, stage=1, ranks=2)
    few, many = (compared(dataclasses.replace(case, micro_batches=count)) for count in (4, 16))
    width = 32 * case.depth
    input_bytes, batch_bytes = case.batch * case.context * width * 4, 12 * 2 * case.batch * case.context * 8
    for one, other in zip(few, many, strict=True):
        assert other.peak_bytes - one.peak_bytes <= input_bytes + batch_bytes


CPU = zs.Device("cpu", {"float32": 1e11}, 8 * 10**9, 1e10, 1e10, 1e10, 1e10, multiprocessors=1)


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def send() -> int:
    """Return the bytes that a place of a pipe with a tied weight sends to the other one in a step."""
    model, mesh = models.build(models.GPT), init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipe", "shard"))
    optimizer = models.sgd(model)
    pipe = zs.pipeline(model, optimizer, mesh=mesh, micro_batches=2, loss=lambda out, _: loss_of(out), stage=1)
    for _ in range(2):  # with the first step, places learn what they send
        before = pipe.zero.traffic().sent_bytes.get("pipe", 0)
        pipe.step(torch.zeros(4, 8, dtype=torch.long), torch.zeros(4))
        optimizer.step()
        optimizer.zero_grad()
    return pipe.zero.traffic().sent_bytes["pipe"] - before


@pytest.mark.product
def test_places_exchange_the_gradient_of_a_tied_weight() -> None:
    slow = dataclasses.replace(CPU, link_bytes_per_s=1e6, node_bytes_per_s=1e6)
    asked: dict[str, Any] = {"world_size": 2, "pipe": 2, "micro_batches": 2, "stage": 1, "device": slow}
    asked |= {"loss": loss_of, "inputs": [torch.zeros(2, 8, dtype=torch.long)]}
    tied, apart = (zs.plan(models.GPT(tied=tied), precision="fp32", optimizer="sgd", **asked) for tied in (True, False))
    # Beside it, the first place sends 24 bytes: what it knows of the batch.
    assert run_ranks(send, 2) == [tied.film.sent_bytes["pipe send"] + more for more in (24, 0)]
    nbytes = models.GPT().embedding.weight.nbytes
    assert tied.film.sent_bytes["pipe send"] == apart.film.sent_bytes["pipe send"] + nbytes
    assert tied.step_s - apart.step_s == pytest.approx(nbytes / (1e6 * slow.link_part), rel=0.02)
