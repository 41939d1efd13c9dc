"""The precision of parameters, gradients and states, and the loss scale.

Owns the dtypes of a bucket, stochastic rounding and the dynamic loss scale. It must not know buckets or passes;
`describe/precision.py` has the user's choices.

Note: where a value is rounded
    Master weights and the optimizer's states are in `master` (fp32). After each step, they are rounded to `param`, for
    the parameters that modules compute with. A gradient is computed in `param`, accumulated over micro-batches in
    `grad` (fp32), communicated in `reduce`, and summed over ranks in fp32. The model's floating inputs are cast to
    `param`, and its outputs to fp32 for the loss. Buffers are never cast.
"""

from typing import Any, Literal, final

import torch

from zeroshard.table.spec import Formats

__all__ = ["Dtypes", "LossScale", "round_at_random"]

Tensor = torch.Tensor


@final
class Dtypes:
    """The dtypes of one bucket, from their names."""

    def __init__(self, formats: Formats) -> None:
        self.param, self.grad, self.master = (getattr(torch, n) for n in (formats.param, formats.grad, formats.master))
        self.is_stochastic = formats.state != formats.master
        """Whether masters are updated in fp32 and rounded stochastically."""


def round_at_random(wide: Tensor, first: int, seed: int) -> Tensor:
    """Return fp32 numbers rounded stochastically to bfloat16: up with a probability equal to the fraction cut off.

    An element is rounded the same way on any number of ranks: the draw depends only on its position and the seed.

    Args:
        wide: (numel,) fp32.
        first: position of the first element in its parameter.
        seed: different for each update.
    """
    noise = torch.arange(first, first + wide.numel(), dtype=torch.int64, device=wide.device).add_(seed << 32)
    for factor in (0x2545F4914F6CDD1D, 0x1D8E4E27C47D124F):
        noise = (noise ^ (noise >> 29)) * factor
    # bfloat16 is the upper half of fp32: adding less than one unit in the last kept place, then cutting, rounds.
    bits = wide.view(torch.int32) + (noise >> 40 & 0xFFFF).to(torch.int32)
    return torch.where(wide.isfinite(), (bits & -0x10000).view(torch.float32), wide).to(torch.bfloat16)


class LossScale:
    """A loss scale as in torch.amp.GradScaler: halved after an overflow, doubled after 2000 good steps.

    The scale changes only at steps, so all gradients of a step have the same scale.
    """

    GROWTH_STEPS = 2000
    FLOOR = 1.0
    CEILING = 2.0**126
    """Bounds that keep the scale and its inverse normal in fp32; steps without gradients count as good steps."""

    def __init__(self, start: Literal["dynamic"] | float) -> None:
        self.is_dynamic = start == "dynamic"
        self.value = 65536.0 if start == "dynamic" else float(start)
        self.noted: list[Any] = []
        """Results of `Guard.look` for the gradient sums of this rank since the last step."""
        self._good_steps = 0
        self.history: list[float] = []
        """The scales at which steps were skipped, oldest first; the last 20."""
        self._round: tuple[int, set[int], bool] = -1, set(), False
        """Number of backwards before the last steps, which optimizers made these, and whether one was skipped."""

    def step(self, *, has_overflowed: bool, backwards: int, optimizer: int) -> None:
        """Adapt the scale after a step or a skipped step: once for the steps of several optimizers after a backward.

        Args:
            backwards: the number of backwards so far.
            optimizer: its place among the optimizers of the model; its next step is another one after any backward.
        """
        self.noted = []
        before, stepped, was_skipped = self._round
        is_same = before == backwards and optimizer not in stepped
        self._round = backwards, {optimizer, *(stepped if is_same else ())}, has_overflowed or (is_same and was_skipped)
        if is_same and stepped and (was_skipped or not has_overflowed):
            return
        if has_overflowed:
            self.history = [*self.history[-19:], self.value]
            self._good_steps = 0
            self.value = self.value / 2 if self.is_dynamic else self.value
        else:
            self._good_steps += 1
            if self.is_dynamic and self._good_steps == self.GROWTH_STEPS:
                self.value, self._good_steps = min(2 * self.value, self.CEILING), 0
