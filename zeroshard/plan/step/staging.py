"""The buffers through which offloaded states pass, in bytes.

Owns their sums alone. Must not know when they are used (`film.py`). `update/streamed.py` and `store/stores.py` make
them.
"""

from collections.abc import Sequence
from typing import Final

from zeroshard.describe.offload import written_bytes
from zeroshard.table.bytes import Updates
from zeroshard.table.cells import Place
from zeroshard.table.spec import BucketSpec, UnitSpec, itemsize

__all__ = ["buffer_bytes", "file_staging_bytes", "half_bytes", "piece_numel"]

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
        kept, most = one.trained.kept, max(one.kept.values(), default=0)
        for bucket in (b for unit in units for b in unit.buckets if b.number in kept):
            if not bucket.is_updated_in_pieces:
                continue
            size = itemsize(bucket.formats.master)
            step = piece_numel(bucket, most)
            numel = bucket.states[1] - bucket.states[0]
            for start in range(0, numel, step):
                end = min(start + step, numel)
                own[count % SETS] = max(own[count % SETS], _blocks(end - start, size) * (1 + kept[bucket.number]))
                written[count % SETS] = max(written[count % SETS], _blocks(end - start, written_bytes(bucket)))
                count += 1
        sets = [sum(parts) for parts in zip(sets, own, written, strict=True)]
    return sum(sets)


def buffer_bytes(units: Sequence[UnitSpec], *, is_cpu: bool) -> int:
    """Return the bytes of the buffers through which values are copied to a device, and parameters are read.

    Each memory has two buffers.
    """
    buckets = [bucket for unit in units for bucket in unit.buckets]
    if is_cpu:
        places = {bucket.row.parameters.place for bucket in buckets if bucket.row.parameters.is_in_file}
    else:
        states = {bucket.row.states.place for bucket in buckets if bucket.is_trained}
        places = {bucket.row.parameters.place for bucket in buckets} | states
    return sum(2 * half_bytes(place) for place in places if place.staging_bytes)


def half_bytes(place: Place) -> int:
    """Return the bytes of one of the two buffers of a memory."""
    return max(LEAST_BYTES, place.staging_bytes // 2)


def _blocks(numel: int, size: int) -> int:
    return -(-numel * size // BLOCK_BYTES) * BLOCK_BYTES
