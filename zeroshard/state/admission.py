"""Which optimizers may be cut into slices, or run one whole parameter after the other, and what they keep.

Owns the list of torch's element-wise optimizers and the trials of any other. Nothing here communicates.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import torch

from zeroshard.core.update import Resident, update_in_pieces
from zeroshard.optim.packed import PackingOptimizer, parts_of
from zeroshard.optim.whole import Whole

__all__ = ["ELEMENTWISE", "StateShape", "admit", "admit_whole", "refuse", "state_cost", "whole_costs"]

Tensor = torch.Tensor

ELEMENTWISE = frozenset(
    ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD"]
)
"""Classes of torch.optim whose update of an element depends on that element alone."""
SLICED = frozenset(["AdamW8bit", "Lamb", "Lion"])
"""Classes of zeroshard.optim that update slices: as they would any tensor, or with sums that ranks add up."""


STEPS = 3
NOT_OPTIONS = frozenset(["params", "param_names", "initial_lr"])
"""What groups hold besides the options that a class is built with."""
SIZES = ((6, 4, 2, 2), (3, 5, 2, 3))
"""The first dimensions of these are the shapes of whole parameters in a trial."""

Options = Mapping[str, Any]


def refuse(optimizer: torch.optim.Optimizer) -> None:
    """Raise where an optimizer cannot be sharded at any stage, whatever it makes of slices.

    Raises:
        ValueError: its step evaluates a closure, or takes sparse gradients alone.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(_evaluates(name))
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            f"{name} updates sparse gradients alone, and those of a sharded model are dense when they are summed. Use "
            "torch.optim.Adam, which works with nn.Embedding(sparse=True), too."
        )


def admit(
    optimizer: torch.optim.Optimizer,
    elementwise: bool | None,
    *,
    shape: tuple[int, ...] = (6, 4),
    options: Options | None = None,
) -> None:
    """Raise unless the optimizer's update may be cut into slices.

    Torch's own element-wise optimizers are known. Another is tried: three steps on a small matrix, whole and in slices,
    must agree bit for bit.

    Args:
        shape: of the matrix; its 24 elements may have one dimension as well.
        options: of the group in question.

    Raises:
        ValueError: the update is not element-wise, or cannot be tried.
    """
    cls = type(optimizer)
    known = ELEMENTWISE if cls.__module__.startswith("torch.optim") else SLICED
    is_ours = cls.__module__.startswith(("torch.optim", "zeroshard.optim"))
    if elementwise or (is_ours and cls.__name__ in known):
        return
    remedy = (
        "Use one of "
        + ", ".join(sorted(ELEMENTWISE))
        + ", keep it with stage=0, call zs.optim.whole_matrix(optimizer) before zs.shard() if its update of a "
        "parameter depends on that whole parameter and on no other, or pass settings=zs.Settings(elementwise=True) if "
        "its update of an element depends on that element alone."
    )
    if elementwise is False:
        raise ValueError(
            f"{cls.__name__} was declared not element-wise (Settings(elementwise=False)), so it cannot be sharded. "
            f"{remedy}"
        )
    if needed := _arguments(optimizer):
        raise ValueError(
            f"{cls.__name__} is not known to be element-wise, and cannot be tried on slices: it is built with "
            f"{', '.join(needed)}, which its groups do not have. {remedy}"
        )
    try:
        whole, parts = _probe(optimizer, shape, [24], options), _probe(optimizer, None, [7, 0, 12, 5], options)
    except Exception as error:
        if _needs_closure(optimizer):
            raise ValueError(_evaluates(cls.__name__)) from None
        raise ValueError(
            f"{cls.__name__} is not known to be element-wise, and trying it on slices failed with "
            f"{type(error).__name__}: {error}. {remedy}"
        ) from error
    if not torch.equal(whole, parts):
        count = int((whole != parts).sum())
        raise ValueError(
            f"{cls.__name__} is not element-wise: after three steps {count} of {whole.numel()} elements differ between "
            f"a whole matrix and slices of it, so sharding would change the training. {remedy}"
        )


def admit_whole(optimizer: torch.optim.Optimizer, whole: Whole, elementwise: bool | None, *, is_cut: bool) -> None:
    """Raise unless the optimizer may update one parameter after the other, and the rest of them in slices.

    Three steps on small parameters, all at once and one after the other, must agree bit for bit.

    Args:
        whole: which parameters it updates whole.
        is_cut: whether ranks update slices of the others.

    Raises:
        ValueError: the update of a parameter depends on others, or cannot be tried.
    """
    name, taken, left = type(optimizer).__name__, list[tuple[Options, int]](), list[tuple[Options, int]]()
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        for ndim, is_taken in sorted({(p.ndim, _is_taken(whole, group, p)) for p in group["params"]}):
            (taken if is_taken else left).append((options, min(ndim, len(SIZES[0]))))
    try:
        at_once, in_turn = (_update(optimizer, taken, is_in_turn=is_in_turn) for is_in_turn in (False, True))
    except Exception as error:
        if _needs_closure(optimizer):
            raise ValueError(_evaluates(name)) from None
        raise ValueError(
            f"{name} is to update whole parameters on their owners, and trying it on small ones, one after the other, "
            f"failed with {type(error).__name__}: {error}. Its step() must take no closure, run on any of its "
            "parameters alone, and do nothing where its groups are empty."
        ) from error
    if not torch.equal(at_once, in_turn):
        raise ValueError(
            f"{name} is to update whole parameters on their owners, but what it makes of one depends on others, or on "
            f"how often step() runs: after {STEPS} steps {int((at_once != in_turn).sum())} of {at_once.numel()} "
            "elements differ between all parameters at once and one after the other. Keep counters by parameter, in "
            "optimizer.state, and nothing that is common to several; else the optimizer cannot be sharded."
        )
    for chosen, ndim in left if is_cut else ():
        admit(optimizer, elementwise, shape=(6, 4) if ndim > 1 else (24,), options=chosen)


def _is_taken(whole: Whole, group: Options, parameter: Tensor) -> bool:
    return bool(group.get("whole", True)) and whole.takes(tuple(parameter.shape))


def _update(optimizer: torch.optim.Optimizer, kinds: Sequence[tuple[Options, int]], *, is_in_turn: bool) -> Tensor:
    """Run some steps of a fresh optimizer on two parameters of each kind; return their elements.

    Args:
        kinds: the options of a group, and the dimensions of parameters in it.
        is_in_turn: one parameter after the other.
    """
    if not kinds:
        return torch.empty(0)
    groups: list[dict[str, Any]] = []
    for chosen, ndim in kinds:
        shapes = [sizes[:ndim] for sizes in SIZES]
        made = [torch.nn.Parameter(torch.linspace(-1.0, 2.0, math.prod(one)).view(one)) for one in shapes]
        groups.append({**chosen, "params": made})
    parts: list[Tensor] = [part for group in groups for part in group["params"]]
    fresh = _rebuild(optimizer, groups)
    for step in range(STEPS):
        for place, part in enumerate(parts):
            part.grad = torch.sin(torch.arange(float(part.numel())) * (step + 1) + place).view_as(part)
        cuts = [[[p for p in group["params"] if p is part] for group in groups] for part in parts]
        put_back = update_in_pieces(fresh, [Resident(cut) for cut in cuts]) if is_in_turn else None
        fresh.step()
        if put_back is not None:
            put_back()
    return torch.cat([part.detach().flatten() for part in parts])


def _probe(
    optimizer: torch.optim.Optimizer,
    shape: tuple[int, ...] | None,
    numels: Sequence[int],
    options: Options | None = None,
) -> Tensor:
    """Run three steps of a fresh optimizer of the same class on 24 elements, cut into `numels`; return the elements."""
    values = torch.linspace(-1.0, 2.0, 24)
    parts = [
        torch.nn.Parameter((part.reshape(shape) if shape else part).clone()) for part in values.split(list(numels))
    ]
    fresh = _rebuild(optimizer, [{**(options or {}), "params": parts}])
    for step in range(STEPS):
        grads = torch.sin(torch.arange(24.0) * (step + 1)).split(list(numels))
        for part, grad in zip(parts, grads, strict=True):
            part.grad = grad.reshape(part.shape).clone()
        fresh.step()
    return torch.cat([part.detach().flatten() for part in parts])


def state_cost(optimizer: torch.optim.Optimizer) -> tuple[int, ...] | None:
    """Return what an optimizer keeps, found by a step, or None: the fields of `Updates` behind its parameters.

    These are state elements for each element and bytes of counters for each parameter, and, of states that lie packed,
    bytes for each element, bytes for each block and elements of a block.
    """
    part = torch.nn.Parameter(torch.zeros(3))
    try:
        fresh = _rebuild(optimizer, [part])
        part.grad = torch.ones(3)
        fresh.step()
    except Exception:  # a prediction is not worth an error: the caller says that it has none
        return None
    parts = parts_of(fresh, state := fresh.state[part])
    values = [value for key, value in state.items() if isinstance(value, Tensor) and key not in parts]
    numbers, counter_bytes = sum(v.numel() == 3 for v in values), sum(v.nbytes for v in values if v.numel() != 3)
    if not isinstance(fresh, PackingOptimizer):
        return numbers, counter_bytes
    packed = fresh.packed_bytes
    return numbers, counter_bytes, packed.element_bytes, packed.block_bytes, packed.block_numel


PRIMES = (3, 5, 7, 11, 13, 17)
"""Sizes of dimensions that are told apart in the shapes of states."""


@final
@dataclass(frozen=True)
class StateShape:
    """What a tensor that an optimizer keeps for a parameter depends on.

    Args:
        dims: dimensions of the parameter that it has, too.
        rest: its elements for each of theirs.
        itemsize: in bytes; 0 where it has the dtype of the masters.
        is_counter: whether it has no dimensions.
    """

    dims: tuple[int, ...]
    rest: int
    itemsize: int
    is_counter: bool

    def of(self, shape: tuple[int, ...]) -> tuple[int, int, bool]:
        """Return its elements for a shape, the bytes of each (0: as masters have), and whether it is a counter."""
        return self.rest * math.prod(shape[dim] for dim in self.dims), self.itemsize, self.is_counter


def whole_costs(optimizer: torch.optim.Optimizer, whole: Whole) -> dict[tuple[int, int], tuple[StateShape, ...]]:
    """Return what an optimizer keeps for parameters that it updates whole, by place of group and by dimensions.

    It is found by a step on parameters whose dimensions are prime numbers; nothing, where that fails.
    """
    found: dict[tuple[int, int], tuple[StateShape, ...]] = {}
    for place, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        for ndim in {p.ndim for p in group["params"] if _is_taken(whole, group, p) and p.ndim <= len(PRIMES)}:
            part = torch.nn.Parameter(torch.ones(PRIMES[:ndim]))
            part.grad = torch.ones_like(part)
            try:
                fresh = _rebuild(optimizer, [{**options, "params": [part]}])
                fresh.step()
            except Exception:  # a prediction is not worth an error
                continue
            tensors = [value for value in fresh.state[part].values() if isinstance(value, Tensor)]
            found[place, ndim] = tuple(map(_state_shape, tensors))
    return found


def _state_shape(value: Tensor) -> StateShape:
    dims = tuple(PRIMES.index(size) for size in value.shape if size in PRIMES)
    rest = value.numel() // math.prod(PRIMES[dim] for dim in dims)
    return StateShape(dims, rest, 0 if value.dtype == torch.float32 and value.ndim else value.itemsize, not value.ndim)


def _evaluates(name: str) -> str:
    return (
        f"{name}.step() evaluates a closure: forwards and backwards inside the update, which cannot run while shards "
        "change. Use an optimizer that updates from gradients alone, such as torch.optim.AdamW or SGD; one that "
        "evaluates again (LBFGS, SAM) trains a model that is not sharded."
    )


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a step on a matrix fails without a closure, and calls the one that it is given."""
    calls: list[int] = []
    parameter = torch.nn.Parameter(torch.ones(6, 4))
    parameter.grad = torch.ones(6, 4)

    def closure() -> float:
        calls.append(1)
        parameter.grad = torch.ones(6, 4)
        return 0.0

    with suppress(Exception):
        _rebuild(optimizer, [{"params": [parameter]}]).step()
        return False
    with suppress(Exception):  # whatever it needs besides
        _rebuild(optimizer, [{"params": [parameter]}]).step(closure)
    return bool(calls)


def _arguments(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return what an optimizer is built with besides parameters and options."""
    arguments = list(inspect.signature(type(optimizer).__init__).parameters.values())[2:]
    named = (p for p in arguments if p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD))
    return [p.name for p in named if p.default is inspect.Parameter.empty and p.name not in optimizer.defaults]


def _rebuild(optimizer: torch.optim.Optimizer, parts: list[Any]) -> torch.optim.Optimizer:
    """Return a new optimizer of the same class and hyper-parameters on other parameters, or groups of them."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    # Some classes put more into their defaults than their constructor takes (AdamW: decoupled_weight_decay).
    defaults = {key: value for key, value in optimizer.defaults.items() if takes_all or key in accepted}
    return type(optimizer)(parts, **defaults)
