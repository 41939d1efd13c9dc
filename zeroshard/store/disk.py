"""One file of this rank on a disk, and flat arrays of numbers in it.

Owns room, alignment and the threads that read and write. It must not know what the numbers are. Read `file_calls.py`
first.

Note: nothing to clean up
    The file has no name, so nobody else can open it, and the kernel frees it with the process, however that ends. Room
    is taken when it is made: a disk that fills up later fills up for others.
Note: past the kernel's cache
    States are read once and written once in a step; in the cache they would take the memory that they were moved out
    of. So reads and writes are direct where the file system can: offsets, lengths and memory are then multiples of
    `BLOCK_BYTES`. Elsewhere (tmpfs, some overlays) they pass through the cache, and `Disk.is_direct` says so.
"""

import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, final

import torch

from zeroshard.store import file_calls

__all__ = ["Array", "BLOCK_BYTES", "Disk", "buffer_of"]

Tensor = torch.Tensor

BLOCK_BYTES: Final = 4096
BOUNCE_BYTES: Final = 1 << 20
THREADS: Final = 4
"""Requests under way at a time: a disk answers several sooner than one after the other."""


def buffer_of(nbytes: int) -> Tensor:
    """Return (nbytes or a little more,) uint8 of memory at the start of a page."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, max(BLOCK_BYTES, _whole_blocks(nbytes)), flags=flags), dtype=torch.uint8)


@final
class Disk:
    """A file of this rank.

    Args:
        folder: where it is made.

    Raises:
        OSError: the folder is not there, or cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.failure = folder, ""
        descriptor = file_calls.make(folder)
        weakref.finalize(self, os.close, descriptor)
        direct = file_calls.opened_directly(descriptor)
        self.is_direct = direct is not None
        """Whether reads and writes pass by the kernel's cache."""
        self._plain, self._descriptor = descriptor, descriptor if direct is None else direct
        if direct is not None:
            weakref.finalize(self, os.close, direct)
        self._taken_bytes = self._reserved_bytes = 0
        self._bounce, self._lock = buffer_of(BOUNCE_BYTES), threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self.moved_bytes = 0
        """Bytes read and written so far."""

    @property
    def nbytes(self) -> int:
        """The room that it takes on the disk."""
        return self._reserved_bytes

    def reserve(self, nbytes: int) -> None:
        """Take room for so many bytes more.

        Raises:
            OSError: the disk has no such room; the text says how much there is.
        """
        if not nbytes:
            return
        try:
            file_calls.reserve(self._plain, self._reserved_bytes, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            free = file_calls.free_bytes(self.folder)
            text = (
                f"{error.strerror}: {free:,} bytes are free, and the offloaded states and parameters of this rank need "
                f"{nbytes:,} bytes more"
            )
            raise OSError(error.errno, text, str(self.folder)) from error
        self._reserved_bytes += nbytes

    def array(self, numel: int, dtype: torch.dtype) -> "Array":
        """Return a new array, of zeros.

        Raises:
            OSError: see `reserve`.
        """
        offset, self._taken_bytes = self._taken_bytes, self._taken_bytes + _whole_blocks(numel * dtype.itemsize)
        self.reserve(max(0, self._taken_bytes - self._reserved_bytes))
        return Array(self, offset, numel, dtype)

    def submit(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Have a thread call a function."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="offload")
            weakref.finalize(self, self._pool.shutdown, wait=False)
        return self._pool.submit(function, *args)

    def move(self, memory: memoryview, offset: int, *, writes: bool) -> None:
        """Read or write all of `memory`, whole blocks of it.

        Raises:
            RuntimeError: the disk failed, now or before; the text names it.
        """
        what, act = ("writing", file_calls.write_at) if writes else ("reading", file_calls.read_at)
        if os.getpid() != self._process:
            raise RuntimeError(
                f"A forked process has no states and parameters of its own: {what} them under {self.folder} is refused."
            )
        done = 0
        while done < len(memory):
            self.check()
            try:
                count = act(self._descriptor, memory[done:], offset + done)
            except OSError as error:
                self.fail(f"{what} {len(memory):,} bytes failed with {error}")
                continue
            if count % BLOCK_BYTES or not count:
                self.fail(f"{what} {len(memory):,} bytes ended after {done + count:,}")
                continue
            done += count
        self.moved_bytes += done

    def fail(self, what: str) -> None:
        """Note that states are lost: whatever reads or writes them from now on raises."""
        self.failure = self.failure or what

    def check(self) -> None:
        """Raise if the disk has failed."""
        if self.failure:
            raise RuntimeError(
                f"States and parameters under {self.folder}: {self.failure}. They may be only partly updated, so they "
                "are not used again. The last checkpoint is intact: start the program again and resume from it, with "
                "another folder if this disk is at fault."
            )

    def bounced(self, offset: int, flat: Tensor, *, writes: bool) -> None:
        """Read or write bytes that may begin and end inside blocks.

        Args:
            flat: (nbytes,) uint8.
        """
        done, size = 0, flat.numel()
        with self._lock:
            while done < size:
                first = (offset + done) // BLOCK_BYTES * BLOCK_BYTES
                skip = offset + done - first
                count = min(size - done, BOUNCE_BYTES - skip)
                piece = self._bounce[: _whole_blocks(skip + count)]
                view = _bytes_of(piece)
                if not writes or skip or (skip + count) % BLOCK_BYTES:
                    self.move(view, first, writes=False)
                if writes:
                    piece[skip : skip + count] = flat[done : done + count]
                    self.move(view, first, writes=True)
                else:
                    flat[done : done + count] = piece[skip : skip + count]
                done += count


@final
class Array:
    """Flat numbers in a file.

    Args:
        offset: of the first one, in bytes.
    """

    def __init__(self, disk: Disk, offset: int, numel: int, dtype: torch.dtype) -> None:
        self.disk, self.offset, self.numel, self.dtype = disk, offset, numel, dtype

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop)."""
        values = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        if stop > start:
            self.disk.bounced(self.offset + start * self.dtype.itemsize, values.view(torch.uint8), writes=False)
        return values

    def write(self, start: int, values: Tensor) -> None:
        """Write elements from `start` on, in pieces, from any memory."""
        for piece in values.detach().split(BOUNCE_BYTES // self.dtype.itemsize):
            here = piece.to("cpu", self.dtype).contiguous()
            if here.numel():
                self.disk.bounced(self.offset + start * self.dtype.itemsize, here.view(torch.uint8), writes=True)
            start += here.numel()

    def put(self, start: int, stop: int, buffer: Tensor, writes: bool = True) -> None:
        """Write elements [start, stop) and no others through a buffer; for the arguments see `move`."""
        whole = start + (stop - start) * self.dtype.itemsize // BLOCK_BYTES * BLOCK_BYTES // self.dtype.itemsize
        if whole > start:
            self.move(start, whole, buffer, writes=writes)
        rest = buffer.view(self.dtype)[whole - start : stop - start]
        self.write(whole, rest)

    def move(self, start: int, stop: int, buffer: Tensor, writes: bool) -> None:
        """Read or write elements [start, stop) through a buffer, without a copy.

        Args:
            start: at the start of a block.
            buffer: of `buffer_of`; the elements lie at its start.
        """
        nbytes = _whole_blocks((stop - start) * self.dtype.itemsize)
        self.disk.move(_bytes_of(buffer[:nbytes]), self.offset + start * self.dtype.itemsize, writes=writes)


def _bytes_of(buffer: Tensor) -> memoryview:
    return buffer.numpy().data.cast("B")


def _whole_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
