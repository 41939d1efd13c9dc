"""The trace of the collectives of past steps, and the prediction for the next step.

Owns the trace of a model, and the marks of the last step's passes, from which predictions are replayed. It decides
nothing: `core/order.py` records events here. Read `table/schedule.py` ("record and marks") first.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import final

from zeroshard.core.unit import Unit
from zeroshard.table.schedule import Mark, Record, replay
from zeroshard.table.trace import Event, Trace, event_of

__all__ = ["History"]

Done = tuple[str, Hashable, list[Mark]] | int
"""A completed pass; or the number of a published unit, with -1 at the end of an update."""


@final
class History:
    """The steps of one model.

    Args:
        records: the records that passes follow, by kind; a mapping that grows.
    """

    def __init__(self, units: Sequence[Unit], records: Mapping[Hashable, Record]) -> None:
        self._units, self._records = units, records
        self.trace = Trace(self._predict)
        self.phase = "step"
        """The phase of the current pass; "step" outside passes."""
        self.steps = 0
        """The number of steps before the current one, or before the last one between steps."""
        self._has_stepped = False
        self._done: list[Done] = []
        self._last_step: list[Done] = []

    @property
    def made(self) -> int:
        """The number of completed steps."""
        return self.steps + self._has_stepped

    def begin_step(self, phase: str) -> None:
        """Begin a phase; count a new step if the previous step is complete."""
        self.phase = phase
        if self._has_stepped:
            self.steps += 1
            self._has_stepped = False
            self._last_step, self._done = self._done, []

    def add_pass(self, phase: str, key: Hashable, marks: list[Mark]) -> None:
        """Record a completed pass."""
        self._done.append((phase, key, marks))

    def add(self, phase: str, key: Hashable, kind: str, number: int, sent: int | None = None) -> None:
        """Record a collective or a release; see `event`."""
        self.trace.add(self.event(phase, key, kind, number, self.steps, sent))

    def note(self, kind: str, name: str, nbytes: int = 0) -> None:
        """Record what only a detailed trace has, from any thread; no move of 0 bytes."""
        if self.trace.is_detailed and (nbytes or kind == "wait"):
            self.trace.add(Event(self.steps, self.phase, kind, name, nbytes))

    def add_publish(self, number: int, sent: int) -> None:
        """Record the transfer of a unit's updated parameters."""
        self.add("step", None, "publish", number, sent)
        self._done.append(number)

    def end_step(self) -> None:
        """Record the end of an update."""
        self.trace.add(Event(self.steps, "step", "step", "", 0))
        self._done.append(-1)
        self._has_stepped = True

    def event(self, phase: str, key: Hashable, kind: str, number: int, step: int, sent: int | None = None) -> Event:
        """Return the event of a collective for a unit.

        Args:
            sent: bytes that the wire counted; by default the bytes from the unit's layout.
        """
        unit = self._units[number]
        # Only reductions, and byte counts from a layout, depend on the buckets that are trained now.
        spec = unit.described() if kind == "reduce" or sent is None else unit.spec
        return event_of(spec, step, phase, kind, self._records.get(key, Record()), sent)

    def _predict(self) -> list[Event]:
        done = self._done if self._has_stepped else self._last_step
        if not done:
            raise RuntimeError("The prediction needs one completed step; got 0. Run a training step first.")
        events: list[Event] = []
        step = self.made
        for item in done:
            if isinstance(item, int):
                end = Event(step, "step", "step", "", 0)
                events.append(end if item < 0 else self.event("step", None, "publish", item, step))
            else:
                phase, key, marks = item
                actions = replay(self._records[key], marks)
                events += [self.event(phase, key, kind, unit, step) for kind, unit in actions]
        return events
