"""Sums over whole tensors that are sharded over ranks: the engine's implementation of `optim/sums.py`.

Owns the choice of the elements that a rank sums, and the collective.
"""

from typing import final

import torch

from zeroshard.core.engine import Engine
from zeroshard.core.slot import slot_of
from zeroshard.optim.sums import SummingOptimizer, Sums
from zeroshard.wire.mesh import slice_of

__all__ = ["give_sums"]

Tensor = torch.Tensor


@final
class RankSums(Sums):
    """Sums over the ranks of an engine.

    A rank sums the elements of its shard, even if it updates all elements. Every row of the residency table thus adds
    the same parts in the same order.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._copy = slice_of(engine.mesh.along("shard", "tensor"))

    def part(self, parameter: Tensor, values: Tensor) -> Tensor:
        """See `Sums`."""
        slot = slot_of(parameter)
        bucket, index = slot.bucket, slot.index
        first, _ = bucket.master_range(index)
        start, stop = bucket.layout.overlap(index, *bucket.spec.shard) if slot.is_own else (first, first)
        return values[start - first : stop - first] if stop > start else values[:0]

    def total(self, sums: Tensor) -> Tensor:
        """See `Sums`."""
        rows = self._engine.comm.collect(sums, f"{len(sums)} norms of an optimizer's tensors")[self._copy]
        # Sequential additions in rank order; a sum over many rows would add them in groups.
        return rows.cumsum(0)[-1]


def give_sums(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the sums over whole tensors that it needs."""
    if isinstance(optimizer, SummingOptimizer):
        engine.undo.put(vars(optimizer), "sums", RankSums(engine))
