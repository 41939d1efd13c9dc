"""The pool of constant buffers (C_B in the paper): flat tensors for gradients on their way and for messages.

Owns what is taken and given back. It must not know what for. `table/pool.py` chooses a buffer, for the planner, too.
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
    """Flat buffers that are used again and again, so that a step touches no fresh pages (C_B in the paper).

    Units of about one size share buffers of the largest. Only for tensors that autograd never saves: a saved tensor
    would see its buffer's next content.
    """

    def __init__(self, memory: Memory, ledger: Ledger) -> None:
        self.memory, self._ledger = memory, ledger
        self._buffers: dict[torch.device, Buffers] = defaultdict(Buffers)
        self._taken: dict[int, Buffer | None] = {}
        """The buffers in use, by the address of the part that was taken; None for what was adopted."""

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return (numel,) with any content."""
        buffer, gone = self._buffers[device].take(numel, dtype)
        if gone is not None:
            self._ledger.add("transient", -gone.memory.nbytes)
            self.memory.give_back(gone.memory)
        if buffer.memory is None:
            buffer.memory = self.memory.zeros(numel, dtype, device)
            self._ledger.add("transient", buffer.memory.nbytes)
        part: Tensor = buffer.memory[:numel]
        self._taken[part.data_ptr()] = buffer
        return part

    def adopt(self, tensor: Tensor) -> None:
        """Count a tensor as a buffer in use; once given, it is gone."""
        self._taken[tensor.data_ptr()] = None
        self._ledger.add("transient", tensor.nbytes)

    def give(self, part: Tensor) -> None:
        """Take a buffer back; the caller must not use it any more."""
        if (buffer := self._taken.pop(part.data_ptr())) is not None:
            self._buffers[part.device].give(buffer)
        else:
            self._ledger.add("transient", -part.nbytes)
