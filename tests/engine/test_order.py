"""The order of collectives on simulated ranks: a part of what `tools/explore` runs by the million."""

from tools.explore.program import Failure, Op, Program, flat
from tools.explore.run import run
from tools.explore.work import crew


def test_gradients_that_another_rank_promised_and_never_had_are_summed() -> None:
    # Rank 0 says that it is not ready for the root, and has no gradient of it in the end: rank 1 must not wait for it.
    steps = (Op("forward", (flat([1]), ())), Op("backward", lost=((0,), ())), Op("step"))
    outcome = run(Program(2, 2, steps), crew())
    assert (outcome.verdict, outcome.faults) == ("right", [])
    assert "postpone" in [event.kind for event in outcome.ranks[1].order.trace.events]


def test_gradients_are_summed_though_a_rank_raised_before_it_had_its_own() -> None:
    steps = (Op("forward", (flat([3]), ())), Op("backward"), Op("step"))
    outcome = run(Program(2, 4, steps, Failure(rank=0, op=1, mark=3)), crew())
    assert (outcome.verdict, outcome.faults) == ("right", [])
