"""One rank's end of the mailbox: what it puts leaves, and what others put arrives, beside training.

Owns the two connections of a rank, the two threads behind them, and the changes that have arrived and were not taken in
yet. It must not know tensors, or when an exchange is due (`island_exchange.py`).

Note: two threads
    One puts: a change waits in memory until the mailbox has acknowledged it, which means that it is on its disk. The
    other asks what there is, and brings it, at most `held` changes ahead. Neither ever blocks training. A connection
    that ends is opened again, for as long as it takes, so a mailbox that was killed finds its islands when it is back.
"""

import logging
import math
import random
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np

from zeroshard.outer.island_lines import Lines
from zeroshard.outer.mailbox_codec import Form
from zeroshard.outer.mailbox_order import Change, newer_than
from zeroshard.outer.mailbox_wire import Line, MailboxError, PeerError, Refused

__all__ = ["Look", "Post", "Start"]

_LOG = logging.getLogger(__name__)
_POLL_S: Final = 1.0
_LEAST_PAUSE_S: Final = 0.1
_MOST_PAUSE_S: Final = 2.0
_QUIET_S: Final = 3.0
"""How long a join may take before a warning says for what it waits."""


@dataclass(frozen=True)
class Start:
    """Where an island starts.

    Args:
        since: the version behind which it continues.
        versions: those in the anchors, by island.
        founds: whether it puts the first anchors.
        last: its own newest version that the mailbox has.
    """

    since: int
    versions: Mapping[str, int]
    founds: bool
    last: int = 0


@dataclass(frozen=True)
class Look:
    """What a rank knows at a moment.

    Args:
        here: the newest version of each island, up to which all changes have arrived or were taken in.
        needed: of each island that is waited for, the version that it has reached.
        missing: the number of islands that have not come yet.
        is_up: whether the mailbox answered lately.
        has_put: whether nothing waits to be put.
        is_gone: whether the mailbox took this island for gone.
        is_full: whether no more changes can be brought before some are taken in.
        error: why the mailbox refuses this island, or nothing.
        news: the number of the moment.
    """

    here: dict[str, int] = field(default_factory=dict)
    needed: dict[str, int] = field(default_factory=dict)
    missing: int = 0
    is_up: bool = False
    has_put: bool = True
    is_gone: bool = False
    is_full: bool = False
    error: str = ""
    news: int = 0


@final
class Post:
    """The mailbox, as one rank of an island sees it.

    Args:
        address: "host:port" of the mailbox.
        island: the name of the island.
        rank: of the island.
        about: what all islands have in common: the header of "join", see `serve.py`.
        numel: of this rank's shard.
        held: changes that may be in memory, beside the one that is put.
        patience_s: after so many seconds without an answer the mailbox counts as gone.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        island: str,
        rank: int,
        about: Mapping[str, Any],
        numel: int,
        *,
        held: int,
        patience_s: float,
    ) -> None:
        self._lines = Lines(address, secret, island, rank, self._hello, self._hear)
        self._form = Form(about["bits"], about["dtype"])
        self._name, self._rank, self._about, self._numel = island, rank, dict(about), numel
        self._most_held, self._patience_s = held, patience_s
        self._launch = self._training = ""
        self._changed, self._news = threading.Condition(), 0
        self._outgoing: tuple[int, np.ndarray] | None = None
        self._arrived: dict[Change, np.ndarray] = {}
        self._own: set[int] = set()
        self._taken: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._index: dict[str, Any] = {"islands": {}, "missing": 0}
        self._answered_s, self._error, self._is_gone = time.monotonic(), "", False
        self._is_over, self._leaves, self._is_done, self._has_told_done = False, False, False, False
        self._threads: list[threading.Thread] = []

    def _hello(self) -> dict[str, Any]:
        """Return what a connection begins with."""
        with self._changed:
            return {"island": self._name, "launch": self._launch, "rank": self._rank, "taken": dict(self._taken)}

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of changes and anchors that were sent and received, without frames."""
        return self._lines.sent_bytes, self._lines.received_bytes

    # -- joining, in the thread that trains ---------------------------------------------------------------------------

    def enter(self, launch: str, values: np.ndarray, limit_s: float, *, anew: bool = False) -> tuple[Start, np.ndarray]:
        """Join, and return where this island starts, with this rank's part of the anchors, (numel,).

        Args:
            launch: names this start of the island, equal on its ranks.
            values: of this rank, which become its anchors if there are none yet.
            anew: whether they replace those with which this island founded the mailbox.

        Raises:
            Refused: the island differs from the others, or its name is in use.
            MailboxError: there is no mailbox at the address.
        """
        deadline_s, told_s = time.monotonic() + limit_s, time.monotonic() + _QUIET_S
        while True:
            try:
                with self._lines.use("join") as line:
                    return self._enter(line, launch, values, anew)
            except PeerError as error:
                problem: MailboxError = error
            except Refused as error:
                if error.kind not in ("taken", "wait"):
                    raise
                problem = error
            if time.monotonic() > deadline_s:
                raise MailboxError(
                    f"island '{self._name}', rank {self._rank}: the mailbox at {self._lines.address} did not let it "
                    f"join in {limit_s:g} s: {problem} To start one: zeroshard outer --serve --address "
                    f"{self._lines.address}"
                )
            if time.monotonic() > told_s:
                told_s = math.inf
                _LOG.warning(
                    "island '%s', rank %d: the mailbox at %s does not let it join yet: %s It tries for %g s.",
                    *(self._name, self._rank, self._lines.address, problem, limit_s),
                )
            time.sleep(_LEAST_PAUSE_S if limit_s < 1.0 else 3 * _LEAST_PAUSE_S)

    def _enter(self, line: Line, launch: str, values: np.ndarray, anew: bool) -> tuple[Start, np.ndarray]:
        asked = {"do": "join", "island": self._name, "launch": launch, "rank": self._rank, "numel": self._numel}
        reply = self._lines.ask(line, asked | self._about | {"training": self._training, "anew": anew})
        versions = {str(name): int(version) for name, version in reply["versions"].items()}
        start = Start(int(reply["since"]), versions, bool(reply["founds"]), int(reply["last"]))
        plain = self._form.plain
        if start.founds:
            self._lines.send(line, {"do": "put anchors"}, plain.encode(values), plain.piece_bytes)
        else:
            message = self._lines.receive(line, {"do": "take anchors"}, plain.nbytes(self._numel))
            values = plain.decode(message, self._numel)
        with self._changed:
            self._outgoing, self._is_gone, self._launch, self._has_told_done = None, False, launch, False
            self._arrived.clear()
            self._own.clear()
            self._taken, self._told, self._training = dict(versions), dict(versions), str(reply["training"])
            self._index = {"islands": {}, "missing": 0}
            self._answered_s = time.monotonic()
        # Threads that still work for an earlier launch find their connections closed.
        self._lines.close("put")
        self._lines.close("bring")
        return start, values

    def begin(self) -> None:
        """Begin to put and to bring changes, in two threads."""
        self._lines.hand_over("join", "bring")
        if not self._threads:
            for run in (self._put_all, self._bring_all):
                thread = threading.Thread(target=run, daemon=True, name=f"{run.__name__}-{self._name}-{self._rank}")
                self._threads.append(thread)
                thread.start()

    # -- the exchange -------------------------------------------------------------------------------------------------

    def offer(self, version: int, message: np.ndarray) -> None:
        """Put a change under a version, in the background. The array must not change until `look().has_put`."""
        with self._changed:
            assert self._outgoing is None
            self._outgoing = (version, message)
            self._own.add(version)
            self._notify()

    def look(self) -> Look:
        """Return what has arrived."""
        with self._changed:
            islands = self._index["islands"]
            here = {name: self._reached(name, one["versions"]) for name, one in islands.items()}
            needed = {name: max(here[name], one["since"]) for name, one in islands.items() if one["state"] == "active"}
            is_up = time.monotonic() - self._answered_s < self._patience_s
            return Look(
                here,
                needed,
                self._index["missing"],
                is_up,
                self._outgoing is None,
                self._is_gone,
                len(self._arrived) >= self._room,
                self._error,
                self._news,
            )

    def _reached(self, name: str, versions: list[int]) -> int:
        reached = self._taken.get(name, 0)
        for version in versions:
            if version > reached:
                if not self._is_here(version, name):
                    break
                reached = version
        return reached

    def _is_here(self, version: int, name: str) -> bool:
        is_own = name == self._name and version in self._own  # it is where it was made
        return is_own or version <= self._taken.get(name, 0) or (version, name) in self._arrived

    def listed(self, name: str) -> list[int]:
        """Return the versions of an island that have not been taken in."""
        with self._changed:
            versions: list[int] = self._index["islands"].get(name, {}).get("versions", [])
            return [version for version in versions if version > self._taken.get(name, 0)]

    def taken(self, name: str) -> int:
        """Return the newest version of an island that was taken in."""
        with self._changed:
            return self._taken.get(name, 0)

    def change(self, version: int, name: str) -> np.ndarray:
        """Return a change of another island that has arrived, (numel,)."""
        with self._changed:
            message = self._arrived[version, name]
        return self._form.decode(message, self._numel)

    def take(self, taken: Mapping[str, int]) -> None:
        """Drop the changes up to these versions: they are taken in, and the mailbox is told."""
        with self._changed:
            self._taken.update(taken)
            for version, name in list(self._arrived):
                if version <= self._taken.get(name, 0):
                    del self._arrived[version, name]
            own = self._taken.get(self._name, 0)
            self._own = {version for version in self._own if version > own}
            if self._outgoing is not None and self._outgoing[0] <= own:
                self._outgoing = None  # it is there, though the acknowledgement is not here yet
            self._notify()

    def wait(self, look: Look, limit_s: float) -> None:
        """Wait until there is something new since a look, at most `limit_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._news != look.news, limit_s)

    def _notify(self) -> None:
        self._news += 1
        self._changed.notify_all()

    def tell_done(self) -> None:
        """Tell the mailbox, in the background, that this island puts nothing more; it may still take."""
        with self._changed:
            self._is_done = True
            self._notify()

    def end(self, *, leaves: bool, limit_s: float) -> None:
        """End the threads and connections; with `leaves` tell the mailbox that nobody need wait for this island."""
        with self._changed:
            self._is_over, self._leaves = True, leaves
            self._notify()
        if not leaves:
            self._lines.close_all()
        for thread in self._threads:  # the one that puts is first: it says goodbye
            thread.join(limit_s)
            self._lines.close_all()

    # -- threads ------------------------------------------------------------------------------------------------------

    def _put_all(self) -> None:
        pause_s = _LEAST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(self._has_to_tell)
                offered, launch, is_over = self._outgoing, self._launch, self._is_over
            if is_over:
                break
            try:
                with self._lines.use("put") as line:
                    self._tell(line)  # first: what is taken in makes room for what is put
                    # A connection of a later launch would put what was offered before the island joined again.
                    if offered is not None and self._outgoing is offered:
                        self._lines.send(line, {"do": "put", "version": offered[0]}, offered[1], self._form.piece_bytes)
                        self._forget(offered)
                pause_s = _LEAST_PAUSE_S
                continue
            except Refused as error:
                if self._refused(error, offered, launch):
                    self._forget(offered)
            except MailboxError as error:
                _LOG.info("island '%s', rank %d puts later: %s", self._name, self._rank, error)
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        if self._leaves:
            self._say_goodbye()

    def _has_to_tell(self) -> bool:
        is_new = self._taken != self._told or self._is_done != self._has_told_done
        return self._is_over or self._outgoing is not None or is_new

    def _tell(self, line: Line) -> None:
        """Tell the mailbox what was taken in, and whether this island puts nothing more."""
        with self._changed:
            taken, launch = dict(self._taken), self._launch
        if taken != self._told:
            self._lines.ask(line, {"do": "taken", "taken": taken})
            with self._changed:
                self._told = taken if launch == self._launch else self._told
        if self._is_done and self._outgoing is None and not self._has_told_done:
            self._lines.ask(line, {"do": "done"})
            self._has_told_done = True

    def _refused(self, error: Refused, offered: tuple[int, np.ndarray] | None, launch: str) -> bool:
        """Note why something was refused; return whether the mailbox has the change nevertheless."""
        version = 0 if offered is None else offered[0]
        with self._changed:
            if launch != self._launch:
                return False
            if error.kind == "old" and version in self._index["islands"].get(self._name, {}).get("versions", ()):
                return True  # its acknowledgement was lost
            if error.kind == "gone":
                self._is_gone = True
            elif error.kind == "full":
                until = "goes on" if self._about["staleness"] is None else "waits when the next one is due"
                _LOG.warning("island '%s' puts version %d later, and %s: %s", self._name, version, until, error)
            elif error.kind != "old":
                self._error = str(error)
            self._notify()
            return False

    def _forget(self, offered: tuple[int, np.ndarray] | None) -> None:
        with self._changed:
            if self._outgoing is offered:
                self._outgoing = None
            self._notify()

    def _bring_all(self) -> None:
        pause_s, seen, is_lost = _LEAST_PAUSE_S, 0, False
        while True:
            with self._changed:
                if self._is_over:
                    break
                launch = self._launch
            try:
                with self._lines.use("bring") as line:
                    index = self._lines.ask(line, {"do": "index", "seen": seen, "wait_s": self._wait_s()})
                    seen = index["count"]
                    self._learn(index, launch)
                    if is_lost:
                        _LOG.warning("island '%s', rank %d: the mailbox is back", self._name, self._rank)
                    pause_s, is_lost = _LEAST_PAUSE_S, False
                    for version, name in self._wanted(index):
                        header = {"do": "take", "version": version, "of": name}
                        message = self._lines.receive(line, header, self._form.nbytes(self._numel))
                        self._keep(version, name, message, launch)
                continue
            except Refused as error:
                with self._changed:
                    if launch == self._launch:
                        self._is_gone |= error.kind == "gone"
                        self._error = self._error if error.kind in ("gone", "old") else str(error)
                    self._notify()
            except MailboxError as error:
                seen = 0
                if not is_lost and not self._is_over:
                    is_lost = True
                    _LOG.warning(
                        "island '%s', rank %d: no word from the mailbox at %s (%s). The island goes on by itself, and "
                        "puts its changes later.",
                        self._name,
                        self._rank,
                        self._lines.address,
                        error,
                    )
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _wait_s(self) -> float:
        """Return how long the mailbox may wait for news: not at all while room has been made for changes."""
        with self._changed:
            islands = self._index["islands"]
            is_behind = any(
                not self._is_here(version, name) for name, one in islands.items() for version in one["versions"]
            )
            return 0.0 if is_behind and len(self._arrived) < self._room else _POLL_S

    @property
    def _room(self) -> int:
        """The number of changes that may be here: at least one of each island, for which an exchange may wait."""
        return max(self._most_held, len(self._index["islands"]))

    def _learn(self, index: dict[str, Any], launch: str) -> None:
        with self._changed:
            if launch == self._launch:
                self._index = index
                self._answered_s = time.monotonic()
                self._notify()

    def _wanted(self, index: dict[str, Any]) -> Iterator[Change]:
        there = {name: one["versions"] for name, one in index["islands"].items()}
        for version, name in newer_than(self._taken, there):
            with self._changed:
                if self._is_over or len(self._arrived) >= self._room:
                    return
                is_here = self._is_here(version, name)
            if not is_here:
                yield version, name

    def _keep(self, version: int, name: str, values: np.ndarray, launch: str) -> None:
        with self._changed:
            if launch == self._launch and version > self._taken.get(name, 0):
                self._arrived[version, name] = values
            self._notify()

    def _hear(self) -> None:
        """Note that the mailbox has answered: a large change may take longer than the patience."""
        self._answered_s = time.monotonic()

    def _say_goodbye(self) -> None:
        try:
            with self._lines.use("put") as line:
                self._tell(line)
                self._lines.ask(line, {"do": "leave"})
        except MailboxError as error:
            _LOG.info("island '%s', rank %d: %s", self._name, self._rank, error)

    def _pause(self, limit_s: float) -> None:
        # Islands that lost the mailbox together do not come back together.
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, limit_s * random.uniform(0.5, 1.0))
