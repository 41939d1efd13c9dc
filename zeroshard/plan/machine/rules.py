"""The interface of the simulated caching allocator: events, settings, sizes.

Owns the constants of torch's allocator and the settings that plans and benchmarks use. It must not know blocks or
segments: `plan/machine/allocator.py` applies these rules.

Source: pytorch, c10/core/AllocatorConfig.h (as installed with torch 2.13); c10/cuda/CUDACachingAllocator.cpp,
`round_size`.
"""

from collections.abc import Hashable
from enum import Enum
from typing import Final, NamedTuple

from zeroshard.table.sizes import MIB

__all__ = [
    "Action",
    "BLOCK_BYTES",
    "Event",
    "LARGE_SEGMENT_BYTES",
    "LONE_BYTES",
    "LONE_STEP_BYTES",
    "SMALL_BYTES",
    "SMALL_SEGMENT_BYTES",
    "round_bytes",
]

BLOCK_BYTES: Final = 512
"""Sizes are multiples of this number."""
SMALL_BYTES: Final = MIB
"""Maximum size of allocations in a small pool."""
SMALL_SEGMENT_BYTES: Final = 2 * MIB
LARGE_SEGMENT_BYTES: Final = 20 * MIB
"""Size of segments for allocations from 1 MiB to 10 MiB."""
LONE_BYTES: Final = 10 * MIB
"""Minimum size of allocations with a separate segment."""
LONE_STEP_BYTES: Final = 2 * MIB


class Action(Enum):
    """The kind of an event: allocate, free, or empty, which is `torch.cuda.empty_cache()`."""

    ALLOC = "alloc"
    FREE = "free"
    EMPTY = "empty"


class Event(NamedTuple):
    """One call of the allocator.

    Args:
        key: identifies the allocation, from its ALLOC to its FREE; unused for EMPTY.
        num_bytes: requested bytes; 0 for events other than ALLOC.
        stream: the stream of an ALLOC.
        action: the kind of the event.
    """

    key: Hashable
    num_bytes: int
    stream: int = 0
    action: Action = Action.ALLOC


def round_bytes(num_bytes: int) -> int:
    """Return the block size of a request: a multiple of 512 bytes."""
    return max(1, -(-num_bytes // BLOCK_BYTES)) * BLOCK_BYTES
