"""How long a rank waits for other places of a pipe, of the time of a step.

Owns what counts as a wait. Moments are those of the host where the host computes, and of the stream that computes on a
device, whose host does not wait for messages (`devices.moment`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch

from zeroshard.devices import Moment, moment, seconds_between

__all__ = ["Waits"]


@final
class Waits:
    """The waits of one rank in the last step of its pipe.

    Args:
        device: where the rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: list[Moment] = []
        self._waits: list[tuple[Moment, Moment]] = []

    def begin(self) -> None:
        """Begin a step."""
        self._ends, self._waits = [moment(self._device)], []

    def end(self) -> None:
        """End the step."""
        self._ends.append(moment(self._device))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what runs inside as a wait."""
        before = moment(self._device)
        yield
        self._waits.append((before, moment(self._device)))

    def part(self) -> float | None:
        """Return the part of the last step, from 0 to 1, that waits took; None unless a step has ended.

        Waits for the device.
        """
        if len(self._ends) < 2:
            return None
        return sum(seconds_between(*one) for one in self._waits) / seconds_between(*self._ends)
