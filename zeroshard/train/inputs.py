"""Files that a user names: regular ones, opened without waiting, read up to a limit.

Owns the errors about what is no such file: a pipe would be waited for, and a device may never end. A link that a user
names is followed. Must not know what the files hold.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["check_entries", "open_input", "read_input"]


def open_input(path: str | Path, setting: str) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: where it is.
        setting: which setting names it; the message begins with it.

    Raises:
        ValueError: it is missing, cannot be read, or is a folder, a pipe, a socket or a device.
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
        path: where it is.
        setting: which setting names it; the message begins with it.
        most_bytes: how large it may be.

    Raises:
        ValueError: as `open_input`, or it is larger.
    """
    with open_input(path, setting) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{setting}: {str(path)!r} has more than {most_bytes} bytes, and such files are smaller")
    return content


def check_entries(folder: str | Path, setting: str) -> None:
    """Raise ValueError where a folder holds what is neither a regular file nor a folder, before a library opens it."""
    for path in sorted(Path(folder).iterdir()):
        if not (path.is_file() or path.is_dir()):
            raise ValueError(f"{setting}: {_what_is_wrong(path)}")


def _what_is_wrong(path: str | Path) -> str:
    kind = "a folder" if os.path.isdir(path) else "a pipe, a socket, a device or a link to nothing"
    return f"{str(path)!r} is {kind}, and a regular file is wanted; copy what it gives to a file"
