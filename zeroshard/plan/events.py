"""What a traced step did to memory: events, and what follows from them.

Owns the records that a trace returns and the sums over them: the peak, and the bytes of each unit. Must not know torch,
nor how the events were found; `tracer.py` makes them.

Note: what is counted
    One storage is one allocation, however many tensors view it: an event when it appears and one when the last tensor
    that uses it is gone. Bytes are those that were asked for; an allocator may round them up. The memory that a kernel
    takes for itself, and gives back before it returns, is a pair of events of its own ("workspace").
    A storage has one category for its whole life, the last one found: what a forward makes is temporary until autograd
    or a selective checkpoint turns out to keep it, and what a backward makes is temporary until it becomes the gradient
    of a parameter.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import final

from zeroshard.plan.hardware import Cost
from zeroshard.plan.tape import Exchange

__all__ = ["Category", "Event", "Landed", "Peak", "Phase", "Saved", "Span", "Trace", "UnitBytes"]


@final
class Category(enum.StrEnum):
    """What a storage is for."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    BUFFER = "buffer"
    INPUT = "input"
    ACTIVATION = "activation"
    """Made in a forward, or recomputed in a backward, and kept for the backward."""
    FORWARD = "temporary in forward"
    BACKWARD = "temporary in backward"
    """Mostly gradients of activations."""
    UPDATE = "temporary in update"
    """Made by the optimizer, and not one of its states."""


@final
class Phase(enum.StrEnum):
    """Which part of a step an event belongs to."""

    BEFORE = "before"
    """What is there when the step begins: parameters, buffers, inputs, states of earlier steps."""
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@final
@dataclass(frozen=True, slots=True)
class Event:
    """One storage appears or is gone.

    Args:
        nbytes: bytes; negative where memory is given back.
        storage: number of the storage; its two events share it.
        module: full name of the innermost module that ran, or whose backward ran; "" for the model itself.
        operation: of torch, e.g. "aten.mm.default"; for the end of a storage the operation before which it ended.
    """

    order: int
    nbytes: int
    storage: int
    category: Category
    phase: Phase
    module: str
    operation: str


@final
@dataclass(frozen=True, slots=True)
class Saved:
    """A storage that the forward keeps for the backward.

    Args:
        nbytes: of the storage.
        storage: its number, as in events.
        module: which kept it first; where it was kept by something around the module that made it, the maker.
        maker: which made it; "" also for inputs of the step.
        category: of the storage: an input of the step that is saved stays an input.
    """

    nbytes: int
    storage: int
    module: str
    maker: str
    category: Category


@final
@dataclass(frozen=True, slots=True)
class Span:
    """One run of a unit's forward or backward.

    Args:
        start: order of the first event in it.
        stop: order of the first event after it.
    """

    unit: str
    phase: Phase
    start: int
    stop: int


@final
@dataclass(frozen=True, slots=True)
class Landed:
    """A gradient was complete, and was taken out of its parameter.

    Args:
        order: of the first event after it.
        parameter: its full name, the first one where there are several.
        storage: of the gradient.
        is_alone: whether the gradient has its parameter's strides, and nothing else shares its memory.
    """

    order: int
    parameter: str
    storage: int
    nbytes: int
    is_alone: bool


@final
@dataclass(frozen=True)
class Peak:
    """The moment when most bytes are live.

    Args:
        order: of the event that reaches it.
        by_category: what is live then.
        by_module: the same, by the module that made it.
    """

    nbytes: int
    order: int
    phase: Phase
    module: str
    operation: str
    by_category: Mapping[str, int]
    by_module: Mapping[str, int]


@final
@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit in one step.

    Args:
        saved: kept from its forward for its backward, inputs of the step included.
        inputs: tensors that its first forward was given, parameters and buffers aside.
        outputs: tensors that its first forward returned.
        forward: the most that its forward had beyond what was left when it returned.
        backward: the most that its backward had beyond what was there when it began, gradients of parameters aside.
    """

    saved: int
    inputs: int
    outputs: int
    forward: int
    backward: int


@final
@dataclass(frozen=True)
class Trace:
    """A step in events.

    Args:
        events: in order; an event's `order` is its index.
        saved: what each forward kept for its backward, each storage once; of all steps that were traced.
        spans: runs of units, in the order in which they began.
        units: names of modules whose bytes were asked for.
        edges: (bytes of inputs, bytes of outputs) of each unit that ran.
        personality: whose kernels the trace stands for.
        kernels: (order of the first event after it, cost) of each operation that computes or copies.
        landed: gradients that were taken out of their parameters, in order; none where they stay there.
        exchanges: (order of the first event after it, collective) of each collective among the step's operations.
    """

    events: Sequence[Event]
    saved: Sequence[Saved]
    spans: Sequence[Span]
    units: Sequence[str]
    edges: Mapping[str, tuple[int, int]]
    personality: str
    kernels: Sequence[tuple[int, Cost]] = ()
    landed: Sequence[Landed] = ()
    exchanges: Sequence[tuple[int, Exchange]] = ()

    @cached_property
    def live(self) -> Sequence[int]:
        """Bytes that are live after each event."""
        return tuple(accumulate(event.nbytes for event in self.events))

    @cached_property
    def peak(self) -> Peak:
        """The peak of the whole step, what was there before it included."""
        return self.peak_of()

    def phase_at(self, order: int) -> Phase:
        """Return the phase of an event, or of the last one where `order` is behind it."""
        return self.events[min(order, len(self.events) - 1)].phase

    def peak_of(self, *phases: Phase) -> Peak:
        """Return the peak within some phases, without any in all of them.

        Raises:
            ValueError: the trace has no event in these phases.
        """
        wanted = [e.order for e in self.events if not phases or e.phase in phases]
        if not wanted:
            raise ValueError(f"The trace has no event in {', '.join(phases) or 'any phase'}.")
        order = max(wanted, key=self.live.__getitem__)
        event = self.events[order]
        live: dict[int, Event] = {}
        for other in self.events[: order + 1]:
            if other.nbytes > 0:
                live[other.storage] = other
            else:
                live.pop(other.storage, None)
        return Peak(
            self.live[order],
            order,
            event.phase,
            event.module,
            event.operation,
            _sums((one.category, one.nbytes) for one in live.values()),
            _sums((one.module, one.nbytes) for one in live.values()),
        )

    def saved_by_module(self) -> Mapping[str, int]:
        """Return the bytes that each module keeps for the backward; a module that keeps none is missing."""
        return _sums((one.module, one.nbytes) for one in self.saved)

    def saved_bytes(self) -> int:
        """Return all bytes that the forward keeps for the backward."""
        return sum(one.nbytes for one in self.saved)

    def unit_of(self, module: str) -> str:
        """Return the innermost unit that a module belongs to; "" where it belongs to none."""
        return unit_of(module, frozenset(self.units))

    def by_unit(self) -> Mapping[str, UnitBytes]:
        """Return the bytes of each unit that ran; "" stands for what belongs to no unit."""
        saved = _sums((self.unit_of(one.module), one.nbytes) for one in self.saved)
        most: dict[tuple[str, Phase], int] = {}
        for span in self.spans:
            key = (span.unit, span.phase)
            most[key] = max(most.get(key, 0), self._extra(span))
        names = dict.fromkeys([*(span.unit for span in self.spans), *saved])
        return MappingProxyType(
            {
                name: UnitBytes(
                    saved.get(name, 0),
                    *self.edges.get(name, (0, 0)),
                    most.get((name, Phase.FORWARD), 0),
                    most.get((name, Phase.BACKWARD), 0),
                )
                for name in names
            }
        )

    def _extra(self, span: Span) -> int:
        """Return what a run of a unit has at most beyond what stays (forward) or what was there (backward)."""
        inside = self.events[span.start : span.stop]
        if span.phase is Phase.FORWARD:
            levels = list(accumulate((event.nbytes for event in inside), initial=0))
            return max(levels) - levels[-1]
        sizes = (event.nbytes * (event.category is not Category.GRADIENT) for event in inside)
        return max(accumulate(sizes, initial=0))


def unit_of(module: str, units: frozenset[str]) -> str:
    """Return the innermost of some units that a module belongs to; "" where it belongs to none."""
    while module and module not in units:
        module = module.rpartition(".")[0]
    return module


def _sums(items: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for key, nbytes in items:
        found[str(key)] = found.get(str(key), 0) + nbytes
    return MappingProxyType(found)
