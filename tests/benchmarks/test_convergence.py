"""The comparison of islands with synchronous training: what runs, in what order, and what the tables say."""

from dataclasses import asdict
from typing import Any

import torch

from benchmarks.convergence import AVERAGING, GRID, SEEDS, SYNCHRONOUS, Asked, best_two, runs_of, table_of


def run(asked: Asked, seed: int, value: float) -> dict[str, Any]:
    """Return a run as the result file has it."""
    return {"asked": asdict(asked), "seed": seed, "bits_per_byte": value}


def test_all_runs_come_once_and_those_of_the_first_seed_first() -> None:
    made = [run(asked, SEEDS[0], 2.0 + number) for number, asked in enumerate(GRID)]
    found = list(dict.fromkeys(runs_of(made)))
    seeds = [seed for _, seed in found]
    assert seeds[: seeds.count(1)] == [1] * seeds.count(1)
    assert {asked for asked, seed in found if seed == 1} >= {*SYNCHRONOUS, *AVERAGING, *GRID}
    assert {asked for asked, seed in found if seed == 3 and asked in GRID} == set(GRID[:2])


def test_the_best_of_the_grid_are_those_with_the_lowest_values() -> None:
    made = [run(asked, 1, abs(number - 7)) for number, asked in enumerate(GRID)]
    assert set(best_two(made)) <= {GRID[6], GRID[7], GRID[8]}
    assert best_two(made)[0] == GRID[7]


def test_a_row_has_mean_range_and_the_ratio_by_seed() -> None:
    made = [
        run(SYNCHRONOUS[0], 1, 2.0),
        run(SYNCHRONOUS[0], 2, 4.0),
        run(AVERAGING[0], 1, 2.2),
        run(AVERAGING[0], 2, 4.2),
    ]
    row = next(line for line in table_of({"runs": made}).splitlines() if "every 10, averaging |" in line)
    assert row == "| 2 islands, every 10, averaging | 1500 | 2 | 3.200 (2.200 to 4.200) | +7.5% (+5.0% to +10.0%) |"


def test_the_outer_optimizer_is_the_one_of_the_row() -> None:
    outer = GRID[0].outer()
    assert outer is not None and callable(outer.optimizer)
    made = outer.optimizer([torch.nn.Parameter(torch.zeros(1))])
    group = made.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (GRID[0].rate, GRID[0].momentum, True)
    assert AVERAGING[1].outer().bits == 4  # type: ignore[union-attr]
