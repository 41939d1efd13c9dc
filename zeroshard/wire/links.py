"""The connections of one model's ranks: process groups, waits with a limit, and errors that name each rank.

Owns the process groups and the watchdog. It must not know the content of messages: transports start collectives and
messages on the groups, and wait here.

Note: two waits
    `wait` blocks the host until messages of gloo and meetings on the board are done, or raises an error that names the
    missing ranks. `wait_on_stream` orders the current stream after NCCL's collectives without blocking the host; the
    watchdog observes the stream. NCCL's own wait would block the host, with pauses, if it had a limit, so it has none.
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
from zeroshard.torch_groups import all_groups, default_store, named_group, own_client_of
from zeroshard.watch.process import is_child_of, keep_for_good, tell_forks
from zeroshard.watch.watchdog import Watchdog
from zeroshard.wire.board import Meeting
from zeroshard.wire.mesh import Mesh

__all__ = ["CONTROL", "HOST_PART", "Links"]

CONTROL = "control"
"""The gloo process group of all ranks of the mesh, for small numbers that the host reads."""
HOST_PART = "host part"
"""The gloo process group of the ranks of `PART` (`table/groups.py`), if that uses NCCL."""


@final
class Links:
    """Process groups by name, and waits with a limit.

    Args:
        watchdog_s: maximum seconds of a wait.
        heartbeat_s: seconds without a heartbeat after which a rank is the cause of a failure.

    Collective: creates process groups; every rank of the mesh must call.
    """

    def __init__(self, mesh: Mesh, watchdog_s: float, heartbeat_s: float) -> None:
        self.mesh = mesh
        self._limit, self._process = timedelta(seconds=watchdog_s), os.getpid()
        self.before_wait: Callable[[], None] = lambda: None
        """Called before this rank waits for others; see `Comm.call_before_waits`."""
        # The only references: the last reference to a group ends it.
        self.groups: dict[str, dist.ProcessGroup] = {}
        self._leave = weakref.finalize(self, _leave, weakref.ref(self), self.groups, self._process)
        tell_forks(self)
        self.new_group(CONTROL, "gloo")
        name: str = self.groups[CONTROL].group_name
        # Only the store is usable when the process group is stuck; torch has no public access to it. A client serves
        # one request at a time, and NCCL may occupy it for seconds while it connects.
        store = dist.distributed_c10d.PrefixStore(f"zeroshard/{name}", own_client_of(default_store()))
        self.watchdog = Watchdog(store, mesh.rank, mesh.numbers, str(mesh), watchdog_s, heartbeat_s)

    def new_group(self, name: str, backend: str, *axes: str) -> None:
        """Create the process group of all ranks, or of the ranks along `axes`, on all of them at the same time."""
        # Waits of a device end here with an error; torch's own watchdog, which aborts without one, fires later.
        limit = self._limit if backend == "gloo" else 2 * self._limit
        places = self.mesh.along(*axes) if axes else range(self.mesh.world_size)
        numbers = [self.mesh.numbers[place] for place in places]
        self.groups[name] = named_group(numbers, name, backend, limit, is_part=self.mesh.across.is_part)
        if backend == "nccl":
            device = self.mesh.device
            self.watchdog.record = lambda: devices.mark(device).query

    def follow(self, watchdog: Watchdog) -> None:
        """Tell the watchdog of more ranks what this rank waits for: its own one knows no cause elsewhere, and no wait.

        A rank that waits for another place would seem to be slow.
        """
        self.watchdog.close()
        self.watchdog, watchdog.record = watchdog, watchdog.record or self.watchdog.record

    def close(self) -> None:
        """End the watchdog and the process groups, when no rank uses them any more."""
        self.watchdog.close()
        self._leave()

    def after_fork(self) -> None:
        """Disable communication in a forked child, and keep all process groups, which the parent owns."""
        keep_for_good(default_store(), *all_groups())
        for name in ("start", "wait", "wait_on_stream"):
            setattr(self, name, self._refuse)

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError(
            f"{self.mesh} Process {os.getpid()} was forked from process {self._process} of this rank, so it cannot "
            "communicate with other ranks: the connections are its parent's. It may read parameters that are not "
            f"released; use the model, the optimizer and the handle in process {self._process} only."
        )

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on a device with streams."""
        return tensor.device.type != "cpu"

    def start(self, start: Callable[[], Any], what: str) -> dist.Work:
        """Start a collective or one of its messages. The failure of a peer may already raise here."""
        # Usually the end of a pass: all waits of the device are queued.
        self.watchdog.mark()
        try:
            work: dist.Work | None = start()
        except RuntimeError as error:
            raise self.watchdog.explain(error, what) from error
        assert work is not None  # None only for ranks outside the process group, and this one is inside
        return work

    def wait(self, works: Sequence[dist.Work | Meeting], what: str) -> None:
        """Block the host until all works are done.

        Raises:
            RankMismatchError: a work failed, or exceeded the limit; the text lists the operation of each rank.
        """
        self.before_wait()
        self.watchdog.waits_for(what)
        try:
            for work in works:
                work.wait(self._limit)
        except RuntimeError as error:
            raise self.watchdog.explain(error, what) from error
        self.watchdog.runs_after(what)

    def wait_on_stream(self, work: dist.Work, what: str, *, is_last: bool = False) -> None:
        """Order later work of the current stream after a collective; the host does not wait.

        Args:
            is_last: whether no agreement follows soon, so that the watchdog marks the stream here.

        Raises:
            RankMismatchError: the collective has already failed.
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise self.watchdog.explain(error, what) from error
        self.watchdog.queues_behind(what)
        if is_last:
            self.watchdog.mark()

    def run(self, start: Callable[[], Any], what: str) -> None:
        """Start a collective and wait for it."""
        self.wait([self.start(start, what)], what)


def _leave(links: "weakref.ref[Links]", groups: dict[str, dist.ProcessGroup], process: int) -> None:
    """End the process groups of a deleted model, or at interpreter exit.

    A worker thread drops the last tensor that it sent shortly after the wait for it, and needs the interpreter for
    that: during interpreter exit, it would abort the process. Dropping the last reference to a group waits for its
    workers.
    """
    if is_child_of(process):
        return
    if (alive := links()) is not None:
        alive.__dict__.clear()
    while groups:
        with suppress(AssertionError, ValueError):  # whoever destroyed the default one, destroyed all
            dist.destroy_process_group(groups.popitem()[1])
