"""The exclusive right of one process to write to the folder of a run.

Owns the lock. The lock belongs to the open file, so the end of the process releases it and nothing needs cleanup. On a
disk that several hosts share, the lock works if the disk supports locks.
"""

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Final, Self, final

__all__ = ["Lease"]

_NAME: Final = ".lease"
_HOLDER_CHARACTERS: Final = 200
_PATIENCE_S: Final = 2.0
"""How long another process may still hold the lock: one that only checks, or a rank whose launcher was killed."""
_PAUSE_S: Final = 0.05


@final
class Lease:
    """Holds the lock of a folder inside the context.

    Args:
        folder: created if missing.

    Raises:
        ValueError: on entry, if another process still holds the lock after 2 s; the message names its host and process.

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
        end_s = time.monotonic() + _PATIENCE_S
        while not self._locks():
            if time.monotonic() > end_s:
                self._file.seek(0)
                holder = self._file.read(_HOLDER_CHARACTERS) or "another process"
                self._file.close()
                raise ValueError(
                    f"run.name: {self._folder} is in use by {holder}; wait until it ends, or give another --name"
                )
            time.sleep(_PAUSE_S)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()
        return self

    def _locks(self) -> bool:
        """Take the lock, unless another process holds it; return whether this one does."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def __exit__(self, *exception: object) -> None:
        self._file.close()
