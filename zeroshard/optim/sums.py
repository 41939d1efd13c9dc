"""Sums over whole tensors, for optimizers that see slices.

Owns the interface of such sums, and its implementation for one process. It must not know ranks: `update/whole_sums.py`
implements it for a sharded model. `lamb.py` has an optimizer of this kind.
"""

from abc import ABC, abstractmethod
from typing import final

import torch

__all__ = ["LocalSums", "SummingOptimizer", "Sums"]

Tensor = torch.Tensor


class Sums(ABC):
    """Computes sums over whole tensors."""

    @abstractmethod
    def part(self, parameter: Tensor, values: Tensor) -> Tensor:
        """Return the elements of `values` that this process counts, flat: each element is counted by one process.

        Args:
            values: a number for each element of `parameter`, which is an entry of the optimizer's groups.
        """

    @abstractmethod
    def total(self, sums: Tensor) -> Tensor:
        """Return the sums over all processes, in fp64, with the same bits on every process.

        Args:
            sums: fp64, this process's sums; on every process for the same tensors.
        Collective: an all-gather of 8 bytes per sum; every rank must call.
        """


@final
class LocalSums(Sums):
    """Sums of one process, which has all elements."""

    def part(self, parameter: Tensor, values: Tensor) -> Tensor:
        """See `Sums`."""
        return values.reshape(-1)

    def total(self, sums: Tensor) -> Tensor:
        """See `Sums`."""
        return sums


class SummingOptimizer(torch.optim.Optimizer):
    """An optimizer whose update of a slice needs sums over the whole tensor, and no other data of other slices.

    `sums` computes them; `zs.shard` replaces it with an implementation for all ranks.
    """

    sums: Sums = LocalSums()
