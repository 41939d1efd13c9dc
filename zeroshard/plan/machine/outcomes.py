"""The records of a simulated allocator: its blocks at a moment, its retries, and the result of a sequence of events.

Owns these records. It must not know the allocator's rules: `plan/machine/allocator.py` fills them in.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import final

from zeroshard.plan.machine.memory_blocks import BlockState

__all__ = ["OutOfMemory", "Outcome", "Piece", "Retry", "Segment"]


@final
@dataclass(frozen=True)
class Piece:
    """A block in a snapshot: `offset` in bytes from the start of its segment, `key` of its allocation."""

    offset: int
    num_bytes: int
    state: BlockState
    key: Hashable


@final
@dataclass(frozen=True)
class Segment:
    """A segment in a snapshot: `reserved_bytes` of memory, and its blocks by address."""

    address: int
    reserved_bytes: int
    stream: int
    is_small: bool
    pieces: tuple[Piece, ...]


@final
@dataclass(frozen=True)
class OutOfMemory:
    """A request that failed, and the allocator's state after all possible memory was freed.

    Args:
        place: index of the event in its sequence.
    """

    place: int
    key: Hashable
    num_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    segments: tuple[Segment, ...]


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


@final
@dataclass(frozen=True)
class Outcome:
    """The result of a sequence of events.

    Args:
        requested_bytes: requested bytes that are live at the end.
        allocated_bytes: bytes of the blocks in use at the end, including rounding and remainders that were not split
            off.
        reserved_bytes: bytes of all segments at the end.
        retries: number of retries: returns of all free segments in order to serve a request.
        out_of_memory: the failed request, if any.
        returned: each retry, with the returned and reallocated memory.
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
    returned: tuple[Retry, ...]
