"""An uncaught error, as a file from which torchrun prints it: once, last, and the user's frames before all others.

Owns `sys.excepthook` of a rank that torchrun started, and the text. It must not read the environment; `zs.init()` does.
Read `CauseFile` first, then `text_of`.

Note: where an error is shown
    torchrun ends all ranks when one fails, and prints the file of the rank that failed first as its last words. So this
    rank prints nothing, unless the file cannot be written, or torchrun starts the ranks anew and then prints no cause.
    Ranks that failed because another one did write a later time, and one line.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Final, final

from zeroshard.table.errors import RankMismatchError
from zeroshard.watch.process import is_child_of
from zeroshard.watch.whereabouts import LIBRARIES

__all__ = ["CauseFile", "text_of"]

VARIABLE: Final = "ZEROSHARD_TRACEBACK"
LATER_S: Final = 5
"""Seconds by which a consequence seems later than its cause: torchrun compares whole seconds."""


@final
class CauseFile:
    """Writes an uncaught error to a file before the process ends: a `sys.excepthook`.

    Args:
        path: the file.
        shows_all: whether frames of libraries are shown, too.
        is_last: whether torchrun prints the file: it does not where it starts the ranks anew.
    """

    def __init__(self, path: str, *, shows_all: bool, is_last: bool) -> None:
        self._path, self._shows_all, self._is_last = path, shows_all, is_last
        self._before, self._process = sys.excepthook, os.getpid()

    @classmethod
    def install(cls, path: str, shows_all: bool, is_last: bool) -> None:
        """Install the hook, once: one around the hook of a sharded model would keep errors from the other ranks."""
        hook: object = sys.excepthook
        while hook is not None and not isinstance(hook, cls):
            hook = getattr(hook, "_before", None)
        if path and hook is None:
            sys.excepthook = cls(path, shows_all=shows_all, is_last=is_last)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Write the error, or call the previous hook where nobody would read the file."""
        is_told = False
        if isinstance(error, Exception) and not is_child_of(self._process):
            is_told = self._write(error, trace) and self._is_last
        if not is_told:
            self._before(kind, error, trace)

    def _write(self, error: Exception, trace: TracebackType | None) -> bool:
        """Write the file in the format of torch's `ErrorHandler`; return whether it is there."""
        late = isinstance(error, RankMismatchError) and error.is_consequence
        text = _first_line(error) if late else text_of(error, trace, shows_all=self._shows_all)
        extra = {"py_callstack": text, "timestamp": str(int(time.time()) + LATER_S * late)}
        try:
            with open(self._path, "w", encoding="utf-8") as file:
                json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)
        except OSError:
            return False
        return True


def text_of(error: BaseException, trace: TracebackType | None, *, shows_all: bool = False) -> str:
    """Return an error as text: what happened, then the lines of the user's program, the outermost first.

    Args:
        shows_all: whether to show frames of libraries, too.

    >>> from zeroshard.watch.cause_file import text_of
    >>> text_of(ValueError("a cause"), None)
    'ValueError: a cause'
    """
    lines = list(_lines_of(error, trace, shows_all))
    earlier = error.__cause__
    while earlier is not None:
        lines += ["because of", *_lines_of(earlier, earlier.__traceback__, shows_all)]
        earlier = earlier.__cause__
    return "\n".join(lines)


def _lines_of(error: BaseException, trace: TracebackType | None, shows_all: bool) -> Iterator[str]:
    yield "".join(traceback.format_exception_only(error)).rstrip().removeprefix(f"{type(error).__module__}.")
    frames = traceback.extract_tb(trace)
    shown = [one for one in frames if shows_all or not one.filename.startswith(LIBRARIES)]
    for place in traceback.format_list(shown):
        yield place.rstrip()
    if hidden := len(frames) - len(shown):
        yield f"  ({hidden} frames of libraries are not shown; {VARIABLE}=full shows them)"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
