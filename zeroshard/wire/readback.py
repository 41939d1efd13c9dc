"""Numbers of a device on their way to the host.

Owns the copy to pinned memory and the event behind it. It must not know what the numbers mean. Tests hand in another
class with the same methods, whose event passes late.
"""

from typing import final

import torch

from zeroshard import devices

__all__ = ["Readback"]


@final
class Readback:
    """A copy of a small tensor to the host, under way when it is made; the host waits only in `read`.

    What the current stream is told later does not delay it: the event is recorded here.

    Args:
        values: on any device; they may change once this is made.
    """

    def __init__(self, values: torch.Tensor) -> None:
        is_apart = values.device.type != "cpu"
        # A copy to memory that is not pinned would make the host wait here.
        self._copy = devices.pinned(values) if is_apart else torch.empty_like(values)
        self._copy.copy_(values, non_blocking=True)
        self._event = devices.mark(values.device) if is_apart else None

    def read(self) -> list[float]:
        """Wait for the copy, and return its numbers."""
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._copy.tolist()
        return found
