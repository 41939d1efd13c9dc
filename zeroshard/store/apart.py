"""Memory beside a device's, on the host and in files, for what this rank alone reads and the device has no room for.

Owns the copies between both. It must not know what is copied, nor which elements lie where (`table/cells.py`). On a
CPU both are one memory: then a copy changes no bit, and nothing waits.
"""

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import final

import torch

from zeroshard import devices
from zeroshard.store.ahead import Ahead, Waitable
from zeroshard.store.disk import BLOCK_BYTES, Disk, buffer_of
from zeroshard.store.stored import StoredTensor, is_aligned, is_stored
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


@final
class Buffer:
    """Staging memory, and the event of the last copy from it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.copied: devices.Mark | None = None


class Apart(ABC):
    """A memory for parameters between uses, and for master weights and optimizer states between updates.

    Copies to a device pass through two pinned buffers, whatever their size.

    Args:
        device: the device of the rank.
        cell: names the memory, and the size of the buffers.
        where: the rank, for messages.
    """

    def __init__(self, device: torch.device, cell: Cell, where: str = "") -> None:
        self.device, self.cell = device, cell
        self.disk: Disk | None = None
        """The file, if the memory is a file."""
        self.ahead = Ahead(device, where)
        """Copies to the device ahead of use."""
        self.is_alone = True
        """Whether no other rank takes part in gathers."""
        self._buffers: SimpleQueue[Buffer] | None = None
        self._lock = threading.Lock()

    @abstractmethod
    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return (numel,) of zeros in this memory."""

    def entry(self, masters: Tensor) -> Tensor:
        """Return the optimizer's entry for masters of `zeros`."""
        return masters

    @property
    def takes_time(self) -> bool:
        """Whether a thread copies values ahead of use; otherwise copies run immediately."""
        return self.device.type != "cpu"

    def brought(self, values: tuple[Tensor, Tensor] | None, begin: Callable[[], Waitable], name: str) -> Waitable:
        """Begin to copy parameters of a unit to the device, and start the gather after the copy.

        Args:
            values: target and source, as for `bring`; None if there is nothing to copy.
            begin: starts the gather; called in the order of these calls.
            name: the name of the unit.
        """
        copy = None if values is None else functools.partial(self.bring, *values)
        if self.takes_time:
            return self.ahead.begin(copy, begin, name)
        if copy is not None:
            try:
                copy()
            except Exception as error:
                raise self.ahead.failed(name, error) from error
        return begin()

    def bring(self, target: Tensor, source: Tensor) -> None:
        """Copy values of this memory to `target`, in the dtype of the target.

        If `target` is on a device, the calling thread waits for the copy of two pieces before.
        """
        if not self._is_far(target):
            target.copy_(source)
            return
        step = max(1, self._buffer_bytes // target.itemsize)
        for to, values in zip(target.split(step), source.split(step), strict=True):
            with self._buffer() as buffer:
                piece = buffer.memory[: to.nbytes].view(to.dtype)
                self._fill(piece, values)
                buffer.copied = self._launch(to, piece)

    def _is_far(self, target: Tensor) -> bool:
        return target.device.type != "cpu"

    def _fill(self, piece: Tensor, values: Tensor) -> None:
        piece.copy_(values)  # converted on the host, so that the bus carries the dtype of the device

    def _launch(self, target: Tensor, piece: Tensor) -> devices.Mark | None:
        """Launch the copy of a filled buffer."""
        target.copy_(piece, non_blocking=True)
        return devices.mark_on(target.device)

    @property
    def _buffer_bytes(self) -> int:
        return max(64, self.cell.staging_bytes // 2)

    def _make_buffer(self) -> Tensor:
        return devices.pinned(torch.empty(self._buffer_bytes, dtype=torch.uint8, device="meta"))

    @contextmanager
    def _buffer(self) -> Iterator[Buffer]:
        """Take a buffer, after the last copy from it; the program and the thread share both buffers."""
        with self._lock:
            if self._buffers is None:
                self._buffers = SimpleQueue()
                for _ in range(2):
                    self._buffers.put(Buffer(self._make_buffer()))
        buffer = self._buffers.get()
        try:
            if buffer.copied is not None:
                buffer.copied.synchronize()
            yield buffer
        finally:
            self._buffers.put(buffer)


@final
class HostApart(Apart):
    """Memory of the host."""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Apart`."""
        return torch.zeros(numel, dtype=dtype, device="cpu")


@final
class FileApart(Apart):
    """A file of this rank.

    Updates read and write the file in pieces (`update/streamed.py`). Parameters are read into one buffer while the copy
    from the other buffer runs.

    Raises:
        OSError: the folder does not exist, or this user cannot write to it.
    """

    def __init__(self, device: torch.device, cell: Cell, where: str = "") -> None:
        super().__init__(device, cell, where)
        self.disk = Disk(Path(cell.folder))
        self._reading = threading.Lock()

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Apart`."""
        assert self.disk is not None, "made with it"
        return StoredTensor(self.disk.array(numel, dtype), 0, numel)

    def entry(self, masters: Tensor) -> Tensor:
        """See `Apart`: a tensor of the same shape without values."""
        return torch.empty(1, dtype=masters.dtype, device="cpu").expand(masters.shape)

    @property
    def takes_time(self) -> bool:
        """See `Apart`: a disk takes time on a CPU, too.

        Several ranks on a CPU wait at once. A gather that starts later could wait for user code of another rank, which
        waits for this rank.
        """
        return self.device.type != "cpu" or self.is_alone

    def bring(self, target: Tensor, source: Tensor) -> None:
        """See `Apart`."""
        if not is_stored(source):
            super().bring(target, source)  # a piece of an update
        elif is_stored(target):
            target.copy_(source)
        elif is_aligned(source) and source.dtype == target.dtype:
            with self._reading:
                self._read(target, source)
        else:
            step = max(1, self.cell.staging_bytes // source.itemsize)
            for to, values in zip(target.split(step), source.split(step), strict=True):
                super().bring(to, values.clone())

    def _read(self, target: Tensor, source: Tensor) -> None:
        """Read values through the buffers, one piece ahead of the copies."""
        step = self._buffer_bytes // BLOCK_BYTES * BLOCK_BYTES // source.itemsize
        pieces = [*zip(target.split(step), source.split(step), strict=True)]
        with ExitStack() as before:
            read = self._begin_read(before, pieces[0][1])
            for place, (to, _) in enumerate(pieces):
                with before.pop_all():
                    buffer, move = read
                    if place + 1 < len(pieces):
                        read = self._begin_read(before, pieces[place + 1][1])
                    self._await(move)
                    buffer.copied = self._launch(to, buffer.memory[: to.nbytes].view(to.dtype))

    def _begin_read(self, held: ExitStack, values: Tensor) -> "tuple[Buffer, Future[None]]":
        """Begin to read a piece into a buffer, which `held` returns when the read is over."""
        assert self.disk is not None, "made with it"
        assert isinstance(values, StoredTensor), "a piece of a stored tensor"
        buffer = held.enter_context(self._buffer())
        move = self.disk.submit(values.array.move, values.start, values.start + len(values), buffer.memory, False)
        held.callback(wait, [move])
        return buffer, move

    def _await(self, move: "Future[None]") -> None:
        move.result()

    def _make_buffer(self) -> Tensor:
        # Direct reads need memory at the start of a page.
        pinned = super()._make_buffer() if self.device.type != "cpu" else None
        is_usable = pinned is not None and pinned.data_ptr() % BLOCK_BYTES == 0
        return pinned if pinned is not None and is_usable else buffer_of(self._buffer_bytes)


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
