"""The caching allocator in the paper's runs: what it has, and that its retries do not explain what they lost."""

import pytest

from zeroshard.evidence import paper_data as data
from zeroshard.evidence.paper_allocator import allocator, full_runs, peak_and_room_of, retries_of
from zeroshard.evidence.paper_data import Run
from zeroshard.evidence.paper_runs import BUDGET_BYTES, CB_BYTES, film_of, outcome_of

FULL = ("10B", "11B", "12B", "13B", "40B", "120B", "140B", "170B")
"""By name, since predicting which they are takes seconds of each process that collects tests."""
RUNS = {run.label: run for run in (*data.FIGURE_4, *(pair.zero for pair in data.FIGURE_2)) if run.label in FULL}


def test_these_runs_fill_the_device() -> None:
    assert tuple(RUNS) == FULL
    assert {run.label: run for run in full_runs()} == RUNS


@pytest.mark.parametrize("label", ["13B", "140B"])
def test_what_has_memory_of_its_own_and_the_rest_are_all_that_is_there(label: str) -> None:
    run = RUNS[label]
    film = film_of(run, is_settled=True)
    peak_bytes, room_bytes = peak_and_room_of(run)
    own_bytes = BUDGET_BYTES - CB_BYTES - room_bytes
    inputs = run.layers * run.batch * 1024 * run.hidden * 2 // run.tensor
    # Checkpoints, and the output of the last block, beside what is there before the step.
    assert sum(film.resident_bytes.values()) + inputs <= own_bytes
    assert own_bytes <= sum(film.resident_bytes.values()) + inputs + 8 * run.batch * 1024 * run.hidden * 2
    # Without memory of its own for checkpoints, both together have the film's peak, or more: checkpoints come and go.
    assert film.peak[0] <= own_bytes + peak_bytes
    assert 0 < peak_bytes < room_bytes


@pytest.mark.parametrize("run", [*RUNS.values(), *data.FIGURE_3], ids=lambda run: run.label)
def test_no_run_of_the_paper_has_retries_in_a_steady_step(run: Run) -> None:
    found = retries_of(run, peak_and_room_of(run)[1])
    assert found.is_served and found.by_step == (0,) * 3


@pytest.mark.parametrize("label", ["10B", "13B", "170B"])
def test_with_less_room_retries_end_with_the_first_step(label: str) -> None:
    peak_bytes, _ = peak_and_room_of(RUNS[label])
    assert not retries_of(RUNS[label], peak_bytes - 1).is_served
    found = [retries_of(RUNS[label], int(peak_bytes * part)) for part in (1.06, 1.1, 1.2)]
    assert all(one.is_served and set(one.by_step[1:]) == {0} for one in found)
    if label in ("10B", "13B"):
        assert found[0].by_step[0] > 0


def test_what_is_missing_would_take_dozens_of_retries_in_each_step() -> None:
    table = allocator()
    place = [column.title for column in table.columns].index("of them to explain")
    assert len(table.rows) == len(RUNS)
    assert all(isinstance(times, float) and times > 40 for times in (row[place] for row in table.rows))
    missing = [row[2] for row in table.rows]
    for run, seconds in zip(RUNS.values(), missing, strict=True):
        outcome = outcome_of(run)
        # What was published and what is missing are one step.
        assert isinstance(seconds, float)
        assert outcome.step_s / (outcome.step_s + seconds) == pytest.approx(run.published / outcome.teraflops)
