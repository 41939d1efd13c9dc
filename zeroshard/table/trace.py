"""Records of the engine: events in order of issue, bytes by collective, bytes held by column.

Owns records and counters. The engine writes them; tests, the report and the planner read them. No decision of the
engine depends on them.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from zeroshard.table.schedule import Record
from zeroshard.table.sizes import size_text
from zeroshard.table.spec import UnitSpec

__all__ = ["Event", "Ledger", "Memory", "Trace", "Traffic", "event_of"]

KEPT_STEPS = 3
"""Number of steps whose events are kept, which bounds the memory of a long run."""


@dataclass(frozen=True, slots=True)
class Event:
    """One action of the engine.

    `kind` is "gather", "release", "reduce", "publish" (updated parameters sent after a step) or "step"; `phase` is
    "forward", "backward" or "step"; `nbytes` is the number of bytes that this rank sends; `is_pinned` marks a unit that
    stays gathered while other units are gathered and released, because it is tied, nested or called again.

    A detailed trace (`Trace.is_detailed`) also has, bucket by bucket: "update" (an optimizer's step has updated the
    bucket, or has begun to; `nbytes` is that of the master weights); "copy out" and "copy in" (a copy from a device to
    the host or to a file, and back, has begun; `nbytes` cross the bus; a CPU has none); "read" and "write" (of a file);
    "all-reduce" (of a shard of gradients, over replicas); "wait" (the program, or on a device its stream, had to wait
    here for a gather, with its copy, or for a sum; `nbytes` is 0).

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
        record: the record that the pass followed.
        nbytes: bytes sent; by default computed from the layout of the unit.
    """
    is_pinned = kind == "gather" and unit.number in record.pinned | record.outlasting | record.held
    sent = unit.sent_bytes(kind) if nbytes is None else nbytes
    return Event(step, phase, kind, unit.name, sent, is_pinned, unit.wire_dtypes(kind))


class Trace:
    """Events of the last steps on this rank, and the predicted events of the next step (`table/schedule.py`).

    An event is written after its collective was issued, or its memory was released, with the bytes that the transport
    counted.

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
        self.is_detailed = False
        """Whether to keep events of what a rank does by itself, which predictions do not have; see `Event`."""

    def __repr__(self) -> str:
        steps = [events for events in self._steps if events]
        shown = f"steps {steps[0][0].step} to {steps[-1][0].step}" if steps else "no step"
        kinds = Counter(event.kind for events in steps for event in events)
        return f"Trace({shown}: {', '.join(f'{n} {kind}' for kind, n in kinds.items()) or 'no events'})"

    @property
    def events(self) -> list[Event]:
        """Events of the last steps, oldest first."""
        return [event for events in self._steps for event in events]

    def step_events(self, step: int) -> list[Event]:
        """Return the events of one step; empty if they are no longer kept."""
        return [event for event in self.events if event.step == step]

    def predicted(self) -> list[Event]:
        """Return the events of the next step, in order, assuming the same passes as in the last step.

        The second step has other passes than the first one where a forward does not end with the last unit by the order
        of parameters: the first forward keeps this unit for its backward, and later ones release it.

        Raises:
            RuntimeError: no step has run yet.
        """
        return self._predict()

    def add(self, event: Event) -> None:
        """Append an event; a new step number starts a new list."""
        if self._steps[-1] and self._steps[-1][-1].step != event.step:
            self._steps.append([])
        self._steps[-1].append(event)

    def add_sent(self, kind: str, unit: str, nbytes: int) -> None:
        """Add bytes that were sent for the last event of a kind and unit after its issue."""
        events = self._steps[-1] if nbytes else []
        for place in reversed(range(len(events))):
            if (events[place].kind, events[place].unit) == (kind, unit):
                events[place] = replace(events[place], nbytes=events[place].nbytes + nbytes)
                return


@dataclass(frozen=True)
class Memory:
    """Bytes on this rank by column of the residency table, and further columns.

    Columns of the device: "parameters", "gradients", "states" (with separate master weights), "padding" (alignment, and
    step counters of the optimizer), "transient" (gathered units, gradients before their reduction, buffers of
    messages). Offload adds "host" and "file": bytes stored there instead of on the device. Treatments of activations
    add "activations": bytes on the device that autograd saved in forwards whose backward has not run; and "captured":
    bytes that the model's own `torch.utils.checkpoint` keeps besides positional inputs, which treatments do not see.
    Neither is predicted.

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
    """Peak bytes since `shard()`, separately for each column."""
    predicted_bytes: dict[str, int]
    """Predicted from layout, row and schedule: bytes between steps in training, and the peak for "transient"."""

    def __repr__(self) -> str:
        columns = (
            f"{name} {size_text(nbytes)} (at most {size_text(self.peak_bytes.get(name, 0))})"
            for name, nbytes in self.resident_bytes.items()
            if nbytes or self.peak_bytes.get(name)
        )
        return f"Memory({', '.join(columns)})"


@dataclass(frozen=True)
class Traffic:
    """Bytes that this rank has sent since `shard()`, counted at the sender.

    Kinds: "gather" (parameters), "reduce" (gradients), "replicate" (shards of gradients, between replicas), "agree"
    (order, votes, norms), "start" (the first broadcast), "state" (`gathered`), "update" (gradients and values sent to
    the owners of whole matrices, and new values sent back), "buffers" (of modules that forwards changed).

    ```python
    import torch, zeroshard as zs

    model = torch.nn.Linear(4, 2)
    zero = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert zero.traffic().predicted_step_bytes == 0  # one rank sends nothing
    ```
    """

    sent_bytes: dict[str, int]
    """Bytes by kind, including bytes that other ranks read from this rank in shared memory."""
    predicted_step_bytes: int
    """Predicted bytes of a step with one micro-batch: gathers, reductions and the update. A backward is taken to need
    no unit before the first trained one, by the order of parameters, if the root has no trained ones."""
    steps: int


@dataclass
class Ledger:
    """Bytes held in pools and gathered units, current and peak, and who hears of events in their memory."""

    now: Counter[str] = field(default_factory=Counter)
    peak: Counter[str] = field(default_factory=Counter)
    listener: Callable[[str, str, int], None] | None = None
    """Told of what a detailed trace has: kind of event, name of the unit, bytes."""

    def tell(self, name: str, kind: str, nbytes: int = 0) -> None:
        """Tell the listener of an event."""
        if self.listener is not None:
            self.listener(kind, name, nbytes)

    def add(self, column: str, nbytes: int) -> None:
        """Add `nbytes`, which may be negative, to `column`."""
        self.note(column, self.now[column] + nbytes)

    def note(self, column: str, nbytes: int) -> None:
        """Set the bytes held in `column`."""
        self.now[column] = nbytes
        self.peak[column] = max(self.peak[column], nbytes)
