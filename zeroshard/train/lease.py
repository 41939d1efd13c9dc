"""The right to write to the folder of a run: one process at a time has it.

Owns the lock. It belongs to the open file, so it ends with its process, however that ends: nothing is ever left to be
cleaned up. On a disk that several hosts share it holds where the disk's locks do.
"""

import fcntl
import os
import socket
from pathlib import Path
from typing import Final, Self, final

__all__ = ["Lease"]

_NAME: Final = ".lease"
_HOLDER_CHARACTERS: Final = 200


@final
class Lease:
    """Keeps a folder for this process inside the context.

    Args:
        folder: made if it is not there.

    Raises:
        ValueError: on entry, where another process has it; the text names host and process.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from zeroshard.train.lease import Lease
    >>> with tempfile.TemporaryDirectory() as folder, Lease(Path(folder)):
    ...     pass
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = (self._folder / _NAME).open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            holder = self._file.read(_HOLDER_CHARACTERS) or "another process"
            self._file.close()
            raise ValueError(
                f"run.name: {self._folder} is in use by {holder}; wait for its end, or give another --name"
            ) from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
