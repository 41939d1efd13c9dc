"""What an optimizer updates, on slices or whole, and what states it keeps: its `Updates`, before anything is sharded.

Owns the reading of an optimizer's groups. It must not know tensors' values, steps or the engine, whose own count is in
`account/accounting.py`. `keeps.py` determines states by trial steps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from zeroshard.optim.keeps import is_taken, state_cost, whole_bytes, whole_costs
from zeroshard.optim.whole import Whole, whole_of
from zeroshard.table.bytes import Updates
from zeroshard.table.owners import newton_schulz_cost
from zeroshard.table.spec import BucketSpec, UnitSpec, itemsize
from zeroshard.table.whole import Matrix, own

__all__ = ["updates_of_optimizer", "updates_of_optimizers"]

Place = tuple[BucketSpec, int]
USUAL_COST: Final = (2, 4)
"""AdamW's states: elements for each element, and bytes of the counter of each parameter."""


def updates_of_optimizer(
    optimizer: torch.optim.Optimizer, place_of: Callable[[torch.nn.Parameter], Place | None], ranks: int
) -> tuple[Updates | None, list[Matrix]]:
    """Return what an optimizer updates and keeps, and the parameters that it updates whole.

    Args:
        place_of: a parameter's bucket and its index there; None for a parameter that does not count.
        ranks: number of ranks of a replica of the state.

    Returns:
        None in place of the updates, if it updates slices and no trial step determines their states.
    """
    whole, sliced, matrices = whole_of(optimizer), list[Place](), list[Matrix]()
    kept = {} if whole is None else whole_costs(optimizer, whole)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if (place := place_of(parameter)) is None:
                continue
            if whole is None or not is_taken(whole, group, parameter):
                sliced.append(place)
                continue
            shape = tuple(parameter.shape)
            nbytes = whole_bytes(kept.get((number, len(shape)), ()), shape, itemsize(place[0].formats.state))
            matrices.append(Matrix(*place, shape, float(whole.cost(shape)), *nbytes, _kind_of(optimizer, whole)))
    cost = state_cost(optimizer)
    if cost is None and sliced:
        return None, matrices
    return Updates(sliced, *(cost or (0, 0)), whole=own(matrices, ranks)), matrices


def updates_of_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], units: Sequence[UnitSpec], names: Mapping[int, str], ranks: int
) -> list[Updates]:
    """Return what the optimizers of a model update and keep, before it is known exactly.

    An optimizer whose states no trial step determines, or that is attached later, counts as AdamW.

    Args:
        names: names of the model's parameters, by identity.
    """
    places = {name: (b, index) for unit in units for b in unit.buckets for index, name in enumerate(b.names)}
    found = []
    for one in optimizers:
        updates, _ = updates_of_optimizer(one, lambda p: places[names[id(p)]], ranks)
        entries = [places[names[id(p)]] for group in one.param_groups for p in group["params"]]
        found.append(updates or Updates(entries, *USUAL_COST))
    return found or [Updates([*places.values()], *USUAL_COST)]


def _kind_of(optimizer: torch.optim.Optimizer, whole: Whole) -> str:
    """Return the kind of an optimizer's updates of whole tensors."""
    kind = "adafactor" if isinstance(optimizer, torch.optim.Adafactor) else "other"
    return "newton-schulz" if whole.cost is newton_schulz_cost else kind
