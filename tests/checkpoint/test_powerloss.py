"""A loss of power at any moment of a save, a retention, an import and an export: nothing committed is lost."""

from collections.abc import Callable
from pathlib import Path

import pytest

from . import cuts
from .cuts import SCENARIOS
from .powerloss import Operation, try_all

STARTS = 6


@pytest.mark.product
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_loss_of_power_loses_what_is_committed(name: str, tmp_path: Path) -> None:
    """In every outcome that the model allows; `python -m tools.powerloss` starts the next run on each of them, too."""
    outcome = cuts.prepare(tmp_path)
    scenario = SCENARIOS[name]
    operations = scenario.operations(tmp_path / "recorded")
    counts = try_all(operations, outcome, scenario.start, most=8, samples=100, starts=STARTS)
    assert counts.started == STARTS
    assert counts.states > 100


def without(kind: str, number: int | None = None) -> Callable[[list[Operation]], list[Operation]]:
    """Return what drops operations of a kind, or one of them, counted from the last."""

    def plant(operations: list[Operation]) -> list[Operation]:
        places = [place for place, (_, found, _) in enumerate(operations) if found == kind]
        dropped = set(places if number is None else [places[number]])
        return [one for place, one in enumerate(operations) if place not in dropped]

    return plant


def commit_early(operations: list[Operation]) -> list[Operation]:
    """Rename a folder before its names are flushed, and flush them under the new name."""
    place = next(n for n, (_, kind, args) in enumerate(operations) if kind == "rename" and args[1] == "runs/step-2")
    flush = operations[place - 1]
    assert flush[1:] == ("sync_folder", (operations[place][2][0],))
    return [*operations[: place - 1], operations[place], (*flush[:2], ("runs/step-2",)), *operations[place + 1 :]]


PLANTED = {
    "no file is flushed": without("sync"),
    "no folder is flushed": without("sync_folder"),
    "the last folder is not flushed before files of it go": without("sync_folder", -1),
    "the rename comes before the flush of the folder": commit_early,
}


@pytest.mark.product
@pytest.mark.parametrize("name", PLANTED)
def test_a_flush_that_is_missing_is_found(name: str, tmp_path: Path) -> None:
    operations = PLANTED[name](SCENARIOS["retention"].operations(tmp_path / "recorded"))
    with pytest.raises(AssertionError, match=r"is not whole|was said to be committed"):
        try_all(operations, tmp_path / "outcome", lambda root, moment: None, most=8, samples=100, starts=0)
