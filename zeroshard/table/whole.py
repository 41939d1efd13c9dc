"""Parameters that are updated as a whole, and their owners.

Owns the assignment of an optimizer's matrices to ranks, as integers. It must not know tensors. `owners.py` balances
costs.
"""

from collections.abc import Sequence
from typing import NamedTuple

from zeroshard.table.bytes import Owned, Updates
from zeroshard.table.owners import plan_owners
from zeroshard.table.spec import BucketSpec

__all__ = ["Matrix", "own", "owned_bytes"]


class Matrix(NamedTuple):
    """A parameter that an optimizer updates as a whole, and its place among the buckets.

    `cost` balances owners. `kind` says how long an update takes: "newton-schulz", "adafactor" or "other".
    """

    bucket: BucketSpec
    place: int
    shape: tuple[int, ...]
    cost: float
    state_bytes: int
    counter_bytes: int
    kind: str


def own(matrices: Sequence[Matrix], ranks: int) -> list[Owned]:
    """Return the matrices of one optimizer with their owners, as each rank computes them.

    Args:
        matrices: in the order of the optimizer's groups.
        ranks: number of ranks of a replica of the state.
    """
    costs = [one.cost * one.bucket.is_trained for one in matrices]
    numels = [one.bucket.layout.numels[one.place] for one in matrices]
    owners = plan_owners(costs, numels, ranks)
    return [
        Owned(one.bucket, one.place, owner, one.state_bytes, one.counter_bytes)
        for one, owner in zip(matrices, owners, strict=True)
    ]


def owned_bytes(updates: Sequence[Updates], ranks: int) -> list[int]:
    """Return the bytes of matrices' states, including counters, for each rank of a replica."""
    found = [0] * ranks
    for one in (one for some in updates for one in some.whole if one.bucket.is_trained):
        for rank in range(ranks) if one.bucket.updates_all else [one.owner]:
            found[rank] += one.state_bytes + one.counter_bytes
    return found
