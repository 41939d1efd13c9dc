"""The steady state in integers, against lists written by hand, and what is refused."""

import subprocess
import sys

import pytest
from torch import nn

from tests import models
from zeroshard.describe.precision import Precision
from zeroshard.describe.specs import describe_units
from zeroshard.describe.treatments import activations_of
from zeroshard.describe.units import plan_units
from zeroshard.plan.trace.step_events import Uses, _settle, plain_uses, step_events
from zeroshard.plan.trace.uses import trace_uses
from zeroshard.table.schedule import Record, plain_marks
from zeroshard.table.spec import UnitSpec
from zeroshard.table.stages import STAGES


def described(stage: int, depth: int = 2) -> tuple[UnitSpec, ...]:
    return describe_units(plan_units(models.Stack(depth), None), STAGES[stage], Precision(), shard_size=2)


@pytest.mark.parametrize("count", range(1, 12))
def test_plain_uses_settle_at_the_plain_records(count: int) -> None:
    (forward, _), (backward, _) = plain_marks(count)
    uses = plain_uses(count)
    assert _settle(uses.forward, [])[0] == forward
    assert _settle(uses.backward, [])[0] == backward


def test_a_unit_that_is_needed_again_stays_whole() -> None:
    marks = (("need", 0), ("need", 1), ("leave", 1), ("need", 2), ("leave", 2), ("need", 1), ("leave", 1), ("close", 0))
    record, followed = _settle(marks, [])
    assert record == Record((("gather", 0), ("gather", 1), ("gather", 2)), frozenset([1]))
    # Whole since its first use, it is not asked for again.
    assert followed == [mark for place, mark in enumerate(marks) if place != 5]


def test_the_events_of_a_step_by_hand() -> None:
    events = step_events(described(3), plain_uses(3), step=7)
    assert [f"{event.phase} {event.kind} {event.unit or 'root'}" for event in events] == [
        *(f"forward {text}" for text in ("gather root", "gather blocks.0", "gather blocks.1")),
        *(f"forward {text}" for text in ("release blocks.0", "release blocks.1", "release root")),
        *(f"backward {text}" for text in ("gather root", "gather blocks.1", "gather blocks.0", "reduce blocks.1")),
        *(f"backward {text}" for text in ("release blocks.1", "reduce blocks.0", "release blocks.0", "reduce root")),
        *("backward release root", "step step root"),
    ]
    assert {event.step for event in events} == {7}


def test_each_optimizer_has_its_step_and_its_units() -> None:
    units = described(2)
    two = step_events(units, plain_uses(3), optimizers=[[0], [1, 2]])
    told = [f"{event.kind} {event.unit or 'root'}" for event in two if event.phase == "step"]
    assert told == ["publish root", "step root", "publish blocks.0", "publish blocks.1", "step root"]
    none = step_events(units, plain_uses(3), optimizers=[])
    assert [event.kind for event in none if event.phase == "step"] == []
    assert sum(event.nbytes for event in two if event.kind == "publish") == sum(u.sent_bytes("publish") for u in units)


def test_only_the_last_micro_batch_reduces_without_synchronization() -> None:
    each, last = (step_events(described(3), plain_uses(3), micro_batches=3, no_sync=one) for one in (False, True))
    assert [sum(event.kind == "reduce" for event in events) for events in (each, last)] == [9, 3]
    assert [sum(event.kind == "gather" for event in events) for events in (each, last)] == [18, 18]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unit 3, but the model has 3 units"):
        step_events(described(3), plain_uses(4))
    with pytest.raises(ValueError, match=r"micro_batches must be at least 1.*got 0 and 0"):
        step_events(described(3), plain_uses(3), micro_batches=0)
    with pytest.raises(ValueError, match=r"unit 9"):
        step_events(described(3), Uses((("need", 9), ("close", 0)), ()))


def test_what_cannot_be_traced_is_said() -> None:
    model = models.Stack()
    plans = plan_units(model, None)
    x = models.features(0, 0)
    with pytest.raises(ValueError, match=r"known only for every=1"):
        trace_uses(lambda m, x: m(x).sum(), model, [x], plans, activations=activations_of("recompute-sqrt"))
    with pytest.raises(ValueError, match=r"it ran 2 times"):
        trace_uses(lambda m, x: (m(x) + m(x)).sum(), model, [x], plans)
    with pytest.raises(RuntimeError, match=r"the model reads some"):
        trace_uses(lambda m, x: m(x).sum() * m.head.weight.sum().item(), model, [x], plans)


def test_a_trace_leaves_the_model_as_it_was() -> None:
    model = models.Stack()
    before = dict(model.named_parameters())
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    trace_uses(lambda m, x: m(x).sum(), model, [models.features(0, 0)], plan_units(model, None))
    assert all(p is before[name] and p.grad is None for name, p in model.named_parameters())
    assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()] == hooks
    assert isinstance(model.head, nn.Linear)


def test_events_are_made_without_torch() -> None:
    program = """
import sys
sys.modules["torch"] = None
from zeroshard.plan.trace.step_events import plain_uses, step_events
from zeroshard.table.layout import plan_layout
from zeroshard.table.spec import BucketSpec, Formats, UnitSpec
from zeroshard.table.stages import STAGES
formats = Formats(*["float32"] * 5)
buckets = [BucketSpec(str(n), n, ("p",), plan_layout([100], 4, 4), formats, STAGES[3], 0, 1) for n in range(4)]
units = [UnitSpec(n, str(n), (bucket,)) for n, bucket in enumerate(buckets)]
print(len(step_events(units, plain_uses(4))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    # Of each unit: two gathers, two releases, a reduction.
    assert done.stdout.split() == ["21"], done.stderr
