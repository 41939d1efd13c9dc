"""Optimizers that need whole tensors, and the cost of their updates.

Owns the mark of such an optimizer, and the two classes of torch.optim that need it. It must not know shards or ranks:
the engine reads the mark, sends the full gradient and parameter to an owner, and runs the optimizer there.

Note: what the mark says
    One owner updates a parameter as a whole if the optimizer is marked, its group does not contain `"whole": False`,
    and `takes(shape)` is true. All other parameters are updated on slices: there the optimizer's update of an element
    must depend only on that element. The key of the group is needed if the shape does not decide: an embedding is a
    matrix, and Muon leaves it to AdamW.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, final

import torch

from zeroshard.table.owners import newton_schulz_cost

__all__ = ["ATTRIBUTE", "SHAPED", "Whole", "is_matrix", "whole_matrix", "whole_of"]

Shape = tuple[int, ...]
Optimized = TypeVar("Optimized", bound=torch.optim.Optimizer)

ATTRIBUTE = "_zeroshard_whole"


@final
@dataclass(frozen=True)
class Whole:
    """The needs of an optimizer in the exchange.

    Attributes:
        takes: whether the update of a parameter of this shape needs the whole tensor.
        cost: relative time of an update, used to balance owners.
    """

    takes: Callable[[Shape], bool]
    cost: Callable[[Shape], float]


def whole_matrix(
    optimizer: Optimized,
    *,
    takes: Callable[[Shape], bool] | None = None,
    cost: Callable[[Shape], float] | None = None,
) -> Optimized:
    """Mark an optimizer that needs whole tensors; call it before `zs.shard()`.

    Groups with `"whole": False` are excluded: their parameters are updated on slices. torch copies and pickles
    optimizers without the mark, so mark a copy again.

    Args:
        optimizer: any optimizer whose update of a parameter depends only on that parameter.
        takes: whether a parameter of a shape needs the whole tensor; by default all do.
        cost: relative time of an update by shape, used to balance owners; by default the number of elements.

    Returns:
        The same optimizer.

    Raises:
        TypeError: the argument is not an optimizer, or `takes` or `cost` is not callable.

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
    """Return the mark of an optimizer, or the mark of its known class; None if slices suffice."""
    mark = getattr(optimizer, ATTRIBUTE, None)
    if isinstance(mark, Whole):
        return mark
    return next((whole for cls, whole in KNOWN if isinstance(optimizer, cls)), None)


def is_matrix(shape: Shape) -> bool:
    """Return whether a shape has exactly two dimensions."""
    return len(shape) == 2


def _is_any(shape: Shape) -> bool:
    return True


def _numel(shape: Shape) -> float:
    return float(math.prod(shape))


SHAPED = Whole(_is_any, _numel)
"""The mark that `zs.shard` gives an optimizer of which little is known, where every rank updates whole parameters."""
KNOWN: tuple[tuple[type[torch.optim.Optimizer], Whole], ...] = (
    (torch.optim.Muon, Whole(is_matrix, newton_schulz_cost)),
    # The norms of a parameter and of its update cover the whole tensor, so vectors also need it.
    (torch.optim.Adafactor, Whole(_is_any, _numel)),
)
