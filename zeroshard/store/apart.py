"""Memory beside a device's, on the host and in files, for what this rank alone reads and the device has no room for.

Owns the copies between both. It must not know what is copied, nor which elements lie where (`table/cells.py`). On a
CPU both are one memory: then a copy changes no bit, and nothing waits.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final

import torch

from zeroshard import devices
from zeroshard.store.disk import Disk
from zeroshard.store.stored import StoredTensor, is_stored
from zeroshard.table.cells import Cell

__all__ = ["Apart", "Arrival", "FileApart", "HostApart", "Landing", "beside"]

Tensor = torch.Tensor


def beside(parts: Sequence[Tensor], values: Tensor, start: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return the stretch of a flat tensor that `values` stand for, part by part, each with its values.

    Args:
        parts: what the flat tensor lies in, one behind the other.
        start: its element that the first value is for.
    """
    found, first = [], 0
    for part in parts:
        a, b = max(first, start), min(first + part.numel(), start + values.numel())
        if a < b:
            found.append((part[a - first : b - first], values[a - start : b - start]))
        first += part.numel()
    return found


class Apart(ABC):
    """A memory for parameters between uses, and for master values and optimizer states between updates.

    What goes to a device passes through two pinned buffers, whatever its size.

    Args:
        device: the rank's.
        cell: which memory, and how much of what the device reads everything passes through in pieces.
    """

    def __init__(self, device: torch.device, cell: Cell) -> None:
        self.device, self.cell = device, cell
        self.disk: Disk | None = None
        """The file, where it is one."""
        self._buffers: list[tuple[Tensor, devices.Mark | None]] = []

    @abstractmethod
    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return (numel,) of zeros in this memory."""

    def entry(self, masters: Tensor) -> Tensor:
        """Return what an optimizer holds for masters of `zeros`."""
        return masters

    def bring(self, target: Tensor, source: Tensor) -> None:
        """Write values of this memory to `target` on the device, in its dtype.

        The host waits for copies that were begun two pieces ago.
        """
        if target.device.type == "cpu":
            target.copy_(source)
            return
        if not self._buffers:
            like = torch.empty(max(64, self.cell.staging_bytes // 2), dtype=torch.uint8, device="meta")
            self._buffers = [(devices.pinned(like), None), (devices.pinned(like), None)]
        step = max(1, self._buffers[0][0].numel() // target.itemsize)
        for to, values in zip(target.split(step), source.split(step), strict=True):
            buffer, event = self._buffers.pop(0)
            if event is not None:
                event.synchronize()
            piece = buffer[: to.nbytes].view(to.dtype)
            piece.copy_(values)  # rounded here, so that the bus moves what the device keeps
            to.copy_(piece, non_blocking=True)
            self._buffers.append((buffer, devices.mark(target.device)))


@final
class Arrival:
    """Values of another memory on their way to the device, ahead of their use: begun, then waited for.

    Args:
        apart: the memory.
        target: where they come to lie, on the device.
        source: where they lie.
    """

    def __init__(self, apart: Apart, target: Tensor, source: Tensor) -> None:
        self._apart, self._target, self._source = apart, target, source
        self._event: devices.Mark | None = None

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Begin; what is begun inside, such as the gather that reads them, follows them without a wait."""
        with devices.ahead(self._target.device):
            self._apart.bring(self._target, self._source)
            yield
            self._event = None if self._target.device.type == "cpu" else devices.mark(self._target.device)

    def wait(self) -> None:
        """Have what the device is told next follow them."""
        event, self._event = self._event, None
        if event is not None:
            event.wait()


@final
class HostApart(Apart):
    """Memory of the host."""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Apart`."""
        return torch.zeros(numel, dtype=dtype)


@final
class FileApart(Apart):
    """A file of this rank; updates read and write it in pieces (`state/streamed.py`).

    Raises:
        OSError: the folder is not there, or cannot be written to.
    """

    def __init__(self, device: torch.device, cell: Cell) -> None:
        super().__init__(device, cell)
        self.disk = Disk(Path(cell.folder))

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Apart`."""
        assert self.disk is not None, "made with it"
        return StoredTensor(self.disk.array(numel, dtype), 0, numel)

    def entry(self, masters: Tensor) -> Tensor:
        """See `Apart`: a tensor of their shape that holds nothing."""
        return torch.empty(1, dtype=masters.dtype).expand(masters.shape)

    def bring(self, target: Tensor, source: Tensor) -> None:
        """See `Apart`."""
        if not is_stored(source):
            super().bring(target, source)  # a piece of an update
            return
        step = max(1, self.cell.staging_bytes // source.itemsize)
        for to, values in zip(target.split(step), source.split(step), strict=True):
            super().bring(to, values.clone())


@final
class Landing:
    """Gradients that a device leaves on the host: under way until `wait()`.

    All copies are on the stream of their sums, so that no buffer is used again before it was read. What lies on the
    host already is added to on the device, in whose order that is right without a wait of the host.

    Args:
        device: the rank's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_far = device, device.type != "cpu"
        self._event: devices.Mark | None = None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return (numel,) of the host, with any content."""
        empty = torch.empty(numel, dtype=dtype, device="meta" if self._is_far else "cpu")
        return devices.pinned(empty) if self._is_far else empty

    def put(self, target: Tensor, values: Tensor) -> None:
        """Begin to write values of the device to the host."""
        target.copy_(values, non_blocking=True)
        self._event = devices.mark(self._device) if self._is_far else None

    def add(self, target: Tensor, values: Tensor, scale: float = 1.0) -> None:
        """Begin to add `scale` times values of the device to what lies on the host."""
        total = target.to(self._device, non_blocking=True).add_(values, alpha=scale)
        if self._is_far:
            self.put(target, total)

    @contextmanager
    def unread(self) -> Iterator[devices.Mark | None]:
        """Let gradients be taken inside without a wait; yields what has to be waited for before they are read."""
        event, self._event = self._event, None
        try:
            yield event
        finally:
            self._event = event

    def wait(self) -> None:
        """Return when all that was begun is there."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
