"""The memory of a traced step: its events, and sums over them.

Owns the records that a trace returns and the sums over them: the peak, and the bytes of each unit. It must not know
torch or the tracer; `tracer.py` makes the records.

Note: what is counted
    A storage is one allocation, however many tensors view it: one event when it appears, and one when its last tensor
    is gone. Bytes are requested bytes; an allocator may round them up. Temporary memory of a kernel is a separate pair
    of events ("workspace").
    A storage has one category for its whole life, the last one determined: results of a forward are temporary unless
    autograd or a selective checkpoint keeps them, and results of a backward are temporary unless they become the
    gradient of a parameter.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import final

from zeroshard.plan.machine.hardware import Cost
from zeroshard.plan.shape.tape import Exchange
from zeroshard.table.schedule import Mark

__all__ = ["Category", "Doubt", "Event", "Landed", "Marked", "Phase", "Trace"]


@final
class Doubt(str):
    """A note on memory that is not planned: no plan with it fits without doubt."""


@final
class Category(enum.StrEnum):
    """The purpose of a storage."""

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
    """Made by the optimizer, but not a state."""


@final
class Phase(enum.StrEnum):
    """The part of a step that contains an event."""

    BEFORE = "before"
    """Storages that exist when the step starts: parameters, buffers, inputs, states of earlier steps."""
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@final
@dataclass(frozen=True, slots=True)
class Event:
    """The appearance or the end of one storage.

    Args:
        nbytes: bytes; negative if memory is released.
        storage: number of the storage, shared by its two events.
        module: full name of the innermost module in forward or backward; "" for the model itself.
        operation: torch's name, e.g. "aten.mm.default"; for the end of a storage, the next operation.
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
class Landed:
    """A complete gradient that was taken from its parameter.

    Args:
        order: index of the first event after it.
        parameter: the full name, or the first of several.
        storage: storage of the gradient.
        is_alone: whether the gradient has its parameter's strides, and does not share its memory.
    """

    order: int
    parameter: str
    storage: int
    nbytes: int
    is_alone: bool


@final
@dataclass(frozen=True, slots=True)
class Marked:
    """A mark of `table/schedule.py`: a unit is needed, or left, or has all of its gradients; or the pass closes.

    Args:
        order: index of the first event after it.
    """

    order: int
    phase: Phase
    mark: Mark


@final
@dataclass(frozen=True)
class Trace:
    """The events of a step.

    Args:
        events: in order; an event's `order` is its index.
        saved: the module that kept it first, for each storage that a forward kept for its backward, of all traced
            steps; if a module around its maker kept it, the maker.
        kernels: (index of the first event after it, cost) of each operation that computes or copies.
        marks: gradients taken from their parameters, and uses of units, in order; empty if they are not observed.
        exchanges: (index of the first event after it, collective) of each collective among the step's operations.
        copies: (index of the first event after it, lane, number, bytes) of each copy of activations: "out" or "back"
            where it is issued, "" where it is waited for.
        flops: operations of forward and backward, without recomputation.
    """

    events: Sequence[Event]
    saved: Mapping[int, str]
    kernels: Sequence[tuple[int, Cost]] = ()
    marks: Sequence[Landed | Marked] = ()
    exchanges: Sequence[tuple[int, Exchange]] = ()
    copies: Sequence[tuple[int, str, int, int]] = ()
    flops: float = 0.0

    @cached_property
    def live(self) -> Sequence[int]:
        """Live bytes after each event."""
        return tuple(accumulate(event.nbytes for event in self.events))

    def doubts(self, *, is_cpu: bool) -> list[str]:
        """Return notes on operations that a trace cannot count, and on memory that a CPU's libraries take."""
        names = sorted({event.operation for event in self.events})
        rnn, what = [name for name in names if "rnn" in name and "back" not in name], "what it takes beside its results"
        found: list[str] = [Doubt(f"{one}: its operations are not counted, nor {what} in a backward.") for one in rnn]
        if is_cpu and any("_fft_" in name for name in names):
            found.append(Doubt(f"An FFT on a CPU: {what} is not counted."))
        is_half = any(cost.kind == "matmul" and cost.dtype in ("bfloat16", "float16") for _, cost in self.kernels)
        if is_cpu and is_half and any("convolution" in name for name in names):
            rest = f"of {what}, only copies are counted; what its kernel works in is not counted, up to half of a peak."
            found.append(Doubt(f"A convolution in half precision on a CPU: {rest}"))
        elif is_cpu and is_half:
            found.append(f"A product in half precision on a CPU: {what}, up to a tenth of a peak, is not counted.")
        return found

    def saved_bytes(self) -> int:
        """Return all bytes that the forward keeps for the backward."""
        return sum(one.nbytes for one in self.events if one.nbytes > 0 and one.storage in self.saved)


def unit_of(module: str, units: frozenset[str]) -> str:
    """Return the innermost of the units that contains a module; "" if there is none."""
    while module and module not in units:
        module = module.rpartition(".")[0]
    return module
