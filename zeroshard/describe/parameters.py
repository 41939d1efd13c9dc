"""What the caller writes about the parameters of units, and the row of the residency table that follows.

Owns the names of cells of the parameters' column, and what is refused. Needs no torch, so that plans read the same
arguments. `table/cells.py` has the cells.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from zeroshard.table.activations import fits
from zeroshard.table.cells import Cell, Replicated, Residency, Sharded

__all__ = ["ParametersLike", "check_patterns", "row_with_parameters"]

NAMED: Mapping[str, Cell] = MappingProxyType(
    {"sharded": Sharded(), "until-backward": Sharded(until="backward"), "replicated": Replicated()}
)
"""Cells by the names that users write."""

Asked = str | Cell
ParametersLike = Asked | Mapping[str, Asked] | None
"""What the caller of `shard()` may write."""


def row_with_parameters(row: Residency, asked: ParametersLike) -> Residency:
    """Return a row whose parameters are kept as a caller asks.

    Args:
        asked: of all units a cell or its name; or these by patterns of unit names, where the row's own cell is that of
            the other units.

    Raises:
        ValueError: a name that is not in `NAMED`, or a cell that does not go with the row's other columns.
        TypeError: neither a name nor a cell.
    """
    if asked is None:
        return row
    if not isinstance(asked, Mapping):
        return replace(row, parameters=_cell_of(asked))
    return replace(row, units=tuple((pattern, _cell_of(one)) for pattern, one in asked.items()))


def check_patterns(row: Residency, names: Iterable[str]) -> None:
    """Raise where a pattern means no unit.

    Args:
        names: of all units.

    Raises:
        ValueError: one does.
    """
    known = [name or "(root)" for name in names]
    for pattern, _ in row.units:
        if not any(fits(name, pattern) for name in known):
            raise ValueError(
                f"parameters= names '{pattern}', which fits no unit; units: {', '.join(known)}. units= makes units of "
                "other modules."
            )


def _cell_of(asked: Asked) -> Cell:
    if not isinstance(asked, str):
        return asked  # the row refuses what is no cell
    if asked not in NAMED:
        raise ValueError(f"parameters= takes {', '.join(NAMED)} or a cell; got {asked!r}.")
    return NAMED[asked]
