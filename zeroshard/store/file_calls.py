"""Single operations on a rank's own file, each a function of its own, so that a test can make one of them fail.

Owns the system calls. It must not know what lies in the file.
"""

import contextlib
import os
import tempfile
from pathlib import Path

__all__ = ["free_bytes", "kind_of", "make", "opened_directly", "read_at", "reserve", "write_at"]

MODE = 0o600


def make(folder: Path) -> int:
    """Make a file that only this process can open, and that has no name; return its descriptor."""
    with contextlib.suppress(OSError, AttributeError):
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, MODE)
    # File systems of networks have names for all files; then it has one for a moment.
    descriptor, name = tempfile.mkstemp(prefix=".zeroshard-", dir=folder)
    os.unlink(name)
    return descriptor


def opened_directly(descriptor: int) -> int | None:
    """Return another descriptor of a file, past the kernel's cache; None where the file system has none."""
    with contextlib.suppress(OSError, AttributeError):
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    return None


def reserve(descriptor: int, offset: int, nbytes: int) -> None:
    """Take room on the disk: later writes there need none."""
    os.posix_fallocate(descriptor, offset, nbytes)


def read_at(descriptor: int, into: memoryview, offset: int) -> int:
    """Read some bytes and return how many."""
    return os.preadv(descriptor, [into], offset)


def write_at(descriptor: int, data: memoryview, offset: int) -> int:
    """Write some bytes and return how many."""
    return os.pwrite(descriptor, data, offset)


def free_bytes(folder: Path) -> int:
    """Return how much room the folder's disk has for this user."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def kind_of(folder: Path) -> str:
    """Return the name of the folder's file system, such as "ext4"; "" where the kernel does not tell."""
    with contextlib.suppress(OSError):
        device = os.stat(folder).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0]
    return ""
