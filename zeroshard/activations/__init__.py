"""Treatments of activations: what happens, between forward and backward, to the tensors that autograd saves.

Owns the names that the caller of `shard()` writes, and which treatment a cell asks for. `table/activations.py` has the
cells, `recompute.py` the recomputation, `chain.py` the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from zeroshard.activations.chain import Chained, Link
from zeroshard.activations.compress import Compress
from zeroshard.activations.offload import Offload
from zeroshard.activations.partition import Partition
from zeroshard.activations.recompute import recompute
from zeroshard.core.hooks import Enter, Exit
from zeroshard.core.saved import SavedTensors, Treatment
from zeroshard.state.blocks import is_leaf
from zeroshard.state.units import UnitPlan
from zeroshard.table.activations import Activations, Compressed, Offloaded, Partitioned, Recomputed, Treated, fits
from zeroshard.table.schedule import ROOT
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
"""What makes the link for a cell, and for the collectives of the model."""


def treatment_of(cell: Activations, plans: Sequence[UnitPlan], comm: Comm, ledger: Ledger) -> Treatment | None:
    """Return what is done with the tensors that autograd saves; None where activations are kept.

    Raises:
        ValueError: a pattern fits no unit.
    """
    for pattern, _ in cell.units:
        if not any(fits(plan.name, pattern) for plan in plans):
            names = ", ".join(plan.name or "(root)" for plan in plans)
            raise ValueError(f"activations={{{pattern!r}: ...}} fits no unit; their names: {names}.")
    if not any(cell.chains):
        return None
    made: dict[Treated, Link] = {}
    links: dict[int, list[Link]] = {}
    for number, plan in enumerate(plans):
        for link in cell.of_unit(plan.name):
            if type(link) in LINKS:
                links.setdefault(number, []).append(made.setdefault(link, LINKS[type(link)](link, comm)))
    return Chained(links, ledger)


def recompute_units(
    cell: Activations, plans: Sequence[UnitPlan], hooks: Mapping[nn.Module, tuple[Enter, Exit]], saved: SavedTensors
) -> None:
    """Have the modules of units recomputed where a cell asks for it.

    The root and units of a single layer are left alone: they would run again for what they keep anyway.
    """
    modules = []
    for number, plan in enumerate(plans):
        how = next((link for link in cell.of_unit(plan.name) if isinstance(link, Recomputed)), None)
        if how is not None and number != ROOT:
            blocks = plan.blocks or (plan.module,)
            modules += [(module, how) for module in blocks if [*module.children()] and not is_leaf(module)]
    recompute(modules, hooks, saved)
