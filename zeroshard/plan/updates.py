"""What the optimizers of a module update and keep: by name as a shape's, or found from the optimizers themselves.

Owns the way from an optimizer's groups to `table/bytes.py`. Must not know traces nor steps. Read `owners.py` first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from zeroshard.describe.ignored import ignored_of
from zeroshard.optim import Adafactor, Muon, muon_groups
from zeroshard.optim.keeps import is_taken, state_cost, whole_bytes, whole_costs
from zeroshard.optim.whole import Whole, whole_of
from zeroshard.plan.job import Options
from zeroshard.plan.owners import KINDS, Matrix, Turn, own, turns_of
from zeroshard.plan.specs import OPTIMIZERS, updates_of
from zeroshard.table.bytes import Updates
from zeroshard.table.owners import newton_schulz_cost
from zeroshard.table.spec import BucketSpec, UnitSpec, itemsize

__all__ = ["name_of", "optimizers_of", "updates_and_turns"]

Optimizer = torch.optim.Optimizer
OURS: Final = ("torch.optim", "zeroshard.optim")


def optimizers_of(asked: Any, model: nn.Module, ignored: Sequence[object] = ()) -> tuple[Optimizer, ...]:
    """Return the optimizers that a plan of a module is asked with; those of a name only where some matrices are whole.

    Args:
        asked: a name in `OPTIMIZERS`, an optimizer of the model's parameters, or a sequence of them.
        ignored: as `zs.shard` takes them.

    Raises:
        TypeError: something else.
        ValueError: a parameter that is not in the model, that two optimizers have, or that none has.
    """
    if isinstance(asked, str):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained or asked not in OPTIMIZERS or OPTIMIZERS[asked].whole is None:
            return ()
        return (Muon(muon_groups(model)),) if asked == "muon" else (Adafactor(trained),)
    given = tuple(asked) if isinstance(asked, Sequence) else (asked,)
    left, seen = ignored_of(model, ignored, is_planned=True), set[int]()
    names = {id(parameter): name for name, parameter in model.named_parameters() if id(parameter) not in left}
    for one in given:
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"optimizer= takes a name, one of {', '.join(OPTIMIZERS)}, or torch.optim optimizers of the module; "
                f"got {type(one).__name__}."
            )
        for parameter in (parameter for group in one.param_groups for parameter in group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"optimizer=: {type(one).__name__} has a parameter of shape {tuple(parameter.shape)} that is not "
                    "in the module, or ignored. Build the optimizer from the module that plan() is given."
                )
            if id(parameter) in seen:
                raise ValueError(f"optimizer=: '{names[id(parameter)]}' has two entries; one must update it.")
            seen.add(id(parameter))
    if missed := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in seen | left.keys()]:
        raise ValueError(
            f"optimizer=: {len(missed)} trainable parameter(s) are in no optimizer, '{missed[0]}' first. Add them to a "
            "group, or freeze them with requires_grad_(False)."
        )
    return given


def name_of(optimizers: Sequence[Optimizer]) -> str:
    """Return the names of the classes of optimizers, joined by "+"; those of torch and zeroshard as plans know them."""
    kinds = [type(one) for one in optimizers]
    return "+".join(
        one.__name__.lower() if one.__module__.startswith(OURS) else f"{one.__module__}.{one.__name__}" for one in kinds
    )


def updates_and_turns(
    units: Sequence[UnitSpec], options: Options, names: Mapping[int, str]
) -> tuple[list[Updates], list[list[Turn]]]:
    """Return what the optimizers update and keep, and of each how it updates what is whole.

    Args:
        names: of the parameters of `options.optimizers`, by identity.

    Raises:
        ValueError: what an optimizer keeps cannot be tried.
    """
    if not options.optimizers:
        return [updates_of(units, OPTIMIZERS[options.optimizer])], []
    places = {name: (b, index) for unit in units for b in unit.buckets for index, name in enumerate(b.names)}
    updates, turns = list[Updates](), list[list[Turn]]()
    for one in options.optimizers:
        sliced, matrices = _entries(one, places, names)
        owned = own(matrices, options.shard_ranks)
        if (cost := state_cost(one)) is None and sliced:
            raise ValueError(
                f"optimizer=: what {type(one).__name__} keeps cannot be found by a step of another one, which its "
                "arguments are not enough for. Give the name of an optimizer that keeps as much, such as 'adamw'."
            )
        updates.append(Updates(sliced, *(cost or (0, 0)), whole=owned))
        turns.append(turns_of(matrices, owned, options.device))
    return updates, turns


def _entries(
    optimizer: Optimizer, places: Mapping[str, tuple[BucketSpec, int]], names: Mapping[int, str]
) -> tuple[list[tuple[BucketSpec, int]], list[Matrix]]:
    """Return what an optimizer updates on slices, and what it updates whole, in the order of its groups."""
    whole, sliced, matrices = whole_of(optimizer), list[tuple[BucketSpec, int]](), list[Matrix]()
    kept = {} if whole is None else whole_costs(optimizer, whole)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            place = places.get(names[id(parameter)])
            if place is None:
                continue
            if whole is None or not is_taken(whole, group, parameter):
                sliced.append(place)
                continue
            bucket, shape = place[0], tuple(parameter.shape)
            nbytes = whole_bytes(kept.get((number, len(shape)), ()), shape, itemsize(bucket.formats.state))
            matrices.append(Matrix(*place, shape, float(whole.cost(shape)), *nbytes, _kind_of(optimizer, whole)))
    return sliced, matrices


def _kind_of(optimizer: Optimizer, whole: Whole) -> str:
    """Return how an optimizer updates what is whole: a key of `KINDS`."""
    kind = "adafactor" if isinstance(optimizer, torch.optim.Adafactor) else "other"
    kind = "newton-schulz" if whole.cost is newton_schulz_cost else kind
    assert kind in KINDS
    return kind
