"""The check whether an optimizer can update slices or single parameters.

Owns the list of torch's element-wise optimizers and the trials of other optimizers. Nothing here communicates.
`keeps.py` measures the states of an optimizer.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from types import MappingProxyType
from typing import Any

import torch

from zeroshard.optim.keeps import NOT_OPTIONS, is_taken, rebuild
from zeroshard.optim.packed import PackingOptimizer
from zeroshard.optim.pieces import Resident, update_in_pieces
from zeroshard.optim.sums import SummingOptimizer
from zeroshard.optim.whole import Whole, whole_of
from zeroshard.table.whole import ELEMENTWISE
from zeroshard.torch_private import has_split

__all__ = ["check_optimizers", "is_elementwise", "needs_shapes"]

Tensor = torch.Tensor

SLICED = frozenset(["AdamW8bit", "Lamb", "Lion"])
"""Classes of zeroshard.optim that update slices, element-wise or with sums over ranks."""


STEPS = 3
SIZES = ((6, 4, 2, 2), (3, 5, 2, 3))
"""The shapes of parameters in a trial are the first dimensions of these."""
PLAIN: Mapping[str, Any] = MappingProxyType({"dtype": torch.float32, "device": "cpu"})
"""Of tensors of trials, whatever torch's defaults are."""

Options = Mapping[str, Any]


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to update each element by itself, whenever it is asked."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE


def needs_shapes(optimizer: torch.optim.Optimizer, *, is_cut: bool) -> bool:
    """Return whether an update must see the parameters' shapes, as in plain training, since little is known of it.

    Args:
        is_cut: whether ranks update slices.
    """
    is_known = is_elementwise(optimizer) or isinstance(optimizer, (PackingOptimizer, SummingOptimizer))
    types = {type(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return not (is_cut or is_known or has_split(types) or whole_of(optimizer) is not None)


def check_optimizers(
    names: Mapping[int, str], optimizers: Sequence[torch.optim.Optimizer], elementwise: bool | None, *, is_cut: bool
) -> None:
    """Raise if an update cannot be sharded.

    Args:
        names: the names of the model's parameters, by identity, from `check_entries`.
        elementwise: as in `zs.Settings`.
        is_cut: whether ranks update slices.

    Raises:
        ValueError: an optimizer cannot be sharded; the text says why.
    """
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        _refuse(optimizer)
        if (whole := whole_of(optimizer)) is None:
            if is_cut:
                _admit(optimizer, elementwise)
            continue
        _admit_whole(optimizer, whole, elementwise, is_cut=is_cut)
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if not 0 <= (cost := whole.cost(tuple(parameter.shape))) < math.inf:
                raise ValueError(
                    f"The cost of '{names[id(parameter)]}' {tuple(parameter.shape)} in {kind} must be a number from 0 "
                    f"on; got {cost!r}."
                )
            if has_split([type(parameter)]):
                raise ValueError(
                    f"{kind} needs whole matrices, and '{names[id(parameter)]}' is split over the axis 'tensor'. "
                    "Use an element-wise optimizer, such as AdamW, with tensor parallelism, or no axis 'tensor'."
                )


def _refuse(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer cannot be sharded at any stage.

    Raises:
        ValueError: it wraps another one, its step evaluates a closure, it supports only sparse gradients, it runs under
            autograd, or it changes parameters between steps.
    """
    name = type(optimizer).__name__
    if any(one.__module__.startswith("accelerate.") for one in type(optimizer).__mro__):
        raise ValueError(f"{name} wraps an optimizer: give zeroshard the optimizer before accelerator.prepare().")
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        raise ValueError(
            f"{name} wraps an optimizer without the constructor of torch.optim.Optimizer, so its steps run no hooks. "
            "Give zeroshard an optimizer that is not wrapped, or whose constructor calls super().__init__(params, defaults)."
        ) from None
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    is_needed = closure is not None and closure.default is inspect.Parameter.empty
    # SAM changes parameters in `first_step`, for the backward before its `second_step`.
    is_needed |= hasattr(type(optimizer), "first_step")
    if is_needed or (not is_elementwise(optimizer) and _needs_closure(optimizer)):
        raise ValueError(_evaluates(name))
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            f"{name} supports only sparse gradients, but the gradients of a sharded model are dense after their "
            "reduction. Use torch.optim.Adam, which works with nn.Embedding(sparse=True), too."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        # Each rank would find out at its own step, some of them in the background, while the others wait.
        raise ValueError(
            f"differentiable=True of {name}: its step runs under autograd, where torch refuses to change parameters, "
            "which are leaves. Leave differentiable=True out."
        )
    if _swaps(optimizer):
        raise ValueError(
            f"{name}.eval() and .train() change parameters between steps (a schedule-free optimizer), and the forward "
            "of a sharded model does not see changes outside step(). Use an optimizer with a schedule, and "
            "torch.optim.swa_utils.AveragedModel, updated in `with zero.gathered():`, for averages."
        )


def _swaps(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has two sets of parameters."""
    return callable(getattr(type(optimizer), "eval", None))


def _admit(
    optimizer: torch.optim.Optimizer,
    elementwise: bool | None,
    *,
    shape: tuple[int, ...] = (6, 4),
    options: Options | None = None,
) -> None:
    """Raise unless the optimizer can update slices.

    Torch's own element-wise optimizers are known. For other optimizers, three steps on a small matrix, full and in
    slices, must agree bit for bit.

    Args:
        shape: shape of the matrix, or of its 24 elements as a vector.
        options: options of the group.

    Raises:
        ValueError: the update is not element-wise, or the trial failed.
    """
    cls = type(optimizer)
    is_sliced = cls.__module__.startswith("zeroshard.optim") and cls.__name__ in SLICED
    if elementwise or is_elementwise(optimizer) or is_sliced:
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
            f"{cls.__name__} is not known to be element-wise, and cannot be tried on slices: its constructor needs "
            f"{', '.join(needed)}, which its groups do not have. {remedy}"
        )
    try:
        whole, parts = _probe(optimizer, shape, [24], options), _probe(optimizer, None, [7, 0, 12, 5], options)
    except Exception as error:
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


def _admit_whole(optimizer: torch.optim.Optimizer, whole: Whole, elementwise: bool | None, *, is_cut: bool) -> None:
    """Raise unless the optimizer can update parameters one at a time, and the others in slices.

    Three steps on small parameters, all at once and one at a time, must agree bit for bit.

    Args:
        whole: the parameters that it updates as a whole.
        is_cut: whether ranks update slices of the others.

    Raises:
        ValueError: the update of a parameter depends on others, or the trial failed.
    """
    name, taken, left = type(optimizer).__name__, list[tuple[Options, int]](), list[tuple[Options, int]]()
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        for ndim, is_whole in sorted({(p.ndim, is_taken(whole, group, p.shape)) for p in group["params"]}):
            (taken if is_whole else left).append((options, min(ndim, len(SIZES[0]))))
    try:
        at_once, in_turn = (_update(optimizer, taken, is_in_turn=is_in_turn) for is_in_turn in (False, True))
    except Exception as error:
        raise ValueError(
            f"{name} updates whole parameters on their owners, but a trial on small parameters, one at a time, failed "
            f"with {type(error).__name__}: {error}. Its step() must run without a closure, "
            "on any single parameter, and do nothing for empty groups."
        ) from error
    if not torch.equal(at_once, in_turn):
        raise ValueError(
            f"{name} updates whole parameters on their owners, but the update of a parameter depends on others, or on "
            f"the number of calls of step(): after {STEPS} steps {int((at_once != in_turn).sum())} of "
            f"{at_once.numel()} elements differ between all parameters at once and one at a time. Keep all counters "
            "per parameter, in optimizer.state; otherwise the optimizer cannot be sharded."
        )
    for chosen, ndim in left if is_cut else ():
        _admit(optimizer, elementwise, shape=(6, 4) if ndim > 1 else (24,), options=chosen)


def _update(optimizer: torch.optim.Optimizer, kinds: Sequence[tuple[Options, int]], *, is_in_turn: bool) -> Tensor:
    """Run some steps of a new optimizer on two parameters of each kind; return their elements.

    Args:
        kinds: (options of a group, number of dimensions of its parameters).
        is_in_turn: update one parameter at a time.
    """
    if not kinds:
        return torch.empty(0, **PLAIN)
    groups: list[dict[str, Any]] = []
    for chosen, ndim in kinds:
        shapes = [sizes[:ndim] for sizes in SIZES]
        made = [torch.nn.Parameter(torch.linspace(-1.0, 2.0, math.prod(one), **PLAIN).view(one)) for one in shapes]
        groups.append({**chosen, "params": made})
    parts: list[Tensor] = [part for group in groups for part in group["params"]]
    fresh = rebuild(optimizer, groups)
    for step in range(STEPS):
        for place, part in enumerate(parts):
            part.grad = torch.sin(torch.arange(float(part.numel()), **PLAIN) * (step + 1) + place).view_as(part)
        cuts = [[[p for p in group["params"] if p is part] for group in groups] for part in parts]
        put_back = update_in_pieces(fresh, nullcontext([Resident(cut) for cut in cuts])) if is_in_turn else None
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
    """Run three steps of a new optimizer of the same class on 24 elements, split into `numels`; return the elements."""
    values = torch.linspace(-1.0, 2.0, 24, **PLAIN)
    parts = [
        torch.nn.Parameter((part.reshape(shape) if shape else part).clone()) for part in values.split(list(numels))
    ]
    fresh = rebuild(optimizer, [{**(options or {}), "params": parts}])
    for step in range(STEPS):
        grads = torch.sin(torch.arange(24.0, **PLAIN) * (step + 1)).split(list(numels))
        for part, grad in zip(parts, grads, strict=True):
            part.grad = grad.reshape(part.shape).clone()
        fresh.step()
    return torch.cat([part.detach().flatten() for part in parts])


def _evaluates(name: str) -> str:
    return (
        f"{name}.step() evaluates a closure: forwards and backwards inside the update, which cannot run while shards "
        "change. Use an optimizer that needs only gradients, such as torch.optim.AdamW or SGD; optimizers that "
        "evaluate the loss again (LBFGS, SAM) cannot be sharded."
    )


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step on a matrix fails without a closure, and succeeds with one, which it calls."""
    calls: list[int] = []
    parameter = torch.nn.Parameter(torch.ones(6, 4, **PLAIN))
    parameter.grad = torch.ones(6, 4, **PLAIN)

    def closure() -> float:
        calls.append(1)
        parameter.grad = torch.ones(6, 4, **PLAIN)
        return 0.0

    with suppress(Exception):
        rebuild(optimizer, [{"params": [parameter]}]).step()
        return False
    with suppress(Exception):
        rebuild(optimizer, [{"params": [parameter]}]).step(closure)
        return bool(calls)
    return False


def _arguments(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the constructor arguments of an optimizer besides parameters and options."""
    arguments = list(inspect.signature(type(optimizer).__init__).parameters.values())[2:]
    named = (p for p in arguments if p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD))
    return [p.name for p in named if p.default is inspect.Parameter.empty and p.name not in optimizer.defaults]
