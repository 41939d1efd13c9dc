"""Notification of forks, for objects that a child must not share.

Owns the fork handlers of a process, for all sharded models. It must not know what the objects do: it calls
`before_fork` of objects with threads in the parent, and `after_fork` of objects in the child, before any other code of
the program.

Note: what a forked child is
    Most often a DataLoader worker. It has a copy of the rank's memory, none of its threads, and the same descriptors,
    and therefore the same connections and store. It may read and write its copy of the memory, but must not touch
    anything that ranks still use: it sends no messages, and destroys no object that waits for a thread.
"""

import ctypes
import functools
import os
import sys
import weakref
from typing import Protocol

__all__ = ["end_with", "is_child_of", "keep_for_good", "tell_forks", "wait_before_forks"]


class Forked(Protocol):
    """An object that is notified of forks."""

    def after_fork(self) -> None:
        """Detach the child from resources that the parent still uses."""


class Threaded(Protocol):
    """An object with threads, which do not exist in a forked child."""

    def before_fork(self) -> None:
        """Wait for the threads and release them, in the parent."""


def tell_forks(one: Forked) -> None:
    """Call `one.after_fork()` in each forked child of this process while `one` is alive."""
    _told().add(one)


def wait_before_forks(one: Threaded) -> None:
    """Call `one.before_fork()` before each fork of this process while `one` is alive."""
    _awaited().add(one)


def is_child_of(process: int) -> bool:
    """Return whether this process was forked from the process with this number."""
    return os.getpid() != process


def end_with(error: Exception) -> None:
    """End the process with an error, from an exit handler."""
    # Python ignores exceptions and exit statuses of exit handlers. Only os._exit sets a status, and it drops unflushed
    # output.
    sys.excepthook(type(error), error, None)
    for name in ("stdout", "stderr"):
        getattr(sys, name).flush()
    os._exit(1)


def keep_for_good(*objects: object) -> None:
    """Keep objects alive forever, even at interpreter exit."""
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


@functools.cache
def _told() -> "weakref.WeakSet[Forked]":
    # Handlers cannot be removed, so there is a single one, registered with the first sharded model.
    told: weakref.WeakSet[Forked] = weakref.WeakSet()

    def tell() -> None:
        for one in told:
            one.after_fork()

    os.register_at_fork(after_in_child=tell)
    return told


@functools.cache
def _awaited() -> "weakref.WeakSet[Threaded]":
    awaited: weakref.WeakSet[Threaded] = weakref.WeakSet()

    def wait() -> None:
        for one in list(awaited):
            one.before_fork()

    os.register_at_fork(before=wait)
    return awaited
