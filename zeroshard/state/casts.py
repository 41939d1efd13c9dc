"""The casts at the edges of the model, and of modules that keep their own dtype.

Owns the hooks that cast; `state/wiring.py` hangs them. Read `core/precision.py` (where a value is rounded) first.
"""

from typing import Any, final

import torch
from torch import nn

from zeroshard.core.hooks import Hook
from zeroshard.core.precision import LossScale
from zeroshard.tree import map_floating

__all__ = ["CastIn", "CastOut"]


@final
class CastIn(Hook):
    """Casts the floating-point inputs of a module."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the inputs, cast."""
        return map_floating(args, self._cast), map_floating(kwargs, self._cast)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype)


@final
class CastOut(Hook):
    """Casts the floating-point outputs of a module; with a loss scale, their gradients are multiplied by it."""

    def __init__(self, dtype: torch.dtype, loss_scale: LossScale | None = None) -> None:
        self._dtype, self._loss_scale = dtype, loss_scale

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Return the outputs, cast."""
        return map_floating(output, self._cast)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._loss_scale is not None and tensor.requires_grad:
            scaled: torch.Tensor = _Scaled.apply(tensor, self._dtype, self._loss_scale)  # type: ignore[no-untyped-call]
            return scaled
        return tensor.to(self._dtype)


class _Scaled(torch.autograd.Function):
    """A cast whose gradient is multiplied by the loss scale: a node of the graph, which nothing bypasses."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dtype: torch.dtype, loss_scale: LossScale) -> torch.Tensor:
        ctx.dtype, ctx.loss_scale = tensor.dtype, loss_scale
        return tensor.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True with a loss scale: what is computed from these gradients would be scaled twice. "
                'Use precision="bf16" or "fp32", or loss_scale=None and a scale of your own.'
            )
        return (grad * ctx.loss_scale.value).to(ctx.dtype), None, None
