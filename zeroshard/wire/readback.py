"""Asynchronous copies of small tensors from a device to the host.

Owns the copy to pinned memory and its event. It must not know what the numbers mean. Tests substitute a class with the
same methods, whose event completes late.
"""

from typing import final

import torch

from zeroshard import devices

__all__ = ["Readback"]


@final
class Readback:
    """A copy of a small tensor to the host that starts immediately; the host waits only in `read`.

    Later work of the current stream does not delay the copy: the event is recorded here.

    Args:
        values: a tensor on any device, which may change after the constructor.
    """

    def __init__(self, values: torch.Tensor) -> None:
        is_apart = values.device.type != "cpu"
        # A copy to pageable memory would block the host here.
        self._copy = devices.pinned(values.shape, values.dtype) if is_apart else torch.empty_like(values)
        self._copy.copy_(values, non_blocking=True)
        self._event = devices.mark(values.device) if is_apart else None

    def read(self) -> list[float]:
        """Wait for the copy, and return the numbers."""
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._copy.tolist()
        return found
