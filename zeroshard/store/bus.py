"""Copies between a device and its host in parallel with the computation, and their host memory.

Owns streams, events and pinned memory, and an emulation for machines without a device. It must not know what is copied,
or why. Read `Bus` first.

Note: order of transfers
    Each direction is a lane. Transfers of one lane run in sequence, in the order of issue. A transfer begins after the
    work that is queued on the caller's stream; the caller's stream waits for it only in `Bus.wait`. On a GPU, these
    waits are between streams: the host never waits.
"""

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal, final

import numpy as np
import torch

from zeroshard import devices

__all__ = ["Bus", "Clock", "CudaBus", "EmulatedBus", "HostBuffer", "HostPool", "RealClock", "Transfer", "carry"]

Tensor = torch.Tensor
Lane = Literal["out", "back"]

SMALL_BYTES = 2**18
"""Bytes that a GPU's bus (25 GB/s) moves in 10 microseconds, about the time to issue a copy."""
SPARE = 1.25
"""Maximum size of all buffers on the host, as a multiple of the peak bytes in use."""
SIMILAR = 1.25
"""How many times as large as a tensor a buffer is at most that is used again, unless the pool is full."""


def carry(device: torch.device, lane: Lane, to: Tensor, source: Tensor) -> devices.Mark | None:
    """Copy on a lane of a device, between what the current stream has been told and what it will be told.

    So the memory of both may be used again at once. On a CPU the copy is over.

    Returns: the event after the copy, for the host; None on a CPU.
    """
    with devices.lane(device, lane, devices.mark_on(device)):
        to.copy_(source, non_blocking=True)
        arrived = devices.mark_on(device)
    if arrived is not None:
        arrived.wait()
    return arrived


@dataclass(slots=True, eq=False)
class Transfer:
    """One copy over a bus.

    Args:
        lane: "out" to the host, "back" to the device.
        is_waited: whether the issuing stream has waited for it.
    """

    lane: Lane
    nbytes: int
    is_waited: bool = field(default=False, init=False)


class Bus(ABC):
    """Copies bytes, flat uint8 tensors, between one device and the host.

    Args:
        device: the device.
        small_bytes: smaller tensors are not worth a transfer.
    """

    def __init__(self, device: torch.device, small_bytes: int) -> None:
        self.device, self.small_bytes = device, small_bytes

    @abstractmethod
    def allocate(self, nbytes: int) -> Tensor:
        """Return (nbytes,) of host memory for transfers, with undefined content."""

    @abstractmethod
    def out(self, source: Tensor, host: Tensor, after: Transfer | None) -> Transfer:
        """Start a copy of `source` to the host.

        The caller keeps the source alive and unchanged until the transfer is done or was waited for.

        Args:
            after: the last transfer that reads the host memory, if any.
        """

    @abstractmethod
    def back(self, host: Tensor, after: Transfer) -> tuple[Tensor, Transfer]:
        """Start a copy of host memory to new memory of the device, and return the new memory.

        The caller keeps it alive until a call of `wait` or `abandon`.

        Args:
            after: the transfer that writes the host memory.
        """

    @abstractmethod
    def wait(self, transfer: Transfer, memory: Tensor) -> None:
        """Order later work of the current stream after a transfer that reads or writes `memory`."""

    @abstractmethod
    def abandon(self, transfer: Transfer) -> None:
        """Make it safe to free the memory of an unused transfer."""

    @abstractmethod
    def is_done(self, transfer: Transfer) -> bool:
        """Return whether a transfer is done, without waiting."""


# -- CUDA -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _CudaTransfer(Transfer):
    """A copy on a side stream.

    Args:
        event: the event after the copy.
        stream: the issuing stream, to which the allocator returns the memory.
    """

    event: Any
    stream: Any


@final
class CudaBus(Bus):
    """The bus of a GPU: a side stream for each direction, and pinned memory.

    All buses of a device, gradients that leave it and parameters that come ahead of use share these streams.

    The memory on the device belongs to the requesting stream, so torch's allocator reuses it in the order of that
    stream; `record_stream`, whose effect depends on the lead of the host, is used only for other streams.

    Args:
        cuda: `torch.cuda`, or a substitute in tests.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        super().__init__(device, SMALL_BYTES)
        self._cuda = cuda
        self._lanes = {
            "out": devices.side_stream(device, "out", cuda),
            "back": devices.side_stream(device, "back", cuda),
        }

    def allocate(self, nbytes: int) -> Tensor:
        """Return pinned memory."""
        return devices.pinned((nbytes,), torch.uint8)

    def out(self, source: Tensor, host: Tensor, after: Transfer | None) -> Transfer:
        """Start a copy to the host, after the queued work of the current stream."""
        return self._copy("out", host, source, after)

    def back(self, host: Tensor, after: Transfer) -> tuple[Tensor, Transfer]:
        """Start a copy to the device, after the queued work of the current stream, which may still use the memory."""
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
        """Make the current stream wait; the host does not wait."""
        assert isinstance(transfer, _CudaTransfer)
        current = self._cuda.current_stream(self.device)
        current.wait_event(transfer.event)
        if current != transfer.stream:
            # The memory returns to the stream that requested it, which must know of the use on this stream.
            self.abandon(transfer)
            memory.record_stream(current)
        transfer.is_waited = True

    def abandon(self, transfer: Transfer) -> None:
        """Make the stream that will reuse the memory wait."""
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
        """Wait until that time; return at once if it has passed."""


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


@dataclass(slots=True, eq=False)
class EmulatedTransfer(Transfer):
    """A copy over an emulated bus.

    Args:
        number: counts the transfers of the bus.
        issued_s, done_s: time of issue and of completion.
        waited_s: time of the first wait.
    """

    number: int
    issued_s: float
    done_s: float
    waited_s: float | None = None

    @property
    def stall_s(self) -> float:
        """Seconds for which the computation waited for this transfer."""
        return 0.0 if self.waited_s is None else max(0.0, self.done_s - self.waited_s)


@final
class EmulatedBus(Bus):
    """An emulated bus for the CPU.

    Bytes are copied at once, into host memory that torch's allocator does not track. The clock determines the end of a
    transfer: a transfer issued at t is done at max(t, end of the previous transfer) + latency + bytes / bandwidth. By
    default, transfers take no time. On a CPU, device and host share memory, so offload saves nothing: the emulation
    shows savings and costs.

    Args:
        gbps: bandwidth of each direction, in GB/s (1e9 bytes per second).
        latency_s: latency of a transfer in seconds.
        keeps: whether to keep `transfers` and `events`, for tests and reports.
    """

    def __init__(
        self, gbps: float = math.inf, latency_s: float = 0.0, clock: Clock | None = None, keeps: bool = False
    ) -> None:
        small = latency_s * gbps * 1e9
        super().__init__(torch.device("cpu"), int(small) if math.isfinite(small) else 0)
        self.gbps, self.latency_s, self.clock = gbps, latency_s, clock or RealClock()
        self.stalled_s = 0.0
        """Seconds for which the computation waited."""
        self.copying_s = 0.0
        """Seconds of the copies on this host, which on a device run in parallel with the computation."""
        self.transfers: list[EmulatedTransfer] = []
        self.events: list[tuple[str, Lane, int]] = []
        """"issue" and "wait", the lane, and the number of the transfer."""
        self._keeps, self.count = keeps, 0
        self._free_s: dict[Lane, float] = {"out": 0.0, "back": 0.0}

    def allocate(self, nbytes: int) -> Tensor:
        """Return memory that torch's allocator does not track."""
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
        """Wait for the clock, because the host computes here."""
        assert isinstance(transfer, EmulatedTransfer)
        if transfer.is_waited:
            return
        transfer.is_waited, transfer.waited_s = True, self.clock.now()
        self.stalled_s += transfer.stall_s
        if self._keeps:
            self.events.append(("wait", transfer.lane, transfer.number))
        self.clock.wait_until(transfer.done_s)

    def abandon(self, transfer: Transfer) -> None:
        """Do nothing: the bytes are already copied."""

    def is_done(self, transfer: Transfer) -> bool:
        """Ask the clock."""
        assert isinstance(transfer, EmulatedTransfer)
        return self.clock.now() >= transfer.done_s


# -- memory on the host -----------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class HostBuffer:
    """A piece of host memory.

    Args:
        memory: the leading bytes in use.
        whole: the full buffer.
        reader: the last transfer that reads it.
    """

    memory: Tensor
    whole: Tensor
    reader: Transfer | None = None


@final
class HostPool:
    """Reusable host memory: pinning memory takes longer than copying to it.

    A new buffer has the size of its tensor, and serves later tensors of similar size. Where the pool would exceed
    `SPARE` times the peak bytes in use, any larger buffer serves; without one, free buffers are released.

    Args:
        bus: the bus that allocates buffers.
    """

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self._free: dict[int, list[HostBuffer]] = {}
        self.in_use_bytes = self.peak_bytes = self.total_bytes = 0
        """In use, peak in use, and of all buffers."""

    def take(self, nbytes: int) -> HostBuffer:
        """Return a buffer (nbytes,) with undefined content."""
        self.in_use_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        size = min((size for size, free in self._free.items() if free and size >= nbytes), default=0)
        is_full = self.total_bytes + nbytes > SPARE * self.peak_bytes
        if size and (size <= SIMILAR * nbytes or is_full):
            buffer = self._free[size].pop()
        else:
            self._give_up(nbytes)
            self.total_bytes += nbytes
            whole = self.bus.allocate(nbytes)
            buffer = HostBuffer(whole, whole)
        buffer.memory = buffer.whole[:nbytes]
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Return a buffer to the pool; a later transfer into it waits for transfers under way."""
        self.in_use_bytes -= buffer.memory.numel()
        self._free.setdefault(buffer.whole.numel(), []).append(buffer)

    def _give_up(self, size: int) -> None:
        """Make room for a buffer by releasing free buffers, largest first."""
        for other in sorted(self._free, reverse=True):
            while self._free[other] and self.total_bytes + size > SPARE * self.peak_bytes:
                # Pinned memory stays until transfers from it are done.
                self._free[other].pop()
                self.total_bytes -= other
            if not self._free[other]:
                del self._free[other]
