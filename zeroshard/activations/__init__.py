"""Treatments of activations: the storage of saved tensors between forward and backward.

Owns the choice of the treatment for a cell. `table/activations.py` has the cells, `recompute.py` the recomputation,
`chain.py` the other treatments.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from zeroshard.activations.chain import Chained, Link
from zeroshard.activations.compress import Compress
from zeroshard.activations.offloaded import Offload
from zeroshard.activations.partition import Partition
from zeroshard.activations.products import Products
from zeroshard.activations.recompute import Suspect, recompute
from zeroshard.core.hooks import Enter, Exit
from zeroshard.core.saved import SavedTensors, Treatment
from zeroshard.core.undo import Undo
from zeroshard.describe.selection import recomputed_modules
from zeroshard.describe.units import UnitPlan
from zeroshard.table.activations import Activations, Compressed, Offloaded, Partitioned, Treated
from zeroshard.table.trace import Ledger
from zeroshard.wire.comm import Comm

__all__ = ["LINKS", "recompute_units", "treatment_of"]

LINKS: Mapping[type[Treated], Callable[[Any, Comm], Link]] = MappingProxyType(
    {
        Partitioned: lambda cell, comm: Partition(comm),
        Compressed: lambda cell, comm: Compress(cell.rest),
        Offloaded: lambda cell, comm: Offload(cell),
    }
)
"""Creates the link of a cell, with the communicator of the model."""


def treatment_of(cell: Activations, plans: Sequence[UnitPlan], comm: Comm, ledger: Ledger) -> Treatment | None:
    """Return the treatment of saved tensors; None if activations are kept."""
    if not any(cell.chains):
        return None
    made: dict[Treated, Link] = {}
    links: dict[int, list[Link]] = {}
    for number, plan in enumerate(plans):
        for link in cell.of_unit(plan.name):
            if type(link) in LINKS:
                links.setdefault(number, []).append(made.setdefault(link, LINKS[type(link)](link, comm)))
    buffers = {n: [m._buffers for m in plan.module.modules() if m._buffers] for n, plan in enumerate(plans)}
    return Chained(links, ledger, {number: found for number, found in buffers.items() if found})


def recompute_units(
    cell: Activations,
    plans: Sequence[UnitPlan],
    hooks: Mapping[nn.Module, tuple[Enter, Exit]],
    saved: SavedTensors,
    ledger: Ledger,
    suspect: Suspect,
    undo: Undo,
) -> None:
    """Set up the recomputation of the modules of units that a cell selects; `suspect` is that of `recompute`."""
    rounds = [any(isinstance(one, Compressed) and one.rest for one in cell.of_unit(plan.name)) for plan in plans]
    rounded = {m for plan, is_rounded in zip(plans, rounds, strict=True) if is_rounded for m in plan.module.modules()}
    recompute(recomputed_modules(cell, plans), hooks, Products(saved, ledger), suspect, undo, rounded)
