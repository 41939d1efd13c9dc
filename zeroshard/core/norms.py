"""Norms of gradients: this rank's partial sums, and the norms from all ranks' sums.

Owns the arithmetic of every norm, in few launches at any number of ranks. It must not know the callers
(`core/gradient.py`) nor the collective (`Engine.norms`).
"""

from collections.abc import Sequence
from typing import Any, Final, final

import torch

from zeroshard.core.slot import Slot, keep_shown
from zeroshard.core.states import Sum
from zeroshard.torch_private import foreach_norm, version_of

__all__ = ["IGNORED", "LocalNorms", "norms_of", "refuse_ignored", "total_norms"]

Tensor = torch.Tensor
UNUSED, USED = Sum.UNUSED, Sum.USED
IGNORED: Final = "_zeroshard_ignored"
"""The attribute that stores the parameter's name in the gradient of an ignored parameter."""


@final
class LocalNorms:
    """This rank's part of all norms; data that are equal at every step are created once.

    Args:
        slots: the slots of all parameters, by index.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots, self._count = [slot for slot in slots if slot.is_own], len(slots)
        self._whole = [slot for slot in slots if slot.is_whole]
        self._buckets = {id(slot.bucket): slot.bucket for slot in slots}.values()
        self._device = slots[0].bucket.device if slots else None
        self._known: dict[tuple[float, torch.dtype | None], Tensor] = {}
        """The norms of all ranks, by order and dtype, since gradients last changed."""
        self._counted = 0
        self._made: tuple[Any, Tensor, list[Tensor]] = None, torch.empty(0, device="cpu"), []
        """For a selection of parameters: its key, a buffer (parameters,), and the buffer's indices of each dtype."""

    def known(self, p: float, dtype: torch.dtype | None) -> Tensor | None:
        """Return norms that were kept; None after gradients have changed."""
        # Full gradients are plain tensors that clipping changes without a hook; torch counts the changes.
        keep_shown(self._whole)
        if self._count_changes() != self._counted:
            self.forget()
        return self._known.get((p, dtype))

    def keep(self, p: float, dtype: torch.dtype | None, total: Tensor) -> Tensor:
        """Keep the norms of all ranks until gradients change, and return them."""
        self._known[p, dtype], self._counted = total, self._count_changes()
        return total

    def forget(self) -> None:
        """Drop what was kept: gradients change."""
        self._known.clear()

    def _count_changes(self) -> int:
        return sum(version_of(one) for bucket in self._buckets for one in bucket.grads.tensors())

    def of(self, p: float, dtype: torch.dtype | None, *, is_behind: bool = False) -> Tensor:
        """Return (parameters,) fp64, which the next call overwrites: each gradient's sum of |x|^p over this rank's
        elements. Orders without a sum give the largest or smallest |x|, or the number of nonzero elements.

        Args:
            dtype: the dtype that elements are converted to first; at least fp32 for a sum.
            is_behind: whether ranks have not agreed yet on used parameters; then a gradient may be absent, with sum 0.
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
            # If each rank rounded its part to two bytes, the total norm would be wrong by more than one rounding.
            norms = torch.stack(
                foreach_norm(parts, p, dtype=torch.promote_types(held, dtype or torch.float32))
            ).double()
            out.index_copy_(0, where, (norms if p == 0 or abs(p) == float("inf") else norms**p).to(out.device))
        return out


def total_norms(rows: Tensor, p: float) -> Tensor:
    """Return (parameters,) the norms of whole gradients from results of `LocalNorms.of`, one row per rank."""
    if abs(p) == float("inf"):
        return rows.amax(0) if p > 0 else rows.amin(0)
    # Sequential additions in rank order; a sum over many rows would add them in groups.
    total = rows.cumsum(0)[-1]
    return total if p == 0 else total ** (1 / p)


def norms_of(slots: Sequence[Slot], p: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the norms of whole gradients, each 0-d, in `dtype` or the gradient's own. Collective: `Owner.norms`."""
    made: dict[tuple[int, torch.dtype], Sequence[Tensor] | Tensor] = {}
    norms: list[Tensor] = []
    for slot in slots:
        owner = slot.living_owner()
        key = id(owner), (dtype or slot.bucket.dtypes.grad).to_real()
        if key not in made:
            # A copy: the owner returns the same tensor for the next request.
            rounded = owner.norms(p, dtype).to(key[1], copy=True)
            made[key] = rounded.unbind() if len(slots) > 1 else rounded
        norms.append(made[key][slot.place])
    return norms


def refuse_ignored(what: str, grads: Sequence[Tensor], ours: Sequence[Tensor]) -> None:
    """Raise if a norm combines gradients of sharded parameters and of ignored parameters."""
    if len(grads) > len(ours) and (names := [name for g in grads if (name := vars(g).get(IGNORED))]):
        raise RuntimeError(
            f"{what} combines sharded gradients with the gradient of '{names[0]}', an ignored parameter "
            "(zs.shard(ignored=)). Each rank has its own gradient of an ignored parameter, so norms would differ "
            "between ranks. Clip sharded and ignored parameters in separate calls."
        )
