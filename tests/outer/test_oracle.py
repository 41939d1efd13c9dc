"""Training on islands is that of K copies in one process, at each stage and on both transports."""

from types import MappingProxyType
from typing import Any

import pytest

from tests.outer.plain import nesterov, plain, sharded
from zeroshard.testing import run_ranks

TOLERANCE = 1e-12
OPTIONS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "average, each step": {"every": 1},
        "average, every third": {"every": 3},
        "nesterov, each step": {"every": 1, "optimizer": nesterov},
        "nesterov, every third": {"every": 3, "optimizer": nesterov},
        "fragments": {"every": 4, "fragments": 2, "optimizer": nesterov},
        "delayed": {"every": 4, "fragments": 2, "delay": 1, "optimizer": nesterov},
        "mixed": {"every": 4, "fragments": 2, "mix": 0.5, "optimizer": nesterov},
        "delayed and mixed": {"every": 4, "fragments": 2, "delay": 1, "mix": 0.5, "optimizer": nesterov},
        "average, delayed and mixed": {"every": 4, "fragments": 2, "delay": 1, "mix": 0.5},
    }
)


def each(islands: int, cases: list[tuple[int, bool, str]]) -> list[Any]:
    """Train each case on this rank."""
    return [
        sharded(islands, 4 * OPTIONS[name]["every"] + 1, stage, shared, OPTIONS[name]) for stage, shared, name in cases
    ]


def check(islands: int, ranks: int, cases: list[tuple[int, bool, str]]) -> None:
    """Compare each case with plain torch, after each step and after the last exchange."""
    by_rank = run_ranks(each, islands * ranks, islands, cases, timeout_s=120.0)
    for place, (stage, shared, name) in enumerate(cases):
        options, names = OPTIONS[name], by_rank[0][place][1]
        expected = plain(islands, ranks, 4 * options["every"] + 1, names, **options)
        for rank, results in enumerate(by_rank):
            for step, (mine, theirs) in enumerate(zip(results[place][0], expected[rank // ranks], strict=True)):
                for key in theirs:
                    off = (mine[key] - theirs[key]).abs().max().item()
                    assert off <= TOLERANCE, f"{name}, stage {stage}, shared {shared}, step {step}, {key}: {off}"


@pytest.mark.product
@pytest.mark.parametrize("name", OPTIONS)
def test_two_islands_of_one_rank(name: str) -> None:
    check(2, 1, [(stage, False, name) for stage in (0, 3)])


@pytest.mark.product
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shared", [True, False])
def test_two_islands_of_two_ranks(name: str, shared: bool) -> None:
    check(2, 2, [(stage, shared, name) for stage in range(4)])


@pytest.mark.product
@pytest.mark.parametrize("name", OPTIONS)
def test_four_islands_of_one_rank(name: str) -> None:
    check(4, 1, [(stage, False, name) for stage in (1, 3)])
