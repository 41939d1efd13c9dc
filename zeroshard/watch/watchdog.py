"""Who waits for what, who lives, who is slow, and what failed first: told by every rank, so that each can name it.

Owns two daemon threads per sharded model. One looks after this rank and the others of its host, by memory alone
(`watch/pages.py`); the other one speaks to the process group's store, which may keep it waiting. It must not know what
is waited for: callers say it in words.

Note: how a rank learns of a failure
    A process that ends closes its connections, so a wait for it fails at once, and the error asks here for the cause:
    what the first rank that failed told before it ended. The ranks of its host see a process that ended without a word,
    and tell that. A process that was stopped keeps its connections open, and so does one whose host is gone, and gloo
    cannot be told to end a wait: once it is missed for `heartbeat_s`, by a rank of its host or by the host before,
    every rank that waits prints the cause and ends its process with status 1. Ranks that cannot reach the store learn
    nothing any more: that is their cause, after the same time.
Note: requests to the store
    Each rank gives signs of life to its host's ranks, on its page, some a second. The first living rank of a host tells
    the store what all its ranks do, an eighth of the heartbeat apart, and asks for the host after it and for the cause:
    two requests. Where a rank waits for others, or it misses that host, it asks twice a second until it knows more.
Note: waits of a device
    On a GPU a wait for a collective blocks the device's stream, and the host continues to queue kernels. If a peer is
    missing, the host hangs only later, when it reads a number from the device. Therefore the engine records a mark (an
    event) in the stream behind the last wait of each pass, and a thread here polls the mark. A rank whose device has
    not reached a mark for `heartbeat_s` counts as waiting. If another rank failed, such a rank ends its process as soon
    as a rank whose host waits does.
Note: slow ranks
    All ranks take the same time for a step, for they wait for the slowest. What tells them apart is the time that a
    rank did not wait: its own. The median over the last steps leaves out what only one rank does now and then (to
    write a file, say), and of ranks the lower median is taken, so that of two the slower one can be told. A device that
    is slow is not told apart: waits of devices take no time of the host.
"""

import logging
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

from zeroshard.watch.last_words import ErrorHook
from zeroshard.watch.pages import Pages
from zeroshard.watch.process import is_child_of

__all__ = ["Watchdog"]

BEAT_S: Final = 0.5
"""Seconds between two signs of life on a page, at most; with a short heartbeat there are some within it."""
BEATS: Final = 8
"""Signs of life in the store within a heartbeat."""
STAY_BEATS: Final = 2.0
PATIENCE_S: Final = 2.6 * BEAT_S
"""How long the others may take to tell why they closed a connection, before a rank without signs of life is named."""
STALE_BEATS: Final = 4
"""Beats without a sign of life after which another rank of the host speaks to the store."""
HURRY: Final = 5
"""Looks at pages within a beat where a rank of the host waits for long."""
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
NOTHING: Final = "-"
"""The cause while nothing failed: keys that are missing cannot be asked for together."""
ENDED: Final = "has ended; before that it was "
"""How the last words of a rank begin whose interpreter ended, or whose model was deleted."""
WAITS: Final = ("waits for", "gave up waiting for")


@final
class _Marks:
    """Places in the device's stream, as functions that tell whether the device is past them: the first and the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: list[tuple[Callable[[], bool], str]] = []
        self._since_s = 0.0

    def add(self, is_done: Callable[[], bool], what: str, now_s: float) -> None:
        """Take a new last one; those between the first and it say nothing more."""
        with self._lock:
            self._since_s = self._since_s if self._marks else now_s
            self._marks[1:] = [(is_done, what)] if self._marks else []
            self._marks = self._marks or [(is_done, what)]

    def look(self, now_s: float) -> None:
        """Ask for them, and forget those that the device is past."""
        with self._lock:
            while self._marks and self._marks[0][0]():
                del self._marks[0]
                self._since_s = now_s

    def first(self) -> tuple[str, float]:
        """Return what is in front of the first, and since when the device has passed none; empty without any."""
        with self._lock:
            return (self._marks[0][1], self._since_s) if self._marks else ("", 0.0)


@dataclass(eq=False)
class _Status:
    """What a rank does, shared between its threads; replaced whole, so that no lock is needed."""

    store: Store
    rank: int
    world_size: int
    limit_s: float
    """How long a device may be queued behind one thing."""
    heartbeat_s: float
    now: tuple[str, str, float]
    """Verb, object, and the monotonic time since when."""
    clock: Callable[[], float] = time.monotonic
    own_s: tuple[float, ...] = ()
    """Of the last steps, each the seconds in which this rank did not wait."""
    step_s: float = 0.0
    """All seconds of the last step."""
    answered_s: float = 0.0
    """When the store last answered a rank of this host."""
    known: str = ""
    """What failed first, once this rank has read it: the store may go with the process that held it."""
    detail: Callable[[BaseException], str] = lambda error: ""
    """What is to be told beside an error that ends this process."""
    pages: Pages = field(init=False)
    marks: _Marks = field(default_factory=_Marks)
    leads: bool = False
    """Whether this rank speaks to the store for its host."""
    is_in_hurry: bool = False
    """Whether a rank of this host waits, longer than ranks do for one another in each step, or failed."""
    has_news: bool = False
    """Whether a rank of this host knows what failed first."""
    suspects: dict[int, str] = field(default_factory=dict)
    """Ranks of this host that failed, and how."""
    stop: threading.Event = field(default_factory=threading.Event)
    wake: threading.Event = field(default_factory=threading.Event)
    """Has the thread that speaks to the store do so at once."""
    process: int = field(default_factory=os.getpid)

    @property
    def beat_s(self) -> float:
        """Seconds between two signs of life for this host."""
        return min(BEAT_S, self.heartbeat_s / BEATS)

    @property
    def told_s(self) -> float:
        """Seconds between two signs of life for the store."""
        return self.heartbeat_s / BEATS

    @property
    def missed_s(self) -> float:
        """Seconds after which a host is missed, such that all know within `heartbeat_s` and a second.

        What was told is up to `told_s` old when it is read; the next look, and the one of those that wait, take a beat
        each.
        """
        return min(self.heartbeat_s, self.heartbeat_s + 1.0 - self.told_s - 3 * self.beat_s)

    def waiting(self) -> tuple[str, float]:
        """Return what this rank waits for, its host or its device, and for how many seconds; empty if it does not."""
        verb, what, since_s = self.now
        if verb not in WAITS:
            what, since_s = self.marks.first()
        return (what, self.clock() - since_s) if what and verb != WAITS[1] else ("", 0.0)

    def page(self, beat: object) -> str:
        """Return what this rank tells its host; each time with another `beat`."""
        verb, what, since_s = self.now
        behind, waits_s = self.waiting()
        if verb not in WAITS and waits_s > self.heartbeat_s:
            verb, what, since_s = WAITS[0], f"{behind}, behind which its device is queued", self.clock() - waits_s
        pace = statistics.median(self.own_s) if len(self.own_s) == PACE_STEPS else ""
        numbers = f"{int(bool(self.known))} {self.answered_s} {waits_s} {pace}"
        return f"{beat}\n{numbers}\n{self.clock() - since_s:.1f}\n{verb} {what}"

    def publish(self) -> None:
        """Tell the store what the ranks of this host do."""
        self.store.set(f"host/{self.pages.near[0]}", "\0".join(map(self.pages.read, self.pages.near)))

    def said(self) -> dict[int, str]:
        """Return what every rank told last, by rank. One request."""
        far = [ranks for ranks in self.pages.hosts if ranks != self.pages.near]
        values = self.store.multi_get([CAUSE, *(f"host/{ranks[0]}" for ranks in far)])
        found = dict.fromkeys(range(self.world_size), "")
        found |= {rank: self.pages.read(rank) for rank in self.pages.near}
        for ranks, value in zip(far, values[1:], strict=True):
            # Until a host speaks as one, there is what its first rank told.
            found |= dict(zip(ranks, value.decode().split("\0"), strict=False))
        return found

    def blame(self, rank: int, why: str) -> None:
        """Tell what failed, unless something did before: what follows from a failure must not hide it."""
        self.know(self.store.compare_set(CAUSE, NOTHING, f"rank {rank}: {why}"))
        # The store may go with this process: the ranks of this host ask it at once.
        self.pages.write(self.page(f"blame {rank}"))

    def cause(self) -> str:
        """Return what failed first; empty where nothing is known."""
        return self.known or self.know(self.store.get(CAUSE))

    def know(self, cause: bytes) -> str:
        """Take what the store has as the cause."""
        self.known = self.known or cause.decode().removeprefix(NOTHING)
        return self.known

    def part(self) -> None:
        """Tell that this rank is done; the one that may hold the store lets the others end first, for a while.

        Where another is found to wait, that is the cause of its failure, which it must read here before the store goes.
        """
        self.pages.write(f"end\n0 0 0 \n0.0\n{ENDED}{' '.join(self.now[:2])}")
        self.publish()
        # Where the model was deleted and the interpreter goes on, so does the store.
        if self.rank or threading.main_thread().is_alive():
            return
        end_s, before = self.clock() + 3 * self.beat_s, self.said()
        while self.clock() < end_s:
            said = self.said()
            if all(_words(last).startswith(ENDED) for last in said.values()):
                return
            if any(last != before[rank] and _words(last).startswith(WAITS) for rank, last in said.items()):
                self.blame(self.rank, _end_of(said[self.rank]))
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
        self._behind = ""
        self.record: Callable[[], Callable[[], bool]] | None = None
        """Where waits are a device's: marks its stream, and returns what tells whether the device is past the mark."""
        self._stepped_s, self._waited_s = time.monotonic(), 0.0
        now = ("in user code since", "the model was sharded", self._stepped_s)
        self._status = status = _Status(store, rank, world_size, limit_s, heartbeat_s, now)
        store.compare_set(CAUSE, "", NOTHING)
        # Each host is known to the store before anybody asks for it.
        store.set(f"host/{rank}", status.page("start"))
        status.pages = Pages(store, rank, world_size, status.page("start"))
        status.answered_s = time.monotonic()
        status.publish()
        # The threads hold the status alone: they must not keep the model's communicator alive.
        threads = [threading.Thread(target=run, args=(status,), daemon=True) for run in (_look_after, _speak)]
        for thread in threads:
            thread.start()
        # Runs at exit, too: a thread that returns from the store into an interpreter that ends would abort the process.
        weakref.finalize(self, _end, self._status, threads, ErrorHook.of(self._status))

    def waits_for(self, what: str) -> None:
        """Note that this rank now waits for `what`."""
        self.mark()
        self._status.now = ("waits for", what, time.monotonic())

    def runs_after(self, what: str) -> None:
        """Note that this rank is back in user code after `what`."""
        now_s = time.monotonic()
        self._waited_s += now_s - self._status.now[2]
        self._status.now = ("in user code since", what, now_s)

    def queues_behind(self, what: str) -> None:
        """Note that this rank goes on, and its device waits for `what`."""
        self._behind, self._status.now = what, ("in user code since", what, time.monotonic())

    def mark(self) -> None:
        """Mark the stream of the device, if it was told to wait for something since it was last marked."""
        if self._behind and self.record is not None:
            self._status.marks.add(self.record(), self._behind, time.monotonic())
        self._behind = ""

    def gives_up(self, what: str) -> None:
        """Note that waiting for `what` failed: an error says so, and this process must live to raise and handle it."""
        self._status.now = ("gave up waiting for", what, self._status.now[2])

    def count_step(self, *_: object) -> None:
        """Note the end of a step: how long it took, and how much of that this rank did not wait."""
        # What follows an update on the device is followed by nothing else for long.
        self.mark()
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
        status = self._status
        # Hosts speak to the store one after the other; of a killed rank its own host tells at once.
        end_s = time.monotonic() + max(PATIENCE_S, 2.2 * status.told_s if len(status.pages.hosts) > 1 else 0.0)
        try:
            before = status.said() if is_closed else {}
            while is_closed and not status.cause() and time.monotonic() < end_s:
                time.sleep(BEAT_S / 10 * max(1.0, status.world_size / 100))
            for rank, now in status.said().items() if before and not status.known else ():
                if rank != status.rank and (now == before[rank] or _words(now).startswith(ENDED)):
                    status.blame(rank, _end_of(now))
            return status.cause()
        except Exception:  # the store is gone
            gone = "its process is gone, and with it the store, which would tell why"
            return status.known or f"rank 0: {_end_of(status.pages.read(0)) if 0 in status.pages.near else gone}"

    def report(self) -> str:
        """Return one line for each rank: what it does, and for how long."""
        return _report(self._status)


def _words(published: str) -> str:
    return published.split("\n", 3)[-1]


def _numbers_of(published: str) -> list[str]:
    """Return the second line of a page: whether a cause is known, when the store answered, a wait, a pace."""
    return published.split("\n", 2)[1].split(" ")


def _end_of(published: str) -> str:
    """Return what is known of the end of a rank that told no error, from what it published last."""
    words = _words(published)
    if words.startswith(ENDED):
        return f"it ended while others needed it; before that it was {words.removeprefix(ENDED)}"
    # A signal leaves no words, and only the process that started a rank is told which it was.
    return f"its process is gone without a word (a signal, a crash, os._exit); it was last seen to be: {words}"


@final
class _Near:
    """Gives signs of life on this rank's page, and looks for those of the ranks of its host, one look at a time."""

    def __init__(self, status: _Status) -> None:
        self._status, self._beat, self._last_s = status, 0, status.clock()
        self._heard: dict[int, tuple[str, float]] = {}

    def look(self) -> str:
        """Look once; return why this process must end, empty where it need not."""
        status, now_s = self._status, self._status.clock()
        if now_s - self._last_s > 4 * BEAT_S:
            # A gap of its own means that this process was stopped: then it cannot judge others.
            self._heard, status.answered_s = {}, now_s
        self._last_s, self._beat = now_s, self._beat + 1
        status.marks.look(now_s)
        status.pages.write(status.page(self._beat))
        living, has_news, hurries, suspects = [], False, False, {}
        for rank in status.pages.near:
            text = status.pages.read(rank)
            if text != self._heard.get(rank, ("", 0.0))[0]:
                self._heard[rank] = text, now_s
            silent_s = now_s - self._heard[rank][1]
            knows, answered_s, waited_s, _ = _numbers_of(text)
            has_news |= knows == "1"
            if _words(text).startswith(ENDED):
                continue
            if not status.pages.is_alive(rank):
                suspects[rank] = _end_of(text)
            elif silent_s > status.heartbeat_s:
                suspects[rank] = f"no sign of life for {status.heartbeat_s:g} s; last: {_words(text)}"
            elif silent_s <= STALE_BEATS * status.beat_s:
                living.append(rank)
                is_long = float(waited_s) > (status.beat_s / 2 if _words(text).startswith(WAITS[0]) else status.told_s)
                hurries = hurries or is_long
                status.answered_s = max(status.answered_s, float(answered_s))
        status.leads, status.suspects = living[0] == status.rank, suspects
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
    """Speaks to the store, for this rank's host where it is the first one that lives, one time at a time."""

    def __init__(self, status: _Status) -> None:
        self._status, self._heard, self._slow = status, "", frozenset[int]()
        self._next_s = self._heard_s = self._last_s = self._paced_s = status.clock()

    def speak(self) -> None:
        """Tell and ask what is due."""
        status, now_s = self._status, self._status.clock()
        is_late, self._last_s = now_s - self._last_s > 4 * BEAT_S, now_s
        if not status.known:
            for rank, why in status.suspects.items():
                status.blame(rank, why)
            if status.has_news:
                status.cause()
        if now_s - self._paced_s > PACE_S and not status.rank:
            self._paced_s, self._slow = now_s, _compare_paces(status, self._slow)
        hosts, near = status.pages.hosts, status.pages.near
        after = hosts[(hosts.index(near) + 1) % len(hosts)]
        if not status.leads or after == near or is_late:
            # Who did not look for signs of life cannot miss them.
            self._heard_s = now_s
        misses = now_s - self._heard_s > 1.5 * status.told_s
        if not status.leads or not (misses or status.is_in_hurry or now_s >= self._next_s):
            return
        if now_s >= self._next_s:
            self._next_s = now_s + status.told_s
            status.publish()
        cause, value = status.store.multi_get([CAUSE, f"host/{after[0]}"])
        pages = (published := value.decode()).split("\0")
        if published != self._heard or all(_words(page).startswith(ENDED) for page in pages):
            self._heard, self._heard_s = published, now_s
        if now_s - self._heard_s > status.missed_s:
            status.blame(after[0], f"no sign of life for {status.heartbeat_s:g} s; last: {_words(pages[0])}")
            status.cause()
        status.know(cause)
        status.answered_s = status.clock()


def _look_after(status: _Status) -> None:
    """Look again and again; end the process where it waits for what cannot come."""
    near = _Near(status)
    while not status.stop.wait(status.beat_s / (HURRY if status.is_in_hurry else 1)):
        if why := near.look():
            _leave(status, why)


def _speak(status: _Status) -> None:
    """Speak to the store again and again."""
    far = _Far(status)
    while not status.stop.is_set():
        status.wake.wait(status.beat_s)
        status.wake.clear()
        try:
            far.speak()
        except Exception:  # the store is gone: the process group was destroyed, and nobody reads any more
            status.stop.set()


def _report(status: _Status) -> str:
    """Return one line for each rank: what it does, and for how long."""
    unknown = "0\n0\n0.0\nhas published nothing yet"
    try:
        status.pages.write(status.page("report"))
        told = [(last or unknown).split("\n", 3)[2:] for last in status.said().values()]
        return "\n".join(f"  rank {rank}: {text} ({seconds} s)" for rank, (seconds, text) in enumerate(told))
    except Exception:  # the store is gone
        return "  (the store that ranks publish it to is gone)"


def _leave(status: _Status, why: str) -> None:
    """Say why, and end the process at once: what the main thread waits for cannot be told to end."""
    place = f"[rank {status.rank}/{status.world_size}]"
    os.write(2, f"{place} ends, since it waits for {status.waiting()[0]}, and {why}\n".encode())
    status.stay()
    os._exit(1)


def _compare_paces(status: _Status, before: frozenset[int]) -> frozenset[int]:
    """Warn of ranks that have become slow, and return those that are."""
    told = [_numbers_of(page)[3] if page else "" for page in status.said().values()]
    if not all(told):
        return before
    paces = [float(pace) for pace in told]
    median_s, slow = statistics.median_low(paces), slow_ranks(paces, before, status.step_s)
    for rank in sorted(slow - before):
        logging.getLogger(__name__).warning(
            f"rank {rank} is slow: its own part of a step takes {paces[rank]:.3g} s, that of the median rank "
            f"{median_s:.3g} s, and {status.world_size - 1} rank(s) wait for it."
        )
    return slow


def slow_ranks(paces: Sequence[float], before: frozenset[int], step_s: float) -> frozenset[int]:
    """Return the ranks that are slow.

    Args:
        paces: by rank, the seconds of a step in which it does not wait.
        before: the ranks that were slow.
        step_s: seconds of a step.
    """
    median_s = statistics.median_low(paces)
    slow = {rank for rank, own_s in enumerate(paces) if own_s >= (EASED if rank in before else SLOW) * median_s}
    return frozenset(rank for rank in slow if paces[rank] - median_s >= FELT * step_s)


def _end(status: _Status, threads: list[threading.Thread], hook: ErrorHook) -> None:
    if is_child_of(status.process):
        return
    status.stop.set()
    status.wake.set()
    for thread in threads:
        if thread is not threading.current_thread():  # whose garbage collection may have found the model
            thread.join(timeout=5.0)
    hook.remove(status)
    with suppress(Exception):  # without the store nobody reads any more
        status.part()
