"""Searches: candidates, the frontier, and the best that fits."""

import dataclasses
import json
import os
from multiprocessing.connection import Connection
from typing import Any

import pytest

import zeroshard as zs
from zeroshard.plan.machine.hardware import Cost
from zeroshard.plan.machine.presets import DEVICES
from zeroshard.plan.planning import plan_shape
from zeroshard.plan.search import frontier_of
from zeroshard.plan.shape.shapes import shape_of
from zeroshard.plan.shape.tape import Instruction, Parts, coarse
from zeroshard.plan.step.clock import Clock
from zeroshard.plan.step.system import ZEROSHARD
from zeroshard.plan.trying import candidate_of
from zeroshard.report.plans import page_of_search
from zeroshard.table.cells import Residency
from zeroshard.table.sizes import GIB

SMALL = {"device": "a100-40", "seq": 1024, "batches": (1, 4), "tensors": (1, 2), "pipes": (1,)}


def test_a_candidate_is_the_plan_of_its_options() -> None:
    found = zs.search("gpt2-xl", world_size=8, **SMALL | {"pipes": (1, 2)})  # type: ignore[arg-type]
    shape = shape_of("gpt2-xl")
    for one in found.candidates[:: max(1, len(found.candidates) // 6)]:
        plan = plan_shape(shape, one.options)
        # A candidate has no pool of the step before, and no allocator.
        assert one.step_s == pytest.approx(plan.step_s, rel=1e-6)
        assert plan.peak_bytes * 0.9 <= one.peak_bytes <= plan.peak_bytes


@pytest.mark.rotates
def test_nothing_beats_the_frontier() -> None:
    found = zs.search("gpt2-xl", world_size=[8, 16], **SMALL)  # type: ignore[arg-type]
    assert found.frontier == tuple(frontier_of(found.candidates))
    for one in found.frontier:
        speed = one.tokens_per_s / one.options.world_size
        for other in found.candidates:
            is_faster = other.tokens_per_s / other.options.world_size > speed
            assert not (is_faster and other.peak_bytes <= one.peak_bytes)


@pytest.mark.rotates
def test_verdicts_of_the_frontier_count_what_the_allocator_reserves() -> None:
    found = zs.search("gpt2-xl", world_size=8, **SMALL)  # type: ignore[arg-type]
    for one in found.frontier:
        plan = plan_shape(found.model, one.options)
        assert (one.verdict, one.reserved_bytes) == (plan.verdict, plan.reserved_bytes)
        assert one.peak_bytes <= plan.reserved_bytes
    assert {one.reserved_bytes is None for one in found.candidates if one not in found.frontier} == {True}


@pytest.mark.parametrize(("gib", "verdict"), [(39.25, "no"), (39.59, "tight")])
def test_the_frontier_says_of_a_pipe_what_its_plan_says(gib: float, verdict: str) -> None:
    """Reserved memory and retries settle after more micro-batches than fill the pipe."""
    device = dataclasses.replace(DEVICES["a100-40"], memory_bytes=int(gib * GIB))
    sizes: dict[str, Any] = {"batches": (2,), "stages": (1,), "pipes": (2,), "tensors": (2,), "activations": ("keep",)}
    found = zs.search("llama-3-8b", world_size=8, device=device, seq=2048, batch_tokens=65536, offload=(), **sizes)
    (one,) = found.frontier
    plan = plan_shape(found.model, one.options)
    assert (one.verdict, one.total_bytes) == (plan.verdict, plan.total_bytes)
    assert one.step_s == pytest.approx(plan.step_s, rel=1e-6)
    assert one.verdict == verdict


def test_what_is_allocated_may_fit_where_what_is_reserved_does_not() -> None:
    """Between both lies a device on which the two verdicts differ."""
    sizes = {"seq": 1024, "batches": (4,), "tensors": (1,), "pipes": (1,), "stages": (3,), "activations": ("keep",)}
    sizes["offload"] = ()
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


@pytest.mark.parametrize("fails", [False, True])
def test_a_search_in_processes_finds_the_same(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three numbers of ranks, one of which needs offload; also if a process ends before it has a result."""
    small = dataclasses.replace(DEVICES["a100-40"], memory_bytes=16 * GIB)
    options: dict[str, Any] = SMALL | {"device": small, "batches": (1,), "tensors": (1,), "activations": ("recompute",)}
    options["world_size"] = (1, 2, 8)
    alone = zs.search("gpt2-xl", **options)
    if fails:
        monkeypatch.setattr(Connection, "send", lambda self, value: os._exit(1))
    found = zs.search("gpt2-xl", processes=2, **options)
    assert found.reasons and found.reasons == alone.reasons
    assert {n: plan and plan.to_json() for n, plan in found.best.items()} == {
        n: plan and plan.to_json() for n, plan in alone.best.items()
    }
    assert found.frontier == alone.frontier
    assert {one.options: one for one in found.candidates} == {one.options: one for one in alone.candidates}


@pytest.mark.rotates
def test_none_may_fit() -> None:
    found = zs.search("llama-3-405b", world_size=8, device="v100-32", seq=1024, batches=(1,), tensors=(1,), pipes=(1,))
    assert found.best == {8: None}
    assert "none" in str(found)


def test_a_search_needs_a_process() -> None:
    with pytest.raises(ValueError, match="processes"):
        zs.search("gpt2", world_size=2, processes=0)


@pytest.mark.parametrize("name", ["world_size", "stages", "batches", "tensors", "pipes", "activations"])
def test_a_search_needs_values_to_try(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: a search needs at least one value to try; got none"):
        zs.search("gpt2", **{"world_size": 2, name: ()})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["stages", "batches", "tensors", "pipes", "activations", "offload"])
@pytest.mark.parametrize("value", [1, "host", None])
def test_a_search_takes_lists(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"^{name}: a search takes several values, as a list; got {value!r}"):
        zs.search("gpt2", **{"world_size": 2, name: value})  # type: ignore[arg-type]


def test_one_copy_for_each_node_is_tried() -> None:
    found = zs.search("gpt2", world_size=24, prune=False, **SMALL | {"stages": (1,)})  # type: ignore[arg-type]
    assert {one.options.replicas for one in found.candidates} == {1, 2, 3}


@pytest.mark.rotates
def test_a_step_has_the_tokens_that_are_asked_for() -> None:
    found = zs.search("gpt2", world_size=8, batch_tokens=64 * 1024, **SMALL)  # type: ignore[arg-type]
    assert {one.options.tokens_per_step for one in found.candidates} == {64 * 1024}
    refusal = "^No configuration of gpt2 on 8 ranks with batch_tokens=7168: batch_tokens=7,168 is not a multiple"
    with pytest.raises(ValueError, match=refusal):
        zs.search("gpt2", world_size=8, batch_tokens=7 * 1024, **SMALL)  # type: ignore[arg-type]


def test_an_interrupted_search_has_the_best_so_far() -> None:
    whole = zs.search("gpt2", world_size=8, **SMALL)  # type: ignore[arg-type]
    told = list[tuple[int, int]]()

    def interrupt(looked_at: int, count: int) -> None:
        told.append((looked_at, count))
        if looked_at > 0:
            raise KeyboardInterrupt

    found = zs.search("gpt2", world_size=8, progress=interrupt, **SMALL)  # type: ignore[arg-type]
    looked_at, count = told[-1]
    assert count == found.count == whole.count
    assert found.left_out == count - looked_at > 0
    assert {one.options for one in found.candidates} < {one.options for one in whole.candidates}
    assert found.best[8] is not None
    assert f"interrupted: {found.left_out} were not looked at)" in str(found)


def test_progress_ends_with_all_configurations() -> None:
    told = list[tuple[int, int]]()
    found = zs.search("gpt2", world_size=8, progress=lambda *one: told.append(one), **SMALL)  # type: ignore[arg-type]
    assert told == sorted(told)
    assert told[-1] == (found.count, found.count)
    assert found.left_out == 0


def test_a_search_as_json() -> None:
    found = zs.search("gpt2", world_size=8, **SMALL)  # type: ignore[arg-type]
    stored = json.loads(json.dumps(found.to_json()))
    assert (stored["candidates"], stored["simulated"]) == (found.count, len(found.candidates))
    assert len(stored["frontier"]) == len(found.frontier)
    assert stored["best"]["8"]["verdict"] == "fits"


def test_a_candidate_takes_as_long_as_its_plan_where_the_host_is_behind_in_a_part_of_a_unit() -> None:
    """Kernels that follow a wait of the device for the host run after it: sums of both do not determine the time."""
    instructions = [
        *(Instruction("run", "small", cost=Cost(moved_bytes=1.0)) for _ in range(20)),
        Instruction("run", "large", cost=Cost(moved_bytes=2e9)),
        Instruction("make", "output", 1, 8),
    ]
    clock, quick = (Clock(DEVICES["a100-40"], "bfloat16", {}) for _ in range(2))
    queue_s = ZEROSHARD.queue_s(DEVICES["a100-40"])[0]
    (run,) = (
        one for one in coarse(Parts((*instructions,), (), 1), clock.kernel_s, queue_s).forward if one.kind == "run"
    )
    for one in instructions[:-1]:
        assert one.cost is not None
        clock.compute(one.what, clock.kernel_s(one.cost))
    quick.compute(run.what, run.seconds, run.launches, run.least_s)
    assert quick.now_s == pytest.approx(clock.now_s, rel=1e-12)
    assert quick.now_s > max(run.seconds, run.launches * queue_s) * 1.01


# -- offload ----------------------------------------------------------------------------------------------------------

ONE: dict[str, Any] = {"world_size": 1, "seq": 2048, "batches": (1, 4), "tensors": (1,), "activations": ("recompute",)}


def in_tenths(row: Residency) -> list[zs.Offload]:
    """Return states and parameters in tenths, with gradients on the device and with their states."""
    return [
        zs.Offload(states=states / 10, gradients=gradients, parameters=parameters / 10)
        for states in range(1, 11)
        for parameters in range(11 if row.cuts_parameters else 1)
        for gradients in (0, None)
    ]


@pytest.mark.rotates
def test_offload_is_the_best_where_nothing_fits_without() -> None:
    """The fastest of all offloads of all configurations, by brute force in tenths, is hardly faster."""
    found = zs.search("llama-3.2-3b", device="rtx5090", stages=(2, 3), **ONE)
    best = found.best[1]
    assert best is not None
    assert best.verdict == "fits"
    assert found.reasons == {1: "nothing fits without offload"}
    assert "; nothing fits without offload" in str(found)
    assert zs.search("llama-3.2-3b", device="rtx5090", stages=(2, 3), offload=(), **ONE).best == {1: None}
    tries = [
        candidate_of(found.model, dataclasses.replace(one.options, offload=offload))
        for one in found.candidates
        if one.options.offload is None
        for offload in in_tenths(one.options.row)
    ]
    bounds = {one.options: one.passes_s for one in found.candidates}
    assert all(one.step_s >= bounds[dataclasses.replace(one.options, offload=None)] for one in tries)
    # A fifth of the parameters is the least that a search moves.
    faster = [one for one in tries if one.verdict == "fits" and one.tokens_per_s > 1.03 * best.tokens_per_s]
    whole = [plan_shape(found.model, one.options) for one in faster]
    assert all(plan.verdict != "fits" for plan in whole)
    assert 0 < sum(one.verdict == "fits" for one in tries) < len(tries)
    assert found.offloads_tried < len(tries)


def test_nothing_is_simulated_where_the_host_has_no_room_for_what_must_leave() -> None:
    found = zs.search("llama-3-70b", world_size=8, device="a100-40", batches=(1,), tensors=(1,), pipes=(1,))
    assert found.best[8] is not None
    assert found.offloads_tried > 0
    small = dataclasses.replace(DEVICES["a100-40"], host_bytes=200 << 30)
    none = zs.search("llama-3-70b", world_size=8, device=small, batches=(1,), tensors=(1,), pipes=(1,))
    assert none.best[8] is None
    assert none.offloads_tried == 0


@pytest.mark.rotates
def test_offload_is_taken_where_it_is_faster() -> None:
    """Over a fast bus, where without offload only the whole recomputation fits with the margin of its kind."""
    sizes: dict[str, Any] = {"world_size": 8, "seq": 4096, "tensors": (1,), "batches": (1, 2), "stages": (2, 3)}
    sizes |= {"pipes": (1,)}
    device = dataclasses.replace(DEVICES["a100-40"], host_bytes_per_s=450 * 10**9, memory_bytes=43 * 10**9)
    found = zs.search("llama-3-8b", device=device, **sizes)
    without = zs.search("llama-3-8b", device=device, offload=(), **sizes)
    best, resident = found.best[8], without.best[8]
    assert best is not None
    assert resident is not None
    assert best.asked.offload is not None
    assert best.tokens_per_s > resident.tokens_per_s
    assert "faster than the fastest that fits without offload" in found.reasons[8]
    assert without.reasons == {}


def test_a_folder_is_taken_where_the_host_is_too_small() -> None:
    small = dataclasses.replace(DEVICES["rtx5090"], host_bytes=25 * 10**9)
    assert zs.search("llama-3.2-3b", device=small, stages=(2,), **ONE).best == {1: None}
    asked: dict[str, Any] = {"device": small, "stages": (2,), "offload": ("host", "/scratch"), **ONE}
    best = zs.search("llama-3.2-3b", **asked).best[1]
    assert best is not None
    assert best.asked.offload is not None
    assert best.asked.offload.to == "/scratch"
    asked["device"] = dataclasses.replace(small, host_bytes=20 * 10**9)  # of lion, states in files are not supported
    assert zs.search("llama-3.2-3b", optimizer="lion", **asked).best == {1: None}


def test_places_are_checked() -> None:
    with pytest.raises(TypeError, match=r"offload: a search takes several values"):
        zs.search("gpt2", offload="host", **ONE)
    with pytest.raises(ValueError, match="write 'host', or a folder"):
        zs.search("gpt2", offload=["disk"], **ONE)


def test_a_page_of_several_numbers_of_ranks_shows_the_fastest_of_all() -> None:
    found = zs.search(
        "gpt2", world_size=[2, 8], device="h100-80", seq=256, batches=(1,), stages=(1,), pipes=(1,), offload=()
    )
    best = {ranks: plan for ranks, plan in found.best.items() if plan is not None}
    assert best[2].tokens_per_s < best[8].tokens_per_s
    page = page_of_search(found.to_json())
    assert (
        page["sources"][0]["results"][-1]["value"] == page["sources"][1]["results"][0]["value"] == best[8].tokens_per_s
    )
    assert page["sources"][1]["options"]["ranks"] == page["player"]["defaults"]["ranks"] == 8  # type: ignore[index]


def test_offload_is_tried_where_only_what_is_allocated_fits() -> None:
    shape = zs.Transformer(
        name="small", block="gpt2", layers=2, hidden=512, heads=4, vocabulary=4096, sequence=64, is_tied=True
    )
    device = dataclasses.replace(DEVICES["h100-80"], memory_bytes=758330163)
    asked: dict[str, Any] = {"world_size": 1, "device": device, "optimizer": "sgd"}
    found = zs.search(shape, **asked, stages=[3], batches=[1, 2], tensors=[1], pipes=[1], activations=["keep"])
    by_hand = [zs.plan(shape, **asked, stage=3, batch=batch, offload="auto") for batch in (1, 2)]
    assert {one.verdict for one in by_hand} == {"fits"}
    best = found.best[1]
    assert best is not None
    assert best.tokens_per_s * 1.01 >= max(one.tokens_per_s for one in by_hand)
