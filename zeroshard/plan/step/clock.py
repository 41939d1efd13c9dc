"""The clock of a simulated rank: its lanes, its waits, and the bytes that it sends.

Owns times. It must not know units, buckets or memory. Needs no torch.

Note: lanes
    "compute" runs one kernel after the other, each once the host has queued it. "gather" and "reduce" run one
    collective after the other beside it, each from when it was issued. The compute lane waits where a unit is not whole
    yet, and at the end of a pass for its reductions; these waits are exposed. Exchanges along the tensor axis are part
    of an operation, so the compute lane waits for them, and for copies of activations to the host and back.
    With offload there are six more: "out" and "back", the two directions of the bus, "host", its processors, "copier",
    the thread that fills pinned buffers ahead of use, and "read" and "write" of a disk. Gradients leave beside the
    compute lane, which waits for those of the bucket before the last one. It waits for an update on the host at the end
    of the step, or, if that update continues after the step, in the next forward, unit by unit. It waits for offloaded
    parameters where they are used. These waits are `offload_s`, and no part of `exposed_s`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, final

from zeroshard.plan.machine.hardware import Cost, Device, Span
from zeroshard.plan.step.film import LaneSpan, Tick
from zeroshard.plan.step.offload_times import PINNED, Lanes
from zeroshard.plan.step.system import ZEROSHARD, System
from zeroshard.table.trace import Event

__all__ = ["Clock", "sent_of"]

LEAVE_LAUNCHES: Final = 4
"""Calls for a piece of a gradient that leaves, each as long as a kernel's: copy, addition, copy, and their events."""


@final
class Clock:
    """The time of a rank, and when each of its lanes is free.

    Args:
        device, dtype: whose kernels run, and of products.
        spans: where the ranks of each axis are.
        seconds: of one kernel; the device's own formula where not given.
        system: whose host queues the kernels.
    """

    def __init__(
        self,
        device: Device,
        dtype: str,
        spans: Mapping[str, Span],
        seconds: Callable[[Cost], float] | None = None,
        system: System = ZEROSHARD,
    ) -> None:
        self._device, self._spans, self.now_s = device, spans, 0.0
        self._kernel_s = seconds or partial(device.kernel_s, dtype=dtype)
        self.lanes: list[LaneSpan] = []
        self.ticks: list[Tick] = []
        self.phase = ""
        self.free_s = dict.fromkeys(("gather", "reduce", "out", "back", "host", "copier", "read", "write"), 0.0)
        self.sent: Counter[str] = Counter()
        """Bytes that the rank sends, by axis and kind."""
        self.exposed_s = self.offload_s = 0.0
        self.busy_s: dict[str, float] = {}
        """What host, bus and disk have to do, by lane."""
        self._buffers_s = [0.0] * PINNED
        self._seconds: dict[Cost, float] = {}
        self._system, self._queued_s = system, 0.0
        self._last_s = 0.0
        """Of the last kernel."""
        self._ahead: tuple[str, float, float] | None = None
        """What is gathered for the next kernel: a name, seconds, and the part of them that the kernel may hide."""
        self._queue_s = system.queue_s(device)

    def tick(self, event: Event) -> None:
        """Note what the engine issues."""
        kind = event.kind
        self.ticks.append(Tick(self.now_s, kind, event.unit, event.nbytes, event.phase, event.is_pinned, event.dtype))
        self.sent[f"shard {kind}"] += event.nbytes

    def note(self, kind: str, name: str, nbytes: int = 0) -> None:
        """Note what the rank does by itself, as in a detailed trace of the engine."""
        self.ticks.append(Tick(self.now_s, kind, name, nbytes, self.phase))

    def move(self, kind: str, name: str, nbytes: int, what: str) -> None:
        """Note a copy, and count its bytes."""
        self.sent[what] += nbytes
        if nbytes:
            self.note(kind, name, nbytes)

    # -- the compute lane -------------------------------------------------------------------------------------------

    def compute(self, what: str, took_s: float, launches: int = 1, least_s: float = 0.0) -> None:
        """Run kernels, which the host queues before; they end no earlier than the host has queued them.

        Args:
            least_s: of several kernels, from the moment that the host begins to queue them.
        """
        if self._ahead is not None:
            (gathered, gather_s, part), self._ahead = self._ahead, None
            self.stall(gathered, gather_s - part * min(gather_s, took_s))
        begun_s = self._queued_s
        self._queued_s += launches * self._queue_s[0]
        stop_s = max(self.now_s + took_s, self._queued_s, begun_s + least_s)
        self.lanes.append(LaneSpan("compute", self.now_s, stop_s, what))
        self.now_s, self._last_s = stop_s, took_s

    def synchronize(self) -> None:
        """Let the host wait until the device has made all that is queued."""
        self._queued_s = self.now_s

    def kernel_s(self, cost: Cost) -> float:
        """Return the seconds of a kernel."""
        found = self._seconds.get(cost)
        if found is None:
            found = self._seconds[cost] = self._kernel_s(cost)
        return found

    def stall(self, what: str, took_s: float) -> None:
        """Let the compute lane do nothing but this exchange or copy."""
        self.lanes.append(LaneSpan("compute", self.now_s, self.now_s + took_s, what, is_exposed=True))
        self.now_s += took_s
        self.exposed_s += took_s

    def exchange(self, what: str, kind: str, nbytes: int, axis: str) -> None:
        """Run a collective inside an operation, which the compute lane waits for."""
        span = self._spans[axis]
        self.sent[f"{axis} {kind}"] += sent_of(kind, nbytes, span)
        each_s, node_s = self._system.blocked_s
        self._queued_s += self._queue_s[1] + span.ranks * (each_s + node_s * span.nodes)
        took_s = max(self._device.collective_s(kind, nbytes, span), self._queued_s - self.now_s)
        part = (1 - 1 / span.ranks) * (self._system.splits_products and axis == "tensor")
        if part and kind == "gather":
            self._ahead = what, took_s, part
        else:
            self.stall(what, took_s - part * (kind == "reduce") * min(took_s, self._last_s))

    def send(self, what: str, nbytes: int, axis: str) -> None:
        """Send to other ranks, and receive as much from them, which the compute lane waits for."""
        self.sent[f"{axis} send"] += nbytes
        self.stall(what, self._device.collective_s("send", nbytes, self._spans[axis]))

    def wait(self, what: str, until_s: float, *, is_offload: bool = False) -> None:
        """Let the compute lane wait until a time."""
        if until_s > self.now_s:
            self.lanes.append(LaneSpan("compute", self.now_s, until_s, f"wait for {what}", is_exposed=True))
            waited_s = until_s - self.now_s
            self.exposed_s += waited_s * (not is_offload)
            self.offload_s += waited_s * is_offload
            self.now_s = until_s

    # -- other lanes ------------------------------------------------------------------------------------------------

    def collect(
        self, lane: str, what: str, works: Iterable[tuple[str, int, str]], *, not_before_s: float = 0.0
    ) -> float:
        """Put collectives on a lane, and return when they are done.

        Args:
            works: (kind, bytes, axis) of each.
        """
        start_s = max(self.now_s, self.free_s[lane], not_before_s)
        stop_s = start_s
        for kind, nbytes, axis in works:
            stop_s += self._device.collective_s(kind, nbytes, self._spans[axis], self._system.chain_bytes)
            stop_s += self._system.piece_s * self._spans[axis].ranks
        if stop_s > start_s:
            self.lanes.append(LaneSpan(lane, start_s, stop_s, what))
        self.free_s[lane] = stop_s
        return stop_s

    def leave(self, what: str, nbytes: int, pieces: int, *, is_added: bool) -> float:
        """Begin to copy gradients to the host, and return when they are there.

        Args:
            is_added: whether each piece follows what the host has of it, through one of `PINNED` buffers.
        """
        took_s = self._device.copy_s(nbytes)
        each_s, begun_s = took_s / pieces, max(self.now_s, self.free_s["back"])
        left_s = max(self.now_s, self.free_s["out"]) + took_s
        if is_added:
            left_s = max(left_s, begun_s + took_s + each_s)
            brought_s = left_s - each_s if pieces > PINNED else begun_s + took_s
            self._occupy("back", brought_s - took_s, brought_s, what)
        self._occupy("out", left_s - took_s, left_s, what)
        self._queued_s += pieces * LEAVE_LAUNCHES * self._queue_s[0]
        return left_s

    def _occupy(self, lane: str, start_s: float, stop_s: float, what: str) -> None:
        self.free_s[lane] = stop_s
        self._note_busy(lane, stop_s - start_s)
        self.lanes.append(LaneSpan(lane, start_s, stop_s, what))

    def begin_copy(self, lane: str, nbytes: int) -> float:
        """Begin a copy over the bus beside computation, and return when it is done; on a CPU there is no bus."""
        start_s = max(self.now_s, self.free_s[lane])
        stop_s = start_s + (0.0 if self._device.is_cpu else self._device.copy_s(nbytes))
        self.sent["activations to the host" if lane == "out" else "activations from the host"] += nbytes
        self._occupy(lane, start_s, stop_s, "activations")
        return stop_s

    def lanes_from(self, start_s: float) -> Lanes:
        """Return the lanes of host, bus and disk for work from a time on."""
        return Lanes(start_s, self.free_s, buffers=self._buffers_s)

    def take_over(self, lanes: Lanes) -> None:
        """Keep what ran on these lanes."""
        self.lanes += [LaneSpan(lane, *span, what) for (lane, what), span in lanes.spans.items()]
        for lane, took_s in lanes.busy_s.items():
            self._note_busy(lane, took_s)

    def _note_busy(self, lane: str, took_s: float) -> None:
        self.busy_s[lane] = self.busy_s.get(lane, 0.0) + took_s


def sent_of(kind: str, nbytes: int, span: Span) -> int:
    """Return what one rank sends for a collective."""
    if kind == "send":
        return nbytes
    return nbytes * (span.ranks - 1) // span.ranks * (2 if kind == "all-reduce" else 1)
