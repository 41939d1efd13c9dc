"""The argument `activations=`, and the cell that follows from it.

Owns the names of treatments. Imports no torch, because plans read the same names. `table/activations.py` has the cells;
`describe/selection.py` chooses the modules.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from zeroshard.table.activations import Activations, Chain, Compressed, Offloaded, Partitioned, Recomputed, Treated

__all__ = ["ActivationsLike", "NAMED", "activations_of"]

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
"""Values of the argument `activations=`."""


def activations_of(asked: ActivationsLike) -> Activations:
    """Return the activations cell of an argument of `shard()`.

    Args:
        asked: a name, a cell, a sequence of these, or a mapping from patterns of unit names to these.

    Raises:
        ValueError: a name is unknown, or treatments cannot be combined.
        TypeError: a value is neither a name nor a cell.

    ```python
    import zeroshard as zs
    from zeroshard.describe.treatments import activations_of

    assert activations_of("recompute").chain == (zs.Recomputed(),)
    assert activations_of({"blocks.*": "recompute"}).of_unit("head") == ()
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
