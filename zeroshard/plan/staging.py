"""The buffers through which offloaded states pass, in bytes.

Owns their sums alone. Must not know when they are used (`film.py`). `state/streamed.py` and `store/apart.py` make them.
"""

from collections.abc import Sequence
from typing import Final

from zeroshard.table.bytes import Updates
from zeroshard.table.spec import UnitSpec, itemsize

__all__ = ["file_staging_bytes", "piece_numel", "pinned_bytes"]

SETS: Final = 3
BLOCK_BYTES: Final = 4096
LEAST_BYTES: Final = 64


def piece_numel(staging_bytes: int, itemsize_of_master: int, per_element: int) -> int:
    """Return the elements of a piece of an update of states in files."""
    blocks = staging_bytes // SETS // (itemsize_of_master * (1 + per_element)) // BLOCK_BYTES
    return max(1, blocks) * BLOCK_BYTES


def file_staging_bytes(units: Sequence[UnitSpec], updates: Sequence[Updates]) -> int:
    """Return the bytes of the buffers for states in files, which stay from the first update on.

    Each set has a buffer for masters and for each state, as large as the largest piece that it was used for.
    """
    sets = [0] * SETS
    # The pieces of optimizers go through buffers of their own.
    for one in updates:
        count, own = 0, [0] * SETS
        buckets = {bucket.number: bucket for bucket, _ in one.parameters}
        for bucket in (b for unit in units for b in unit.buckets if b.number in buckets):
            if bucket.row.states.memory != "file":
                continue
            size = itemsize(bucket.formats.master)
            step = piece_numel(bucket.row.states.staging_bytes, size, one.per_element)
            first, stop = bucket.apart_states
            for start in range(0, stop - first, step):
                nbytes = -(-min(step, stop - first - start) * size // BLOCK_BYTES) * BLOCK_BYTES
                own[count % SETS] = max(own[count % SETS], nbytes * (1 + one.per_element))
                count += 1
        sets = [a + b for a, b in zip(sets, own, strict=True)]
    return sum(sets)


def pinned_bytes(units: Sequence[UnitSpec]) -> int:
    """Return the bytes of the two pinned buffers through which parameters go back to a device."""
    cells = [bucket.row.states for unit in units for bucket in unit.buckets if bucket.apart]
    return 2 * max(LEAST_BYTES, cells[0].staging_bytes // 2) if cells else 0
