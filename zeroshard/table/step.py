"""One step of a rank, steady or first: what its forward, its backward and its update issue, in names and integers.

Owns the step. It knows units and the marks of their uses, and neither tensors nor engines: `table/schedule.py` has the
decisions inside a pass. The film of a plan plays these actions, and the engine's trace is compared with them. Read the
note of `table/schedule.py` first.

Note: the steady state
    In the first pass of a kind, ranks agree on each request, and the agreed requests are the record of the next pass.
    Later passes add the rest of the record: units that are requested again stay gathered, and units that outlast others
    do not count in the prefetch window. Here one rank simulates these passes in integers until the record no longer
    changes. Ranks that use the same units in the same order request the same, so they learn nothing from each other.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, final

from zeroshard.table.schedule import Action, Mark, Record, Request, Schedule, hoist, plain_marks
from zeroshard.table.spec import Staying, UnitSpec

__all__ = ["Steady", "Uses", "plain_uses", "steady_passes", "update_actions"]

Phase = Literal["forward", "backward"]
EMPTY = Record()
"""The record before the first pass."""


@final
@dataclass(frozen=True)
class Uses:
    """The uses of units in a forward pass of a model and the backward pass after it.

    Args:
        forward: marks in order. A unit may be needed again while it is gathered.
        backward: the same.
        partial: units that never get all expected gradients. Their gradients are reduced when the pass closes, or
            where the backward of the unit ends, if that is known.
    """

    forward: tuple[Mark, ...]
    backward: tuple[Mark, ...]
    partial: frozenset[int] = frozenset()


@final
@dataclass(frozen=True)
class Steady:
    """A pass of the steady state, or the first of its kind.

    Args:
        record: the record that the pass follows and does not change, or that the first one makes.
        actions: for each mark of the pass, what the rank issues there, in order.
        is_agreed: whether ranks agree on each request, as in the first pass of a kind. A round of votes finishes the
            reductions under way.
    """

    record: Record
    actions: Sequence[Sequence[Action]]
    is_agreed: bool = False


def plain_uses(count: int) -> Uses:
    """Return the uses of a model that runs `count` units in sequence inside the root.

    >>> from zeroshard.table.step import plain_uses
    >>> plain_uses(2).forward
    (('need', 0), ('need', 1), ('leave', 1), ('close', 0))
    """
    (_, forward), (_, backward) = plain_marks(count)
    return Uses(tuple(forward), tuple(backward))


def steady_passes(
    units: Sequence[UnitSpec], uses: Uses, *, is_reduced: bool = True, is_first: bool = True, agreed: Sequence[str] = ()
) -> tuple[Steady, Steady]:
    """Return the forward and the backward of a micro-batch.

    Args:
        units: units of the model on a rank, as from `describe_units`.
        is_reduced: whether the backward reduces gradients; False for a micro-batch under `no_sync()`.
        is_first: whether the micro-batch is the first of its step.
        agreed: which of the two are the first of their kind.

    Raises:
        ValueError: `uses` has a unit that the model does not have.
    """
    if unknown := {unit for _, unit in (*uses.forward, *uses.backward)} - {*range(len(units))}:
        raise ValueError(f"uses has unit {min(unknown)}, but the model has {len(units)} units. Trace the same model.")
    stays = Staying(units)
    held = stays.to_backward
    # A unit that the forward has not gathered is not gathered in the backward.
    carried = held & {unit for kind, unit in uses.forward if kind == "need"}
    begin = Record(held=held, carried=EMPTY.held if is_first else carried & stays.to_step)
    forward = _steady(units, uses.forward, begin, is_agreed="forward" in agreed)
    # A unit expected last is released after its use if a record knows better, or pinned if it is used again.
    while not forward.is_agreed and (kept := forward.record.holding(held, stays.last).held) != forward.record.held:
        begin = replace(begin, held=kept, pinned=forward.record.pinned)
        forward = _steady(units, uses.forward, begin, is_agreed=False)
    begin = Record(held=stays.to_step, carried=carried & forward.record.held)
    unreduced = frozenset(unit for kind, unit in uses.backward if kind == "land" and not is_reduced)
    partial = uses.partial if is_reduced else frozenset[int]()
    return forward, _steady(units, uses.backward, begin, partial, unreduced, is_agreed="backward" in agreed)


def update_actions(
    units: Sequence[UnitSpec], optimizers: Sequence[Collection[int]]
) -> Iterator[tuple[Literal["update", "publish", "step"], int]]:
    """Yield the actions of an update: the buckets that each optimizer updates, the units that it publishes, its step.

    The number of a step is the root's. A bucket whose parameters got no gradient is not updated.

    Args:
        optimizers: for each optimizer, the numbers of the buckets that it has entries of, in the order of updates.
    """
    updated = frozenset(number for numbers in optimizers for number in numbers)
    units = [unit.updated(updated) for unit in units]
    for numbers in optimizers:
        yield from (("update", b.number) for unit in units for b in unit.reduced if b.number in numbers)
        for unit in units:
            if any(bucket.is_published and bucket.number in numbers for bucket in unit.buckets):
                yield "publish", unit.number
        yield "step", 0


def _steady(
    units: Sequence[UnitSpec],
    marks: Sequence[Mark],
    begin: Record,
    partial: frozenset[int] = frozenset(),
    unreduced: frozenset[int] = frozenset(),
    *,
    is_agreed: bool,
) -> Steady:
    """Return a pass.

    Args:
        begin: units that stay gathered after the pass, and units that are gathered before it.
        unreduced: units whose gradients are complete, but not reduced in this pass.
    """
    is_sharded = any(not unit.is_whole for unit in units)
    has_hooks = is_sharded or any(any(b.row.activations.chains) for unit in units for b in unit.buckets)
    # Without hooks on modules, the end of a unit's backward is unknown.
    unseen = unreduced if has_hooks else unreduced | partial
    places = [
        place
        for place, (kind, unit) in enumerate(marks)
        if not (kind in ("need", "leave") and units[unit].is_whole)
        and not (kind == "land" and (unit in unseen or not units[unit].reduced))
    ]
    due = tuple(marks[place] for place in places)
    landed = {unit for kind, unit in due if kind == "land"}
    late = tuple(unit for unit in reversed(range(len(units))) if unit in partial - landed and units[unit].reduced)
    record, actions = _follow(None, due, late, begin) if is_agreed else _settle(due, late, begin)
    found: list[Sequence[Action]] = [()] * len(marks)
    for place, done in zip(places, actions, strict=True):
        found[place] = done
    return Steady(record, found, is_agreed)


@lru_cache(256)
def _settle(
    marks: tuple[Mark, ...], late: tuple[int, ...] = (), begin: Record = EMPTY
) -> tuple[Record, Sequence[Sequence[Action]]]:
    """Return the record that a pass with these marks does not change, and the actions of each mark.

    Args:
        late: units that are reduced when the pass closes.
        begin: the record before the first pass, without requests.
    """
    record, _ = _follow(None, marks, late, begin)
    while (following := _follow(record, marks, late, begin))[0] != record:
        record = following[0]
    return following


def _follow(
    record: Record | None, marks: Sequence[Mark], late: Sequence[int], begin: Record
) -> tuple[Record, Sequence[Sequence[Action]]]:
    """Simulate one pass; return the record for the next pass, and the actions of each mark.

    Args:
        record: None in the first pass, in which ranks agree on each request.
    """
    landing = {unit for kind, unit in marks if kind == "land"}
    schedule = Schedule(record or begin, lambda unit: unit not in landing)
    requests: list[Request] = list(record.requests) if record is not None else []
    pinned = set((record or begin).pinned)
    actions: list[list[Action]] = [[] for _ in marks]
    for place, (kind, unit) in enumerate(marks):
        if kind == "need" and not schedule.whole.get(unit):
            if (due := schedule.need(unit)) is None:
                if unit in schedule.issued:
                    pinned.add(unit)
                elif ("gather", unit) not in requests:
                    requests.append(("gather", unit))
                due = [*schedule.flush(), ("gather", unit)]
                schedule.grant(unit)
            actions[place] = due
        elif kind == "leave":
            actions[place] = schedule.leave(unit)
        elif kind == "land" and record is not None:
            actions[place] = schedule.land(unit)
        elif kind == "land":
            requests.append(("reduce", unit))
            actions[place] = [("reduce", unit)]
        elif kind == "close":
            actions[place] = schedule.close()
            reduced: list[Request] = [("reduce", unit) for unit in late if record is None]
            actions[place] += reduced
            requests += reduced
    ordered = hoist(requests) if record is None else tuple(requests)
    outlasting = frozenset(schedule.outlasting)
    return Record(ordered, frozenset(pinned), outlasting, begin.held, begin.carried), actions
