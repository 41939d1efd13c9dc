"""Where a bucket's column is between uses: on the device, in memory of the host, or in a file of this rank.

Owns the copies between them: nothing else asks which of them a memory is. It must not know what is copied, nor which
buckets are where (`table/cells.py`). On a CPU device and host are one memory: a copy changes no bit, and nothing waits.
"""

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Final, final

import torch

from zeroshard import devices
from zeroshard.store import file_calls
from zeroshard.store.ahead import Ahead, Waitable
from zeroshard.store.bus import carry
from zeroshard.store.disk import BLOCK_BYTES, Disk, buffer_of
from zeroshard.store.landing import Buffer, DeviceLanding, HostLanding, Landing, Leaving, Tell
from zeroshard.store.stored import StoredTensor, is_aligned, is_stored
from zeroshard.table.cells import DEVICE, Cell, Place, Residency

__all__ = ["DeviceStore", "FarStore", "FileStore", "HostStore", "MEMORIES", "Store", "Stores", "moves"]

Tensor = torch.Tensor

IN_MEMORY: Final = ("tmpfs", "ramfs")


def moves(target: Tensor, source: Tensor) -> Iterator[str]:
    """Yield the kinds of events of a copy from one memory to another; none within a memory."""
    if is_stored(target) is not is_stored(source):
        yield "read" if is_stored(source) else "write"
    if target.device != source.device:
        yield "copy in" if source.device.type == "cpu" else "copy out"


class Store(ABC):
    """A memory for parameters between uses, and for master weights and optimizer states between updates.

    Args:
        device: the device of the rank.
        place: the name of the memory, and the size of the staging buffer.
        where: the rank, for messages.
        is_alone: whether no other rank takes part in gathers.
    """

    is_filed = False
    """Whether updates read and write this memory in pieces."""

    def __init__(self, device: torch.device, place: Place, where: str = "", *, is_alone: bool = True) -> None:
        self.device, self.place, self._is_alone = device, place, is_alone

    @abstractmethod
    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return (numel,) of zeros in this memory."""

    def shard(self, here: Tensor, numel: int) -> Tensor:
        """Return memory for a shard of `numel` parameters; `here` is memory for those that stay on the device."""
        return self.zeros(numel, here.dtype)

    def entry(self, masters: Tensor) -> Tensor:
        """Return the optimizer's entry for masters of `zeros`."""
        return masters

    def check_entries(self, what: str) -> None:  # noqa: B027 (most entries are the masters)
        """Raise if entries have no values."""

    @abstractmethod
    def brought(self, target: Tensor, source: Tensor, begin: Callable[[], Waitable], name: str) -> Waitable:
        """Begin to copy parameters of this memory to the device, and start their gather after the copy.

        Args:
            begin: starts the gather; called in the order of these calls.
            name: the name of the unit.
        """

    @abstractmethod
    def bring(self, target: Tensor, source: Tensor) -> None:
        """Copy values of this memory to `target`, in the dtype of the target."""

    @abstractmethod
    def landing(self, tell: Tell) -> Landing:
        """Return what puts the gradients of a bucket into this memory; it tells of copies, by kind and bytes."""

    def reserve(self, sizes: Sequence[int]) -> None:
        """Take the room for tensors of these bytes, if the memory can.

        Raises:
            OSError: there is too little room.
        """
        return

    def warning(self) -> str:
        """Return what is wrong with this memory; "" if nothing is."""
        return ""


@final
class DeviceStore(Store):
    """The memory of the device.

    Args:
        ahead: the order of the gathers of a model that has parameters elsewhere.
    """

    def __init__(self, device: torch.device, ahead: "FarStore | None" = None) -> None:
        super().__init__(device, Place())
        self._ahead = ahead

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Store`."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def shard(self, here: Tensor, numel: int) -> Tensor:
        """See `Store`."""
        return here

    def brought(self, target: Tensor, source: Tensor, begin: Callable[[], Waitable], name: str) -> Waitable:
        """See `Store`: there is nothing to copy, but gathers keep their order."""
        return begin() if self._ahead is None else self._ahead.begin(None, begin, name)

    def bring(self, target: Tensor, source: Tensor) -> None:
        """See `Store`."""
        target.copy_(source)

    def landing(self, tell: Tell) -> Landing:
        """See `Store`."""
        return DeviceLanding(self.device)


class FarStore(Store):
    """A memory that the device does not read.

    Copies to a device pass through two pinned buffers, whatever their size.
    """

    def __init__(self, device: torch.device, place: Place, where: str = "", *, is_alone: bool = True) -> None:
        super().__init__(device, place, where, is_alone=is_alone)
        self.ahead = Ahead(device, where)
        """Copies to the device ahead of use."""
        self._leaving = Leaving(device, self._buffer_bytes)
        self._buffers: SimpleQueue[Buffer] | None = None
        self._lock = threading.Lock()

    @property
    def takes_time(self) -> bool:
        """Whether a thread copies values ahead of use; otherwise copies run immediately."""
        return self.device.type != "cpu"

    def brought(self, target: Tensor, source: Tensor, begin: Callable[[], Waitable], name: str) -> Waitable:
        """See `Store`."""
        return self.begin(functools.partial(self.bring, target, source), begin, name)

    def begin(self, copy: Callable[[], None] | None, begin: Callable[[], Waitable], name: str) -> Waitable:
        """Begin a copy to the device, if there is one, and start a gather after it."""
        if self.takes_time:
            return self.ahead.begin(copy, begin, name)
        if copy is not None:
            try:
                copy()
            except Exception as error:
                raise self.ahead.failed(name, error) from error
        return begin()

    def bring(self, target: Tensor, source: Tensor) -> None:
        """See `Store`; if `target` is on a device, the calling thread waits for the copy of two pieces before."""
        if not self._is_far(target):
            target.copy_(source)
            return
        step = max(1, self._buffer_bytes // target.itemsize)
        for to, values in zip(target.split(step), source.split(step), strict=True):
            with self._buffer() as buffer:
                piece = buffer.memory[: to.nbytes].view(to.dtype)
                self._fill(piece, values)
                buffer.copied = self._launch(to, piece)

    def landing(self, tell: Tell) -> Landing:
        """See `Store`: gradients do not go to files."""
        return HostLanding(self.device, tell, self._leaving)

    def _is_far(self, target: Tensor) -> bool:
        return target.device.type != "cpu"

    def _fill(self, piece: Tensor, values: Tensor) -> None:
        piece.copy_(values)  # converted on the host, so that the bus carries the dtype of the device

    def _launch(self, target: Tensor, piece: Tensor) -> devices.Mark | None:
        """Launch the copy of a filled buffer."""
        return carry(target.device, "back", target, piece)

    @property
    def _buffer_bytes(self) -> int:
        return max(64, self.place.staging_bytes // 2)

    def _make_buffer(self) -> Tensor:
        return devices.pinned((self._buffer_bytes,), torch.uint8)

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
class HostStore(FarStore):
    """Memory of the host."""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Store`."""
        return torch.zeros(numel, dtype=dtype, device="cpu")


@final
class FileStore(FarStore):
    """A file of this rank.

    Updates read and write the file in pieces (`update/streamed.py`). Parameters are read into one buffer while the copy
    from the other buffer runs.

    Raises:
        OSError: the folder does not exist, or this user cannot write to it.
    """

    is_filed = True

    def __init__(self, device: torch.device, place: Place, where: str = "", *, is_alone: bool = True) -> None:
        super().__init__(device, place, where, is_alone=is_alone)
        self.disk = Disk(Path(place.folder))
        self._reading = threading.Lock()

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `Store`."""
        return StoredTensor(self.disk.array(numel, dtype), 0, numel)

    def reserve(self, sizes: Sequence[int]) -> None:
        """See `Store`; each tensor is an array of whole blocks."""
        self.disk.reserve(sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes))

    def warning(self) -> str:
        """See `Store`."""
        if (kind := file_calls.kind_of(self.disk.folder)) not in IN_MEMORY:
            return ""
        return f"a {kind}, whose files lie in memory of the host. Give a folder on a disk, or write offload='host'."

    def entry(self, masters: Tensor) -> Tensor:
        """See `Store`: a tensor of the same shape without values, which shows in what is computed from it."""
        return torch.full((1,), float("nan"), dtype=masters.dtype, device="cpu").expand(masters.shape)

    def check_entries(self, what: str) -> None:
        """See `Store`.

        Raises:
            RuntimeError: the values are in the file.
        """
        raise RuntimeError(
            f"{what} are in a file. Read and write parameters in `with zero.gathered(writeback=True):`, on every rank, "
            "instead."
        )

    @property
    def takes_time(self) -> bool:
        """See `Store`: a disk takes time on a CPU, too.

        Several ranks on a CPU wait at once. A gather that starts later could wait for user code of another rank, which
        waits for this rank.
        """
        return self.device.type != "cpu" or self._is_alone

    def bring(self, target: Tensor, source: Tensor) -> None:
        """See `Store`."""
        if not is_stored(source):
            super().bring(target, source)  # a piece of an update
        elif is_stored(target):
            target.copy_(source)
        elif is_aligned(source) and source.dtype == target.dtype:
            with self._reading:
                self._read(target, source)
        else:
            step = max(1, self.place.staging_bytes // source.itemsize)
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


MEMORIES: Mapping[str, type[FarStore]] = MappingProxyType({"host": HostStore, "file": FileStore})
"""The memories besides the device's, by the name in a cell."""


@final
class Stores:
    """The memories of a model.

    Args:
        row: of the model.

    Raises:
        ValueError: a file cannot be created.
    """

    def __init__(self, row: Residency, device: torch.device, where: str = "", *, is_alone: bool = True) -> None:
        self.far: dict[str, FarStore] = {}
        """Those besides the device's, by name."""
        for place in (row.states.place, row.parameters.place, row.gradients.place):
            if place.memory in MEMORIES and place.memory not in self.far:
                try:
                    self.far[place.memory] = MEMORIES[place.memory](device, place, where, is_alone=is_alone)
                except OSError as error:
                    raise ValueError(
                        f"offload to '{place.folder}': no file can be made there ({error}). Give a folder that exists, "
                        "on a disk of this host, in which this user may write."
                    ) from error
        self.home = self.far.get(row.parameters.memory)
        """The memory of offloaded parameters; None if no rank has any."""
        self._by_name: dict[str, Store] = {**self.far, DEVICE: DeviceStore(device, self.home)}

    @property
    def filed(self) -> FileStore | None:
        """The memory that updates read and write in pieces; None without one."""
        return next((one for one in self.far.values() if isinstance(one, FileStore)), None)

    def of(self, cell: Cell) -> Store:
        """Return the memory of a cell."""
        return self._by_name[cell.memory]
