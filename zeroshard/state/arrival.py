"""How ranks wait for one another before a watchdog looks after them: in `zs.init()`, and at the entry of `zs.shard()`.

Owns who has come, what is said of those who have not, and signals meanwhile. It must not know what the ranks come for.

Note: signals
    Python's signal handlers do not run inside waits of torch's store and of gloo, which may last until the watchdog's
    limit. A rank that waits here has nothing to save, so SIGINT and SIGTERM have their default disposition, and end it
    at once; handlers come back when all ranks have come.
"""

import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, final

from torch.distributed import DistError, Store, TCPStore

__all__ = ["Wait", "await_ranks", "ends_by_signal", "explained", "open_store"]

FIRST_PAUSE_S: Final = 0.0005
POLL_S: Final = 0.05
CONNECT_S: Final = 1.0


@contextmanager
def ends_by_signal() -> Iterator[None]:
    """Have SIGINT and SIGTERM end this process at once inside the context; ignored signals stay ignored.

    Python's handlers do not run while a collective waits for other ranks. Enter the context where a rank has nothing to
    save yet; the handlers are there again afterwards. Outside the main thread nothing changes.

    ```python
    import signal, zeroshard as zs

    with zs.ends_by_signal():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ```
    """
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            # One that was not set by Python could not be set again.
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                handlers[number] = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@final
class Wait:
    """One rank's wait for others: it pauses, says once who has not come, and ends with an error.

    Args:
        rank, world_size: this rank's place.
        place: what the ranks come to, for messages.
        limit_s: seconds after which the wait is an error.
        heartbeat_s: seconds after which it is said who has not come.
    """

    def __init__(self, rank: int, world_size: int, place: str, limit_s: float, heartbeat_s: float) -> None:
        self.rank, self.world_size, self.place = rank, world_size, place
        self._limit_s, self._heartbeat_s = limit_s, heartbeat_s
        self._begin_s, self._has_told = time.monotonic(), False

    def is_long(self) -> bool:
        """Tell whether `pause` has something to say of the ranks that have not come."""
        waited_s = time.monotonic() - self._begin_s
        return waited_s > self._limit_s or (waited_s > self._heartbeat_s and not self._has_told)

    def pause(self, late: Sequence[int] = (), why: str = "") -> None:
        """Wait a moment.

        Args:
            late: the ranks that have not come, where they are known.
            why: how that is known.

        Raises:
            RuntimeError: the limit is over.
        """
        if late and self.is_long():
            self._has_told, waited_s = True, time.monotonic() - self._begin_s
            who = f"rank {late[0]}" if len(late) == 1 else f"ranks {', '.join(map(str, late))}"
            text = (
                f"[rank {self.rank}/{self.world_size}] {who} of {self.world_size} {'has' if len(late) == 1 else 'have'}"
                f" not come to {self.place} for {waited_s:.0f} s{why}"
            )
            if waited_s > self._limit_s:
                raise RuntimeError(
                    f"{text}; watchdog_s={self._limit_s:g} seconds are over. See what became of that process, on its "
                    "host and in its output, and whether its host reaches this one."
                )
            logging.getLogger(__name__).warning(f"{text}; this rank waits for {self._limit_s:g} s.")
        # Ranks mostly come together, and then a long pause would be most of what `zs.shard()` takes.
        time.sleep(min(POLL_S, FIRST_PAUSE_S + (time.monotonic() - self._begin_s) / 10))


def open_store(wait: Wait, address: str, port: int, limit_s: float) -> Store:
    """Return the store that rank 0 keeps at an address; rank 0 makes it, the others wait for it.

    Raises:
        RuntimeError: nothing was there within the limit.
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
        wait.world_size,
        is_master=wait.rank == 0,
        timeout=timedelta(seconds=limit_s),
        wait_for_workers=False,
        multi_tenant=True,
    )


def await_ranks(store: Store, wait: Wait) -> None:
    """Return when every rank has come to `wait.place` as often as this one.

    Raises:
        RuntimeError: one has not within the limit, or the store is gone, most often with the rank that kept it.

    Collective: some requests to the store, 20 a second; every rank must call.
    """
    with explained(wait):
        _await_ranks(store, wait)


@contextmanager
def explained(wait: Wait) -> Iterator[None]:
    """Say in the words of a wait that the store is gone, if it is."""
    try:
        yield
    except DistError as error:
        raise RuntimeError(
            f"[rank {wait.rank}/{wait.world_size}] The store of the process group does not answer any more, while this "
            f"rank waited for all to come to {wait.place}: the process of rank 0, or of the launcher, that kept it has "
            f"ended, or its host is out of reach. See the output of that process. ({str(error).splitlines()[0]})"
        ) from None


def _await_ranks(store: Store, wait: Wait) -> None:
    key = f"zeroshard/came to {wait.place}"
    turn = store.add(f"{key}/{wait.rank}", 1)
    # One number for all: a rank cannot come again before all have come. Single ones are looked at to name the late.
    store.add(key, 1)
    while store.add(key, 0) < turn * wait.world_size:
        ranks = range(wait.world_size) if wait.is_long() else ()
        wait.pause([rank for rank in ranks if store.add(f"{key}/{rank}", 0) < turn])
