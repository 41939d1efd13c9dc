"""Streamed writing of a file, with checksums of the bytes in memory, and the bytes on the disk on close.

Owns the path from tensors' bytes to a file. It must not know the meaning of the bytes. The writer first copies each
piece of memory: other threads may change the memory, and the checksum must match the written bytes.
"""

import zlib
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

from zeroshard.checkpoint import files
from zeroshard.checkpoint.manifest import BLOCK_BYTES, FileEntry

__all__ = ["FileWriter", "write_file"]

PIECE_BYTES: Final = 512 << 10
"""Bytes per copy: small enough that the checksum and the write read from the processor's cache."""

SYNC_BYTES: Final = 32 << 20
"""Bytes written before the disk begins to write them, in parallel with the checksums."""


@final
class FileWriter:
    """A new file, as a context; on exit, its bytes are on the disk.

    Args:
        mode: permission bits; None for those that the umask leaves.

    Raises:
        OSError: with the file's name, from any operation.
    """

    def __init__(self, path: Path, mode: int | None = None) -> None:
        self._path, self._crc32, self._done, self._started = path, [0], 0, 0
        self._piece = memoryview(bytearray(PIECE_BYTES))
        self._descriptor = files.create(path, mode)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                files.sync(self._descriptor)
        except OSError as failure:
            raise self._named(failure) from failure
        finally:
            files.close(self._descriptor)

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        try:
            while data:
                part = data[: min(PIECE_BYTES, BLOCK_BYTES - self._done % BLOCK_BYTES)]
                data = data[len(part) :]
                piece = self._piece[: len(part)]
                piece[:] = part
                self._write_part(piece)
        except OSError as failure:
            raise self._named(failure) from failure

    def _write_part(self, part: memoryview) -> None:
        """Append bytes of one block."""
        if self._done and self._done % BLOCK_BYTES == 0:
            self._crc32.append(0)
        self._crc32[-1] = zlib.crc32(part, self._crc32[-1])
        self._done += len(part)
        while part:
            count = files.write(self._descriptor, part)
            if not count:
                raise OSError(0, "the disk took no more bytes")
            part = part[count:]
        if self._done - self._started >= SYNC_BYTES:
            files.start_sync(self._descriptor, self._started, self._done - self._started)
            self._started = self._done

    def entry(self) -> FileEntry:
        """Return the file's entry in the manifest."""
        return FileEntry(self._done, tuple(self._crc32) if self._done else ())

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self._path))


def write_file(path: Path, data: bytes, mode: int | None = None) -> FileEntry:
    """Write a whole file and return its entry in the manifest; `mode` as in `FileWriter`."""
    with FileWriter(path, mode) as writer:
        writer.write(memoryview(data))
    return writer.entry()
