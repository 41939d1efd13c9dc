"""Searches: candidates, the frontier, and the best that fits."""

import dataclasses
import json

import pytest

import zeroshard as zs
from zeroshard.plan.planning import plan_shape, shape_of
from zeroshard.plan.search import frontier_of

SMALL = {"device": "a100-40", "seq": 1024, "batches": (1, 4), "tensors": (1, 2)}


def test_a_candidate_is_the_plan_of_its_options() -> None:
    found = zs.search("gpt2-xl", world_size=8, **SMALL)  # type: ignore[arg-type]
    shape = shape_of("gpt2-xl")
    for one in found.candidates[:: max(1, len(found.candidates) // 6)]:
        plan = plan_shape(shape, one.options)
        # A candidate has no pool of the step before, and no allocator.
        assert one.step_s == pytest.approx(plan.step_s, rel=1e-6)
        assert plan.peak_bytes * 0.9 <= one.peak_bytes <= plan.peak_bytes


def test_nothing_beats_the_frontier() -> None:
    found = zs.search("gpt2-xl", world_size=[8, 16], **SMALL)  # type: ignore[arg-type]
    assert found.frontier == tuple(frontier_of(found.candidates))
    for one in found.frontier:
        speed = one.tokens_per_s / one.options.world_size
        for other in found.candidates:
            is_faster = other.tokens_per_s / other.options.world_size > speed
            assert not (is_faster and other.peak_bytes <= one.peak_bytes)


def test_verdicts_of_the_frontier_count_what_the_allocator_reserves() -> None:
    found = zs.search("gpt2-xl", world_size=8, **SMALL)  # type: ignore[arg-type]
    for one in found.frontier:
        plan = plan_shape(found.model, one.options)
        assert (one.verdict, one.reserved_bytes) == (plan.verdict, plan.reserved_bytes)
        assert one.peak_bytes <= plan.reserved_bytes
    assert {one.reserved_bytes is None for one in found.candidates if one not in found.frontier} == {True}


def test_what_is_allocated_may_fit_where_what_is_reserved_does_not() -> None:
    """Between both lies a device on which the two verdicts differ."""
    sizes = {"seq": 1024, "batches": (4,), "tensors": (1,), "stages": (3,), "activations": ("keep",)}
    plenty = zs.search("gpt2-xl", world_size=8, device="h100-80", **sizes).frontier[-1]  # type: ignore[arg-type]
    assert plenty.reserved_bytes is not None
    device = plenty.options.device
    room = (plenty.peak_bytes + plenty.reserved_bytes) // 2 + device.context_bytes + device.communicator_bytes
    small = dataclasses.replace(device, memory_bytes=room)
    (one,) = zs.search("gpt2-xl", world_size=8, device=small, **sizes).frontier  # type: ignore[arg-type]
    assert one.verdict == "no"


def test_the_best_fits_and_is_the_fastest() -> None:
    found = zs.search("gpt2-xl", world_size=8, **SMALL)  # type: ignore[arg-type]
    best = found.best[8]
    assert best is not None
    assert best.verdict == "fits"
    least = best.tokens_per_s * (1 + 1e-9)
    faster = [one for one in found.candidates if one.tokens_per_s > least and one.verdict != "no"]
    assert all(plan_shape(found.model, one.options).verdict != "fits" for one in faster)
    assert "the fastest that fits" in str(found)


def test_none_may_fit() -> None:
    found = zs.search("llama-3-405b", world_size=8, device="v100-32", seq=1024, batches=(1,), tensors=(1,))
    assert found.best == {8: None}
    assert "none" in str(found)


def test_a_global_batch_is_kept() -> None:
    found = zs.search("gpt2", world_size=8, global_batch=64, **SMALL)  # type: ignore[arg-type]
    assert {one.options.tokens_per_step for one in found.candidates} == {64 * 1024}
    with pytest.raises(ValueError, match="has sizes that divide"):
        zs.search("gpt2", world_size=8, global_batch=7, **SMALL)  # type: ignore[arg-type]


def test_a_search_as_json() -> None:
    found = zs.search("gpt2", world_size=8, **SMALL)  # type: ignore[arg-type]
    stored = json.loads(json.dumps(found.to_json()))
    assert stored["candidates"] == len(found.candidates)
    assert len(stored["frontier"]) == len(found.frontier)
    assert stored["best"]["8"]["verdict"] == "fits"
