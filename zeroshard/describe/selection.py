"""The modules that the activations column selects, and the checks of that selection.

Owns the choice of recomputed modules. `describe/treatments.py` has the names of treatments.
"""

from collections.abc import Sequence

from torch import nn

from zeroshard.describe.blocks import is_leaf
from zeroshard.describe.units import UnitPlan
from zeroshard.table.activations import Activations, Partitioned, Recomputed, fits
from zeroshard.table.schedule import ROOT

__all__ = ["check_activations", "recomputed_modules"]


def recomputed_modules(cell: Activations, plans: Sequence[UnitPlan]) -> list[tuple[nn.Module, Recomputed]]:
    """Return the recomputed modules in order, each with its treatment.

    The root and units of a single layer are excluded: recomputing them would save nothing.
    """
    modules = []
    for number, plan in enumerate(plans):
        how = next((link for link in cell.of_unit(plan.name) if isinstance(link, Recomputed)), None)
        if how is not None and number != ROOT:
            blocks = plan.blocks or (plan.module,)
            modules += [(module, how) for module in blocks if [*module.children()] and not is_leaf(module)]
    return modules


def check_activations(cell: Activations, plans: Sequence[UnitPlan], tensor_size: int) -> None:
    """Raise if a treatment would have no effect.

    Args:
        tensor_size: number of ranks along the tensor axis.

    Raises:
        ValueError: a treatment partitions over an axis that the mesh does not have, matches no unit, or recomputes no
            module.
    """
    names = [plan.name or "(root)" for plan in plans]
    for pattern, _ in cell.units:
        if not any(fits(plan.name, pattern) for plan in plans):
            raise ValueError(
                f"activations= names '{pattern}', which matches no unit; units: {', '.join(names) or 'none'}."
            )
    if tensor_size == 1 and any(Partitioned() in chain for chain in cell.chains):
        raise ValueError(
            "activations='partition' divides inputs over the ranks along the axis 'tensor', but the mesh has no such "
            "axis. Remove 'partition', or pass mesh= with that axis."
        )
    for pattern, chain in (*cell.units, ("", cell.chain)):
        only = Activations(units=((pattern, chain),)) if pattern else cell
        if any(isinstance(link, Recomputed) for link in chain) and not recomputed_modules(only, plans):
            raise ValueError(
                f"activations={pattern or str(cell)!r} recomputes modules of units, but no selected unit has a module "
                f"with layers inside; units: {', '.join(names)}. Name such modules with units=, use a model of two or "
                "more blocks (a single one is part of the root), or remove the treatment."
            )
