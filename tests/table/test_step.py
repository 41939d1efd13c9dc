"""The steady state in integers, against lists written by hand, and what is refused."""

from itertools import chain

import pytest

from tests import models
from zeroshard.describe.precision import Precision
from zeroshard.describe.specs import describe_units
from zeroshard.describe.units import plan_units
from zeroshard.table.schedule import Record, plain_marks
from zeroshard.table.spec import UnitSpec
from zeroshard.table.stages import STAGES
from zeroshard.table.step import Steady, Uses, _settle, plain_uses, steady_passes, update_actions


def described(stage: int, depth: int = 2) -> tuple[UnitSpec, ...]:
    return describe_units(plan_units(models.Stack(depth), None), STAGES[stage], Precision(), shard_size=2)


def told(steady: Steady) -> list[str]:
    return [f"{kind} {unit}" for kind, unit in chain.from_iterable(steady.actions)]


@pytest.mark.parametrize("count", range(1, 12))
def test_plain_uses_settle_at_the_plain_records(count: int) -> None:
    (forward, _), (backward, _) = plain_marks(count)
    uses = plain_uses(count)
    assert _settle(uses.forward)[0] == forward
    assert _settle(uses.backward)[0] == backward


def test_a_unit_that_is_needed_again_stays_whole() -> None:
    marks = (("need", 0), ("need", 1), ("leave", 1), ("need", 2), ("leave", 2), ("need", 1), ("leave", 1), ("close", 0))
    record, actions = _settle(marks)
    assert record == Record((("gather", 0), ("gather", 1), ("gather", 2)), frozenset([1]))
    # Whole since its first use, it is not asked for again.
    assert [place for place, done in enumerate(actions) if ("gather", 1) in done] == [0]
    assert not actions[5]


def test_the_actions_of_the_passes_by_hand() -> None:
    forward, backward = steady_passes(described(3), plain_uses(3))
    assert told(forward) == ["gather 0", "gather 1", "gather 2", "release 1"]
    assert told(backward) == [
        *("gather 1", "reduce 2", "release 2", "reduce 1", "release 1", "reduce 0", "release 0"),  # 0 and 2 stayed
    ]
    assert [len(done) for done in forward.actions] == [3, 0, 1, 0, 0, 0]  # two units are on their way at once
    assert [len(done) for done in backward.actions][:4] == [1, 0, 1, 1]  # the next unit is gathered at the beginning


@pytest.mark.parametrize("is_reduced", [True, False])
def test_a_backward_that_begins_with_the_last_unit_has_no_more_than_two_at_a_time(is_reduced: bool) -> None:
    _, backward = steady_passes(described(3, 5), plain_uses(6), is_reduced=is_reduced)
    whole, most = {5}, 0
    for kind, unit in chain.from_iterable(backward.actions):
        if kind == "gather":
            whole.add(unit)
        elif kind == "release":
            whole.discard(unit)
        most = max(most, len(whole))
    assert most == 2


def test_nothing_is_reduced_without_synchronization() -> None:
    units = described(3)
    reduced, kept = (told(steady_passes(units, plain_uses(3), is_reduced=one)[1]) for one in (True, False))
    assert [action for action in reduced if not action.startswith("reduce")] == kept
    assert len(reduced) - len(kept) == 3


def test_each_optimizer_has_its_step_and_its_units() -> None:
    units = described(2)
    two = [*update_actions(units, [[0], [1, 2]])]
    assert two[:3] == [("update", 0), ("publish", 0), ("step", 0)]
    assert two[3:] == [("update", 1), ("update", 2), ("publish", 1), ("publish", 2), ("step", 0)]
    assert [*update_actions(units, [])] == []
    assert [*update_actions(described(3), [[0, 1, 2]])] == [*(("update", number) for number in range(3)), ("step", 0)]


def test_units_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unit 3, but the model has 3 units"):
        steady_passes(described(3), plain_uses(4))
    with pytest.raises(ValueError, match=r"unit 9"):
        steady_passes(described(3), Uses((("need", 9), ("close", 0)), ()))
