"""Memory that ranks of a host share: what each sees, what stays its own, and what is left when all are gone."""

import contextlib
import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zeroshard.testing import run_ranks
from zeroshard.wire.board import is_supported
from zeroshard.wire.memory import HostMemory, Memory, OwnMemory

pytestmark = pytest.mark.skipif(not is_supported(), reason="shared memory needs Linux on x86-64")

CPU = torch.device("cpu")
NUMEL = 1 << 20
RANKS = 2


def joined() -> HostMemory:
    """Return memory that this rank shares with the others. Runs on a rank."""
    memory = HostMemory(dist.get_rank())
    cards = [torch.zeros(len(memory.card), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(cards, torch.tensor(memory.card))
    assert memory.join([card.tolist() for card in cards])
    return memory


def resident_bytes() -> int:
    """Return the bytes of shared memory that this process has mapped in."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem")]
    return int(line.split()[1]) * 1024


def home_of(memory: Memory, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the home of a tensor that is cut in halves."""
    half = NUMEL // RANKS
    return memory.home(NUMEL, (rank * half, (rank + 1) * half), torch.float32, CPU)


def owners_write() -> tuple[float, float]:
    memory, rank = joined(), dist.get_rank()
    full, shard = home_of(memory, rank)
    shard.fill_(rank + 1)
    dist.barrier()
    return float(full[: NUMEL // RANKS].mean()), float(full[NUMEL // RANKS :].mean())


def test_the_whole_shows_what_the_owners_wrote() -> None:
    assert run_ranks(owners_write, RANKS) == [(1.0, 2.0)] * RANKS


def change_in_place() -> list[list[float]]:
    memory, rank = joined(), dist.get_rank()
    full, shard = home_of(memory, rank)
    shard.fill_(rank)
    dist.barrier()
    if rank == 0:
        full[0] = full[-1] = 7.0
    dist.barrier()
    seen = [[float(full[0]), float(full[-1]), float(shard[0]), float(shard[-1])]]
    memory.close(full)
    seen.append([float(full[0]), float(full[-1])])
    return seen


def test_a_change_in_place_is_the_ranks_own_and_ends_with_the_release() -> None:
    first, second = run_ranks(change_in_place, RANKS)
    assert first == [[7.0, 7.0, 0.0, 0.0], [0.0, 1.0]]
    assert second == [[0.0, 1.0, 1.0, 1.0], [0.0, 1.0]]


def mapped_bytes() -> tuple[int, int, int]:
    memory, rank = joined(), dist.get_rank()
    full, shard = home_of(memory, rank)
    shard.fill_(1)
    dist.barrier()
    memory.close(full)
    closed = resident_bytes()
    memory.open(full, 0, shard)
    full.sum()
    opened = resident_bytes()
    memory.close(full)
    return closed, opened, resident_bytes()


def test_a_closed_tensor_takes_no_memory() -> None:
    for closed, opened, again in run_ranks(mapped_bytes, RANKS):
        assert opened - closed == NUMEL * 4
        assert again == closed


def of_others() -> list[float]:
    memory, rank = joined(), dist.get_rank()
    memory.zeros(100 * rank, torch.int8, CPU)
    mine = memory.zeros(NUMEL, torch.float64, CPU).fill_(rank + 0.5)
    offset = memory.offset_of(mine)
    assert offset is not None
    offsets = [torch.zeros(1, dtype=torch.int64) for _ in range(RANKS)]
    dist.all_gather(offsets, torch.tensor([offset]))
    before, seen = resident_bytes(), []
    for place, at in enumerate(offsets):
        part = memory.of_peer(place, int(at), NUMEL, torch.float64)
        seen.append(float(part.mean()))
        if place != rank:
            assert resident_bytes() == before + part.nbytes
            memory.drop(place, part)
            assert resident_bytes() == before
    dist.barrier()
    assert memory.offset_of(torch.zeros(1)) is None
    return seen


def test_buffers_are_read_where_they_lie_and_dropped() -> None:
    assert run_ranks(of_others, RANKS) == [[0.5, 1.5]] * RANKS


def join_wrongly(wrong: str) -> bool:
    memory, rank = HostMemory(dist.get_rank()), dist.get_rank()
    cards = [torch.zeros(len(memory.card), dtype=torch.int64) for _ in range(RANKS)]
    dist.all_gather(cards, torch.tensor(memory.card))
    numbers = [card.tolist() for card in cards]
    if wrong == "secret":  # the same numbers on another host are another process
        numbers[1 - rank][3] += 1
    if wrong == "process":
        numbers[1 - rank][0] = 2**22 + 1
    result = memory.join(numbers)
    dist.barrier()
    return result


@pytest.mark.parametrize("wrong", ["secret", "process", ""])
def test_ranks_of_other_hosts_do_not_join(wrong: str) -> None:
    assert run_ranks(join_wrongly, RANKS, wrong) == [not wrong] * RANKS


def held_descriptors() -> list[str]:
    """Return what this process holds open of shared memory and of other processes."""
    held = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            held.append(os.readlink(f"/proc/self/fd/{number}"))
    return [target for target in held if "zeroshard" in target or "pidfd" in target]


def hold_and_drop() -> tuple[list[str], list[str], list[str]]:
    before, memory = held_descriptors(), joined()
    kept = [memory.zeros(NUMEL, torch.float32, CPU), *home_of(memory, dist.get_rank())]
    dist.barrier()
    during = held_descriptors()
    del memory, kept
    gc.collect()
    return before, during, held_descriptors()


def test_nothing_is_left_once_nobody_holds_it() -> None:
    for before, during, after in run_ranks(hold_and_drop, RANKS):
        assert any("memfd:zeroshard" in target for target in during), during
        assert any("pidfd" in target for target in during), during
        assert after == before


def test_memory_of_its_own_is_closed_and_opened() -> None:
    memory = OwnMemory()
    full, shard = memory.home(8, (4, 8), torch.float32, CPU)
    view = full[2:6]
    shard.fill_(3)
    memory.close(full)
    assert full.untyped_storage().nbytes() == 0
    memory.open(full, 4, shard)
    assert view[2:].tolist() == [3.0, 3.0]
