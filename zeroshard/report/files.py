"""The files that a report reads: regular files, and JSON.

Owns the errors about other kinds of files and about damage, which name the file. It must not know what the files hold.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["parse", "read_json", "read_text", "reading"]


def read_text(path: Path) -> str:
    """Return the text of a regular file in UTF-8.

    Raises:
        ValueError: the path is a pipe, a socket or a device, whose end may never come, or the file is not UTF-8.
        OSError: the file cannot be read.
    """
    # Without O_NONBLOCK, to open a pipe that nobody writes to waits forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is not a regular file; copy its contents to a file, and give that")
        try:
            return file.read().decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text in UTF-8: {error}") from None


def read_json(path: Path) -> Any:
    """Return the value of a file of JSON.

    Raises:
        ValueError: as `read_text`, or the file is not JSON.
        OSError: the file cannot be read.
    """
    return parse(read_text(path), str(path))


def parse(text: str, where: str) -> Any:
    """Return the value of a text of JSON.

    Args:
        where: the place of the text, for the message.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}): the file is damaged, or another program wrote it") from None


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn the errors of code that finds other fields or values than it expects into one that names the file.

    Raises:
        ValueError: in place of the errors of look-ups, conversions and arithmetic.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{where} is damaged, or another version of zeroshard wrote it ({what})") from error
