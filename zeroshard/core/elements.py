"""Reductions over all elements of a sharded gradient: extremes, means, checks for values that are not finite.

Owns the numbers that each rank computes from its elements, and the result from all ranks' numbers. It must not know
the classes that users call (`core/gradient.py`).

Note: reductions of functions of elements
    `grad.abs().max()` reduces |x| of each element. `abs()` computes nothing: it returns a gradient without storage
    that records the function. Only the reduction that follows runs, with one collective.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from zeroshard.core.slot import Slot
from zeroshard.core.states import Sum
from zeroshard.torch_private import NoSubclasses

__all__ = ["EXTREMES", "MAPS", "Map", "QUESTIONS", "answer", "are_numbers"]

Tensor = torch.Tensor
Map = Callable[[Tensor], Tensor]
Question = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Mapping[str, Any]], Tensor]]
"""A rank's numbers in fp64 from its elements, and the result from all ranks' numbers, one row per rank."""

MAPS = frozenset(
    """
    abs absolute bfloat16 double eq float ge gt half isfinite isinf isnan le log log10 log2 lt ne pow sign sqrt square
    __abs__ __eq__ __ge__ __gt__ __le__ __lt__ __ne__ __pow__
    """.split()
)
"""Elementwise functions whose other arguments are numbers."""


def _extreme(values: Tensor, *, is_largest: bool) -> Tensor:
    if not values.numel():
        return values.new_tensor([float("-inf" if is_largest else "inf")], dtype=torch.float64)
    return (values.amax() if is_largest else values.amin()).double().view(1)


def _moments(values: Tensor) -> Tensor:
    """Return the number of elements, their mean, and the sum of squared deviations from the mean."""
    wide, count = _wide(values), values.numel()
    mean = wide.mean() if count else wide.new_zeros(())
    return torch.stack([wide.new_tensor(float(count)), mean, (wide - mean).abs().square().sum().to(wide.dtype)])


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _all_moments(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count = rows[:, 0].sum()
    mean = (rows[:, 0] * rows[:, 1]).sum() / count
    return count, mean, (rows[:, 2] + rows[:, 0] * (rows[:, 1] - mean).abs().square()).sum()


def _variance(rows: Tensor, options: Mapping[str, Any]) -> Tensor:
    count, squares = (one.real if one.is_complex() else one for one in _all_moments(rows)[::2])
    return squares / (count - float(options.get("correction", options.get("unbiased", True)))).clamp(min=0)


QUESTIONS: Mapping[str, Question] = MappingProxyType(
    {
        "all": (lambda x: (x == 0).sum().double().view(1), lambda rows, _: rows.sum() == 0),
        "any": (lambda x: (x != 0).sum().double().view(1), lambda rows, _: rows.sum() > 0),
        "count_nonzero": (lambda x: x.count_nonzero().double().view(1), lambda rows, _: rows.sum().long()),
        "max": (lambda x: _extreme(x, is_largest=True), lambda rows, _: rows.amax()),
        "amax": (lambda x: _extreme(x, is_largest=True), lambda rows, _: rows.amax()),
        "min": (lambda x: _extreme(x, is_largest=False), lambda rows, _: rows.amin()),
        "amin": (lambda x: _extreme(x, is_largest=False), lambda rows, _: rows.amin()),
        "sum": (lambda x: _wide(x).sum().view(1), lambda rows, _: rows.sum()),
        "mean": (_moments, lambda rows, _: _all_moments(rows)[1]),
        "var": (_moments, _variance),
        "std": (_moments, lambda rows, options: _variance(rows, options).sqrt()),
    }
)
"""Reductions over all elements, without a dimension, by the name of torch's function."""

EXTREMES = frozenset(["amax", "amin", "histc", "max", "min"])
"""Reductions to the smallest or largest element, which are undefined without elements."""
COUNTS = frozenset(["all", "any", "count_nonzero"])
"""Reductions whose result has a dtype of its own."""
CORRECTED = frozenset(["std", "var"])


def answer(
    name: str, slot: Slot, maps: Sequence[Map], dtype: torch.dtype, args: Sequence[Any], options: Mapping[str, Any]
) -> Tensor | None:
    """Return the result of a reduction over all elements of a gradient; None if the arguments are not supported.

    Args:
        maps: elementwise functions, applied in order.
        dtype: the dtype of the functions' result.
        args, options: arguments of the reduction after the tensor.
    Collective: all-gather of at most 24 bytes, for `histc` of 16 bytes and of 8 bytes a bin; every rank must call.
    """
    options = dict(options)
    if name in CORRECTED and len(args) == 1 and isinstance(args[0], bool):
        options["unbiased"], args = args[0], ()
    is_known = name in CORRECTED and (
        [*map(type, options.values())] in ([bool], [int], [float]) and options.keys() <= {"correction", "unbiased"}
    )
    if name != "histc" and (args or (options and not is_known)):
        return None
    owner, grads, what = slot.living_owner(), slot.bucket.grads, f"{name} of the gradient of '{slot.name}'"
    owner.leave_passes(what)
    owner.check_reduced(what)
    owner.catch_up()

    def ask(numbers: Tensor) -> Tensor:
        owner.answer(what)
        return owner.comm.collect(numbers, what)[owner.copy]

    with torch.no_grad(), NoSubclasses():
        is_mine = slot.is_own and grads.sums[slot.index] is Sum.USED
        values = grads.own_part(slot.index) if is_mine else torch.empty(0, dtype=grads.dtype, device=slot.bucket.device)
        for one in maps:
            values = one(values)
        if name == "histc":
            return _histogram(values, ask, *args, **options).to(dtype)
        tell, conclude = QUESTIONS[name]
        found = conclude(ask(tell(values)), options)
    if name in COUNTS:
        return found
    if name in CORRECTED:
        dtype = dtype.to_real()
    return found.to(dtype if dtype.is_floating_point or dtype.is_complex or name in EXTREMES else torch.int64)


def _histogram(
    values: Tensor, ask: Callable[[Tensor], Tensor], bins: int = 100, min: float = 0, max: float = 0
) -> Tensor:
    """Return (bins,) element counts in equal parts of [min, max], or between the extremes, as `torch.histc` does."""
    if min == max:  # as torch does, whatever they are
        ends = ask(torch.cat([_extreme(values, is_largest=False), _extreme(values, is_largest=True)]))
        min, max = ends[:, 0].amin().item(), ends[:, 1].amax().item()
    if min == max:
        min, max = min - 1, max + 1
    return ask(torch.histc(values, bins, min, max).double()).sum(0)


def are_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether all arguments after the first are plain numbers, which are valid for a part of a tensor."""
    return all(
        value is None
        or isinstance(value, (int, float))
        or (type(value) is Tensor and not value.ndim and not value.requires_grad)
        for value in (*args[1:], *kwargs.values())
    )
