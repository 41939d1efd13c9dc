"""Changes and anchors on disk, in pieces with a checksum each, and the mailbox's own state.

Owns names, formats and flushes of files. It must not know islands or when a file may go (`mailbox_book.py`). What has
been committed is on the disk: files are flushed, renamed into place, and their folder is flushed.

Note: a part
    What one rank of an island put, or one rank's part of the anchors, is a part: a file of pieces of equal size, the
    last one shorter, each after the CRC-32 of its bytes. Nothing of a part is ever in memory but one piece.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from zeroshard.outer.mailbox_codec import Form
from zeroshard.outer.mailbox_wire import PIECE_BYTES, MailboxError

__all__ = [
    "PartReader",
    "PartWriter",
    "Shelf",
    "bytes_of",
    "check_part",
    "crc_of",
    "pieces_of",
    "read_array",
    "sizes_of",
    "stored_bytes",
    "write_array",
]

_MOST_STATE_BYTES: Final = 8 << 20
_REMEDY: Final = (
    "Restore it; or give an empty --folder, which the first island that comes back founds again with its anchors."
)
_CRC_BYTES: Final = 4
_FOLDER: Final = re.compile(r"(\d{1,16})-([A-Za-z0-9._-]{1,64})")
_PART: Final = re.compile(r"part-(\d{1,7})")


def sizes_of(nbytes: int, piece_bytes: int = PIECE_BYTES) -> Iterator[int]:
    """Yield the bytes of each piece of a part of `nbytes`."""
    for start in range(0, nbytes, piece_bytes):
        yield min(piece_bytes, nbytes - start)


def stored_bytes(nbytes: int, piece_bytes: int = PIECE_BYTES) -> int:
    """Return the size of the file of a part of `nbytes`."""
    return nbytes + _CRC_BYTES * -(-nbytes // piece_bytes)


def bytes_of(values: np.ndarray) -> memoryview:
    """Return the memory of a flat array."""
    return values.view(np.uint8).data


def crc_of(values: np.ndarray) -> int:
    """Return the CRC-32 of a flat array."""
    return zlib.crc32(bytes_of(values))


def pieces_of(values: np.ndarray, piece_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
    """Yield the bytes of a flat array, piece by piece."""
    data = bytes_of(np.ascontiguousarray(values))
    start = 0
    for size in sizes_of(len(data), piece_bytes):
        yield data[start : start + size]
        start += size


@final
class PartWriter:
    """Writes a part beside its place; `flush()` and then `place()` put it there.

    Args:
        path: of the part; its folder is created.
        nbytes: of all pieces.
        form: of the values, which must be finite; None for bytes that are not looked at.
        is_durable: whether the part is on the disk when it is in its place, and survives a loss of power.

    Raises:
        OSError: the disk refuses.
    """

    def __init__(self, path: Path, nbytes: int, form: Form | None = None, *, is_durable: bool = True) -> None:
        self._path, self._form, self._is_durable = path, form, is_durable
        self._sizes = sizes_of(nbytes, PIECE_BYTES if form is None else form.piece_bytes)
        self.crc32 = 0
        """Of the bytes so far."""
        make_folder(path.parent)
        self._temporary = path.parent / f".{path.name}-{os.getpid()}-{id(self)}"
        self._file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def add(self, piece: bytes | memoryview) -> None:
        """Write the next piece.

        Raises:
            ValueError: it has another size than the next piece of the part, or a value is not finite.
            OSError: the disk refuses.
        """
        expected = next(self._sizes, 0)
        if len(piece) != expected or not expected:
            raise ValueError(f"a piece of {len(piece):,} bytes came where one of {expected:,} was due.")
        if self._form is not None and not self._form.is_finite(piece):
            raise ValueError("a piece has values that are not finite.")
        self.crc32 = zlib.crc32(piece, self.crc32)
        left = memoryview(zlib.crc32(piece).to_bytes(_CRC_BYTES, "little") + bytes(piece))
        while left:
            left = left[os.write(self._file, left) :]

    def flush(self) -> None:
        """Return when all pieces are on the disk.

        Raises:
            ValueError: pieces are missing.
            OSError: the disk refuses.
        """
        if next(self._sizes, 0):
            raise ValueError("pieces are missing.")
        if self._is_durable:
            os.fsync(self._file)

    def place(self) -> None:
        """Put the flushed part in its place, on the disk."""
        os.rename(self._temporary, self._path)
        if self._is_durable:
            sync_folder(self._path.parent)

    def close(self) -> None:
        """Close the file; a part that was not committed is gone."""
        os.close(self._file)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)


@final
class PartReader:
    """Reads a part piece by piece; the file may be removed meanwhile.

    Raises:
        MailboxError: the file is missing or of another size.
    """

    def __init__(self, path: Path, nbytes: int, piece_bytes: int = PIECE_BYTES) -> None:
        self._path, self._nbytes, self._piece_bytes = path, nbytes, piece_bytes
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise MailboxError(f"{path}: cannot be opened ({error.strerror}).") from error
        if (size := os.fstat(self._file).st_size) != (expected := stored_bytes(nbytes, piece_bytes)):
            os.close(self._file)
            raise MailboxError(f"{path}: has {size:,} bytes, expected {expected:,}.")

    def __iter__(self) -> Iterator[bytes]:
        for size in sizes_of(self._nbytes, self._piece_bytes):
            code, piece = self._read(_CRC_BYTES), self._read(size)
            if zlib.crc32(piece) != int.from_bytes(code, "little"):
                raise MailboxError(f"{self._path}: a piece is damaged: its checksum is wrong.")
            yield piece

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = os.read(self._file, count - len(data))
            if not more:
                raise MailboxError(f"{self._path}: ends too early.")
            data = data + more if data else more
        return data

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def check_part(path: Path, nbytes: int, piece_bytes: int = PIECE_BYTES) -> None:
    """Compare the size of a part that was acknowledged.

    Raises:
        MailboxError: the file is missing or of another size; the text also says what can be done.
    """
    try:
        PartReader(path, nbytes, piece_bytes).close()
    except MailboxError as error:
        raise MailboxError(f"{error} The mailbox has acknowledged it. {_REMEDY}") from error


def write_array(path: Path, values: np.ndarray) -> int:
    """Write a flat array as a part, which a loss of power may cut, and return the CRC-32 of its bytes."""
    writer = PartWriter(path, values.nbytes, is_durable=False)
    try:
        for piece in pieces_of(values):
            writer.add(piece)
        writer.flush()
        writer.place()
        return writer.crc32
    finally:
        writer.close()


def read_array(path: Path, numel: int, dtype: str) -> np.ndarray:
    """Return the flat array of a part.

    Raises:
        MailboxError: the file is missing, of another size, or damaged.
    """
    values = np.empty(numel, dtype)
    reader, start, data = PartReader(path, values.nbytes), 0, bytes_of(values)
    try:
        for piece in reader:
            data[start : start + len(piece)] = piece
            start += len(piece)
    finally:
        reader.close()
    return values


def make_folder(path: Path) -> None:
    """Make a folder that its owner alone reads, those above it likewise, and flush the folders that name them."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Return when the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@final
class Shelf:
    """The folder of a mailbox: its state, the anchors, and the changes that have not been added to them.

    Args:
        folder: created if missing; one process at a time has it.

    Raises:
        ValueError: another process has the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_folder(folder)
        self._lock = (folder / ".lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            holder = self._lock.read(200) or "another process"
            self._lock.close()
            raise ValueError(f"{folder} is in use by the mailbox of {holder}; give another --folder.") from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._lock.flush()

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    def read_state(self) -> dict[str, Any] | None:
        """Return what `write_state` wrote last; None in a new folder.

        Raises:
            MailboxError: the file is damaged, or it alone is missing.
        """
        path = self.folder / "state.json"
        try:
            with path.open("rb") as file:
                data = file.read(_MOST_STATE_BYTES + 1)
        except FileNotFoundError:
            if (part := next(self.folder.rglob("part-*"), None)) is not None:
                raise MailboxError(f"{path}: is missing, but {part} is there. {_REMEDY}") from None
            return None
        text, _, code = data.rpartition(b"\n")
        if len(data) > _MOST_STATE_BYTES or code != b"%d" % zlib.crc32(text):
            raise MailboxError(f"{path}: is damaged: its checksum is wrong.")
        state: dict[str, Any] = json.loads(text)
        return state

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace the state, in one indivisible step."""
        text = json.dumps(state, allow_nan=False, sort_keys=True).encode()
        path, temporary = self.folder / "state.json", self.folder / ".state.json"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            left = memoryview(text + b"\n%d" % zlib.crc32(text))
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
        sync_folder(self.folder)

    def anchors(self, number: int, rank: int) -> Path:
        """Return the place of a rank's part of the anchors with a number."""
        return self.folder / f"anchors-{number:06}" / f"part-{rank:05}"

    def change(self, version: int, name: str, rank: int) -> Path:
        """Return the place of what a rank of an island put under a version."""
        return self.folder / "changes" / f"{version:012}-{name}" / f"part-{rank:05}"

    def parts_of_anchors(self, number: int) -> dict[int, int]:
        """Return the sizes of the files of the anchors with a number, by rank."""
        return _parts_in(self.folder / f"anchors-{number:06}")

    def changes(self) -> Iterator[tuple[int, str, dict[int, int]]]:
        """Yield version and island of each change on the disk, with the sizes of its files by rank."""
        folder = self.folder / "changes"
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if match := _FOLDER.fullmatch(path.name):
                yield int(match[1]), match[2], _parts_in(path)

    def drop_change(self, version: int, name: str) -> None:
        """Remove a change."""
        shutil.rmtree(self.change(version, name, 0).parent, ignore_errors=True)

    def drop_anchors(self, *, besides: int) -> None:
        """Remove all anchors but those with a number."""
        for path in self.folder.glob("anchors-*"):
            if path.name != f"anchors-{besides:06}":
                shutil.rmtree(path, ignore_errors=True)


def _parts_in(folder: Path) -> dict[int, int]:
    """Return the sizes of parts in a folder, by rank; files that a killed writer left behind are removed."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _PART.fullmatch(path.name):
            found[int(match[1])] = path.stat(follow_symlinks=False).st_size
        elif path.name.startswith(".part-"):
            path.unlink(missing_ok=True)
    return found
