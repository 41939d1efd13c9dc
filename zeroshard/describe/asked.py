"""The arguments that `zs.shard`, `zs.plan`, `zs.search` and the command line have in common, and what they mean.

Owns their resolution, with one text for each refusal, and the choice of "auto". It must not know models or what fits:
`choose` asks its caller. Imports no torch, because plans of shapes read the same arguments. Read `rows.py`,
`offload.py` and `axes.py` first, which own one argument each.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, final

from zeroshard.describe.axes import Axes, axes_of
from zeroshard.describe.offload import AUTO, Offload, OffloadLike, offload_of, row_with
from zeroshard.describe.parameters import ParametersLike, row_with_parameters
from zeroshard.describe.precision_names import NAMES, precision_name
from zeroshard.describe.rows import StageLike, row_of
from zeroshard.describe.treatments import ActivationsLike, activations_of
from zeroshard.table.cells import Residency
from zeroshard.table.stages import STAGES

__all__ = ["Asked", "Resolved", "choose", "resolve"]


@final
@dataclass(frozen=True, kw_only=True)
class Asked:
    """Arguments as the caller wrote them; `zs.shard` documents them."""

    stage: StageLike = None
    residency: Residency | str | None = None
    activations: ActivationsLike = None
    offload: OffloadLike = None
    parameters: ParametersLike = None
    precision: Any = "fp32"
    mesh: Any = None


@final
@dataclass(frozen=True)
class Resolved:
    """What arguments mean for a number of ranks.

    Args:
        rows: the row of the residency table; for stage "auto", the rows to try, in order.
        offload: the offload; None also for "auto".
        is_auto: whether the offload is to be chosen.
        precision: the name of a precision; any other value as the caller wrote it.
        axes: name and size of each axis of the ranks.
    """

    rows: tuple[Residency, ...]
    offload: Offload | None
    is_auto: bool
    precision: Any
    axes: Axes


def resolve(asked: Asked, world_size: int, *, tensor: int = 1, precisions: Collection[str] = NAMES) -> Resolved:
    """Return what arguments mean.

    Args:
        tensor: number of ranks of tensor parallelism, for callers without a DeviceMesh.
        precisions: the accepted names of precisions.

    Raises:
        ValueError, TypeError: an argument is unknown, or contradicts another one; the text says which.
    """
    precision, axes = precision_name(asked.precision, precisions), axes_of(asked.mesh, world_size, tensor)
    is_auto = isinstance(asked.offload, str) and asked.offload == AUTO
    offload = None if is_auto else offload_of(asked.offload)
    row = row_of(asked.stage, asked.residency, asked.activations)
    cell, refusal, rows = activations_of(asked.activations), None, list[Residency]()
    for one in [row] if row is not None else [replace(one, activations=cell) for one in STAGES.values()]:
        try:
            one = row_with_parameters(one, asked.parameters)
            row_with(one, offload, is_alone=False)  # raises if the row cannot be offloaded so
            rows.append(one)
        except ValueError as error:  # another stage may allow what is asked beside it
            refusal = error
    if refusal is not None and not rows:
        raise refusal
    return Resolved(
        tuple(dict.fromkeys(rows)), offload, is_auto, asked.precision if precision is None else precision, axes
    )


def choose(
    resolved: Resolved,
    fits: Callable[[Residency, Offload | None], bool],
    offload_for: Callable[[Residency], tuple[Offload | None, bool]],
    *,
    shares_memory: bool,
) -> tuple[Residency, Offload | None, bool]:
    """Choose what is "auto": the first row that fits, or the last one, and for it the offload.

    Args:
        fits: returns whether a row and an offload fit.
        offload_for: returns the offload "auto" of a row, and whether it fits.
        shares_memory: whether device and host share one memory, so that offload "auto" moves nothing.

    Returns: the row, the offload, and whether the offload fits; True if there is nothing to choose.
    """
    *others, last = resolved.rows
    row = next((one for one in others if fits(one, resolved.offload)), last)
    if not resolved.is_auto or shares_memory:
        return row, resolved.offload, True
    return row, *offload_for(row)
