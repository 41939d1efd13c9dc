"""Sums over whole tensors of which each rank has a slice: the engine's answer to `optim/sums.py`.

Owns which elements a rank counts, and the collective.
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
    """The ranks of an engine.

    A rank counts the elements of its shard, also where it updates all of them: so sums are of the same parts, added in
    the same order, at every row of the residency table.
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
        # In rank order, as additions one after the other: a sum over rows adds many of them in groups.
        return rows.cumsum(0)[-1]


def give_sums(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that needs sums over whole tensors have them."""
    if isinstance(optimizer, SummingOptimizer):
        optimizer.sums = RankSums(engine)
