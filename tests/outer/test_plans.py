"""Plans of islands: the bytes that a run counts, of memory and over the axis."""

import gc
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import record_function

import zeroshard as zs
from benchmarks.peaks import measure_peak
from tests.outer.islands import mailbox, secret_in
from tests.outer.plain import adamw, build, loss_of, mesh_of, nesterov
from zeroshard.describe.exchanges import Foreseen
from zeroshard.outer.mailbox_codec import Form
from zeroshard.outer.places import Island
from zeroshard.plan.machine.profiles import host_device
from zeroshard.report.plans import page_of_plan
from zeroshard.testing import run_ranks

CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"bits": 32}),
    (2, {"bits": 8, "optimizer": nesterov, "fragments": 2}),
    (2, {"bits": 4, "memory": "host"}),
    (4, {"bits": 32, "fragments": 2}),
]


def _measured(islands: int, stage: int, outer: dict[str, Any]) -> tuple[dict[str, int], int]:
    """Train until all was exchanged; return what this rank holds by column, and the bytes it sent to other islands."""
    model = build(torch.float32)
    optimizer = adamw(model.parameters())
    zero = zs.shard(model, optimizer, stage=stage, mesh=mesh_of(islands), outer=zs.Outer(every=2, **outer))
    for step in range(2):
        loss_of(model, step, dist.get_rank(), torch.float32).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(zero.memory().resident_bytes), zero.traffic().sent_bytes["replicate"]


@pytest.mark.parametrize(("islands", "outer"), CASES)
def test_a_plan_has_the_anchors_and_the_bytes_of_a_run(islands: int, outer: dict[str, Any]) -> None:
    for stage in (0, 3):
        found = run_ranks(_measured, 4, islands, stage, outer)
        plan = zs.plan(
            build(torch.float32),
            world_size=4,
            device=host_device(),
            inputs=[torch.zeros(4, 5, device="meta")],
            loss=lambda output: output.square().mean(),
            stage=stage,
            precision="fp32",
            mesh=islands,
            outer=zs.Outer(every=2, **outer),
        )
        held = {**plan.ranks[0].resident_bytes, **plan.ranks[0].elsewhere_bytes}
        for column in ("states", "host"):
            assert held.get(column, 0) == found[0][0].get(column, 0), (stage, column)
        assert plan.outer.sent_bytes == found[0][1], stage
        assert plan.outer.islands == islands


def _adam(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


PEAKS: list[tuple[int, int, dict[str, Any]]] = [
    (2, 1, {"every": 2}),
    (2, 1, {"every": 1, "optimizer": _adam, "bits": 8}),
    (2, 3, {"every": 4, "optimizer": nesterov, "delay": 3}),
    (3, 1, {"every": 2, "optimizer": nesterov}),
    (3, 2, {"every": 4, "bits": 4, "delay": 1, "fragments": 2}),
]


def _wide() -> nn.Module:
    """Return a model whose parameters are larger than its activations, with fragments of equal sizes."""
    return nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))


def _peaks(stage: int, outer: dict[str, Any]) -> list[int]:
    """Train; return the most bytes of this rank in each step."""

    def train(steps: int = 9) -> Any:
        model = _wide()
        optimizer = adamw(model.parameters())
        zero = zs.shard(model, optimizer, stage=stage, mesh=mesh_of(dist.get_world_size()), outer=zs.Outer(**outer))
        for step in range(steps):
            with record_function(f"step {step}"):
                model(torch.ones(4, 300)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return zero, model, optimizer

    train(2)  # what a process makes once
    gc.collect()
    blocks = measure_peak(train).blocks
    return [max(one.live_bytes for one in blocks if f"step {step}" in one.operations) for step in range(9)]


@pytest.mark.parametrize(("islands", "stage", "outer"), PEAKS)
def test_a_plan_has_the_peaks_of_a_step_with_an_exchange_and_of_the_first(
    islands: int, stage: int, outer: dict[str, Any]
) -> None:
    measured = run_ranks(_peaks, islands, stage, outer)[0]
    plan = zs.plan(
        _wide(),
        world_size=islands,
        device=host_device(),
        inputs=[torch.ones(4, 300)],
        loss=lambda output: output.square().mean(),
        stage=stage,
        precision="fp32",
        mesh=islands,
        outer=zs.Outer(**outer),
    )
    assert plan.allocated_bytes == pytest.approx(max(measured), rel=0.02)
    assert plan.first.allocated_bytes == pytest.approx(measured[0], rel=0.02)


def _measured_alone(stage: int, bits: int, address: str, secret: str) -> dict[str, int]:
    """Train an island that is a launch of its own, until it has put and taken; return what this rank holds."""
    model = build(torch.float32)
    optimizer = adamw(model.parameters())
    outer = zs.Outer(every=2, bits=bits, address=address, secret_file=secret, island="a", islands=1)  # type: ignore[arg-type]
    zero = zs.shard(model, optimizer, stage=stage, outer=outer)
    for step in range(2):
        loss_of(model, step, dist.get_rank(), torch.float32).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(zero.memory().resident_bytes)


@pytest.mark.parametrize("bits", [32, 8])
def test_a_plan_has_the_anchors_and_the_changes_of_an_island_of_its_own(tmp_path: Path, bits: int) -> None:
    told = {"bits": bits, "secret_file": "secret", "island": "a"}
    for stage in (0, 1, 3):
        with mailbox(tmp_path / str(stage)) as box:
            found = run_ranks(_measured_alone, 2, stage, bits, box.address, str(secret_in(tmp_path)))
        plan = zs.plan(
            build(torch.float32),
            world_size=2,
            device=host_device(),
            inputs=[torch.zeros(4, 5, device="meta")],
            loss=lambda output: output.square().mean(),
            stage=stage,
            precision="fp32",
            outer=zs.Outer(every=2, address="h:1", islands=3, staleness=4, **told),  # type: ignore[arg-type]
        )
        for rank in plan.ranks:
            held = {**rank.resident_bytes, **rank.elsewhere_bytes}
            for column in ("states", "host"):
                assert {held.get(column, 0)} <= {one.get(column, 0) for one in found}, (stage, column)
        assert plan.outer.sent_bytes == Form(bits, "<f4").nbytes(sum(p.numel() for p in build().parameters())) or stage
        assert "to the mailbox and takes 2 times as many" in str(plan)
        assert "staleness           4: beside an island of half its speed, this one waits for it after" in str(plan)


def test_a_page_and_a_text_have_the_islands_of_a_plan() -> None:
    """Islands are no ranks of a shard, send each step their part of an exchange, and save nothing beside the steps."""
    copies, islands = (zs.plan("gpt2", world_size=8, mesh=2, seq=64, outer=o) for o in (None, zs.Outer(every=10)))
    sent = []
    for plan in (copies, islands):
        page = page_of_plan(plan.to_json())
        assert page["player"]["defaults"]["ranks"] == plan.asked.shard_ranks == 4  # type: ignore[index]
        sent += [one["value"] for one in page["sources"][0]["results"] if one["what"] == "sent per rank and step"]
    # The copies reduce over both each step what islands exchange every ten steps.
    reduced = copies.film.sent_bytes["replicate all-reduce"]
    assert sent[0] - reduced == sent[1] - islands.outer.sent_bytes // 10 == sum(islands.film.sent_bytes.values()) > 0
    assert "asynchronous save" in str(copies) and copies.save_bytes > 0
    assert "asynchronous save" not in str(islands) and islands.save_bytes == 0


def test_islands_that_a_run_refuses_have_no_plan() -> None:
    with pytest.raises(ValueError, match="outer= with pipe="):
        zs.plan("gpt2", world_size=4, mesh=2, outer=zs.Outer(every=2), pipe=2)
    split = Island(torch.arange(4).view(2, 2), ("replicate", "tensor"))  # what a plan reads of a DeviceMesh
    with pytest.raises(ValueError, match=r"Use bits=32\."):
        zs.plan("gpt2", world_size=4, mesh=split, outer=zs.Outer(every=2, bits=8))  # type: ignore[arg-type]


def test_paces_are_those_of_a_simulation_of_steps() -> None:
    """Islands step by step: one of them may lead the slowest by so many exchanges."""
    for staleness, speeds in ((0, (1.0, 0.5)), (2, (1.0, 0.25, 0.5)), (4, (2.0, 1.0)), (None, (1.0, 0.5))):
        planned = Foreseen(len(speeds), every=5, staleness=staleness, is_alone=True).paces(0.1, speeds)
        ready_s = [0.1 / speed for speed in speeds]
        steps, puts, late = [0] * len(speeds), [0] * len(speeds), [0] * len(speeds)
        waited_s = [math.inf] * len(speeds)
        for tick in range(1, 4001):
            at_s = tick * 0.025
            for island, speed in enumerate(speeds):
                if at_s < ready_s[island] - 1e-9:
                    continue
                if steps[island] % 5 == 4:
                    puts[island] = steps[island] // 5 + 1
                if staleness is not None and puts[island] - min(puts) > staleness:
                    waited_s[island] = min(waited_s[island], at_s)
                    continue
                steps[island] += 1
                late[island] += at_s > 50
                ready_s[island] = max(at_s, ready_s[island]) + 0.1 / speed
        for (begin_s, rate), first_s, made in zip(planned, waited_s, late, strict=True):
            assert made / 50 == pytest.approx(rate, rel=0.03)
            assert first_s == pytest.approx(begin_s, abs=2 * 5 * 0.1 / min(speeds))
    with pytest.raises(ValueError, match="above 0"):
        Foreseen().paces(0.1, [1.0, 0.0])
