"""Gradients of a single rank, which stay in autograd's tensors, since there is no sum over ranks.

Owns that memory, and the sums that detect values that are not finite. Read `core/grads.py` first ("the life of a
gradient").
"""

from typing import final

import torch

from zeroshard.core.grads import Gradients, Places
from zeroshard.core.states import Own, Scope, Sum
from zeroshard.store.landing import Landing
from zeroshard.table.settings import HOT_NUMEL
from zeroshard.table.spec import BucketSpec
from zeroshard.table.trace import Ledger

__all__ = ["LooseGradients"]

Tensor = torch.Tensor

# Python looks up an enum's member at each use, which is slow in models of a thousand small parameters.
NONE, LOCAL = Own.NONE, Own.LOCAL
STALE, USED = Sum.STALE, Sum.USED


@final
class LooseGradients(Gradients):
    """Gradients of a single rank, which stay in autograd's tensors."""

    def __init__(self, spec: BucketSpec, places: Places, dtype: torch.dtype, ledger: Ledger, landing: Landing) -> None:
        super().__init__(spec, places, dtype, ledger, landing)
        self._held: list[Tensor | None] = [None] * len(self.own)
        self._hot: dict[int, Tensor | None] = {}
        """Sums of gradients that user code cannot have changed; None for gradients that user code has read."""

    def land(self, index: int, grad: Tensor, scale: float = 1.0) -> None:
        """See `Gradients`."""
        held = self._held[index]
        if held is not None:
            self.landing.add(held, grad, scale)
        else:
            held = self._hold(index, grad, scale)
        if held.numel() >= HOT_NUMEL and self._hot.get(index, held) is not None:
            self._hot[index] = self.landing.sum(held)
        self.own[index] = LOCAL

    def _hold(self, index: int, grad: Tensor, scale: float = 1.0, *, is_ours: bool = True) -> Tensor:
        """Hold a gradient, in its own memory if that `is_ours` and has the layout of held gradients."""
        places, is_taken = self._places, is_ours and self._places.is_alone(index, grad)
        form = places.shapes[index], places.strides[index]
        self._held[index] = held = self.landing.keep(grad, self.dtype, scale, form, is_taken=is_taken).detach()
        self.landing.count(self._ledger, held.nbytes)
        return held

    def view(self, index: int) -> Tensor:
        """See `Gradients`."""
        held = self._held[index]
        assert held is not None, "a gradient has a state but no tensor"
        self._hot[index] = None
        self.landing.wait()
        return held

    def part(self, index: int) -> Tensor:
        """See `Gradients`."""
        return (view := self.view(index)).as_strided((view.numel(),), (1,))

    own_part = part

    def parts(self, index: int) -> list[Tensor]:
        """See `Gradients`."""
        return [self.part(index)]

    def put_shard(self, full: Tensor) -> None:
        """See `Gradients`."""
        for index, view in enumerate(self._places.views_of(full)):
            if self._held[index] is not None:
                view.copy_(self.view(index))

    def tensors(self) -> list[Tensor]:
        """See `Gradients`."""
        return [held for held in self._held if held is not None]

    def probes(self) -> list[Tensor]:
        """See `Gradients`."""
        hot = ((self._hot.get(index), held) for index, held in enumerate(self._held) if held is not None)
        return [held if total is None else total for total, held in hot]

    def set_reduced(self, index: int, value: Tensor) -> None:
        """See `Gradients`."""
        self.clear(index)
        self._hold(index, value, is_ours=False)
        self.sums[index], self.is_suspect = USED, True

    def clear(self, index: int) -> None:
        """See `Gradients`."""
        self.own[index], self.sums[index] = NONE, STALE
        self._hot.pop(index, None)
        held, self._held[index] = self._held[index], None
        self.landing.count(self._ledger, 0 if held is None else -held.nbytes)
        if not self.has_any:
            self.scope, self.is_suspect = Scope.ALL, False

    @property
    def nbytes(self) -> tuple[int, int]:
        """See `Gradients`."""
        return sum(held.nbytes for held in self._held if held is not None), 0
