"""Making the n-th file operation of this process do something else."""

import errno
import os
from collections.abc import Callable
from typing import Any

from zeroshard.checkpoint import files

OPERATIONS = [
    *("close", "create", "free_bytes", "make_folder", "names_in", "open_file", "read_at"),
    *("remove", "rename", "size_of", "sync", "sync_folder", "write"),
]


class Failing:
    """Counts file operations of this process from now on, and does something at the n-th."""

    def __init__(self, number: int, act: Callable[[str, tuple[Any, ...]], Any]) -> None:
        self.number, self.act, self.count, self.name = number, act, 0, ""

    def __enter__(self) -> "Failing":
        self.originals = {name: getattr(files, name) for name in OPERATIONS}
        for name, original in self.originals.items():
            setattr(files, name, self.wrapped(name, original))
        return self

    def __exit__(self, *exception: object) -> None:
        for name, original in self.originals.items():
            setattr(files, name, original)

    def wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any) -> Any:
            self.count += 1
            if self.count == self.number:
                self.name = name
                try:
                    if (answer := self.act(name, args)) is not None:
                        return answer
                except OSError:
                    if name == "close":
                        original(*args)  # a descriptor is gone even where closing it reports an error
                    raise
            return original(*args)

        return operation


def refuse(name: str, args: tuple[Any, ...]) -> None:
    """Fail as a disk does: full when it is written to, broken when it is read."""
    number = errno.ENOSPC if name in ("create", "write", "make_folder", "sync") else errno.EIO
    if name == "free_bytes":
        return
    raise OSError(number, os.strerror(number))
