"""Which numbers are kept in which precision, and the loss scale that follows from it.

Owns the dtypes of a bucket, rounding at random and the dynamic loss scale. It must not know buckets or passes;
`describe/precision.py` has what the user chooses.

Note: where a value is rounded
    Master weights and the optimizer's states are in `master` (fp32). Parameters that modules compute with are those
    weights rounded to `param`, again after each step. A gradient is computed in `param`, added up over micro-batches in
    `grad` (fp32), crosses the wire in `reduce`, and is summed over ranks in fp32. The model's floating inputs are cast
    to `param` and its outputs to fp32, where losses belong. Buffers are never cast.
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
        """Whether masters are updated in fp32 and rounded at random."""


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
        self.noted: list[Any] = []
        """What `Guard.look` found in the sums of gradients that this rank made since the last step."""
        self._good_steps = 0
        self.history: list[float] = []
        """The scales at which steps were skipped, oldest first; the last 20."""

    def step(self, *, has_overflowed: bool) -> None:
        """Adapt after a step, or after a skipped one."""
        self.noted = []
        if has_overflowed:
            self.history = [*self.history[-19:], self.value]
            self._good_steps = 0
            self.value = self.value / 2 if self.is_dynamic else self.value
        else:
            self._good_steps += 1
            if self.is_dynamic and self._good_steps == self.GROWTH_STEPS:
                self.value, self._good_steps = min(2 * self.value, self.CEILING), 0
