"""The specification of a model: the units of one rank, from modules, a residency row and a precision.

Owns the conversion of an `nn.Module` to the records of `table/spec.py`. The engine (`setup/takeover.py`) and
predictions both use it, so that they agree on buckets. It must not know processes, optimizers or engines. Read
`describe/units.py` first.
"""

from collections.abc import Callable, Sequence

from torch import nn

from zeroshard.describe.offload import with_places
from zeroshard.describe.precision import Precision, formats_of_model
from zeroshard.describe.units import UnitPlan
from zeroshard.table.cells import Residency
from zeroshard.table.layout import plan_layout
from zeroshard.table.schedule import ROOT
from zeroshard.table.spec import CODECS, BucketSpec, Formats, UnitSpec, itemsize, with_last

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
    is_part: bool = False,
) -> tuple[UnitSpec, ...]:
    """Return the units of a model on one rank, with buckets in the order of their first parameters.

    Parameters may be on the meta device. A unit has one bucket per combination of formats and trainability. Where
    gradients are sent by a codec, what a tensor axis splits has a bucket of its own.

    Args:
        plans: the result of `plan_units`, root first.
        shard_size: number of ranks over which state is sharded.
        shard_rank: index of this rank among them.
        replicas: number of replicas of the sharded state.
        numel_of: returns the number of elements of a parameter on this rank, which a tensor axis may split.
        is_part: whether the rank runs a part of the model, which ends before the backward begins.
    """
    formats_by_parameter = formats_of_model(plans[0].module, precision)
    units, count = list[UnitSpec](), 0
    for number, plan in enumerate(plans):
        sets: dict[tuple[Formats, bool, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in plan.parameters:
            formats = formats_by_parameter[id(parameter)]
            # A codec rounds neighbours by one scale: beside split ones, equal gradients would differ between ranks.
            is_split = formats.reduce in CODECS and numel_of(parameter) != parameter.numel()
            sets.setdefault((formats, parameter.requires_grad, is_split), []).append((name, parameter))
        buckets = [
            BucketSpec(
                plan.name or "the root",
                place,
                tuple(name for name, _ in named),
                plan_layout([numel_of(p) for _, p in named], itemsize(formats.param), shard_size, replicas),
                formats,
                row.of_unit(plan.name),
                shard_rank,
                replicas,
                is_trained=is_trained,
            )
            for place, ((formats, is_trained, _), named) in enumerate(sets.items(), count)
        ]
        count += len(buckets)
        units.append(UnitSpec(number, plan.name, tuple(buckets)))
    placed = with_places(units, row)
    return placed if is_part else with_last(placed, _last_of(plans))


def _last_of(plans: Sequence[UnitPlan]) -> int:
    """Return the unit besides the root that has the last parameter of the model, where tied weights count, too."""
    numbers = {id(parameter): number for number, plan in enumerate(plans) for _, parameter in plan.parameters}
    names = [*plans[0].module.named_parameters(remove_duplicate=False)]
    return next((number for _, parameter in reversed(names) if (number := numbers.get(id(parameter)))), ROOT)
