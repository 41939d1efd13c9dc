"""Several ranks on one real GPU: NCCL's code of the engine, over messages through the host that arrive late.

Owns the communicators of ranks that share a device, which NCCL refuses. It must not know the engine. `emulated.py` has
the links that lead here, and the same without a GPU.

Note: late, on another stream
    Each communicator has a stream and a thread. A collective waits there for the compute stream, for a moment of a
    generator's choosing, reads what it was given, has gloo exchange it, waits again, and writes its result: as NCCL
    does, after its issue, beside the compute stream. An engine that writes to what a collective still reads, reads a
    result before the wait, or gives memory back too early, computes something else.
"""

import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from tools.emulated import Begin, EmulatedGroup

__all__ = ["SharedDevice"]

CYCLES_A_SECOND: Final = 1.5e9
"""Of a GPU, roughly: what `torch.cuda._sleep` counts."""


@final
class SharedDevice:
    """A GPU that several ranks share, each a process.

    Args:
        delay_s: the longest delay before a collective reads, and before it writes.
    """

    def __init__(self, device: torch.device, rank: int, delay_s: float) -> None:
        self.device, self.delay_s, self.watchdog = device, delay_s, None
        self.draw = random.Random(rank)
        self._streams = 0

    def new_stream(self) -> str:
        """Return the name of one more communicator."""
        self._streams += 1
        return f"communicator {self._streams}"

    def communicator(self, store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        """Return a communicator of ranks that share the device."""
        return SharedGroup(store, rank, size, timeout, self)

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is the device's."""
        return tensor.device.type != "cpu"

    def mark(self) -> Callable[[], bool]:
        """Mark the compute stream."""
        event = torch.cuda.current_stream(self.device).record_event()
        return lambda: bool(event.query())


class SharedGroup(EmulatedGroup):
    """A communicator with a stream and a thread of its own."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, device: SharedDevice) -> None:
        super().__init__(store, rank, size, timeout, device)
        self._stream = torch.cuda.Stream(device.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self._name)

    def _issue(self, what: str, given: Tensor, result: Tensor, begin: Begin) -> "Late":
        ready = torch.cuda.current_stream(self._device.device).record_event()
        delays_s = [self._device.draw.uniform(0, self._device.delay_s) for _ in range(2)]
        return Late(self._thread.submit(self._exchange, given, result, begin, ready, delays_s))

    def _exchange(
        self, given: Tensor, result: Tensor, begin: Begin, ready: torch.cuda.Event, delays_s: list[float]
    ) -> torch.cuda.Event:
        torch.cuda.set_device(self._device.device)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            torch.cuda._sleep(int(delays_s[0] * CYCLES_A_SECOND))
            work, finish = begin(given.detach().cpu())
            work.wait()
            torch.cuda._sleep(int(delays_s[1] * CYCLES_A_SECOND))
            result.copy_(finish().contiguous().view(result.dtype).view(result.shape))
            return self._stream.record_event()


@final
class Late:
    """A collective under way."""

    what = ""

    def __init__(self, arrival: "Future[torch.cuda.Event]") -> None:
        self._arrival = arrival

    def is_completed(self) -> bool:
        """Tell whether its result is there."""
        return self._arrival.done() and bool(self._arrival.result().query())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have the current stream wait."""
        torch.cuda.current_stream().wait_event(self._arrival.result())
        return True
