"""The forks of a process, told to what must not be shared with a child.

Owns the handlers that a process registers for forks, however many models it shards. It must not know what they do:
each says so in `after_fork`, which runs in the child, before anything else of the program does, or in `before_fork`.

Note: what a forked child is
    A DataLoader's worker, most often. It has the memory of the rank as it was, and none of its threads; descriptors,
    and so connections and the store, are the same as the rank's. So it may read and write memory that is its own from
    then on, and must leave alone what the rank and the others still use: it tells nobody anything, and destroys
    nothing that waits for a thread.
"""

import ctypes
import functools
import os
import sys
import weakref
from typing import Protocol

__all__ = ["end_with", "is_child_of", "keep_for_good", "tell_forks", "wait_before_forks"]


class Forked(Protocol):
    """What is told of forks."""

    def after_fork(self) -> None:
        """Let go, in the child, of what the parent still uses."""


class Threaded(Protocol):
    """What has threads, which a child would not have."""

    def before_fork(self) -> None:
        """Wait for them, and let them go, in the parent."""


def tell_forks(one: Forked) -> None:
    """Call `one.after_fork()` in each child that is forked from this process, for as long as `one` lives."""
    _told().add(one)


def wait_before_forks(one: Threaded) -> None:
    """Call `one.before_fork()` before each fork of this process, for as long as `one` lives."""
    _awaited().add(one)


def is_child_of(process: int) -> bool:
    """Tell whether this process was forked from the one with this number."""
    return os.getpid() != process


def end_with(error: Exception) -> None:
    """End the process with an error; for handlers that run at exit."""
    # Python takes no notice of what is raised there, neither of an exit status: only this ends with one, and it leaves
    # unwritten what the program has printed.
    sys.excepthook(type(error), error, None)
    for name in ("stdout", "stderr"):
        getattr(sys, name).flush()
    os._exit(1)


def keep_for_good(*objects: object) -> None:
    """Have these objects never end, not even with the interpreter."""
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


@functools.cache
def _told() -> "weakref.WeakSet[Forked]":
    # A handler cannot be taken back, so there is one, made with the first model that is sharded.
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
