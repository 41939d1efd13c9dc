"""A device, its bus, its host's processors and a disk in emulation: sleeps on threads of their own, under the engine.

Owns the clocks of an offloaded step: what the engine begins and waits for is the engine's own code, and only how long
it takes is emulated. It must not know plans. Read `Machine` first.

Note: what is emulated
    The program is the compute stream, too: a kernel is a sleep of the program. A copy is a sleep on the bus's thread
    for its direction, after those that were issued before; the program waits for it where the engine's stream would.
    An update, and rounding, are sleeps on the host's thread. A read and a write of a file are made, and sleep then, one
    after the other in each direction of the disk. The engine's thread for copies ahead of use fills buffers as the
    program does, and is at a moment of its own. Values are those of a run without emulation.
Note: two memories
    Both are the host's. What the engine asks a memory beside the device's for is noted, so that a copy to it is known
    from one to the device.
Note: moments, not durations
    All threads sleep until moments that follow from one another: work begins at the moment of its issue, or when its
    lane is free. So a thread that the scheduler of this host wakes late makes nothing late behind it, and what a step
    took is read from the program's moments. Sleeps keep the threads in the order of their moments.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final
from unittest.mock import patch

import torch
from torch import Tensor, nn

from zeroshard import devices
from zeroshard.core.buffer import Bucket
from zeroshard.store.ahead import Late
from zeroshard.store.disk import BLOCK_BYTES, Disk
from zeroshard.store.landing import HostLanding, Leaving
from zeroshard.store.stores import FarStore, FileStore, HostStore
from zeroshard.update import background
from zeroshard.update.streamed import Chunk

__all__ = ["Block", "Machine", "emulated"]


def sleep_until(moment_s: float) -> None:
    """Sleep until a moment of `time.perf_counter`."""
    if (rest_s := moment_s - time.perf_counter()) > 0:
        time.sleep(rest_s)


class Ticket(NamedTuple):
    """Work on a lane, and the moment that it is done."""

    sleeping: "Future[None]"
    done_s: float


@final
@dataclass
class Mark:
    """What stands for an event: the moment at which a thread marked its stream, and the last copy before the mark."""

    machine: "Machine"
    marked_s: float
    copy: Ticket | None

    def synchronize(self) -> None:
        """Wait as the host does."""
        self.wait()

    def wait(self) -> None:
        """Wait for the copy, and be at the moment of the mark."""
        self.machine.follow_to(self.marked_s)
        if self.copy is not None:
            self.machine.await_copy(self.copy)


@final
class Lane:
    """Something that does one thing after the other, on a thread of its own."""

    def __init__(self) -> None:
        self._pool, self._free_s = ThreadPoolExecutor(1), 0.0

    def reserve(self, now_s: float, took_s: float) -> float:
        """Return the moment at which work issued now ends, after the work that is queued before it."""
        self._free_s = max(now_s, self._free_s) + took_s
        return self._free_s

    def begin(self, now_s: float, took_s: float) -> Ticket:
        """Sleep for work on this lane's thread."""
        done_s = self.reserve(now_s, took_s)
        return Ticket(self._pool.submit(sleep_until, done_s), done_s)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()


@final
@dataclass(eq=False)
class Machine:
    """The rates of a machine, in bytes a second, and its lanes.

    Args:
        bus: of each direction.
        host: that updates and rounding read and write.
        disk: of each direction.
    """

    bus: float
    host: float
    disk: float
    computed_s: float = 0.0
    lanes: dict[str, Lane] = field(default_factory=dict)
    _stream: Ticket | None = None
    """The last copy that the compute stream runs behind."""

    _clock: threading.local = field(default_factory=threading.local)
    _memory: set[int] = field(default_factory=set)
    """Storages beside the device's."""

    def __post_init__(self) -> None:
        self.lanes = {name: Lane() for name in ("out", "back", "host", "copier", "read", "write")}

    @property
    def now_s(self) -> float:
        """The moment that this thread of the program is at."""
        return float(getattr(self._clock, "now_s", 0.0))

    @now_s.setter
    def now_s(self, moment_s: float) -> None:
        self._clock.now_s = moment_s

    def note(self, memory: Tensor) -> Tensor:
        """Note memory beside the device's, and return it."""
        self._memory.add(memory.untyped_storage().data_ptr())
        return memory

    def is_beside(self, memory: Tensor) -> bool:
        """Tell whether memory is beside the device's."""
        return memory.untyped_storage().data_ptr() in self._memory

    def start(self) -> float:
        """Begin to measure, and return the moment."""
        self.now_s = time.perf_counter()
        return self.now_s

    def compute(self, seconds: float) -> None:
        """Run a kernel, behind copies of the same stream."""
        self.follow()
        self.computed_s += seconds
        self.now_s += seconds
        sleep_until(self.now_s)

    def follow(self) -> None:
        """Wait for copies of the compute stream."""
        if self._stream is not None:
            self.await_copy(self._stream)
            self._stream = None

    def follow_to(self, moment_s: float) -> None:
        """Be at that moment, if this thread is before it."""
        self.now_s = max(self.now_s, moment_s)

    def await_copy(self, ticket: Ticket) -> None:
        """Sleep until work on a lane is done."""
        ticket.sleeping.result()
        self.follow_to(ticket.done_s)

    def _run(self, lane: str, took_s: float) -> None:
        self.await_copy(self.lanes[lane].begin(self.now_s, took_s))

    def work(self, nbytes: float) -> None:
        """Have the host read and write so many bytes, and wait."""
        self._run("host", nbytes / self.host)

    def move(self, lane: str, to: Tensor, source: Tensor, after: Iterable["Mark"]) -> "Mark":
        """Begin to copy a piece of a gradient, which stays as it is until then, after these marks."""
        to.copy_(source)
        begun_s = max(self.now_s, *(one.copy.done_s if one.copy else one.marked_s for one in after))
        return Mark(self, self.now_s, self.lanes[lane].begin(begun_s, to.nbytes / self.bus))

    def fill(self, piece: Tensor, values: Tensor) -> None:
        """Convert values on the host, into a buffer."""
        piece.copy_(values)
        self._run("copier" if self.is_ahead else "host", (values.nbytes + piece.nbytes) / self.host)

    def launch(self, target: Tensor, piece: Tensor) -> Mark:
        """Copy a buffer to the device; the stream of this thread follows."""
        target.copy_(piece)
        copy = self.lanes["back"].begin(self.now_s, target.nbytes / self.bus)
        if self.is_ahead:
            self._clock.copy = copy
        else:
            self._stream = copy
        return Mark(self, self.now_s, copy)

    @property
    def is_ahead(self) -> bool:
        """Whether this is the engine's thread for copies ahead of use."""
        return bool(getattr(self._clock, "is_ahead", False))

    @contextmanager
    def ahead(self, after: Mark) -> Iterator[None]:
        """Have the thread begin at the moment at which copies were handed over."""
        self._clock.is_ahead, self._clock.copy = True, None
        after.wait()
        yield

    def mark(self) -> Mark:
        """Mark the stream of this thread."""
        return Mark(self, self.now_s, self._clock.copy if self.is_ahead else None)

    def submit(self, begin: Callable[..., "Future[Any]"], move: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Have a thread of the disk read or write a stretch of an array, and sleep until it is done."""
        start, stop, _, writes = args
        nbytes = -(-(stop - start) * move.__self__.dtype.itemsize // BLOCK_BYTES) * BLOCK_BYTES  # type: ignore[attr-defined]
        done_s = self.lanes["write" if writes else "read"].reserve(self.now_s, nbytes / self.disk)

        def run() -> None:
            move(*args)
            sleep_until(done_s)

        made = begin(run)
        made.__dict__["done_s"] = done_s
        return made

    def close(self) -> None:
        """End the lanes."""
        for lane in self.lanes.values():
            lane.close()


@contextmanager
def emulated(machine: Machine, bytes_per_element: float) -> Iterator[Machine]:
    """Give the engine of this process this machine.

    Args:
        bytes_per_element: that an update of AdamW reads and writes.
    """
    functional, submit, wait = sys.modules[torch.optim.Adam.__module__], Disk.submit, Chunk._wait
    adam = functional.adam  # torch.optim hides its modules
    zeros, begin, update_unit, wait_unit = (
        HostStore.zeros,
        background.Run.begin,
        background.Run._update,
        background.Background._wait_for,
    )

    start = Late.start

    def update(params: list[Tensor], *args: Any, **options: Any) -> None:
        adam(params, *args, **options)
        machine.work(bytes_per_element * sum(one.numel() for one in params))

    take = Leaving._take

    def take_piece(leaving: Leaving, to: Tensor, piece: Tensor, after: list[Any], *args: Any, **options: Any) -> Any:
        take(leaving, to, piece, after[:1], *args, **options)  # here a wait is the program's
        return machine.move("out", to, to.clone(), after)

    def bring_piece(leaving: Leaving, room: Tensor, source: Tensor, after: list[Any]) -> Any:
        return machine.move("back", room, source, after)

    bring = HostStore.bring

    def bring_within_host(store: HostStore, target: Tensor, source: Tensor) -> None:
        bring(store, target, source)
        if machine.is_beside(target):
            machine.work(source.nbytes + target.nbytes)

    def fill(store: FarStore, piece: Tensor, values: Tensor) -> None:
        machine.fill(piece, values)

    def launch(store: FarStore, target: Tensor, piece: Tensor) -> Any:
        return machine.launch(target, piece)

    def is_far(store: FarStore, target: Tensor) -> bool:
        return not machine.is_beside(target)

    def make_buffer(store: FarStore) -> Tensor:
        return torch.empty(store._buffer_bytes, dtype=torch.uint8)

    def await_read(store: FileStore, move: Any) -> None:
        move.result()
        machine.follow_to(move.done_s)

    def submit_to(disk: Disk, move: Callable[..., Any], *args: Any) -> "Future[Any]":
        return machine.submit(lambda run: submit(disk, run), move, *args)

    def wait_for(chunk: Chunk) -> None:
        moving = list(chunk._moving)
        wait(chunk)
        for one in moving:
            machine.follow_to(one.__dict__["done_s"])

    def host_zeros(store: HostStore, numel: int, dtype: torch.dtype) -> Tensor:
        return machine.note(zeros(store, numel, dtype))

    def follow_late(bucket: Bucket, *, is_on_device: bool) -> None:
        if bucket.spec.has_masters and is_on_device is not machine.is_beside(bucket._updated):
            with torch.no_grad():
                bucket._store.bring(bucket._updated, bucket._masters)

    def lane(device: torch.device, use: str, after: Any) -> AbstractContextManager[None]:
        return machine.ahead(after) if use == "back" else nullcontext()

    def start_late(late: Late) -> None:
        start(late)
        if late._arrived is not None:
            machine.follow_to(late._arrived.marked_s)  # type: ignore[attr-defined]

    def begin_run(run: Any, *args: Any) -> None:
        run.moments = {"begun": machine.now_s}
        begin(run, *args)

    def update_late(run: Any, piece: Any) -> None:
        machine.follow_to(run.moments["begun"])
        update_unit(run, piece)
        run.moments[piece] = machine.now_s

    def wait_late(one: background.Background, run: Any, future: Any) -> None:
        wait_unit(one, run, future)
        machine.follow_to(run.moments[run.pieces[run.futures.index(future)]])

    with ExitStack() as stack:
        stack.callback(machine.close)
        stack.enter_context(patch.object(functional, "adam", update))
        stack.enter_context(patch.object(HostLanding, "is_far", True))
        stack.enter_context(patch.object(Leaving, "_take", take_piece))
        stack.enter_context(patch.object(Leaving, "_bring", bring_piece))
        stack.enter_context(patch.object(devices, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype)))
        stack.enter_context(patch.object(devices, "used_on", lambda device, use, memory: None))
        stack.enter_context(patch.object(HostStore, "bring", bring_within_host))
        stack.enter_context(patch.object(FarStore, "_fill", fill))
        stack.enter_context(patch.object(FarStore, "_launch", launch))
        stack.enter_context(patch.object(FarStore, "_is_far", is_far))
        stack.enter_context(patch.object(FarStore, "_make_buffer", make_buffer))
        stack.enter_context(patch.object(FileStore, "_await", await_read))
        stack.enter_context(patch.object(Disk, "submit", submit_to))
        stack.enter_context(patch.object(Chunk, "_wait", wait_for))
        stack.enter_context(patch.object(HostStore, "zeros", host_zeros))
        stack.enter_context(patch.object(Bucket, "follow_late", follow_late))
        stack.enter_context(patch.object(FarStore, "takes_time", True))
        stack.enter_context(patch.object(devices, "lane", lane))
        stack.enter_context(patch.object(devices, "mark", lambda device: machine.mark()))
        stack.enter_context(patch.object(devices, "mark_on", lambda device: machine.mark()))
        stack.enter_context(patch.object(Late, "start", start_late))
        stack.enter_context(patch.object(background, "is_worthwhile", lambda device: True))
        stack.enter_context(patch.object(background.Run, "begin", begin_run))
        stack.enter_context(patch.object(background.Run, "_update", update_late))
        stack.enter_context(patch.object(background.Background, "_wait_for", wait_late))
        yield machine


class Kernel(torch.autograd.Function):
    """A kernel of a forward, and one of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, machine: Machine, forward_s: float, backward_s: float) -> Tensor:  # type: ignore[override]
        """Compute."""
        ctx.machine, ctx.backward_s = machine, backward_s
        machine.compute(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        """Compute."""
        ctx.machine.compute(ctx.backward_s)
        return grad, None, None, None


@final
class Block(nn.Module):
    """A product whose forward and backward take as long as they are told.

    Args:
        width: of the matrix.
    """

    def __init__(self, width: int, machine: Machine, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.product = nn.Linear(width, width, bias=False)
        self._machine, self._forward_s, self._backward_s = machine, forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        found: Tensor = Kernel.apply(self.product(x), self._machine, self._forward_s, self._backward_s)
        return found
