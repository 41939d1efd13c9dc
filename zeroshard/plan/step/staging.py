"""The buffers through which offloaded states pass, in bytes.

Owns their sums alone. Must not know when they are used (`film.py`). `update/streamed.py` and `store/stores.py` make
them.
"""

from collections.abc import Sequence
from typing import Final

from zeroshard.describe.offload import written_bytes
from zeroshard.table.bytes import Updates
from zeroshard.table.spec import BucketSpec, UnitSpec, itemsize

__all__ = ["buffer_bytes", "file_staging_bytes", "piece_numel"]

SETS: Final = 3
BLOCK_BYTES: Final = 4096
LEAST_BYTES: Final = 64


def piece_numel(bucket: BucketSpec, per_element: int) -> int:
    """Return the elements of a piece of an update of states in files."""
    each_bytes = itemsize(bucket.formats.master) * (1 + per_element) + written_bytes(bucket)
    blocks = bucket.row.states.place.staging_bytes // SETS // each_bytes // BLOCK_BYTES
    return max(1, blocks) * BLOCK_BYTES


def file_staging_bytes(units: Sequence[UnitSpec], updates: Sequence[Updates]) -> int:
    """Return the bytes of the buffers for states in files, which stay from the first update on.

    Each set has a buffer for masters and for each state, as large as the largest piece that it was used for.
    """
    sets = [0] * SETS
    # The pieces of optimizers go through buffers of their own.
    for one in updates:
        count, own, written = 0, [0] * SETS, [0] * SETS
        buckets = {bucket.number: bucket for bucket, _ in one.trained.parameters}
        for bucket in (b for unit in units for b in unit.buckets if b.number in buckets):
            if bucket.row.states.memory != "file":
                continue
            size = itemsize(bucket.formats.master)
            step = piece_numel(bucket, one.per_element)
            first, stop = bucket.apart_states
            for start in range(0, stop - first, step):
                end = min(start + step, stop - first)
                own[count % SETS] = max(own[count % SETS], _blocks(end - start, size) * (1 + one.per_element))
                stored = max(0, min(end, bucket.apart_shard[1] - bucket.apart_shard[0]) - start)
                written[count % SETS] = max(written[count % SETS], _blocks(stored, written_bytes(bucket)))
                count += 1
        sets = [sum(parts) for parts in zip(sets, own, written, strict=True)]
    return sum(sets)


def buffer_bytes(units: Sequence[UnitSpec], *, is_cpu: bool) -> int:
    """Return the bytes of the buffers through which values are copied to a device, and parameters are read.

    Each memory has two buffers.
    """
    buckets = [bucket for unit in units for bucket in unit.buckets]
    cells = [bucket.row.parameters for bucket in buckets if bucket.apart_parameters]
    if is_cpu:
        cells = [cell for cell in cells if cell.memory == "file"]
    else:
        cells += [bucket.row.states for bucket in buckets if bucket.apart and bucket.is_trained]
    by_memory = {cell.memory: cell.place.staging_bytes for cell in cells}
    return sum(2 * max(LEAST_BYTES, nbytes // 2) for nbytes in by_memory.values())


def _blocks(numel: int, size: int) -> int:
    return -(-numel * size // BLOCK_BYTES) * BLOCK_BYTES
