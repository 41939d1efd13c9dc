"""Reporting of an uncaught exception to the other ranks before the process ends, and of waits outside of any model.

Owns the single `sys.excepthook` of a process, for all sharded models. It must not know how ranks are informed: each
model provides that.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Protocol, final

from zeroshard.watch.process import is_child_of
from zeroshard.watch.whereabouts import line_of_program

__all__ = ["ErrorHook", "waits_outside"]


class Told(Protocol):
    """The interface for informing the other ranks of one model."""

    rank: int
    process: int

    @property
    def detail(self) -> Callable[[BaseException], str]:
        """Returns text to add to an error."""

    def blame(self, rank: int, why: str) -> None:
        """Publish the cause of a failure, unless a cause is already known."""

    def stay(self) -> None:
        """Wait until the other ranks have read the cause."""

    def waits_for(self, what: str) -> None:
        """Record that this rank waits for `what`."""

    def runs_after(self, what: str) -> None:
        """Record that this rank is back in user code after `what`."""

    def explain(self, error: RuntimeError, what: str) -> RuntimeError:
        """Return the error of a wait for `what` that failed, which tells the cause and what each rank does."""


@final
class ErrorHook:
    """Reports an uncaught exception to the other ranks: `sys.excepthook`, one for all sharded models."""

    def __init__(self) -> None:
        self._before = sys.excepthook
        self.told: list[Told] = []
        """The ranks of each sharded model."""

    @classmethod
    def of(cls, status: Told) -> "ErrorHook":
        """Return the hook, after adding the ranks of `status` to it."""
        hook = sys.excepthook if isinstance(sys.excepthook, cls) else cls()
        hook.told.append(status)
        sys.excepthook = hook
        return hook

    def remove(self, status: Told) -> None:
        """Remove the ranks of `status`, and with the last of them the hook."""
        self.told.remove(status)
        if not self.told and sys.excepthook is self:
            sys.excepthook = self._before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report the error, then call the previous hook. Errors of a forked child are not failures of the rank."""
        told = [status for status in self.told if not is_child_of(status.process)]
        for status in told:
            with suppress(Exception):  # the cause is reported even if its detail fails
                if detail := status.detail(error):
                    error.add_note(detail)
        for status in told:
            with suppress(Exception):  # without the store, no rank can read the cause
                status.blame(status.rank, "\n".join([f"{kind.__name__}: {error}", *getattr(error, "__notes__", [])]))
        self._before(kind, error, trace)
        for status in told[:1]:
            status.stay()


@contextmanager
def waits_outside(call: str) -> Iterator[None]:
    """Record for all sharded models of this process that it waits for others in a call that concerns none of them.

    Raises:
        RankMismatchError: instead of torch's error, if the wait fails and a model is sharded.
    """
    told = list(sys.excepthook.told) if isinstance(sys.excepthook, ErrorHook) else []
    what = f"other ranks {line_of_program() or f'in {call}()'}" if told else ""
    for status in told:
        status.waits_for(what)
    try:
        yield
    except RuntimeError as error:
        if not told:
            raise
        raise told[-1].explain(error, what) from error
    for status in told:
        status.runs_after(what)
