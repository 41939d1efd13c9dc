"""The pool of constant buffers (C_B in the paper): flat tensors for gradients and messages.

Owns the buffers. It must not know their purpose. `table/pool.py` chooses a buffer, also for the planner.
"""

from collections import defaultdict
from typing import final

import torch

from zeroshard.table.pool import Buffer, Buffers
from zeroshard.table.trace import Ledger
from zeroshard.wire.memory import Memory

__all__ = ["Pool"]

Tensor = torch.Tensor


@final
class Pool:
    """Reusable flat buffers, which keep a step from touching fresh pages (C_B in the paper).

    Units of similar size share buffers of the largest. Autograd must not save a tensor of the pool: a saved tensor
    would see the next content of the buffer.

    Args:
        keeps: `Wire.keeps_buffers`.
    """

    def __init__(self, memory: Memory, ledger: Ledger, *, keeps: bool) -> None:
        self.memory, self._ledger, self.keeps = memory, ledger, keeps
        self._buffers: dict[torch.device, Buffers] = defaultdict(Buffers)
        self._taken: dict[int, Buffer | None] = {}
        """The buffers in use, by the address of the taken part; None for adopted tensors."""

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer (numel,) with undefined content."""
        if not self.keeps:
            self.adopt(fresh := torch.empty(numel, dtype=dtype, device=device))
            return fresh
        buffer, gone = self._buffers[device].take(numel, dtype)
        if gone is not None:
            self._ledger.add("transient", -gone.memory.nbytes)
            self.memory.give_back(gone.memory)
            gone.memory = None  # before the new memory is taken
        if buffer.memory is None:
            buffer.memory = self.memory.zeros(numel, dtype, device)
            self._ledger.add("transient", buffer.memory.nbytes)
        part: Tensor = buffer.memory[:numel]
        self._taken[part.data_ptr()] = buffer
        return part

    def adopt(self, tensor: Tensor) -> None:
        """Count a tensor as a buffer in use; `give` drops it."""
        self._taken[tensor.data_ptr()] = None
        self._ledger.add("transient", tensor.nbytes)

    def give(self, part: Tensor) -> None:
        """Return a buffer to the pool; the caller must not use it afterwards."""
        if (buffer := self._taken.pop(part.data_ptr())) is not None:
            self._buffers[part.device].give(buffer)
        else:
            self._ledger.add("transient", -part.nbytes)
