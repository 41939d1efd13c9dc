"""The states of an optimizer, determined by steps of a new instance of its class on small parameters.

Owns these trials, one for each group with other options. It must not know shards: `updates.py` has the sizes of a
rank's slices.
"""

import copy
import inspect
import math
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import torch

from zeroshard.optim.attributes import Kinds, tried_attributes
from zeroshard.optim.packed import PackingOptimizer, parts_of, views_of
from zeroshard.optim.whole import Whole, whole_of
from zeroshard.table.bytes import Cost

__all__ = [
    "Kept",
    "SCALES",
    "StateShape",
    "TRIED_NUMEL",
    "is_taken",
    "kept_by",
    "options_of",
    "rebuild",
    "refuse_by_parameter",
    "whole_bytes",
]

Tensor = torch.Tensor
Options = Mapping[str, Any]
Tried = tuple[torch.optim.Optimizer, dict[str, Any]]
"""An optimizer after a trial, and the states of its parameter."""

NOT_OPTIONS = frozenset(["params", "param_names", "initial_lr"])
"""Keys of groups that are not options of the class."""


def is_taken(whole: Whole, group: Options, shape: Sequence[int]) -> bool:
    """Return whether an optimizer updates a parameter of a group as a whole tensor."""
    return bool(group.get("whole", True)) and whole.takes(tuple(shape))


COUNTERS = frozenset({"step", "mu_product", "mu", "eta"})
"""States of torch's optimizers that are one number for all elements, for optimizers that no trial step knows."""
SCALES = (1.0, 0.7, 2.0, 0.3, 1.0, 1.5, 0.5) * 2 + (10.0, 0.1)
"""The sizes of gradients, one for each step of a trial: norms, sums, warm-ups and states made later show."""
TRIED_NUMEL = 13
"""Elements of a parameter in a trial step: states of another number of elements do not grow with the parameter."""


def options_of(optimizer: torch.optim.Optimizer, group: Options) -> dict[str, Any]:
    """Return the options of a group for a trial or a trace without a device, where torch refuses `capturable=True`.

    Without it, foreach kernels take no tensors as numbers. The learning rate, in which groups often differ, is the
    default's.
    """
    options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
    if isinstance(rate := optimizer.defaults.get("lr"), (float, Tensor)):
        options["lr"] = rate if rate != 0 else 1e-3
    if options.get("capturable"):
        options = {key: _as_number(value) for key, value in options.items()} | {"capturable": False}
    return options


def _as_number(value: Any) -> Any:
    """Return an option with numbers in place of tensors of one element."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_number, value))
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


@torch.random.fork_rng(devices=[])  # user code draws the same numbers as without trials
def _tried(
    optimizer: torch.optim.Optimizer, options: Options, sizes: Sequence[int], like: Tensor | None, kinds: Kinds
) -> Tried | str:
    """Return a new optimizer after steps on a parameter, and the parameter's states, or what it failed with.

    Args:
        like: a parameter with the attributes of the tried one, if any.
        kinds: learn what is read of them.
    """
    part = kinds.tried(torch.ones(sizes, dtype=torch.float32, device="cpu"), tried_attributes(like, sizes))
    places = torch.arange(1.0, part.numel() + 1, dtype=torch.float32, device="cpu").view_as(part)
    try:
        fresh = rebuild(optimizer, [{**copy.deepcopy(dict(options)), "params": [part]}])
        for step, scale in enumerate(SCALES):
            part.grad = torch.sin(places * (step + 1)) * scale
            fresh.step()
    except Exception as error:  # a failed prediction must not fail the run: the caller reports that it has none
        return f"{type(error).__name__}: {error}"
    return fresh, fresh.state[part]


def _cost_of(fresh: torch.optim.Optimizer, state: Mapping[str, Any]) -> Cost:
    parts = parts_of(fresh, state)
    values = [value for key, value in state.items() if isinstance(value, Tensor) and key not in parts]
    of_elements = [value.dtype for value in values if value.numel() == TRIED_NUMEL]
    counter_bytes = sum(value.nbytes for value in values if value.numel() != TRIED_NUMEL)
    numbers = of_elements.count(torch.float32)  # in the dtype of masters, whatever that is
    other_bytes = sum(dtype.itemsize for dtype in of_elements if dtype != torch.float32)
    if not isinstance(fresh, PackingOptimizer):
        return Cost(numbers, counter_bytes, other_bytes)
    packed = fresh.packed_bytes
    return Cost(numbers, counter_bytes, packed.element_bytes + other_bytes, packed.block_bytes, packed.block_numel)


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
        mark: which parameters it updates whole.
        costs: of slices, by index of group; not of a group whose trial failed.
        shapes: of the states of what it updates whole, by index of group and by number of dimensions.
        states: of vectors of `TRIED_NUMEL` elements after the trials, of all groups.
        failure: what the first trial failed with that the size of some states needs; "" if none did.
    """

    mark: Whole | None
    costs: Mapping[int, Cost]
    shapes: Mapping[tuple[int, int], tuple[StateShape, ...]]
    states: Mapping[Any, Any]
    failure: str = ""

    @property
    def counters(self) -> frozenset[Any]:
        """Keys of tensors that are the same for all elements of a parameter."""
        tensors = {key: value for key, value in self.states.items() if isinstance(value, Tensor)}
        found = {key for key, value in tensors.items() if value.numel() % TRIED_NUMEL}
        return frozenset(found | (COUNTERS - self.states.keys()))

    @property
    def per_element(self) -> int:
        """How many states have a value for each element, in any group: each has an array of its own in a file."""
        return sum(isinstance(one, Tensor) and one.numel() == TRIED_NUMEL for one in self.states.values())


def kept_by(optimizer: torch.optim.Optimizer, known: Kept | None = None) -> Kept:
    """Return what an optimizer keeps; its groups, or the last one with `known`, hold the model's parameters.

    Args:
        known: what it kept before its last group was added.
    """
    whole, done = whole_of(optimizer), dict[tuple[str, tuple[int, ...], str], Tried | str]()
    known, groups = known or Kept(whole, {}, {}, {}), [*enumerate(optimizer.param_groups)][0 if known is None else -1 :]
    kinds = Kinds(p for _, group in groups for p in group["params"])
    costs, shapes, states, failures = known.costs, known.shapes, known.states, [known.failure]

    def tried(options: Options, sizes: tuple[int, ...], like: Tensor | None) -> Tried | str:
        told = repr(sorted(options.items()))
        if (found := done.get((told, sizes, kinds.of(like)))) is None:
            found = _tried(optimizer, options, sizes, like, kinds)
            done[told, sizes, kinds.of(like)] = found
        return found

    for place, group in groups:
        options = options_of(optimizer, group)
        taken = [p for p in group["params"] if whole is not None and is_taken(whole, group, p.shape)]
        for like in kinds.each(group["params"]) if group["params"] else [None]:
            if not isinstance(found := tried(options, (TRIED_NUMEL,), like), str):
                cost, states = _cost_of(*found), {**states, **views_of(*found)}
                costs = {**costs, place: max(cost, costs.get(place, cost))}
            elif len(taken) < len(group["params"]):
                failures.append(found)
        for ndim, like in sorted({p.ndim: p for p in reversed(taken) if p.ndim <= len(PRIMES)}.items()):
            if isinstance(found := tried(options, PRIMES[:ndim], like), str):
                failures.append(found)
                continue
            tensors = [value for value in found[1].values() if isinstance(value, Tensor)]
            shapes = {**shapes, (place, ndim): tuple(map(_state_shape, tensors))}
    return Kept(whole, costs, shapes, states, next(filter(None, failures), ""))


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


def refuse_by_parameter(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Raise if an optimizer keeps parameters, or their ids, in a collection of its own.

    Trials decide about lists of parameters that the constructor makes of its groups, and about nothing that it gets
    besides. A dict may have the names of parameters, as logs need them.

    Raises:
        ValueError: entries of a sharded optimizer are not in that collection.
    """
    for attribute, kept in vars(optimizer).items():
        if attribute == "state" or not isinstance(kept, (Mapping, Set, list, tuple)):
            continue
        for key in kept:
            name = names.get(key if isinstance(key, int) else id(key))
            value = kept[key] if isinstance(kept, Mapping) else name
            is_named = isinstance(kept, Mapping) and isinstance(value, str) and f".{value}".endswith(f".{name}")
            if name is None or is_named:
                continue
            if isinstance(kept, (list, tuple)) and isinstance(key, Tensor) and _is_made(optimizer, attribute):
                break
            what = f"has a {type(value).__name__} for" if isinstance(kept, Mapping) else "has"
            raise ValueError(
                f"{type(optimizer).__name__}.{attribute} {what} the parameter '{name}': zs.shard puts other entries "
                "into the groups, which are not in it. Keep what belongs to a parameter in self.state[p] or in an "
                "attribute of p, where zs.shard finds it, or in the options of a group."
            )


def _is_made(optimizer: torch.optim.Optimizer, attribute: str) -> bool:
    """Return whether the constructor puts the parameters of its groups into a list."""
    parameter = torch.nn.Parameter(torch.ones(6, 4, dtype=torch.float32, device="cpu"))
    with suppress(Exception):
        fresh = rebuild(optimizer, [{"params": [parameter]}])
        return any(one is parameter for one in getattr(fresh, attribute))
    return False
