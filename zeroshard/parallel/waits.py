"""How long a rank waits for other places of a pipe, of the time of a step.

Owns the clock: of the host where the host computes, and of the stream that computes on a device, whose host does not
wait for messages.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

__all__ = ["Waits"]


@final
class Waits:
    """The waits of one rank in the last step of its pipe.

    Args:
        device: where the rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_on_host = device.type == "cpu"
        self._whole: list[Any] = []
        self._waits: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Begin a step."""
        self._whole, self._waits = [self._now()], []

    def end(self) -> None:
        """End the step."""
        self._whole.append(self._now())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what runs inside as a wait."""
        before = self._now()
        yield
        self._waits.append((before, self._now()))

    def part(self) -> float | None:
        """Return the part of the last step, from 0 to 1, that waits took; None before the end of a step.

        Waits for the device.
        """
        if len(self._whole) < 2:
            return None
        return sum(self._between(*one) for one in self._waits) / self._between(*self._whole)

    def _now(self) -> Any:
        if self._is_on_host:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, stop: Any) -> float:
        """Return the time between two moments, in a unit of the clock."""
        if self._is_on_host:
            return float(stop - start)
        stop.synchronize()
        return float(start.elapsed_time(stop))
