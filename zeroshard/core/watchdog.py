"""Who waits for what: each rank's status, published so that a wait that fails can name every rank.

Owns one daemon thread per sharded model, which writes this rank's status to the process group's store; reading happens
only when a wait has failed. It must not know what is waited for: callers say it in words.
"""

import threading
import time
import weakref
from dataclasses import dataclass, field

from torch.distributed import Store

__all__ = ["Watchdog"]


@dataclass
class _Status:
    """What a rank does, shared between its threads; replaced whole, so that no lock is needed."""

    store: Store
    rank: int
    now: tuple[str, str, float]
    stop: threading.Event = field(default_factory=threading.Event)


class Watchdog:
    """Publishes what this rank does, and reads what the others do.

    Args:
        store: the store all ranks share.
        rank, world_size: this rank's place.
        limit_s: the longest wait that callers allow; statuses are at most an eighth of it old.
    """

    def __init__(self, store: Store, rank: int, world_size: int, limit_s: float) -> None:
        self._store, self._rank, self._world_size, self.limit_s = store, rank, world_size, limit_s
        self._status = _Status(store, rank, ("in user code since", "the model was sharded", time.time()))
        # The thread holds the status alone: it must not keep the model's communicator alive.
        thread = threading.Thread(target=_publish, args=(self._status, min(limit_s / 8, 5.0)), daemon=True)
        thread.start()
        # Runs at exit, too: a thread that returns from the store into an interpreter that ends would abort the process.
        weakref.finalize(self, _end, self._status.stop, thread)

    def waits_for(self, what: str) -> None:
        """Note that this rank now waits for `what`."""
        self._status.now = ("waits for", what, time.time())

    def runs_after(self, what: str) -> None:
        """Note that this rank is back in user code after `what`."""
        self._status.now = ("in user code since", what, time.time())

    def report(self) -> str:
        """Return one line for each rank: what it does, and for how long."""
        lines = []
        for rank in range(self._world_size):
            if rank == self._rank:
                verb, what, since = self._status.now
                text = f"{verb} {what}"
            elif self._store.check([key := f"status/{rank}"]):
                stamp, text = self._store.get(key).decode().split("\n", 1)
                since = float(stamp)
            else:
                since, text = time.time(), "has published nothing yet"
            lines.append(f"  rank {rank}: {text} ({time.time() - since:.1f} s)")
        return "\n".join(lines)


def _publish(status: _Status, period_s: float) -> None:
    while not status.stop.wait(period_s):
        verb, what, since = status.now
        try:
            status.store.set(f"status/{status.rank}", f"{since}\n{verb} {what}")
        except Exception:  # the store is gone: the process group was destroyed, and nobody reads any more
            return


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    thread.join(timeout=5.0)
