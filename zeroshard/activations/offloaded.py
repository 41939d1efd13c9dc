"""Offload of activations to host memory between forward and backward.

Owns the choice of tensors, the time of their return, and the bytes on the device meanwhile. It must not know the
copies (`store/bus.py`, which read first) or the encodings of other links.

Note: the way of a unit's tensors
    After the forward of a unit, `treat` begins the copy of its tensors to the host, and keeps the tensors until the end
    of the next unit's forward. The copy thus runs in parallel with the next unit, and two units' tensors are on the
    device at a time. In backward, the first request for a tensor of a unit begins the return of the other tensors of
    the unit, and of the previous unit, which are copied in parallel with this unit's backward. A tensor with a single
    use is released on return to autograd. Tensors still on the device, those of the last unit, are not copied back.

Note: one copy of a storage
    Offload copies a range of a storage, with all saved tensors that are views into the range, and returns them as views
    of one piece of memory, with the same strides and alignment. The storage and its version identify a range, so a
    tensor that several units save (a mask, a table of positions) is copied once between two backwards. A weak reference
    to the storage keeps other storages from getting its identity. Changes through `.data` have no version: torch does
    not detect them either.

Note: changes in place
    A copy on a GPU reads the tensor after it was issued. While the tensor is kept for the copy, its version shows
    whether user code changed the tensor; then the copy may have either content, and a request raises the error that
    autograd raises for such changes. The version is checked at the end of the next unit, whether or not the copy is
    complete, so that all runs and ranks behave alike. Later changes do not affect the copy, which has the saved values.

Note: on a CPU
    Device and host share one memory, so offload saves nothing and costs a copy in each direction. It changes no bit.
"""

import functools
import threading
import weakref
from abc import ABC
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from zeroshard.activations.chain import Held, Link
from zeroshard.activations.saved import ChangedInPlaceError
from zeroshard.activations.spans import Key, Place, Span, bytes_of, is_movable, key_of, place_of, spans_in
from zeroshard.store.bus import Bus, CudaBus, EmulatedBus, HostBuffer, HostPool, Transfer
from zeroshard.table.activations import Offloaded
from zeroshard.torch_private import WeakStorage, call_after_backward, graph_task, local_of, version_of
from zeroshard.tree import find, map_tensors

__all__ = ["Offload"]

Tensor = torch.Tensor


@final
class Offload(Link):
    """Moves tensors to the host.

    Args:
        cell: the part of tensors to offload.
        bus: the bus to the host; by default the bus of each tensor's device.
    """

    def __init__(self, cell: Offloaded, bus: Bus | None = None) -> None:
        self._given = bus
        self._pools: dict[torch.device, HostPool] = {}
        self._share = _Share(cell.fraction)
        self._lock = threading.RLock()
        self._dropped: deque[_Copy] = deque()
        """Copies without handles. Graphs end in any thread, at any time, so they only append here."""
        self._busy: deque[_Busy] = deque()
        self._leaving: list[list[_Weak]] = []
        """Tensors that were copied, and are kept until the end of the current unit; by call."""
        self._issued: dict[int, list[_Weak]] = {}
        """The ranges on the device for each running backward."""
        self._known: dict[Key, list[_Weak]] = {}
        self._last: weakref.ref[_Visit] | None = None
        self._unit: int | None = None
        self._is_read = False
        """Whether a tensor was requested since the last forward."""
        self.host_bytes = self.host_peak_bytes = 0
        """Bytes on the host: current and peak."""
        self.device_bytes = self.device_peak_bytes = 0
        """Bytes on the device during a copy or after a return: current and peak."""

    @property
    def pinned_bytes(self) -> int:
        """The bytes of host memory that are allocated, in use or cached for the next step."""
        return sum(pool.total_bytes for pool in self._pools.values())

    # -- forward ------------------------------------------------------------------------------------------------------

    def treat(self, held: Sequence[Held], unit: int, outputs: Any) -> None:
        """Begin the copies of the unit's saved tensors, and release those of the previous unit."""
        with self._lock:
            self._sweep()
            if graph_task() == -1:
                # A backward that raised runs no callback at its end.
                for task in [*self._issued]:
                    self._end_backward(task)
            is_new = self._begin_pass()
            # A unit of several modules may end many times in a row: copies of its last module may still run.
            self._release(keeps=0 if is_new or unit != self._unit else 1)
            self._unit = unit
            self._leaving.append([])
            spans = spans_in([tensor for one in held for tensor in find(one.value, Tensor)])
            pools = {key: pool for key, span in spans.items() if (pool := self._pool_for(span.device)) is not None}
            owners = {key: self._find(key, spans[key]) for key in pools}
            new = [k for k in pools if owners[k] is None and spans[k].nbytes >= max(1, pools[k].bus.small_bytes)]
            self._share.expect(sum(spans[key].nbytes for key in new))
            stays = set()
            for key in new:
                if self._share.takes(spans[key].nbytes):
                    owners[key] = self._move(key, spans[key], pools[key])
                else:
                    stays.add(key)
            visit = self._visit(unit)
            for one in held:
                handles = {id(t): h for t in find(one.value, Tensor) if (h := _handle(t, owners, stays, visit))}
                if handles:
                    one.put(self, map_tensors(one.value, functools.partial(_replaced, handles)))
                    self._last = weakref.ref(visit)

    def _begin_pass(self) -> bool:
        """Reset the counts after a backward, or if the last copies were released without a backward."""
        is_new = self._is_read or (self._last is not None and self._last() is None)
        if is_new:
            self._share.restart(learns=self._is_read)
            self._known.clear()
            self._last, self._is_read = None, False
        return is_new

    def _release(self, keeps: int) -> None:
        """Release tensors that were kept for their copies, except those of the last calls."""
        count = max(0, len(self._leaving) - keeps)
        for weak in [weak for call in self._leaving[:count] for weak in call]:
            if (owner := weak()) is None or (copy := owner.copy).source is None or copy.back is not None:
                continue
            copy.bus.wait(copy.out, copy.source)
            copy.look()
            copy.source = None
            self._count_device(-copy.nbytes)
        del self._leaving[:count]
        while self._busy:
            busy = self._busy.popleft()
            busy.bus.wait(busy.out, busy.source)

    def _pool_for(self, device: torch.device) -> HostPool | None:
        """Return the host memory for tensors of a device; None if they are not offloaded."""
        if device not in self._pools:
            if self._given is not None:
                if device == self._given.device:
                    self._pools[device] = HostPool(self._given)
            elif device.type == "cuda":
                self._pools[device] = HostPool(CudaBus(device))
            elif device.type == "cpu" and not self._pools:
                # With tensors on a GPU, tensors in host memory need no offload.
                self._pools[device] = HostPool(EmulatedBus())
        return self._pools.get(device)

    def _find(self, key: Key, span: Span) -> "_Owner | None":
        """Return an existing copy with these bytes; None if there is none."""
        owners = (weak() for weak in self._known.get(key, ()))
        return next((owner for owner in owners if owner is not None and owner.copy.has(span)), None)

    def _move(self, key: Key, span: Span, pool: HostPool) -> "_Owner":
        """Begin the copy of a range to the host."""
        host = pool.take(span.nbytes)
        out = pool.bus.out(bytes_of(span.tensor, span.low, span.nbytes), host.memory, host.reader)
        owner = _Owner(_Copy(span.tensor, span.low, span.nbytes, pool, host, out), self._dropped)
        weak = weakref.ref(owner)
        self._known.setdefault(key, []).append(weak)
        self._leaving[-1].append(weak)
        self.host_bytes += span.nbytes
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
        self._count_device(span.nbytes)
        return owner

    def _visit(self, unit: int) -> "_Visit":
        last = self._last and self._last()
        return last if last and last.unit == unit else _Visit(unit, self._last)

    # -- backward -----------------------------------------------------------------------------------------------------

    def restore(self, started: Any) -> Any:
        """Return the tensors, and begin the return of the previous unit's tensors."""
        with self._lock:
            self._sweep()
            return map_tensors(started, self._bring, _Handle)

    def _bring(self, handle: "_Handle") -> Tensor:
        task = graph_task()
        if task != -1:
            self._touch(handle.visit, task)
        if isinstance(handle, _Stayed):
            if version_of(handle.tensor) != handle.version:
                raise _changed(handle.tensor)
            return handle.tensor
        assert isinstance(handle, _Moved)
        copy = handle.owner.copy
        copy.look()
        if copy.is_spoiled:
            raise _changed(handle.place)
        back = self._on_device(handle.owner, task)
        if copy.arrival is not None:
            copy.bus.wait(copy.arrival, back)
        tensor = handle.place.of(back)
        if handle.turn != copy.turn:
            handle.turn = copy.turn
            copy.wanted -= 1
        if copy.wanted == 0 or task == -1:
            # The user of the tensor keeps its memory alive.
            self._let_go(copy)
        return tensor

    def _touch(self, visit: "_Visit", task: int) -> None:
        """Begin the return of the tensors of a unit and of the previous unit, once in a backward."""
        self._is_read = True
        if visit.task == task:
            return
        visit.task = task
        for each in (visit, visit.before and visit.before()):
            for weak in reversed(each.owners) if each else ():
                if (owner := weak()) is not None and not owner.copy.is_spoiled:
                    self._on_device(owner, task)

    def _on_device(self, owner: "_Owner", task: int) -> Tensor:
        """Return a range on the device: the original, or the destination of its return."""
        copy = owner.copy
        if copy.back is None:
            if copy.source is not None:
                copy.back = bytes_of(copy.source, copy.low, copy.nbytes)
            else:
                copy.back, copy.arrival = copy.bus.back(copy.host.memory, copy.out)
                copy.host.reader = copy.arrival
                self._count_device(copy.nbytes)
            copy.turn += 1
            copy.wanted = owner.users
            if task != -1 and task not in self._issued:
                self._issued[task] = []
                call_after_backward(lambda: self._end_backward(task))
            if task != -1:
                self._issued[task].append(weakref.ref(owner))
        return copy.back

    def _let_go(self, copy: "_Copy") -> None:
        """Release the memory on the device; tensors in use keep it alive."""
        if copy.arrival is not None and not copy.arrival.is_waited:
            copy.bus.abandon(copy.arrival)
        if copy.source is not None:
            self._busy.append(_Busy(copy.bus, copy.out, copy.source))
        if copy.source is not None or copy.back is not None:
            self._count_device(-copy.nbytes)
        copy.source = copy.back = copy.arrival = None

    def _end_backward(self, task: int) -> None:
        """Release tensors that a backward did not request."""
        with self._lock:
            for weak in self._issued.pop(task, ()):
                if (owner := weak()) is not None:
                    self._let_go(owner.copy)
            self._sweep()

    def _sweep(self) -> None:
        """Release the memory of dropped copies."""
        while self._dropped:
            copy = self._dropped.popleft()
            self._let_go(copy)
            self.host_bytes -= copy.nbytes
            copy.pool.give(copy.host)
        while self._busy and self._busy[0].bus.is_done(self._busy[0].out):
            self._busy.popleft()

    def _count_device(self, nbytes: int) -> None:
        self.device_bytes += nbytes
        self.device_peak_bytes = max(self.device_peak_bytes, self.device_bytes)


# -- records ----------------------------------------------------------------------------------------------------------


@final
class _Copy:
    """A range of a storage, and the locations of its bytes.

    Args:
        source: a tensor on the storage, kept while its copy to the host runs.
        low: the start of the range, in bytes.
        out: the copy to the host.
    """

    def __init__(self, source: Tensor, low: int, nbytes: int, pool: HostPool, host: HostBuffer, out: Transfer) -> None:
        self.source: Tensor | None = source
        self.low, self.nbytes, self.pool, self.host, self.out = low, nbytes, pool, host, out
        self.bus = pool.bus
        self.back: Tensor | None = None
        """The bytes on the device for a backward."""
        self.arrival: Transfer | None = None
        self.turn = self.wanted = 0
        """The number of returns to the device, and of handles that have not requested the range since."""
        self.is_spoiled = False
        self._saved_version = version_of(source)
        self._storage = WeakStorage(source.untyped_storage())

    def has(self, span: Span) -> bool:
        """Return whether the range contains another range of the same storage."""
        return not self.is_spoiled and self.low <= span.low and span.high <= self.low + self.nbytes

    def look(self) -> None:
        """Check whether the tensor was changed during its copy, or while a backward uses the original."""
        if self.source is not None and version_of(self.source) != self._saved_version:
            self.is_spoiled = True


@final
class _Owner:
    """Lives while a handle can request a copy."""

    __slots__ = ("__weakref__", "_dropped", "copy", "users")

    def __init__(self, copy: _Copy, dropped: "deque[_Copy]") -> None:
        self.copy, self._dropped = copy, dropped
        self.users = 0

    def __del__(self) -> None:
        self._dropped.append(self.copy)


_Weak = weakref.ref[_Owner]


@dataclass(frozen=True, slots=True)
class _Busy:
    """A tensor without handles, kept until its copy to the host is complete."""

    bus: Bus
    out: Transfer
    source: Tensor


@final
class _Visit:
    """The tensors that a forward of a unit offloaded.

    Args:
        before: the visit of the previous unit.
    """

    __slots__ = ("__weakref__", "before", "owners", "task", "unit")

    def __init__(self, unit: int, before: "weakref.ref[_Visit] | None") -> None:
        self.unit, self.before = unit, before
        self.owners: list[_Weak] = []
        self.task = -1
        """The last backward that requested a tensor of this visit."""


class _Handle(ABC):
    """Replaces a tensor in the graph."""

    visit: _Visit


@final
@dataclass(slots=True, eq=False)
class _Stayed(_Handle):
    """Replaces a tensor that stays on the device: a request shows that backward has reached its unit."""

    visit: _Visit
    tensor: Tensor
    version: int


@final
@dataclass(slots=True, eq=False)
class _Moved(_Handle):
    """Replaces an offloaded tensor."""

    visit: _Visit
    owner: _Owner
    place: Place
    turn: int = 0


@final
class _Share:
    """The choice of tensors for a fraction: those saved first, because a backward uses them last.

    The expected bytes come from the previous pass, in proportion to its first unit. In the first pass, the offloaded
    tensors are spread evenly.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._seen = self._moved = self._first = 0
        self._ratio: float | None = None
        """The bytes of a pass, divided by those of its first unit."""

    def restart(self, *, learns: bool) -> None:
        """Begin a pass."""
        if learns and self._first:
            self._ratio = self._seen / self._first
        self._seen = self._moved = self._first = 0

    def expect(self, nbytes: int) -> None:
        """Set the bytes of a unit, before calls of `takes` for its tensors."""
        self._first = self._first or nbytes

    def takes(self, nbytes: int) -> bool:
        """Return whether to offload the next tensor."""
        done = self._moved if self._ratio is None else self._seen
        total = self._seen + nbytes if self._ratio is None else self._ratio * self._first
        self._seen += nbytes
        # Rounded: the tensor is offloaded if at least half of its bytes are in the fraction.
        is_taken = self._fraction == 1 or done + nbytes / 2 <= self._fraction * total
        self._moved += is_taken * nbytes
        return is_taken


def _handle(
    tensor: Tensor, owners: Mapping[Key, _Owner | None], stays: Container[Key], visit: _Visit
) -> _Handle | None:
    """Return the handle of a tensor; None if the tensor is not treated."""
    local = local_of(tensor)
    if not is_movable(local):
        return None
    key = key_of(local)
    if key in stays:
        return _Stayed(visit, tensor, version_of(tensor))
    if (owner := owners.get(key)) is None:
        return None
    owner.users += 1
    visit.owners.append(weakref.ref(owner))
    return _Moved(visit, owner, place_of(tensor, owner.copy.low))


def _replaced(handles: Mapping[int, _Handle], tensor: Tensor) -> Any:
    return handles.get(id(tensor), tensor)


def _changed(what: Any) -> ChangedInPlaceError:
    return ChangedInPlaceError(
        "one of the variables needed for gradient computation has been modified by an inplace operation, before its "
        f"copy to the host: a {what.dtype} tensor of shape {tuple(what.shape)}. Clone the tensor before changing it."
    )
