"""What the engine did: events in the order of issue, bytes by collective, bytes held by column.

Owns records and counters only. The engine reports here; tests, the report and the planner read. Nothing in the engine
decides by what is written here.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from zeroshard.table.schedule import Record
from zeroshard.table.spec import UnitSpec

__all__ = ["Event", "Ledger", "Memory", "Trace", "Traffic", "event_of"]

KEPT_STEPS = 3
"""Steps whose events are kept, so that a long run does not grow."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that the engine issued.

    `kind` is "gather", "release", "reduce", "publish" (updated parameters sent after a step) or "step"; `phase` is
    "forward", "backward" or "step"; `nbytes` is what this rank sends for it; `is_pinned` marks a unit that stays whole
    while others come and go, because it is used more than once or around others (tied, called again, nested).

    ```python
    import zeroshard as zs

    event = zs.Event(step=0, phase="forward", kind="gather", unit="blocks.0", nbytes=4096)
    assert not event.is_pinned
    ```
    """

    step: int
    phase: str
    kind: str
    unit: str
    nbytes: int
    is_pinned: bool = False
    dtype: str = ""


def event_of(unit: UnitSpec, step: int, phase: str, kind: str, record: Record, nbytes: int | None = None) -> Event:
    """Return the event of one action on a unit.

    Args:
        record: what the pass followed.
        nbytes: what was sent for it; by default what the unit's layout says.
    """
    is_pinned = kind == "gather" and unit.number in record.pinned | record.outlasting | record.held
    sent = unit.sent_bytes(kind) if nbytes is None else nbytes
    return Event(step, phase, kind, unit.name, sent, is_pinned, unit.wire_dtypes(kind))


class Trace:
    """Events of the last steps on this rank, and what `table/schedule.py` says the next step will issue.

    An event is written when its collective was issued, or its memory given back, with the bytes that the wire counted.

    ```python
    import torch, zeroshard as zs

    model = torch.nn.Linear(4, 2)
    zero = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 4)).sum().backward()
    zero.optimizers[0].step()
    assert zero.trace.events[-1].kind == "step"
    assert sum(event.nbytes for event in zero.trace.events) == 0  # one rank sends nothing
    ```
    """

    def __init__(self, predict: Callable[[], list[Event]]) -> None:
        self._steps: deque[list[Event]] = deque([[]], maxlen=KEPT_STEPS)
        self._predict = predict

    @property
    def events(self) -> list[Event]:
        """Events of the last steps, oldest first."""
        return [event for events in self._steps for event in events]

    def step_events(self, step: int) -> list[Event]:
        """Return the events of one step; empty if it is too long ago."""
        return [event for event in self.events if event.step == step]

    def predicted(self) -> list[Event]:
        """Return the events that the next step will issue, in order, if its passes are like those of the last one.

        Raises:
            RuntimeError: no step has been made yet.
        """
        return self._predict()

    def add(self, event: Event) -> None:
        """Append an event; a new step number starts a new list."""
        if self._steps[-1] and self._steps[-1][-1].step != event.step:
            self._steps.append([])
        self._steps[-1].append(event)

    def add_sent(self, kind: str, unit: str, nbytes: int) -> None:
        """Count what was sent for the last event of a kind and unit after its issue."""
        events = self._steps[-1] if nbytes else []
        for place in reversed(range(len(events))):
            if (events[place].kind, events[place].unit) == (kind, unit):
                events[place] = replace(events[place], nbytes=events[place].nbytes + nbytes)
                return


@dataclass(frozen=True)
class Memory:
    """Bytes on this rank by column of the residency table, and two more.

    Columns: "parameters", "gradients", "states" (with master weights where they are kept apart), "padding" (alignment,
    and the optimizer's per-parameter step counters), "transient" (whole units, gradients on their way, wire buffers).
    With offload there are "host" and "file", too: what lies there instead of on the device, which the others are of.
    With treatments of activations there is "activations", too: what autograd has saved in forwards whose backward is to
    come, as far as it lies on the device; and "captured", where the model's own `torch.utils.checkpoint` keeps more
    than its positional inputs, which no treatment sees. Neither is predicted.

    ```python
    import torch, zeroshard as zs

    model = torch.nn.Linear(16, 16, bias=False)
    zero = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert zero.memory().resident_bytes["parameters"] == 16 * 16 * 4
    ```
    """

    resident_bytes: dict[str, int]
    """Bytes held now."""
    peak_bytes: dict[str, int]
    """The most held at once since `shard()`, each column by itself."""
    predicted_bytes: dict[str, int]
    """What the layout, the residency row and the schedule say: resident in training, and the peak for "transient"."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that this rank has sent since `shard()`, counted where they are sent.

    Kinds: "gather" (parameters), "reduce" (gradients), "replicate" (their shards, between replicas), "agree" (order,
    votes, norms), "start" (the first broadcast), "state" (under `gathered`), "update" (gradients and values to owners
    of whole matrices, and new values back).

    ```python
    import torch, zeroshard as zs

    model = torch.nn.Linear(4, 2)
    zero = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert zero.traffic().predicted_step_bytes == 0  # one rank sends nothing
    ```
    """

    sent_bytes: dict[str, int]
    """By what for; also what others read of this rank in shared memory, where nothing goes over the wire."""
    predicted_step_bytes: int
    """Bytes that a step with one micro-batch sends: gathered, reduced, and of an update."""
    steps: int


@dataclass
class Ledger:
    """Bytes held in pools and whole units, now and at most."""

    now: Counter[str] = field(default_factory=Counter)
    peak: Counter[str] = field(default_factory=Counter)

    def add(self, column: str, nbytes: int) -> None:
        """Count `nbytes` more (or fewer, if negative) in `column`."""
        self.note(column, self.now[column] + nbytes)

    def note(self, column: str, nbytes: int) -> None:
        """Set what is held in `column`."""
        self.now[column] = nbytes
        self.peak[column] = max(self.peak[column], nbytes)
