"""From the second step on, the engine issues what `table/schedule.py` said it would, event by event, on every rank."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from tests import models
from tests.models import WIDTH
from tests.oracle import STAGES, TIMEOUT_S, Sharded, run_cases
from zeroshard.testing import run_ranks

Body = Callable[[Sharded, nn.Module, int], None]
STEPS = 5


def follow(build: Callable[[], nn.Module], body: Body, stage: int, options: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Train and return, for each step from the second on, the events that were predicted and those that came."""
    run = Sharded(stage)
    model = models.build(build)
    optimizer = models.adamw(model)
    run.shard(model, optimizer, **options)
    zero = run.zeros[0]
    found = []
    for step in range(STEPS):
        predicted = zero.trace.predicted() if step else None
        body(run, model, step)
        optimizer.step()
        optimizer.zero_grad()
        last = max((event.step for event in zero.trace.events), default=0)
        if predicted is not None:
            found.append((predicted, zero.trace.step_events(last)))
    return found


def one_micro_batch(run: Sharded, model: nn.Module, step: int) -> None:
    models.stack_loss(model, step, run.rank).backward()


def three_micro_batches(run: Sharded, model: nn.Module, step: int) -> None:
    for micro in range(3):
        models.stack_loss(model, step, run.rank, micro).backward()


def three_micro_batches_unsynced(run: Sharded, model: nn.Module, step: int) -> None:
    with run.no_sync():
        for micro in range(2):
            models.stack_loss(model, step, run.rank, micro).backward()
    models.stack_loss(model, step, run.rank, 2).backward()


def two_forwards(run: Sharded, model: nn.Module, step: int) -> None:
    (models.stack_loss(model, step, run.rank, 0) + models.stack_loss(model, step, run.rank, 1)).backward()


def with_evaluation(run: Sharded, model: nn.Module, step: int) -> None:
    with torch.no_grad():
        models.stack_loss(model, 50 + step, run.rank)
    models.stack_loss(model, step, run.rank).backward()


def clipped(run: Sharded, model: nn.Module, step: int) -> None:
    models.stack_loss(model, step, run.rank).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


class Recomputed(models.Stack):
    """A stack that recomputes every other block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if index % 2 == 0 else block(x)
        return self.head(x)


class AllRecomputed(models.Stack):
    """A stack that recomputes all its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Skipping(models.Stack):
    """A stack whose middle block runs on no rank, with a spare layer that never runs."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = block(x) if index != 1 else x
        return self.head(x)


class SkippingByRank(models.Stack):
    """A stack of which each rank skips a block of its own."""

    def __init__(self) -> None:
        super().__init__(depth=4)

    def forward(self, x: Tensor) -> Tensor:
        rank = torch.distributed.get_rank()
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = block(x) if index != rank else x
        return self.head(x)


class Twice(models.Stack):
    """A stack that runs its first block again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return self.head(x)


class PartlyFrozen(models.Stack):
    """A stack with a frozen block and a partly frozen one."""

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].norm.requires_grad_(False)


PLANS: dict[str, tuple[Callable[[], nn.Module], Body]] = {
    "one micro-batch": (models.Stack, one_micro_batch),
    "three micro-batches": (models.Stack, three_micro_batches),
    "three micro-batches, unsynced": (models.Stack, three_micro_batches_unsynced),
    "two forwards": (models.Stack, two_forwards),
    "evaluation": (models.Stack, with_evaluation),
    "clipping": (models.Stack, clipped),
    "recomputation of some": (Recomputed, one_micro_batch),
    "recomputation of all": (AllRecomputed, three_micro_batches_unsynced),
    "a block skipped by all": (Skipping, one_micro_batch),
    "a block skipped by each": (SkippingByRank, one_micro_batch),
    "a block called twice": (Twice, one_micro_batch),
    "frozen parameters": (PartlyFrozen, one_micro_batch),
    "ten blocks": (functools.partial(models.Stack, depth=10), one_micro_batch),
}


def follow_plan(plan: str, stage: int) -> list[Any]:
    """Follow one of the plans. Runs on a rank."""
    return follow(*PLANS[plan], stage, {})


@pytest.mark.product
@pytest.mark.parametrize(("stage", "world"), [*((stage, 2) for stage in STAGES), (3, 3)])
@pytest.mark.parametrize("plan", PLANS)
def test_the_trace_is_what_was_predicted(plan: str, stage: int, world: int) -> None:
    for rank, found in enumerate(run_ranks(follow_plan, world, plan, stage, timeout_s=TIMEOUT_S)):
        assert len(found) == STEPS - 1
        for step, (predicted, actual) in enumerate(found, 2):
            where = f"[rank {rank}/{world}] step {step}"
            for index, (expected, came) in enumerate(zip(predicted, actual, strict=False)):
                assert expected == came, f"{where}, event {index}: {came}, predicted {expected}"
            assert len(predicted) == len(actual), f"{where}: {len(actual)} events, predicted {len(predicted)}"
            assert [event.kind for event in actual].count("step") == 1, f"{where}: {actual}"


# Written by hand: the prediction and the engine share the schedule, and would be wrong alike. The root has no name.
REDUCED = ["reduce blocks.1", "reduce blocks.0", "reduce "]
PUBLISHED = ["publish ", "publish blocks.0", "publish blocks.1"]
GOLDEN = {
    0: {"forward": [], "backward": REDUCED, "step": ["step "]},
    1: {"forward": [], "backward": REDUCED, "step": [*PUBLISHED, "step "]},
    2: {"forward": [], "backward": REDUCED, "step": [*PUBLISHED, "step "]},
    3: {
        "forward": [
            *("gather ", "gather blocks.0", "gather blocks.1"),
            "release blocks.0",  # the backward finds the root and the last block gathered
        ],
        "backward": [
            "gather blocks.0",
            *("reduce blocks.1", "release blocks.1", "reduce blocks.0", "release blocks.0", "reduce ", "release "),
        ],
        "step": ["step "],
    },
}


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_the_events_of_a_step_are_these(stage: int) -> None:
    build = functools.partial(models.Stack, depth=2)
    for found in run_ranks(follow, 2, build, one_micro_batch, stage, {}, timeout_s=TIMEOUT_S):
        for _, events in found:
            phases = {phase: [f"{e.kind} {e.unit}" for e in events if e.phase == phase] for phase in GOLDEN[stage]}
            assert phases == GOLDEN[stage]
            assert len(events) == sum(map(len, phases.values()))


def test_predictions_differ_between_stages_and_plans() -> None:
    """Comparing two empty or constant lists would prove nothing."""
    seen = set()
    plans = ("one micro-batch", "three micro-batches", "two forwards")
    cases = [(plan, stage) for stage in STAGES for plan in plans]
    for (_, stage), (found, _) in run_cases(follow_plan, 2, cases, timeout_s=2 * TIMEOUT_S).items():
        seen.add((stage, tuple((event.kind, event.unit, event.nbytes) for event in found[-1][1])))
    assert len({events for stage, events in seen if stage == 3}) == 3
    assert len({stage for stage, events in seen if any(kind == "gather" for kind, _, _ in events)}) == 1


FIRST_BACKWARD = """
reduce blocks.2, gather blocks.1, release blocks.2, reduce blocks.1, gather blocks.0,
release blocks.1, reduce blocks.0, release blocks.0, reduce root, release root
"""
LATER_BACKWARD = """
gather blocks.1, reduce blocks.2, release blocks.2, gather blocks.0, reduce blocks.1,
release blocks.1, reduce blocks.0, release blocks.0, reduce root, release root
"""
"""With a record: the gather of the next unit is under way while one is computed, and comes before that one's sum."""


def backwards_of_three_blocks(shared_memory: bool) -> list[list[str]]:
    """Return what the backward of each of three steps issued, in order."""
    run = Sharded(3, {"shared_memory": shared_memory})
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer, units=list(model.blocks))
    for step in range(3):
        one_micro_batch(run, model, step)
        optimizer.step()
        optimizer.zero_grad()
    trace = run.zeros[0].trace
    return [
        [f"{event.kind} {event.unit or 'root'}" for event in trace.step_events(step) if event.phase == "backward"]
        for step in range(3)
    ]


@pytest.mark.product
@pytest.mark.parametrize("shared_memory", [True, False])
def test_the_next_unit_is_on_its_way_before_the_last_one_is_reduced(shared_memory: bool) -> None:
    # What a step issues is compared with a prediction above, which knows the same record: this order is written down.
    first, later = (text.replace("\n", " ").strip().split(", ") for text in (FIRST_BACKWARD, LATER_BACKWARD))
    for found in run_ranks(backwards_of_three_blocks, 2, shared_memory, timeout_s=TIMEOUT_S):
        assert found == [first, later, later]


def changing(stage: int) -> list[tuple[Any, Any]]:
    """Train four steps of one kind, then four of another: the prediction follows a step later."""
    run = Sharded(stage)
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    zero = run.zeros[0]
    found = []
    for step in range(8):
        predicted = zero.trace.predicted() if step else None
        for micro in range(1 if step < 4 else 2):
            models.stack_loss(model, step, run.rank, micro).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((predicted, zero.trace.step_events(max(event.step for event in zero.trace.events))))
    return found


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_the_prediction_follows_a_change_of_plan(stage: int) -> None:
    for found in run_ranks(changing, 2, stage, timeout_s=TIMEOUT_S):
        for step, (predicted, actual) in enumerate(found):
            if step in (1, 2, 3, 5, 6, 7):
                assert predicted == actual, f"step {step}"
        assert found[4][0] != found[4][1], "two micro-batches must not look like one"


def ranks_agree(stage: int) -> list[Any]:
    """Return the sequence of what this rank sent, which the other ranks must have sent, too."""
    run = Sharded(stage)
    model = models.build(SkippingByRank)
    optimizer: Optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(4):
        one_micro_batch(run, model, step)
        optimizer.step()
        optimizer.zero_grad()
    return [
        (event.step, event.phase, event.kind, event.unit)
        for event in run.zeros[0].trace.step_events(max(event.step for event in run.zeros[0].trace.events))
        if event.kind in ("gather", "reduce", "publish")
    ]


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_skip_different_blocks_send_the_same_sequence(stage: int) -> None:
    first, *others = run_ranks(ranks_agree, 3, stage, timeout_s=TIMEOUT_S)
    assert first
    assert all(other == first for other in others)
