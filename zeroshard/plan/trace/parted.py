"""P_a in traces: each rank along the tensor axis keeps its part of the inputs of recomputed modules.

Owns a reimplementation of the memory effects of `activations/partition.py`, without the comparison of values. It must
not know units. Read `kept.py` first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from zeroshard.plan.shape.tape import Exchange
from zeroshard.plan.trace.kept import Held, Link
from zeroshard.table.activations import Partitioned
from zeroshard.torch_private import is_dense, local_of

__all__ = ["Parts"]


@final
@dataclass(frozen=True, eq=False)
class _Part:
    part: Tensor
    size: torch.Size
    strides: tuple[int, ...]


@final
class Parts(Link):
    """Keeps 1/T of each input of a recomputed module.

    Args:
        ranks: T, the number of ranks along the tensor axis.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def treat(self, held: Sequence[Held], unit: int, outputs: Any) -> None:
        """See `Link`.

        Raises:
            ValueError: an input is already split over the ranks.
        """
        for one in held:
            whole = one.value
            if not one.is_input or not isinstance(whole, Tensor):
                continue
            if local_of(whole) is not whole:
                raise ValueError(
                    "activations='partition' needs inputs that are the same on all ranks along the tensor axis, but "
                    f"an input of the recomputed module in unit {unit} is a DTensor. Remove 'partition' for this "
                    "unit: with sequence parallelism, inputs are already split."
                )
            if whole.layout is torch.strided and whole.numel() >= Partitioned.LEAST_NUMEL and is_dense(whole):
                numel = -(-whole.numel() // self._ranks)
                one.put(self, _Part(whole.new_zeros(numel), whole.shape, whole.stride()))

    def start(self, value: Any) -> tuple[_Part, Tensor]:
        """See `Link`."""
        full = value.part.new_empty(self._ranks * value.part.numel())
        self.exchange(Exchange("gather", full.nbytes))
        return value, full

    def restore(self, value: Any) -> Tensor:
        """See `Link`."""
        part, full = value
        whole: Tensor = full.as_strided(part.size, part.strides)
        return whole
