"""What the comparison of optimizers makes of its runs."""

from typing import Any

import pytest

from benchmarks.machine import put_table
from benchmarks.optimizers import OPTIMIZERS, best_of, reached_at, summarize, table_of


def run_of(
    optimizer: str, multiple: float, seed: int, curve: list[list[Any]], steps: int = 100, step_s: float = 0.01
) -> dict[str, Any]:
    rate = {"optimizer": optimizer, "multiple": multiple, "learning_rate": 0.5 * multiple, "steps": steps, "seed": seed}
    return rate | {"curve": curve, "step_s": step_s}


RUNS = [
    run_of("adamw", 1.0, 1, [[50, 3.0], [100, 2.0]]),
    run_of("adamw", 1.0, 2, [[50, 3.2], [100, 2.2]]),
    run_of("adamw", 2.0, 1, [[50, 1.0], [100, 1.0]]),
    run_of("muon", 1.0, 1, [[50, 2.0], [100, 1.8]]),
    run_of("muon", 1.0, 2, [[50, 2.0], [100, 1.9]]),
    run_of("muon", 4.0, 1, [[7, None]]),
    run_of("muon", 4.0, 2, [[50, 1.0], [100, 1.0]]),
    run_of("muon", 1.0, 1, [[80, 2.2]], steps=80),
]
MACHINE = {"machine": {"cpu": "a processor"}}
SETTINGS = {"depth": 2, "context": 64, "batch": 16, "steps": 100}


def test_the_best_rate_is_that_of_the_best_mean_among_those_with_most_seeds() -> None:
    best = best_of([run for run in RUNS if run["optimizer"] == "adamw"])
    assert best is not None
    assert (best["multiple"], best["learning_rate"]) == (1.0, 0.5)
    assert best["mean"] == pytest.approx(2.1)
    diverged = best_of([run for run in RUNS if run["optimizer"] == "muon" and run["steps"] == 100])
    assert diverged is not None
    assert diverged["multiple"] == 1.0
    assert best_of([]) is None


def test_the_first_evaluation_that_reaches_a_value_is_found() -> None:
    some = [run for run in RUNS if run["optimizer"] == "muon" and run["multiple"] == 1.0 and run["steps"] == 100]
    assert reached_at(some, 2.0) == 50
    assert reached_at(some, 1.86) == 100
    assert reached_at(some, 1.0) is None


def test_a_table_has_a_row_for_each_optimizer_and_number_of_steps() -> None:
    result = {"runs": RUNS, "settings": SETTINGS, "circumstances": MACHINE}
    summary = summarize(result)
    assert list(summary) == ["adamw, 100 steps", "muon, 100 steps", "muon, 80 steps"]
    assert summary["muon, 100 steps"]["against_adamw"] == pytest.approx(1.85 / 2.1)
    assert summary["muon, 80 steps"]["reached_at"] is None
    table = table_of(result)
    assert "| muon | 100 | 0.5 (1 times the default) | 1.850 | 1.800 to 1.900, 2 seeds | -11.9% | 50 steps |" in table
    assert "1 (2), 2 (1), 4 (2)" in table
    page = put_table("a\n<!-- table: optimizers -->\n\nold\n\n<!-- end -->\nb\n", "optimizers", table)
    assert page.startswith("a\n<!-- table: optimizers -->\n\n| optimizer")
    assert page.endswith("<!-- end -->\nb\n")
    assert "old" not in page


@pytest.mark.rotates
def test_all_optimizers_of_the_job_are_compared() -> None:
    from zeroshard.train.optimizers import MAKERS

    assert set(OPTIMIZERS) == set(MAKERS)
