"""Who waits for what, who lives, who is slow, and what failed first: told by every rank, so that each can name it.

Owns two daemon threads per sharded model. One writes this rank's status to the process group's store and looks at that
of the next rank; the other looks after the first, which the store may keep waiting. It must not know what is waited
for: callers say it in words.

Note: how a rank learns of a failure
    A process that ends closes its connections, so a wait for it fails at once, and the error asks here for the cause:
    what the first rank that failed told before it ended. A process that was stopped, or whose host is gone, keeps them
    open, and gloo cannot be told to end a wait: once the rank before it has missed it for `heartbeat_s`, every rank
    that waits prints the cause and ends its process with status 1. Ranks that cannot reach the store learn nothing any
    more: that is their cause, after the same time.
Note: slow ranks
    All ranks take the same time for a step, for they wait for the slowest. What tells them apart is the time that a
    rank did not wait: its own. The median over the last steps leaves out what only one rank does now and then (to
    write a file, say), and of ranks the lower median is taken, so that of two the slower one can be told.
"""

import logging
import os
import statistics
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

from zeroshard.wire.process import is_child_of

__all__ = ["Watchdog"]

BEAT_S: Final = 0.5
"""Seconds between two signs of life, at most; with a short heartbeat there are some within it."""
BEATS: Final = 8
STAY_BEATS: Final = 1.5
PATIENCE_S: Final = 2.6 * BEAT_S
"""How long the others may take to tell why they closed a connection, before a rank without signs of life is named."""
PACE_S: Final = 5.0
"""Seconds between two comparisons of the ranks' paces."""
PACE_STEPS: Final = 16
"""Steps whose median is a rank's pace; it has none before."""
SLOW: Final = 2.0
EASED: Final = 1.5
"""A rank is slow from the one multiple of the median on, until it is below the other."""
FELT: Final = 0.1
"""Share of a step for which a slow rank must keep the others waiting: less is not worth a word."""
CAUSE: Final = "cause"
ENDED: Final = "has ended; before that it was "
"""How the last words of a rank begin whose interpreter ended, or whose model was deleted."""
WAITS: Final = ("waits for", "gave up waiting for")


@dataclass(eq=False)
class _Status:
    """What a rank does, shared between its threads; replaced whole, so that no lock is needed."""

    store: Store
    rank: int
    world_size: int
    heartbeat_s: float
    now: tuple[str, str, float]
    """Verb, object, and the monotonic time since when."""
    own_s: tuple[float, ...] = ()
    """Of the last steps, each the seconds in which this rank did not wait."""
    step_s: float = 0.0
    """All seconds of the last step."""
    answered_s: float = field(default_factory=time.monotonic)
    """When the store answered last."""
    known: str = ""
    """What failed first, once this rank has read it: the store may go with the process that held it."""
    detail: Callable[[BaseException], str] = lambda error: ""
    """What is to be told beside an error that ends this process."""
    stop: threading.Event = field(default_factory=threading.Event)
    process: int = field(default_factory=os.getpid)

    @property
    def beat_s(self) -> float:
        """Seconds between two signs of life."""
        return min(BEAT_S, self.heartbeat_s / BEATS)

    def tell(self, beat: object) -> None:
        """Publish what this rank does; each time with another `beat`."""
        verb, what, since_s = self.now
        self.store.set(f"status/{self.rank}", f"{beat}\n{time.monotonic() - since_s:.1f}\n{verb} {what}")

    def last_of(self, rank: int) -> str:
        """Return what a rank published last; empty where it has not."""
        key = f"status/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def blame(self, rank: int, why: str) -> None:
        """Tell what failed, unless something did before: what follows from a failure must not hide it."""
        self.store.compare_set(CAUSE, "", f"rank {rank}: {why}")

    def cause(self) -> str:
        """Return what failed first; empty where nothing is known."""
        if not self.known and self.store.check([CAUSE]):
            self.known = self.store.get(CAUSE).decode()
        return self.known

    def part(self) -> None:
        """Tell that this rank is done; the one that may hold the store lets the others end first, for a while.

        Where another is found to wait, that is the cause of its failure, which it must read here before the store goes.
        """
        self.store.set(f"status/{self.rank}", f"end\n0.0\n{ENDED}{' '.join(self.now[:2])}")
        # Where the model was deleted and the interpreter goes on, so does the store.
        if self.rank or threading.main_thread().is_alive():
            return
        others, end_s = range(1, self.world_size), time.monotonic() + 3 * self.beat_s
        before = {rank: self.last_of(rank) for rank in others}
        while time.monotonic() < end_s:
            said = {rank: self.last_of(rank) for rank in others}
            if all(_words(last).startswith(ENDED) for last in said.values()):
                return
            if any(last != before[rank] and _words(last).startswith(WAITS) for rank, last in said.items()):
                self.blame(self.rank, _end_of(self.last_of(self.rank)))
                self.stay()
                return
            time.sleep(self.beat_s / 10)

    def stay(self) -> None:
        """Let the others read the cause, on the rank that may hold the store, before its process ends."""
        if self.rank == 0:
            time.sleep(STAY_BEATS * self.beat_s)


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
        self._stepped_s, self._waited_s = time.monotonic(), 0.0
        now = ("in user code since", "the model was sharded", self._stepped_s)
        self._status = _Status(store, rank, world_size, heartbeat_s, now)
        self._status.tell("start")
        # The threads hold the status alone: they must not keep the model's communicator alive.
        threads = [threading.Thread(target=run, args=(self._status,), daemon=True) for run in (_watch, _guard)]
        for thread in threads:
            thread.start()
        # Runs at exit, too: a thread that returns from the store into an interpreter that ends would abort the process.
        weakref.finalize(self, _end, self._status, threads, _ErrorHook.of(self._status))

    def waits_for(self, what: str) -> None:
        """Note that this rank now waits for `what`."""
        self._status.now = ("waits for", what, time.monotonic())

    def runs_after(self, what: str) -> None:
        """Note that this rank is back in user code after `what`."""
        now_s = time.monotonic()
        self._waited_s += now_s - self._status.now[2]
        self._status.now = ("in user code since", what, now_s)

    def gives_up(self, what: str) -> None:
        """Note that waiting for `what` failed: an error says so, and this process must live to raise and handle it."""
        self._status.now = ("gave up waiting for", what, self._status.now[2])

    def count_step(self, *_: object) -> None:
        """Note the end of a step: how long it took, and how much of that this rank did not wait."""
        status, now_s = self._status, time.monotonic()
        status.step_s = now_s - self._stepped_s
        status.own_s = (*status.own_s[1 - PACE_STEPS :], status.step_s - self._waited_s)
        self._stepped_s, self._waited_s = now_s, 0.0

    def tell_with_errors(self, detail: Callable[[BaseException], str]) -> None:
        """Have `detail(error)` told with an error that ends this process; it may be empty."""
        self._status.detail = detail

    def cause(self, *, is_closed: bool) -> str:
        """Return what failed first; empty where nothing did.

        Args:
            is_closed: whether a connection was closed, so that some process ended: if none says why, the rank is named
                that said that it is done, or that gives no sign of life any more.
        """
        status, end_s = self._status, time.monotonic() + PATIENCE_S
        try:
            before = {rank: status.last_of(rank) for rank in range(status.world_size) if is_closed}
            while is_closed and not status.cause() and time.monotonic() < end_s:
                time.sleep(BEAT_S / 10)
            for rank, last in before.items():
                now = status.last_of(rank)
                if rank != status.rank and (now == last or _words(now).startswith(ENDED)):
                    status.blame(rank, _end_of(now))
            return status.cause()
        except Exception:  # the store is gone
            return status.known or "rank 0: its process is gone, and with it the store, which would tell why"

    def report(self) -> str:
        """Return one line for each rank: what it does, and for how long."""
        status, unknown = self._status, "0\n0.0\nhas published nothing yet"
        try:
            status.tell("report")
            told = [(status.last_of(rank) or unknown).split("\n", 2) for rank in range(status.world_size)]
            return "\n".join(f"  rank {rank}: {text} ({seconds} s)" for rank, (_, seconds, text) in enumerate(told))
        except Exception:  # the store is gone
            return "  (the store that ranks publish it to is gone)"


def _words(published: str) -> str:
    return published.split("\n", 2)[-1]


def _end_of(published: str) -> str:
    """Return what is known of the end of a rank that told no error, from what it published last."""
    words = _words(published)
    if words.startswith(ENDED):
        return f"it ended while others needed it; before that it was {words.removeprefix(ENDED)}"
    # A signal leaves no words, and only the process that started a rank is told which it was.
    return f"its process is gone without a word (a signal, a crash, os._exit); it was last seen to be: {words}"


def _watch(status: _Status) -> None:
    """Give signs of life, look for those of the next rank, and end the process where it waits for one that failed."""
    peer, heard, beat, last_s = (status.rank + 1) % status.world_size, "", 0, time.monotonic()
    heard_s = paced_s = last_s
    slow: frozenset[int] = frozenset()
    while not status.stop.wait(status.beat_s):
        beat += 1
        try:
            status.tell(beat)
            published, now_s = status.last_of(peer), time.monotonic()
            # A gap of its own means that this process was stopped: then it cannot judge others.
            if published != heard or _words(published).startswith(ENDED) or now_s - last_s > 4 * BEAT_S:
                heard, heard_s = published, now_s
            last_s = now_s
            if now_s - heard_s > status.heartbeat_s:
                status.blame(peer, f"no sign of life for {status.heartbeat_s:g} s; last: {_words(published)}")
            cause = status.cause()
            if now_s - paced_s > PACE_S:
                paced_s, slow = now_s, _compare_paces(status, slow)
        except Exception:  # the store is gone: the process group was destroyed, and nobody reads any more
            status.stop.set()
            return
        status.answered_s = time.monotonic()
        if cause and _waits_s(status) > PATIENCE_S:
            _leave(status, f"a rank failed first: {cause}")


def _guard(status: _Status) -> None:
    """End the process where it waits, and the store, which would know the cause, does not answer."""
    last_s = time.monotonic()
    while not status.stop.wait(status.beat_s):
        now_s, gap_s = time.monotonic(), time.monotonic() - last_s
        last_s = now_s
        if gap_s > 4 * BEAT_S:
            status.answered_s = now_s
        if now_s - status.answered_s > status.heartbeat_s and _waits_s(status) > PATIENCE_S:
            _leave(
                status,
                f"the store of the process group, at rank 0's host or its launcher's, has not answered for "
                f"{status.heartbeat_s:g} s: that host, or the network to it, is down",
            )


def _waits_s(status: _Status) -> float:
    """Return how long this rank has waited for others, in seconds; 0 while it does not."""
    verb, _, since_s = status.now
    return time.monotonic() - since_s if verb == "waits for" else 0.0


def _leave(status: _Status, why: str) -> None:
    """Say why, and end the process at once: what the main thread waits for cannot be told to end."""
    place = f"[rank {status.rank}/{status.world_size}]"
    os.write(2, f"{place} ends, since it waits for {status.now[1]}, and {why}\n".encode())
    status.stay()
    os._exit(1)


def _compare_paces(status: _Status, before: frozenset[int]) -> frozenset[int]:
    """Publish this rank's pace; on rank 0, warn of ranks that have become slow, and return those that are."""
    if len(status.own_s) == PACE_STEPS:
        status.store.set(f"pace/{status.rank}", str(statistics.median(status.own_s)))
    keys = [f"pace/{rank}" for rank in range(status.world_size)]
    if status.rank or not status.store.check(keys):
        return before
    paces = [float(pace) for pace in status.store.multi_get(keys)]
    median_s = statistics.median_low(paces)
    slow = {rank for rank, own_s in enumerate(paces) if own_s >= (EASED if rank in before else SLOW) * median_s}
    slow -= {rank for rank in slow if paces[rank] - median_s < FELT * status.step_s}
    for rank in sorted(slow - before):
        logging.getLogger(__name__).warning(
            f"rank {rank} is slow: its own part of a step takes {paces[rank]:.3g} s, that of the median rank "
            f"{median_s:.3g} s, and {status.world_size - 1} rank(s) wait for it."
        )
    return frozenset(slow)


class _ErrorHook:
    """Tells an exception that ends this process to the other ranks: `sys.excepthook`, once for all sharded models."""

    def __init__(self) -> None:
        self._before = sys.excepthook
        self._told: list[_Status] = []

    @classmethod
    def of(cls, status: _Status) -> "_ErrorHook":
        """Return the hook, which tells the ranks of `status`, too, from now on."""
        hook = sys.excepthook if isinstance(sys.excepthook, cls) else cls()
        hook._told.append(status)
        sys.excepthook = hook
        return hook

    def remove(self, status: _Status) -> None:
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


def _end(status: _Status, threads: list[threading.Thread], hook: _ErrorHook) -> None:
    if is_child_of(status.process):
        return
    status.stop.set()
    for thread in threads:
        if thread is not threading.current_thread():  # whose garbage collection may have found the model
            thread.join(timeout=5.0)
    hook.remove(status)
    with suppress(Exception):  # without the store nobody reads any more
        status.part()
