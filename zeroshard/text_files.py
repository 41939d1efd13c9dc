"""Files of text that are whole: as they were, or as they became.

Owns the order of writing and naming. Needs no torch. Files of a checkpoint are written by `checkpoint/files.py`.
"""

import contextlib
import os
import shutil
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: str | Path, text: str) -> None:
    """Write a text in UTF-8; a file that was there stays as it was if this fails, as on a full disk.

    The text goes into a file beside it, which then gets the name, and the permissions of the file that was there. What
    is no regular file, such as a terminal, is written as it is.

    Raises:
        OSError: the file cannot be written.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from zeroshard.text_files import write_whole
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder, "a.txt"), "a text")
    ...     Path(folder, "a.txt").read_text("utf-8")
    'a text'
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        path.write_text(text, "utf-8")
        return
    target = Path(os.path.realpath(path))  # a link stays a link
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text(text, "utf-8")
        if target.exists():
            target.open("ab").close()  # a file that may not be written is refused
            with contextlib.suppress(OSError):  # some file systems have no permissions
                shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)
