"""The argument `optimizer=` of a module, and its entries in the model.

Owns the checks of an optimizer's entries, which plans and the engine share. It must not know updates or states:
`optim/admission.py` decides which optimizers can be sharded.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zeroshard.peers import ARGUMENTS

__all__ = ["Optimizers", "check_entries", "optimizers_of"]

Optimizers = Optimizer | Sequence[Optimizer] | None
"""Values of the argument `optimizer=` for a module."""


def optimizers_of(asked: object) -> list[Optimizer]:
    """Return the optimizers of an argument.

    Raises:
        TypeError: the argument is neither an optimizer nor a list of them.
    """
    several: Sequence[Any] = asked if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]
    given = [] if asked is None else list(several)
    for one in given:
        if not isinstance(one, Optimizer):
            hint = f" If these are settings of DeepSpeed: {ARGUMENTS['config']}." if isinstance(one, Mapping) else ""
            kind = type(one).__name__
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or a list of them; got {kind}.{hint}")
    return given


def check_entries(
    model: nn.Module, optimizers: Sequence[Optimizer], ignored: Mapping[int, str], *, is_final: bool
) -> dict[int, str]:
    """Return the names of a model's parameters, by identity, after a check of the optimizers' entries.

    Args:
        ignored: the names of ignored parameters, by identity.
        is_final: whether no other optimizer may follow, so that missing parameters are an error.

    Raises:
        ValueError: a parameter is ignored, not in the model, in two optimizers, or in none.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken: dict[int, str] = {}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if (key := id(parameter)) in ignored:
                    raise ValueError(
                        f"Parameter '{ignored[key]}' is ignored (ignored=), and in {kind}, which zeroshard would have "
                        "update shards. Give ignored parameters an optimizer of their own, and do not hand it over."
                    )
                if key not in names:
                    raise ValueError(
                        f"Parameter {place} of group {number} of {kind}, shape {tuple(parameter.shape)}, is not in the "
                        "model. Build the optimizer from model.parameters(), after all changes to the model; if it "
                        "updates several models, shard these as one: zs.shard(nn.ModuleList([a, b]), optimizer)."
                    )
                if key in taken:
                    raise ValueError(f"Parameter '{names[key]}' is in {taken[key]} and in {kind}; one must update it.")
                taken[key] = kind
    known = taken.keys() | ignored.keys()
    missed = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known]
    if is_final and missed:
        raise ValueError(
            f"{len(missed)} trainable parameter(s) are in no optimizer, '{missed[0]}' first: gradients would be "
            "reduced for nothing. Add them to a group, or freeze them with requires_grad_(False)."
        )
    return names
