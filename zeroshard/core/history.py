"""What steps issued, in the trace, and what the next one will issue.

Owns the trace of a model, and the passes of the last step as marks, from which predictions are replayed. It decides
nothing: `core/order.py` writes here what has happened. Read `table/schedule.py` ("record and marks") first.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import final

from zeroshard.core.unit import Unit
from zeroshard.table.schedule import Mark, Record, replay
from zeroshard.table.trace import Event, Trace, event_of

__all__ = ["History"]

Done = tuple[str, Hashable, list[Mark]] | int
"""A pass that was made; or a unit that was published, by number, and -1 where an update ended."""


@final
class History:
    """The steps of one model.

    Args:
        records: what passes follow, by kind; a mapping that grows.
    """

    def __init__(self, units: Sequence[Unit], records: Mapping[Hashable, Record]) -> None:
        self._units, self._records = units, records
        self.trace = Trace(self._predict)
        self.steps = 0
        """Steps before the one under way, or before the last where none is."""
        self._has_stepped = False
        self._done: list[Done] = []
        self._last_step: list[Done] = []

    @property
    def made(self) -> int:
        """How many steps were made."""
        return self.steps + self._has_stepped

    def begin_step(self) -> None:
        """Count a new step, if the one before is over."""
        if self._has_stepped:
            self.steps += 1
            self._has_stepped = False
            self._last_step, self._done = self._done, []

    def add_pass(self, phase: str, key: Hashable, marks: list[Mark]) -> None:
        """Note a pass that is over."""
        self._done.append((phase, key, marks))

    def add_publish(self, number: int, sent: int) -> None:
        """Write that a unit's updated parameters were sent."""
        self.trace.add(self.event("step", None, "publish", number, self.steps, sent))
        self._done.append(number)

    def end_step(self) -> None:
        """Write that an update is over."""
        self.trace.add(Event(self.steps, "step", "step", "", 0))
        self._done.append(-1)
        self._has_stepped = True

    def event(self, phase: str, key: Hashable, kind: str, number: int, step: int, sent: int | None = None) -> Event:
        """Return the event of what is issued for a unit.

        Args:
            sent: bytes, as the wire counted them; by default what the unit's layout says.
        """
        unit = self._units[number]
        # Which buckets are trained now shows in reductions alone, and in what a layout says that is sent.
        spec = unit.described() if kind == "reduce" or sent is None else unit.spec
        return event_of(spec, step, phase, kind, self._records.get(key, Record()), sent)

    def _predict(self) -> list[Event]:
        done = self._done if self._has_stepped else self._last_step
        if not done:
            raise RuntimeError("No step has been made yet: the first one is what the prediction is made from.")
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
