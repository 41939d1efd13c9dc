"""Bytes of modules and units in a trace, which tests compare with modules that run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from zeroshard.plan.trace.events import Category, Phase, Span, Trace

__all__ = ["UnitBytes", "by_unit", "saved_by_module"]


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit in one step.

    Args:
        saved: kept from its forward for its backward, including inputs of the step.
        inputs: input tensors of its first forward, without parameters and buffers.
        outputs: output tensors of its first forward.
        forward: peak of its forward above the bytes left when it returned.
        backward: peak of its backward above the bytes at its start, without gradients of parameters.
    """

    saved: int
    inputs: int
    outputs: int
    forward: int
    backward: int


def saved_by_module(trace: Trace) -> dict[str, int]:
    """Return the bytes that each module keeps for the backward, without modules that keep none."""
    return _sums((one.module, one.nbytes) for one in trace.saved)


def by_unit(trace: Trace) -> Mapping[str, UnitBytes]:
    """Return the bytes of each unit that ran; "" stands for modules outside all units."""
    saved = _sums((trace.unit_of(one.module), one.nbytes) for one in trace.saved)
    most: dict[tuple[str, Phase], int] = {}
    for span in trace.spans:
        key = (span.unit, span.phase)
        most[key] = max(most.get(key, 0), _extra(trace, span))
    names = dict.fromkeys([*(span.unit for span in trace.spans), *saved])
    return {
        name: UnitBytes(
            saved.get(name, 0),
            *trace.edges.get(name, (0, 0)),
            most.get((name, Phase.FORWARD), 0),
            most.get((name, Phase.BACKWARD), 0),
        )
        for name in names
    }


def _extra(trace: Trace, span: Span) -> int:
    """Return the peak of a unit's execution above the bytes at its end (forward) or at its start (backward)."""
    inside = trace.events[span.start : span.stop]
    if span.phase is Phase.FORWARD:
        levels = list(accumulate((event.nbytes for event in inside), initial=0))
        return max(levels) - levels[-1]
    sizes = (event.nbytes * (event.category is not Category.GRADIENT) for event in inside)
    return max(accumulate(sizes, initial=0))


def _sums(items: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for key, nbytes in items:
        found[key] = found.get(key, 0) + nbytes
    return found
