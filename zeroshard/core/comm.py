"""What every backend offers the engine: collectives that wait with a limit, and end in an error that names each rank.

Owns the process groups, and the interface of which `core/backends.py` has an implementation for each backend. It must
not know units, passes or parameters: callers hand it flat tensors and say in words what they are for.
"""

import dataclasses
import os
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist

from zeroshard.core.errors import RankMismatchError
from zeroshard.core.mesh import Mesh
from zeroshard.faults.process import is_child_of, keep_for_good, tell_forks
from zeroshard.faults.watchdog import Watchdog
from zeroshard.host.board import Meeting

__all__ = [
    "BUCKETS",
    "Comm",
    "Pending",
    "gather_across_ranks",
    "mean_across_ranks",
    "tag_of",
]

Tensor = torch.Tensor
TEXT_BYTES = 4096
BUCKETS = 1 << 15
"""Buckets that a model may have: tags tell so many apart, and the board has four places for each."""
PASSES = 1 << 15


class Pending:
    """A collective under way. `wait()` once; it returns when the result may be read and the inputs reused."""

    def __init__(self, finish: Callable[[], bool | None]) -> None:
        self._finish = finish

    def wait(self) -> bool:
        """Block until the collective is done on this rank; False for a reduction that a rank was not ready for."""
        finish, self._finish = self._finish, _nothing
        return finish() is not False


def _nothing() -> None:
    return None


def tag_of(number: int, bucket: int) -> int:
    """Return what marks the messages of a bucket in pass `number`; it repeats itself long after they are gone.

    Below 2**30: gloo's tags have 31 bits, and the last tells gathers from reductions.
    """
    return number % PASSES * BUCKETS + bucket


class Comm(ABC):
    """The collectives that the engine needs, over all ranks of the mesh.

    `sent_bytes` counts what this rank hands to others, over the wire or in memory of the host, by what it is for.
    """

    watchdog: Watchdog | None = None

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.sent_bytes: Counter[str] = Counter()
        self.is_in_place = False
        """Whether ranks of one copy read each other's memory: nothing is received in buffers, nothing is on its way."""
        self.can_postpone = False
        """Whether a rank may take part in a reduction to say that it is not ready."""

    @abstractmethod
    def gather(self, full: Tensor, tag: int, what: str, kind: str = "gather") -> Pending:
        """Fill `full` from each rank's own shard of it, in place.

        Args:
            full: (N * S,) for the N ranks of one copy, this rank's shard at [rank * S, (rank + 1) * S) already in
                place.
            tag: the same on all ranks for the same bucket and pass.
        Collective: all-gather; each rank sends (N-1) * S elements.
        """

    @abstractmethod
    def reduce(self, full: Tensor | None, own: Tensor, wire: torch.dtype, scale: float, tag: int, what: str) -> Pending:
        """Sum `full` over the ranks of one copy, multiply by `scale`, and leave this rank's shard of it in `own`.

        Args:
            full: (N * S,) for the N ranks of one copy; the other shards are not changed. None, where `can_postpone`:
                this rank is not ready. Then all ranks learn so, `own` holds anything, and `full` is as it was.
            own: (S,), this rank's shard of `full` itself or any other memory.
            wire: what elements are rounded to before they are sent; sums are made in fp32 or better.
        Returns: what waits for it, and says whether all ranks were ready.
        Collective: reduce-scatter (sum in rank order 0..N-1 where the backend allows); each rank sends (N-1) * S
            elements.
        """

    @abstractmethod
    def reduce_copies(
        self, own: Tensor, wire: torch.dtype, scale: float, tag: int, what: str, *, is_ready: bool = True
    ) -> Pending:
        """Sum this rank's shard over the R copies and multiply by `scale`, in place.

        Args:
            own: (S,); S is a multiple of R.
            wire: as in `reduce`.
            is_ready: False, where `can_postpone`, as `full` is None in `reduce`.
        Returns: as `reduce`.
        Collective: all-reduce (sum in the order of copies where the backend allows) over the ranks that keep the same
            shard; each sends 2 * (R-1) * S / R elements.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, what: str, kind: str, *, is_part: bool = False) -> None:
        """Overwrite `tensor` with rank 0's.

        Args:
            is_part: ranks along the tensor axis have their own parts: take that of the first rank that has the same.
        Collective: broadcast; every rank must call.
        """

    @abstractmethod
    def agree(self, values: list[int], what: str) -> list[int]:
        """Return the minimum over ranks of each number. Collective: all-reduce (minimum) of 8 bytes a number."""

    @abstractmethod
    def collect(self, tensor: Tensor, what: str, kind: str = "agree") -> Tensor:
        """Return (world_size, *shape): every rank's `tensor`, by rank. Collective: all-gather; equal shapes."""

    def texts(self, text: str, what: str) -> list[str]:
        """Return every rank's text, cut to 4 KiB, by rank. Collective: all-gather of 4 KiB."""
        data = text.encode()[:TEXT_BYTES]
        row = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else row[:0]
        rows = self.collect(row.to(self.mesh.device), what).cpu()
        return [bytes(r.tolist()).rstrip(b"\0").decode(errors="replace") for r in rows]


@final
class SoloComm(Comm):
    """One process: every collective is the identity."""

    def gather(self, full: Tensor, tag: int, what: str, kind: str = "gather") -> Pending:
        return Pending(_nothing)

    def reduce(self, full: Tensor | None, own: Tensor, wire: torch.dtype, scale: float, tag: int, what: str) -> Pending:
        return Pending(_nothing)

    def reduce_copies(
        self, own: Tensor, wire: torch.dtype, scale: float, tag: int, what: str, *, is_ready: bool = True
    ) -> Pending:
        return Pending(_nothing)

    def broadcast(self, tensor: Tensor, what: str, kind: str, *, is_part: bool = False) -> None:
        return None

    def agree(self, values: list[int], what: str) -> list[int]:
        return values

    def collect(self, tensor: Tensor, what: str, kind: str = "agree") -> Tensor:
        return tensor[None]


class GroupComm(Comm):
    """What gloo and NCCL share: waits with a limit that end in an error naming every rank."""

    watchdog: Watchdog
    _data: dist.ProcessGroup
    """The ranks that train the same tensors as this one."""

    def __init__(self, mesh: Mesh, watchdog_s: float, heartbeat_s: float) -> None:
        super().__init__(mesh)
        self._limit, self._process = timedelta(seconds=watchdog_s), os.getpid()
        self._groups: list[dist.ProcessGroup] = []
        weakref.finalize(self, _leave, weakref.ref(self), self._groups, self._process)
        tell_forks(self)
        self._control = self._new_group("gloo")
        name: str = self._control.group_name
        # The store is the one thing that ranks share when the process group is stuck; torch has no public way to it.
        store = dist.distributed_c10d.PrefixStore(f"zeroshard/{name}", dist.distributed_c10d._get_default_store())
        self.watchdog = Watchdog(store, mesh.rank, mesh.world_size, watchdog_s, heartbeat_s)

    def _new_group(self, backend: str, *axes: str) -> dist.ProcessGroup:
        """Make the process group of all ranks, or those of the ranks along `axes`, on all ranks at the same time."""
        group: dist.ProcessGroup
        if axes:
            meshes = [dataclasses.replace(self.mesh, rank=rank) for rank in range(self.mesh.world_size)]
            ranks = [list(along) for along in sorted({mesh.along(*axes) for mesh in meshes})]
            group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=self._limit, backend=backend)
        else:
            group = dist.new_group(backend=backend, timeout=self._limit)
        self._groups.append(group)
        return group

    def after_fork(self) -> None:
        """Refuse to communicate, and end no process group: the connections are the parent's, and so are the threads."""
        keep_for_good(dist.group.WORLD, dist.distributed_c10d._get_default_store(), *self._groups)
        for name in ("_start", "_wait"):
            setattr(self, name, self._refuse)

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError(
            f"{self.mesh} Process {os.getpid()} was forked from process {self._process} of this rank, so it cannot "
            "communicate with other ranks: the connections are its parent's. It may read parameters that are not "
            f"released; use the model, the optimizer and the handle in process {self._process} only."
        )

    def _wait(self, works: Sequence[dist.Work | Meeting], what: str) -> None:
        self.watchdog.waits_for(what)
        try:
            for work in works:
                work.wait(self._limit)
        except RuntimeError as error:
            raise self._explain(error, what) from error
        self.watchdog.runs_after(what)

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

    def agree(self, values: list[int], what: str) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64)
        self._run(lambda: dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._control, async_op=True), what)
        self.sent_bytes["agree"] += tensor.nbytes
        agreed: list[int] = tensor.tolist()
        return agreed

    def _start(self, start: Callable[[], Any], what: str) -> dist.Work:
        """Start a collective, or a message of one. A dead peer may show already here."""
        try:
            work: dist.Work | None = start()
        except RuntimeError as error:
            raise self._explain(error, what) from error
        assert work is not None  # None only for ranks outside the process group, and this one is inside
        return work

    def _run(self, start: Callable[[], Any], what: str) -> None:
        """Start a collective and wait for it."""
        self._wait([self._start(start, what)], what)


def _leave(comm: "weakref.ref[GroupComm]", groups: list[dist.ProcessGroup], process: int) -> None:
    """End the process groups of a model that is gone; when the interpreter ends, all.

    A worker drops the last tensor that it sent a moment after the wait for it ends, and needs the interpreter for that;
    in an interpreter that ends, it would abort the process. The last reference to a group waits for its workers.
    """
    if is_child_of(process):
        return
    if (alive := comm()) is not None:
        if dist.is_initialized():
            dist.destroy_process_group()
        alive.__dict__.clear()
    while groups:
        with suppress(AssertionError, ValueError):  # whoever destroyed the default one, destroyed all
            dist.destroy_process_group(groups.pop())


def gather_across_ranks(tensor: Tensor) -> Tensor:
    """Return (world_size, *shape): every rank's tensor, by rank; (1, *shape) for one process.

    Args:
        tensor: the same shape and dtype on every rank.
    Collective: all-gather on the default process group; every rank must call.

    ```python
    import torch, zeroshard as zs

    assert zs.gather_across_ranks(torch.ones(2)).shape == (1, 2)
    ```
    """
    if not dist.is_initialized():
        return tensor[None]
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor.contiguous())
    return torch.stack(rows)


def mean_across_ranks(tensor: Tensor) -> Tensor:
    """Return the mean of every rank's tensor, summed in rank order, so that all ranks get the same bits.

    Args:
        tensor: floating point, the same shape on every rank.
    Collective: all-gather on the default process group; every rank must call.

    ```python
    import torch, zeroshard as zs

    assert zs.mean_across_ranks(torch.tensor(3.0)) == 3.0
    ```
    """
    rows = gather_across_ranks(tensor.detach())
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total / len(rows)
