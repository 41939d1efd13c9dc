"""The events of a step before any step runs: gathers, releases, reductions, updates.

Owns the conversion of the order in which a model uses its units into the events of a step in the steady state. It knows
records and marks, but not torch or engines: `plan/trace/uses.py` determines the order of use, `table/schedule.py` the
events and their times. Read the note of the latter first.

Note: the steady state
    In the first pass of a kind, ranks agree on each request, and the agreed requests are the record of the next pass.
    Later passes add the rest of the record: units that are requested again stay gathered, and units that outlast others
    do not count in the prefetch window. Here one rank simulates these passes in integers until the record no longer
    changes. Ranks that use the same units in the same order request the same, so they learn nothing from each other.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import final

from zeroshard.table.schedule import Mark, Record, Request, Schedule, hoist, plain_marks, replay
from zeroshard.table.spec import UnitSpec
from zeroshard.table.trace import Event, event_of

__all__ = ["Uses", "plain_uses", "step_events"]


EMPTY = Record()
"""The record before the first pass."""


@final
@dataclass(frozen=True)
class Uses:
    """The uses of units in a forward pass of a model and the backward pass after it.

    Args:
        forward: marks in order; the last mark closes the pass. A unit may be needed again while it is gathered.
        backward: the same.
        partial: units that never get all expected gradients. Their gradients are reduced when the pass closes, or
            where the backward of the unit ends, if that is known.
    """

    forward: tuple[Mark, ...]
    backward: tuple[Mark, ...]
    partial: frozenset[int] = frozenset()


def plain_uses(count: int) -> Uses:
    """Return the uses of a model that runs `count` units in sequence inside the root.

    >>> from zeroshard.plan.trace.step_events import plain_uses
    >>> plain_uses(2).forward
    (('need', 0), ('need', 1), ('leave', 1), ('close', 0))
    """
    (_, forward), (_, backward) = plain_marks(count)
    return Uses(tuple(forward), tuple(backward))


def step_events(
    units: Sequence[UnitSpec],
    uses: Uses,
    *,
    micro_batches: int = 1,
    no_sync: bool = False,
    evaluations: int = 0,
    optimizers: Sequence[Collection[int]] | None = None,
    step: int = 0,
) -> list[Event]:
    """Return the events of a step in the steady state, in order, as in the engine's trace.

    Args:
        units: units of the model on a rank, as from `describe_units`.
        micro_batches: number of forward and backward passes before the update.
        no_sync: reduce gradients only in the last of these passes.
        evaluations: number of forward passes without gradients before them.
        optimizers: for each optimizer, the numbers of its buckets, in the order of updates; by default one optimizer
            updates all trainable buckets. () for no update.
        step: index of the step, from 0.

    Raises:
        ValueError: a count is too low, or `uses` has a unit that the model does not have.
    """
    if micro_batches < 1 or evaluations < 0:
        raise ValueError(
            f"micro_batches must be at least 1 and evaluations at least 0; got {micro_batches} and {evaluations}."
        )
    if unknown := {unit for _, unit in (*uses.forward, *uses.backward)} - {*range(len(units))}:
        raise ValueError(f"uses has unit {min(unknown)}, but the model has {len(units)} units. Trace the same model.")
    if optimizers is None:
        optimizers = [[bucket.number for unit in units for bucket in unit.reduced]]
    updated = frozenset(number for numbers in optimizers for number in numbers)
    units = [unit.updated(updated) for unit in units]
    held = Record(held=frozenset(unit.number for unit in units if unit.is_held))
    # A unit that the forward has not gathered is not gathered in the backward.
    carried = Record(carried=held.held & {unit for kind, unit in uses.forward if kind == "need"})
    evaluation = _pass_events(units, uses.forward, uses, "forward", step, Record())
    forward = _pass_events(units, uses.forward, uses, "forward", step, held)
    whole = _pass_events(units, uses.backward, uses, "backward", step, carried)
    events = evaluation * evaluations
    for number in range(1, micro_batches + 1):
        is_reduced = number == micro_batches or not no_sync
        unreduced = [mark for mark in uses.backward if mark[0] != "land"]
        events += forward
        events += whole if is_reduced else _pass_events(units, unreduced, None, "backward", step, carried)
    for numbers in optimizers:
        published = [unit for unit in units if any(b.is_published and b.number in numbers for b in unit.buckets)]
        events += [event_of(unit, step, "step", "publish", Record()) for unit in published]
        events.append(Event(step, "step", "step", "", 0))
    return events


def _pass_events(
    units: Sequence[UnitSpec], marks: Sequence[Mark], uses: Uses | None, phase: str, step: int, begin: Record
) -> list[Event]:
    """Return the events of one pass.

    Args:
        uses: None for passes without reductions.
        begin: units that stay gathered after the pass, and units that are gathered before it.
    """
    partial = uses.partial if uses is not None and phase == "backward" else frozenset[int]()
    is_sharded = any(not unit.is_whole for unit in units)
    has_hooks = is_sharded or any(any(b.row.activations.chains) for unit in units for b in unit.buckets)
    due = [
        (kind, unit)
        for kind, unit in marks
        if not (kind in ("need", "leave") and units[unit].is_whole)
        # Without hooks on modules, the end of a unit's backward is unknown.
        and not (kind == "land" and ((unit in partial and not has_hooks) or not units[unit].reduced))
    ]
    landed = {unit for kind, unit in due if kind == "land"}
    late = [unit for unit in reversed(range(len(units))) if unit in partial - landed and units[unit].reduced]
    record, followed = _settle(due, late, begin)
    return [event_of(units[unit], step, phase, kind, record) for kind, unit in replay(record, followed)]


def _settle(marks: Sequence[Mark], late: Sequence[int], begin: Record = EMPTY) -> tuple[Record, list[Mark]]:
    """Return the record that a pass with these marks does not change, and the marks that count when it is followed.

    Args:
        late: units that are reduced when the pass closes.
        begin: the record before the first pass, without requests.
    """
    record: Record | None = None
    while True:
        following, followed = _follow(record, marks, late, begin)
        if following == record:
            return following, followed
        record = following


def _follow(
    record: Record | None, marks: Sequence[Mark], late: Sequence[int], begin: Record
) -> tuple[Record, list[Mark]]:
    """Simulate one pass; return the record for the next pass, and the marks on which a rank acts.

    Args:
        record: None in the first pass, in which ranks agree on each request.
    """
    landing = {unit for kind, unit in marks if kind == "land"}
    schedule = Schedule(record or begin, lambda unit: unit not in landing)
    requests: list[Request] = list(record.requests) if record is not None else []
    pinned = set(record.pinned) if record is not None else set[int]()
    followed: list[Mark] = []
    for kind, unit in marks:
        if kind == "need" and schedule.whole.get(unit):
            continue
        followed.append((kind, unit))
        if kind == "need" and schedule.need(unit) is None:
            if unit in schedule.issued:
                pinned.add(unit)
            elif ("gather", unit) not in requests:
                requests.append(("gather", unit))
            schedule.flush()
            schedule.grant(unit)
        elif kind == "leave":
            schedule.leave(unit)
        elif kind == "land" and record is not None:
            schedule.land(unit)
        elif kind == "land":
            requests.append(("reduce", unit))
        elif kind == "close":
            schedule.close()
    if record is None:
        requests += [("reduce", unit) for unit in late]
    ordered = hoist(requests) if record is None else tuple(requests)
    outlasting = frozenset(schedule.outlasting)
    return Record(ordered, frozenset(pinned), outlasting, begin.held, begin.carried), followed
