"""What optimizers update: slices of parameters, and whole parameters with their owners.

Owns the making of `Updates`, and the assignment of an optimizer's matrices to ranks, as integers. It must not know
tensors. `owners.py` balances costs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from zeroshard.table.bytes import Owned, Sliced, Updates
from zeroshard.table.owners import plan_owners

__all__ = ["ELEMENTWISE", "make_updates", "owned_bytes"]

ELEMENTWISE = frozenset(
    ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD"]
)
"""Classes of torch.optim whose update of an element depends only on that element."""


def make_updates(entries: Iterable[Sliced | Owned]) -> Updates:
    """Return what one optimizer updates and keeps.

    Args:
        entries: in the order of the optimizer's groups: what is updated in slices, or whole, then either all with
            owners, or none.
    """
    entries = [*entries]
    whole = [one for one in entries if isinstance(one, Owned)]
    if any(one.owner < 0 for one in whole):
        costs = [one.cost * one.bucket.is_trained for one in whole]
        numels = [one.bucket.layout.numels[one.index] for one in whole]
        owners = plan_owners(costs, numels, whole[0].bucket.layout.world_size)
        whole = [replace(one, owner=owner) for one, owner in zip(whole, owners, strict=True)]
    return Updates([one for one in entries if not isinstance(one, Owned)], whole=whole)


def owned_bytes(updates: Sequence[Updates], ranks: int) -> list[int]:
    """Return the bytes of matrices' states, including counters, for each rank of a replica."""
    found = [0] * ranks
    for one in (one for some in updates for one in some.trained.whole):
        for rank in range(ranks) if one.bucket.updates_all else [one.owner]:
            found[rank] += one.state_bytes + one.counter_bytes
    return found
