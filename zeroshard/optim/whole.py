"""Which optimizers need whole tensors, and what an update of one costs.

Owns the mark that an optimizer carries and the two classes of torch.optim that need it. It must not know shards or
ranks: the engine reads the mark, has an owner get the whole gradient and parameter, and runs the optimizer there.

Note: what the mark says
    A parameter is updated whole, on one owner, if the optimizer is marked, its group does not say `"whole": False`, and
    `takes(shape)` is true of its shape. Every other parameter is updated on slices: there the optimizer's update of an
    element must depend on that element alone. The key of the group is needed where a shape does not tell: an embedding
    is a matrix, and Muon leaves it to AdamW.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, final

import torch

from zeroshard.table.owners import newton_schulz_cost

__all__ = ["Whole", "is_matrix", "whole_matrix", "whole_of"]

Shape = tuple[int, ...]
Optimized = TypeVar("Optimized", bound=torch.optim.Optimizer)

ATTRIBUTE = "_zeroshard_whole"


@final
@dataclass(frozen=True)
class Whole:
    """What an optimizer needs of the exchange.

    Attributes:
        takes: whether a parameter of this shape must be whole for its update.
        cost: relative time of its update, by which owners are balanced.
    """

    takes: Callable[[Shape], bool]
    cost: Callable[[Shape], float]


def whole_matrix(
    optimizer: Optimized,
    *,
    takes: Callable[[Shape], bool] | None = None,
    cost: Callable[[Shape], float] | None = None,
) -> Optimized:
    """Mark an optimizer as one that needs whole tensors; call it before `zs.shard()`.

    A group with `"whole": False` is left out: its parameters are updated on slices. torch copies and pickles optimizers
    without the mark; mark a copy anew.

    Args:
        optimizer: any optimizer whose update of a parameter depends on nothing but that parameter.
        takes: whether a parameter of a shape must be whole; all are, where nothing is said.
        cost: relative time of an update by shape, by which owners are balanced; the number of elements by default.

    Returns:
        The same optimizer.

    Raises:
        TypeError: the argument is not an optimizer, or `takes` or `cost` cannot be called.

    ```python
    import torch
    import zeroshard as zs

    model = torch.nn.Linear(8, 8)
    optimizer = zs.optim.whole_matrix(torch.optim.Adam(model.parameters()), takes=lambda shape: len(shape) == 2)
    ```
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"whole_matrix takes an optimizer; got {type(optimizer).__name__}.")
    for name, value in (("takes", takes), ("cost", cost)):
        if value is not None and not callable(value):
            raise TypeError(f"{name} must be a function of a shape, or None; got {value!r}.")
    optimizer.__dict__[ATTRIBUTE] = Whole(takes or _is_any, cost or _numel)
    return optimizer


def whole_of(optimizer: torch.optim.Optimizer) -> Whole | None:
    """Return the mark of an optimizer, or what is known of its class; None where slices are enough."""
    mark = getattr(optimizer, ATTRIBUTE, None)
    if isinstance(mark, Whole):
        return mark
    return next((whole for cls, whole in KNOWN if isinstance(optimizer, cls)), None)


def is_matrix(shape: Shape) -> bool:
    """Tell whether a shape has exactly two dimensions."""
    return len(shape) == 2


def _is_any(shape: Shape) -> bool:
    return True


def _numel(shape: Shape) -> float:
    return float(math.prod(shape))


KNOWN: tuple[tuple[type[torch.optim.Optimizer], Whole], ...] = (
    (torch.optim.Muon, Whole(is_matrix, newton_schulz_cost)),
    # Its norms of a parameter and of an update are of the whole tensor, so that vectors are taken, too.
    (torch.optim.Adafactor, Whole(_is_any, _numel)),
)
