"""CUDA devices of this process, and the streams on which a model runs.

Owns every query of CUDA that decides something (device, stream, graph capture), and pinned memory of the host; tests
replace functions of this module to emulate a GPU. It must not know ranks, models or collectives.
"""

import ctypes
import functools
import math
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, final

import torch

from zeroshard.torch_private import raw_stream

__all__ = [
    "Lane",
    "Mark",
    "Pinned",
    "alone",
    "begin_thread",
    "choose",
    "count",
    "current",
    "free_bytes",
    "generator_of",
    "identity",
    "is_capturing",
    "lane",
    "mark",
    "mark_on",
    "mark_streams",
    "moment",
    "on_stream",
    "order_after",
    "pinned",
    "seconds_between",
    "side_stream",
    "stream_of",
    "use",
    "used_on",
]

Mark = torch.Event
"""The type of event that `mark` returns."""
Moment = float | Mark
"""A time of the host, or of a stream; see `moment`."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def count() -> int:
    """Return the number of CUDA devices that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def current() -> int:
    """Return the index of the current CUDA device; 0 by default."""
    return torch.cuda.current_device()


def generator_of(device: torch.device) -> torch.Generator:
    """Return the generator from which operations on a device draw random numbers by default."""
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]


def use(device: torch.device) -> None:
    """Set the current CUDA device of the program."""
    torch.cuda.set_device(device)


def identity(device: torch.device) -> str:
    """Return a globally unique identifier of a device; "" if the driver provides none."""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a CUDA device, including unused memory that torch's allocator has reserved."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def stream_of(device: torch.device) -> int:
    """Return the address of the current stream of this thread."""
    return raw_stream(current() if device.index is None else device.index)


def is_capturing() -> bool:
    """Return whether the current stream is capturing a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


def order_after(device: torch.device, stream: int) -> None:
    """Make the current stream wait for all work queued on another stream; the host does not wait.

    The default stream has the address 0, for which `torch.cuda.ExternalStream` returns another stream (torch issue
    182960).
    """
    torch.cuda.current_stream(device).wait_stream(torch.cuda.get_stream_from_external(stream, device))


def on_stream(device: torch.device, stream: int) -> AbstractContextManager[Any]:
    """Return a context in which a stream, by its address, is the current one."""
    return torch.cuda.stream(torch.cuda.get_stream_from_external(stream, device))


def choose(
    backend: str | None,
    *,
    local_rank: int | None,
    given: torch.device | None = None,
    found: torch.device | None = None,
) -> torch.device:
    """Return the device of a rank: a CUDA device if one exists and the process group supports it, else the CPU.

    In order of precedence, the CUDA device is that of the process group, of the program (`torch.cuda.set_device`), of
    the launcher (LOCAL_RANK), or of the model. The device may not exist, or may be used by another rank;
    `join/places.py` raises on all ranks then.

    Args:
        backend: the backend of the process group for CUDA tensors; None if it has none.
        local_rank: the number of the rank on its host; None if the launcher did not set it.
        given: the device of the process group.
        found: the device of the model's parameters, if they share one.
    """
    if not count() or backend not in ("nccl", "fake"):
        return torch.device("cpu")
    if given is not None:
        return given
    index = current()
    if not index and local_rank is not None:
        # A launcher may make only one device visible to each rank.
        index = local_rank if count() > 1 else 0
    elif not index and found is not None and found.type == "cuda":
        index = found.index
    return torch.device("cuda", index)


def mark(device: torch.device) -> Mark:
    """Record an event on the current stream of a device, to learn when the work queued so far is done."""
    event = torch.Event(device)
    event.record()
    return event


def mark_on(device: torch.device) -> Mark | None:
    """Record an event on the current stream of a CUDA device; return None on a CPU, which has no streams."""
    return None if device.type == "cpu" else mark(device)


def moment(device: torch.device) -> Moment:
    """Return the time of the host for a CPU; for a device, when the current stream has done the work queued so far."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds_between(start: Moment, stop: Moment) -> float:
    """Return the seconds between two moments of one device; waits until both are over."""
    if isinstance(start, float) or isinstance(stop, float):
        return float(stop - start)  # type: ignore[operator]
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def lane(device: torch.device, use: str, after: Mark | None) -> AbstractContextManager[Any]:
    """Return a context for work on a separate stream of a device.

    Args:
        use: one of `USES`.
        after: the work follows this event; None on a CPU, where it runs at once.
    """
    return nullcontext() if after is None else _on(side_stream(device, use, torch.cuda), after)


@contextmanager
def _on(stream: torch.cuda.Stream, after: Mark) -> Iterator[None]:
    with torch.cuda.stream(stream):
        after.wait()
        yield


@functools.cache
def side_stream(device: torch.device, use: str, cuda: Any) -> Any:
    """Return the separate stream of a device for one use.

    Args:
        cuda: `torch.cuda`, or a substitute in tests.
    """
    return cuda.Stream(device=device)


def used_on(device: torch.device, use: str, memory: torch.Tensor) -> None:
    """Keep the allocator from using memory again before a separate stream has done the work queued so far."""
    memory.record_stream(side_stream(device, use, torch.cuda))


def begin_thread(device: torch.device) -> None:
    """Make the device of the rank the current one of a new thread."""
    if device.type == "cuda":
        use(device)


USES: Final = ("out", "back", "readers")
"""Separate streams: for copies to the host and from it (`store/bus.py`), and for what reads such copies."""
EXACT_BYTES: Final = 1 << 20
"""From here on, pinned memory has the size that was asked for; torch's allocator takes the next power of two."""


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return pinned host memory for copies from or to a device; copies of pageable memory would block the host."""
    if math.prod(shape) * dtype.itemsize < EXACT_BYTES:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    return _pinned(torch.cuda).take(shape, dtype)


def mark_streams() -> list[Mark]:
    """Record an event on each stream of the current device whose copies read or write host memory."""
    device = torch.device("cuda", current())
    found = [mark(device)]
    for use in USES:
        with torch.cuda.stream(side_stream(device, use, torch.cuda)):
            found.append(mark(device))
    return found


@final
class Pinned:
    """Pinned host memory of exact sizes, of this process.

    Memory that nothing refers to any more serves a later request of the same size, or is given back, once the copies
    are over that may be under way. Nothing waits for the device, which may wait for a message of a rank that waits for
    this rank.

    Args:
        runtime: `torch.cuda.cudart()`, or a substitute in tests.
        mark_all: `mark_streams`, or a substitute in tests.
    """

    def __init__(self, runtime: Any, mark_all: Callable[[], Sequence[Mark]]) -> None:
        self._runtime, self._mark_all, self._lock = runtime, mark_all, threading.RLock()
        self._pinned: dict[int, mmap.mmap] = {}
        """All of it, by address: what an interruption forgets must not be unmapped."""
        self._dropped = deque[mmap.mmap]()
        """Finalizers, which run in any thread at any time, only append here."""
        self._unused = deque[tuple[mmap.mmap, Sequence[Mark]]]()
        """The same, with events after which no copy is under way."""

    @property
    def nbytes(self) -> int:
        """What is pinned, used or not."""
        return sum(map(len, self._pinned.values()))

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor with any content, and no base, which is all that refers to its memory.

        Raises:
            MemoryError: the memory cannot be pinned.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            done = self._done()
            block = next((one for one, _ in done if len(one) == nbytes), None)
            if block is None:
                for one, _ in done:
                    self._unpin(one)
                block = self._pin(nbytes)
            else:
                self._unused.extend(one for one in done if one[0] is not block)
        array = (ctypes.c_char * nbytes).from_buffer(block)
        weakref.finalize(array, self._dropped.append, block).atexit = False
        storage = torch.frombuffer(array, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape))  # type: ignore[call-overload, no-any-return]

    def _done(self) -> list[tuple[mmap.mmap, Sequence[Mark]]]:
        """Take what no copy needs any more from the unused memory."""
        if self._dropped:
            marks = self._mark_all()
            self._unused.extend((self._dropped.popleft(), marks) for _ in range(len(self._dropped)))
        done = list[tuple[mmap.mmap, Sequence[Mark]]]()
        for _ in range(len(self._unused)):
            one = self._unused.popleft()
            (done if all(mark.query() for mark in one[1]) else self._unused).append(one)
        return done

    def _pin(self, nbytes: int) -> mmap.mmap:
        # Shared: after a fork, a private page that this process writes would no longer be the page that copies read.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        address = _address_of(memory)
        self._pinned[address] = memory
        if code := int(self._runtime.cudaHostRegister(address, nbytes, 0)):
            del self._pinned[address]
            raise MemoryError(
                f"{nbytes:,} bytes of host memory cannot be pinned (CUDA error {code}); {self.nbytes:,} are. Offload "
                "less, or raise the memory of the container and its limit of locked memory (ulimit -l)."
            )
        return memory

    def _unpin(self, memory: mmap.mmap) -> None:
        if not int(self._runtime.cudaHostUnregister(address := _address_of(memory))):
            del self._pinned[address]


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@functools.cache
def _pinned(cuda: Any) -> Pinned:
    return Pinned(cuda.cudart(), mark_streams)


class HasLock(Protocol):
    """An object that several threads may call; `lock` is None with a single thread."""

    lock: Any


_Self = TypeVar("_Self", bound=HasLock)


def alone(method: Callable[Concatenate[_Self, _P], _T]) -> Callable[Concatenate[_Self, _P], _T]:
    """Serialize a method by the object's reentrant `lock`: autograd runs one thread per device.

    The method runs outside `torch.inference_mode()`: memory that it allocates there could not be changed later.
    """

    @functools.wraps(method)
    def call(self: _Self, /, *args: _P.args, **options: _P.kwargs) -> _T:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False), torch.no_grad():
                return call(self, *args, **options)
        if self.lock is None:
            return method(self, *args, **options)
        with self.lock:
            return method(self, *args, **options)

    return call


@final
class Lane:
    """The stream of a model's work: one stream for a pass, and passes in order.

    Memory that is gathered and released within a pass returns to torch's allocator while kernels that read it may still
    be queued. The allocator reuses the memory on the same stream, where the order makes this safe. A pass that changes
    its stream is therefore an error. Buffers and gradients outlive a pass, so the work of a pass on a new stream is
    ordered after the previous stream.

    Args:
        where: the rank, for messages.
        device: the device of the rank; a CPU has no streams.
    """

    __slots__ = ("_device", "_has_streams", "_last", "_where")

    def __init__(self, where: object, device: torch.device) -> None:
        self._where, self._device, self._has_streams = where, device, device.type == "cuda"
        self._last: int | None = None

    def begin(self, what: str) -> None:
        """Begin a pass, a step or other work on the current stream, after all previous work.

        Raises:
            RuntimeError: the stream is capturing a CUDA graph.
        """
        if not self._has_streams:
            return
        if is_capturing():
            raise RuntimeError(
                f"{self._where} {what} inside the capture of a CUDA graph. A sharded model cannot be captured: the "
                "host decides in each pass what is gathered and reduced, and the addresses of gathered parameters "
                "change between passes. Remove torch.cuda.graph() and make_graphed_callables(); torch.compile without "
                "mode='reduce-overhead' also launches fewer kernels."
            )
        stream = stream_of(self._device)
        if self._last is not None and stream != self._last:
            # The host does not wait. Without this order, the new stream could write to a pooled buffer, or update a
            # shard, before a kernel or a collective of the old stream has read it.
            order_after(self._device, self._last)
        self._last = stream

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Let what is inside wait on the stream of the last pass or step; the current stream follows that one."""
        if not self._has_streams or self._last is None or stream_of(self._device) == self._last:
            yield
            return
        with on_stream(self._device, self._last):
            yield
        order_after(self._device, self._last)

    def check(self, what: str) -> None:
        """Raise if the current pass continues on another stream."""
        if self._has_streams and stream_of(self._device) != self._last:
            raise RuntimeError(
                f"{self._where} {what} runs on another CUDA stream than the stream on which its pass began. A pass of "
                "a sharded model must stay on one stream, because the memory of released parameters is reused in the "
                "order of that stream. Put `with torch.cuda.stream(...)` around the whole forward, not inside it."
            )
