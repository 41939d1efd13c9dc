"""Casts at the edges of the model, and at modules that keep their own dtype.

Owns the hooks that cast; `setup/wiring.py` registers them. Read `core/dtypes.py` (where a value is rounded) first.

Note: the edge of the model
    User code may call the model, a single block, or a method that computes as `forward` does. All of these have casts,
    but only the outermost call casts: between modules, values stay in the dtype that modules compute with. Gradients
    are multiplied by the loss scale where they enter through outputs, and divided by the scale where they leave through
    inputs, so two sequential calls scale them once.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

from zeroshard.core.dtypes import LossScale
from zeroshard.core.hooks import Hook
from zeroshard.torch_private import graph_task
from zeroshard.tree import map_floating
from zeroshard.watch.stacks import Call

__all__ = ["CastIn", "CastOut", "Edge", "EdgeIn", "EdgeOut"]


@final
class CastIn(Hook):
    """Casts the floating-point inputs of a module; with a loss scale, their gradients are divided by it."""

    def __init__(self, dtype: torch.dtype, loss_scale: LossScale | None = None) -> None:
        self._dtype, self._loss_scale = dtype, loss_scale

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the inputs, cast."""
        return map_floating(args, self._cast), map_floating(kwargs, self._cast)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return _cast(tensor, self._dtype, self._loss_scale, is_out=False)


@final
class CastOut(Hook):
    """Casts the floating-point outputs of a module; with a loss scale, their gradients are multiplied by it."""

    def __init__(self, dtype: torch.dtype, loss_scale: LossScale | None = None) -> None:
        self._dtype, self._loss_scale = dtype, loss_scale

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Return the outputs, cast."""
        return map_floating(output, self._cast)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return _cast(tensor, self._dtype, self._loss_scale, is_out=True)


@final
class Edge:
    """The edge of a model: casts the inputs and outputs of the outermost calls.

    Args:
        is_cut: whether the outermost call ends at the border of a chunk, and not with the model's outputs.
    """

    def __init__(self, cast_in: CastIn, cast_out: CastOut, is_cut: Callable[[], bool]) -> None:
        self._in, self._out, self._is_cut = cast_in, cast_out, is_cut
        self._calls: list[Call] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Begin a call: return its inputs, cast if the call is the outermost."""
        self._forget_ended()
        self._calls.append(Call(__name__))
        # A recomputed call in a backward was an inner call in its forward.
        return self._in(module, args, kwargs) if len(self._calls) == 1 and graph_task() == -1 else (args, kwargs)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """End a call: return its output, cast if the call was the outermost."""
        self._forget_ended()
        if self._calls:
            self._calls.pop()
        is_edge = not self._calls and graph_task() == -1 and not self._is_cut()
        return self._out(module, args, kwargs, output) if is_edge else output

    def _forget_ended(self) -> None:
        """Remove calls that ended with an exception."""
        while self._calls and not self._calls[-1].is_running():
            self._calls.pop()


@final
class EdgeIn(Hook):
    """Pre-hook of a module that user code may call."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the inputs, cast at the edge."""
        return self._edge.enter(module, args, kwargs)


@final
class EdgeOut(Hook):
    """Post-hook of a module that user code may call."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Return the output, cast at the edge."""
        return self._edge.leave(module, args, kwargs, output)


def _cast(tensor: torch.Tensor, dtype: torch.dtype, loss_scale: LossScale | None, *, is_out: bool) -> torch.Tensor:
    if loss_scale is None or not tensor.requires_grad:
        return tensor.to(dtype)
    scaled: torch.Tensor = _Scaled.apply(tensor, dtype, loss_scale, is_out)  # type: ignore[no-untyped-call]
    return scaled


class _Scaled(torch.autograd.Function):
    """A cast whose gradient is multiplied or divided by the loss scale; a graph node that no gradient bypasses."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, dtype: torch.dtype, loss_scale: LossScale, is_out: bool
    ) -> torch.Tensor:
        ctx.dtype, ctx.loss_scale, ctx.is_out = tensor.dtype, loss_scale, is_out
        return tensor.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True with a loss scale: values computed from these gradients would be scaled twice. "
                'Use precision="bf16" or "fp32", or loss_scale=None and your own scale.'
            )
        scale = ctx.loss_scale.value
        grad = grad * scale if ctx.is_out else grad.to(ctx.dtype) / scale
        return grad.to(ctx.dtype), None, None, None
