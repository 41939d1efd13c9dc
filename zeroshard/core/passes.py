"""One pass under way: its kind, what it has asked for, and what is told at its end.

Owns the state of a pass. It must not know units but by number, nor how ranks agree: `core/order.py` does.

Note: requests
    In rounds a request for a unit is a number; numbers of gathers lie below those of reductions. All ranks serve the
    smallest one, and each knows from the number, and the pass that it is in, what it is.
"""

import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from zeroshard.core.states import Scope
from zeroshard.table.schedule import ROOT, Mark, Record, Request, Schedule, hoist

__all__ = ["Pass", "Phase"]

Phase = Literal["forward", "backward"]


@dataclass
class Pass:
    """One pass under way. `key` names its kind: passes with equal keys share a record."""

    phase: Phase
    key: Hashable
    number: int
    scope: Scope
    """Over which ranks gradients are summed."""
    schedule: Schedule
    is_first: bool
    asks: bool
    """Whether ranks agree on each request in rounds: there is no record, or a rank left it just before."""
    is_closing: bool = False
    has_asked: bool = False
    """Whether ranks agree in rounds by now: some rank asked for something in the vote of the pass's end."""
    is_sure: bool = False
    """At its end: whether no rank can ask for anything in that vote."""
    used: list[bool] = field(default_factory=list)
    checksum: int = 0
    """At its end: the parameters that this rank used, and what it changed in place."""
    relied_on: str = ""
    """What this rank was sure of, and answered before it read that vote."""
    postponed: set[int] = field(default_factory=set)
    """Units whose reduction a rank was not ready for."""
    waiting: set[int] = field(default_factory=set)
    """Of these, the ones that are not summed yet; the same on all ranks that share a copy of the state."""
    marks: list[Mark] = field(default_factory=list)
    agreed: list[tuple[Literal["gather", "reduce"], int, bool]] = field(default_factory=list)
    expected: set[int] = field(default_factory=set)
    """Units that this rank will still need in this pass: a gather that it served for others is kept for it."""

    def __str__(self) -> str:
        return f"{self.phase} pass {self.number}"

    @property
    def end(self) -> str:
        """The place where it ends."""
        return f"the end of {self}"

    @property
    def payload(self) -> int:
        """What is told at its end: facts of this rank, as one number."""
        return zlib.crc32(bytes(self.used), self.checksum)

    def number_of(self, kind: Literal["gather", "reduce"], unit: int, count: int, *, is_again: bool) -> int:
        """Return the number of a request.

        Args:
            count: units of the model.
            is_again: whether the unit was released too early.
        """
        # The root comes first in both directions: it is needed throughout.
        place = unit if self.phase == "forward" or unit == ROOT else count - unit
        return 2 * (place + (count if kind == "reduce" else 0)) + (not is_again)

    def meaning_of(self, number: int, count: int) -> tuple[Literal["gather", "reduce"], int, bool]:
        """Return the kind, the unit and `is_again` of the request with a number."""
        place = number // 2 % count
        unit = place if self.phase == "forward" or place == ROOT else count - place
        return "gather" if number // 2 < count else "reduce", unit, number % 2 == 0

    def next_record(self, record: Record) -> Record:
        """Return the record for the next pass of this kind; its requests are agreed ones only, equal on all ranks."""
        requests, pinned = list(record.requests), set(record.pinned)
        seen: set[Request] = set()
        for kind, unit, is_again in self.agreed:
            request: Request = (kind, unit)
            is_repeated = self.asks and request in seen
            if request not in requests:
                place = len(requests) if self.is_first else _place_of(request, requests, self.phase)
                requests.insert(place, request)
            elif kind == "reduce":
                if is_repeated or not self.asks:
                    # It came too early for some rank, and is due later from now on.
                    requests = [r for r in requests if r != request] + [request]
            elif is_again or is_repeated:
                pinned.add(unit)
            seen.add(request)
        ordered = hoist(requests) if self.is_first else tuple(requests)
        of = self.schedule
        return Record(ordered, frozenset(pinned), frozenset(of.outlasting), of.held, of.carried)


def _place_of(request: Request, requests: Sequence[Request], phase: Phase) -> int:
    """Return where in a recorded order a request belongs that the record did not hold: by its unit's number."""
    wanted, unit = request
    for place, (kind, other) in enumerate(requests):
        if kind == wanted and other != ROOT and (other > unit if phase == "forward" else other < unit):
            return place
    return len(requests)
