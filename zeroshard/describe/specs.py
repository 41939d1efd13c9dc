"""A model as records: the units of one rank, from modules, a row of the residency table and a precision.

Owns the one way from an `nn.Module` to `table/spec.py`, which both the engine (`state/takeover.py`) and predictions
take, so that a prediction is about the buckets that a run has. It must not know processes, optimizers or engines. Read
`describe/units.py` first.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from zeroshard.describe.precision import Precision
from zeroshard.describe.units import UnitPlan
from zeroshard.table.cells import Residency
from zeroshard.table.layout import plan_layout
from zeroshard.table.spec import BucketSpec, Formats, UnitSpec, itemsize

__all__ = ["describe_units"]


def describe_units(
    plans: Sequence[UnitPlan],
    row: Residency,
    precision: Precision,
    *,
    shard_size: int,
    shard_rank: int = 0,
    replicas: int = 1,
    numel_of: Callable[[nn.Parameter], int] = nn.Parameter.numel,
) -> tuple[UnitSpec, ...]:
    """Return the units of a model as one rank has them, buckets in the order of their first parameters.

    Parameters may be on the meta device. A unit has a bucket for each set of formats and trainability.

    Args:
        plans: what `plan_units` returned: the root first.
        shard_size: ranks over which the state is sharded.
        shard_rank: this rank's place among them.
        replicas: copies of the sharded state.
        numel_of: returns the elements of a parameter that this rank has; less than all of them where a tensor axis
            splits it.
    """
    kept = frozenset(id(p) for m in plans[0].module.modules() if isinstance(m, precision.keep) for p in m.parameters())
    units: list[UnitSpec] = []
    count = 0
    for number, plan in enumerate(plans):
        sets: dict[tuple[Formats, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in plan.parameters:
            formats = precision.formats_of(parameter.dtype, is_kept=id(parameter) in kept)
            sets.setdefault((formats, parameter.requires_grad), []).append((name, parameter))
        buckets = [
            BucketSpec(
                plan.name or "the root",
                place,
                tuple(name for name, _ in named),
                plan_layout([numel_of(p) for _, p in named], itemsize(formats.param), shard_size, replicas),
                formats,
                row,
                shard_rank,
                replicas,
                is_trained=is_trained,
            )
            for place, ((formats, is_trained), named) in enumerate(sets.items(), count)
        ]
        count += len(buckets)
        units.append(UnitSpec(number, plan.name, tuple(buckets)))
    return _with_apart(units, row)


def _with_apart(units: Sequence[UnitSpec], row: Residency) -> tuple[UnitSpec, ...]:
    """Say of each bucket which parameters' states are in another memory; what is not trained has none."""
    trained = [bucket for unit in units for bucket in unit.buckets if bucket.is_trained]
    kept = [[b - a for a, b in (one.layout.overlap(i, *one.states) for i in range(len(one.names)))] for one in trained]
    counts = {one.number: count for one, count in zip(trained, row.states.apart(kept), strict=True)}
    return tuple(
        replace(unit, buckets=tuple(replace(one, apart=counts.get(one.number, 0)) for one in unit.buckets))
        for unit in units
    )
