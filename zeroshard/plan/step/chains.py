"""The reductions of a program that sends what a rank owns of gradients to that rank alone.

Owns the order and the sizes of these reductions, as DeepSpeed made them until its version 0.3. Needs no torch.

Source: DeepSpeed 0.2, `average_tensor` and `get_data_parallel_partitions` of pt/deepspeed_zero_optimizer.py.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from zeroshard.plan.step.system import LEAST_MATRIX_BYTES
from zeroshard.table.spec import UnitSpec

__all__ = ["chains_of"]


def chains_of(units: Sequence[UnitSpec]) -> Mapping[int, Sequence[int]]:
    """Return the elements of each reduction, by number of the bucket after whose gradients the reduction begins.

    Ranks own equal parts of the matrices' elements, and of the vectors'. In the order of a backward, what a rank owns
    of gradients side by side is reduced at once.
    """
    buckets = [one for unit in units for one in unit.reduced if one.row.cuts_gradients and not one.updates_all]
    sums, found, last = Counter[bool](), dict[int, list[int]](), (-1, False, -1)
    for bucket in buckets:
        for numel in bucket.layout.numels:
            sums[_is_matrix(numel)] += numel
    ends = sums.copy()
    for bucket in reversed(buckets):
        parts = found[bucket.number] = []
        for numel in reversed(bucket.layout.numels):
            group = _is_matrix(numel)
            stop, owned = ends[group], -(-sums[group] // bucket.layout.world_size)
            ends[group] = start = stop - numel
            for rank in range(start // owned, (stop - 1) // owned + 1):
                before = found[last[0]].pop() if last[1:] == (group, rank) else 0
                parts.append(before + min(stop, (rank + 1) * owned) - max(start, rank * owned))
                last = bucket.number, group, rank
    return found


def _is_matrix(numel: int) -> bool:
    """Return whether a parameter is in the group of the matrices, which decay; biases and norms do not."""
    return 2 * numel >= LEAST_MATRIX_BYTES
