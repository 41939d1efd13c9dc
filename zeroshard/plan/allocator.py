"""What torch's CUDA caching allocator would do with a sequence of allocations: reserved memory, retries, out of memory.

Owns the allocator's rules, in integers: sizes, pools, the choice of a block, splitting and joining, streams, and what
happens when the device is full. It must not know what a tensor is for, nor measure anything. Read `simulate`, then
`Allocator.allocate`.

Note: how torch's allocator works
    Memory comes from the driver in segments and is never given back until the device is full. A segment is a chain of
    blocks. Each (stream, size class) has a pool of free blocks: sizes up to 1 MiB are small, and come from segments of
    2 MiB; larger ones come from segments of 20 MiB, from 10 MiB on from a segment of their own, a multiple of 2 MiB.
    An allocation takes the smallest free block that holds it, the one at the lowest address among equals, and splits it
    if what remains is worth keeping: 512 bytes in a small pool, more than 1 MiB in a large one. A freed block joins
    free neighbours of its segment. Where nothing fits and the driver has no more, whole free segments are returned to
    it, and the request is made again (a retry); then the program is out of memory.
    A block that another stream used (`record_stream`) is free only when that stream has done what it was given before
    the free. With `expandable_segments` a pool has one segment that grows by pages, and whole free pages are what is
    returned.

What the simulation assumes, because no trace says it: the driver hands out segments at ascending addresses, and uses no
address again. Memory outside the allocator (context, NCCL) is the caller's to subtract from `device_bytes`. Private
pools (CUDA graphs, `MemPool`) are not modelled.

Source: pytorch, c10/cuda/CUDACachingAllocator.cpp (`DeviceCachingAllocator`: `malloc`, `get_free_block`, `alloc_block`,
`should_split`, `try_merge_blocks`, `release_available_cached_blocks`, `release_cached_blocks`, `unmap_block`,
`garbage_collect_cached_blocks`) and c10/core/AllocatorConfig.h (constants, as installed with torch 2.13).
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, final

__all__ = [
    "Action",
    "Allocator",
    "BlockState",
    "Event",
    "OutOfMemory",
    "Outcome",
    "Piece",
    "Rules",
    "Segment",
    "round_bytes",
    "simulate",
]

MIB: Final = 2**20
BLOCK_BYTES: Final = 512
"""Sizes are multiples of it."""
SMALL_BYTES: Final = MIB
"""The largest allocation of a small pool."""
SMALL_SEGMENT_BYTES: Final = 2 * MIB
LONE_BYTES: Final = 10 * MIB
"""From here on an allocation has a segment of its own."""
LONE_STEP_BYTES: Final = 2 * MIB
UNLIMITED_BYTES: Final = 2**46
"""Of a device whose size is not given; only the address space of expandable segments needs a number."""
DIVISION_INTERVALS: Final = 16
"""Of `roundup_power2_divisions`: [1, 2) MiB and below, [2, 4) MiB, ..., 32 GiB and above."""


class Action(Enum):
    """What an event does: allocate, free, note a use on another stream, or note that a stream has caught up."""

    ALLOC = "alloc"
    FREE = "free"
    RECORD = "record"
    DONE = "done"


class Event(NamedTuple):
    """One call of the allocator.

    Args:
        key: names the allocation, from its ALLOC to its FREE; unused for DONE.
        num_bytes: asked for; 0 for other events than ALLOC.
        stream: of an ALLOC, the one it is made on; of a RECORD, one that uses it; of a DONE, one whose queue is empty.
        action: what happens.
    """

    key: Hashable
    num_bytes: int
    stream: int = 0
    action: Action = Action.ALLOC


@final
@dataclass(frozen=True)
class Rules:
    """The settings of `PYTORCH_ALLOC_CONF` that change what is reserved, and the device's size.

    Args:
        device_bytes: memory that the driver can give to the allocator; None for any amount.
        allowed_bytes: of `torch.cuda.set_per_process_memory_fraction`, above which no segment is made; None for none.
        large_segment_bytes: segments of allocations from 1 MiB to 10 MiB, and pages of an expandable segment.
        max_split_bytes: blocks of this size and above are not split, nor used for anything smaller; None for no limit.
        max_non_split_rounding_bytes: by how much less than this a block may exceed a request that is not to be split.
        is_expandable: of `expandable_segments`.
        power2_divisions: into how many sizes each range between powers of two is divided, by interval
            (`DIVISION_INTERVALS`), a power of two each; 0 or 1 for no such rounding.
        collect_above: share of `allowed_bytes` above which old free segments are returned before a new one is made;
            0 for never. As in torch, it means nothing without `allowed_bytes`.

    Raises:
        ValueError: a setting is out of its range, or `max_split_bytes` is combined with `is_expandable`.
    """

    device_bytes: int | None = None
    allowed_bytes: int | None = None
    large_segment_bytes: int = 20 * MIB
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB
    is_expandable: bool = False
    power2_divisions: tuple[int, ...] = (0,) * DIVISION_INTERVALS
    collect_above: float = 0.0

    def __post_init__(self) -> None:
        if len(self.power2_divisions) != DIVISION_INTERVALS:
            raise ValueError(
                f"Rules.power2_divisions needs {DIVISION_INTERVALS} entries, got {len(self.power2_divisions)}"
            )
        if any(number < 0 or number & (number - 1) for number in self.power2_divisions):
            raise ValueError(f"Rules.power2_divisions must be powers of two or 0, got {self.power2_divisions}")
        if self.max_split_bytes is not None and self.max_split_bytes < self.large_segment_bytes:
            raise ValueError(
                f"Rules.max_split_bytes must be at least large_segment_bytes = {self.large_segment_bytes}, "
                f"got {self.max_split_bytes}"
            )
        if self.max_split_bytes is not None and self.is_expandable:
            raise ValueError(
                "Rules.max_split_bytes cannot be combined with is_expandable: torch releases no such block"
            )
        if self.large_segment_bytes < LONE_STEP_BYTES or self.large_segment_bytes % LONE_STEP_BYTES:
            raise ValueError(
                f"Rules.large_segment_bytes must be a multiple of {LONE_STEP_BYTES}, got {self.large_segment_bytes}"
            )
        if not 0.0 <= self.collect_above < 1.0:
            raise ValueError(f"Rules.collect_above must be in [0, 1), got {self.collect_above}")


class BlockState(Enum):
    """What a block's memory is used for."""

    ALLOCATED = "allocated"
    WAITING = "waiting"
    """Freed by the program, and another stream may still use it."""
    FREE = "free"
    UNMAPPED = "unmapped"
    """Addresses of an expandable segment without memory."""


@final
@dataclass(frozen=True)
class Piece:
    """A block in a snapshot: `offset` in bytes from the start of its segment, `key` of the allocation that has it."""

    offset: int
    num_bytes: int
    state: BlockState
    key: Hashable


@final
@dataclass(frozen=True)
class Segment:
    """A segment in a snapshot: `reserved_bytes` of memory, and its blocks from the lowest address on."""

    address: int
    reserved_bytes: int
    stream: int
    is_small: bool
    pieces: tuple[Piece, ...]


@final
@dataclass(frozen=True)
class OutOfMemory:
    """The request that could not be served, and the allocator at that time: after all that can be freed was freed.

    Args:
        place: of the event in its sequence.
    """

    place: int
    key: Hashable
    num_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    segments: tuple[Segment, ...]


@final
@dataclass(frozen=True)
class Outcome:
    """What a sequence of events came to.

    Args:
        requested_bytes: as the program asked, live at the end.
        allocated_bytes: the blocks that are in use at the end: with rounding, and with what was not split off.
        reserved_bytes: what the allocator has from the driver at the end.
        retries: how often all free segments were returned to the driver in order to serve a request.
        out_of_memory: where the sequence ended, if it did not end well.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int
    out_of_memory: OutOfMemory | None
    segments: tuple[Segment, ...]


def round_bytes(num_bytes: int, divisions: tuple[int, ...] = (0,) * DIVISION_INTERVALS) -> int:
    """Return the size of the block that a request wants: 512 bytes at least, and a multiple of it or of a division."""
    if num_bytes < BLOCK_BYTES:
        return BLOCK_BYTES
    exponent = num_bytes.bit_length() - 1
    number = divisions[min(max(exponent - 20, 0), DIVISION_INTERVALS - 1)]
    if number > 1 and num_bytes > BLOCK_BYTES * number:
        step = (1 << exponent) // number
        return -(-num_bytes // step) * step
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def simulate(events: Iterable[Event], rules: Rules | None = None) -> Outcome:
    """Run a sequence of events from an empty allocator to its end, or to the first request that cannot be served.

    Raises:
        ValueError: an event allocates a key that is allocated, or frees or records one that is not.

    >>> outcome = simulate([Event("a", 3 * MIB), Event("b", 5 * MIB), Event("a", 0, action=Action.FREE)])
    >>> outcome.allocated_bytes // MIB, outcome.reserved_bytes // MIB
    (5, 20)
    """
    allocator = Allocator(rules)
    allocate, free, actions = allocator.allocate, allocator.free, Action
    failure = None
    for place, (key, num_bytes, stream, action) in enumerate(events):
        if action is actions.ALLOC:
            if not allocate(key, num_bytes, stream):
                sums = allocator.allocated_bytes, allocator.reserved_bytes
                failure = OutOfMemory(place, key, num_bytes, *sums, allocator.snapshot())
                break
        elif action is actions.FREE:
            free(key)
        elif action is actions.RECORD:
            allocator.record(key, stream)
        else:
            allocator.done(stream)
    return Outcome(
        allocator.requested_bytes,
        allocator.allocated_bytes,
        allocator.reserved_bytes,
        allocator.peak_requested_bytes,
        allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes,
        allocator.retries,
        failure,
        allocator.snapshot() if failure is None else failure.segments,
    )


class _Block:
    """A range of addresses of one segment. The leftmost of blocks that join is the one that stays."""

    __slots__ = ("address", "born", "key", "next", "pending", "pool", "prev", "requested", "size", "state", "uses")

    def __init__(self, address: int, size: int, pool: "_Pool", state: BlockState) -> None:
        self.address, self.size, self.pool, self.state = address, size, pool, state
        self.prev: _Block | None = None
        self.next: _Block | None = None
        self.key: Hashable = None
        self.requested = 0
        self.uses: list[int] = []  # other streams, in the order of their first use
        self.pending = 0  # streams that have not caught up since the free
        self.born = 0  # searches of the pool before this block was free, for collection by age

    @property
    def is_whole(self) -> bool:
        return self.prev is None and self.next is None

    @property
    def is_available(self) -> bool:
        return self.state is BlockState.FREE or self.state is BlockState.UNMAPPED

    def cut(self, size: int, state: BlockState) -> "_Block":
        """Keep `size` bytes; return the rest as a block of its own, in no pool yet."""
        rest = _Block(self.address + size, self.size - size, self.pool, state)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next, self.size = rest, size
        return rest

    def absorb_next(self) -> None:
        """Join the block on the right to this one."""
        gone = self.next
        assert gone is not None
        self.size += gone.size
        self.next = gone.next
        if gone.next is not None:
            gone.next.prev = self


class _Pool:
    """Free blocks of one stream and size class, by size, then address; and gaps of expandable segments, by address."""

    __slots__ = ("free", "gaps", "is_small", "searches", "stream")

    def __init__(self, stream: int, searches: list[int], *, is_small: bool) -> None:
        self.stream, self.is_small = stream, is_small
        self.free: list[tuple[int, int, _Block]] = []
        self.gaps: list[tuple[int, _Block]] = []
        self.searches = searches  # one number, which the pools of a size class share

    def add(self, block: _Block) -> None:
        if block.state is BlockState.FREE:
            block.born = self.searches[0]
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.gaps, (block.address, block))

    def remove(self, block: _Block) -> None:
        if block.state is BlockState.FREE:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.gaps[bisect_left(self.gaps, (block.address,))]

    def join(self, block: _Block) -> _Block:
        """Add a block that became free or a gap, after joining it to neighbours of the same state."""
        left, right = block.prev, block.next
        if left is not None and left.state is block.state:
            self.remove(left)
            left.absorb_next()
            block = left
        if right is not None and right.state is block.state:
            self.remove(right)
            block.absorb_next()
        self.add(block)
        return block


@final
class Allocator:
    """The allocator of one device.

    Args:
        rules: its settings.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self._rules = rules or Rules()
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._searches: tuple[list[int], list[int]] = ([0], [0])
        self._heads: dict[int, _Block] = {}
        self._live: dict[Hashable, _Block | None] = {}
        # Per stream, blocks whose reuse waits for it, and how many of them it has caught up with.
        self._queues: dict[int, deque[_Block]] = {}
        self._caught_up: dict[int, int] = {}
        self._next_address = SMALL_SEGMENT_BYTES
        self.requested_bytes = self.allocated_bytes = self.reserved_bytes = 0
        self.peak_requested_bytes = self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.retries = 0

    def allocate(self, key: Hashable, num_bytes: int, stream: int = 0) -> bool:
        """Serve a request; return whether there was memory for it.

        Raises:
            ValueError: `key` is allocated, or `num_bytes` is negative.
        """
        if key in self._live:
            raise ValueError(f"allocation {key!r} of {num_bytes} bytes: this key is allocated and not freed")
        if num_bytes <= 0:
            if num_bytes < 0:
                raise ValueError(f"allocation {key!r}: bytes must not be negative, got {num_bytes}")
            self._live[key] = None  # torch asks for nothing
            return True
        rules = self._rules
        if self._caught_up:
            self._take_back()
        size = round_bytes(num_bytes, rules.power2_divisions)
        is_small = size <= SMALL_BYTES
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._pools[stream, is_small] = _Pool(stream, self._searches[is_small], is_small=is_small)
        block = self._find(pool, size) or self._make(pool, size)
        if block is None:
            return False
        rest = block.size - size
        if is_small or rules.is_expandable:
            is_split = rest >= BLOCK_BYTES
        else:
            is_split = rest > SMALL_BYTES and (rules.max_split_bytes is None or size < rules.max_split_bytes)
        if is_split:
            pool.add(block.cut(size, BlockState.FREE))
        block.state, block.key, block.requested = BlockState.ALLOCATED, key, num_bytes
        self._live[key] = block
        self.requested_bytes += num_bytes
        self.allocated_bytes += block.size
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return True

    def free(self, key: Hashable) -> None:
        """Free an allocation; its block waits for the streams that were recorded for it.

        Raises:
            ValueError: `key` is not allocated.
        """
        if key not in self._live:
            raise ValueError(f"free of {key!r}: this key is not allocated")
        block = self._live.pop(key)
        if block is None:
            return
        self.requested_bytes -= block.requested
        self.allocated_bytes -= block.size
        if block.uses:
            block.state, block.pending = BlockState.WAITING, len(block.uses)
            for stream in block.uses:
                self._queues.setdefault(stream, deque()).append(block)
            block.uses = []
        else:
            self._release(block)

    def record(self, key: Hashable, stream: int) -> None:
        """Note that `stream` uses an allocation; uses on its own stream need no care.

        Raises:
            ValueError: `key` is not allocated.
        """
        if key not in self._live:
            raise ValueError(f"use of {key!r} on stream {stream}: this key is not allocated")
        block = self._live[key]
        if block is not None and stream != block.pool.stream and stream not in block.uses:
            block.uses.append(stream)

    def done(self, stream: int) -> None:
        """Note that a stream has done all that it was given: blocks that wait for it alone are free from now on.

        As in torch, the next allocation finds out.
        """
        if self._queues.get(stream):
            self._caught_up[stream] = len(self._queues[stream])

    def snapshot(self) -> tuple[Segment, ...]:
        """Return all segments, by address, with their blocks. Gaps at the end of an expandable segment are left out."""
        segments = []
        for address, head in self._heads.items():
            pieces: list[Piece] = []
            block: _Block | None = head
            while block is not None:
                pieces.append(Piece(block.address - address, block.size, block.state, block.key))
                block = block.next
            if pieces[-1].state is BlockState.UNMAPPED:
                pieces.pop()
            mapped = sum(piece.num_bytes for piece in pieces if piece.state is not BlockState.UNMAPPED)
            segments.append(Segment(address, mapped, head.pool.stream, head.pool.is_small, tuple(pieces)))
        return tuple(segments)

    # -- blocks that are free -----------------------------------------------------------------------------------------

    def _find(self, pool: _Pool, size: int) -> _Block | None:
        """Take the best free block out of the pool: the smallest that is large enough, by address among equals."""
        rules, free = self._rules, pool.free
        pool.searches[0] += 1
        place = bisect_left(free, (size,))
        if place == len(free):
            return None
        if rules.is_expandable:
            # A block before a gap counts as large as it can grow, so that the end of the segment is used last.
            while place + 1 < len(free) and _reach(free[place + 1][2]) < _reach(free[place][2]):
                place += 1
        found = free[place][2]
        limit = rules.max_split_bytes
        if limit is not None:
            if size < limit <= found.size:
                return None
            if size >= limit and found.size >= size + rules.max_non_split_rounding_bytes:
                return None
        del free[place]
        return found

    def _release(self, block: _Block) -> None:
        block.state, block.key, block.requested = BlockState.FREE, None, 0
        block.pool.join(block)

    def _take_back(self) -> None:
        """Free the blocks whose streams have all caught up."""
        for stream, number in self._caught_up.items():
            queue = self._queues[stream]
            for _ in range(number):
                block = queue.popleft()
                block.pending -= 1
                if block.pending == 0:
                    self._release(block)
        self._caught_up.clear()

    # -- memory of the driver -----------------------------------------------------------------------------------------

    def _make(self, pool: _Pool, size: int) -> _Block | None:
        """Get memory from the driver for a request, by giving back as little as helps; None if nothing does."""
        rules = self._rules
        if rules.collect_above > 0 and rules.allowed_bytes is not None:
            self._collect(int(rules.collect_above * rules.allowed_bytes))
        block = self._ask(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._ask(pool, size)
        if block is None:
            self._release_all()
            self.retries += 1
            block = self._ask(pool, size)
        return block

    def _ask(self, pool: _Pool, size: int) -> _Block | None:
        """Ask the driver; return a block that is in no pool, or None."""
        rules = self._rules
        if pool.is_small:
            wanted = SMALL_SEGMENT_BYTES
        elif size < LONE_BYTES:
            wanted = rules.large_segment_bytes
        else:
            wanted = -(-size // LONE_STEP_BYTES) * LONE_STEP_BYTES
        if rules.allowed_bytes is not None and self.reserved_bytes + wanted > rules.allowed_bytes:
            return None
        if rules.is_expandable:
            return self._grow(pool, size)
        if not self._reserve(wanted):
            return None
        return self._new_segment(pool, wanted, BlockState.FREE)

    def _reserve(self, num_bytes: int) -> bool:
        limit = self._rules.device_bytes
        if limit is not None and self.reserved_bytes + num_bytes > limit:
            return False
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _new_segment(self, pool: _Pool, size: int, state: BlockState) -> _Block:
        block = _Block(self._next_address, size, pool, state)
        self._next_address += size
        self._heads[block.address] = block
        return block

    def _drop(self, block: _Block) -> None:
        """Give a whole free segment back to the driver."""
        block.pool.remove(block)
        del self._heads[block.address]
        self.reserved_bytes -= block.size

    def _release_oversize(self, pool: _Pool, size: int) -> bool:
        """Give back free blocks that are too large to be split: one that is large enough, or the largest ones."""
        limit = self._rules.max_split_bytes
        if limit is None:
            return False
        wanted = max(size, limit)
        place = bisect_left(pool.free, (wanted,))
        if place < len(pool.free):
            self._drop(pool.free[place][2])
            return True
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= limit:
            released += pool.free[-1][0]
            self._drop(pool.free[-1][2])
        return released >= wanted

    def _release_all(self) -> None:
        """Wait for all streams, then give back each segment that is free, or each page of an expandable one."""
        for stream, queue in self._queues.items():
            if queue:
                self._caught_up[stream] = len(queue)
        self._take_back()
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self._rules.is_expandable:
                    self._unmap(block)
                elif block.is_whole:
                    self._drop(block)

    def _collect(self, above_bytes: int) -> None:
        """Give back whole free segments of large pools that were not used for longer than the average of them."""
        excess = self.reserved_bytes - above_bytes
        if excess <= 0:
            return
        now = self._searches[False][0]
        whole = [b for pool in self._pools.values() if not pool.is_small for _, _, b in pool.free if b.is_whole]
        while excess > 0 and whole:
            total = sum(now - block.born for block in whole)
            oldest = [block for block in whole if (now - block.born) * len(whole) >= total]
            for block in oldest:
                excess -= block.size
                self._drop(block)
            whole = [block for block in whole if block not in oldest]

    # -- segments that grow -------------------------------------------------------------------------------------------

    def _grow(self, pool: _Pool, size: int) -> _Block | None:
        """Return a block of at least `size` bytes: free ones and gaps that lie together, with pages for the gaps."""
        block: _Block | None = self._room(pool, size)
        assert block is not None
        if block.state is BlockState.UNMAPPED:
            block = self._map(block, min(block.size, size))
        while block is not None and block.size < size:
            gap = block.next
            assert gap is not None
            block = self._map(gap, min(size - block.size, gap.size))
        if block is not None:
            pool.remove(block)
        return block

    def _room(self, pool: _Pool, size: int) -> _Block:
        """Return the first of blocks that are free or gaps, lie together and have the addresses for `size` bytes."""
        for _, gap in pool.gaps:
            first = gap.prev if gap.prev is not None and gap.prev.is_available else gap
            found, at = 0, first
            while found < size and at.is_available:
                found += at.size
                if at.next is None:
                    break
                at = at.next
            if found >= size:
                return first
        device = self._rules.device_bytes or UNLIMITED_BYTES
        page = self._page(pool)
        self._next_address = -(-self._next_address // page) * page
        # An eighth more than the device has: pages may have to be given back at one end and taken at the other.
        block = self._new_segment(pool, -(-(device + device // 8) // page) * page, BlockState.UNMAPPED)
        pool.add(block)
        return block

    def _page(self, pool: _Pool) -> int:
        return SMALL_SEGMENT_BYTES if pool.is_small else self._rules.large_segment_bytes

    def _map(self, gap: _Block, size: int) -> _Block | None:
        """Give the first `size` bytes of a gap memory, in whole pages; return the free block they are in."""
        pool, page = gap.pool, self._page(gap.pool)
        mapped = -(-size // page) * page
        if not self._reserve(mapped):
            return None
        pool.remove(gap)
        if mapped < gap.size:
            pool.add(gap.cut(mapped, BlockState.UNMAPPED))
        gap.state = BlockState.FREE
        return pool.join(gap)

    def _unmap(self, block: _Block) -> None:
        """Give back the whole pages within a free block."""
        pool, page = block.pool, self._page(block.pool)
        start = -(-block.address // page) * page
        stop = (block.address + block.size) // page * page
        if start >= stop:
            return
        pool.remove(block)
        if stop < block.address + block.size:
            pool.add(block.cut(stop - block.address, BlockState.FREE))
        if start > block.address:
            gap = block.cut(start - block.address, BlockState.FREE)
            pool.add(block)
            block = gap
        block.state = BlockState.UNMAPPED
        self.reserved_bytes -= stop - start
        block = pool.join(block)
        if block.is_whole:
            pool.remove(block)
            del self._heads[block.address]


def _reach(block: _Block) -> int:
    """Return the size that a free block can grow to."""
    after = block.next
    return block.size + (after.size if after is not None and after.state is BlockState.UNMAPPED else 0)
