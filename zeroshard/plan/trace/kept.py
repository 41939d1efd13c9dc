"""Memory that a trace keeps between forward and backward, with offloaded or compressed activations.

Owns a reimplementation of `activations/` on tensors without memory: the memory that is released after the forward of a
unit, and its return. It must not know the engine. Read `recorder.py` first, and `codes.py` for compression.

Note: order
    As in the engine, a unit's forward ends when a module with its parameters returns, and treatments then receive the
    tensors saved in it. In a backward, the first unpacked tensor of a unit starts the return of the previous unit's.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from zeroshard.describe.saved_nodes import Packed
from zeroshard.describe.units import UnitPlan
from zeroshard.plan.shape.tape import Exchange
from zeroshard.table.schedule import ROOT
from zeroshard.torch_private import (
    WeakStorage,
    call_after_backward,
    graph_task,
    storage_of,
    version_of,
)
from zeroshard.tree import find, map_tensors

__all__ = ["Held", "Kept", "Link", "Offloads"]

ALIGNMENT: Final = 512
"""Alignment of moved ranges in bytes."""


class Link(ABC):
    """One treatment."""

    exchange: Callable[[Exchange], None]
    """Receives each collective."""

    @abstractmethod
    def treat(self, held: Sequence["Held"], unit: int, outputs: Any) -> None:
        """Replace the kept values of tensors by the results of this treatment."""

    def start(self, value: Any) -> Any:
        """Start to restore a value; return the argument of `restore`."""
        return value

    @abstractmethod
    def restore(self, value: Any) -> Any:
        """Return the original value."""


@dataclass(slots=True)
class _Boxed:
    value: Any
    is_input: bool


@final
@dataclass(slots=True, eq=False)
class _Box(_Boxed, Packed):
    """A saved tensor."""


@final
class Held:
    """The kept value of one saved tensor, and the treatments applied to it."""

    __slots__ = ("__weakref__", "_moving", "_place", "batch", "is_input", "steps", "value")

    def __init__(self, value: Any, is_input: bool) -> None:
        self.value, self.is_input = value, is_input
        self.steps: list[Link] = []
        self.batch: _Batch | None = None
        self._place, self._moving = -1, None

    def put(self, link: Link, value: Any) -> None:
        """Keep the result of a link instead of the value."""
        self.value = value
        self.steps.append(link)

    def advance(self, place: int) -> None:
        """Undo links, from the last link to the link at `place`, which only starts."""
        if self._place == -1:
            self._place = len(self.steps)
        while self._place > place:
            is_first = self._place == len(self.steps)
            value = self.value if is_first else self.steps[self._place].restore(self._moving)
            self._place -= 1
            self._moving = self.steps[self._place].start(value)

    def restore(self) -> Any:
        """Return the tensor."""
        self.advance(0)
        found = self.steps[0].restore(self._moving)
        self._place, self._moving = -1, None
        return found


@final
class _Batch:
    """The tensors saved in one forward of a unit, and the batch before it."""

    def __init__(self, held: Sequence[Held], previous: "weakref.ref[_Batch] | None") -> None:
        self._held, self._previous = [weakref.ref(one) for one in held], previous
        for one in held:
            one.batch = self

    def prepare(self) -> None:
        """Start to restore the batch that the backward needs next."""
        batch: _Batch | None = self
        for distance in (0, 1):
            batch = None if batch is None or batch._previous is None else batch._previous()
            for ref in batch._held if batch is not None else ():
                if (one := ref()) is not None:
                    one.advance(min(distance, len(one.steps) - 1))


@final
class Kept:
    """The treatments of a model's units, as saved-tensor hooks.

    Args:
        links: treatments of each unit, by number.
    """

    def __init__(self, links: Mapping[int, Sequence[Link]]) -> None:
        self._links = links
        self._boxes: dict[int, list[_Box]] = {}
        self._under_way: list[tuple[int, ...]] = []
        self._last: weakref.ref[_Batch] | None = None
        self.is_of_model: Callable[[Tensor], bool] = lambda tensor: False
        """Returns whether a tensor is a parameter or a buffer of the model, which treatments do not receive."""

    def watch(self, is_of_model: Callable[[Tensor], bool], exchange: Callable[[Exchange], None]) -> None:
        """Set the functions that identify tensors of the model and receive collectives."""
        self.is_of_model = is_of_model
        for link in {id(link): link for links in self._links.values() for link in links}.values():
            link.exchange = exchange

    def hang(self, model: nn.Module, plans: Sequence[UnitPlan], twins: Mapping[nn.Module, nn.Module]) -> None:
        """Register hooks for the start and end of each unit's forward.

        Args:
            twins: the modules that run, by the modules of the plans.
        """
        entries: dict[nn.Module, tuple[int, ...]] = {model: ()}
        for number, plan in enumerate(plans):
            for module in plan.entries:
                entries[module] = (*entries.get(module, ()), number)
        for module, units in entries.items():
            twins[module].register_forward_pre_hook(partial(self._enter, units), prepend=True)
            twins[module].register_forward_hook(self._leave)

    def pack(self, tensor: Tensor, *, is_input: bool) -> Any:
        """Keep a tensor that autograd saves.

        Args:
            is_input: whether the tensor is an input of a recomputed module.
        """
        plain = tensor.detach()
        if self.is_of_model(tensor) or graph_task() != -1:
            return plain
        box = _Box(plain, is_input)
        self._boxes.setdefault(self._unit(), []).append(box)
        return box

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor."""
        if not isinstance(packed, _Box):
            return packed  # type: ignore[no-any-return]
        if isinstance(packed.value, Tensor):
            return packed.value
        held: Held = packed.value
        found: Tensor = held.restore()
        if held.batch is not None:
            held.batch.prepare()
        return found

    def _unit(self) -> int:
        return next((units[-1] for units in reversed(self._under_way) if units), ROOT)

    def _enter(self, units: tuple[int, ...], module: nn.Module, args: Any) -> None:
        if graph_task() == -1:
            self._under_way.append(units)

    def _leave(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if graph_task() != -1:
            return
        units = self._under_way.pop()
        self._treat(units[-1] if units else self._unit(), outputs)

    def _treat(self, unit: int, outputs: Any) -> None:
        boxes = self._boxes.pop(unit, [])
        links = self._links.get(unit, ())
        if not boxes or not links:
            return
        held = [Held(box.value, box.is_input) for box in boxes]
        for link in links:
            link.treat(held, unit, outputs)
        treated = [one for one in held if one.steps]
        for box, one in zip(boxes, held, strict=True):
            if one.steps:
                box.value = one
        if treated:
            self._last = weakref.ref(_Batch(treated, self._last))


# -- offload ----------------------------------------------------------------------------------------------------------


@final
class _Copy:
    """A range of a storage on the host, and its copy on the device."""

    __slots__ = ("__weakref__", "_storage", "back", "low", "nbytes", "source", "turn", "users", "wanted")

    def __init__(self, source: Tensor, low: int, nbytes: int) -> None:
        self.source: Tensor | None = source
        self.low, self.nbytes = low, nbytes
        self.back: Tensor | None = None
        self.turn = self.wanted = self.users = 0
        # Keeps the storage's identity from being reused.
        self._storage = WeakStorage(source.untyped_storage())


@final
class _Visit:
    """The moves of one forward of a unit."""

    __slots__ = ("__weakref__", "before", "copies", "task", "unit")

    def __init__(self, unit: int, before: "weakref.ref[_Visit] | None") -> None:
        self.unit, self.before = unit, before
        self.copies: list[weakref.ref[_Copy]] = []
        self.task = -1


@final
@dataclass(slots=True, eq=False)
class _Handle:
    """Stands for a tensor that was moved, or that stayed (`copy` is None)."""

    visit: _Visit
    copy: _Copy | None
    tensor: Tensor | None
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    turn: int = 0


@final
class Offloads(Link):
    """Moves tensors to the host after the forward of the next unit, as `activations/offloaded.py`.

    Args:
        fraction: fraction of the bytes to move, in the order of saving.
        small_bytes: tensors below this size stay.
    """

    def __init__(self, fraction: float, small_bytes: int) -> None:
        self._fraction, self._small_bytes = fraction, small_bytes
        self._seen = self._moved = 0
        self._known: dict[tuple[int, int], list[weakref.ref[_Copy]]] = {}
        self._leaving: list[list[weakref.ref[_Copy]]] = []
        self._issued: dict[int, list[weakref.ref[_Copy]]] = {}
        self._busy: list[Tensor] = []
        self._last: weakref.ref[_Visit] | None = None
        self._unit: int | None = None
        self.moved_bytes = 0
        """Bytes moved over the bus, in one direction."""

    def treat(self, held: Sequence[Held], unit: int, outputs: Any) -> None:
        """See `Link`."""
        self._busy.clear()
        self._release(0 if unit != self._unit else 1)
        self._unit = unit
        self._leaving.append([])
        spans: dict[tuple[int, int], tuple[Tensor, int, int]] = {}
        for tensor in [tensor for one in held for tensor in find(one.value, Tensor)]:
            if tensor.numel():
                low, high = _extent(tensor)
                low -= low % ALIGNMENT
                first, least, most = spans.get(_key(tensor), (tensor, low, high))
                spans[_key(tensor)] = first, min(least, low), max(most, high)
        copies = {key: self._find(key, low, high) for key, (_, low, high) in spans.items()}
        stays = set()
        for key, (tensor, low, high) in spans.items():
            if copies[key] is None and high - low >= max(1, self._small_bytes):
                if self._takes(high - low):
                    copies[key] = self._move(key, tensor, low, high - low)
                else:
                    stays.add(key)
        last = self._last and self._last()
        visit = last if last and last.unit == unit else _Visit(unit, self._last)
        for one in held:
            handles = {id(t): h for t in find(one.value, Tensor) if (h := self._handle(t, copies, stays, visit))}
            if handles:
                one.put(self, map_tensors(one.value, partial(_replaced, handles)))
                self._last = weakref.ref(visit)

    def restore(self, value: Any) -> Any:
        """See `Link`."""
        self._busy.clear()
        return map_tensors(value, self._bring, _Handle)

    def _takes(self, nbytes: int) -> bool:
        self._seen += nbytes
        is_taken = self._fraction == 1 or self._moved + nbytes / 2 <= self._fraction * self._seen
        self._moved += is_taken * nbytes
        return is_taken

    def _find(self, key: tuple[int, int], low: int, high: int) -> _Copy | None:
        found = (weak() for weak in self._known.get(key, ()))
        return next((c for c in found if c is not None and c.low <= low and high <= c.low + c.nbytes), None)

    def _move(self, key: tuple[int, int], tensor: Tensor, low: int, nbytes: int) -> _Copy:
        copy = _Copy(tensor, low, nbytes)
        self._known.setdefault(key, []).append(weakref.ref(copy))
        self._leaving[-1].append(weakref.ref(copy))
        self.moved_bytes += nbytes
        return copy

    def _handle(self, tensor: Tensor, copies: Mapping[Any, _Copy | None], stays: set[Any], visit: _Visit) -> Any:
        if not tensor.numel():
            return None
        key = _key(tensor)
        copy = copies.get(key)
        if key not in stays and copy is None:
            return None
        place = tensor.dtype, tensor.shape, tensor.stride()
        if copy is None:
            return _Handle(visit, None, tensor, *place, 0)
        copy.users += 1
        visit.copies.append(weakref.ref(copy))
        return _Handle(visit, copy, None, *place, (_extent(tensor)[0] - copy.low) // tensor.itemsize)

    def _release(self, keeps: int) -> None:
        count = max(0, len(self._leaving) - keeps)
        for weak in [weak for call in self._leaving[:count] for weak in call]:
            if (copy := weak()) is not None and copy.back is None:
                copy.source = None
        del self._leaving[:count]

    def _bring(self, handle: _Handle) -> Tensor:
        task, visit = graph_task(), handle.visit
        if visit.task != task:
            visit.task = task
            for each in (visit, visit.before and visit.before()):
                for weak in reversed(each.copies) if each else ():
                    if (copy := weak()) is not None:
                        self._on_device(copy, task)
        if handle.copy is None:
            assert handle.tensor is not None
            return handle.tensor
        copy = handle.copy
        back = self._on_device(copy, task)
        flat = back.view(handle.dtype)
        tensor = flat.as_strided(handle.shape, handle.stride, flat.storage_offset() + handle.offset)
        if handle.turn != copy.turn:
            handle.turn = copy.turn
            copy.wanted -= 1
        if copy.wanted == 0:
            self._let_go(copy)
        return tensor

    def _on_device(self, copy: _Copy, task: int) -> Tensor:
        if copy.back is None:
            if copy.source is not None:
                source = copy.source
                nbytes = source.untyped_storage().nbytes()
                size = (nbytes // source.itemsize,)
                flat = source.as_strided(size, (1,), 0).view(torch.uint8)
                copy.back = flat[copy.low : copy.low + copy.nbytes]
            else:
                copy.back = torch.empty(copy.nbytes, dtype=torch.uint8)
            copy.turn += 1
            copy.wanted = copy.users
            if task not in self._issued:
                self._issued[task] = []
                call_after_backward(partial(self._end, task))
            self._issued[task].append(weakref.ref(copy))
        return copy.back

    def _let_go(self, copy: _Copy) -> None:
        if copy.source is not None:
            self._busy.append(copy.source)
        copy.source = copy.back = None

    def _end(self, task: int) -> None:
        for weak in self._issued.pop(task, ()):
            if (copy := weak()) is not None:
                self._let_go(copy)
        self._busy.clear()


def _replaced(handles: Mapping[int, Any], tensor: Tensor) -> Any:
    return handles.get(id(tensor), tensor)


def _key(tensor: Tensor) -> tuple[int, int]:
    return storage_of(tensor), version_of(tensor)


def _extent(tensor: Tensor) -> tuple[int, int]:
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    low = int(tensor.storage_offset()) * tensor.itemsize
    return low, low + (last + 1) * tensor.itemsize
