"""Memory of flat tensors: private to this process, or shared by the ranks of one host.

Owns anonymous files (memfd) and their mappings. It must not know their content, nor when another rank may read it:
`wire/host.py` orders reads, and `core/buffer.py` chooses the memory of each tensor.

Note: nothing to clean up
    The files are in memory and have no name; the kernel frees them with the last process that maps them, however it
    ends. Another rank opens a file as /proc/PID/fd/N. If that is impossible (another host, user or container, or
    another system than Linux), `join` returns False, and ranks use messages instead.
Note: the common file
    Gathered parameters are stored once per host, in a file that all ranks map. Each rank writes its own shard through a
    shared mapping, and reads all shards through a private mapping: it sees the writes of the others, but a page that it
    writes itself becomes private until it is dropped. So a change in place stays on this rank, and disappears with the
    release, as in private memory.
Note: forked children
    A shared mapping stays shared over a fork, so a DataLoader worker that writes to a parameter would change the
    training of all ranks. Each child replaces its shared mappings with private mappings of the same files at the same
    addresses. It sees the writes of the ranks, also after the fork, until it writes to a page, which then becomes
    private.
"""

import ctypes
import functools
import math
import mmap
import os
import secrets
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, final

import torch

from zeroshard.table.spec import Range
from zeroshard.watch.process import tell_forks
from zeroshard.wire.board import BOARD_BYTES, Board, is_supported

__all__ = ["HostMemory", "Memory", "OwnMemory"]

Tensor = torch.Tensor

SLAB_BYTES: Final = 256 << 20
"""Minimum bytes of a private mapping: the kernel may count each fully as memory of the process."""
MAP_FIXED: Final = 0x10
MAP_NORESERVE: Final = 0x4000
"""Constants of Linux on x86-64; Python has no name for the first."""


class Memory(ABC):
    """The interface of memory for buckets and pools."""

    is_shared: bool
    """Whether other ranks read this memory in place."""

    @abstractmethod
    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros (numel,) for the lifetime of the model."""

    def give_back(self, tensor: Tensor) -> None:
        """Free the memory of a tensor from `zeros`, which must not be read afterwards."""
        return  # freed with the tensor

    @abstractmethod
    def home(self, numel: int, bounds: Range, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return zeros (numel,) that can be closed and opened again, and their shard (stop - start,), which stays."""

    @abstractmethod
    def open(self, full: Tensor, start: int, shard: Tensor) -> None:
        """Allocate the memory of `full`, with this rank's shard in place at element `start`."""

    @abstractmethod
    def close(self, full: Tensor) -> bool:
        """Free the memory of `full`; views of it stay. Return False if the memory cannot be freed."""

    def rest(self, full: Tensor) -> None:
        """Drop the pages of an open home while it is unused; the next read restores the same content."""
        return  # this memory has the only copy of the values


@final
class OwnMemory(Memory):
    """Private memory of this process, on any device."""

    is_shared = False

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Memory`."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def home(self, numel: int, bounds: Range, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """See `Memory`."""
        return self.zeros(numel, dtype, device), self.zeros(bounds[1] - bounds[0], dtype, device)

    def open(self, full: Tensor, start: int, shard: Tensor) -> None:
        """See `Memory`."""
        storage = full.untyped_storage()
        # torch would move memory that was not released, and other tensors may read it.
        if storage.resizable() and storage.nbytes() < full.nbytes:
            storage.resize_(full.nbytes)
        full[start : start + shard.numel()] = shard

    def close(self, full: Tensor) -> bool:
        """See `Memory`."""
        storage = full.untyped_storage()
        # A numpy array shares the memory, and torch does not know its lifetime.
        if storage.resizable():
            storage.resize_(0)
        return storage.resizable()


@final
class HostMemory(Memory):
    """Shared CPU memory of the ranks of one replica, all on this host.

    Create an object on each rank, exchange the cards, and use it if `join` succeeded on every rank.

    Args:
        place: the index of this rank among these ranks.
    """

    is_shared = True

    def __init__(self, place: int) -> None:
        self._place, self._secret = place, secrets.randbits(62)
        self._homes: dict[int, tuple[mmap.mmap, int, int]] = {}
        self._slab: tuple[mmap.mmap, int] | None = None
        self._files: list[_File] = []
        if is_supported():
            with suppress(OSError):  # limits of this process do not allow it
                self._files = [_File.make(self._secret), _File.make(self._secret)]
        self._peers: list[_File] = []
        self.board: Board
        """The board of these ranks, after `join`."""

    @property
    def card(self) -> list[int]:
        """The data for opening this rank's files: process, descriptors, and a secret that both files contain."""
        descriptors = [file.descriptor for file in self._files] or [-1, -1]
        return [os.getpid(), *descriptors, self._secret]

    def join(self, cards: Sequence[Sequence[int]]) -> bool:
        """Open the files of the other ranks; return False if a file cannot be opened.

        Args:
            cards: the card of every rank, by index.
        """
        if not self._files:
            return False
        own, common = self._files
        try:
            self._peers = [
                own if place == self._place else _File.open(pid, number, secret)
                for place, (pid, number, _, secret) in enumerate(cards)
            ]
            pid, _, number, secret = cards[0]
            self._files = [own, common if self._place == 0 else _File.open(pid, number, secret)]
            self.board = Board([peer.words for peer in self._peers], self._place, [card[0] for card in cards])
        except OSError:
            return False
        return True

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Memory`."""
        return self._files[0].view(self._files[0].take(numel * dtype.itemsize), numel, dtype)

    def give_back(self, tensor: Tensor) -> None:
        """See `Memory`."""
        self._files[0].remove(tensor.data_ptr(), tensor.nbytes)

    def home(self, numel: int, bounds: Range, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """See `Memory`."""
        # Every rank allocates the same homes in the same order, so that offsets are equal on all ranks.
        common, nbytes = self._files[1], numel * dtype.itemsize
        offset = common.take(nbytes)
        shard = common.view(offset + bounds[0] * dtype.itemsize, bounds[1] - bounds[0], dtype)
        if self._slab is None or offset + nbytes > self._slab[1] + len(self._slab[0]):
            length, access = max(SLAB_BYTES, _whole_pages(nbytes)), mmap.PROT_READ | mmap.PROT_WRITE
            self._slab = mmap.mmap(common.descriptor, length, mmap.MAP_PRIVATE, access, offset=offset), offset
        slab, first = self._slab
        full = _view(slab, offset - first, numel, dtype)
        if numel:
            self._homes[full.data_ptr()] = slab, offset - first, _whole_pages(nbytes)
        return full, shard

    def open(self, full: Tensor, start: int, shard: Tensor) -> None:
        """See `Memory`."""
        # The mapping shows the latest values of all shards.
        return

    def close(self, full: Tensor) -> bool:
        """See `Memory`."""
        if full.numel():
            slab, first, nbytes = self._homes[full.data_ptr()]
            slab.madvise(mmap.MADV_DONTNEED, first, nbytes)
        return True

    def rest(self, full: Tensor) -> None:
        """See `Memory`."""
        # The pages belong to the file, and a read maps them again.
        self.close(full)

    def is_home(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a full home, which shows the shards of the other ranks without a copy."""
        return tensor.data_ptr() in self._homes

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the offset of `tensor` in this rank's file, 0 for a full home; None if it is not shared."""
        if self.is_home(tensor):
            return 0
        offset = tensor.data_ptr() - self._files[0].address
        return offset if 0 < offset < self._files[0].taken_bytes else None

    def of_peer(self, place: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a read-only view (numel,) of another rank's memory; call `drop` after the read.

        Args:
            place: the index of that rank.
            offset: the result of `offset_of` on that rank.
        """
        return self._peers[place].view(offset, numel, dtype)

    def drop(self, place: int, part: Tensor) -> None:
        """Unmap pages of another rank's memory, which would count as memory of both processes."""
        self._peers[place].drop(part.data_ptr(), part.nbytes)


@final
class _File:
    """A file in memory, mapped shared; it begins with an identifying secret and a board.

    Invariant: the mapping is as large as the memory of the host; unused pages cost nothing.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self.taken_bytes = mmap.PAGESIZE + BOARD_BYTES
        self._map = mmap.mmap(descriptor, _host_bytes())
        self.address = _view(self._map, 0, 1, torch.uint8).data_ptr()
        # Looked up before a fork: in the child of a process with threads, the loader may deadlock.
        self._mmap, self._is_private = _libc_mmap(), False
        tell_forks(self)

    @classmethod
    def make(cls, secret: int) -> "_File":
        """Make a file of this rank."""
        descriptor = os.memfd_create("zeroshard", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _host_bytes())
        os.pwrite(descriptor, secret.to_bytes(8, "little"), 0)
        return cls(descriptor)

    @classmethod
    def open(cls, pid: int, number: int, secret: int) -> "_File":
        """Open another rank's file.

        Raises:
            OSError: the file cannot be opened by this process.
        """
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        if os.pread(descriptor, 8, 0) != secret.to_bytes(8, "little"):
            os.close(descriptor)
            raise OSError(f"/proc/{pid}/fd/{number} is another file: its process is not on this host")
        return cls(descriptor)

    def after_fork(self) -> None:
        """Map the file privately, at the same addresses; a child of this child inherits that."""
        if self._is_private:
            return
        self._is_private, flags = True, mmap.MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE
        # A host without overcommit may lack memory for a private copy: map the file read-only then.
        for access in (mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ):
            if self._mmap(self.address, len(self._map), access, flags, self.descriptor, 0) == self.address:
                return
        os.write(2, b"zeroshard: a forked process ends, because it would share the memory of its rank\n")
        os._exit(1)

    def take(self, nbytes: int) -> int:
        """Allocate bytes at the start of a page, and return their offset."""
        offset, self.taken_bytes = self.taken_bytes, self.taken_bytes + _whole_pages(nbytes)
        if self.taken_bytes > len(self._map):
            raise MemoryError(f"{self.taken_bytes} bytes of shared memory are needed; this host has {len(self._map)}.")
        return offset

    @property
    def words(self) -> memoryview:
        """The board, as 64-bit words."""
        return memoryview(self._map)[mmap.PAGESIZE : mmap.PAGESIZE + BOARD_BYTES].cast("q")

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor (numel,) on the bytes from `offset`."""
        return _view(self._map, offset, numel, dtype)

    def remove(self, address: int, nbytes: int) -> None:
        """Free the pages of an allocation; its range in the file is not reused."""
        self._map.madvise(mmap.MADV_REMOVE, address - self.address, _whole_pages(nbytes))

    def drop(self, address: int, nbytes: int) -> None:
        """Unmap pages from this process; a read maps them again."""
        first = (address - self.address) // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, _whole_pages(address - self.address + nbytes - first))


def _view(mapping: mmap.mmap, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor on mapped bytes; the tensor keeps the mapping alive."""
    if not numel:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(mapping, dtype=dtype, count=numel, offset=offset)


@functools.cache
def _libc_mmap() -> Callable[..., Any]:
    """Return the mmap of libc: Python's mmap cannot map at a given address."""
    function = ctypes.CDLL(None).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    return function


def _whole_pages(nbytes: int) -> int:
    return math.ceil(nbytes / mmap.PAGESIZE) * mmap.PAGESIZE


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
