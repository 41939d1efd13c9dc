"""Files of text that are whole: as they were, or as they became.

Owns the order of writing and naming. Needs no torch. Files of a checkpoint are written by `checkpoint/files.py`.
"""

import contextlib
import os
import secrets
import shutil
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: str | Path, text: str) -> None:
    """Write a text in UTF-8; a file that was there stays as it was if this fails, as on a full disk.

    The text goes into a file beside it, which then gets the name, and the permissions of the file that was there. What
    another file cannot replace is written in place: a terminal, a descriptor of this process, a file with other names
    or of another user, a file in a folder that takes no new one.

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
    target = Path(os.path.realpath(path))  # a link stays a link
    unfinished = target.with_name(f".{secrets.token_hex(8)}.unfinished")
    if _is_kept(path, target):
        path.write_text(text, "utf-8")
        return
    try:
        try:
            unfinished.touch()
        except PermissionError:
            path.open("r+").close()  # in place, only a file that exists already is written
            path.write_text(text, "utf-8")
            return
        unfinished.write_text(text, "utf-8")
        if target.exists():
            target.open("ab").close()  # a file that may not be written is refused
            with contextlib.suppress(OSError):  # some file systems have no permissions
                shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _is_kept(path: Path, target: Path) -> bool:
    """Return whether a file must stay the one that it is."""
    if path.absolute().as_posix().startswith(("/dev/", "/proc/")) or target.is_symlink():
        return True
    if not target.exists():
        return False
    found = target.stat()
    return not target.is_file() or found.st_nlink > 1 or found.st_uid != os.geteuid()
