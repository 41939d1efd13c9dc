"""A GPU in emulation: NCCL's code of the engine on fake works and a fake stream, which complete late, with values.

Owns the emulated device of a rank, and the process groups and links that lead to it. It must not know the engine: it
takes the place of `make_comm`, or of a `Links`. Read `Device` first. Tests use `gpu()` around `zs.shard`.

Note: what is emulated
    Kernels run at once, on the CPU, so the compute stream is the program itself. Each communicator has a stream of its
    own, which is behind: a collective ends at a moment that a generator chooses, after those that were issued before it
    on the same communicator, before or after those on others, and at the latest when the compute stream waits for it.
    Values travel over gloo beneath, from a copy of what was given.
Note: what is found
    A collective owns its memory from its issue to its end. The issue fills the results with `POISON` (NaN): code that
    reads a result before the wait computes NaN. At the end of the collective, its inputs must be allocated and
    unchanged, and the poison must be untouched; otherwise the memory was freed or used by other code. Collectives
    without a wait, and waits that stop the host, are counted. `Device.check` raises an error with all defects.
Note: a device that hangs
    On a GPU the host goes on when a peer is missing, to the end of the pass, where it marks its stream, and hangs in
    the first read of a number. Here it marks the stream and hangs in the wait. A connection that was closed is no error
    to NCCL: the device hangs, and what ends the process is the watchdog.
"""

import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zeroshard import sharding
from zeroshard.table.settings import Settings
from zeroshard.table.trace import Ledger
from zeroshard.wire.comm import Comm, SoloComm
from zeroshard.wire.links import Links
from zeroshard.wire.mesh import Mesh
from zeroshard.wire.nccl import NcclComm

__all__ = ["POISON", "Begin", "Device", "EmulatedGroup", "EmulatedLinks", "emulated_comm", "gpu"]

POISON: Final = 0xFF
"""Each byte of what no collective has filled yet: NaN in every floating-point dtype, and -1."""
BACKEND: Final = "emulated-nccl"
POLL_S: Final = 0.0005


@final
class Region:
    """Memory that a collective uses, which it does not keep alive."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous(), "NCCL takes contiguous tensors"
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._first, self.nbytes = tensor.storage_offset() * tensor.element_size(), tensor.nbytes
        self.begin = tensor.data_ptr()

    def bytes(self) -> Tensor | None:
        """Return the memory, None where it was freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None or storage.nbytes() < self._first + self.nbytes:
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage, self._first, (self.nbytes,))

    def overlaps(self, other: "Region") -> bool:
        """Tell whether both have a byte in common."""
        return self.begin < other.begin + other.nbytes and other.begin < self.begin + self.nbytes


@final
class Work:
    """A collective under way on an emulated communicator.

    Args:
        given: what it reads, and `result` what it fills; in place, the one is a part of the other.
        rows: what gloo brings, a row for each rank.
        finish: returns the result's bytes, once the rows are there.
    """

    def __init__(
        self, device: "Device", name: str, given: Tensor, result: Tensor, beneath: Any, finish: Callable[[], Tensor]
    ) -> None:
        self.device, self.name, self.what, self._beneath, self._finish = device, name, name, beneath, finish
        self.given, self.result = Region(given), Region(result)
        self._was = self._bytes_of(self.given, "is issued").clone()
        self.is_waited = self.is_done = False
        # What is given in place stays as it is until the end.
        filled = self._bytes_of(self.result, "is issued")
        filled.fill_(POISON)
        if self.given.overlaps(self.result):
            self._bytes_of(self.given, "is issued").copy_(self._was)
        self._poisoned = filled.clone()

    def _bytes_of(self, region: Region, when: str) -> Tensor:
        found = region.bytes()
        if found is None:
            self.device.find(f"{self.name}: its memory was freed before it {when}")
            return torch.empty(region.nbytes, dtype=torch.uint8)
        return found

    def is_completed(self) -> bool:
        """Tell whether all ranks have issued it, and their values are here."""
        return bool(self._beneath.is_completed())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have the compute stream wait; with a timeout, as NCCL does then, the host."""
        self.is_waited = True
        if timeout is not None:
            self.device.host_waits.append(self.name)
        self.device.wait(self)
        return True

    def land(self) -> None:
        """End: leave the result in memory that must be as it was left."""
        try:
            self._beneath.wait()
        except RuntimeError:
            self.device.hang()
        if not torch.equal(self._bytes_of(self.given, "ended"), self._was):
            self.device.find(f"{self.name}: what it reads was overwritten before it ended")
        result = self._bytes_of(self.result, "ended")
        if not torch.equal(result, self._poisoned):
            self.device.find(f"{self.name}: what it fills was written to before it ended")
        result.copy_(self._finish().contiguous().view(-1).view(torch.uint8))
        self.is_done = True


@final
@dataclass(eq=False)
class Device:
    """The emulated GPU of one rank.

    Args:
        seed: of the order in which collectives end.
        eagerness: how probable it is, at each event, that a communicator's next collective ends, if it can.
    """

    seed: int = 0
    eagerness: float = 0.3
    defects: list[str] = field(default_factory=list)
    host_waits: list[str] = field(default_factory=list)
    """Collectives that the host waited for."""
    issued: int = 0
    watchdog: Any = None
    _streams: dict[str, deque[Work]] = field(default_factory=dict)
    _unwaited: list[Work] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def find(self, defect: str) -> None:
        """Note a defect."""
        self.defects.append(defect)

    def issue(self, stream: str, work: Work) -> Work:
        """Put a collective behind the others of its communicator."""
        self.issued += 1
        for other in self._unwaited:
            # Those of one communicator follow one another.
            if other not in self._streams.setdefault(stream, deque()) and not other.is_waited:
                if work.result.overlaps(other.result) or work.result.overlaps(other.given):
                    self.find(f"{work.name} writes to memory of {other.name}, which nobody has waited for")
                elif work.given.overlaps(other.result):
                    self.find(f"{work.name} reads the result of {other.name}, which nobody has waited for")
        self._unwaited = [one for one in self._unwaited if not one.is_waited] + [work]
        self._streams.setdefault(stream, deque()).append(work)
        self.advance()
        return work

    def advance(self) -> None:
        """Have some collectives end, each communicator's in order."""
        for stream in self._streams.values():
            while stream and self._random.random() < self.eagerness and stream[0].is_completed():
                stream.popleft().land()

    def wait(self, work: Work) -> None:
        """End a collective, after all those before it on its communicator: the compute stream waits for its result."""
        self.advance()
        if work.is_done:
            return
        if not work.is_completed() and self.watchdog is not None:
            self.watchdog.queues_behind(work.what)
            self.watchdog.mark()
        stream = next(stream for stream in self._streams.values() if work in stream)
        while not work.is_done:
            stream.popleft().land()

    def new_stream(self) -> str:
        """Return the name of a stream for one more communicator."""
        name = f"communicator {len(self._streams)}"
        self._streams[name] = deque()
        return name

    def communicator(self, store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        """Return a communicator of the device."""
        return EmulatedGroup(store, rank, size, timeout, self)

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is the device's. Bytes are those of texts, which the host has."""
        return tensor.dtype != torch.uint8

    def mark(self) -> Callable[[], bool]:
        """Mark the compute stream: it is past the mark when all that it was told to wait for has ended."""
        waited = [work for stream in self._streams.values() for work in stream if work.is_waited]
        return lambda: all(work.is_done for work in waited)

    def hang(self) -> None:
        """Do nothing any more: only the end of the process ends it."""
        while True:
            time.sleep(POLL_S)

    def check(self) -> None:
        """Raise if anything was found.

        Raises:
            AssertionError: a defect; the text has all.
        """
        if found := self.found():
            raise AssertionError("\n".join(found))

    def found(self) -> list[str]:
        """Return the defects so far, and what nobody waited for yet."""
        never = [f"{work.name}: nobody waited for it" for work in self._unwaited if not work.is_waited]
        return self.defects + never


Begin = Callable[[Tensor], tuple[Any, Callable[[], Tensor]]]
"""Has gloo begin with what is given; returns its work, and what gives the result after it."""


class EmulatedGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A communicator: what torch.distributed calls of a process group, by the names of all releases.

    Args:
        device: what `EmulatedLinks` has.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, device: Any) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._device = rank, size, device
        self._beneath = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = device.new_stream()

    def _rows(self, finish: Callable[[Tensor], Tensor]) -> Begin:
        """Have every rank's tensor brought, a row each; `finish` makes the result of them."""

        def begin(given: Tensor) -> tuple[Any, Callable[[], Tensor]]:
            raw = given.reshape(-1).view(torch.uint8)
            rows = torch.empty(self._size, raw.numel(), dtype=torch.uint8)
            return self._beneath.allgather([[*rows]], [raw]), lambda: finish(rows.view(given.dtype))

        return begin

    def _issue(self, what: str, given: Tensor, result: Tensor, begin: Begin) -> Any:
        return self._device.issue(
            self._name, Work(self._device, self._named(what, given), given, result, *begin(given.detach().clone()))
        )

    def _named(self, what: str, given: Tensor) -> str:
        return f"{what} of {given.numel()} {given.dtype} on {self._name}"

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        """Gather a row of each rank."""
        return self._issue("all-gather", given, output, self._rows(lambda rows: rows))

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        """Leave this rank's row of the sum."""
        operation = _operation_of(opts.reduceOp, self._size)
        return self._issue(
            "reduce-scatter",
            given,
            output,
            self._rows(lambda rows: _sum(rows.view(self._size, self._size, -1)[:, self._rank], operation)),
        )

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def alltoall_base(self, output: Tensor, given: Tensor, to: list[int], of: list[int], opts: Any = None) -> Work:
        """Send a part to each rank."""

        def begin(sent: Tensor) -> tuple[Any, Callable[[], Tensor]]:
            heard = torch.empty_like(output, device="cpu")
            return self._beneath.alltoall_base(heard, sent, to, of), lambda: heard

        return self._issue("all-to-all", given, output, begin)

    all_to_all_single = alltoall_base

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Leave the sum."""
        operation = _operation_of(opts.reduceOp, self._size)
        return self._issue("all-reduce", tensors[0], tensors[0], self._rows(lambda rows: _sum(rows, operation)))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Leave what the root has."""
        return self._issue("broadcast", tensors[0], tensors[0], self._rows(lambda rows: rows[opts.rootRank]))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Gather into the rows of one tensor."""
        first = outputs[0][0]
        whole = torch.as_strided(first, (self._size, inputs[0].numel()), (inputs[0].numel(), 1), first.storage_offset())
        assert [one.data_ptr() for one in outputs[0]] == [row.data_ptr() for row in whole], "rows of one tensor"
        return self._issue("all-gather", inputs[0], whole, self._rows(lambda rows: rows))

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name of the backend."""
        return BACKEND


Operation = tuple[str, float]


def _operation_of(op: Any, size: int) -> Operation:
    if op == dist.ReduceOp.AVG:
        return "sum", 1 / size
    if op == dist.ReduceOp.PREMUL_SUM:
        return "sum", op.__getstate__()[1]
    kinds = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}
    return next(kind for one, kind in kinds.items() if op == one), 1.0


def _sum(rows: Tensor, operation: Operation) -> Tensor:
    """Return what NCCL makes of the ranks' rows, in their own dtype; the order of its sums is its own, here the ranks'.

    A factor is rounded to a low dtype, and multiplied before the sum. In fp32 it comes after the sum here, since an
    oracle has it there, and the order is nobody's promise.
    """
    kind, factor = operation
    if kind != "sum":
        return rows.amax(0) if kind == "max" else rows.amin(0)
    is_low = rows.dtype in (torch.float16, torch.bfloat16)
    parts = [row * torch.tensor(factor, dtype=rows.dtype) if is_low and factor != 1.0 else row for row in rows]
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total if is_low or factor == 1.0 else total * factor


@final
class EmulatedLinks(Links):  # type: ignore[misc]
    """Process groups of an emulated device for whoever asks for NCCL's.

    Args:
        device: a `Device`, or a `SharedDevice` of `shared_gpu.py`.
        has_all: all tensors but bytes count as the device's; else none does, as they lie.
    """

    def __init__(self, mesh: Mesh, watchdog_s: float, heartbeat_s: float, device: Any, *, has_all: bool = True) -> None:
        self.device, self._has_all = device, has_all
        if BACKEND.upper() not in dist.Backend.backend_list and BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, _make_group, devices=["cpu", "cuda"])
        super().__init__(mesh, watchdog_s, heartbeat_s)
        device.watchdog = self.watchdog

    def new_group(self, name: str, backend: str, *axes: str) -> None:
        """Make the group on the device."""
        global _MAKING
        _MAKING = self.device
        super().new_group(name, BACKEND if backend == "nccl" else backend, *axes)
        if backend == "nccl":
            self.watchdog.record = self.device.mark

    def is_on_device(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is the device's."""
        return self._has_all and self.device.holds(tensor)

    def wait_on_stream(self, work: Any, what: str, *, is_last: bool = False) -> None:
        """Wait as for any device, and know what for."""
        work.what = what
        super().wait_on_stream(work, what, is_last=is_last)


_MAKING: Any = None
"""The device that process groups are made for; torch hands its makers nothing."""


def _make_group(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    assert _MAKING is not None
    return _MAKING.communicator(store, rank, size, timeout)


def emulated_comm(mesh: Mesh, settings: Settings, ledger: Ledger, device: Device) -> Comm:
    """Return NCCL's transport on an emulated device. Collective: makes process groups; every rank must call."""
    if mesh.world_size == 1:
        return SoloComm(mesh, ledger)
    links = EmulatedLinks(mesh, settings.watchdog_s, settings.heartbeat_s, device)
    return NcclComm(links, ledger)


@contextmanager
def gpu(seed: int = 0) -> Iterator[Device]:
    """Have `zs.shard` use emulated GPUs, one for each rank, and raise at the end if a defect was found.

    Args:
        seed: of the order in which collectives end; each rank has its own.
    """
    device = Device(seed=1009 * seed + int(os.environ.get("RANK", "0")))

    def make(mesh: Mesh, settings: Settings, ledger: Ledger) -> Comm:
        return emulated_comm(mesh, settings, ledger, device)

    with patch.object(sharding, "make_comm", make):
        yield device
    device.check()
