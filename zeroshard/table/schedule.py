"""The schedule of one pass on one rank, in integers only.

Owns the decisions of a pass: which unit to gather, how far ahead, which unit to release, which reductions are due. It
knows units by number, and neither tensors nor processes. The engine runs it live (`core/order.py`); the planner and the
trace replay it over marks (`replay`). Both get the same actions from the same code.

Note: record and marks
    A *record* is the agreement of all ranks for a kind of pass: the order of gathers and reductions, and the units that
    stay gathered from their first use to the end of the pass because a rank requested them twice. *Marks* are the
    events on this rank: it needed a unit, left a unit, received all gradients of a unit, closed the pass. Ranks may
    differ in their marks (one skips a unit) and still issue the same communication, because each follows the record: a
    request first issues everything recorded before it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

__all__ = [
    "Action",
    "Mark",
    "ROOT",
    "Record",
    "Request",
    "Schedule",
    "WINDOW",
    "hoist",
    "plain_marks",
    "replay",
]

ROOT = 0
"""The unit of all parameters outside other units; gathered from its first use to the end of a pass."""

WINDOW = 2
"""Gathered units at a time, besides root and pinned units: the unit in use and the next unit."""

Action = tuple[Literal["gather", "release", "reduce"], int]
Request = tuple[Literal["gather", "reduce"], int]
Mark = tuple[Literal["need", "leave", "land", "close"], int]


@dataclass(frozen=True)
class Record:
    """The agreement of all ranks for one kind of pass: gathers and reductions in order, and pinned units.

    Gathers and reductions share one order: a waiting rank depends only on earlier entries, so ranks that use different
    units cannot deadlock.
    """

    requests: tuple[Request, ...] = ()
    pinned: frozenset[int] = frozenset()
    outlasting: frozenset[int] = frozenset()
    """Units that stayed gathered on this rank while others were gathered and released: tied and nested units. They do
    not count in the window, where the next unit would wait for them."""
    held: frozenset[int] = frozenset()
    """Units that stay gathered after the pass: from a forward to its backward, or until the step."""
    carried: frozenset[int] = frozenset()
    """Units that are gathered when the pass begins, equal on all ranks: an earlier pass kept them."""

    def holding(self, held: frozenset[int], last: int | None) -> "Record":
        """Return the record with the units that stay gathered after the pass.

        Args:
            last: one of these that stays only if the pass gathers it and does not release it earlier than others.
        """
        gathers = [unit for kind, unit in self.requests if kind == "gather"]
        is_known = gathers or last in self.carried
        is_earlier = last is not None and is_known and last not in {*gathers[-1:], *self.pinned}
        return replace(self, held=held - {last} if is_earlier else held)


class Schedule:
    """One pass on one rank, following a record.

    Each method returns the actions to issue now, in order, or None if the record does not contain the request: the
    caller then issues `flush()` and agrees with the other ranks.

    Args:
        is_skipped: returns whether a unit will have no gradients on this rank in this pass.
    """

    def __init__(self, record: Record, is_skipped: Callable[[int], bool]) -> None:
        self._queue, self._is_skipped = list(record.requests), is_skipped
        self._kept = record.pinned | {ROOT}
        self.held, self.carried, self.keeps = record.held, record.carried, True
        self._begins_whole = bool(record.carried - record.held - self._kept)
        """Whether the first unit in use may be one that an earlier pass kept and this one releases."""
        self._landed: set[int] = set()
        self._recent: tuple[int, ...] = ()
        self.outlasting = set(record.outlasting | record.carried)
        self.issued: set[int] = set()
        """Units gathered in this pass: a second request means that the unit was released too early."""
        self.whole = dict.fromkeys(sorted(record.carried), False)
        """Units gathered and not released, in order of issue; True once this rank has used the unit."""

    @property
    def staying(self) -> set[int]:
        """Units that stay gathered while others are gathered and released."""
        return self.whole.keys() & (self._kept | self.outlasting)

    def need(self, unit: int) -> list[Action] | None:
        """Gather `unit`: issue all earlier entries of the record, the unit, then the next units within the window."""
        if unit not in (*self._kept, *self._recent[-1:]):
            self._recent = (*self._recent[-1:], unit)
            others = {u for u, is_used in self.whole.items() if is_used} - {*self._recent}
            self.outlasting |= others - self._kept - self.held
        if unit in self.carried - self.held:
            self.outlasting.discard(unit)  # from its use on, the unit counts in the window: this pass releases it
        if unit in self.whole:
            actions = self._pass_over(unit)
            self.whole[unit] = True
            return actions + self._ahead()
        if ("gather", unit) not in self._queue:
            return None
        actions = self._pass_over(None)
        while (front := self._queue[0]) != ("gather", unit):
            actions += self._issue_front()
            if front[0] == "gather" and front[1] not in self._kept:
                actions += self.let_go(front[1])
        actions += self._issue_front()
        self.whole[unit] = True
        return actions + self._ahead()

    def grant(self, unit: int, *, is_used: bool = True) -> None:
        """Note that `unit` is gathered."""
        self.whole[unit] = is_used
        self.issued.add(unit)

    def leave(self, unit: int) -> list[Action]:
        """Release `unit`, unless it is pinned to the end of the pass, and fill the window."""
        if unit in self._kept or unit in self.held or unit not in self.whole:
            return []
        del self.whole[unit]
        return [("release", unit), *self._ahead()]

    def let_go(self, unit: int) -> list[Action]:
        """Release `unit`, which this rank does not use now, unless it stays gathered beyond the pass."""
        if unit in self.held and self.keeps:
            self.whole[unit] = True
            return []
        self.whole.pop(unit, None)
        return [("release", unit)]

    def keep_none(self) -> None:
        """Note that all units were released since the pass was closed; what it serves later is released, too."""
        self.keeps = False
        self.whole.clear()

    def land(self, unit: int) -> list[Action]:
        """Reduce `unit`, whose gradients are complete, in its recorded order; skipped units do not delay it."""
        before = takewhile(lambda request: request != ("reduce", unit), self._queue)
        self._landed |= {u for kind, u in before if kind == "reduce" and u not in self._landed and self._is_skipped(u)}
        self._landed.add(unit)
        return self._ahead()

    def flush(self) -> list[Action]:
        """Issue and drop the rest of the record, so that no rank waits for this rank."""
        actions: list[Action] = []
        for kind, unit in self._queue:
            actions.append((kind, unit))
            if kind == "gather":
                actions += self.let_go(unit)
        self._queue = []
        return actions

    def close(self) -> list[Action]:
        """End the pass: release all units, then issue the rest of the record."""
        actions = [action for unit in [*self.whole] for action in self.let_go(unit)]
        return actions + self.flush()

    def _ahead(self) -> list[Action]:
        """Issue due actions: reductions with complete gradients, and gathers within the window."""
        actions: list[Action] = []
        while self._queue:
            kind, unit = self._queue[0]
            taken = self.whole.keys() - self._kept - self.outlasting
            if self.held:  # a held unit does not count in the window after its use: it is not released in this pass
                taken -= {u for u in self.held if self.whole.get(u)}
            size = WINDOW - (self._begins_whole and not self._recent)
            has_room = unit in self._kept or len(taken) < size
            if not (has_room if kind == "gather" else unit in self._landed):
                break
            actions += self._issue_front()
        return actions

    def _issue_front(self) -> list[Action]:
        kind, unit = self._queue.pop(0)
        if kind == "gather":
            self.grant(unit, is_used=False)
        else:
            self._landed.discard(unit)
        return [(kind, unit)]

    def _pass_over(self, unit: int | None) -> list[Action]:
        """Release units that were gathered before `unit` and not used: this rank skipped them."""
        actions: list[Action] = []
        for other, is_used in list(self.whole.items()):
            if other == unit:
                break
            if not is_used and other not in self._kept | self.carried:
                actions += self.let_go(other)
        return actions


def replay(record: Record, marks: Iterable[Mark]) -> list[Action]:
    """Return the actions of a pass with these marks that follows `record`.

    Raises:
        ValueError: a mark requests a unit that is not in the record.
    """
    marks = list(marks)
    landing = {unit for kind, unit in marks if kind == "land"}
    schedule = Schedule(record, lambda unit: unit not in landing)
    found: list[Action] = []
    for kind, unit in marks:
        match kind:
            case "need":
                due = schedule.need(unit)
                if due is None:
                    raise ValueError(f"unit {unit} is needed but not recorded; the record is {record.requests}.")
                found += due
            case "leave":
                found += schedule.leave(unit)
            case "land":
                found += schedule.land(unit)
            case "close":
                found += schedule.close()
    return found


def plain_marks(
    units: int, held: frozenset[int] = frozenset()
) -> tuple[tuple[Record, list[Mark]], tuple[Record, list[Mark]]]:
    """Return (record, marks) of a forward and of a backward pass that use `units` units in sequence.

    This is the prediction before the first pass: the root is gathered throughout, each other unit is used once.

    Args:
        held: units that stay gathered from forward to backward.
    """
    gathers: list[Request] = [("gather", unit) for unit in range(units)]
    forward: list[Mark] = [("need", ROOT)]
    backward: list[Mark] = [("need", ROOT)]
    back: list[Request] = [("gather", ROOT)] * (ROOT not in held)
    for unit in range(1, units):
        forward += [("need", unit), ("leave", unit)]
    for unit in range(units - 1, 0, -1):
        backward += [("need", unit), ("land", unit), ("leave", unit)]
        if unit not in held:
            back.append(("gather", unit))
        back.append(("reduce", unit))
    forward.append(("close", ROOT))
    backward += [("land", ROOT), ("close", ROOT)]
    record = Record(hoist([*back, ("reduce", ROOT)]), carried=held)
    return (Record(tuple(gathers), held=held), forward), (record, backward)


def hoist(requests: Sequence[Request]) -> tuple[Request, ...]:
    """Return agreed requests with each gather moved ahead of the reductions directly before it.

    Ranks agree on one request at a time. In later passes, the gather of the next unit should overlap with the
    computation of the current unit, and therefore precede its reduction.
    """
    ordered: list[Request] = []
    waiting: list[Request] = []
    for request in requests:
        if request[0] == "reduce":
            waiting.append(request)
        else:
            ordered += [request, *waiting]
            waiting = []
    return tuple(ordered + waiting)
