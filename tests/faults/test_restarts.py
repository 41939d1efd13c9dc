"""Starts that share a store, as torchrun's restarts do: ranks meet the ranks of their own start, whatever was left."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from zeroshard.join.arrival import Wait, await_ranks
from zeroshard.join.restarts import part_of_this_start

WORLD = 3
LIMIT_S = 60.0


def start(store: dist.Store, rank: int, limit_s: float = LIMIT_S) -> dist.Store:
    wait = Wait(rank, range(WORLD), f"[rank {rank}/{WORLD}]", "zs.init()", limit_s, limit_s)
    part = part_of_this_start(store, wait)
    await_ranks(part, wait)
    return part


def meet(store: dist.Store, begin: Callable[[int], None] = lambda rank: None) -> list[dist.Store]:
    """Let all ranks start, each as soon as `begin` returns; return the part of each."""

    def run(rank: int) -> dist.Store:
        begin(rank)
        return start(store, rank)

    with ThreadPoolExecutor(WORLD) as threads:
        return list(threads.map(run, range(WORLD)))


def assert_one_new_part(parts: list[dist.Store]) -> None:
    """Require that all parts are the same, and that none has the key that each start leaves."""
    assert not any(part.check(["address"]) for part in parts)
    parts[0].set("address", "a process that will be gone")
    assert all(part.check(["address"]) for part in parts)


@pytest.mark.parametrize("first", range(WORLD))
def test_a_start_has_a_part_of_its_own(first: int) -> None:
    store = dist.HashStore()
    assert_one_new_part(meet(store))

    left = {rank: store.get(f"zeroshard/word of {rank}") for rank in range(1, WORLD)}

    def has_read(rank: int) -> bool:
        """Tell whether the first has read what the start before has left for, or of, this rank."""
        if first:
            return store.get(f"zeroshard/word of {first}") != left[first]
        return store.get(f"zeroshard/answer to {rank}").startswith(left[rank])

    def wait_for_first(rank: int) -> None:
        while rank != first and not has_read(rank):
            time.sleep(0.001)

    assert_one_new_part(meet(store, wait_for_first))


@pytest.mark.parametrize("present", [(0,), (1, 2)])
def test_a_start_that_failed_leaves_nothing_that_misleads(present: tuple[int, ...]) -> None:
    store = dist.HashStore()
    for rank in present:
        with pytest.raises(RuntimeError, match="ranks 1, 2 of 3 have not" if rank == 0 else "rank 0 of 3 has not"):
            start(store, rank, limit_s=0.1)
    assert_one_new_part(meet(store))
