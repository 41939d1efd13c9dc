"""Copies to the device ahead of use, made by a thread of their own, and what waits for them.

Owns the thread, and the order of what is begun behind its copies. It must not know which values are copied
(`apart.py`), nor what reads them.

Note: who launches what
    The program hands a copy to the thread and goes on to launch kernels. The thread fills staging buffers, waits where
    one is still in use, and launches the copies on a stream of their own. What reads the values, such as an all-gather,
    cannot be launched by the thread: ranks launch collectives in one order. The program launches it when the thread has
    launched the last copy: at the latest when it waits for the values, and before any later collective (`launch`). So
    the order is the same on all ranks, whatever time the copies take.
Note: order on the device
    The memory that a copy fills may have been read by kernels that are still queued. So the thread's stream first
    waits for what the program's stream had been told when the copy was handed over. What reads the values is launched
    on a stream that waits for their last copy alone, since the thread may be at the next one already.
Note: copies that fail
    The error is raised where the program waits for the values, each time, and names the rank and the values. Nothing
    that reads them is launched.
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
    """What is under way."""

    def wait(self) -> bool:
        """Return when it is done."""


@final
class Late:
    """What is begun behind a copy of the thread.

    Args:
        copy: launches the copy; None where nothing is copied.
        begin: begins what reads the values.
        name: of the unit whose parameters they are.
    """

    def __init__(
        self, ahead: "Ahead", copy: "Future[devices.Mark | None] | None", begin: Callable[[], Waitable], name: str
    ) -> None:
        self._ahead, self._copy, self._begin, self._name = ahead, copy, begin, name
        self._arrived: devices.Mark | None = None
        self._begun: Waitable | None = None

    def start(self) -> None:
        """Wait until the copy is launched, and begin what reads the values."""
        if self._copy is not None:
            try:
                self._arrived = self._copy.result()
            except Exception as error:
                of = f"unit '{self._name}'" if self._name else "the root unit"
                raise RuntimeError(
                    f"{self._ahead.where} The offloaded parameters of {of} could not be brought to the device: {error} "
                    "Resume from the last checkpoint in a new run."
                ) from error
        with devices.behind(self._ahead.device, self._arrived):
            self._begun = self._ahead.around(self._name, self._begin)

    def wait(self) -> bool:
        """Have what the device is told next follow the values, and what reads them; see `Pending`."""
        self._ahead.launch(self)
        assert self._begun is not None, "launched above"
        is_ready = self._begun.wait()
        if self._arrived is not None:
            self._arrived.wait()
        return is_ready


@final
class Ahead:
    """Copies ahead of use, in the order in which they were handed over.

    Args:
        device: where the values are copied to.
        where: the rank, for messages.
    """

    def __init__(self, device: torch.device, where: str = "") -> None:
        self.device, self.where = device, where
        self.around: Callable[[str, Callable[[], Waitable]], Waitable] = lambda name, begin: begin()
        """Begins what reads the values of a unit."""
        self._late: deque[Late] = deque()
        """What is not begun yet."""
        self._pool: ThreadPoolExecutor | None = None
        self._copies: set[Future[devices.Mark | None]] = set()

    def begin(self, copy: Callable[[], None] | None, begin: Callable[[], Waitable], name: str) -> Late:
        """Have the thread copy values, and begin what reads them behind that.

        Args:
            copy: launches the copies; None where there is nothing to copy, but what was begun before goes first.
        """
        late = Late(self, None if copy is None else self._submit(copy), begin, name)
        self._late.append(late)
        return late

    def launch(self, last: Late | None = None) -> None:
        """Begin what waits for copies, in order, up to `last` or all of it.

        Raises:
            RuntimeError: a copy failed; see `Late`.
        """
        while self._late and (last is None or last in self._late):
            self._late[0].start()
            self._late.popleft()  # one that is interrupted is waited for again

    def before_fork(self) -> None:
        """Wait, and let the thread go: a child would have none."""
        wait(self._copies)
        self._pool = None

    def _submit(self, copy: Callable[[], None]) -> "Future[devices.Mark | None]":
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "zeroshard-copies", devices.begin_thread, (self.device,))
            weakref.finalize(self, self._pool.shutdown, wait=False)
            wait_before_forks(self)
        # The program's stream may still be told to read the memory that is filled; the thread's waits for that alone.
        handed_over = devices.mark_on(self.device)
        future = self._pool.submit(self._run, copy, handed_over)
        self._copies.add(future)
        future.add_done_callback(self._copies.discard)
        return future

    def _run(self, copy: Callable[[], None], handed_over: devices.Mark | None) -> devices.Mark | None:
        with torch.no_grad(), devices.ahead(self.device, handed_over):
            copy()
            return devices.mark_on(self.device)
