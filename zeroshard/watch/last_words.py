"""An exception that ends this process, told to the other ranks before it does.

Owns the one `sys.excepthook` of a process, however many models it shards. It must not know how ranks are told: each
model says so.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol, final

from zeroshard.watch.process import is_child_of

__all__ = ["ErrorHook"]


class Told(Protocol):
    """The ranks of one model, as this one tells them."""

    rank: int
    process: int

    @property
    def detail(self) -> Callable[[BaseException], str]:
        """What is to be told beside an error."""

    def blame(self, rank: int, why: str) -> None:
        """Tell what failed, unless something did before."""

    def stay(self) -> None:
        """Let the others read it."""


@final
class ErrorHook:
    """Tells an exception that ends this process to the other ranks: `sys.excepthook`, once for all sharded models."""

    def __init__(self) -> None:
        self._before = sys.excepthook
        self._told: list[Told] = []

    @classmethod
    def of(cls, status: Told) -> "ErrorHook":
        """Return the hook, which tells the ranks of `status`, too, from now on."""
        hook = sys.excepthook if isinstance(sys.excepthook, cls) else cls()
        hook._told.append(status)
        sys.excepthook = hook
        return hook

    def remove(self, status: Told) -> None:
        """Tell the ranks of `status` no more; leave with the last."""
        self._told.remove(status)
        if not self._told and sys.excepthook is self:
            sys.excepthook = self._before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Tell, and do what is done without this hook. What a forked child raises is not the rank's failure."""
        told = [status for status in self._told if not is_child_of(status.process)]
        for status in told:
            with suppress(Exception):  # a detail must not cost the cause
                if detail := status.detail(error):
                    error.add_note(detail)
        for status in told:
            with suppress(Exception):  # without the store nobody reads any more
                status.blame(status.rank, "\n".join([f"{kind.__name__}: {error}", *getattr(error, "__notes__", [])]))
        self._before(kind, error, trace)
        for status in told[:1]:
            status.stay()
