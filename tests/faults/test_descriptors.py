"""Open files of ranks: the numbers that the start expects, and limits that are too low."""

import itertools
import os
import resource

import pytest
import torch

import zeroshard as zs
from tests.rotation import third
from zeroshard.testing import RankFailure, run_ranks
from zeroshard.watch import descriptors


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def count(shares: bool, mesh: int | None) -> list[int]:
    """Return what `zs.init()`, a first model and a second one opened."""
    counts, kept = [opened()], []
    zs.init(seed=0)
    counts.append(opened())
    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        settings = zs.Settings(shared_memory=shares)
        kept.append((model, optimizer, zs.shard(model, optimizer, stage=3, mesh=mesh, settings=settings)))
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        counts.append(opened())
    return [after - before for before, after in itertools.pairwise(counts)]


@pytest.mark.parametrize(("world", "mesh"), [(3, None), (4, 2), (8, 2)])
def test_ranks_open_what_is_expected_of_them(world: int, mesh: int | None) -> None:
    for shares in third([True, False]):
        start, *models = run_ranks(count, world, shares, mesh, process_group=False)[-1]
        assert start == descriptors.of_start(world, hosts_store=False)
        boarded = world // (mesh or 1) * shares
        expected = [descriptors.of_model(world, world, boarded, groups=groups) for groups in (2, 1)]
        assert models == expected, shares


def start_with(soft: int, hard: int) -> tuple[int, int]:
    """Start with a limit; return it afterwards."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    count(False, None)
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_a_low_limit_is_raised_as_far_as_is_allowed() -> None:
    assert run_ranks(start_with, 2, 64, 4000, process_group=False) == [(4000, 4000)] * 2
    assert run_ranks(start_with, 2, 2000, 4000, process_group=False) == [(2000, 4000)] * 2


def limit_one_rank() -> None:
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    zs.init(seed=0)


def test_a_limit_that_is_too_low_is_one_error_on_all_ranks() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(limit_one_rank, 2, process_group=False)
    text = str(caught.value)
    assert "may open 64 files and needs" in text and "Run `ulimit -n " in text
    assert "was rejected on another rank, and therefore on all. rank 1: may open 64 files" in text
