"""A profile counts every nanosecond once, says whose it was, and leaves nothing behind."""

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S
from zeroshard.report.profile import _chrome_trace
from zeroshard.report.timeline import CATEGORIES, NO_UNIT, Slice, Timeline
from zeroshard.testing import run_ranks

STEPS = 2
KINDS = ("gather", "release", "reduce")


def make(stage: int, kind: Any = models.Stack) -> tuple[zs.Zero, nn.Module, torch.optim.Optimizer]:
    model = models.build(kind)
    optimizer = models.adamw(model, fused=True)
    return zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S)), model, optimizer


def step(zero: zs.Zero, model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> torch.Tensor:
    loss = models.stack_loss(model, number, zero.mesh.rank)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def parts(zero: zs.Zero, optimizer: torch.optim.Optimizer) -> list[object]:
    """Return the objects whose methods are timed."""
    engine = zero._engine
    buckets = [bucket for unit in engine.units for bucket in unit.buckets]
    fixed = [engine, engine.order, engine.order.history.trace, engine.comm, engine.saved, optimizer]
    return [*fixed, *engine.units, *buckets, *(bucket.grads for bucket in buckets)]


def own_methods(zero: zs.Zero, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return what each timed object has of its own that can be called."""
    return [sorted(name for name, value in vars(one).items() if callable(value)) for one in parts(zero, optimizer)]


def hook_counts(model: nn.Module) -> list[int]:
    return [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]


def profiled(stage: int, path: str) -> dict[str, Any]:
    """Train two steps, two more under a profile, and return what it says."""
    zero, model, optimizer = make(stage)
    for number in range(2):
        step(zero, model, optimizer, number)
    before = own_methods(zero, optimizer), hook_counts(model)
    with zero.profile() as profile:
        during = own_methods(zero, optimizer)
        for number in range(STEPS):
            step(zero, model, optimizer, 2 + number)
    profile.save(path)
    events = [e for e in zero.trace.events if e.step > zero.trace.events[-1].step - STEPS]
    return {
        "seconds": dict(profile.seconds),
        "units": {name: dict(times) for name, times in profile.units.items()},
        "wall_s": profile.wall_s,
        "steps": profile.steps,
        "slices": [tuple(one) for one in profile.slices],
        "events": [(event.kind, event.unit) for event in events],
        "table": profile.table(),
        "is_restored": before == (own_methods(zero, optimizer), hook_counts(model)),
        "is_replaced": before[0] != during,
        "names": [unit.name for unit in zero.units],
    }


def run(stage: int, world: int, path: Path) -> list[dict[str, Any]]:
    return run_ranks(profiled, world, stage, str(path), timeout_s=TIMEOUT_S, process_group=world > 1)


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_profile_adds_up(stage: int, world: int, tmp_path: Path) -> None:
    for rank, found in enumerate(run(stage, world, tmp_path / "trace.json")):
        assert found["is_replaced"] and found["is_restored"]
        assert found["steps"] == STEPS
        assert sum(found["seconds"].values()) == pytest.approx(found["wall_s"], rel=1e-12)
        for category in CATEGORIES:
            assert sum(unit[category] for unit in found["units"].values()) == pytest.approx(found["seconds"][category])
            # One rank sends nothing: its gradients stay where autograd made them.
            assert (found["seconds"][category] > 0) == (world > 1 or category != "sending")
        check_slices(found["slices"], found["wall_s"])
        check_counts(found)
        check_units(found)
        check_table(found, rank, world)
    check_trace(json.loads((tmp_path / "trace.json").read_text()), world)


def check_slices(slices: list[tuple[str, str, str, int, int]], wall_s: float) -> None:
    """Assert that slices lie inside or behind one another and that the outermost fill the whole time."""
    covered, ends = 0, []
    for _, category, _, start, duration in sorted(slices, key=lambda one: (one[3], -one[4])):
        assert category in CATEGORIES
        assert duration >= 0
        while ends and ends[-1] <= start:
            ends.pop()
        assert not ends or start + duration <= ends[-1]
        covered += 0 if ends else duration
        ends.append(start + duration)
    assert covered * 1e-9 == pytest.approx(wall_s)


def check_counts(found: dict[str, Any]) -> None:
    """Assert that each unit was gathered, released and reduced as often as the trace says."""
    events = Counter(event for event in found["events"] if event[0] in KINDS)
    spans = Counter((label, unit) for label, _, unit, _, _ in found["slices"] if label in KINDS)
    assert spans == events
    assert sum(events.values()) >= STEPS * len(found["names"])
    assert [label for label, *_ in found["slices"]].count("step") == STEPS


def check_units(found: dict[str, Any]) -> None:
    """Assert that each unit's modules ran in both directions, and that what is nobody's has no unit."""
    assert list(found["units"]) == [*found["names"], NO_UNIT]
    for name in found["names"]:
        assert found["units"][name]["forward"] > 0
        assert found["units"][name]["backward"] > 0
        assert found["units"][name]["copies"] > 0
        assert found["units"][name]["optimizer"] == found["units"][name]["other"] == 0
    assert found["units"][NO_UNIT]["forward"] == found["units"][NO_UNIT]["backward"] == 0


def check_table(found: dict[str, Any], rank: int, world: int) -> None:
    title, heads, *lines, total, share = found["table"].splitlines()
    assert title == f"[rank {rank}/{world}] {STEPS} step(s) in {found['wall_s']:.3f} s; milliseconds per step"
    assert heads.split() == ["unit", *CATEGORIES, "total"]
    rows = {re.split(r"\s\s+", line)[0]: [float(n) for n in re.split(r"\s\s+", line)[1:]] for line in [*lines, total]}
    assert list(rows) == ["(root)", *found["names"][1:], NO_UNIT, "total"]
    expected = [1000 * found["seconds"][category] / STEPS for category in CATEGORIES]
    assert rows["total"] == pytest.approx([*expected, 1000 * found["wall_s"] / STEPS], abs=0.0051)
    assert share.split()[-1] == "100.0%"
    assert {len(line) for line in [heads, *lines, total, share]} == {len(heads)}


def check_trace(written: dict[str, Any], world: int) -> None:
    """Assert that the file is what Perfetto and chrome://tracing read."""
    assert written["displayTimeUnit"] == "ms"
    names = {e["pid"]: e["args"]["name"] for e in written["traceEvents"] if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank} of {world}" for rank in range(world)}
    spans = [event for event in written["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == set(range(world))
    assert {event["ph"] for event in written["traceEvents"]} == {"X", "M"}
    assert min(event["ts"] for event in spans) == 0
    assert all(event["dur"] >= 0 and event["cat"] in CATEGORIES and event["tid"] == 0 for event in spans)
    assert {"forward (root)", "backward blocks.0", "step"} <= {event["name"] for event in spans}


def test_a_model_trains_alike_under_a_profile() -> None:
    zero, model, optimizer = make(3)
    losses = [step(zero, model, optimizer, number) for number in range(3)]
    zero, model, optimizer = make(3)
    with zero.profile():
        again = [step(zero, model, optimizer, number) for number in range(3)]
    assert losses == again


@pytest.mark.parametrize("stage", [0, 3])
def test_methods_are_put_back_after_an_exception(stage: int) -> None:
    zero, model, optimizer = make(stage)
    before, hooks = own_methods(zero, optimizer), hook_counts(model)
    with pytest.raises(ZeroDivisionError), zero.profile() as profile:
        step(zero, model, optimizer)
        raise ZeroDivisionError
    assert (own_methods(zero, optimizer), hook_counts(model)) == (before, hooks)
    assert sum(profile.seconds.values()) == pytest.approx(profile.wall_s)


def test_a_failed_forward_and_a_failed_backward_leave_the_times_right() -> None:
    zero, model, optimizer = make(3)

    def fail(*args: object) -> None:
        raise ZeroDivisionError

    with zero.profile() as profile:
        handle = model.blocks[1].register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            step(zero, model, optimizer)
        handle.remove()
        loss = models.stack_loss(model, 0, 0)
        handle = next(iter(model.blocks[0].parameters())).register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        step(zero, model, optimizer)
        before = profile.seconds["backward"], profile.seconds["other"]
        sum(range(100_000))
    assert profile.seconds["backward"] == before[0]
    assert profile.seconds["other"] > before[1]
    assert sum(profile.seconds.values()) == pytest.approx(profile.wall_s)


def test_it_goes_on_counting_when_it_is_entered_again() -> None:
    zero, model, optimizer = make(3)
    profile = zero.profile()
    with profile:
        step(zero, model, optimizer)
    first, slices = profile.wall_s, len(profile.slices)
    step(zero, model, optimizer)
    assert (profile.wall_s, len(profile.slices), profile.steps) == (first, slices, 1)
    with profile:
        step(zero, model, optimizer)
    assert profile.wall_s > first
    assert profile.steps == 2
    assert sum(profile.seconds.values()) == pytest.approx(profile.wall_s)


def test_a_graph_may_outlive_the_profile_that_saw_it() -> None:
    zero, model, optimizer = make(3)
    with zero.profile() as profile:
        loss = models.stack_loss(model, 0, 0)
    before = profile.wall_s, len(profile.slices)
    loss.backward()
    optimizer.step()
    assert (profile.wall_s, len(profile.slices)) == before


def entering_inside() -> str:
    zero, model, optimizer = make(3)
    raised: list[str] = []

    def enter(*args: object) -> None:
        with pytest.raises(RuntimeError) as caught, zero.profile():
            pass
        raised.append(str(caught.value))

    model.blocks[0].register_forward_hook(enter)
    step(zero, model, optimizer)
    return "".join(raised)


def test_it_can_not_begin_inside_a_pass() -> None:
    expected = "A profile cannot begin inside a forward of the model: leave it first."
    raised = run_ranks(entering_inside, 2, timeout_s=TIMEOUT_S)
    assert raised == [f"[rank {rank}/2] {expected}" for rank in range(2)]


def test_recomputation_is_backward() -> None:
    class Recomputed(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    zero, model, optimizer = make(3, Recomputed)
    with zero.profile() as profile:
        step(zero, model, optimizer)
    slices = sorted(profile.slices, key=lambda one: one.start_ns)
    first = next(place for place, one in enumerate(slices) if one.category == "backward")
    assert "forward" not in {one.category for one in slices[first:]}
    assert profile.units["blocks.1"]["backward"] > 0


def unwritable(path: str) -> str:
    zero, model, optimizer = make(3)
    with zero.profile() as profile:
        step(zero, model, optimizer)
    with pytest.raises(OSError) as caught:
        profile.save(path)
    return str(caught.value)


def test_a_file_that_can_not_be_written_is_every_ranks_error(tmp_path: Path) -> None:
    for rank, text in enumerate(run_ranks(unwritable, 2, str(tmp_path / "no" / "trace.json"), timeout_s=TIMEOUT_S)):
        assert text.startswith(f"[rank {rank}/2] Rank 0 could not write the profile: ")
        assert "No such file or directory" in text


def test_spans_and_what_is_between_them_fill_the_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    clock = SimpleNamespace(perf_counter_ns=lambda: next(ticks), time_ns=lambda: 0)
    monkeypatch.setattr("zeroshard.report.timeline.time", clock)
    line = Timeline()
    line.start()  # at 1
    line.begin("a", "copies", "unit")
    line.begin("b", "waiting", None)
    line.end()
    line.end()  # at 5
    line.rest("forward", "unit")
    line.stop()
    assert [(one.label, one.unit, one.start_ns, one.duration_ns) for one in line.slices] == [
        ("other", NO_UNIT, 1, 1),
        ("b", "unit", 3, 1),
        ("a", "unit", 2, 3),
        ("other", NO_UNIT, 5, 1),
        ("forward", "unit", 6, 1),
    ]
    spent = {"other": 2, "copies": 2, "waiting": 1, "forward": 1}
    assert {one: sum(ns for (kind, _), ns in line.spent_ns.items() if kind == one) for one in spent} == spent


def test_a_trace_begins_with_the_first_span_of_any_rank() -> None:
    late, early = Slice("a", "copies", "u", 5_000, 1_000), Slice("b", "copies", "u", 2_000, 4_000)
    events = [one for one in _chrome_trace([[late], [early]])["traceEvents"] if one["ph"] == "X"]
    assert [(one["pid"], one["ts"], one["dur"]) for one in events] == [(0, 3.0, 1.0), (1, 0.0, 4.0)]
