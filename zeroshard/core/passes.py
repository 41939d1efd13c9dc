"""The state of one pass: its kind, its requests, and the payload of its final vote.

Owns the state of a pass. It knows units only by number, and not how ranks agree (`core/order.py`).
"""

import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from zeroshard.core.states import Scope
from zeroshard.core.votes import Ask
from zeroshard.table.schedule import ROOT, Mark, Record, Request, Schedule, hoist

__all__ = ["Pass", "Phase"]

Phase = Literal["forward", "backward"]
LAST_PLACE = 1 << 30
"""More than the number of units."""


@dataclass
class Pass:
    """One open pass. `key` identifies its kind: passes with equal keys share a record."""

    phase: Phase
    key: Hashable
    number: int
    scope: Scope
    """The ranks over which gradients are summed."""
    schedule: Schedule
    is_first: bool
    asks: bool
    """Whether ranks agree on each request in rounds: without a record, or after a rank left it."""
    is_closing: bool = False
    has_asked: bool = False
    """Whether the final vote of the pass had a request, which starts rounds."""
    is_sure: bool = False
    """At its end: whether no rank can have a request in the final vote."""
    used: list[bool] = field(default_factory=list)
    checksum: int = 0
    """At its end: the parameters that this rank used, and its in-place changes."""
    buffers: int = 0
    """At its end: the digest of the buffers that this rank changed."""
    relied_on: str = ""
    """The result that this rank computed before it read the final vote."""
    postponed: set[int] = field(default_factory=set)
    """Units with a reduction for which a rank was not ready."""
    waiting: set[int] = field(default_factory=set)
    """The postponed units that are not reduced yet; equal on all ranks of a replica."""
    marks: list[Mark] = field(default_factory=list)
    agreed: list[tuple[Literal["gather", "reduce"], int, bool]] = field(default_factory=list)
    expected: set[int] = field(default_factory=set)
    """Units that this rank still needs in this pass: a gather served for others is kept."""
    numbers: Sequence[int] = ()
    """In a backward: the units whose gradients it reduces, also those of earlier backwards under `no_sync()`."""

    def __str__(self) -> str:
        return f"{self.phase} pass {self.number}" + " (no_sync)" * (self.phase == "backward" and self.scope < Scope.ALL)

    @property
    def end(self) -> str:
        """The name of its end, for votes."""
        return f"the end of {self}"

    @property
    def payload(self) -> int:
        """The payload of the final vote: facts of this rank, as one number."""
        return zlib.crc32(bytes(self.used), self.checksum) ^ self.buffers

    def ask_for(self, kind: Literal["gather", "reduce"], unit: int, *, is_again: bool) -> Ask:
        """Return a request in rounds.

        Args:
            is_again: whether the unit was released too early.
        """
        return Ask(kind == "reduce", self._place_of(unit), not is_again)

    def meaning_of(self, ask: Ask) -> tuple[Literal["gather", "reduce"], int]:
        """Return the kind and the unit of a request."""
        return "reduce" if ask.is_reduction else "gather", self._place_of(ask.place)

    def _place_of(self, unit: int) -> int:
        """Return the place of a unit among requests, or the unit at a place."""
        # The root comes first in both directions, because it is needed throughout.
        return unit if self.phase == "forward" or unit == ROOT else LAST_PLACE - unit

    def next_record(self, record: Record) -> Record:
        """Return the record for the next pass of this kind, with agreed requests, equal on all ranks."""
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
                    # The request was too early for a rank, so its next place is later.
                    requests = [r for r in requests if r != request] + [request]
            elif is_again or is_repeated:
                pinned.add(unit)
            seen.add(request)
        ordered = hoist(requests) if self.is_first else tuple(requests)
        of = self.schedule
        return Record(ordered, frozenset(pinned), frozenset(of.outlasting), of.held, of.carried)


def _place_of(request: Request, requests: Sequence[Request], phase: Phase) -> int:
    """Return the position of an unrecorded request in a recorded order, by its unit's number."""
    wanted, unit = request
    for place, (kind, other) in enumerate(requests):
        if kind == wanted and other != ROOT and (other > unit if phase == "forward" else other < unit):
            return place
    return len(requests)
