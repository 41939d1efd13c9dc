"""The watchdog: every rank publishes its operation, heartbeat and pace, so that errors name the rank at fault.

Owns two daemon threads per sharded model, and a third one on a device. One observes the ranks of this host through
shared memory (`watch/pages.py`); another one talks to the process group's store, which may block; the third one asks
the device, whose driver may block. It must not know the meaning of operations: callers describe them in words.

Note: how a rank learns of a failure
    A process that ends closes its connections, so a wait for it fails at once. The error text gets the cause from here:
    the report of the first failed rank. If a process ended without a report, the ranks of its host publish that. A
    stopped process, or a process on an unreachable host, keeps its connections open, and gloo cannot cancel a wait.
    After `heartbeat_s` without a heartbeat, observed by a rank of its host or by the preceding host, every waiting rank
    prints the cause and ends its process with status 1. Ranks that cannot reach the store for that time end with that
    as their cause.
Note: requests to the store
    Each rank writes two heartbeats a second to its page. Eight times per heartbeat limit, the first living rank of
    a host writes the status of all its ranks to the store, and reads the status of the next host and the cause: two
    requests. While a rank waits for others, or the next host misses heartbeats, it reads twice a second.
Note: waits of a device
    On a GPU a wait for a collective blocks the device's stream, and the host continues to queue kernels. If a peer is
    missing, the host hangs only later, when it reads a number from the device. Therefore the engine records a mark (an
    event) in the stream behind the last wait of each pass, and a thread here polls the mark. A query may block, as
    while the host frees memory of the device; no heartbeat waits for it. A rank whose device has not reached a mark for
    `heartbeat_s` counts as waiting. If another rank failed, such a rank ends its process as soon as a rank whose host
    waits does.
"""

import os
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, final

from torch.distributed import Store

from zeroshard.table.errors import RankMismatchError
from zeroshard.watch.last_words import ErrorHook
from zeroshard.watch.marks import Marks
from zeroshard.watch.paces import Warnings
from zeroshard.watch.pages import Pages, numbers_of, words_of
from zeroshard.watch.process import is_child_of
from zeroshard.watch.whereabouts import line_of_program

__all__ = ["Watchdog"]

BEAT_S: Final = 0.5
"""Maximum seconds between two heartbeats on a page; a short heartbeat limit shortens the interval."""
BEATS: Final = 8
"""Heartbeats in the store within `heartbeat_s`."""
STAY_BEATS: Final = 2.0
PATIENCE_S: Final = 2.6 * BEAT_S
"""Seconds for the reason of a closed connection to arrive, before a rank without a heartbeat is named."""
STALE_BEATS: Final = 4
"""Missed heartbeats after which another rank of the host takes over the store."""
HURRY: Final = 5
"""Reads of pages per beat while a rank of the host waits for long."""
PACE_S: Final = 5.0
"""Seconds between two comparisons of the ranks' paces."""
PACE_STEPS: Final = 16
"""Number of steps whose median is the pace of a rank; before that, it has none."""
CAUSE: Final = "cause"
NOTHING: Final = "-"
"""The cause while nothing has failed: a request for several keys fails if one is missing."""
ENDED: Final = "has ended; before that it was "
"""Prefix of the last status of a rank whose interpreter ended, or whose model was deleted."""
WAITS: Final = ("waits for", "gave up waiting for")
AFTER: Final = "in user code since"


@dataclass(eq=False)
class _Status:
    """The status of a rank, shared between its threads; values are replaced as a whole, which needs no lock."""

    store: Store
    rank: int
    numbers: Sequence[int]
    """The number of each rank in the process group."""
    place: str
    """This rank, for errors."""
    limit_s: float
    """Maximum seconds that a device may wait for one operation."""
    heartbeat_s: float
    now: tuple[str, str, float]
    """Verb, object, and the monotonic time since when."""
    clock: Callable[[], float] = time.monotonic
    doing: str = ""
    """What this rank does meanwhile, beginning with a comma, as `Watchdog.does` was told."""
    own_s: tuple[float, ...] = ()
    """For each of the last steps, the seconds in which this rank did not wait."""
    step_s: float = 0.0
    """Duration of the last step in seconds."""
    waited_s: float = 0.0
    """Seconds of the running step in which this rank waited."""
    answered_s: float = 0.0
    """Time of the last answer of the store to a rank of this host."""
    known: str = ""
    """The first failure, once this rank has read it: the store may end with its process."""
    detail: Callable[[BaseException], str] = lambda error: ""
    """Returns text to add to an error that ends this process."""
    pages: Pages = field(init=False)
    marks: Marks = field(default_factory=Marks)
    leads: bool = False
    """Whether this rank talks to the store for its host."""
    is_in_hurry: bool = False
    """Whether a rank of this host failed, or waits longer than ranks usually wait within a step."""
    has_news: bool = False
    """Whether a rank of this host knows the first failure."""
    suspects: dict[int, str] = field(default_factory=dict)
    """Failed ranks of this host, with their errors."""
    stop: threading.Event = field(default_factory=threading.Event)
    wake: threading.Event = field(default_factory=threading.Event)
    """Wakes the thread that talks to the store."""
    process: int = field(default_factory=os.getpid)

    @property
    def may_host_store(self) -> bool:
        """Whether the store may end with this process."""
        return self.numbers[self.rank] == 0

    @property
    def beat_s(self) -> float:
        """Seconds between two heartbeats on this host."""
        return min(BEAT_S, self.heartbeat_s / BEATS)

    @property
    def told_s(self) -> float:
        """Seconds between two heartbeats in the store."""
        return self.heartbeat_s / BEATS

    @property
    def missed_s(self) -> float:
        """Seconds after which a host is missing, chosen so that all ranks know within `heartbeat_s` plus one second.

        A status is up to `told_s` old when it is read; the next read, and the read of waiting ranks, add a beat each.
        """
        return min(self.heartbeat_s, self.heartbeat_s + 1.0 - self.told_s - 3 * self.beat_s)

    def waiting(self) -> tuple[str, float]:
        """Return the operation that the host or device waits for, and for how many seconds; empty without a wait."""
        verb, what, since_s = self.now
        if verb not in WAITS:
            what, since_s = self.marks.first()
        return (what, self.clock() - since_s) if what and verb != WAITS[1] else ("", 0.0)

    def page(self, beat: object) -> str:
        """Return the page text of this rank; `beat` changes with each heartbeat."""
        verb, what, since_s = self.now
        behind, waits_s = self.waiting()
        if verb not in WAITS and waits_s > self.heartbeat_s:
            verb, what, since_s = WAITS[0], f"{behind}, behind which its device is queued", self.clock() - waits_s
        if verb in (AFTER, WAITS[0]) and (line := line_of_program()) not in what:
            what = f"{what}, now {line}"
        pace = statistics.median(self.own_s) if len(self.own_s) == PACE_STEPS else ""
        numbers = f"{int(bool(self.known))} {self.answered_s} {waits_s} {pace}"
        return f"{beat}\n{numbers}\n{self.clock() - since_s:.1f}\n{verb} {what}{self.doing}"

    def waits_for(self, what: str) -> None:
        """Record that this rank waits for `what`."""
        self.now = (WAITS[0], what, self.clock())

    def runs_after(self, what: str) -> None:
        """Record that this rank is back in user code after `what`."""
        now_s = self.clock()
        self.waited_s += now_s - self.now[2]
        self.now = (AFTER, what, now_s)

    def gives_up(self, what: str) -> None:
        """Record that the wait for `what` failed: this process must live on to raise and handle the error."""
        self.now = (WAITS[1], what, self.now[2])

    def publish(self) -> None:
        """Write the status of the ranks of this host to the store."""
        self.store.set(f"host/{self.pages.near[0]}", "\0".join(map(self.pages.read, self.pages.near)))

    def said(self) -> dict[int, str]:
        """Return the last status of every rank, by rank. One request."""
        far = [ranks for ranks in self.pages.hosts if ranks != self.pages.near]
        values = self.store.multi_get([CAUSE, *(f"host/{ranks[0]}" for ranks in far)])
        found = dict.fromkeys(range(len(self.numbers)), "")
        found |= {rank: self.pages.read(rank) for rank in self.pages.near}
        for ranks, value in zip(far, values[1:], strict=True):
            # Before the first status of a host, the store has the status of each rank.
            found |= dict(zip(ranks, value.decode().split("\0"), strict=False))
        return found

    def blame(self, rank: int, why: str) -> None:
        """Publish a cause, unless one is known: consequences of a failure must not hide it."""
        self.know(self.store.compare_set(CAUSE, NOTHING, f"rank {self.numbers[rank]}: {why}"))
        # The store may end with this process, so the ranks of this host read it now.
        self.pages.write(self.page(f"blame {rank}"))

    def cause(self) -> str:
        """Return the first failure; empty if none is known."""
        return self.known or self.know(self.store.get(CAUSE))

    def know(self, cause: bytes) -> str:
        """Keep the cause that the store has."""
        self.known = self.known or cause.decode().removeprefix(NOTHING)
        return self.known

    def find_cause(self, *, is_closed: bool) -> str:
        """Return the first failure; empty if none is known.

        Args:
            is_closed: whether a connection was closed by the end of a process. Without a reported reason, the result
                names a rank that has finished, or that has no heartbeat.
        """
        # Hosts write to the store in turn; the host of a killed rank reports it at once.
        end_s = time.monotonic() + max(PATIENCE_S, 2.2 * self.told_s if len(self.pages.hosts) > 1 else 0.0)
        try:
            before = self.said() if is_closed else {}
            while is_closed and not self.cause() and time.monotonic() < end_s:
                time.sleep(BEAT_S / 10 * max(1.0, len(self.numbers) / 100))
            for rank, now in self.said().items() if before and not self.known else ():
                if rank != self.rank and (now == before[rank] or words_of(now).startswith(ENDED)):
                    self.blame(rank, _end_of(now))
            return self.cause()
        except Exception:  # the store is gone
            gone = "its process is gone, and with it the store, which would tell why"
            first = [rank for rank in self.pages.near if self.numbers[rank] == 0]
            return self.known or f"rank 0: {_end_of(self.pages.read(first[0])) if first else gone}"

    def explain(self, error: RuntimeError, what: str) -> RankMismatchError:
        """Return the error of a wait for `what` that failed, with the cause and what each rank does."""
        self.gives_up(what)
        reason = str(error).splitlines()[0]
        cause, report = self.find_cause(is_closed="imed out" not in reason), _report(self)
        first = (
            f"Another rank failed; this one ends. {cause}\n{self.place} noticed it"
            if cause
            else f"{self.place} gave up"
        )
        make = RankMismatchError.of_another if cause else RankMismatchError
        return make(
            f"{first} while it waited for {what}: {reason}\nWhat each rank does:\n{report}\n"
            "Every rank must make the same passes, norms, steps and calls. A rank whose process has ended closes its "
            f"connections at once; any other has watchdog_s={self.limit_s:g} seconds."
        )

    def part(self) -> None:
        """Publish that this rank is done.

        The rank that may host the store waits for a while until the others end. If another rank still waits, this end
        is the cause of its failure, which it must read before the store ends.
        """
        self.pages.write(f"end\n0 0 0 \n0.0\n{ENDED}{' '.join(self.now[:2])}")
        self.publish()
        # After the deletion of a model, the interpreter and the store continue.
        if not self.may_host_store or threading.main_thread().is_alive():
            return
        end_s, before = self.clock() + 3 * self.beat_s, self.said()
        while self.clock() < end_s:
            said = self.said()
            if all(words_of(last).startswith(ENDED) for last in said.values()):
                return
            if any(last != before[rank] and words_of(last).startswith(WAITS) for rank, last in said.items()):
                self.blame(self.rank, _end_of(said[self.rank]))
                self.stay()
                return
            time.sleep(self.beat_s / 10)

    def stay(self) -> None:
        """On the rank that may host the store, wait until the others have read the cause."""
        if self.may_host_store:
            time.sleep(STAY_BEATS * self.beat_s)


class Watchdog:
    """Publishes the status of this rank, and observes the other ranks.

    Args:
        store: the store of all ranks.
        rank: the index of this rank.
        numbers: the number of each rank in the process group.
        place: this rank, for errors.
        limit_s: the longest wait of callers, in seconds.
        heartbeat_s: seconds without a heartbeat after which a rank is missing. A thread that holds the interpreter's
            lock prevents heartbeats.
    """

    def __init__(
        self, store: Store, rank: int, numbers: Sequence[int], place: str, limit_s: float, heartbeat_s: float
    ) -> None:
        self._behind = ""
        self.record: Callable[[], Callable[[], bool]] | None = None
        """For waits of a device: marks its stream, and returns a function that tells whether the device passed the
        mark."""
        self._stepped_s = time.monotonic()
        now = (AFTER, "the model was sharded", self._stepped_s)
        self._status = status = _Status(store, rank, numbers, place, limit_s, heartbeat_s, now)
        store.compare_set(CAUSE, "", NOTHING)
        # The store has a status of each host before any rank reads it.
        store.set(f"host/{rank}", status.page("start"))
        status.pages = Pages(store, rank, len(numbers), status.page("start"))
        status.answered_s = time.monotonic()
        status.publish()
        # The threads reference only the status: they must not keep the model's communicator alive.
        threads = [threading.Thread(target=run, args=(status,), daemon=True) for run in (_look_after, _speak)]
        for thread in threads:
            thread.start()
        self._threads = threads
        # Also runs at exit: a thread that returns from the store during interpreter exit would abort the process.
        self.close = weakref.finalize(self, _end, self._status, threads, ErrorHook.of(self._status))
        """Ends the threads."""

    @property
    def is_alive(self) -> Callable[[int], bool]:
        """Tells whether the process of a rank may still run; always True for a rank of another host."""
        return self._status.pages.is_alive

    def waits_for(self, what: str) -> None:
        """Record that this rank waits for `what`."""
        self.mark()
        self._status.waits_for(what)

    def runs_after(self, what: str) -> None:
        """Record that this rank is back in user code after `what`."""
        self._status.runs_after(what)

    def does(self, what: str) -> None:
        """Record what this rank does, whatever it waits for meanwhile; "" for nothing that says more than the waits."""
        self._status.doing = what and f", in {what}"

    def queues_behind(self, what: str) -> None:
        """Record that the device waits for `what`, while the host continues."""
        self._behind, self._status.now = what, (AFTER, what, time.monotonic())

    def mark(self) -> None:
        """Mark the stream of the device, if a wait was queued since the last mark."""
        if self._behind and self.record is not None:
            if not self._status.marks.is_polled:
                self._threads.append(self._status.marks.start_polling(self._status.stop, self._status.beat_s / HURRY))
            self._status.marks.add(self.record(), self._behind, time.monotonic())
        self._behind = ""

    def count_step(self, *_: object) -> None:
        """Record the end of a step: its duration, and the time that this rank did not wait."""
        # After an update on the device, no other mark follows for long.
        self.mark()
        status, now_s = self._status, time.monotonic()
        status.step_s = now_s - self._stepped_s
        status.own_s = (*status.own_s[1 - PACE_STEPS :], status.step_s - status.waited_s)
        self._stepped_s, status.waited_s = now_s, 0.0

    def tell_with_errors(self, detail: Callable[[BaseException], str]) -> None:
        """Add `detail(error)`, which may be empty, to the report of an error that ends this process."""
        self._status.detail = detail

    def cause(self, *, is_closed: bool) -> str:
        """Return the first failure, as `_Status.find_cause` does."""
        return self._status.find_cause(is_closed=is_closed)

    def explain(self, error: RuntimeError, what: str) -> RankMismatchError:
        """Return the error of a wait for `what` that failed, with the cause and what each rank does."""
        return self._status.explain(error, what)

    def report(self) -> str:
        """Return one line for each rank: its operation, and for how long."""
        return _report(self._status)


def _end_of(published: str) -> str:
    """Describe the end of a rank without an error, from its last status."""
    words = words_of(published)
    if words.startswith(ENDED):
        return (
            f"it ended while others needed it; before that it was {words.removeprefix(ENDED)} (if it had fewer batches "
            "than others: zero.agree() decides alike whether there is a next one; if others save or evaluate alone: "
            "every rank must call)"
        )
    # Only the parent of a process learns the number of a signal.
    end = "its process exited without reporting an error (a signal, a crash, os._exit)"
    return f"{end}; it was last seen to be: {words}"


@final
class _Near:
    """Writes heartbeats to this rank's page, and checks those of its host's ranks."""

    def __init__(self, status: _Status) -> None:
        self._status, self._beat, self._last_s = status, 0, status.clock()
        self._heard: dict[int, tuple[str, float]] = {}

    def look(self) -> str:
        """Check once; return the reason why this process must end, or ""."""
        status, now_s = self._status, self._status.clock()
        if now_s - self._last_s > 4 * BEAT_S:
            # A gap in this rank's own checks means that this process was stopped, so it cannot judge others.
            self._heard, status.answered_s = {}, now_s
        self._last_s, self._beat = now_s, self._beat + 1
        if not status.stop.is_set():  # the last page of this rank says that it has ended
            status.pages.write(status.page(self._beat))
        living, has_news, hurries, suspects = [], False, False, {}
        for rank in status.pages.near:
            text = status.pages.read(rank)
            if text != self._heard.get(rank, ("", 0.0))[0]:
                self._heard[rank] = text, now_s
            silent_s = now_s - self._heard[rank][1]
            knows, answered_s, waited_s, _ = numbers_of(text)
            has_news |= knows == "1"
            if words_of(text).startswith(ENDED):
                continue
            if not status.pages.is_alive(rank):
                suspects[rank] = _end_of(text)
            elif silent_s > status.heartbeat_s:
                suspects[rank] = f"no sign of life for {status.heartbeat_s:g} s; last: {words_of(text)}"
            elif silent_s <= STALE_BEATS * status.beat_s:
                living.append(rank)
                is_long = float(waited_s) > (
                    status.beat_s / 2 if words_of(text).startswith(WAITS[0]) else status.told_s
                )
                hurries = hurries or is_long
                status.answered_s = max(status.answered_s, float(answered_s))
        # This rank may have ended since its page was written: on a busy machine its end does not wait for this thread.
        status.leads, status.suspects = living[:1] == [status.rank], suspects
        status.is_in_hurry, status.has_news = hurries or bool(suspects), has_news
        if (suspects or has_news) and not status.known:
            status.wake.set()
        return self._why_to_end(now_s)

    def _why_to_end(self, now_s: float) -> str:
        status = self._status
        waits_s, is_device = status.waiting()[1], status.now[0] != WAITS[0]
        if status.known and waits_s > PATIENCE_S:
            return f"a rank failed first: {status.known}"
        patience_s = status.heartbeat_s if is_device else PATIENCE_S
        if now_s - status.answered_s > status.heartbeat_s and waits_s > patience_s:
            return (
                f"the store of the process group, at rank 0's host or its launcher's, has not answered for "
                f"{status.heartbeat_s:g} s: that host, or the network to it, is down"
            )
        if is_device and waits_s > status.limit_s:
            return f"its device has waited for watchdog_s={status.limit_s:g} seconds.\n{_report(status)}"
        return ""


@final
class _Far:
    """Talks to the store for this host, if this rank is its first living rank."""

    def __init__(self, status: _Status) -> None:
        self._status, self._heard = status, ""
        self._warnings = Warnings(status.numbers, status.heartbeat_s, status.limit_s)
        self._next_s = self._heard_s = self._last_s = self._paced_s = status.clock()

    def speak(self) -> None:
        """Write and read the store as due."""
        status, now_s = self._status, self._status.clock()
        is_late, self._last_s = now_s - self._last_s > 4 * BEAT_S, now_s
        if not status.known:
            for rank, why in status.suspects.items():
                status.blame(rank, why)
            if status.has_news:
                status.cause()
        if now_s - self._paced_s > PACE_S and not status.rank:
            self._paced_s = now_s
            if not status.known:
                self._warnings.look(list(status.said().values()), status.step_s, lambda: _report(status))
        hosts, near = status.pages.hosts, status.pages.near
        after = hosts[(hosts.index(near) + 1) % len(hosts)]
        if not status.leads or after == near or is_late:
            # A rank that was not checking cannot have missed heartbeats.
            self._heard_s = now_s
        misses = now_s - self._heard_s > 1.5 * status.told_s
        if not status.leads or not (misses or status.is_in_hurry or now_s >= self._next_s):
            return
        if now_s >= self._next_s:
            self._next_s = now_s + status.told_s
            status.publish()
        cause, value = status.store.multi_get([CAUSE, f"host/{after[0]}"])
        pages = (published := value.decode()).split("\0")
        if published != self._heard or all(words_of(page).startswith(ENDED) for page in pages):
            self._heard, self._heard_s = published, now_s
        if now_s - self._heard_s > status.missed_s:
            status.blame(after[0], f"no sign of life for {status.heartbeat_s:g} s; last: {words_of(pages[0])}")
            status.cause()
        status.know(cause)
        status.answered_s = status.clock()


def _look_after(status: _Status) -> None:
    """Check in a loop; end the process if it waits for a rank that failed."""
    near = _Near(status)
    while not status.stop.wait(status.beat_s / (HURRY if status.is_in_hurry else 1)):
        if why := near.look():
            _leave(status, why)


def _speak(status: _Status) -> None:
    """Talk to the store in a loop."""
    far = _Far(status)
    while not status.stop.is_set():
        status.wake.wait(status.beat_s)
        status.wake.clear()
        try:
            far.speak()
        except Exception:  # the store has ended with the process group
            status.stop.set()


def _report(status: _Status) -> str:
    """Return one line for each rank: its operation, and for how long."""
    unknown = "0\n0\n0.0\nhas published nothing yet"
    try:
        status.pages.write(status.page("report"))
        told = [(last or unknown).split("\n", 3)[2:] for last in status.said().values()]
        said = zip(status.numbers, told, strict=True)
        return "\n".join(f"  rank {number}: {text} ({seconds} s)" for number, (seconds, text) in said)
    except Exception:  # the store is gone
        return "  (the store that ranks publish it to is gone)"


def _leave(status: _Status, why: str) -> None:
    """Print the reason and end the process at once: the wait of the main thread cannot be cancelled."""
    os.write(2, f"{status.place} ends, since it waits for {status.waiting()[0]}, and {why}\n".encode())
    status.stay()
    os._exit(1)


def _end(status: _Status, threads: list[threading.Thread], hook: ErrorHook) -> None:
    if is_child_of(status.process):
        return
    status.stop.set()
    status.wake.set()
    for thread in threads:
        if thread is not threading.current_thread():  # garbage collection in this thread may have deleted the model
            thread.join(timeout=5.0)
    hook.remove(status)
    with suppress(Exception):  # without the store nobody reads any more
        status.part()
