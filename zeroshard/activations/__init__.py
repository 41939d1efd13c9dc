"""Treatments of activations: the storage of saved tensors between forward and backward.

Owns the choice of the treatment for a cell. `table/activations.py` has the cells, `recompute.py` the recomputation,
`chain.py` the other treatments.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from zeroshard.activations.chain import Chained, Link
from zeroshard.activations.compress import Compress
from zeroshard.activations.offloaded import Offload
from zeroshard.activations.partition import Axis, Partition
from zeroshard.activations.products import Products
from zeroshard.activations.recompute import Hooks, Put, Suspect, recompute
from zeroshard.activations.saved import Saved, Treatment
from zeroshard.describe.selection import recomputed_modules
from zeroshard.describe.units import UnitPlan
from zeroshard.table.activations import Activations, Compressed, Offloaded, Partitioned, Treated
from zeroshard.table.trace import Ledger

__all__ = ["LINKS", "recompute_units", "treatment_of"]

Links = Mapping[type[Treated], Callable[[Any, Axis], Link]]

LINKS: Links = MappingProxyType(
    {
        Partitioned: lambda cell, axis: Partition(axis),
        Compressed: lambda cell, axis: Compress(cell.rest),
        Offloaded: lambda cell, axis: Offload(cell),
    }
)
"""Creates the link of a cell, with the tensor axis of the mesh."""


def treatment_of(
    cell: Activations, plans: Sequence[UnitPlan], axis: Axis, ledger: Ledger, kinds: Links | None = None
) -> Treatment | None:
    """Return the treatment of saved tensors; None if activations are kept.

    Args:
        kinds: creates the links of some cells otherwise than for an engine.
    """
    if not any(cell.chains):
        return None
    kinds = {**LINKS, **(kinds or {})}
    made: dict[Treated, Link] = {}
    links: dict[int, list[Link]] = {}
    for number, plan in enumerate(plans):
        for link in cell.of_unit(plan.name):
            if type(link) in kinds:
                made[link] = made.get(link) or kinds[type(link)](link, axis)
                links.setdefault(number, []).append(made[link])
    buffers = {n: [m._buffers for m in plan.module.modules() if m._buffers] for n, plan in enumerate(plans)}
    return Chained(links, ledger, {number: found for number, found in buffers.items() if found})


def recompute_units(
    cell: Activations,
    plans: Sequence[UnitPlan],
    hooks: Hooks,
    saved: Saved,
    ledger: Ledger,
    suspect: Suspect,
    put: Put,
) -> None:
    """Set up the recomputation of the modules of units that a cell selects; `suspect`, `put` as for `recompute`."""
    rounds = [any(isinstance(one, Compressed) and one.rest for one in cell.of_unit(plan.name)) for plan in plans]
    rounded = {m for plan, is_rounded in zip(plans, rounds, strict=True) if is_rounded for m in plan.module.modules()}
    recompute(recomputed_modules(cell, plans), hooks, Products(saved, ledger), suspect, put, rounded)
