"""Single file operations, each a function of its own.

Owns every system call of the package that touches a checkpoint, so that a test can make the n-th of them fail. It must
not know formats. Nothing here follows a link or opens what is no regular file.
"""

import contextlib
import os
import shutil
import stat
from pathlib import Path

from zeroshard.table.errors import CheckpointError

__all__ = [
    "bytes_in",
    "close",
    "create",
    "free_bytes",
    "identity_of",
    "make_folder",
    "names_in",
    "open_file",
    "read_at",
    "refuse_link",
    "remove",
    "remove_tree",
    "rename",
    "size_of",
    "start_sync",
    "sync",
    "sync_folder",
    "write",
]

MODE, FOLDER_MODE = 0o600, 0o700


def make_folder(path: Path) -> None:
    """Make a folder that only its owner reads; the folder above must exist."""
    os.mkdir(path, FOLDER_MODE)


def create(path: Path) -> int:
    """Create a file, which must not exist, and return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)


def write(descriptor: int, data: memoryview) -> int:
    """Write some of `data` and return how many bytes; a full disk may take a part before it refuses."""
    return os.write(descriptor, data)


def start_sync(descriptor: int, offset: int, nbytes: int) -> None:
    """Have a range of a file that was just written go to the disk already, so that `sync` has less to wait for.

    It is a hint; whether the bytes got there, `sync` says.
    """
    # Linux begins to write the range back, and drops of it what is clean, which nothing of it is yet.
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def sync(descriptor: int) -> None:
    """Return when the file's bytes are on the disk."""
    os.fsync(descriptor)


def close(descriptor: int) -> None:
    """Close a descriptor."""
    os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Give a file or folder another name, in one indivisible step."""
    os.rename(source, target)


def sync_folder(path: Path) -> None:
    """Return when the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def names_in(path: Path) -> list[str]:
    """Return the sorted names in a folder."""
    return sorted(os.listdir(path))


def free_bytes(path: Path) -> int:
    """Return how many bytes the disk of a folder still takes."""
    return shutil.disk_usage(path).free


def bytes_in(path: Path) -> int:
    """Return how many bytes the files in a folder have together, as far as they stay there.

    Raises:
        FileNotFoundError: the folder is gone.
    """
    total = 0
    for name in os.listdir(path):
        with contextlib.suppress(FileNotFoundError):
            total += os.stat(path / name, follow_symlinks=False).st_size
    return total


def open_file(path: Path) -> int:
    """Open a regular file for reading.

    Raises:
        CheckpointError: it is missing, a link, a pipe or a device, or what it is called no file can be.
    """
    try:
        # A pipe would block without O_NONBLOCK.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        refuse_link(path)
        why = error.strerror if isinstance(error, OSError) else "no file can have this name"
        raise CheckpointError(f"{path}: cannot be opened ({why}).") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: is no regular file.")
    return descriptor


def refuse_link(path: Path) -> None:
    """Raise CheckpointError where a path is itself a link; a link above it is the user's own way there."""
    # Unlike Path.is_symlink this raises nothing of a name that no file can have: opening it says so.
    if os.path.islink(path):
        raise CheckpointError(
            f"{path}: is a link to '{os.readlink(path)}', and links are not followed. Give what it leads to."
        )


def size_of(descriptor: int) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(descriptor).st_size


def identity_of(descriptor: int) -> tuple[int, ...]:
    """Return numbers of an open file that differ once another has its name, or its contents were changed."""
    about = os.fstat(descriptor)
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill some of `buffer` from a place in a file and return how many bytes."""
    return os.preadv(descriptor, [buffer], offset)


def remove(path: Path) -> None:
    """Remove a file."""
    os.unlink(path)


def remove_tree(path: Path) -> None:
    """Remove a folder that this process made, with what is in it; failing to is no error."""
    shutil.rmtree(path, ignore_errors=True)
