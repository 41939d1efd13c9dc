"""The check whether an optimizer can update slices or single parameters.

Owns the list of torch's element-wise optimizers and the trials of other optimizers. Nothing here communicates.
`keeps.py` measures the states of an optimizer.
"""

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import pairwise
from numbers import Number
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch

from zeroshard.optim.attributes import Kinds, attributes_of, tried_attributes
from zeroshard.optim.keeps import SCALES, is_taken, options_of, rebuild, refuse_by_parameter
from zeroshard.optim.packed import PackingOptimizer
from zeroshard.optim.pieces import Resident, update_in_pieces
from zeroshard.optim.sums import SummingOptimizer
from zeroshard.optim.whole import SHAPED, whole_of
from zeroshard.table.whole import ELEMENTWISE
from zeroshard.torch_private import has_split

__all__ = ["admit_groups", "check_optimizers", "is_elementwise", "needs_shapes"]

Tensor = torch.Tensor

SLICED = frozenset(["AdamW8bit", "Lamb", "Lion"])
"""Classes of zeroshard.optim that update slices, element-wise or with sums over ranks."""


STEPS = 3
SIZES = ((6, 4, 2, 2), (3, 5, 2, 3))
"""The shapes of parameters in a trial of whole parameters are the first dimensions of these."""
TOGETHER = 50
"""Kinds of parameters in a trial of whole parameters, which takes time by the square of their number."""
TRIALS = (
    (((24,), (0, 16, 16, 24)), ((160,), (0, 64, 64, 160))),
    (((6, 4), (0, 16, 16, 24)), ((160, 136), (0, 1024, 1024, 2048))),
    (((6, 4, 2), (0, 16, 16, 24)), ((160, 136, 2), (0, 1024, 1024, 2048))),
    (((6, 4, 2, 2), (0, 16, 16, 24)), ((160, 136, 2, 1), (0, 1024, 1024, 2048))),
    (((6, 4, 2, 2, 2), (0, 16, 16, 24)), ((160, 136, 2, 1, 1), (0, 1024, 1024, 2048))),
)
"""Of one to five dimensions, a small and a large parameter, which some optimizers factor, project or block: the
shape, and the ends of slices, one of them empty; like those of ranks, they begin at multiples of 64 bytes."""
MOST_NUMBERS = 7
"""Elements of a tensor in a group that is compared: each slice of a trial has more, or none."""
HOOKS = ("step_pre", "step_post", "state_dict_pre", "load_state_dict_pre", "load_state_dict_post")
"""What `update/` registers."""
PLAIN: Mapping[str, Any] = MappingProxyType({"dtype": torch.float32, "device": "cpu"})
"""Of tensors of trials, whatever torch's defaults are."""

Options = Mapping[str, Any]
Kind = tuple[Options, int, Tensor | None, Kinds]
"""Of parameters that are tried: options of a group, dimensions, a parameter with their attributes, if any, and what
trials have read of these."""


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


@torch.random.fork_rng(devices=[])  # user code draws the same numbers as without trials
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
        if not is_elementwise(optimizer):
            refuse_by_parameter(optimizer, names)
        admit_groups(optimizer, optimizer.param_groups, elementwise, is_cut=is_cut)
        if (whole := whole_of(optimizer)) is None:
            continue
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
        for kind in HOOKS:
            getattr(optimizer, f"register_{kind}_hook")(lambda *_: None).remove()
    except AttributeError:
        raise ValueError(
            f"{name} wraps an optimizer without the constructor of torch.optim.Optimizer, so its steps run no hooks. "
            "Give zeroshard the optimizer inside: its groups then have what the wrapper may change after each step, as "
            "Lookahead does. Or let its constructor call super().__init__(params, defaults)."
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


@torch.random.fork_rng(devices=[])
def admit_groups(
    optimizer: torch.optim.Optimizer, groups: Sequence[Options], elementwise: bool | None, *, is_cut: bool
) -> None:
    """Raise unless an optimizer can update groups that hold the model's parameters, by trials with their options.

    Args:
        elementwise, is_cut: as for `check_optimizers`.

    Raises:
        ValueError: the update of a parameter or an element depends on others, or a trial failed.
    """
    mark = whole_of(optimizer)
    whole = None if mark is SHAPED else mark
    kinds = Kinds(p for group in groups for p in group["params"])
    taken, done = list[tuple[str, Kind]](), set[str]()
    for group in groups:
        options = options_of(optimizer, group)
        told = repr(sorted(options.items()))
        cut = is_cut or has_split(map(type, group["params"]))
        alike = dict[tuple[int, bool], list[Tensor]]()
        for p in group["params"]:
            is_whole = whole is not None and is_taken(whole, group, p.shape)
            alike.setdefault((p.ndim, is_whole), []).append(p)
        for (ndim, is_whole), parameters in sorted(alike.items(), key=itemgetter(0)):
            if is_whole:
                tried = min(ndim, len(SIZES[0]))
                taken += [(repr((told, tried)), (options, tried, p, kinds)) for p in parameters]
                continue
            tried = min(max(ndim, 1), len(TRIALS))
            for like in parameters:
                if repr((told, tried, kinds.of(like), cut)) not in done:
                    _admit(optimizer, elementwise, (options, tried, like, kinds), is_cut=cut)
                    done.add(repr((told, tried, kinds.of(like), cut)))
    count = 0
    while len(found := {(told, kinds.of(kind[2])): kind for told, kind in reversed(taken)}) > count:
        count = len(found)
        for start in range(0, count, TOGETHER):
            _admit_whole(optimizer, [*found.values()][::-1][start : start + TOGETHER])


def _admit(
    optimizer: torch.optim.Optimizer,
    elementwise: bool | None,
    kind: Kind,
    *,
    is_cut: bool,
) -> None:
    """Raise unless the optimizer updates the entries that it gets, slices or whole parameters, as its own parameters.

    Torch's own element-wise optimizers are known. For others, steps on one parameter, and on what ranks would have in
    its place, must agree bit for bit.

    Args:
        kind: of the parameters; it has at least one dimension.

    Raises:
        ValueError: the numbers differ, or the trial failed.
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
    if is_cut and elementwise is False:
        raise ValueError(
            f"{cls.__name__} was declared not element-wise (Settings(elementwise=False)), so it cannot be sharded. "
            f"{remedy}"
        )
    if is_cut and (needed := _arguments(optimizer)):
        raise ValueError(
            f"{cls.__name__} is not known to be element-wise, and cannot be tried on slices: its constructor needs "
            f"{', '.join(needed)}, which its groups do not have. {remedy}"
        )
    try:
        trials = TRIALS[kind[1] - 1]
        shape = trials[0][0]
        reads_groups = _reads_groups(optimizer, kind, shape)
        # The small one first: some need much time and memory for the large one.
        tried = trials if is_cut and reads_groups else ()
        difference = next(filter(None, (_difference(optimizer, kind, *one) for one in tried)), "")
    except Exception as error:
        if not is_cut:
            return  # it sees what plain torch gives it; what else it needs is not known here
        raise ValueError(
            f"{cls.__name__} is not known to be element-wise, and trying it on slices failed with "
            f"{type(error).__name__}: {error}. {remedy}"
        ) from error
    if not reads_groups:
        raise ValueError(_misses(cls.__name__))
    if difference:
        raise ValueError(
            f"{cls.__name__} is not element-wise: in a trial of {len(SCALES)} steps, {difference}, so sharding would "
            f"change training. {remedy}"
        )


def _admit_whole(optimizer: torch.optim.Optimizer, taken: Sequence[Kind]) -> None:
    """Raise unless the optimizer can update whole parameters one at a time.

    Three steps on small parameters, all at once, one at a time and on other entries in each step, must agree bit for
    bit. Attributes that fit the model's parameters alone, such as a shape, are left out.

    Args:
        taken: the kinds of parameters that it updates as a whole, as for `_update`.

    Raises:
        ValueError: the update of a parameter depends on others, what a step has kept is not in the states, or the
            trial failed.
    """
    name = type(optimizer).__name__
    try:
        try:
            at_once, in_turn = (_update(optimizer, taken, is_in_turn=one) for one in (False, True))
        except Exception:
            taken = [(options, ndim, None, kinds) for options, ndim, _, kinds in taken]
            at_once, in_turn = (_update(optimizer, taken, is_in_turn=one) for one in (False, True))
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
    with suppress(LookupError):  # what it keeps by parameter
        if torch.equal(at_once, _update(optimizer, taken, is_in_turn=False, is_replaced=True)):
            return
    raise ValueError(_misses(name))


def _update(
    optimizer: torch.optim.Optimizer, kinds: Sequence[Kind], *, is_in_turn: bool, is_replaced: bool = False
) -> Tensor:
    """Run some steps of a new optimizer on two parameters of each kind; return their elements.

    Args:
        is_in_turn: update one parameter at a time.
        is_replaced: as for `_try`.
    """
    groups: list[dict[str, Any]] = []
    for chosen, ndim, like, read in kinds:
        shapes = [sizes[:ndim] for sizes in SIZES]
        values = [torch.linspace(-1.0, 2.0, math.prod(one), **PLAIN).view(one) for one in shapes]
        groups.append({**chosen, "params": [read.tried(one, tried_attributes(like, one.shape)) for one in values]})
    parts: list[Tensor] = [part for group in groups for part in group["params"]]
    fresh = rebuild(optimizer, groups)
    given = [attributes_of(part) for part in parts]
    for step in range(STEPS):
        if is_replaced:
            parts = [
                _replaced(fresh, part, part.detach().clone(), 0, read.tried, one)
                for part, one in zip(parts, given, strict=True)
            ]
        for place, part in enumerate(parts):
            part.grad = torch.sin(torch.arange(float(part.numel()), **PLAIN) * (step + 1) + place).view_as(part)
        cuts = [[[p for p in group["params"] if p is part] for group in groups] for part in parts]
        put_back = update_in_pieces(fresh, nullcontext([Resident(cut) for cut in cuts])) if is_in_turn else None
        fresh.step()
        if put_back is not None:
            put_back()
    return torch.cat([part.detach().flatten() for part in parts])


def _try(
    optimizer: torch.optim.Optimizer,
    kind: Kind,
    shape: tuple[int, ...],
    cuts: Sequence[int] = (),
    *,
    is_replaced: bool = False,
) -> tuple[Tensor, list[dict[str, str]]]:
    """Run steps of new optimizers on a parameter; return the elements, and the numbers of each optimizer's group.

    A number that is made of all elements may count in later steps only, as that of D-Adaptation. An optimizer of no
    elements has none.

    Args:
        cuts: ends of the slices that replace the parameter in the groups, each in an optimizer of its own, as on ranks.
        is_replaced: replace the parameter by another of its shape before each step, as where ranks update all of it.
    """
    values = torch.linspace(-1.0, 2.0, math.prod(shape), **PLAIN)
    found, numbers = list[Tensor](), list[dict[str, str]]()
    options, _, like, read = kind
    places = torch.arange(float(values.numel()), **PLAIN)
    for start, stop in pairwise(cuts or (0, values.numel())):
        entry = read.tried(values.clone().view(shape), tried_attributes(like, shape))
        torch.default_generator.manual_seed(0)
        fresh = rebuild(optimizer, [{**copy.deepcopy(dict(options)), "params": [entry]}])
        given = attributes_of(entry)  # also by the constructor
        part = values[start:stop].clone()
        for step, scale in enumerate(SCALES):
            if is_replaced or (cuts and step == 0):
                entry = _replaced(fresh, entry, part if cuts else part.view(shape), start, read.tried, given)
            grad = (2 * torch.cos(places) + torch.sin(places * (step + 1)) / 2) * scale  # with a mean, as of a descent
            entry.grad = grad[start:stop].clone().view_as(entry)
            fresh.step()
            part.copy_(entry.detach().flatten())  # it may have replaced `.data`
        found.append(part)
        if stop > start:
            group = fresh.param_groups[0].items()
            numbers.append({key: repr(_numbers(one)) for key, one in group if key != "params"})
    return torch.cat(found), numbers


def _reads_groups(optimizer: torch.optim.Optimizer, kind: Kind, shape: tuple[int, ...]) -> bool:
    """Return whether other entries in the groups get the numbers of the parameter."""
    expected, _ = _try(optimizer, kind, shape)
    with suppress(LookupError):  # what it keeps by parameter
        return torch.equal(expected, _try(optimizer, kind, shape, is_replaced=True)[0])
    return False


def _numbers(value: Any) -> Any:
    """Return the numbers in a value of a group; other objects say nothing of what elements have in common."""
    if isinstance(value, Mapping):
        return [_numbers(one) for one in value.values()]
    if isinstance(value, (list, tuple)):
        return [*map(_numbers, value)]
    if isinstance(value, Tensor) and value.numel() <= MOST_NUMBERS:
        return value.tolist()
    return value if isinstance(value, Number) else None


def _difference(optimizer: torch.optim.Optimizer, kind: Kind, shape: tuple[int, ...], cuts: Sequence[int]) -> str:
    """Return what slices of a parameter have otherwise than the whole one; "" if nothing.

    A number that another trial of the whole parameter does not repeat, such as the time, says nothing.
    """
    (whole, [numbers]), (sliced, of_slices) = (_try(optimizer, kind, shape, one) for one in ((), cuts))
    if not torch.equal(whole.narrow(0, 0, cuts[-1]), sliced):
        return "elements differ between a whole parameter and slices of it on several ranks"
    keys = sorted(numbers.keys() | set().union(*of_slices))
    pairs = [(key, numbers.get(key, "missing"), one.get(key, "missing")) for one in of_slices for key in keys]
    if differ := [pair for pair in pairs if pair[1] != pair[2]]:
        _, [again] = _try(optimizer, kind, shape)
        for key, of_whole, of_slice in differ:
            if again.get(key, "missing") == of_whole:
                return f"group['{key}'] is {of_whole:.60} with a whole parameter and {of_slice:.60} with a slice of it"
    return ""


def _replaced(
    optimizer: torch.optim.Optimizer,
    before: Tensor,
    values: Tensor,
    start: int,
    tried: Callable[[Tensor, Mapping[str, Any]], torch.nn.Parameter],
    given: Mapping[str, Any],
) -> torch.nn.Parameter:
    """Replace an entry of an optimizer by one of other values, with its states, which are cut where the values are.

    Args:
        tried: as of `Kinds`.
        given: attributes of the new entry.
    """
    entry = tried(values, given)
    for group in optimizer.param_groups:
        group["params"] = [entry if one is before else one for one in group["params"]]
    for key, value in optimizer.state.pop(before, {}).items():
        is_cut = isinstance(value, Tensor) and value.shape == before.shape != values.shape
        optimizer.state[entry][key] = value.flatten()[start : start + values.numel()].clone() if is_cut else value
    return entry


def _misses(name: str) -> str:
    return (
        f"{name} does not update what is in its groups: zs.shard puts other entries there, and in a trial they got "
        "other numbers, or none. It may keep a list of its parameters, or states outside optimizer.state, as in "
        "attributes of parameters. Let its step() read param_groups, and keep states in self.state[p], or use one of "
        f"{', '.join(sorted(ELEMENTWISE))}."
    )


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
