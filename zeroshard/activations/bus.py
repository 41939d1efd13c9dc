"""The way between a device and its host: copies that run beside the computation, and the memory on the host for them.

Owns streams, events and pinned memory, and an emulation of them for machines without a device. It must not know what is
copied, or why. Read `Bus` first.

Note: what orders what
    The two directions are two lanes. Transfers of one lane run one after the other, in the order in which they were
    issued. A transfer begins after what the caller's stream had been told before it was issued; the caller's stream
    waits for it in `Bus.wait`, and only there. On a GPU these waits are between streams: the host never waits.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, final

import numpy as np
import torch

__all__ = ["Bus", "Clock", "CudaBus", "EmulatedBus", "HostBuffer", "HostPool", "RealClock", "Transfer", "VirtualClock"]

Tensor = torch.Tensor
Lane = Literal["out", "back"]

SMALL_BYTES = 2**18
"""What a GPU's bus, some 25 GB/s, moves in 10 microseconds, about the time that issuing a copy takes by itself."""
SPARE = 1.25
"""Buffers on the host take at most so many times the bytes that were once in use together."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One copy over a bus.

    Args:
        lane: "out" is to the host, "back" to the device.
        is_waited: whether the stream that issued it has waited for it.
    """

    lane: Lane
    nbytes: int
    is_waited: bool = field(default=False, init=False)


class Bus(ABC):
    """Copies bytes, flat uint8 tensors, between one device and the host.

    Args:
        device: the device.
        small_bytes: what is smaller is not worth a transfer.
    """

    def __init__(self, device: torch.device, small_bytes: int) -> None:
        self.device, self.small_bytes = device, small_bytes

    @abstractmethod
    def allocate(self, nbytes: int) -> Tensor:
        """Return (nbytes,) of host memory that transfers can read and write, with any content."""

    @abstractmethod
    def out(self, source: Tensor, host: Tensor, after: Transfer | None) -> Transfer:
        """Begin to copy `source` to the host.

        The caller keeps the source alive and as it is until the transfer is done, or was waited for.

        Args:
            after: the last transfer that reads the host memory, if there was one.
        """

    @abstractmethod
    def back(self, host: Tensor, after: Transfer) -> tuple[Tensor, Transfer]:
        """Begin to copy host memory to new memory of the device, and return that.

        The caller keeps the new memory alive until it has called `wait` or `abandon`.

        Args:
            after: the transfer that writes the host memory.
        """

    @abstractmethod
    def wait(self, transfer: Transfer, memory: Tensor) -> None:
        """Have what the current stream is told from here on run after a transfer that reads or writes `memory`."""

    @abstractmethod
    def abandon(self, transfer: Transfer) -> None:
        """Make it safe to free the memory of a transfer, without using it."""

    @abstractmethod
    def is_done(self, transfer: Transfer) -> bool:
        """Tell whether a transfer is over, without waiting."""


# -- CUDA -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _CudaTransfer(Transfer):
    """A copy on a side stream.

    Args:
        event: recorded behind it.
        stream: the stream that issued it, to which the allocator gives the memory back.
    """

    event: Any
    stream: Any


@final
class CudaBus(Bus):
    """The bus of a GPU: a side stream for each direction, and pinned memory.

    The memory on the device belongs to the stream that asks for it, so torch's allocator reuses it in that stream's
    order; `record_stream`, whose effect depends on how far the host is ahead, is left to other streams that use it.

    Args:
        cuda: stands for `torch.cuda`; tests hand in another.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        super().__init__(device, SMALL_BYTES)
        self._cuda = cuda
        self._lanes = {"out": cuda.Stream(device=device), "back": cuda.Stream(device=device)}

    def allocate(self, nbytes: int) -> Tensor:
        """Return pinned memory: from other memory a copy is not asynchronous."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def out(self, source: Tensor, host: Tensor, after: Transfer | None) -> Transfer:
        """Begin a copy to the host, after what the current stream has been told."""
        return self._copy("out", host, source, after)

    def back(self, host: Tensor, after: Transfer) -> tuple[Tensor, Transfer]:
        """Begin a copy to the device, after what the current stream has been told: it may still use that memory."""
        memory = torch.empty(host.numel(), dtype=torch.uint8, device=self.device)
        return memory, self._copy("back", memory, host, after)

    def _copy(self, lane: Lane, to: Tensor, source: Tensor, after: Transfer | None) -> Transfer:
        current, stream = self._cuda.current_stream(self.device), self._lanes[lane]
        stream.wait_event(current.record_event())
        if isinstance(after, _CudaTransfer):
            stream.wait_event(after.event)
        with self._cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            event = stream.record_event()
        return _CudaTransfer(lane, source.numel(), event, current)

    def wait(self, transfer: Transfer, memory: Tensor) -> None:
        """Have the current stream wait; the host goes on."""
        assert isinstance(transfer, _CudaTransfer)
        current = self._cuda.current_stream(self.device)
        current.wait_event(transfer.event)
        if current != transfer.stream:
            # The memory goes back to the stream that asked for it, which must know of this one's use.
            self.abandon(transfer)
            memory.record_stream(current)
        transfer.is_waited = True

    def abandon(self, transfer: Transfer) -> None:
        """Have the stream that will get the memory wait."""
        assert isinstance(transfer, _CudaTransfer)
        transfer.stream.wait_event(transfer.event)

    def is_done(self, transfer: Transfer) -> bool:
        """Ask the event."""
        assert isinstance(transfer, _CudaTransfer)
        return bool(transfer.event.query())


# -- emulation --------------------------------------------------------------------------------------------------------


class Clock(ABC):
    """The time of an emulated bus, in seconds."""

    @abstractmethod
    def now(self) -> float:
        """Return the time."""

    @abstractmethod
    def wait_until(self, time_s: float) -> None:
        """Come back at that time, at once where it is over."""


@final
class RealClock(Clock):
    """The time of this host."""

    def now(self) -> float:
        """Return the time."""
        return time.perf_counter()

    def wait_until(self, time_s: float) -> None:
        """Sleep."""
        if (rest := time_s - self.now()) > 0:
            time.sleep(rest)


@final
class VirtualClock(Clock):
    """A time that waiting moves on, so that nobody sleeps.

    Args:
        compute: returns how long the computation has taken so far; the time spent waiting is added to that.
    """

    def __init__(self, compute: Callable[[], float] = lambda: 0.0) -> None:
        self._compute = compute
        self.waited_s = 0.0

    def now(self) -> float:
        """Return the time."""
        return self._compute() + self.waited_s

    def wait_until(self, time_s: float) -> None:
        """Move on."""
        self.waited_s += max(0.0, time_s - self.now())


@dataclass(slots=True, eq=False)
class EmulatedTransfer(Transfer):
    """A copy over an emulated bus.

    Args:
        number: counts the transfers of the bus.
        issued_s, done_s: when it was issued, and when it is over.
        waited_s: when it was first waited for.
    """

    number: int
    issued_s: float
    done_s: float
    waited_s: float | None = None

    @property
    def stall_s(self) -> float:
        """How long the computation stood still for it."""
        return 0.0 if self.waited_s is None else max(0.0, self.done_s - self.waited_s)


@final
class EmulatedBus(Bus):
    """A bus for a device that is none: the CPU.

    The bytes are copied at once, into memory of the host that torch's allocator does not see. When a transfer is over
    is a matter of the clock: one that is issued at t is done at max(t, end of the one before) + latency + bytes /
    bandwidth. Without arguments it takes no time. On a CPU the device's memory is the host's, so offload saves nothing
    there: it shows what it would save, and what it would cost.

    Args:
        gbps: bandwidth of each direction, in GB/s (1e9 bytes).
        latency_s: what a transfer takes besides its bytes.
        keeps: whether `transfers` and `events` are kept, for tests and reports.
    """

    def __init__(
        self, gbps: float = math.inf, latency_s: float = 0.0, clock: Clock | None = None, keeps: bool = False
    ) -> None:
        small = latency_s * gbps * 1e9
        super().__init__(torch.device("cpu"), int(small) if math.isfinite(small) else 0)
        self.gbps, self.latency_s, self.clock = gbps, latency_s, clock or RealClock()
        self.stalled_s = 0.0
        """How long the computation stood still."""
        self.copying_s = 0.0
        """What the copies took on this host, which on a device runs beside the computation."""
        self.transfers: list[EmulatedTransfer] = []
        self.events: list[tuple[str, Lane, int]] = []
        """"issue" and "wait", the lane, and the number of the transfer."""
        self._keeps, self.count = keeps, 0
        self._free_s: dict[Lane, float] = {"out": 0.0, "back": 0.0}

    def allocate(self, nbytes: int) -> Tensor:
        """Return memory that torch's allocator does not count."""
        return torch.from_numpy(np.empty(nbytes, dtype=np.uint8))

    def out(self, source: Tensor, host: Tensor, after: Transfer | None) -> Transfer:
        """Copy to the host."""
        return self._copy("out", host, source)

    def back(self, host: Tensor, after: Transfer) -> tuple[Tensor, Transfer]:
        """Copy to the device."""
        assert isinstance(after, EmulatedTransfer)
        memory = torch.empty(host.numel(), dtype=torch.uint8, device=self.device)
        return memory, self._copy("back", memory, host, after.done_s)

    def _copy(self, lane: Lane, to: Tensor, source: Tensor, not_before_s: float = 0.0) -> Transfer:
        issued_s, began = self.clock.now(), time.perf_counter()
        to.copy_(source)
        self.copying_s += time.perf_counter() - began
        starts_s = max(issued_s, self._free_s[lane], not_before_s)
        done_s = self._free_s[lane] = starts_s + self.latency_s + source.numel() / (self.gbps * 1e9)
        transfer = EmulatedTransfer(lane, source.numel(), self.count, issued_s, done_s)
        self.count += 1
        if self._keeps:
            self.transfers.append(transfer)
            self.events.append(("issue", lane, transfer.number))
        return transfer

    def wait(self, transfer: Transfer, memory: Tensor) -> None:
        """Wait, at the clock: here the host computes."""
        assert isinstance(transfer, EmulatedTransfer)
        if transfer.is_waited:
            return
        transfer.is_waited, transfer.waited_s = True, self.clock.now()
        self.stalled_s += transfer.stall_s
        if self._keeps:
            self.events.append(("wait", transfer.lane, transfer.number))
        self.clock.wait_until(transfer.done_s)

    def abandon(self, transfer: Transfer) -> None:
        """Do nothing: the bytes have been copied."""

    def is_done(self, transfer: Transfer) -> bool:
        """Ask the clock."""
        assert isinstance(transfer, EmulatedTransfer)
        return self.clock.now() >= transfer.done_s


# -- memory on the host -----------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class HostBuffer:
    """A piece of host memory.

    Args:
        memory: the first bytes of it that are in use.
        whole: all of it.
        reader: the last transfer that reads it.
    """

    memory: Tensor
    whole: Tensor
    reader: Transfer | None = None


@final
class HostPool:
    """Host memory that is used again and again: pinning it takes longer than copying to it.

    Sizes are rounded up by less than a quarter, so that a buffer serves tensors of about one size. What is free is
    given up where the pool would otherwise take more than `SPARE` times what was ever in use at a time.

    Args:
        bus: what allocates it.
    """

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self._free: dict[int, list[HostBuffer]] = {}
        self.in_use_bytes = self.peak_bytes = self.total_bytes = 0
        """In rounded sizes: in use, the most of that so far, and in use or free."""

    def take(self, nbytes: int) -> HostBuffer:
        """Return a buffer of (nbytes,), with any content."""
        size = rounded(nbytes)
        self.in_use_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        if free := self._free.get(size):
            buffer = free.pop()
        else:
            self._give_up(size)
            self.total_bytes += size
            whole = self.bus.allocate(size)
            buffer = HostBuffer(whole, whole)
        buffer.memory = buffer.whole[:nbytes]
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Take a buffer back; transfers may still be under way, and the next one into it comes after them."""
        size = buffer.whole.numel()
        self.in_use_bytes -= size
        self._free.setdefault(size, []).append(buffer)

    def _give_up(self, size: int) -> None:
        """Make room for a buffer, the largest free ones first."""
        for other in sorted(self._free, reverse=True):
            while self._free[other] and self.total_bytes + size > SPARE * self.peak_bytes:
                # torch keeps pinned memory until transfers from it are over.
                self._free[other].pop()
                self.total_bytes -= other


def rounded(nbytes: int) -> int:
    """Return the size of the buffer for so many bytes: 5, 6, 7 or 8 times a power of two, and at least 512."""
    step = max(128, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return max(512, -(-nbytes // step) * step)
