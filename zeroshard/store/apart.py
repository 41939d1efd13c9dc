"""Memory beside a device's, on the host and in files, for what this rank alone reads and the device has no room for.

Owns the copies between both. It must not know what is copied, nor which elements lie where (`table/cells.py`). On a
CPU both are one memory: then a copy changes no bit, and nothing waits.
"""

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final

import torch

from zeroshard import devices
from zeroshard.store.ahead import Ahead, Waitable
from zeroshard.store.disk import Disk
from zeroshard.store.stored import StoredTensor, is_stored
from zeroshard.table.cells import Cell

__all__ = ["Apart", "FileApart", "HostApart", "Landing", "beside"]

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
        where: the rank, for messages.
    """

    def __init__(self, device: torch.device, cell: Cell, where: str = "") -> None:
        self.device, self.cell = device, cell
        self.disk: Disk | None = None
        """The file, where it is one."""
        self.ahead = Ahead(device, where)
        """Copies to the device ahead of use."""
        self._buffers: list[tuple[Tensor, devices.Mark | None]] = []
        self._lock = threading.Lock()
        """Of the buffers: an update may bring values while the thread does."""

    @abstractmethod
    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return (numel,) of zeros in this memory."""

    def entry(self, masters: Tensor) -> Tensor:
        """Return what an optimizer holds for masters of `zeros`."""
        return masters

    @property
    def takes_time(self) -> bool:
        """Whether values come to the device beside what the program does, and not at once."""
        return self.device.type != "cpu"

    def brought(self, values: tuple[Tensor, Tensor] | None, begin: Callable[[], Waitable], name: str) -> Waitable:
        """Begin to bring values ahead of use, and behind that what reads them.

        Args:
            values: where they come to lie and where they lie, as `bring` takes them; None for none.
            begin: begins what reads them; called in the order of these calls.
            name: of the unit whose parameters they are.
        """
        copy = None if values is None else functools.partial(self.bring, *values)
        if self.takes_time:
            return self.ahead.begin(copy, begin, name)
        if copy is not None:
            copy()
        return begin()

    def bring(self, target: Tensor, source: Tensor) -> None:
        """Write values of this memory to `target` on the device, in its dtype.

        The thread that calls waits for copies that were begun two pieces ago.
        """
        if target.device.type == "cpu":
            target.copy_(source)
            return
        step = max(1, self._buffer_bytes // target.itemsize)
        for to, values in zip(target.split(step), source.split(step), strict=True):
            with self._lock:
                buffer, event = self._free_buffer()
                if event is not None:
                    event.synchronize()
                piece = buffer[: to.nbytes].view(to.dtype)
                piece.copy_(values)  # rounded here, so that the bus moves what the device keeps
                to.copy_(piece, non_blocking=True)
                self._buffers.append((buffer, devices.mark(target.device)))

    @property
    def _buffer_bytes(self) -> int:
        return max(64, self.cell.staging_bytes // 2)

    def _free_buffer(self) -> tuple[Tensor, devices.Mark | None]:
        """Return the buffer that was used first, and the copy from it that may be under way."""
        if not self._buffers:
            like = torch.empty(self._buffer_bytes, dtype=torch.uint8, device="meta")
            self._buffers = [(devices.pinned(like), None), (devices.pinned(like), None)]
        return self._buffers.pop(0)


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

    def __init__(self, device: torch.device, cell: Cell, where: str = "") -> None:
        super().__init__(device, cell, where)
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
