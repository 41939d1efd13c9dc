"""The precision that the caller of `shard()` chooses, and the casts at the edges of the model.

Owns the choice, its checks, and the hooks that cast. Read `core/precision.py` (where a value is rounded) first.
"""

from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import nn

from zeroshard.core.hooks import Hook
from zeroshard.core.precision import Dtypes, LossScale
from zeroshard.table.spec import CODECS
from zeroshard.torch_private import BatchNorm
from zeroshard.tree import map_floating

__all__ = ["CastIn", "CastOut", "Precision", "precision_of"]


@dataclass(frozen=True)
class Precision:
    """Dtypes of a model's training state; None means: as the parameters are.

    Args:
        param: what modules compute with.
        reduce: gradients on the wire, a dtype or the name of a codec; by default as they are held.
        grad: gradients held between micro-batches.
        master: the weights that the optimizer updates.
        keep: module classes whose parameters stay as they are; their inputs are cast to these, their outputs back.
        loss_scale: "dynamic", a fixed number, or None: then scaling is the caller's (torch.amp.GradScaler) or not
            needed.
        rounding: how updated masters are rounded to `master`. "stochastic" is for masters in bfloat16, which would
            lose small updates otherwise: they are updated in fp32, and rounded up or down with the chance that is
            right on average; states stay in fp32, and an update takes 4 bytes more for each element meanwhile.

    ```python
    import torch, zeroshard as zs

    paper = zs.Precision(param=torch.bfloat16, grad=torch.bfloat16, master=torch.float32)  # 16 bytes a parameter
    model = torch.nn.Linear(4, 4)
    zero = zs.shard(model, torch.optim.AdamW(model.parameters()), precision=paper)
    assert model.weight.dtype == torch.bfloat16
    ```
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | str | None = None
    grad: torch.dtype | None = None
    master: torch.dtype | None = None
    keep: tuple[type[nn.Module], ...] = (BatchNorm,)
    loss_scale: Literal["dynamic"] | float | None = None
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "grad", "master"):
            dtype = getattr(self, name)
            is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if not (is_float or dtype is None or (name == "reduce" and dtype in CODECS)):
                raise TypeError(f"Precision({name}=...) takes a floating-point torch.dtype or None; got {dtype!r}.")
        if not isinstance(self.keep, tuple) or not all(isinstance(kind, type) for kind in self.keep):
            raise TypeError(f"Precision(keep=...) takes a tuple of module classes; got {self.keep!r}.")
        is_number = isinstance(self.loss_scale, int | float) and 0 < self.loss_scale < float("inf")
        if self.loss_scale is not None and self.loss_scale != "dynamic" and not is_number:
            raise ValueError(f"loss_scale must be 'dynamic', a positive number or None; got {self.loss_scale!r}.")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding must be 'nearest' or 'stochastic'; got {self.rounding!r}.")
        if self.rounding == "stochastic" and self.master != torch.bfloat16:
            raise ValueError(f"rounding='stochastic' needs master=torch.bfloat16; got master={self.master}.")

    def dtypes_of(self, dtype: torch.dtype, *, is_kept: bool) -> Dtypes:
        """Return the dtypes for a parameter that has `dtype` in the model."""
        # One byte is what weights are quantized to, with scales beside them: a cast would undo it.
        if is_kept or self.param is None or not dtype.is_floating_point or dtype.itemsize == 1:
            return Dtypes(dtype, dtype, dtype, dtype)
        grad = self.grad or torch.promote_types(self.param, torch.float32)
        master = self.master or torch.promote_types(dtype, torch.float32)
        return Dtypes(self.param, self.reduce or grad, grad, master, self.rounding == "stochastic")


def precision_of(choice: str | Precision) -> Precision:
    """Return the precision that a name stands for.

    Raises:
        ValueError: no precision has this name.
    """
    if isinstance(choice, Precision):
        return choice
    named = {
        "fp32": Precision(),
        "bf16": Precision(param=torch.bfloat16),
        "fp16": Precision(param=torch.float16, loss_scale="dynamic"),
    }
    if not isinstance(choice, str) or choice not in named:
        raise ValueError(f"precision must be one of {', '.join(named)} or a zs.Precision; got {choice!r}.")
    return named[choice]


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
