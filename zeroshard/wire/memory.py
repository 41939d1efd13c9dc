"""Where flat tensors get their memory: of this process alone, or shared by the ranks of one host.

Owns files without a name (memfd) and their mappings. It must not know what lies in them, nor when another rank may read
it: `wire/host.py` orders that, and `core/buffer.py` says what is kept where.

Note: nothing to clean up
    The files are in memory and have no name; the kernel frees them with the last process that maps them, however it
    ends. Another rank opens one as /proc/PID/fd/N. Where that cannot be done (another host, user or container, another
    system than Linux) `join` says so, and messages are used instead.
Note: the common file
    What is gathered and released again lies once per host, in a file that all ranks map. Each rank changes its own
    shard through a shared mapping, and reads the whole through a private one: the kernel shows it what the others
    wrote, but a page that this rank writes becomes its own until it is forgotten. So a change in place, which belongs
    to this rank only, reaches nobody else, and is gone with the release, as with memory of its own.
Note: forked children
    A mapping that is shared stays shared over a fork, so a DataLoader's worker that writes to a parameter would change
    the training of all ranks. Each child replaces its shared mappings by private ones of the same files at the same
    addresses: it reads what a rank wrote, also after the fork, until it writes to a page, which is then its own.
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
"""Least bytes of a private mapping: the kernel may count each as memory of the process in full."""
MAP_FIXED: Final = 0x10
MAP_NORESERVE: Final = 0x4000
"""Of Linux on x86-64; Python has no name for the first."""


class Memory(ABC):
    """What buckets and pools need of memory."""

    is_shared: bool
    """Whether other ranks read it where it lies."""

    @abstractmethod
    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return (numel,) of zeros, to be kept for as long as the model lives."""

    def give_back(self, tensor: Tensor) -> None:
        """Let go of the memory of `zeros` for good; nobody may read the tensor any more."""
        return  # it goes with the tensor

    @abstractmethod
    def home(self, numel: int, bounds: Range, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return zeros (numel,) that are closed and opened again, and the shard (stop - start,) of them that stays."""

    @abstractmethod
    def open(self, full: Tensor, start: int, shard: Tensor) -> None:
        """Give `full` of a home its memory, with this rank's shard, from element `start` on, in place."""

    @abstractmethod
    def close(self, full: Tensor) -> bool:
        """Take the memory of `full` back; views of it stay. False where it has to be left there."""

    def rest(self, full: Tensor) -> None:
        """Let go of what an open home costs as long as nobody reads it; it is there, as it was, when somebody does."""
        return  # the values are in this memory alone, and would be lost


@final
class OwnMemory(Memory):
    """Memory of this process, on any device."""

    is_shared = False

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Memory`."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def home(self, numel: int, bounds: Range, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """See `Memory`."""
        return self.zeros(numel, dtype, device), self.zeros(bounds[1] - bounds[0], dtype, device)

    def open(self, full: Tensor, start: int, shard: Tensor) -> None:
        """See `Memory`."""
        if full.untyped_storage().resizable():
            full.untyped_storage().resize_(full.nbytes)
        full[start : start + shard.numel()] = shard

    def close(self, full: Tensor) -> bool:
        """See `Memory`."""
        storage = full.untyped_storage()
        # An array of numpy's lies in the same memory, and torch does not know when it ends.
        if storage.resizable():
            storage.resize_(0)
        return storage.resizable()


@final
class HostMemory(Memory):
    """Memory of the ranks that together keep one copy of the state, all on this host; for the CPU.

    Make one on each rank, exchange the cards, and use it where every rank's `join` succeeded.

    Args:
        place: this rank's place among them.
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
        """Where these ranks meet, after `join`."""

    @property
    def card(self) -> list[int]:
        """What the others need to open this rank's files: process, descriptors, and a secret that stands in both."""
        descriptors = [file.descriptor for file in self._files] or [-1, -1]
        return [os.getpid(), *descriptors, self._secret]

    def join(self, cards: Sequence[Sequence[int]]) -> bool:
        """Open the others' files; False where one cannot be opened.

        Args:
            cards: every rank's, by place.
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
        # Every rank makes the same homes in the same order, so that they lie at the same place on all.
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
        # The mapping shows what the owners of the shards last wrote.
        return

    def close(self, full: Tensor) -> bool:
        """See `Memory`."""
        if full.numel():
            slab, first, nbytes = self._homes[full.data_ptr()]
            slab.madvise(mmap.MADV_DONTNEED, first, nbytes)
        return True

    def rest(self, full: Tensor) -> None:
        """See `Memory`."""
        # Its pages are those of the file, which are mapped in again where they are read.
        self.close(full)

    def is_home(self, tensor: Tensor) -> bool:
        """Tell whether `tensor` is the whole of a home: then it shows the others' shards without a copy."""
        return tensor.data_ptr() in self._homes

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return where `tensor` lies in this rank's file, 0 for the whole of a home; None where it is not shared."""
        if self.is_home(tensor):
            return 0
        offset = tensor.data_ptr() - self._files[0].address
        return offset if 0 < offset < self._files[0].taken_bytes else None

    def of_peer(self, place: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return (numel,) of another rank's memory, to be read only, and to be dropped after that.

        Args:
            place: of that rank.
            offset: what `offset_of` said there.
        """
        return self._peers[place].view(offset, numel, dtype)

    def drop(self, place: int, part: Tensor) -> None:
        """Let go of pages of another rank's memory that were read: they are that rank's, and would count twice."""
        self._peers[place].drop(part.data_ptr(), part.nbytes)


@final
class _File:
    """A file in memory, mapped shared; a secret by which it is known, and a board, come first.

    Invariant: as much is mapped as the host has memory, which costs nothing until it is used.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self.taken_bytes = mmap.PAGESIZE + BOARD_BYTES
        self._map = mmap.mmap(descriptor, _host_bytes())
        self.address = _view(self._map, 0, 1, torch.uint8).data_ptr()
        # Found before a fork: the child of a process with threads may wait for ever where it asks the loader.
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
            OSError: it cannot be opened from here.
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
        # A host that reserves all memory may have none for a copy of the file: then it can be read alone.
        for access in (mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ):
            if self._mmap(self.address, len(self._map), access, flags, self.descriptor, 0) == self.address:
                return
        os.write(2, b"zeroshard: a forked process ends, since it would share the memory of its rank\n")
        os._exit(1)

    def take(self, nbytes: int) -> int:
        """Return the offset of new bytes, at the start of a page."""
        offset, self.taken_bytes = self.taken_bytes, self.taken_bytes + _whole_pages(nbytes)
        if self.taken_bytes > len(self._map):
            raise MemoryError(f"{self.taken_bytes} bytes of shared memory are needed; this host has {len(self._map)}.")
        return offset

    @property
    def words(self) -> memoryview:
        """The board, as 64-bit numbers."""
        return memoryview(self._map)[mmap.PAGESIZE : mmap.PAGESIZE + BOARD_BYTES].cast("q")

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return (numel,) of its bytes from `offset` on."""
        return _view(self._map, offset, numel, dtype)

    def remove(self, address: int, nbytes: int) -> None:
        """Free the pages of what was taken; its place in the file is not used again."""
        self._map.madvise(mmap.MADV_REMOVE, address - self.address, _whole_pages(nbytes))

    def drop(self, address: int, nbytes: int) -> None:
        """Take the pages of some of its bytes out of this process; reading them maps them in again."""
        first = (address - self.address) // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, _whole_pages(address - self.address + nbytes - first))


def _view(mapping: mmap.mmap, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor on mapped bytes, which keeps the mapping alive."""
    return torch.frombuffer(mapping, dtype=dtype, count=numel, offset=offset) if numel else torch.empty(0, dtype=dtype)


@functools.cache
def _libc_mmap() -> Callable[..., Any]:
    """Return mmap as C has it: Python's maps nothing at an address that is given."""
    function = ctypes.CDLL(None).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    return function


def _whole_pages(nbytes: int) -> int:
    return math.ceil(nbytes / mmap.PAGESIZE) * mmap.PAGESIZE


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
