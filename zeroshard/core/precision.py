"""Which numbers are kept in which precision, and how casts and loss scales follow from it.

Owns the choice of dtypes, the casts at the model's edges and the dynamic loss scale. It must not know buckets or
passes.

Note: where a value is rounded
    Master weights and the optimizer's states are in `master` (fp32). Parameters that modules compute with are those
    weights rounded to `param`, again after each step. A gradient is computed in `param`, added up over micro-batches in
    `grad` (fp32), crosses the wire in `reduce`, and is summed over ranks in fp32. The model's floating inputs are cast
    to `param` and its outputs to fp32, where losses belong. Buffers are never cast.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from zeroshard.table.spec import CODECS, Formats
from zeroshard.torch_private import BatchNorm

__all__ = ["LossScale", "Precision", "precision_of", "round_at_random"]

Tensor = torch.Tensor


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

    def dtypes_of(self, dtype: torch.dtype, *, is_kept: bool) -> "Dtypes":
        """Return the dtypes for a parameter that has `dtype` in the model."""
        # One byte is what weights are quantized to, with scales beside them: a cast would undo it.
        if is_kept or self.param is None or not dtype.is_floating_point or dtype.itemsize == 1:
            return Dtypes(dtype, dtype, dtype, dtype)
        grad = self.grad or torch.promote_types(self.param, torch.float32)
        master = self.master or torch.promote_types(dtype, torch.float32)
        return Dtypes(self.param, self.reduce or grad, grad, master, self.rounding == "stochastic")


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one bucket."""

    param: torch.dtype
    reduce: torch.dtype | str
    grad: torch.dtype
    master: torch.dtype
    is_stochastic: bool = False
    """Whether masters are updated in fp32 and rounded at random."""

    @property
    def formats(self) -> Formats:
        """The same by name."""
        kinds = (self.param, self.reduce, self.grad, self.master, torch.float32 if self.is_stochastic else self.master)
        return Formats(*(str(kind).removeprefix("torch.") for kind in kinds))


def round_at_random(wide: Tensor, first: int, seed: int) -> Tensor:
    """Return fp32 numbers rounded to bfloat16, up with the chance that is their distance from the lower neighbour.

    The same element gets the same chance on any number of ranks: it is drawn from its place and the seed alone.

    Args:
        wide: (numel,) fp32.
        first: place of the first element in its parameter.
        seed: another one for each update.
    """
    noise = torch.arange(first, first + wide.numel(), dtype=torch.int64, device=wide.device).add_(seed << 32)
    for factor in (0x2545F4914F6CDD1D, 0x1D8E4E27C47D124F):
        noise = (noise ^ (noise >> 29)) * factor
    # bfloat16 is the upper half of fp32: adding up to one unit in the last place kept, then cutting, rounds.
    bits = wide.view(torch.int32) + (noise >> 40 & 0xFFFF).to(torch.int32)
    return torch.where(wide.isfinite(), (bits & -0x10000).view(torch.float32), wide).to(torch.bfloat16)


def precision_of(choice: str | Precision) -> Precision:
    """Return the precision that a name stands for.

    Raises:
        ValueError: there is no such name.
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


class LossScale:
    """A loss scale that follows overflows as torch.amp.GradScaler does: half after one, twice after 2000 good steps.

    The scale changes at steps only, so gradients of one step are scaled alike.
    """

    GROWTH_STEPS = 2000
    FLOOR = 1.0
    CEILING = 2.0**126
    """The scale and its inverse stay normal numbers in fp32: steps without gradients count as good ones, too."""

    def __init__(self, start: Literal["dynamic"] | float) -> None:
        self.is_dynamic = start == "dynamic"
        self.value = 65536.0 if start == "dynamic" else float(start)
        self.has_overflowed = False
        """Whether a gradient that this rank summed since the last step is not finite."""
        self._good_steps = 0
        self.history: list[float] = []
        """The scales at which steps were skipped, oldest first; the last 20."""

    def step(self, *, has_overflowed: bool) -> None:
        """Adapt after a step, or after a skipped one."""
        self.has_overflowed = False
        if has_overflowed:
            self.history = [*self.history[-19:], self.value]
            self._good_steps = 0
            self.value = self.value / 2 if self.is_dynamic else self.value
        else:
            self._good_steps += 1
            if self.is_dynamic and self._good_steps == self.GROWTH_STEPS:
                self.value, self._good_steps = min(2 * self.value, self.CEILING), 0
