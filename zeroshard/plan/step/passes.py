"""A forward or a backward of a simulated rank: the model's instructions, between the actions of a pass.

Owns the units that are whole, and the tensors of the model. It must not know how actions follow from marks
(`table/step.py`) nor where gradients arrive (`landing.py`). Needs no torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, final

from zeroshard.plan.machine.hardware import Cost
from zeroshard.plan.shape.tape import Instruction
from zeroshard.plan.step.clock import Clock
from zeroshard.plan.step.elsewhere import Elsewhere
from zeroshard.plan.step.landing import Landing
from zeroshard.plan.step.rank_job import Job
from zeroshard.plan.step.script import MARKS, Entry
from zeroshard.plan.step.storages import Storages
from zeroshard.plan.step.updating import note_arrival
from zeroshard.table.schedule import Action
from zeroshard.table.spec import UnitSpec, itemsize
from zeroshard.table.step import Phase, Steady
from zeroshard.table.trace import event_of

__all__ = ["Passes"]

EXCHANGE_QUEUED: Final = 3
"""Queue entries of a collective: an event on the stream of kernels, its kernel, and a wait for that kernel."""


@final
@dataclass
class _Whole:
    """A unit that is whole, or on its way: when it is, and when what lies elsewhere has been brought."""

    storages: list[int]
    ready_s: float
    brought_s: float
    is_awaited: bool = False


@final
class Passes:
    """The passes of one rank."""

    def __init__(self, job: Job, clock: Clock, storages: Storages, elsewhere: Elsewhere) -> None:
        self._job, self._clock, self._storages, self._elsewhere = job, clock, storages, elsewhere
        self.landing = Landing(job, clock, storages, elsewhere)
        self._whole: dict[int, _Whole] = {}
        self.arrivals: dict[int, float] = {}
        """When units that the step before has published are there."""
        self.numbers: dict[int, int] = {}
        """The storages of the model's tensors, of the micro-batch that is played."""
        self.has_graph = True
        """Whether autograd records the forward, and keeps what its operations read."""
        self._copies: dict[int, float] = {}
        """When copies of activations are done, by number."""
        self._first: list[int] = []
        """Storages of tensors that a recomputation has made again: a pass holds its outputs until it ends."""
        self._landed, self._late = -1, -1
        """The tensor of the last gradient, and its storage once it is dropped: autograd has it until its hooks end."""

    def play(self, entries: Sequence[Entry], steady: Steady, phase: Phase) -> None:
        """Play a pass.

        Args:
            entries: of the job's script.
            steady: the actions of its marks.
        """
        marked, self._clock.phase = iter(steady.actions), phase
        for unit, one in entries:
            if self._late >= 0 and one.kind != "complete":
                self._storages.drop(self._late)
                self._late = -1
            if one.kind not in MARKS:
                self._run(self._job.units[unit], one)
                continue
            spec = self._job.units[unit]
            if one.kind == "leave" and not self.has_graph:
                self._leave_last()
            if one.kind == "complete":
                self.landing.copy(spec)
            self._act(next(marked), steady, phase)
            if one.kind == "need" and unit in self.arrivals:
                self._clock.wait(spec.name or "the root", self.arrivals.pop(unit))
                note_arrival(self._clock, spec)
            if one.kind == "need" and unit in self._whole:
                name, whole = spec.name or "the root", self._whole[unit]
                self._clock.wait(f"{name} on the bus", whole.brought_s, is_offload=True)
                self._clock.wait(name, whole.ready_s)
                if self._job.system.copies and not whole.is_awaited:
                    flat, whole.storages = whole.storages, self._make_whole(spec)
                    self._clock.compute("copy", self._clock.kernel_s(Cost(moved_bytes=2 * spec.full_bytes)))
                    self._storages.drop_all(flat)
                self._note_wait(spec)
        self._storages.drop_all(self._first)
        self._first.clear()

    def _leave_last(self) -> None:
        """Drop what a module made, but for its output, which is the last tensor that it made."""
        self._storages.drop_all([*self.numbers.values()][:-1])

    # -- what the engine issues ---------------------------------------------------------------------------------------

    def _act(self, actions: Iterable[Action], steady: Steady, phase: Phase) -> None:
        for kind, unit in actions:
            spec = self._job.units[unit]
            if kind != "release" and steady.is_agreed:
                self.landing.finish_before(is_all=True)
            if kind == "reduce":
                self.landing.reduce(spec)
            elif kind == "release":
                self._note_wait(spec)
                self._storages.drop_all(self._whole.pop(unit).storages)
            # The time of a gather's event is that of its issue.
            self._clock.tick(event_of(spec, 0, phase, kind, steady.record))
            if kind == "gather":
                self._gather(spec)
            elif kind == "reduce" and self._job.wire.is_in_place:
                self.landing.finish()

    def _note_wait(self, spec: UnitSpec) -> None:
        """Note the first wait for a unit since its gather."""
        whole = self._whole[spec.number]
        for bucket in spec.buckets if not whole.is_awaited else ():
            if bucket.is_gathered:
                self._clock.note("wait", bucket.unit)
        whole.is_awaited = True

    def _make_whole(self, spec: UnitSpec) -> list[int]:
        # What is read in place takes no memory of this rank.
        return [
            self._storages.make(
                b.layout.full_numel * itemsize(b.formats.param), "transient", spec.name, "whole parameters"
            )
            for b in spec.buckets
            if b.is_gathered and not self._job.wire.is_in_place
        ]

    def _gather(self, spec: UnitSpec) -> None:
        storages = self._make_whole(spec)
        self._elsewhere.await_update(spec)
        brought_s = self._elsewhere.bring(spec)
        sizes = (n * itemsize(b.formats.param) for b in spec.buckets if b.is_gathered for n in b.layout.numels)
        parts = self._job.system.exchanges(spec.full_bytes, sizes)
        if self._job.recomputes and self._clock.phase == "backward":
            parts += parts[:-1]
        gather = [("gather", nbytes, "shard") for nbytes in parts]
        stop_s = self._clock.collect("gather", spec.name, gather, not_before_s=brought_s)
        if not self._job.system.gathers_beside:
            self._clock.wait(spec.name or "the root", stop_s)
        self._whole[spec.number] = _Whole(storages, stop_s, brought_s)

    def let_go(self) -> None:
        """Release the units that stay whole until the step."""
        for unit in [*self._whole]:
            for storage in self._whole.pop(unit).storages:
                self._storages.drop(storage)

    # -- what the model does ------------------------------------------------------------------------------------------

    def _run(self, spec: UnitSpec, one: Instruction) -> None:
        clock, numbers = self._clock, self.numbers
        if one.kind == "make":
            self._first.append(numbers.get(one.tensor, -1))
            numbers[one.tensor] = self._storages.make(one.nbytes, "activations", spec.name, one.what)
        elif one.kind == "drop":
            storage = numbers.pop(one.tensor, -1)  # none, if it became a gradient
            if one.tensor == self._landed:
                self._late = storage
            else:
                self._storages.drop(storage)
        elif one.kind == "run":
            self._storages.queue(one.launches)
            took_s = clock.kernel_s(one.cost) if one.cost is not None else one.seconds
            clock.compute(one.what, took_s, one.launches, one.least_s)
        elif one.kind == "late":
            # In a pipe the host waits for each message, so it is never ahead by as much.
            ahead = self._job.system.runs_ahead if self._job.pipe is None else 0
            self._storages.drop_late(numbers.pop(one.tensor, -1), ahead)
        elif one.kind == "land":
            self._landed = one.tensor
            self.landing.land(spec, one, numbers)
        elif one.kind == "exchange" and one.exchange is not None:
            self._storages.queue(EXCHANGE_QUEUED)
            clock.exchange(one.what, one.exchange.kind, one.exchange.nbytes, one.exchange.axis)
        elif one.kind == "issue":
            self._copies[one.tensor] = clock.begin_copy(one.what, one.nbytes)
        elif one.kind == "await":
            clock.wait("activations on the bus", self._copies.pop(one.tensor, 0.0), is_offload=True)
        elif one.kind == "copy":
            clock.sent[one.what] += one.nbytes
            clock.stall(one.what, self._job.device.copy_s(one.nbytes))
