"""Sums over whole tensors, for optimizers that see slices of them.

Owns what such an optimizer asks for, and the answer of one process. It must not know ranks: `state/sums.py` has the
answer of a sharded model. `lamb.py` has an optimizer of this kind.
"""

from abc import ABC, abstractmethod
from typing import final

import torch

__all__ = ["LocalSums", "SummingOptimizer", "Sums"]

Tensor = torch.Tensor


class Sums(ABC):
    """Adds up what belongs to whole tensors."""

    @abstractmethod
    def part(self, parameter: Tensor, values: Tensor) -> Tensor:
        """Return those elements of `values` that this process counts, flat: each element is counted once.

        Args:
            values: a number for each element of `parameter`, which is an entry of the optimizer's groups.
        """

    @abstractmethod
    def total(self, sums: Tensor) -> Tensor:
        """Return sums over all processes, in fp64, from this one's; the same bits on every process.

        Args:
            sums: fp64; the same number of them, for the same tensors, on every process.
        Collective: an all-gather of 8 bytes a sum; every rank must call.
        """


@final
class LocalSums(Sums):
    """One process, which has all elements."""

    def part(self, parameter: Tensor, values: Tensor) -> Tensor:
        """See `Sums`."""
        return values.reshape(-1)

    def total(self, sums: Tensor) -> Tensor:
        """See `Sums`."""
        return sums


class SummingOptimizer(torch.optim.Optimizer):
    """An optimizer whose update of a slice needs sums over the whole tensor, and nothing else of it.

    `sums` adds them up; `zs.shard` gives it one that knows the other ranks.
    """

    sums: Sums = LocalSums()
