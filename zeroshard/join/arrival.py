"""Waits of ranks for each other before a watchdog exists: in `zs.init()`, and at the entry of `zs.shard()`.

Owns the detection and reporting of missing ranks, and the handling of signals. It must not know the purpose of the
wait.

Note: signals
    Python's signal handlers do not run inside waits of torch's store and of gloo, which may last until the watchdog's
    limit. A rank that waits here has nothing to save, so SIGINT and SIGTERM have their default disposition, and end it
    at once. The handlers are restored when all ranks have arrived.
"""

import hashlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, final

from torch.distributed import DistError, Store, TCPStore

from zeroshard.table.errors import RankMismatchError

__all__ = ["Wait", "await_ranks", "ends_by_signal", "explained", "open_store", "tell_meeting"]

FIRST_PAUSE_S: Final = 0.0005
POLL_S: Final = 0.05
CONNECT_S: Final = 1.0
LOOK_S: Final = 1.0
REFUSED_S: Final = 4.0
"""Seconds after which a rank whose mesh= was refused counts as absent: by then it would have tried another one."""


@contextmanager
def ends_by_signal() -> Iterator[None]:
    """Let SIGINT and SIGTERM end this process at once inside the context; ignored signals stay ignored.

    Python's handlers do not run while a collective waits for other ranks. Enter the context while a rank has nothing to
    save; it restores the handlers on exit. Outside the main thread, it has no effect.

    ```python
    import signal

    from zeroshard.join.arrival import ends_by_signal

    with ends_by_signal():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ```
    """
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            # A handler that was not set by Python cannot be restored.
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                handlers[number] = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@final
class Wait:
    """The wait of one rank for others, with one warning that names missing ranks, and an error at the limit.

    Args:
        rank: this rank, by its number in the process group.
        ranks: the ranks that meet, likewise, with this one.
        who: this rank, for messages.
        place: the call in which ranks meet, for messages.
        limit_s: seconds after which the wait raises an error.
        heartbeat_s: seconds after which a warning names the missing ranks.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], who: str, place: str, limit_s: float, heartbeat_s: float
    ) -> None:
        self.rank, self.ranks, self.who, self.place = rank, sorted(ranks), who, place
        self.meeting = f"{place} of {hashlib.sha1(str(self.ranks).encode(), usedforsecurity=False).hexdigest()}"
        """The place and the ranks, for keys of the store."""
        self._limit_s, self._heartbeat_s = limit_s, heartbeat_s
        self.meanwhile: Callable[[], None] = lambda: None
        """Called in each pause."""
        self._begin_s, self._has_told, self._looked_s = time.monotonic(), False, time.monotonic()

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._begin_s

    def is_long(self) -> bool:
        """Return whether `pause` is due to report missing ranks."""
        return self.waited_s > self._limit_s or (self.waited_s > self._heartbeat_s and not self._has_told)

    def is_due(self) -> bool:
        """Return, once in `LOOK_S` seconds, whether to look for ranks that wait elsewhere."""
        is_due = time.monotonic() - self._looked_s > LOOK_S
        self._looked_s = time.monotonic() if is_due else self._looked_s
        return is_due

    def pause(self, late: Sequence[int] = (), why: str = "") -> None:
        """Wait briefly.

        Args:
            late: the missing ranks, if known.
            why: the evidence for them, for messages.

        Raises:
            RuntimeError: the limit is exceeded.
        """
        if late and self.is_long():
            self._has_told, waited_s = True, self.waited_s
            who = f"rank {late[0]}" if len(late) == 1 else f"ranks {', '.join(map(str, late))}"
            text = (
                f"{self.who} {who} of {len(self.ranks)} {'has' if len(late) == 1 else 'have'} not come to {self.place} "
                f"for {waited_s:.0f} s{why}"
            )
            if waited_s > self._limit_s:
                raise RuntimeError(
                    f"{text}; watchdog_s={self._limit_s:g} seconds are over. See what became of that process, on its "
                    "host and in its output, and whether its host reaches this one."
                )
            logging.getLogger(__name__).warning(f"{text}; this rank waits for {self._limit_s:g} s.")
        self.meanwhile()
        # Ranks usually arrive together; a long pause would then dominate the time of `zs.shard()`.
        time.sleep(min(POLL_S, FIRST_PAUSE_S + self.waited_s / 10))


def open_store(wait: Wait, address: str, port: int, limit_s: float) -> Store:
    """Return the store at an address; rank 0 hosts it, the others wait for it.

    Raises:
        RuntimeError: the store did not answer within the limit.
    """
    while wait.rank:
        try:
            socket.create_connection((address, port), CONNECT_S).close()
        except OSError as error:
            wait.pause([0], f" (the store at {address}:{port} does not answer: {error})")
        else:
            break
    return TCPStore(
        address,
        port,
        len(wait.ranks),
        is_master=wait.rank == 0,
        timeout=timedelta(seconds=limit_s),
        wait_for_workers=False,
        multi_tenant=True,
    )


def await_ranks(store: Store, wait: Wait) -> None:
    """Wait until every rank of `wait.ranks` has arrived there at `wait.place` as often as this rank.

    Raises:
        RankMismatchError: a rank waits there for other ranks, this one among them.
        RuntimeError: a rank has not arrived within the limit, or the store has ended, usually with the process that
            hosted it.

    Collective: up to 20 requests a second to the store; every rank must call.
    """
    with explained(wait):
        _await_ranks(store, wait)


@contextmanager
def explained(wait: Wait) -> Iterator[None]:
    """Convert errors of a store that has ended into an error that names the wait."""
    try:
        yield
    except DistError as error:
        raise RuntimeError(
            f"{wait.who} The store of the process group does not answer any more, while this "
            f"rank waited for all to come to {wait.place}: the process of rank 0, or of the launcher, that kept it has "
            f"ended, or its host is out of reach. See the output of that process. ({str(error).splitlines()[0]})"
        ) from None


def _await_ranks(store: Store, wait: Wait) -> None:
    key = f"zeroshard/came to {wait.meeting}"
    turn = store.add(f"{key}/{wait.rank}", 1)
    # A single counter: no rank can arrive again before all have arrived. Keys of single ranks identify missing ranks.
    store.add(key, 1)
    while store.add(key, 0) < turn * len(wait.ranks):
        late, is_due = list[int](), wait.is_due()
        if is_due or wait.is_long():
            late = [rank for rank in wait.ranks if store.add(f"{key}/{rank}", 0) < turn]
        if is_due and (found := _other_mesh(store, wait, key, turn, late)):
            store.add(key, -1)
            store.add(f"{key}/{wait.rank}", -1)
            raise RankMismatchError(
                f"{wait.who} {wait.place}: {found}. Pass the same mesh= on all of its ranks, which must call together."
            )
        wait.pause(late)


def tell_meeting(store: Store, rank: int, text: str) -> None:
    """Say where a rank is: "" for nowhere, or why its mesh= was refused."""
    store.set(f"zeroshard/waits/{rank}", f"\n\n{text}" if text else "")


def _other_mesh(store: Store, wait: Wait, key: str, turn: int, late: Sequence[int]) -> str:
    """Return how a late rank, or one that another rank found, disagrees on the ranks that meet; "" if none does."""
    store.set(f"zeroshard/waits/{wait.rank}", f"{key}\n{turn}\n{wait.ranks}")
    refusal = f"{key}/refusal {turn}"
    if store.check([told := f"{refusal}/{wait.rank}"]):  # this rank raised it, and tries again
        store.delete_key(refusal)
        store.delete_key(told)
    found = store.get(refusal).decode() if store.check([refusal]) else ""
    for other in late if not found else ():
        where = store.get(one).decode() if store.check([one := f"zeroshard/waits/{other}"]) else ""
        there, count, text = where.split("\n", 2) if where else ("", "", "")
        is_elsewhere = there not in ("", key) and f" {wait.rank}," in f" {text[1:-1]},"
        if where and not there and wait.waited_s > REFUSED_S:
            found = f"rank {other} was refused its mesh=: {text}"
        # Later than this rank's last arrival there: the other rank may have gone on since.
        elif is_elsewhere and store.add(f"{there}/{wait.rank}", 0) < int(count):
            found = f"rank {wait.rank} meets the ranks {wait.ranks}, and rank {other} the ranks {text}"
            store.set(f"{there}/refusal {count}", found)
    if found:
        store.set(refusal, found)
        store.set(told, "")
    return found
