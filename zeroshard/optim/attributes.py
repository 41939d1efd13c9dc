"""The attributes that code has set on parameters, such as a factor of the learning rate that an optimizer reads.

Owns which those are, and what a trial has of them. It must not know what stands for a parameter in an update.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["OWN", "attributes_of", "kind_of", "of_each_kind", "tried_attributes"]

Tensor = torch.Tensor

OWN = frozenset(["_replaced", "_zeroshard", "uncut"])
"""Names of the package on parameters and on what stands for them."""
MOST_KINDS = 8
"""Of parameters, which trials tell apart: names, as attributes, are different for each parameter."""


def attributes_of(parameter: Tensor) -> dict[str, Any]:
    """Return what code has set on a parameter, or on its slice."""
    return {name: value for name, value in vars(parameter).items() if name not in OWN}


def kind_of(parameter: Tensor | None) -> str:
    """Return a text that is equal for parameters whose attributes an optimizer treats alike."""
    given = {} if parameter is None else attributes_of(parameter)
    values = {key: v if isinstance(v, bool | int | float | str | None) else type(v) for key, v in given.items()}
    return repr(sorted(values.items()))


def of_each_kind(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the first parameter of each kind, of the first `MOST_KINDS` kinds."""
    found = dict[str, Tensor]()
    for parameter in parameters:
        found.setdefault(kind_of(parameter), parameter)
    return [*found.values()][:MOST_KINDS]


def tried_attributes(parameter: Tensor | None, shape: Sequence[int]) -> dict[str, Any]:
    """Return copies of a parameter's attributes for a trial; those of its shape are ones of another shape.

    Args:
        parameter: the model's; None for no attributes.
        shape: of the parameter in the trial.
    """
    found = dict[str, Any]()
    for name, value in ({} if parameter is None else attributes_of(parameter)).items():
        if isinstance(value, Tensor):
            is_alike = value.ndim > 0 and value.shape == getattr(parameter, "shape", None)
            found[name] = torch.ones(tuple(shape), dtype=value.dtype) if is_alike else value.detach().cpu().clone()
        else:
            found[name] = copy.copy(value) if isinstance(value, dict | list | set) else value
    return found
