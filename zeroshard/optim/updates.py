"""What an optimizer updates, on slices or whole, and what states it keeps: its `Updates`.

Owns the reading of an optimizer's groups. It must not know tensors' values, steps or the engine. `keeps.py` determines
states by trial steps.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from zeroshard.optim.keeps import Kept, is_taken, kept_by, whole_bytes
from zeroshard.table.bytes import Cost, Owned, Sliced, Updates
from zeroshard.table.owners import newton_schulz_cost
from zeroshard.table.spec import BucketSpec, itemsize
from zeroshard.table.whole import make_updates

__all__ = ["Entry", "USUAL_COST", "updates_of_optimizer"]

Entry = tuple[BucketSpec, int, tuple[int, ...], int]
"""A parameter's bucket, its index there, its shape, and the rank that updates it, -1 if that is not known."""
NO_COST: Final = Cost(0, 0)
USUAL_COST: Final = Cost(2, 4)
"""AdamW's states: elements for each element, and bytes of the counter of each parameter."""


def updates_of_optimizer(
    optimizer: torch.optim.Optimizer,
    entry_of: Callable[[Any], Entry | None],
    *,
    kept: Kept | None = None,
    unknown: Cost = NO_COST,
) -> Updates:
    """Return what an optimizer updates and keeps.

    Args:
        entry_of: of a parameter in a group; None for a parameter that does not count.
        kept: what the optimizer keeps, where that is known.
        unknown: the cost of states that no trial determines.
    """
    kept = kept or kept_by(optimizer)
    whole = kept.mark
    entries = list[Sliced | Owned]()
    for number, group in enumerate(optimizer.param_groups):
        for bucket, index, shape, owner in filter(None, map(entry_of, group["params"])):
            if whole is None or not is_taken(whole, group, shape):
                entries.append(Sliced(bucket, index, kept.costs.get(number, unknown)))
                continue
            nbytes = whole_bytes(kept.shapes.get((number, len(shape)), ()), shape, itemsize(bucket.formats.state))
            kind = "newton-schulz" if whole.cost is newton_schulz_cost else "other"
            if isinstance(optimizer, torch.optim.Adafactor):
                lists, moments = group.get("foreach"), group.get("beta1") is not None
                kind = "adafactor" + " on lists" * bool(lists) + " with moments" * moments
            entries.append(Owned(bucket, index, shape, *nbytes, float(whole.cost(shape)), kind, owner, number))
    return make_updates(entries)
