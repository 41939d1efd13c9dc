"""Units whose parameters stay whole, from forward to backward or always, train as plain data parallelism does."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests import models
from tests.oracle import TIMEOUT_S, Plain, Run, Sharded, assert_same, randn, run_cases
from tests.oracle import _execute as execute
from zeroshard.testing import run_ranks

UNTIL, STEP = "until-backward", "until-step"
MIXED = {"blocks.0": "replicated", "blocks.1": UNTIL, "(root)": UNTIL}
OTHERS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("*", UNTIL),),
    (("blocks.*", UNTIL),),
    tuple(MIXED.items()),
    (("*", "replicated"),),
    (("*", STEP),),
    (("blocks.0", STEP), ("blocks.1", UNTIL), ("(root)", STEP)),
)


def every_kind_of_pass(run: Run) -> None:
    """Train with passes that differ in what comes between a forward and its backward."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer, units=[models.Block])
    for step in range(3):
        run.backward(models.stack_loss(model, step, run.rank))
        with run.no_sync():
            run.backward(models.stack_loss(model, step, run.rank, 1))
        run.backward(models.stack_loss(model, step, run.rank, 2) + models.stack_loss(model, step, run.rank, 3))
        loss = models.stack_loss(model, step, run.rank, 4)
        with torch.no_grad():
            run.record(eval=models.stack_loss(model, step, run.rank, 5))
        run.backward(loss)
        first, second = (models.stack_loss(model, step, run.rank, micro) for micro in (6, 7))
        run.backward(first)
        run.backward(second)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # A forward whose backward never comes.
        run.record(loss=models.stack_loss(model, step, run.rank, 8))
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=models.stack_loss(model, step, run.rank, 9))
        with run.gathered():
            run.record(total=sum(p.square().sum() for p in model.parameters()))
        run.backward(models.stack_loss(model, step, run.rank, 10))


def other_units_on_each_rank(run: Run) -> None:
    """Train with routes that differ by rank and by step, and with a frozen block."""
    model = models.build(models.Routed)
    model.blocks[2].requires_grad_(False)
    optimizer = models.adamw(model)
    run.shard(model, optimizer, units=[models.Block])
    routes = [[0, 1], [3, 1, 0], [2, 0, 2], [1]]
    for step in range(5):
        for micro in range(2):
            route = routes[(step + run.rank + micro) % len(routes)]
            run.backward(model(models.features(step, run.rank, micro), route).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    with run.gathered():
        run.record(weights=list(model.parameters()))


def fails_in_between(run: Run) -> None:
    """Train past an exception inside a forward, on all ranks, after a unit was gathered."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer, units=[models.Block])
    for step in range(3):
        model(models.features(step, run.rank))
        with pytest.raises(RuntimeError):
            model.blocks[1](torch.ones(2, 7))
        run.backward(models.stack_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()


SCRIPTS: tuple[Callable[[Run], None], ...] = (every_kind_of_pass, other_units_on_each_rank, fails_in_between)


def compared(script: Callable[[Run], None], parameters: tuple[tuple[str, str], ...], shared_memory: bool) -> list[Any]:
    """Run a script plainly and sharded at stage 3; return both results."""
    options = {"parameters": dict(parameters), "shared_memory": shared_memory}
    return [execute(Plain(), script), execute(Sharded(3, options), script)]


CASES = [
    *((script, OTHERS[0], True, 2) for script in SCRIPTS),
    *((script, OTHERS[2], False, 2) for script in SCRIPTS),
    *((script, OTHERS[4], False, 2) for script in SCRIPTS),
    *((every_kind_of_pass, other, True, 2) for other in OTHERS[1:]),
    (other_units_on_each_rank, OTHERS[2], True, 3),
    (other_units_on_each_rank, OTHERS[5], True, 3),
]


@pytest.mark.product
@pytest.mark.parametrize(("script", "parameters", "shared_memory", "world"), CASES)
def test_numbers_are_those_of_plain_data_parallelism(
    script: Callable[[Run], None], parameters: tuple[tuple[str, str], ...], shared_memory: bool, world: int
) -> None:
    by_rank = run_ranks(compared, world, script, parameters, shared_memory, timeout_s=TIMEOUT_S)
    for rank, (expected, actual) in enumerate(by_rank):
        assert_same(expected, actual, f"[rank {rank}/{world}]")


def counted(parameters: dict[str, str] | str, shared_memory: bool) -> tuple[Any, ...]:
    """Return what a step gathers, sends and holds, beside what was predicted."""
    model = models.build(models.Even)
    optimizer = models.adamw(model)
    options = {"parameters": parameters, "shared_memory": shared_memory}
    run = Sharded(3, options)
    run.shard(model, optimizer, units=[models.EvenBlock])
    zero = run.zeros[0]
    for step in range(4):
        predicted = zero.trace.predicted() if step > 1 else []
        model(randn(3, 48, key=(step, run.rank))).square().mean().backward()
        if step == 3:
            sent = dict(zero.traffic().sent_bytes)
        optimizer.step()
        optimizer.zero_grad()
    events, memory, traffic = zero.trace.step_events(3), zero.memory(), zero.traffic()
    assert events == predicted
    counts = {(e.phase, e.kind): sum((o.phase, o.kind) == (e.phase, e.kind) for o in events) for e in events}
    sends = sum(event.nbytes for event in events)
    assert sends == traffic.predicted_step_bytes, (sends, traffic.predicted_step_bytes, sent)
    return counts, memory.resident_bytes, memory.peak_bytes, memory.predicted_bytes


@functools.cache
def counts() -> Mapping[tuple[Any, ...], list[Any]]:
    asked = ["sharded", UNTIL, STEP, "replicated"]
    return run_cases(counted, 2, [(one, shared) for one in asked for shared in (True, False)], timeout_s=2 * TIMEOUT_S)


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_kept_is_not_gathered_again_and_is_predicted_to_the_byte(shared: bool) -> None:
    numel, block = 9 * 48 * 48, 2 * 48 * 48
    for rank in range(2):
        of = {name: counts()[name, shared][rank] for name in ("sharded", UNTIL, STEP, "replicated")}
        assert [of[name][0].get(("forward", "gather"), 0) for name in of] == [5, 5, 5, 0]
        # The backward finds the root and the unit that the forward used last.
        assert [of[name][0].get(("backward", "gather"), 0) for name in of] == [3, 0, 0, 0]
        assert [of[name][0].get(("forward", "release"), 0) for name in of] == [3, 0, 0, 0]
        assert [of[name][0].get(("backward", "release"), 0) for name in of] == [5, 5, 0, 0]
        assert [of[name][0].get(("step", "publish"), 0) for name in of] == [0, 0, 0, 5]
        assert [of[name][1]["parameters"] for name in of] == [numel * 2, numel * 2, numel * 2, numel * 4]
        for name, (_, resident, peak, predicted) in of.items():
            assert peak["transient"] <= predicted["transient"], (name, peak, predicted)
            assert resident["parameters"] == predicted["parameters"], name
        # All units instead of the root and two others.
        for measured in (2, 3):
            assert of[UNTIL][measured]["transient"] - of["sharded"][measured]["transient"] == (4 - 2) * block * 4
        assert of[STEP][2]["transient"] == of[STEP][3]["transient"]


def accumulated(shared_memory: bool) -> list[int]:
    """Return the gathers of each step with three micro-batches, and of an evaluation inside the first."""
    model = models.build(models.Even)
    optimizer = models.adamw(model)
    run = Sharded(3, {"parameters": STEP, "shared_memory": shared_memory})
    run.shard(model, optimizer, units=[models.EvenBlock])
    for step in range(2):
        for micro in range(3):
            model(randn(3, 48, key=(step, run.rank, micro))).square().mean().backward()
            with torch.no_grad():
                model(randn(3, 48, key=(step, run.rank, micro)))
        optimizer.step()
        optimizer.zero_grad()
    events = (run.zeros[0].trace.step_events(step) for step in range(2))
    return [sum(event.kind == "gather" for event in some) for some in events]


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_kept_to_the_step_is_gathered_once_a_step(shared: bool) -> None:
    assert run_ranks(accumulated, 2, shared, timeout_s=TIMEOUT_S) == [[5, 5]] * 2


def test_what_cannot_be_kept_is_refused() -> None:
    def shard(**options: Any) -> zs.Zero:
        model = models.build(models.Stack)
        return zs.shard(model, models.adamw(model), **options)

    with pytest.raises(ValueError, match=r"parameters= names 'layers\.\*', which matches no unit; units: \(root\)"):
        shard(parameters={"layers.*": "replicated"})
    with pytest.raises(ValueError, match="sharded, until-backward, until-step, replicated or a cell; got 'whole'"):
        shard(parameters="whole")
    with pytest.raises(TypeError, match="takes a cell such as"):
        shard(parameters=3)
    with pytest.raises(ValueError, match="So a column can be sharded only if the columns before it are"):
        shard(parameters={"*": UNTIL}, stage=1)
    with pytest.raises(ValueError, match="must be 'use', 'backward' or 'step'; got 'end'"):
        zs.Sharded(until="end")  # type: ignore[arg-type]
    zero = shard(parameters={"blocks.2": zs.Replicated(), "*": UNTIL})
    assert "stage 3, parameters of blocks.2 replicated, parameters of * sharded, whole until the backward" in repr(zero)
