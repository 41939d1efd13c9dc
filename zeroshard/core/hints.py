"""Hooks that signal the begin and end of a module's backward.

Owns the hooks. It knows units by number only.

Note: hints
    Hooks on the gradients of a unit's outputs and inputs signal the begin and end of its backward. They are hints: a
    loss from inside a unit, or an in-place change of a returned view, bypasses them. Correctness does not depend on
    them: unpacking a saved tensor gathers its unit, and the end of the pass releases and reduces the other units.
    Hooks have a weak reference to the method that they call: Python's collector cannot see the reference of a graph,
    which a module that keeps one of its outputs keeps. (While a profile runs, functions take the place of methods.)
"""

from collections.abc import Callable, Sequence
from inspect import ismethod
from typing import Any, TypeVar
from weakref import WeakMethod

import torch

from zeroshard.table.schedule import ROOT
from zeroshard.torch_private import untraced
from zeroshard.tree import find

__all__ = ["hint_begin", "hint_end"]

Call = TypeVar("Call", bound=Callable[..., Any])


def hint_begin(
    outputs: Any, units: Sequence[int], begin: Callable[[int], None], arrive: Callable[[], None] = lambda: None
) -> None:
    """Call `arrive`, then the method `begin` with each unit but the root, before a backward; for each output."""
    targets, tensors = _found(outputs, units)
    living = _weak(begin)

    def begin_all(grad: torch.Tensor) -> None:
        arrive()
        if (call := living()) is not None:
            for number in targets:
                call(number)

    for tensor in tensors:
        tensor.register_hook(untraced(begin_all))


def hint_end(inputs: Any, units: Sequence[int], end: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...]:
    """Call the method `end` with the units but the root after the backward of a module, until it returns True.

    Returns: the units; () if no input can signal that.
    """
    targets, tensors = _found(inputs, units)
    living, has_ended = _weak(end), False

    def end_once(grad: torch.Tensor) -> None:
        nonlocal has_ended
        call = living()
        has_ended = has_ended or call is None or call(targets)

    for tensor in tensors:
        tensor.register_hook(untraced(end_once))
    return targets if tensors else ()


def _weak(call: Call) -> Callable[[], Call | None]:
    return WeakMethod(call) if ismethod(call) else lambda: call


def _found(values: Any, units: Sequence[int]) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    targets = tuple(number for number in units if number != ROOT)
    found = find(values, torch.Tensor) if targets else []
    return targets, [one for one in found if one.requires_grad and one.grad_fn is not None]
