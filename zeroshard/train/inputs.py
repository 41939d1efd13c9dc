"""Files that a user names: regular files only, opened without blocking, read up to a limit.

Owns the errors about other kinds of files: opening a pipe can block, and reading a device may never end. Links that a
user names are followed. It must not know the contents of the files.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["check_entries", "open_input", "read_input"]


def open_input(path: str | Path, setting: str) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: path of the file.
        setting: the setting that names the file; the message starts with it.

    Raises:
        ValueError: the file is missing, cannot be read, or is a folder, a pipe, a socket or a device.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"{setting}: cannot read {str(path)!r}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{setting}: {_what_is_wrong(path)}")
    return os.fdopen(descriptor, "rb")


def read_input(path: str | Path, setting: str, most_bytes: int) -> bytes:
    """Return the contents of a regular file.

    Args:
        path: path of the file.
        setting: the setting that names the file; the message starts with it.
        most_bytes: maximum size in bytes.

    Raises:
        ValueError: as `open_input`, or the file exceeds `most_bytes`.
    """
    with open_input(path, setting) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{setting}: {str(path)!r} has more than {most_bytes} bytes, the maximum for this file")
    return content


def check_entries(folder: str | Path, setting: str) -> None:
    """Raise ValueError if a folder has an entry, other than folders, that is not a regular file."""
    for path in sorted(Path(folder).iterdir()):
        if not (path.is_file() or path.is_dir()):
            raise ValueError(f"{setting}: {_what_is_wrong(path)}")


def _what_is_wrong(path: str | Path) -> str:
    kind = "a folder" if os.path.isdir(path) else "a pipe, a socket, a device or a broken link"
    return f"{str(path)!r} is {kind}, but must be a regular file; copy its contents to a file"
