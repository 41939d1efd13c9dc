"""Copies of parameters to the device ahead of use, by a thread.

Owns the thread, and the order of the gathers that read the copied values. It must not know which values are copied
(`stores.py`).

Note: who launches what
    The program hands a copy to the thread and continues to launch kernels. The thread fills staging buffers, waits for
    buffers that are still in use, and launches the copies on the bus' lane. The thread cannot launch the all-gather
    that reads the values, because all ranks must launch collectives in the same order. The program launches the
    all-gather after the thread has launched the last copy: when the program waits for the values, and before any later
    collective (`launch`). So the order is the same on all ranks, however long copies take.
Note: order on the device
    Queued kernels may still read the memory that a copy fills. So the copies follow an event that the program records
    when it hands the copy over. The all-gather is launched on another stream, which follows the event of the last copy:
    the stream of the copies may already have later ones.
Note: failed copies
    The error is raised where the program waits for the values, each time. The message names the rank and the unit, and
    the all-gather is not launched.
"""

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol, final

import torch

from zeroshard import devices
from zeroshard.watch.process import wait_before_forks

__all__ = ["Ahead", "Late", "Waitable"]


class Waitable(Protocol):
    """An operation that is under way."""

    def wait(self) -> bool:
        """Return when the operation is complete."""


@final
class Late:
    """A gather that starts after the thread has launched a copy.

    Args:
        copy: the copy in the thread; None if the rank has nothing to copy.
        begin: starts the gather.
        name: the name of the unit.
    """

    def __init__(
        self, ahead: "Ahead", copy: "Future[devices.Mark | None] | None", begin: Callable[[], Waitable], name: str
    ) -> None:
        self._ahead, self._copy, self._begin, self._name = ahead, copy, begin, name
        self._arrived: devices.Mark | None = None
        self._begun: Waitable | None = None

    def start(self) -> None:
        """Wait until the copy is launched, and start the gather."""
        if self._copy is not None:
            try:
                self._arrived = self._copy.result()
            except Exception as error:
                raise self._ahead.failed(self._name, error) from error
        with devices.lane(self._ahead.device, "readers", self._arrived):
            self._begun = self._ahead.around(self._name, self._begin)

    def wait(self) -> bool:
        """Make later work of the device follow the copy and the gather; see `Pending`."""
        self._ahead.launch(self)
        assert self._begun is not None, "launched above"
        is_ready = self._begun.wait()
        if self._arrived is not None:
            self._arrived.wait()
        return is_ready


@final
class Ahead:
    """The thread for copies ahead of use, and the gathers that have not started.

    Args:
        device: the device of the rank.
        where: the rank, for messages.
    """

    def __init__(self, device: torch.device, where: str = "") -> None:
        self.device, self.where = device, where
        self.around: Callable[[str, Callable[[], Waitable]], Waitable] = lambda name, begin: begin()
        """Starts the gather of a unit, by the name of the unit."""
        self._late: deque[Late] = deque()
        """Gathers that have not started, in order."""
        self._pool: ThreadPoolExecutor | None = None
        self._copies: set[Future[devices.Mark | None]] = set()

    def begin(self, copy: Callable[[], None] | None, begin: Callable[[], Waitable], name: str) -> Late:
        """Copy values in the thread, and start a gather after the copy.

        Args:
            copy: launches the copy; None if there is nothing to copy. The gather then only follows earlier gathers.
            begin: starts the gather.
            name: the name of the unit.
        """
        late = Late(self, None if copy is None else self._submit(copy), begin, name)
        self._late.append(late)
        return late

    def launch(self, last: Late | None = None) -> None:
        """Start the gathers that wait for copies, in order: up to `last`, or all.

        Raises:
            RuntimeError: a copy failed; see `Late`.
        """
        while self._late and (last is None or last in self._late):
            self._late[0].start()
            self._late.popleft()  # after an interrupt, the next call waits again

    def failed(self, name: str, error: Exception) -> RuntimeError:
        """Return the error of a copy for a unit."""
        of = f"unit '{name}'" if name else "the root unit"
        return RuntimeError(
            f"{self.where} The offloaded parameters of {of} could not be brought to the device: {error} "
            "Resume from the last checkpoint in a new run."
        )

    def before_fork(self) -> None:
        """Wait for the copies, and release the thread, which a child would not have."""
        wait(self._copies)
        self._pool = None

    def _submit(self, copy: Callable[[], None]) -> "Future[devices.Mark | None]":
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "zeroshard-copies", devices.begin_thread, (self.device,))
            weakref.finalize(self, self._pool.shutdown, wait=False)
            wait_before_forks(self)
        handed_over = devices.mark_on(self.device)
        future = self._pool.submit(self._run, copy, handed_over)
        self._copies.add(future)
        future.add_done_callback(self._copies.discard)
        return future

    def _run(self, copy: Callable[[], None], handed_over: devices.Mark | None) -> devices.Mark | None:
        with torch.no_grad(), devices.lane(self.device, "back", handed_over):
            copy()
            return devices.mark_on(self.device)
