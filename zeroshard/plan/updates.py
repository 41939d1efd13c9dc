"""The updates and states of a module's optimizers: by name as for a shape, or determined from the optimizers.

Owns the choice of the optimizers of a plan. It must not know traces or steps. `optim/updates.py` determines what an
optimizer keeps.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from zeroshard.describe.ignored import ignored_of
from zeroshard.describe.optimizers import check_entries, optimizers_of
from zeroshard.optim import Adafactor, Muon, muon_groups
from zeroshard.optim.keeps import Kept
from zeroshard.optim.packed import PackingOptimizer
from zeroshard.optim.updates import Entry, updates_of_optimizer
from zeroshard.plan.job import Options
from zeroshard.plan.named import OPTIMIZERS, Passing, States, updates_of
from zeroshard.plan.trace.passing import passing_of
from zeroshard.table.bytes import Updates
from zeroshard.table.spec import UnitSpec

__all__ = ["name_of", "optimizers_for", "passing_for", "updates_for"]

Optimizer = torch.optim.Optimizer
OURS: Final = ("torch.optim", "zeroshard.optim")


def optimizers_for(asked: Any, model: nn.Module, ignored: Sequence[object] = ()) -> tuple[Optimizer, ...]:
    """Return the optimizers of a plan of a module; for a name, only if some matrices are updated as a whole.

    Args:
        asked: a name in `OPTIMIZERS`, an optimizer of the model's parameters, or a sequence of optimizers.
        ignored: as in `zs.shard`.

    Raises:
        TypeError: the argument is none of these.
        ValueError: a parameter is not in the model, is in two optimizers, or is in none.
    """
    if isinstance(asked, str):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained or OPTIMIZERS[asked].whole is None:
            return ()
        return (Muon(muon_groups(model)),) if asked == "muon" else (Adafactor(trained),)
    given = optimizers_of(asked)
    check_entries(model, given, ignored_of(model, ignored), is_final=True)
    return tuple(given)


def name_of(optimizers: Sequence[Optimizer]) -> str:
    """Return the class names of optimizers, joined by "+"; torch's and zeroshard's classes by their names in plans."""
    kinds = [type(one) for one in optimizers]
    return "+".join(
        one.__name__.lower() if one.__module__.startswith(OURS) else f"{one.__module__}.{one.__name__}" for one in kinds
    )


def passing_for(options: Options) -> list[Passing]:
    """Return what the step of each optimizer has beside its states."""
    if not options.optimizers:
        return [options.states.passing]
    found = []
    for one in options.optimizers:
        known = OPTIMIZERS.get(name_of([one]), States(0, 0))
        is_known = isinstance(one, PackingOptimizer)
        found.append(known.passing if is_known else passing_of(one, known, is_cpu=options.device.is_cpu))
    return found


def updates_for(
    units: Sequence[UnitSpec], options: Options, names: Mapping[int, str], landed: Collection[str], kept: Sequence[Kept]
) -> list[Updates]:
    """Return the states and updates of the optimizers.

    Args:
        names: names of the parameters of `options.optimizers`, by identity.
        landed: names of the parameters with gradients.
        kept: what each of `options.optimizers` keeps.

    Raises:
        ValueError: the states of an optimizer cannot be determined by a trial.
    """
    places = {name: (b, index) for unit in units for b in unit.buckets for index, name in enumerate(b.names)}
    unused = frozenset((b.number, index) for name, (b, index) in places.items() if name not in landed)
    if not options.optimizers:
        return [replace(updates_of(units, OPTIMIZERS[options.optimizer]), unused=unused)]

    def entry_of(parameter: nn.Parameter) -> Entry | None:
        place = places.get(names[id(parameter)])
        return None if place is None else (*place, tuple(parameter.shape), -1)

    updates = list[Updates]()
    for one, its in zip(options.optimizers, kept, strict=True):
        made = updates_of_optimizer(one, entry_of, kept=its)
        updates.append(replace(made, unused=unused, is_made=bool(one.state)))
        if its.failure and updates[-1].buckets:
            raise ValueError(
                f"optimizer=: the states of {type(one).__name__} cannot be determined: a trial on small "
                f"parameters failed with {its.failure}. Give the name of an optimizer with equal states, such as "
                "'adamw'."
            )
    return updates
