"""Training on islands is that of K copies in one process, at each stage and on both transports."""

from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from tests.oracle import assert_same
from tests.outer.plain import build, loss_of, mesh_of, nesterov, plain, sharded, whole
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
        "8 bits": {"every": 2, "bits": 8},
        "4 bits, momentum, on the host": {"every": 2, "bits": 4, "optimizer": nesterov, "memory": "host"},
        "4 bits, fragments, delayed": {"every": 4, "bits": 4, "fragments": 2, "delay": 1},
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
        options, layouts = OPTIONS[name], [by_rank[rank][place][1] for rank in range(ranks)]
        expected = plain(islands, ranks, 4 * options["every"] + 1, layouts, **options)
        for rank, results in enumerate(by_rank):
            for step, (mine, theirs) in enumerate(zip(results[place][0], expected[rank // ranks], strict=True)):
                for key in theirs:
                    off = (mine[key] - theirs[key]).abs().max().item()
                    assert off <= TOLERANCE, f"{name}, stage {stage}, shared {shared}, step {step}, {key}: {off}"


def stages(name: str, *, all_of_them: bool) -> list[tuple[int, bool, str]]:
    """Return the cases of some options: each stage, with and without shared memory in turn."""
    place = [*OPTIONS].index(name)
    return [(stage, (stage + place) % 2 == 0, name) for stage in (range(4) if all_of_them else (place % 3, 3))]


@pytest.mark.product
@pytest.mark.parametrize("name", OPTIONS)
def test_two_islands_of_one_rank(name: str) -> None:
    check(2, 1, stages(name, all_of_them=False))


@pytest.mark.product
@pytest.mark.parametrize("name", OPTIONS)
def test_two_islands_of_two_ranks(name: str) -> None:
    check(2, 2, stages(name, all_of_them=True))


@pytest.mark.product
@pytest.mark.parametrize("name", [*OPTIONS][1::2])
def test_four_islands_of_one_rank(name: str) -> None:
    check(4, 1, stages(name, all_of_them=False))


# -- bits -------------------------------------------------------------------------------------------------------------


def exact(islands: int) -> list[Any]:
    """Train in fp32, and average every third step."""
    return [sharded(islands, 7, stage, stage == 3, {"every": 3}, dtype=torch.float32) for stage in (1, 3)]


@pytest.mark.rotates
@pytest.mark.parametrize(("islands", "ranks"), [(2, 2), (3, 1)])
def test_averages_in_fp32_are_equal_bit_for_bit(islands: int, ranks: int) -> None:
    by_rank = run_ranks(exact, islands * ranks, islands, timeout_s=120.0)
    for place in range(2):
        layouts = [by_rank[rank][place][1] for rank in range(ranks)]
        expected = plain(islands, ranks, 7, layouts, every=3, dtype=torch.float32)
        for rank, results in enumerate(by_rank):
            assert_same(expected[rank // ranks], results[place][0], f"rank {rank}")


def in_step(outer: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """Train with SGD on two copies of the state, or on islands that exchange each step."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    islands = None if outer is None else zs.Outer(**outer)
    zero = zs.shard(model, optimizer, stage=2, mesh=mesh_of(2), outer=islands)
    for step in range(4):
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(zero, model)


def test_averages_of_each_step_of_sgd_are_synchronous_training() -> None:
    expected, actual = (run_ranks(in_step, 4, outer)[3] for outer in (None, {"every": 1}))
    for name, value in expected.items():
        assert torch.allclose(value, actual[name], rtol=0.0, atol=TOLERANCE), name
