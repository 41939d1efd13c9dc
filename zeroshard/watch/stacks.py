"""The stacks of threads: which calls run.

Owns the reading of frames of other threads. It must not know what functions mean (`watch/whereabouts.py`).
"""

import functools
import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import final

__all__ = ["Call", "stack_of"]


@final
class Call:
    """The running call of a hook's module; torch does not call later hooks if a KeyboardInterrupt ends the module.

    Args:
        hooks: the name of the Python module of the hook; if it is not on the stack, the thread represents the call.
    """

    __slots__ = ("_frame", "_thread")

    def __init__(self, hooks: str) -> None:
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") != hooks and frame.f_back is not None:
            frame = frame.f_back
        # Dynamo wraps each function that it must not compile.
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith((hooks, "torch._dynamo.")):
            frame = frame.f_back
        self._frame, self._thread = frame, threading.get_ident()

    @property
    def is_own(self) -> bool:
        """Whether the call is of this thread."""
        return threading.get_ident() == self._thread

    def is_running(self) -> bool:
        """Return whether the call is still running; any thread may ask, such as that of a backward on a GPU."""
        if not self.is_own:
            return any(frame is self._frame for frame in stack_of(self._thread))
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


def stack_of(thread: int) -> Iterator[FrameType]:
    """Yield the frames of another thread, innermost first; keep none, since a frame keeps what its variables hold.

    Python 3.11 may collect garbage inside the calls that make frame objects. A finalizer that releases the interpreter
    then lets the other thread leave the frames that are being read (a crash), or wait for a lock that
    `sys._current_frames` holds (a deadlock). So there are no collections meanwhile, and one thread reads at a time. A
    `gc.disable()` of the program in these microseconds is lost.
    """
    with _reading():
        is_unsafe = sys.version_info < (3, 12) and gc.isenabled()
        if is_unsafe:
            gc.disable()
        try:
            frame = sys._current_frames().get(thread)
            while frame is not None:
                yield frame
                frame = frame.f_back
        finally:
            if is_unsafe:
                gc.enable()


@functools.cache
def _reading() -> threading.Lock:
    return threading.Lock()
