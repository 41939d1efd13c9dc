"""Hooks that signal the begin and end of a module's backward.

Owns the hooks. It knows units by number only.

Note: hints
    Hooks on the gradients of a unit's outputs and inputs signal the begin and end of its backward. They are hints: a
    loss from inside a unit, or an in-place change of a returned view, bypasses them. Correctness does not depend on
    them: unpacking a saved tensor gathers its unit, and the end of the pass releases and reduces the other units.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zeroshard.table.schedule import ROOT
from zeroshard.tree import find

__all__ = ["hint_begin", "hint_end"]


def hint_begin(
    outputs: Any, units: Sequence[int], begin: Callable[[int], None], arrive: Callable[[], None] = lambda: None
) -> None:
    """Call `arrive`, then `begin` with each unit but the root, before the backward of a module; for each output."""
    targets, tensors = _found(outputs, units)

    def begin_all(grad: torch.Tensor) -> None:
        arrive()
        for number in targets:
            begin(number)

    for tensor in tensors:
        tensor.register_hook(begin_all)


def hint_end(inputs: Any, units: Sequence[int], end: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...]:
    """Call `end` with the units but the root after the backward of a module, until it returns True.

    Returns: the units; () if no input can signal that.
    """
    targets, tensors = _found(inputs, units)
    has_ended = False

    def end_once(grad: torch.Tensor) -> None:
        nonlocal has_ended
        has_ended = has_ended or end(targets)

    for tensor in tensors:
        tensor.register_hook(end_once)
    return targets if tensors else ()


def _found(values: Any, units: Sequence[int]) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    targets = tuple(number for number in units if number != ROOT)
    found = find(values, torch.Tensor) if targets else []
    return targets, [one for one in found if one.requires_grad and one.grad_fn is not None]
