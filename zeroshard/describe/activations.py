"""What the caller of `shard()` writes about activations, and the cell that follows.

Owns the names of treatments, which modules are recomputed, and what is refused. `table/activations.py` has the cells
that the names stand for.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import nn

from zeroshard.describe.blocks import is_leaf
from zeroshard.describe.units import UnitPlan
from zeroshard.table.activations import (
    Activations,
    Chain,
    Compressed,
    Offloaded,
    Partitioned,
    Recomputed,
    Treated,
    fits,
)
from zeroshard.table.schedule import ROOT

__all__ = ["ActivationsLike", "NAMED", "activations_of", "check_activations", "recomputed_modules"]

NAMED: Mapping[str, Chain] = MappingProxyType(
    {
        "keep": (),
        "recompute": (Recomputed(),),
        "recompute-sqrt": (Recomputed(every="sqrt"),),
        "recompute-rest": (Recomputed(keeps="products"),),
        "partition": (Partitioned(),),
        "compress": (Compressed(),),
        "compress-bf16": (Compressed("bf16"),),
        "compress-fp8": (Compressed("fp8"),),
        "compress-int8": (Compressed("int8"),),
        "offload": (Offloaded(),),
    }
)
"""Treatments by the names that users write, joined by "+"."""

Asked = str | Treated | Sequence[str | Treated]
ActivationsLike = Activations | Asked | Mapping[str, Asked] | None
"""What the caller of `shard()` may write."""


def activations_of(asked: ActivationsLike) -> Activations:
    """Return the cell for what a caller writes.

    Raises:
        ValueError: a name that is not in `NAMED`, or treatments that do not go together.
        TypeError: something that is neither a name nor a cell.

    ```python
    import zeroshard as zs

    assert zs.activations_of("recompute").chain == (zs.Recomputed(),)
    assert zs.activations_of({"blocks.*": "recompute"}).of_unit("head") == ()
    ```
    """
    if isinstance(asked, Activations):
        return asked
    if isinstance(asked, Mapping):
        if others := [pattern for pattern in asked if not isinstance(pattern, str)]:
            raise TypeError(f"activations= takes patterns of unit names, as strings; got {others[0]!r}.")
        return Activations(units=tuple((pattern, _chain_of(one)) for pattern, one in asked.items()))
    return Activations(_chain_of(asked) if asked is not None else ())


def _chain_of(asked: Asked) -> Chain:
    chain: list[Treated] = []
    for one in asked if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]:
        if isinstance(one, Treated):
            chain.append(one)
        elif isinstance(one, str):
            for name in map(str.strip, one.split("+")):
                if name not in NAMED:
                    raise ValueError(f"activations={one!r}: there is no treatment '{name}'; known: {', '.join(NAMED)}.")
                chain += NAMED[name]
        else:
            raise TypeError(f"activations= takes names and cells such as zs.Recomputed(); got {one!r}.")
    return tuple(chain)


def recomputed_modules(cell: Activations, plans: Sequence[UnitPlan]) -> list[tuple[nn.Module, Recomputed]]:
    """Return the modules that are recomputed, in order, each with how.

    The root and units of a single layer are not: they would run again for what they keep anyway.
    """
    modules = []
    for number, plan in enumerate(plans):
        how = next((link for link in cell.of_unit(plan.name) if isinstance(link, Recomputed)), None)
        if how is not None and number != ROOT:
            blocks = plan.blocks or (plan.module,)
            modules += [(module, how) for module in blocks if [*module.children()] and not is_leaf(module)]
    return modules


def check_activations(cell: Activations, plans: Sequence[UnitPlan], tensor_size: int) -> None:
    """Raise where a treatment would have nothing to do.

    Args:
        tensor_size: ranks along the tensor axis.

    Raises:
        ValueError: it partitions over an axis that the mesh has not, names no unit, or recomputes no module.
    """
    names = [plan.name or "(root)" for plan in plans]
    for pattern, _ in cell.units:
        if not any(fits(plan.name, pattern) for plan in plans):
            raise ValueError(
                f"activations= names '{pattern}', which fits no unit; units: {', '.join(names) or 'none'}."
            )
    if tensor_size == 1 and any(Partitioned() in chain for chain in cell.chains):
        raise ValueError(
            "activations='partition' divides inputs over the ranks along an axis 'tensor', and the mesh has none. "
            "Leave it out, or pass mesh= with that axis."
        )
    for pattern, chain in (*cell.units, ("", cell.chain)):
        only = Activations(units=((pattern, chain),)) if pattern else cell
        if any(isinstance(link, Recomputed) for link in chain) and not recomputed_modules(only, plans):
            raise ValueError(
                f"activations={pattern or str(cell)!r} recomputes modules of units, and no such unit has a module with "
                f"layers inside; units: {', '.join(names)}. Name such modules with units=."
            )
