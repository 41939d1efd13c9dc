"""Which optimizers may be cut into slices, or run one whole parameter after the other.

Owns the list of torch's element-wise optimizers and the trials of any other. Nothing here communicates.
`optim/keeps.py` tries what an optimizer keeps.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from zeroshard.core.update import Resident, update_in_pieces
from zeroshard.optim.keeps import NOT_OPTIONS, is_taken, rebuild
from zeroshard.optim.whole import Whole

__all__ = ["ELEMENTWISE", "admit", "admit_whole", "refuse"]

Tensor = torch.Tensor

ELEMENTWISE = frozenset(
    ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD"]
)
"""Classes of torch.optim whose update of an element depends on that element alone."""
SLICED = frozenset(["AdamW8bit", "Lamb", "Lion"])
"""Classes of zeroshard.optim that update slices: as they would any tensor, or with sums that ranks add up."""


STEPS = 3
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
        for ndim, is_whole in sorted({(p.ndim, is_taken(whole, group, p)) for p in group["params"]}):
            (taken if is_whole else left).append((options, min(ndim, len(SIZES[0]))))
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
    fresh = rebuild(optimizer, groups)
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
    fresh = rebuild(optimizer, [{**(options or {}), "params": parts}])
    for step in range(STEPS):
        grads = torch.sin(torch.arange(24.0) * (step + 1)).split(list(numels))
        for part, grad in zip(parts, grads, strict=True):
            part.grad = grad.reshape(part.shape).clone()
        fresh.step()
    return torch.cat([part.detach().flatten() for part in parts])


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
        rebuild(optimizer, [{"params": [parameter]}]).step()
        return False
    with suppress(Exception):  # whatever it needs besides
        rebuild(optimizer, [{"params": [parameter]}]).step(closure)
    return bool(calls)


def _arguments(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return what an optimizer is built with besides parameters and options."""
    arguments = list(inspect.signature(type(optimizer).__init__).parameters.values())[2:]
    named = (p for p in arguments if p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD))
    return [p.name for p in named if p.default is inspect.Parameter.empty and p.name not in optimizer.defaults]
