"""The states of an optimizer, determined by a step of a new instance of its class on small parameters.

Owns these trial steps. It must not know shards: `updates.py` has the sizes of a rank's slices.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from zeroshard.optim.packed import PackingOptimizer, parts_of, views_of
from zeroshard.optim.whole import Whole, whole_of

__all__ = [
    "Kept",
    "NOT_OPTIONS",
    "StateShape",
    "TRIED_NUMEL",
    "is_taken",
    "kept_by",
    "rebuild",
    "state_cost",
    "whole_bytes",
]

Tensor = torch.Tensor
Options = Mapping[str, Any]

NOT_OPTIONS = frozenset(["params", "param_names", "initial_lr"])
"""Keys of groups that are not options of the class."""


def is_taken(whole: Whole, group: Options, shape: Sequence[int]) -> bool:
    """Return whether an optimizer updates a parameter of a group as a whole tensor."""
    return bool(group.get("whole", True)) and whole.takes(tuple(shape))


COUNTERS = frozenset({"step", "mu_product", "mu", "eta"})
"""States of torch's optimizers that are one number for all elements, for optimizers that no trial step knows."""
TRIED_NUMEL = 13
"""Elements of a parameter in a trial step: states of another number of elements do not grow with the parameter."""


def state_cost(optimizer: torch.optim.Optimizer) -> tuple[int, ...] | None:
    """Return the cost of an optimizer's states, determined by a trial step, or None: the last fields of `Updates`.

    These are state elements per element and bytes of counters per parameter, and, for packed states, bytes per element,
    bytes per block and elements per block.
    """
    return None if (tried := _tried(optimizer)) is None else _cost_of(*tried)


def _tried(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, dict[str, Any]] | None:
    """Return a new optimizer after a step on a vector, and the vector's states."""
    part = torch.nn.Parameter(torch.zeros(TRIED_NUMEL, dtype=torch.float32, device="cpu"))
    try:
        fresh = rebuild(optimizer, [part])
        part.grad = torch.ones(TRIED_NUMEL, dtype=torch.float32, device="cpu")
        fresh.step()
    except Exception:  # a failed prediction must not fail the run: the caller reports that it has none
        return None
    return fresh, fresh.state[part]


def _cost_of(fresh: torch.optim.Optimizer, state: Mapping[str, Any]) -> tuple[int, ...]:
    parts = parts_of(fresh, state)
    values = [value for key, value in state.items() if isinstance(value, Tensor) and key not in parts]
    numbers = sum(value.numel() == TRIED_NUMEL for value in values)
    counter_bytes = sum(value.nbytes for value in values if value.numel() != TRIED_NUMEL)
    if not isinstance(fresh, PackingOptimizer):
        return numbers, counter_bytes
    packed = fresh.packed_bytes
    return numbers, counter_bytes, packed.element_bytes, packed.block_bytes, packed.block_numel


PRIMES = (3, 5, 7, 11, 13, 17)
"""Sizes that distinguish the dimensions in the shapes of states."""


@final
@dataclass(frozen=True)
class StateShape:
    """The dependence of a state's size on the shape of its parameter.

    Args:
        dims: dimensions that the state shares with the parameter.
        rest: elements of the state per element of these dimensions.
        itemsize: in bytes; 0 for the dtype of the masters.
        is_counter: whether the state is 0-d.
    """

    dims: tuple[int, ...]
    rest: int
    itemsize: int
    is_counter: bool

    def of(self, shape: tuple[int, ...]) -> tuple[int, int, bool]:
        """Return the elements for a shape, the bytes of each (0: those of masters), and whether it is a counter."""
        return self.rest * math.prod(shape[dim] for dim in self.dims), self.itemsize, self.is_counter


def whole_bytes(kept: Sequence[StateShape], shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Return the bytes of an optimizer's states for a parameter of a shape, as (of elements, of counters).

    A parameter without elements is never updated, and has none.

    Args:
        itemsize: bytes of an element in the dtype of the masters.
    """
    kept = kept if math.prod(shape) else ()
    found = [one.of(shape) for one in kept]
    stored = sum(numel * (each or itemsize) for numel, each, is_counter in found if not is_counter)
    return stored, sum(numel * (each or itemsize) for numel, each, is_counter in found if is_counter)


@final
@dataclass(frozen=True)
class Kept:
    """What an optimizer keeps, as trial steps determine it.

    Args:
        cost: of slices, as from `state_cost`.
        mark: which parameters it updates whole.
        shapes: of the states of these, by index of group and by number of dimensions.
        counters: keys of tensors that are the same for all elements of a parameter.
        states: of a vector of `TRIED_NUMEL` elements after a step.
    """

    cost: tuple[int, ...] | None
    mark: Whole | None
    shapes: Mapping[tuple[int, int], tuple[StateShape, ...]]
    counters: frozenset[Any] = COUNTERS
    states: Mapping[Any, Any] = field(default_factory=dict)


def kept_by(optimizer: torch.optim.Optimizer) -> Kept:
    """Return what an optimizer keeps; its groups hold the model's parameters."""
    whole, tried = whole_of(optimizer), _tried(optimizer)
    shapes = {} if whole is None else _whole_costs(optimizer, whole)
    if tried is None:
        return Kept(None, whole, shapes)
    state = views_of(*tried)
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    counters = {key for key, value in tensors.items() if value.numel() % TRIED_NUMEL} | (COUNTERS - state.keys())
    return Kept(_cost_of(*tried), whole, shapes, frozenset(counters), state)


def _whole_costs(optimizer: torch.optim.Optimizer, whole: Whole) -> dict[tuple[int, int], tuple[StateShape, ...]]:
    """Return the states of parameters that are updated whole; a step on prime dimensions determines them.

    Nothing where the step fails.
    """
    found: dict[tuple[int, int], tuple[StateShape, ...]] = {}
    for place, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        for ndim in {p.ndim for p in group["params"] if is_taken(whole, group, p.shape) and p.ndim <= len(PRIMES)}:
            part = torch.nn.Parameter(torch.ones(PRIMES[:ndim], dtype=torch.float32, device="cpu"))
            part.grad = torch.ones_like(part)
            try:
                fresh = rebuild(optimizer, [{**options, "params": [part]}])
                fresh.step()
            except Exception:  # a failed prediction must not fail the run
                continue
            tensors = [value for value in fresh.state[part].values() if isinstance(value, Tensor)]
            found[place, ndim] = tuple(map(_state_shape, tensors))
    return found


def _state_shape(value: Tensor) -> StateShape:
    dims = tuple(PRIMES.index(size) for size in value.shape if size in PRIMES)
    rest = value.numel() // math.prod(PRIMES[dim] for dim in dims)
    return StateShape(dims, rest, 0 if value.dtype == torch.float32 and value.ndim else value.itemsize, not value.ndim)


def rebuild(optimizer: torch.optim.Optimizer, parts: list[Any]) -> torch.optim.Optimizer:
    """Return a new optimizer of the same class and hyperparameters for other parameters, or groups of them."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    # The defaults of some classes have more keys than their constructor accepts (AdamW: decoupled_weight_decay).
    defaults = {key: value for key, value in optimizer.defaults.items() if takes_all or key in accepted}
    return type(optimizer)(parts, **defaults)
