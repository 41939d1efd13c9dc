"""Norms of gradients: this rank's part of all of them, and what follows from all ranks' parts.

Owns the arithmetic behind every norm, in few launches at any number of ranks. It must not know who asks
(`core/gradient.py`) nor how ranks meet (`Engine.norms`).
"""

from collections.abc import Sequence
from typing import Any, final

import torch

from zeroshard.core.slot import Slot
from zeroshard.core.states import Sum
from zeroshard.torch_private import foreach_norm

__all__ = ["LocalNorms", "total_norms"]

Tensor = torch.Tensor
UNUSED, USED = Sum.UNUSED, Sum.USED


@final
class LocalNorms:
    """This rank's part of all norms; what is equal from step to step is made once.

    Args:
        slots: of all parameters, by place.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots, self._count = [slot for slot in slots if slot.is_own], len(slots)
        self._device = slots[0].bucket.device if slots else None
        self._made: tuple[Any, Tensor, list[Tensor]] = None, torch.empty(0), []
        """For one choice of parameters: what identifies it, (parameters,), and the places of each dtype's in that."""

    def of(self, p: float, dtype: torch.dtype | None, *, is_behind: bool = False) -> Tensor:
        """Return (parameters,) fp64, which the next call overwrites: each gradient's sum of |x|^p over this rank's
        elements; for orders without a sum the largest or smallest |x|, or how many are not 0.

        Args:
            dtype: what elements are converted to first; at least fp32 for a sum.
            is_behind: whether ranks have yet to agree on who used what; then a sum may be of nothing, and is zeros.
        """
        wanted = (USED, UNUSED) if is_behind else (USED,)
        found: dict[tuple[torch.dtype, torch.device], tuple[list[int], list[Tensor]]] = {}
        for slot in self._slots:
            grads, index = slot.bucket.grads, slot.index
            if grads.sums[index] in wanted:
                part = grads.own_part(index)
                places, parts = found.setdefault((grads.dtype, part.device), ([], []))
                places.append(slot.place)
                parts.append(part)
        rows, rest = [places for places, _ in found.values()], float("inf") if p == -float("inf") else 0.0
        if self._made[0] != (rows, rest):
            out = torch.full((self._count,), rest, dtype=torch.float64, device=self._device)
            self._made = (rows, rest), out, [torch.tensor(places, device=self._device) for places in rows]
        _, out, indices = self._made
        for ((held, _), (_, parts)), where in zip(found.items(), indices, strict=True):
            # Rounded to two bytes on each rank the norm of the whole would be off by more than its own rounding.
            norms = torch.stack(
                foreach_norm(parts, p, dtype=torch.promote_types(held, dtype or torch.float32))
            ).double()
            out.index_copy_(0, where, (norms if p == 0 or abs(p) == float("inf") else norms**p).to(out.device))
        return out


def total_norms(rows: Tensor, p: float) -> Tensor:
    """Return (parameters,) the norms of whole gradients from what `LocalNorms.of` returned, a rank a row."""
    if abs(p) == float("inf"):
        return rows.amax(0) if p > 0 else rows.amin(0)
    # In rank order, as additions one after the other: a sum over rows adds many of them in groups.
    total = rows.cumsum(0)[-1]
    return total if p == 0 else total ** (1 / p)
