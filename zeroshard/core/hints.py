"""Hooks that signal the begin and end of a module's backward.

Owns the hooks. It must not know units.

Note: hints
    Hooks on the gradients of a unit's outputs and inputs signal the begin and end of its backward. They are hints: a
    loss from inside a unit, or an in-place change of a returned view, bypasses them. Correctness does not depend on
    them: unpacking a saved tensor gathers its unit, and the end of the pass releases and reduces the other units.
"""

from collections.abc import Callable
from typing import Any

import torch

from zeroshard.tree import find

__all__ = ["hint_begin", "hint_end"]

Tensor = torch.Tensor


def hint_begin(outputs: Any, begin: Callable[[], None]) -> None:
    """Call `begin` before the backward of a module, once for each output."""
    for tensor in _differentiable(outputs):
        tensor.register_hook(lambda grad: begin())


def hint_end(inputs: Any, end: Callable[[], bool]) -> bool:
    """Call `end` after the backward of a module, until it returns True; return False if no input can signal that."""
    has_ended = False

    def end_once(grad: Tensor) -> None:
        nonlocal has_ended
        has_ended = has_ended or end()

    tensors = _differentiable(inputs)
    for tensor in tensors:
        tensor.register_hook(end_once)
    return bool(tensors)


def _differentiable(values: Any) -> list[Tensor]:
    return [one for one in find(values, Tensor) if one.requires_grad and one.grad_fn is not None]
