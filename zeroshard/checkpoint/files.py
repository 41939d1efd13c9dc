"""Single file operations, each a function of its own.

Owns every system call of the package that touches a checkpoint, so that a test can make the n-th of them fail. It must
not know formats. No function follows a link or opens a file that is not regular.
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

MODE, FOLDER_MODE = 0o666, 0o777
"""Permission bits of which the umask of the process takes some away, as of any program's files."""
READ, SEARCH = 0o444, 2
"""Who may read a folder may also open what is in it: a bit two places to the right of that for reading."""


def make_folder(path: Path, mode: int | None = None) -> None:
    """Make a folder; the folder above must exist.

    Args:
        mode: permission bits of the files that will be in it; None for those that the umask leaves.
    """
    if mode is None:
        os.mkdir(path, FOLDER_MODE)
        return
    os.mkdir(path, 0o700)  # closed until it has the bits, whatever the umask
    os.chmod(path, mode | (mode & READ) >> SEARCH)


def create(path: Path, mode: int | None = None) -> int:
    """Create a file, which must not exist, and return its descriptor.

    Args:
        mode: permission bits, exactly; None for those that the umask leaves.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE if mode is None else 0o600)
    if mode is not None:
        os.fchmod(descriptor, mode)
    return descriptor


def write(descriptor: int, data: memoryview) -> int:
    """Write some of `data` and return how many bytes; a full disk may take a part before it refuses."""
    return os.write(descriptor, data)


def start_sync(descriptor: int, offset: int, nbytes: int) -> None:
    """Begin to write a range of a file to the disk, which shortens the wait of `sync`.

    The call is a hint; only `sync` ensures that the bytes are on the disk.
    """
    # Linux begins to write the range, and drops its clean pages; all pages are still dirty.
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
    """Return the free bytes on the disk of a folder."""
    return shutil.disk_usage(path).free


def bytes_in(path: Path) -> int:
    """Return the total bytes of the files in a folder, without files removed meanwhile.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    total = 0
    for name in os.listdir(path):
        with contextlib.suppress(FileNotFoundError):
            total += os.stat(path / name, follow_symlinks=False).st_size
    return total


def open_file(path: Path) -> int:
    """Open a regular file for reading.

    Raises:
        CheckpointError: the file is missing, a link, a pipe or a device, or has an invalid name.
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
        raise CheckpointError(f"{path}: is not a regular file.")
    return descriptor


def refuse_link(path: Path) -> None:
    """Raise CheckpointError if a path is a link; links among its parents are the user's choice."""
    # Unlike Path.is_symlink, this does not raise for an invalid name, which fails on opening.
    if os.path.islink(path):
        raise CheckpointError(
            f"{path}: is a link to '{os.readlink(path)}', and links are not followed. Give the target of the link."
        )


def size_of(descriptor: int) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(descriptor).st_size


def identity_of(descriptor: int) -> tuple[int, ...]:
    """Return numbers of an open file that change if the file is replaced or its contents change."""
    about = os.fstat(descriptor)
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill a part of `buffer` from an offset in a file, and return the number of bytes."""
    return os.preadv(descriptor, [buffer], offset)


def remove(path: Path) -> None:
    """Remove a file."""
    os.unlink(path)


def remove_tree(path: Path) -> None:
    """Remove a folder that this process created, with its contents; ignore failures."""
    shutil.rmtree(path, ignore_errors=True)
