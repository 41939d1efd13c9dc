"""Who waits for what, who still lives, and what failed first: told by every rank, so that each can name the cause.

Owns one daemon thread per sharded model, which writes this rank's status to the process group's store and looks at that
of the next rank. It must not know what is waited for: callers say it in words.

Note: how a rank learns of a failure
    A process that ends closes its connections, so a wait for it fails at once, and the error asks here for the cause:
    what the first rank that failed told before it ended. A process that was stopped, or whose host is gone, keeps them
    open, and gloo can not be told to end a wait: once the rank before it has missed it for `heartbeat_s`, every rank
    that waits prints the cause and ends its process with status 1.
"""

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from torch.distributed import Store

__all__ = ["Watchdog"]

BEAT_S: Final = 0.5
"""Seconds between two signs of life."""
PATIENCE_S: Final = 2.6 * BEAT_S
"""How long the others may take to tell why they closed a connection, before a rank without signs of life is named."""
CAUSE: Final = "cause"
ENDED: Final = "ended"


@dataclass
class _Status:
    """What a rank does, shared between its threads; replaced whole, so that no lock is needed."""

    store: Store
    rank: int
    world_size: int
    heartbeat_s: float
    now: tuple[str, str, float]
    stop: threading.Event = field(default_factory=threading.Event)

    def tell(self, beat: object) -> None:
        """Publish what this rank does; each time with another `beat`."""
        verb, what, since = self.now
        self.store.set(f"status/{self.rank}", f"{beat}\n{since}\n{verb} {what}")

    def last_of(self, rank: int) -> str:
        """Return what a rank published last; empty where it has not."""
        key = f"status/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def blame(self, rank: int, why: str) -> None:
        """Tell what failed, unless something did before: what follows from a failure must not hide it."""
        self.store.compare_set(CAUSE, "", f"rank {rank}: {why}")

    def cause(self) -> str:
        """Return what failed first; empty where nothing is known."""
        return self.store.get(CAUSE).decode() if self.store.check([CAUSE]) else ""


class Watchdog:
    """Publishes what this rank does, watches the next rank, and reads what the others do.

    Args:
        store: the store all ranks share.
        rank, world_size: this rank's place.
        limit_s: the longest wait that callers allow.
        heartbeat_s: how long a rank may give no sign of life. One that holds the interpreter's lock gives none.
    """

    def __init__(self, store: Store, rank: int, world_size: int, limit_s: float, heartbeat_s: float) -> None:
        self.limit_s = limit_s
        now = ("in user code since", "the model was sharded", time.time())
        self._status = _Status(store, rank, world_size, heartbeat_s, now)
        self._status.tell("start")
        # The thread holds the status alone: it must not keep the model's communicator alive.
        thread = threading.Thread(target=_watch, args=(self._status,), daemon=True)
        thread.start()
        hook = _tell_errors(self._status)
        # Runs at exit, too: a thread that returns from the store into an interpreter that ends would abort the process.
        weakref.finalize(self, _end, self._status, thread, hook)

    def waits_for(self, what: str) -> None:
        """Note that this rank now waits for `what`."""
        self._status.now = ("waits for", what, time.time())

    def runs_after(self, what: str) -> None:
        """Note that this rank is back in user code after `what`."""
        self._status.now = ("in user code since", what, time.time())

    def cause(self, *, is_closed: bool) -> str:
        """Return what failed first; empty where nothing did.

        Args:
            is_closed: whether a connection was closed, so that some process ended: if it does not say why, it was
                killed, and the rank that gives no sign of life any more is named.
        """
        status, end_s = self._status, time.monotonic() + PATIENCE_S
        before = {rank: status.last_of(rank) for rank in range(status.world_size) if is_closed}
        while is_closed and not status.cause() and time.monotonic() < end_s:
            time.sleep(BEAT_S / 10)
        for rank, last in before.items():
            if rank != status.rank and status.last_of(rank) == last:
                how = "ended while others needed it" if _words(last) == ENDED else "was killed"
                status.blame(rank, f"its process {how}; it was last seen to be: {_words(last)}")
        return status.cause()

    def report(self) -> str:
        """Return one line for each rank: what it does, and for how long."""
        self._status.tell("report")
        lines = []
        for rank in range(self._status.world_size):
            unknown = f"0\n{time.time()}\nhas published nothing yet"
            _, since, text = (self._status.last_of(rank) or unknown).split("\n", 2)
            lines.append(f"  rank {rank}: {text} ({time.time() - float(since):.1f} s)")
        return "\n".join(lines)


def _words(published: str) -> str:
    return published.split("\n", 2)[-1]


def _watch(status: _Status) -> None:
    """Give signs of life, look for those of the next rank, and end the process where it waits for one that failed."""
    peer, heard, beat, last_s = (status.rank + 1) % status.world_size, "", 0, time.monotonic()
    heard_s = last_s
    while not status.stop.wait(min(BEAT_S, status.heartbeat_s / 4)):
        beat += 1
        try:
            status.tell(beat)
            published, now_s = status.last_of(peer), time.monotonic()
            # A gap of its own means that this process was stopped: then it can not judge others.
            if published != heard or _words(published) == ENDED or now_s - last_s > 4 * BEAT_S:
                heard, heard_s = published, now_s
            last_s = now_s
            if now_s - heard_s > status.heartbeat_s:
                status.blame(peer, f"no sign of life for {status.heartbeat_s:g} s; last: {_words(published)}")
            cause = status.cause()
        except Exception:  # the store is gone: the process group was destroyed, and nobody reads any more
            return
        verb, what, since = status.now
        if cause and verb == "waits for" and time.time() - since > PATIENCE_S:
            place = f"[rank {status.rank}/{status.world_size}]"
            os.write(2, f"{place} ends, since it waits for {what}, and a rank failed first: {cause}\n".encode())
            os._exit(1)


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def _tell_errors(status: _Status) -> tuple[Hook, Hook]:
    """Have an exception that ends this process be told to the others; return the hook and the one before it."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(Exception):  # without the store nobody reads any more
            status.blame(status.rank, f"{kind.__name__}: {error}")
        before(kind, error, trace)

    sys.excepthook = hook
    return hook, before


def _end(status: _Status, thread: threading.Thread, hooks: tuple[Hook, Hook]) -> None:
    status.stop.set()
    thread.join(timeout=5.0)
    if sys.excepthook is hooks[0]:
        sys.excepthook = hooks[1]
    with suppress(Exception):  # without the store nobody reads any more
        status.store.set(f"status/{status.rank}", f"end\n{time.time()}\n{ENDED}")
