"""A simulation of torch's CUDA caching allocator: reserved memory, retries and out-of-memory errors.

Owns the allocator's rules, in integers: sizes, pools, the choice of a block, splitting and merging, and the behaviour
of a full device. It must not know the purpose of tensors, and measures nothing. Read `simulate`, then
`Allocator.allocate`.

Note: how torch's allocator works
    The driver provides memory in segments, which are not returned until the device is full. A segment is a chain of
    blocks. Each (stream, size class) has a pool of free blocks. Sizes up to 1 MiB are small, in segments of 2 MiB;
    larger sizes are in segments of 20 MiB; sizes from 10 MiB on have separate segments, multiples of 2 MiB.
    An allocation takes the smallest free block that fits, among equal sizes the one at the lowest address, and splits
    it if the remainder is large enough: 512 bytes in a small pool, more than 1 MiB in a large pool. A freed block
    merges with free neighbours of its segment. If no block fits and the driver has no memory, the allocator returns all
    free segments to the driver and requests again (a retry); if that fails, the program is out of memory.

The simulation makes two assumptions that traces do not contain: the driver provides segments at ascending addresses,
and never reuses an address. The caller subtracts memory outside the allocator (context, NCCL) from `device_bytes`.
Uses of a block on other streams (`record_stream`), which nothing in a plan has, private pools (CUDA graphs, `MemPool`)
and settings such as `expandable_segments` are not modelled.

Source: pytorch, c10/cuda/CUDACachingAllocator.cpp (`DeviceCachingAllocator`: `malloc`, `get_free_block`, `alloc_block`,
`should_split`, `try_merge_blocks`, `release_cached_blocks`) and c10/core/AllocatorConfig.h (constants,
as installed with torch 2.13).
"""

from bisect import bisect_left
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import final

from zeroshard.plan.machine.memory_blocks import Block, Pool
from zeroshard.plan.machine.rules import (
    BLOCK_BYTES,
    LARGE_SEGMENT_BYTES,
    LONE_BYTES,
    LONE_STEP_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    Action,
    Event,
    round_bytes,
)

__all__ = ["Action", "Allocator", "Event", "Retry", "simulate"]


@final
@dataclass(frozen=True)
class Retry:
    """A request that returned all free segments to the driver, and the memory allocated afterwards.

    Args:
        key: key of the request.
        returned_segments, returned_bytes: segments and bytes returned to the driver for this request.
        taken_segments, taken_bytes: segments and bytes allocated from then on, including this request, until the next
            retry or the end.
    """

    key: Hashable
    returned_segments: int
    returned_bytes: int
    taken_segments: int
    taken_bytes: int


def simulate(events: Iterable[Event], device_bytes: int | None = None) -> "Allocator":
    """Run a sequence of events from an empty allocator to its end, or to the first request that fails.

    Raises:
        ValueError: an event allocates a key that is already allocated, or frees an unallocated key.

    >>> from zeroshard.plan.machine.allocator import Action, Event, simulate
    >>> outcome = simulate([Event("a", 3 * 2**20), Event("b", 5 * 2**20), Event("a", 0, action=Action.FREE)])
    >>> outcome.allocated_bytes // 2**20, outcome.reserved_bytes // 2**20
    (5, 20)
    """
    allocator = Allocator(device_bytes)
    all(map(allocator.play, events))
    return allocator


@final
class Allocator:
    """The allocator of one device.

    Args:
        device_bytes: memory that the driver can provide; None for unlimited.
    """

    def __init__(self, device_bytes: int | None = None) -> None:
        self._device_bytes = device_bytes
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._live: dict[Hashable, Block | None] = {}
        self._next_address = SMALL_SEGMENT_BYTES
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        # Segments and bytes allocated from and returned to the driver; for each retry its key and the sums around it.
        self._given, self._got = (0, 0), (0, 0)
        self.failed: Event | None = None
        """The request that did not fit, at which a sequence ends."""
        self._marks: list[tuple[Hashable, tuple[int, int], tuple[int, int], tuple[int, int]]] = []

    @property
    def retries(self) -> int:
        """Number of retries: returns of all free segments in order to serve a request."""
        return len(self._marks)

    @property
    def returned(self) -> tuple[Retry, ...]:
        """Each retry so far, with the returned and reallocated memory."""
        found, (last_segments, last_bytes) = list[Retry](), self._given
        for key, before, after, given in reversed(self._marks):
            got = after[0] - before[0], after[1] - before[1]
            found.append(Retry(key, *got, last_segments - given[0], last_bytes - given[1]))
            last_segments, last_bytes = given
        return tuple(reversed(found))

    def play(self, event: Event) -> bool:
        """Make the call of an event; return whether there was enough memory."""
        key, num_bytes, stream, action = event
        if action is Action.ALLOC and not self.allocate(key, num_bytes, stream):
            self.failed = event
        elif action is Action.FREE:
            self.free(key)
        elif action is Action.EMPTY:
            self.empty()
        return self.failed is None

    def allocate(self, key: Hashable, num_bytes: int, stream: int = 0) -> bool:
        """Serve a request; return whether there was enough memory.

        Raises:
            ValueError: `key` is already allocated, or `num_bytes` is negative.
        """
        if key in self._live:
            raise ValueError(f"allocation {key!r} of {num_bytes} bytes: this key is already allocated; free it first")
        if num_bytes <= 0:
            if num_bytes < 0:
                raise ValueError(f"allocation {key!r}: bytes must not be negative, got {num_bytes}")
            self._live[key] = None  # torch requests nothing
            return True
        size = round_bytes(num_bytes)
        is_small = size <= SMALL_BYTES
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._pools[stream, is_small] = Pool(is_small=is_small)
        block = self._find(pool, size) or self._make(pool, size, key)
        if block is None:
            return False
        rest = block.size - size
        if rest >= BLOCK_BYTES if is_small else rest > SMALL_BYTES:
            pool.add(block.cut(size))
        block.is_free = False
        self._live[key] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return True

    def free(self, key: Hashable) -> None:
        """Free an allocation.

        Raises:
            ValueError: `key` is not allocated.
        """
        if key not in self._live:
            raise ValueError(f"free of {key!r}: this key is not allocated")
        block = self._live.pop(key)
        if block is None:
            return
        self.allocated_bytes -= block.size
        block.is_free = True
        block.pool.join(block)

    def empty(self) -> None:
        """Return all free segments to the driver, as `torch.cuda.empty_cache` does, and reset the peaks."""
        self._release_all()
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    # -- free blocks --------------------------------------------------------------------------------------------------

    def _find(self, pool: Pool, size: int) -> Block | None:
        """Remove the best free block from the pool: the smallest that fits, by address among equal sizes."""
        free = pool.free
        place = bisect_left(free, (size,))
        if place == len(free):
            return None
        return free.pop(place)[2]

    # -- memory of the driver -----------------------------------------------------------------------------------------

    def _make(self, pool: Pool, size: int, key: Hashable) -> Block | None:
        """Get memory from the driver for a request, and return as little as possible; None on failure."""
        block = self._ask(pool, size)
        if block is None:
            before = self._got
            self._release_all()
            self._marks.append((key, before, self._got, self._given))
            block = self._ask(pool, size)
        return block

    def _ask(self, pool: Pool, size: int) -> Block | None:
        """Request memory from the driver; return a block outside all pools, or None."""
        wanted = SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES
        if not pool.is_small and size >= LONE_BYTES:
            wanted = -(-size // LONE_STEP_BYTES) * LONE_STEP_BYTES
        if self._device_bytes is not None and self.reserved_bytes + wanted > self._device_bytes:
            return None
        self.reserved_bytes += wanted
        self._given = self._given[0] + 1, self._given[1] + wanted
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        block = Block(self._next_address, wanted, pool)
        self._next_address += wanted
        return block

    def _release_all(self) -> None:
        """Return each free segment to the driver."""
        for pool in self._pools.values():
            for _, _, block in [one for one in pool.free if one[2].is_whole]:
                pool.remove(block)
                self.reserved_bytes -= block.size
                self._got = self._got[0] + 1, self._got[1] + block.size
