"""Atomic creation of a folder: it is filled under a temporary name, flushed, and renamed.

Owns the temporary names, and the removal of folders that a killed process left. Without torch. It must not know the
folder's contents. Read `files.py` first.

Note: names
    `.tmp-<name>-<host>-<process>-<random>` is an incomplete folder. Nothing reads it; the next attempt at the same name
    removes it if its process has ended on this host.
"""

import os
import re
import secrets
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeroshard.checkpoint import files
from zeroshard.table.errors import CheckpointError

__all__ = ["begin", "commit", "new_attempt", "new_folder", "temporary_folder"]


def new_attempt() -> str:
    """Return a name for an attempt, with the host and the process."""
    return f"{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def temporary_folder(path: Path, attempt: str) -> Path:
    """Return the temporary path at which the folder `path` is filled."""
    return path.parent / f".tmp-{path.name}-{attempt}"


def begin(path: Path) -> None:
    """Create the parents of a new folder, and remove earlier attempts of ended processes.

    Raises:
        CheckpointError: something has the name already.
    """
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} exists, and zeroshard overwrites nothing. Choose another name.")
    for above in [*reversed(path.parent.parents), path.parent]:
        if not above.exists():
            with suppress(FileExistsError):  # another job may make it meanwhile
                files.make_folder(above)
            files.sync_folder(above.parent)
    _remove_dead(path)


def commit(folder: Path, path: Path) -> None:
    """Rename a complete and flushed folder atomically; on return, the name is on the disk."""
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} was created meanwhile, and zeroshard overwrites nothing. Choose another name.")
    files.rename(folder, path)
    files.sync_folder(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill with flushed files; it becomes `path` on exit, complete or not at all.

    Raises:
        CheckpointError: something has the name already.
    """
    begin(path)
    folder = temporary_folder(path, new_attempt())
    files.make_folder(folder)
    try:
        yield folder
        files.sync_folder(folder)
        commit(folder, path)
    except BaseException:
        files.remove_tree(folder)
        raise


def _remove_dead(path: Path) -> None:
    """Remove attempts at the same folder whose process on this host has ended."""
    own = re.compile(rf"\.tmp-{re.escape(path.name)}-{_host()}-(\d+)-[0-9a-f]{{8}}")
    for name in files.names_in(path.parent):
        match = own.fullmatch(name)
        if match and not _is_alive(int(match[1])):
            files.remove_tree(path.parent / name)


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True
