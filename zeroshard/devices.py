"""What this process knows of CUDA: its devices, and the streams on which a model's work runs.

Owns every such question that decides something (which device, which stream, is a graph being captured), so that tests
answer in the place of a GPU by replacing functions of this module. It must not know ranks, models or collectives.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, final

import torch

from zeroshard.torch_private import raw_stream

__all__ = [
    "Lane",
    "Mark",
    "ahead",
    "alone",
    "begin_thread",
    "behind",
    "choose",
    "count",
    "current",
    "free_bytes",
    "identity",
    "is_capturing",
    "mark",
    "mark_on",
    "order_after",
    "pinned",
    "stream_of",
    "use",
]

Mark = torch.Event
"""What `mark` returns."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def count() -> int:
    """Return how many CUDA devices this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def current() -> int:
    """Return the index of the CUDA device that the program has chosen; 0 if it has not."""
    return torch.cuda.current_device()


def use(device: torch.device) -> None:
    """Choose a CUDA device for the program: what it puts on "cuda" goes there."""
    torch.cuda.set_device(device)


def identity(device: torch.device) -> str:
    """Return what no other device has, on any host; "" where the driver does not tell."""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def free_bytes(device: torch.device) -> int:
    """Return what a CUDA device has left, with what torch keeps there without use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def stream_of(device: torch.device) -> int:
    """Return the address of the stream that this thread's kernels go to."""
    return raw_stream(current() if device.index is None else device.index)


def is_capturing() -> bool:
    """Tell whether the current stream records a CUDA graph instead of running kernels."""
    return torch.cuda.is_current_stream_capturing()


def order_after(device: torch.device, stream: int) -> None:
    """Have the current stream begin what follows when all that another one was told is done; the host goes on."""
    torch.cuda.current_stream(device).wait_stream(torch.cuda.ExternalStream(stream, device=device))


def choose(
    backend: str | None,
    *,
    local_rank: int | None,
    given: torch.device | None = None,
    found: torch.device | None = None,
) -> torch.device:
    """Return a rank's device: a CUDA device, where there are some and the process group can use them, else the CPU.

    Which one is what the process group was given, else what the program chose (`torch.cuda.set_device`), the launcher
    (LOCAL_RANK), or where the model is. It may not exist, and may be another rank's, too: `state/places.py` has all
    ranks refuse that.

    Args:
        backend: what the process group moves CUDA tensors with; None where it does not.
        local_rank: the rank's number on its host, if a launcher told.
        given: the device of the process group.
        found: that of a model's parameters, where it is one.
    """
    if not count() or backend not in ("nccl", "fake"):
        return torch.device("cpu")
    if given is not None:
        return given
    index = current()
    if not index and local_rank is not None:
        # A launcher may show each rank a device of its own, as the only one.
        index = local_rank if count() > 1 else 0
    elif not index and found is not None and found.type == "cuda":
        index = found.index
    return torch.device("cuda", index)


def mark(device: torch.device) -> Mark:
    """Mark what the current stream of a device has been told so far; the event says when all of that is done."""
    event = torch.Event(device)
    event.record()
    return event


def mark_on(device: torch.device) -> Mark | None:
    """Mark what the current stream of a CUDA device has been told so far; None on a CPU, which does all at once."""
    return None if device.type == "cpu" else mark(device)


def ahead(device: torch.device, after: Mark | None) -> AbstractContextManager[Any]:
    """Return a context in which copies are begun ahead of their use, on a stream of their own.

    Args:
        after: what they follow; None on a CPU, where they are made at once.
    """
    return nullcontext() if after is None else _on(_stream_for(device, "copies"), after)


def behind(device: torch.device, after: Mark | None) -> AbstractContextManager[Any]:
    """Return a context in which what is begun follows a mark alone, and nothing that was begun since.

    Args:
        after: None leaves the current stream.
    """
    return nullcontext() if after is None else _on(_stream_for(device, "what reads copies"), after)


@contextmanager
def _on(stream: torch.cuda.Stream, after: Mark) -> Iterator[None]:
    with torch.cuda.stream(stream):
        after.wait()
        yield


@functools.cache
def _stream_for(device: torch.device, what: str) -> torch.cuda.Stream:
    """Return a stream of a device beside the program's."""
    return torch.cuda.Stream(device)


def begin_thread(device: torch.device) -> None:
    """Begin a thread: what torch asks of CUDA there must not be asked of another rank's device."""
    if device.type == "cuda":
        use(device)


def pinned(values: torch.Tensor) -> torch.Tensor:
    """Return memory of the host for a copy of a device's tensor; the host waits for copies to any other memory."""
    return torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)


class HasLock(Protocol):
    """What several threads may call; where there is one thread alone, `lock` is None."""

    lock: Any


_Self = TypeVar("_Self", bound=HasLock)


def alone(method: Callable[Concatenate[_Self, _P], _T]) -> Callable[Concatenate[_Self, _P], _T]:
    """Let one thread at a time into methods of an object, by its reentrant `lock`: autograd has one for each device."""

    @functools.wraps(method)
    def call(self: _Self, /, *args: _P.args, **options: _P.kwargs) -> _T:
        if self.lock is None:
            return method(self, *args, **options)
        with self.lock:
            return method(self, *args, **options)

    return call


@final
class Lane:
    """The stream that a model's work is on: the same throughout a pass; one pass after the other.

    Memory that is gathered and released within a pass is given back to torch's allocator while kernels that read it may
    still be queued. The allocator hands it out again on the stream that it came from, in whose order that is safe. So a
    pass that is spread over streams is refused. Buffers and gradients outlive a pass: work on another stream than the
    last is ordered after it.

    Args:
        where: the rank, for messages.
        device: the rank's; on a CPU there are no streams.
    """

    __slots__ = ("_device", "_has_streams", "_last", "_where")

    def __init__(self, where: object, device: torch.device) -> None:
        self._where, self._device, self._has_streams = where, device, device.type == "cuda"
        self._last: int | None = None

    def begin(self, what: str) -> None:
        """Begin a pass, a step or another piece of work, on the current stream, after all before it.

        Raises:
            RuntimeError: the stream records a CUDA graph.
        """
        if not self._has_streams:
            return
        if is_capturing():
            raise RuntimeError(
                f"{self._where} {what} inside the capture of a CUDA graph. A sharded model cannot be captured: the "
                "host decides in each pass what is gathered and reduced, and gathered parameters lie at other "
                "addresses in each. Leave torch.cuda.graph() and make_graphed_callables() out; torch.compile without "
                "mode='reduce-overhead' also launches fewer kernels."
            )
        stream = stream_of(self._device)
        if self._last is not None and stream != self._last:
            # The host does not wait. Without this order, the new stream could write to a pooled buffer, or update a
            # shard, which a kernel or a collective that follows the old stream has yet to read.
            order_after(self._device, self._last)
        self._last = stream

    def check(self, what: str) -> None:
        """Raise if the pass under way has come to another stream."""
        if self._has_streams and stream_of(self._device) != self._last:
            raise RuntimeError(
                f"{self._where} {what} runs on another CUDA stream than the one that its pass began on. A pass of a "
                "sharded model stays on one stream, in whose order memory of released parameters is reused. Put `with "
                "torch.cuda.stream(...)` around the whole forward, not inside it."
            )
