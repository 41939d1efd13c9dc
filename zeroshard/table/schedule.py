"""What one rank issues in one pass, in integers only.

Owns the decisions of a pass: what to gather, how far ahead, what to release, which reductions are due. It knows units
by number, and neither tensors nor processes, so the engine runs it live (`core/order.py`) and the planner and the trace
replay it over marks (`replay`); both get the same list of actions because it is the same code.

Note: record and marks
    A *record* is what all ranks agreed on for a kind of pass: the order of gathers, the order of reductions, and the
    units that stay whole from their first use to the end of the pass because some rank asked for them twice. *Marks*
    are what happened on this rank: it needed a unit, left it, all gradients of a unit landed, the pass closed. Ranks
    may differ in their marks (one skips a unit) and still issue the same communication, because each follows the
    record: a request first issues everything recorded before it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
    "peak_units",
    "plain_marks",
    "replay",
]

ROOT = 0
"""The unit of all parameters outside other units; whole from its first use in a pass to the end of the pass."""

WINDOW = 2
"""Units besides the root, and those that outlast others, that may be whole: the one in use, the one on its way."""

Action = tuple[Literal["gather", "release", "reduce"], int]
Request = tuple[Literal["gather", "reduce"], int]
Mark = tuple[Literal["need", "leave", "land", "close"], int]


@dataclass(frozen=True)
class Record:
    """What all ranks agreed on for one kind of pass: gathers and reductions in one order, and units that stay whole.

    One order, and not one for each kind: a rank that waits for something then only waits for what comes earlier in it,
    so that ranks which use different units cannot wait for each other.
    """

    requests: tuple[Request, ...] = ()
    pinned: frozenset[int] = frozenset()
    outlasting: frozenset[int] = frozenset()
    """Units that stayed whole on this rank while others came and went: tied and nested ones. They take no room in the
    window, where the next unit would wait for them."""
    held: frozenset[int] = frozenset()
    """Units that stay whole beyond the pass: from a forward to its backward."""
    carried: frozenset[int] = frozenset()
    """Units that are whole when the pass begins, the same on all ranks: an earlier forward held them."""


class Schedule:
    """One pass on one rank, following a record.

    Each method returns the actions to issue now, in order, or None where the record does not foresee the request: the
    caller then issues `flush()` and agrees with the other ranks.

    Args:
        is_skipped: tells of a unit without gradients so far whether this rank will have none in this pass.
    """

    def __init__(self, record: Record, is_skipped: Callable[[int], bool]) -> None:
        self._queue, self._is_skipped = list(record.requests), is_skipped
        self._kept = record.pinned | {ROOT}
        self.held, self.carried = record.held, record.carried
        self._landed: set[int] = set()
        self._recent: tuple[int, ...] = ()
        self.outlasting = set(record.outlasting | record.carried)
        self.issued: set[int] = set()
        """Units gathered in this pass: asking for one of them again means that it was released too early."""
        self.whole = dict.fromkeys(sorted(record.carried), True)
        """Units gathered and not released, in order of issue; True once this rank needed them."""

    @property
    def staying(self) -> set[int]:
        """Units that are whole while others come and go."""
        return self.whole.keys() & (self._kept | self.outlasting)

    def need(self, unit: int) -> list[Action] | None:
        """Make `unit` whole: issue what the record has before it, then it, then what fits in the window behind it."""
        if unit not in (*self._kept, *self._recent[-1:]):
            self._recent = (*self._recent[-1:], unit)
            others = {u for u, is_used in self.whole.items() if is_used} - {*self._recent}
            self.outlasting |= others - self._kept - self.held
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
        """Note that `unit` is whole now."""
        self.whole[unit] = is_used
        self.issued.add(unit)

    def leave(self, unit: int) -> list[Action]:
        """Release `unit`, unless it stays whole to the end of the pass, and fill the window."""
        if unit in self._kept or unit in self.held or unit not in self.whole:
            return []
        del self.whole[unit]
        return [("release", unit), *self._ahead()]

    def let_go(self, unit: int) -> list[Action]:
        """Release `unit`, which this rank does not use now, unless it stays whole beyond the pass."""
        if unit in self.held:
            self.whole[unit] = True
            return []
        self.whole.pop(unit, None)
        return [("release", unit)]

    def land(self, unit: int) -> list[Action]:
        """Reduce `unit`, whose gradients are all here, once its turn has come; skipped units do not delay it."""
        before = takewhile(lambda request: request != ("reduce", unit), self._queue)
        self._landed |= {u for kind, u in before if kind == "reduce" and u not in self._landed and self._is_skipped(u)}
        self._landed.add(unit)
        return self._ahead()

    def flush(self) -> list[Action]:
        """Issue all that is left of the record and keep nothing of it, so that no rank waits for this one."""
        actions: list[Action] = []
        for kind, unit in self._queue:
            actions.append((kind, unit))
            if kind == "gather":
                actions += self.let_go(unit)
        self._queue = []
        return actions

    def close(self) -> list[Action]:
        """End the pass: release everything, so that there is room, and issue what is left."""
        actions = [action for unit in [*self.whole] for action in self.let_go(unit)]
        return actions + self.flush()

    def _ahead(self) -> list[Action]:
        """Issue what is due: reductions that landed, gathers that fit in the window."""
        actions: list[Action] = []
        while self._queue:
            kind, unit = self._queue[0]
            taken = self.whole.keys() - self._kept - self.outlasting
            if self.held:  # what is held takes no more room once it was used: it would never make any
                taken -= {u for u in self.held if self.whole.get(u)}
            has_room = unit in self._kept or len(taken) < WINDOW
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
        """Release what was gathered before `unit` and never used: this rank skipped it."""
        actions: list[Action] = []
        for other, is_used in list(self.whole.items()):
            if other == unit:
                break
            if not is_used and other not in self._kept:
                actions += self.let_go(other)
        return actions


def replay(record: Record, marks: Iterable[Mark]) -> list[Action]:
    """Return what a pass with these marks issues when it follows `record`.

    Raises:
        ValueError: a mark asks for a unit that the record does not hold.
    """
    marks = list(marks)
    schedule = Schedule(record, lambda unit: ("land", unit) not in marks)
    actions: list[Action] = []
    for kind, unit in marks:
        match kind:
            case "need":
                due = schedule.need(unit)
                if due is None:
                    raise ValueError(f"unit {unit} is needed but not recorded; the record is {record.requests}.")
                actions += due
            case "leave":
                actions += schedule.leave(unit)
            case "land":
                actions += schedule.land(unit)
            case "close":
                actions += schedule.close()
    return actions


def plain_marks(
    units: int, held: frozenset[int] = frozenset()
) -> tuple[tuple[Record, list[Mark]], tuple[Record, list[Mark]]]:
    """Return (record, marks) of a forward and of a backward pass that use `units` units one after the other.

    What a model will do before it has run once: the root is open throughout, each other unit is used once.

    Args:
        held: units that stay whole from forward to backward.
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
    """Return agreed requests with each gather in front of the reductions that were asked for just before it.

    Agreement is one request at a time; in later passes the next unit should be on its way while one is computed, and so
    before that one's reduction.
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


def peak_units(actions: Iterable[Action], full_bytes: tuple[int, ...], carried: Iterable[int] = ()) -> int:
    """Return the most bytes of units that are whole at once while `actions` run.

    Args:
        full_bytes: by unit.
        carried: units that are whole before.
    """
    now = peak = sum(full_bytes[unit] for unit in carried)
    for kind, unit in actions:
        now += {"gather": full_bytes[unit], "release": -full_bytes[unit], "reduce": 0}[kind]
        peak = max(peak, now)
    return peak
