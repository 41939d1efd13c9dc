"""The connections of one model's ranks: process groups, waits with a limit, and errors that name each rank.

Owns the process groups and the watchdog. It must not know what is sent: transports start collectives and messages on
the groups, and wait here.

Note: two waits
    `wait` is the host's: gloo's messages and the board are over when it returns, or an error names who is missing.
    `wait_on_stream` is a device's: it orders the current stream after NCCL's collectives, the host goes on, and the
    watchdog looks after the stream. With a limit, NCCL's own wait would stop the host until the collective is over, and
    look for that with pauses, so it gets none.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist

from zeroshard import devices
from zeroshard.table.errors import RankMismatchError
from zeroshard.torch_private import default_store, own_client_of
from zeroshard.watch.process import is_child_of, keep_for_good, tell_forks
from zeroshard.watch.watchdog import Watchdog
from zeroshard.wire.board import Meeting
from zeroshard.wire.mesh import Mesh

__all__ = ["CONTROL", "HOST_PART", "Links", "PART"]

CONTROL = "control"
"""The gloo process group of all ranks, for small numbers that the host reads."""
PART = "part"
"""That of the ranks which train the same tensors as this one, where they are not all."""
HOST_PART = "host part"
"""The gloo one of these ranks, where `PART` is NCCL's."""


@final
class Links:
    """Process groups by name, and waits on them that end within a limit.

    Args:
        watchdog_s: of a wait, at most.
        heartbeat_s: after which a rank without a sign of life is the cause.
    Collective: makes process groups; every rank must call.
    """

    def __init__(self, mesh: Mesh, watchdog_s: float, heartbeat_s: float) -> None:
        self.mesh = mesh
        self._limit, self._process = timedelta(seconds=watchdog_s), os.getpid()
        self.before_wait: Callable[[], None] = lambda: None
        """Called before this rank waits for others; see `Comm.call_before_waits`."""
        # Held here alone: whoever keeps the last reference to a group ends it.
        self.groups: dict[str, dist.ProcessGroup] = {}
        weakref.finalize(self, _leave, weakref.ref(self), self.groups, self._process)
        tell_forks(self)
        self.new_group(CONTROL, "gloo")
        name: str = self.groups[CONTROL].group_name
        # The store is the one thing that ranks share when the process group is stuck; torch has no public way to it. A
        # client serves one request at a time, and NCCL may sit in one for seconds while it connects.
        store = dist.distributed_c10d.PrefixStore(f"zeroshard/{name}", own_client_of(default_store()))
        self.watchdog = Watchdog(store, mesh.rank, mesh.world_size, watchdog_s, heartbeat_s)

    def new_group(self, name: str, backend: str, *axes: str) -> None:
        """Make the process group of all ranks, or those of the ranks along `axes`, on all ranks at the same time."""
        # What a device waits for ends here, in words; torch's own watchdog, which aborts without them, comes later.
        limit = self._limit if backend == "gloo" else 2 * self._limit
        if axes:
            ranks = self.mesh.rows(*axes).tolist()
            self.groups[name], _ = dist.new_subgroups_by_enumeration(ranks, timeout=limit, backend=backend)
        else:
            self.groups[name] = dist.new_group(backend=backend, timeout=limit)
        if backend == "nccl":
            device = self.mesh.device
            self.watchdog.record = lambda: devices.mark(device).query

    def after_fork(self) -> None:
        """Refuse to communicate, and end no process group: the connections are the parent's, and so are the threads."""
        keep_for_good(dist.group.WORLD, default_store(), *self.groups.values())
        for name in ("start", "wait", "wait_on_stream"):
            setattr(self, name, self._refuse)

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError(
            f"{self.mesh} Process {os.getpid()} was forked from process {self._process} of this rank, so it cannot "
            "communicate with other ranks: the connections are its parent's. It may read parameters that are not "
            f"released; use the model, the optimizer and the handle in process {self._process} only."
        )

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is a device's, which orders its work by streams."""
        return tensor.device.type != "cpu"

    def start(self, start: Callable[[], Any], what: str) -> dist.Work:
        """Start a collective, or a message of one. A dead peer may show already here."""
        # The end of a pass, mostly: what the device was told to wait for is complete.
        self.watchdog.mark()
        try:
            work: dist.Work | None = start()
        except RuntimeError as error:
            raise self._explain(error, what) from error
        assert work is not None  # None only for ranks outside the process group, and this one is inside
        return work

    def wait(self, works: Sequence[dist.Work | Meeting], what: str) -> None:
        """Return when all are done: the host waits.

        Raises:
            RankMismatchError: one failed, or took longer than the limit; the text says what each rank does.
        """
        self.before_wait()
        self.watchdog.waits_for(what)
        try:
            for work in works:
                work.wait(self._limit)
        except RuntimeError as error:
            raise self._explain(error, what) from error
        self.watchdog.runs_after(what)

    def wait_on_stream(self, work: dist.Work, what: str, *, is_last: bool = False) -> None:
        """Have what the current stream is told from here on run after a collective; the host goes on.

        Args:
            is_last: no agreement follows soon, so that the watchdog marks the stream here.

        Raises:
            RankMismatchError: the collective has failed already.
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise self._explain(error, what) from error
        self.watchdog.queues_behind(what)
        if is_last:
            self.watchdog.mark()

    def run(self, start: Callable[[], Any], what: str) -> None:
        """Start a collective and wait for it."""
        self.wait([self.start(start, what)], what)

    def _explain(self, error: RuntimeError, what: str) -> RankMismatchError:
        self.watchdog.gives_up(what)
        reason = str(error).splitlines()[0]
        cause, report = self.watchdog.cause(is_closed="imed out" not in reason), self.watchdog.report()
        first = (
            f"A rank failed, and with it the run. {cause}\n{self.mesh} noticed it" if cause else f"{self.mesh} gave up"
        )
        return RankMismatchError(
            f"{first} while it waited for {what}: {reason}\nWhat each rank does:\n{report}\n"
            "Every rank must make the same passes, norms and steps. A rank whose process has ended closes its "
            f"connections at once; any other has watchdog_s={self._limit.total_seconds():g} seconds."
        )


def _leave(links: "weakref.ref[Links]", groups: dict[str, dist.ProcessGroup], process: int) -> None:
    """End the process groups of a model that is gone, or of an interpreter that ends.

    A worker drops the last tensor that it sent a moment after the wait for it ends, and needs the interpreter for that;
    in an interpreter that ends, it would abort the process. The last reference to a group waits for its workers.
    """
    if is_child_of(process):
        return
    if (alive := links()) is not None:
        alive.__dict__.clear()
    while groups:
        with suppress(AssertionError, ValueError):  # whoever destroyed the default one, destroyed all
            dist.destroy_process_group(groups.popitem()[1])
