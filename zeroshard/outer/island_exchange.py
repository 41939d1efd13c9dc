"""An island: trains by itself, and every few steps puts its change and takes in those of others.

Owns the anchors, the exchange and its arithmetic, on flat numpy arrays. It must not know torch (`island_model.py` has
the arrays of a sharded model), sockets (`island_post.py`) or how ranks agree (`island_source.py`). Read
`mailbox_order.py` (the sum) first.

Note: an exchange
    An island has its values x and its anchors a, which all islands had in common at the start. In an exchange it puts
    the change d = x - a (in few bits: rounded, after what rounding lost of the last one is added), and then takes in
    the changes that have arrived and were not taken in yet, its own among them: a' = a + sum(changes) / islands, and x'
    = a' + p, where p = x - a without d once d is taken in: what was learned since d was made. In an exchange that waits
    for all islands (staleness 0) p is exactly 0, so that x' = a' on all of them, bit for bit. Each change is taken in
    once by each island. While d is on its way nothing else is put, and while the mailbox cannot be reached nothing is
    taken in; what is learned meanwhile is a part of the next change.
Note: ranks
    Each rank of an island exchanges its own shard. Ranks take in the same versions in the same exchange, because they
    agree on the oldest state that any of them has (`island_source.py`). What a rank cannot write to its log, no rank of
    the island has sent or taken in: all raise, with the state from before, and a later exchange does it again.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from zeroshard.outer.island_log import Log
from zeroshard.outer.island_options import IslandOptions
from zeroshard.outer.island_post import Start
from zeroshard.outer.mailbox_codec import Form
from zeroshard.outer.mailbox_order import Change, add_changes, in_order
from zeroshard.outer.mailbox_wire import MailboxError

__all__ = ["Found", "Island", "Source", "Values"]

_LOG = logging.getLogger(__name__)


class Values(ABC):
    """One rank's shard of the values that islands exchange.

    Args:
        rank: of this island.
        ranks: their number; equal on all islands.
        numel: elements of the shard.
        dtype: of changes and anchors, "<f4" or "<f8".
        facts: what must be equal on all islands, such as the model and the optimizer: short texts and numbers.
    """

    def __init__(self, rank: int, ranks: int, numel: int, dtype: str, facts: Mapping[str, Any]) -> None:
        self.rank, self.ranks, self.numel, self.dtype, self.facts = rank, ranks, numel, dtype, dict(facts)

    @abstractmethod
    def read(self) -> np.ndarray:
        """Return a copy of the current values, (numel,)."""

    @abstractmethod
    def write(self, values: np.ndarray) -> None:
        """Replace the values by (numel,). Every rank calls it at the same time."""

    def texts(self, text: str) -> list[str]:
        """Return the texts of all ranks of this island. Collective: an all-gather; every rank must call."""
        return [text]


@final
@dataclass(frozen=True)
class Found:
    """What an exchange takes in.

    Args:
        here: the version of each island up to which all ranks have its changes.
        wait_s: seconds that the exchange waited.
        lead: by how many exchanges this island is ahead of the slowest active one.
        is_up: whether the mailbox answers.
        is_gone: whether the mailbox took this island for gone, so that it has to join again.
        is_settled: False if there is no room for more before these are taken in, and the exchange goes on after that.
    """

    here: Mapping[str, int]
    wait_s: float = 0.0
    lead: int = 0
    is_up: bool = True
    is_gone: bool = False
    is_settled: bool = True


class Source(ABC):
    """Where an island puts its changes and takes those of others: a mailbox, or the log of an earlier run."""

    @abstractmethod
    def enter(self, values: np.ndarray, *, anew: bool = False) -> tuple[Start, np.ndarray]:
        """Join, or join again, and return where the island starts, and the anchors; the first island founds them.

        Args:
            anew: whether the values replace the anchors that this island founded.
        """

    @abstractmethod
    def begin(self) -> None:
        """Begin to exchange."""

    @abstractmethod
    def catch_up(self, since: int, step: int) -> Found:
        """Return what is to be taken in before the first step: the versions behind which the island continues."""

    @abstractmethod
    def offer(self, version: int, message: np.ndarray, told: np.ndarray, step: int) -> None:
        """Put a change in the background.

        Args:
            message: its bytes, which must not change meanwhile.
            told: its values, as others read them.
        """

    @abstractmethod
    def settle(self, version: int, step: int) -> Found:
        """Return up to which version of each island changes are to be taken in now; waits as the staleness asks."""

    @abstractmethod
    def listed(self, name: str) -> list[int]:
        """Return the versions of an island that were not taken in."""

    @abstractmethod
    def change(self, version: int, name: str) -> np.ndarray:
        """Return a change of another island."""

    @abstractmethod
    def take(self, taken: Mapping[str, int]) -> None:
        """Note that the changes up to these versions are taken in."""

    @abstractmethod
    def drain(self, version: int, step: int, *, others: bool, limit_s: float) -> Found | None:
        """Wait for the change that is on its way, or with `others` for everything; None if there is nothing left.

        Args:
            limit_s: how long a mailbox that does not answer is waited for.
        """

    @abstractmethod
    def end(self, *, leaves: bool) -> None:
        """End the exchange."""


@final
@dataclass(frozen=True)
class Pending:
    """A change that is on its way.

    Args:
        learned: (numel,), the values less the anchors when it was made.
        told: (numel,), what others read: the same, or with what rounding lost before, and rounded.
        lost: what rounding had lost before.
    """

    version: int
    learned: np.ndarray
    told: np.ndarray
    lost: np.ndarray


@final
class Island:
    """An island of one or more ranks, as one of its ranks sees it.

    It joins on creation: the first island puts its values as the first anchors; every other one, and one that comes
    back, starts from the mailbox's anchors, which replace its values.

    Args:
        options: see `IslandOptions`.
        values: this rank's shard.
        source: the mailbox; see `island_source.open_mailbox`.

    Raises:
        MailboxError: the mailbox cannot be reached, or refuses this island; the text says why. On every rank.

    Collective: `Values.texts`; every rank of the island must call each method at the same time.
    """

    def __init__(self, options: IslandOptions, values: Values, source: Source) -> None:
        self.options, self._values, self._source = options, values, source
        self.steps = self.exchanges = 0
        self._pending: Pending | None = None
        self._form = Form(options.bits, values.dtype)
        self._lost = np.zeros(0 if self._form.is_exact else values.numel, values.dtype)
        self._was_up = True
        folder = None if options.log is None else f"{options.log}/{options.island}-{values.rank}"
        self._log: Log | None = None
        self._unlogged: Start | None = None
        """Where the island has started, unless the log says so."""
        text = ""
        try:
            self._log = None if folder is None else Log(folder, options, values.numel, values.dtype)
        except (OSError, MailboxError) as error:
            text = f"island '{options.island}': its log in {folder} cannot be opened: {error}"
        self._agree(text)
        start, self._anchors = source.enter(values.read())
        if not start.founds:
            values.write(self._anchors.copy())
        self._begin(start)

    def _begin(self, start: Start) -> None:
        """Begin to exchange, with what others have put and the anchors do not have yet."""
        self._founds, self.version, self.taken = start.founds, start.since, dict(start.versions)
        self._unlogged = start
        self._write_log(lambda log: None)
        self._source.begin()
        while not start.founds:
            settled = self._source.catch_up(start.since, self.steps)
            self._take(settled)
            if settled.is_settled or settled.is_gone:  # then the next exchange joins again
                break

    @property
    def anchors(self) -> np.ndarray:
        """The anchors, (numel,): what was taken in so far. Not to be changed."""
        return self._anchors

    @property
    def nbytes(self) -> int:
        """Bytes of the anchors, of what rounding lost, and of a change that is on its way."""
        arrays = [self._anchors, self._lost]
        if self._pending is not None:
            arrays += [self._pending.learned, self._pending.told, self._pending.lost]
        return sum(one.nbytes for one in {id(one): one for one in arrays}.values())

    @property
    def is_first(self) -> bool:
        """Whether the anchors are the first ones, of this island, which has put nothing since."""
        return self._founds and not self.version

    def come_back(self) -> None:
        """Go on after a checkpoint, or the program, has replaced the values.

        They replace the anchors if these are the first ones, of this island; otherwise the anchors replace them, with
        what is on its way.

        Raises:
            MailboxError: other islands have put changes to the first anchors. On every rank.
        """
        if self.is_first:
            start, self._anchors = self._source.enter(self._values.read(), anew=True)
            self._begin(start)
            return
        values = self._anchors.copy()
        if self._pending is not None:
            values += self._pending.learned
        self._values.write(values)

    def after_step(self) -> None:
        """Count a step; every `every` steps, exchange. Call it after each `optimizer.step()`, skipped ones included.

        Raises:
            MailboxError: a change is not finite, the mailbox refuses this island, or a rank cannot write its log. On
                every rank.
        """
        self.steps += 1
        if self.steps % self.options.every == 0:
            self.exchange()

    def exchange(self) -> None:
        """Put the change since the last exchange, and take in what has arrived."""
        self.exchanges += 1
        if self._pending is not None and self.options.staleness is not None:
            # Versions count exchanges, by which islands are compared.
            self._finish_pending(0.0)
        if self._pending is None:
            self._offer()
        while True:
            settled = self._source.settle(self.version, self.steps)
            if settled.is_gone:
                self._join_again()
                break
            self._take(settled)
            if settled.is_settled:
                break

    def finish(self, *, others: bool = False) -> None:
        """Put what was not put yet, and leave: nobody waits for this island afterwards.

        Args:
            others: before, wait until all other islands have left, and take in all their changes.
        """
        patience_s = self.options.patience_s
        for _ in range(2):  # what is on its way, then what was learned since
            self._finish_pending(patience_s)
            has_more = bool((self._values.read() != self._anchors).any())
            if self._pending is None and "1" in self._values.texts(str(int(has_more))):
                self._offer()
        if self._pending is not None:
            self._finish_pending(patience_s)
        if self._pending is not None:
            _LOG.error("island '%s': its last change was not put: the mailbox is gone.", self.options.island)
        while others:
            settled = self._source.drain(self.version, self.steps, others=True, limit_s=patience_s)
            if settled is None:
                break
            if settled.is_gone:
                self._join_again()
            else:
                self._take(settled)
        self.close(leaves=True)

    def close(self, *, leaves: bool = False) -> None:
        """End the connections. Without `leaves`, the mailbox waits a while for the island to come back."""
        self._source.end(leaves=leaves)
        if self._log is not None:
            self._log.end()

    def _finish_pending(self, limit_s: float) -> None:
        """Wait until the change that is on its way is at the mailbox, unless that cannot be reached, and take it in."""
        while self._pending is not None:
            settled = self._source.drain(self.version, self.steps, others=False, limit_s=limit_s)
            if settled is None:
                break
            if settled.is_gone:
                self._join_again()
            else:
                self._take(settled)
            if not settled.is_up:
                break

    def _offer(self) -> None:
        learned = self._values.read()
        learned -= self._anchors
        if not np.isfinite(learned).all():
            text = (
                f"island '{self.options.island}': its values are not finite after step {self.steps}: nothing was put."
            )
        else:
            text = ""
        self._agree(text)
        version, before = self.version + 1, self._lost
        if self._form.is_exact:
            told, message, lost = learned, self._form.encode(learned), before
        else:
            change = learned + before
            message = self._form.encode(change)
            told = self._form.decode(message, change.size)
            lost = change - told
        self._write_log(lambda log: log.sent(self.steps, version, told))
        self.version, self._lost, self._pending = version, lost, Pending(version, learned, told, before)
        self._source.offer(version, message, told, self.steps)

    def _take(self, settled: Found) -> None:
        """Take in the changes up to the versions that the ranks have agreed on."""
        self._tell(settled)
        due = in_order(
            (version, name)
            for name, last in settled.here.items()
            for version in self._source.listed(name)
            if self.taken.get(name, 0) < version <= last
        )
        if not due:
            return
        own = None if self._pending is None else (self._pending.version, self.options.island)
        changes = [(one, self._change(one, own)) for one in due]
        values = self._values.read()
        values -= self._anchors
        if self._pending is not None and own in due:
            values -= self._pending.learned
        anchors = self._anchors if self._log is None else self._anchors.copy()
        add_changes(anchors, changes, self.options.islands)
        # Adding a zero would turn -0.0 into 0.0, and the anchors are to be the values, bit for bit.
        values = values + anchors if values.any() else anchors.copy()
        self._write_log(lambda log: log.took(self.steps, self.version, changes, anchors, values, settled))
        self._anchors = anchors
        self._values.write(values)
        if own in due:
            self._pending = None
        newest = {name: version for version, name in due}
        self.taken.update(newest)
        self._source.take(newest)

    def _change(self, change: Change, own: Change | None) -> np.ndarray:
        if change == own:
            assert self._pending is not None
            return self._pending.told
        return self._source.change(*change)

    def _tell(self, settled: Found) -> None:
        if settled.is_up != self._was_up:
            self._write_log(lambda log: log.note("mailbox", step=self.steps, is_up=settled.is_up))
        self._was_up = settled.is_up

    def _agree(self, text: str) -> None:
        """Raise `MailboxError` on all ranks if one has an error text."""
        for rank, other in enumerate(self._values.texts(text)):
            if other:
                raise MailboxError(f"[rank {rank}/{self._values.ranks}] {other}")

    def _write_log(self, write: Callable[[Log], None]) -> None:
        """Write to the logs of all ranks, or of none, and then raise `MailboxError` on all."""
        if (log := self._log) is None:
            return
        place, text = log.place, ""
        try:
            if self._unlogged is not None:
                log.start(self._unlogged, self._anchors, self.steps)
            write(log)
        except OSError as error:
            text = (
                f"island '{self.options.island}', after step {self.steps}: its log cannot be written: {error}. Make "
                "room, and go on or start the island again; or start it without log=."
            )
        try:
            self._agree(text)
        except MailboxError:
            log.go_back(place)
            raise
        self._unlogged = None

    def _join_again(self) -> None:
        """Start from the mailbox's anchors, and keep what was learned since the own ones."""
        _LOG.warning(
            "island '%s' counted as gone, and joins again from the anchors of the mailbox.", self.options.island
        )
        before = self._anchors
        start, self._anchors = self._source.enter(before)
        values = self._values.read()
        values -= before
        if self._pending is not None and self._pending.version <= start.last:
            values -= self._pending.learned
        elif self._pending is not None:
            self._lost = self._pending.lost
        self._pending = None
        self._values.write(self._anchors + values)
        self._begin(start)
