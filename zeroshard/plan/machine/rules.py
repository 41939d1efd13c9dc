"""The interface of the simulated caching allocator: events, settings, sizes.

Owns the constants of torch's allocator and the settings of `PYTORCH_ALLOC_CONF`. It must not know blocks or segments:
`plan/machine/allocator.py` applies these rules.

Source: pytorch, c10/core/AllocatorConfig.h (as installed with torch 2.13); c10/cuda/CUDACachingAllocator.cpp,
`round_size` and `roundup_power2_next_division`.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, final

__all__ = [
    "Action",
    "BLOCK_BYTES",
    "Event",
    "LONE_BYTES",
    "LONE_STEP_BYTES",
    "Rules",
    "SMALL_BYTES",
    "SMALL_SEGMENT_BYTES",
    "UNLIMITED_BYTES",
    "round_bytes",
]

MIB: Final = 2**20
BLOCK_BYTES: Final = 512
"""Sizes are multiples of this number."""
SMALL_BYTES: Final = MIB
"""Maximum size of allocations in a small pool."""
SMALL_SEGMENT_BYTES: Final = 2 * MIB
LONE_BYTES: Final = 10 * MIB
"""Minimum size of allocations with a separate segment."""
LONE_STEP_BYTES: Final = 2 * MIB
UNLIMITED_BYTES: Final = 2**46
"""Size of an unlimited device; only the address space of expandable segments needs a number."""
DIVISION_INTERVALS: Final = 16
"""Number of intervals of `roundup_power2_divisions`: [1, 2) MiB and below, [2, 4) MiB, ..., 32 GiB and above."""


class Action(Enum):
    """The kind of an event: allocate, free, record a use on another stream, record that a stream is idle, or empty.

    EMPTY is `torch.cuda.empty_cache()`.
    """

    ALLOC = "alloc"
    FREE = "free"
    RECORD = "record"
    DONE = "done"
    EMPTY = "empty"


class Event(NamedTuple):
    """One call of the allocator.

    Args:
        key: identifies the allocation, from its ALLOC to its FREE; unused for DONE.
        num_bytes: requested bytes; 0 for events other than ALLOC.
        stream: the stream of an ALLOC, the using stream of a RECORD, or the idle stream of a DONE.
        action: the kind of the event.
    """

    key: Hashable
    num_bytes: int
    stream: int = 0
    action: Action = Action.ALLOC


@final
@dataclass(frozen=True)
class Rules:
    """The settings of `PYTORCH_ALLOC_CONF` that affect reserved memory, and the device's size.

    Args:
        device_bytes: memory that the driver can provide; None for unlimited.
        allowed_bytes: limit of `torch.cuda.set_per_process_memory_fraction`; None for no limit.
        large_segment_bytes: size of segments for allocations from 1 MiB to 10 MiB, and of pages of expandable segments.
        max_split_bytes: blocks of at least this size are not split or used for smaller requests; None for no limit.
        max_non_split_rounding_bytes: exclusive limit of the excess of an unsplit block over its request.
        is_expandable: the setting `expandable_segments`.
        power2_divisions: for each interval (`DIVISION_INTERVALS`), the number of sizes between powers of two, a power
            of two; 0 or 1 for no such rounding.
        collect_above: fraction of `allowed_bytes` above which old free segments are returned before a new segment is
            made; 0 for never. As in torch, it has no effect without `allowed_bytes`.

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


def round_bytes(num_bytes: int, divisions: tuple[int, ...] = (0,) * DIVISION_INTERVALS) -> int:
    """Return the block size of a request: at least 512 bytes, and a multiple of 512 or of a division."""
    if num_bytes < BLOCK_BYTES:
        return BLOCK_BYTES
    exponent = num_bytes.bit_length() - 1
    number = divisions[min(max(exponent - 20, 0), DIVISION_INTERVALS - 1)]
    if number > 1 and num_bytes > BLOCK_BYTES * number:
        step = (1 << exponent) // number
        return -(-num_bytes // step) * step
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
