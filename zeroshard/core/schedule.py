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

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Action", "Mark", "ROOT", "Record", "Schedule", "WINDOW", "peak_units", "plain_marks", "replay"]

ROOT = 0
"""The unit of all parameters outside other units; whole from its first use in a pass to the end of the pass."""

WINDOW = 2
"""Units besides the root that may be whole at once: the one in use and the one on its way."""

Action = tuple[Literal["gather", "release", "reduce"], int]
Mark = tuple[Literal["need", "leave", "land", "close"], int]


@dataclass(frozen=True)
class Record:
    """What all ranks agreed on for one kind of pass; units by number."""

    gathers: tuple[int, ...] = ()
    reduces: tuple[int, ...] = ()
    pinned: frozenset[int] = frozenset()


class Schedule:
    """One pass on one rank, following a record.

    Each method returns the actions to issue now, in order, or None where the record does not foresee the request: the
    caller then issues `flush()` and agrees with the other ranks.
    """

    def __init__(self, record: Record) -> None:
        self._gathers = list(record.gathers)
        self._reduces = list(record.reduces)
        self._kept = record.pinned | {ROOT}
        self._landed: set[int] = set()
        self.issued: set[int] = set()
        """Units gathered in this pass: asking for one of them again means that it was released too early."""
        self.whole: dict[int, bool] = {}
        """Units gathered and not released, in order of issue; True once this rank needed them."""

    def need(self, unit: int) -> list[Action] | None:
        """Make `unit` whole: issue what the record has before it, then it, then what fits in the window behind it."""
        if unit in self.whole:
            return self._settle() + self._pass_over(unit) + self._ahead()
        if unit not in self._gathers:
            return None
        skipped = self._gathers[: (position := self._gathers.index(unit))]
        del self._gathers[: position + 1]
        actions = self._settle()
        actions += [("release", v) for v, is_used in list(self.whole.items()) if self._drop(v, is_used)]
        for v in skipped:
            actions.append(("gather", v))
            self.issued.add(v)
            if v in self._kept:
                self.whole[v] = False
            else:
                actions.append(("release", v))
        actions.append(("gather", unit))
        self.grant(unit)
        return actions + self._ahead()

    def grant(self, unit: int, *, is_used: bool = True) -> None:
        """Note that `unit` is whole now."""
        self.whole[unit] = is_used
        self.issued.add(unit)

    def leave(self, unit: int) -> list[Action]:
        """Release `unit`, unless it stays whole to the end of the pass, and fill the window."""
        if unit in self._kept or unit not in self.whole:
            return []
        del self.whole[unit]
        return [("release", unit), *self._ahead()]

    def land(self, unit: int) -> list[Action]:
        """Reduce `unit`, whose gradients are all here, once its turn has come.

        A recorded reduction whose gradients are not here holds back at most one later unit: a rank that skips a unit
        can not know that its gradients will never come, and must not fill its memory waiting for them.
        """
        self._landed.add(unit)
        actions: list[Action] = []
        while self._reduces and (self._reduces[0] in self._landed or self._count_held_back() > 1):
            self._landed.discard(first := self._reduces.pop(0))
            actions.append(("reduce", first))
        return actions

    def flush(self) -> list[Action]:
        """Issue all that is left of the record and keep nothing of it, so that no rank waits for this one."""
        actions: list[Action] = []
        for unit in self._gathers:
            actions += [("gather", unit), ("release", unit)]
        actions += [("reduce", unit) for unit in self._reduces]
        self._gathers, self._reduces = [], []
        return actions

    def close(self) -> list[Action]:
        """End the pass: issue what is left and release everything."""
        actions = self.flush() + [("release", unit) for unit in self.whole]
        self.whole = {}
        return actions

    def _ahead(self) -> list[Action]:
        actions: list[Action] = []
        while self._gathers and (self._gathers[0] in self._kept or len(self.whole.keys() - self._kept) < WINDOW):
            unit = self._gathers.pop(0)
            self.grant(unit, is_used=False)
            actions.append(("gather", unit))
        return actions

    def _pass_over(self, unit: int) -> list[Action]:
        """Release what was gathered ahead of `unit` and never used: this rank skipped it."""
        actions: list[Action] = []
        for v, is_used in list(self.whole.items()):
            if v == unit:
                break
            if self._drop(v, is_used):
                actions.append(("release", v))
        self.whole[unit] = True
        return actions

    def _drop(self, unit: int, is_used: bool) -> bool:
        if is_used or unit in self._kept:
            return False
        del self.whole[unit]
        return True

    def _settle(self) -> list[Action]:
        """Issue what is held back: a rank about to wait for a gather must not make others wait for its reductions."""
        actions: list[Action] = []
        while self._count_held_back():
            self._landed.discard(first := self._reduces.pop(0))
            actions.append(("reduce", first))
        return actions

    def _count_held_back(self) -> int:
        return len(self._landed.intersection(self._reduces))


def replay(record: Record, marks: Iterable[Mark]) -> list[Action]:
    """Return what a pass with these marks issues when it follows `record`.

    Raises:
        ValueError: a mark asks for a unit that the record does not hold.
    """
    schedule = Schedule(record)
    actions: list[Action] = []
    for kind, unit in marks:
        match kind:
            case "need":
                due = schedule.need(unit)
                if due is None:
                    raise ValueError(f"unit {unit} is needed but not recorded; the record gathers {record.gathers}.")
                actions += due
            case "leave":
                actions += schedule.leave(unit)
            case "land":
                actions += schedule.land(unit)
            case "close":
                actions += schedule.close()
    return actions


def plain_marks(units: int) -> tuple[tuple[Record, list[Mark]], tuple[Record, list[Mark]]]:
    """Return (record, marks) of a forward and of a backward pass that use `units` units one after the other.

    What a model will do before it has run once: the root is open throughout, each other unit is used once.
    """
    order = tuple(range(1, units))
    forward: list[Mark] = [("need", ROOT)]
    backward: list[Mark] = [("need", ROOT)]
    for unit in order:
        forward += [("need", unit), ("leave", unit)]
    for unit in reversed(order):
        backward += [("need", unit), ("land", unit), ("leave", unit)]
    close: list[Mark] = [("close", ROOT)]
    backward_order = (ROOT, *reversed(order))
    return (
        (Record(gathers=(ROOT, *order)), forward + close),
        (Record(gathers=backward_order, reduces=(*reversed(order), ROOT)), [*backward, ("land", ROOT), *close]),
    )


def peak_units(actions: Iterable[Action], full_bytes: tuple[int, ...]) -> int:
    """Return the most bytes of units that are whole at once while `actions` run; `full_bytes` is by unit."""
    now = peak = 0
    for kind, unit in actions:
        now += {"gather": full_bytes[unit], "release": -full_bytes[unit], "reduce": 0}[kind]
        peak = max(peak, now)
    return peak
