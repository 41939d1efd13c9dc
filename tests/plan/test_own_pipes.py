"""Own runs over a pipe beside their plans: resident bytes exact, peaks of torch's allocator within 2% on every rank."""

import dataclasses
from typing import Any

import pytest

from benchmarks.predicted import Case, Found, compare

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
