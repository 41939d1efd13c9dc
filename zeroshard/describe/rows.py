"""The arguments `stage=`, `residency=` and `activations=`, and the row of the residency table that follows from them.

Owns their checks, with one text for each refusal. Imports no torch, because plans read the same arguments. `asked.py`
resolves them with the others; `table/stages.py` has the rows.
"""

from dataclasses import replace
from typing import Final, Literal

from zeroshard.describe.treatments import ActivationsLike, activations_of
from zeroshard.table.cells import Residency
from zeroshard.table.stages import CONFIGURATIONS, DEFAULT_STAGE, row_of_stage

__all__ = ["AUTO", "StageLike", "row_of"]

AUTO: Final = "auto"
"""The value of `stage` that chooses the lowest stage that fits."""

StageLike = int | Literal["auto"] | None
"""Values of the argument `stage=`."""


def row_of(stage: StageLike, residency: Residency | str | None, activations: ActivationsLike) -> Residency | None:
    """Return the row of the arguments of `zs.shard` and `zs.plan`; None for stage "auto".

    Raises:
        ValueError: a stage and a residency are given, activations are given twice, or a name is unknown.
        TypeError: `residency` is neither a name nor a row.
    """
    if residency is not None and stage is not None:
        raise ValueError(f"Give stage= or residency=, not both; got stage={stage!r} and {residency}.")
    cell = activations_of(activations)
    if residency is None:
        row = None if stage == AUTO else row_of_stage(DEFAULT_STAGE if stage is None else stage)
        return None if row is None else replace(row, activations=cell)
    if isinstance(residency, str) and residency in CONFIGURATIONS:
        residency = CONFIGURATIONS[residency]
    if not isinstance(residency, Residency):
        kind = ValueError if isinstance(residency, str) else TypeError
        raise kind(f"residency must be a zs.Residency or one of {', '.join(CONFIGURATIONS)}; got {residency!r}.")
    if activations is None:
        return residency
    if any(residency.activations.chains):
        raise ValueError(f"Give activations= or a row that has them, not both; got {cell} and {residency}.")
    return replace(residency, activations=cell)
