"""The argument `parameters=`, and the row of the residency table that follows from it.

Owns the names of cells of the parameters column, and their checks. Imports no torch, because plans read the same
argument. `table/cells.py` has the cells.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from zeroshard.table.activations import fits
from zeroshard.table.cells import Cell, Replicated, Residency, Sharded

__all__ = ["ParametersLike", "check_patterns", "row_with_parameters"]

NAMED: Mapping[str, Cell] = MappingProxyType(
    {
        "sharded": Sharded(),
        "until-backward": Sharded(until="backward"),
        "until-step": Sharded(until="step"),
        "replicated": Replicated(),
    }
)
"""Cells by name."""

Asked = str | Cell
ParametersLike = Asked | Mapping[str, Asked] | None
"""Values of the argument `parameters=`."""


def row_with_parameters(row: Residency, asked: ParametersLike) -> Residency:
    """Return a row with the requested cells of parameters.

    Args:
        asked: a cell or its name for all units, or a mapping from patterns of unit names to these; other units keep the
            cell of the row.

    Raises:
        ValueError: a name is unknown, or a cell is inconsistent with the other columns of the row.
        TypeError: a value is neither a name nor a cell.
    """
    if asked is None:
        return row
    if not isinstance(asked, Mapping):
        return replace(row, parameters=_cell_of(asked))
    return replace(row, units=tuple((pattern, _cell_of(one)) for pattern, one in asked.items()))


def check_patterns(row: Residency, names: Iterable[str]) -> None:
    """Raise if a pattern matches no unit.

    Args:
        names: names of all units.

    Raises:
        ValueError: a pattern matches no unit.
    """
    known = [name or "(root)" for name in names]
    for pattern, _ in row.units:
        if not any(fits(name, pattern) for name in known):
            raise ValueError(
                f"parameters= names '{pattern}', which matches no unit; units: {', '.join(known)}. units= makes units "
                "of other modules."
            )


def _cell_of(asked: Asked) -> Cell:
    if not isinstance(asked, str):
        return asked  # `Residency` rejects other types
    if asked not in NAMED:
        raise ValueError(f"parameters= takes {', '.join(NAMED)} or a cell; got {asked!r}.")
    return NAMED[asked]
