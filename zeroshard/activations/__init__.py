"""Treatments of activations, by the names that cells of the activations column give.

Owns the list. Each treatment is a module beside this one and a `Treatment` of `core/saved.py`, which runs the chain.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from zeroshard.core.saved import Treatment
from zeroshard.table.cells import Activations

__all__ = ["TREATMENTS", "treatments_of"]

TREATMENTS: Mapping[str, Callable[[], Treatment]] = MappingProxyType({})
"""What makes a treatment, by name. Activations are kept so far: there is none."""


def treatments_of(cell: Activations) -> list[Treatment]:
    """Return a cell's treatments, in the order in which tensors go through them.

    Raises:
        ValueError: the cell names a treatment that is not in `TREATMENTS`.
    """
    for name in cell.treatments:
        if name not in TREATMENTS:
            known = ", ".join(TREATMENTS) or "none"
            raise ValueError(f"The activations cell '{cell}' asks for '{name}'; known treatments: {known}.")
    return [TREATMENTS[name]() for name in cell.treatments]
