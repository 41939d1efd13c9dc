"""The timed methods of the engine, and their replacement during a profile.

Owns the list of timed methods, which refers to attributes of their classes, so that mypy reports renamed methods.
The engine does not know the probe and has no overhead without it: `attach` replaces methods on the objects of one
model, and `detach` restores them. Read `Probe.attach` first; `core/engine.py` and `core/order.py` have the methods.

Note: forward and backward
    The model's own work is the time between events. Modules of units mark the start and end of their forward, the
    gradients of their outputs mark the start of their backward, and each accumulated gradient identifies its unit.
    Backward ends with autograd's callback, and includes recomputation. On a GPU, backward runs on a thread of autograd
    while the caller's thread waits, so one timeline covers both.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor, nn

from zeroshard.core.buffer import Bucket
from zeroshard.core.engine import Engine
from zeroshard.core.grads import FlatGradients, Gradients
from zeroshard.core.order import Order
from zeroshard.core.saved import SavedTensors
from zeroshard.core.slot import slot_of
from zeroshard.core.unit import Reduction, Unit
from zeroshard.core.votes import Votes
from zeroshard.report.timeline import (
    BACKWARD,
    COPIES,
    FORWARD,
    HOOKS,
    NO_UNIT,
    OPTIMIZER,
    OTHER,
    SENDING,
    WAITING,
    Timeline,
)
from zeroshard.table.schedule import ROOT
from zeroshard.torch_private import call_after_backward, graph_task
from zeroshard.tree import find
from zeroshard.update.optimizer import ShardedOptimizer
from zeroshard.wire.comm import Comm

__all__ = ["Probe"]

UnitOf = Callable[..., str | None]


def _inherited(*args: Any, **kwargs: Any) -> None:
    """Keep the unit of the enclosing span."""


@final
class Probe:
    """Times the work on one model.

    Args:
        optimizers: the optimizers whose steps are timed.
        timeline: receives the events.
    """

    def __init__(
        self, engine: Engine, model: nn.Module, optimizers: Sequence[ShardedOptimizer], timeline: Timeline
    ) -> None:
        self._engine, self._model, self._optimizers, self._timeline = engine, model, optimizers, timeline
        self._undo = ExitStack()
        self._entered: list[tuple[nn.Module, tuple[str, str]]] = []
        self._is_in_backward = False
        self._names = {bucket.number: unit.name for unit in engine.units for bucket in unit.buckets}
        """The unit of each bucket."""

    def attach(self) -> None:
        """Replace the timed methods."""
        self._entered, self._is_in_backward = [], False
        with ExitStack() as undo:
            self._undo = undo
            self._attach_engine()
            self._attach_bytes()
            self._watch_modules()
            for one in self._optimizers:
                self._time(one.optimizer, torch.optim.Optimizer.step, OPTIMIZER, before=self._begin_step)
            self._undo = undo.pop_all()

    def detach(self) -> None:
        """Restore the replaced methods."""
        self._undo.close()

    def _attach_engine(self) -> None:
        """Time the engine's decisions: in hooks, on parameters, at the ends of passes."""
        engine = self._engine
        self._time(engine, Engine.enter, HOOKS, self._unit_entered, before=self._begin_forward)
        self._time(engine, Engine.exit, HOOKS, after=self._end_forward)
        self._time(engine, Engine.landed, HOOKS, lambda param: self._name(slot_of(param).unit), before=self._land)
        for method in (Engine.demand, Engine._need_in_backward):
            self._time(engine, method, HOOKS, self._name)
        self._time(engine, Engine._end_units, HOOKS, lambda numbers: self._name(numbers[0]))
        for ends in (Engine._complete, Engine._end_backward):
            self._time(engine, ends, HOOKS)
        self._time(engine, Engine.norms, OPTIMIZER)
        self._time(engine.order, Order.publish, HOOKS)
        self._time(engine.saved, SavedTensors.pack, HOOKS)
        self._time(engine.saved, SavedTensors.unpack, HOOKS, self._unit_unpacked, before=self._unpack)

    def _attach_bytes(self) -> None:
        """Time the operations on bytes: units, buckets, reductions, messages."""
        engine, comm = self._engine, self._engine.comm
        for unit in engine.units:
            owner = self._owner(unit.number)
            self._time(unit, Unit.start_gather, HOOKS, owner, label="gather")
            self._time(unit, Unit.wait, HOOKS, owner, label="await")
            self._time(unit, Unit.release, HOOKS, owner)
            for bucket in unit.buckets:
                for method in (Bucket.open, Bucket.close, Bucket.follow_masters):
                    self._time(bucket, method, COPIES, owner)
                self._time(bucket.grads, Gradients.land, COPIES, owner)
                for sums in (FlatGradients.take_local, FlatGradients.add_reduced) if bucket.flat else ():
                    self._time(bucket.flat, sums, COPIES, owner)
        self._time(engine.order, Order._finish, COPIES, _unit_of_reduction, label="reduce")
        for waits in (Comm.agree, Comm.collect, Comm.broadcast, Comm.flag):
            self._time(comm, waits, WAITING)
        for reads in (Votes.read, Votes.round):
            self._time(engine.order.votes, reads, WAITING)
        self._time(comm, Comm.gather, SENDING, label="send")
        self._time(
            comm, Comm.reduce, SENDING, lambda full, own, codec, scale, tag: self._names[tag.bucket], label="send"
        )
        self._time(comm, Comm.reduce_copies, SENDING, label="send")

    def _watch_modules(self) -> None:
        """Mark the start and end of replicated units, which have no hooks of the engine."""
        for unit in self._engine.units:
            if unit.spec.is_whole and unit.number != ROOT:
                for module in unit.blocks or (self._model.get_submodule(unit.name),):
                    self._watch(module, unit.name)

    def _watch(self, module: nn.Module, unit: str) -> None:
        enter = torch.compiler.disable(lambda module, args: self._enter(module, unit))
        leave = torch.compiler.disable(lambda module, args, output: self._leave(module, output))
        self._undo.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
        self._undo.callback(module.register_forward_hook(leave, always_call=True).remove)

    # -- time between events ----------------------------------------------------------------------------------------

    def _begin_forward(self, module: nn.Module, name: str, units: tuple[int, ...], inputs: Any) -> None:
        if not self._entered:
            self._is_in_backward = self._is_in_backward and graph_task() != -1
        self._enter(module, self._unit_entered(module, name, units, inputs))

    def _enter(self, module: nn.Module, unit: str) -> None:
        self._entered.append((module, self._timeline.resting))
        self._timeline.rest(BACKWARD if self._is_in_backward else FORWARD, unit)

    def _end_forward(self, module: nn.Module, outputs: Any) -> None:
        self._leave(module, outputs)

    def _leave(self, module: nn.Module, outputs: Any) -> None:
        """Return to the work around a module, and detect the start of the backward of its outputs."""
        if not self._entered or self._entered[-1][0] is not module or not self._timeline.is_running:
            return
        unit = self._timeline.resting[1]
        self._timeline.rest(*self._entered.pop()[1])
        for tensor in find(outputs, torch.Tensor):
            if tensor.requires_grad and not self._is_in_backward:
                tensor.register_hook(lambda grad: self._backward_of(unit))

    def _backward_of(self, unit: str) -> None:
        if self._timeline.is_running:
            self._begin_backward(unit)
            self._timeline.rest(BACKWARD, unit)

    def _begin_backward(self, unit: str) -> None:
        """Mark the start of a backward pass, up to autograd's callback."""
        if not self._is_in_backward and graph_task() != -1:
            self._is_in_backward = True
            self._timeline.rest(BACKWARD, unit)
            call_after_backward(self._end_backward)

    def _unpack(self, packed: Any) -> None:
        if (unit := self._unit_unpacked(packed)) is not None:
            self._begin_backward(unit)

    def _land(self, parameter: Tensor) -> None:
        unit = self._name(slot_of(parameter).unit)
        self._begin_backward(unit)
        self._timeline.was(BACKWARD, unit)

    def _end_backward(self) -> None:
        self._is_in_backward = False
        if self._timeline.is_running:
            self._timeline.rest(OTHER, NO_UNIT)

    def _begin_step(self, *args: Any, **kwargs: Any) -> None:
        # A backward that failed did not run its callback.
        self._end_backward()

    # -- names ------------------------------------------------------------------------------------------------------

    def _name(self, number: int) -> str:
        return self._engine.units[number].name

    def _owner(self, number: int) -> UnitOf:
        return lambda *args, **kwargs: self._name(number)

    def _unit_entered(self, module: nn.Module, name: str, units: tuple[int, ...], inputs: Any) -> str:
        return self._name(units[-1] if units else ROOT)

    def _unit_unpacked(self, packed: Any) -> str | None:
        """Return the unit of a saved parameter, None for other tensors."""
        return self._name(packed.unit) if hasattr(packed, "unit") else None

    # -- replacing --------------------------------------------------------------------------------------------------

    def _time(
        self,
        target: object,
        method: Callable[..., Any],
        category: str,
        unit_of: UnitOf = _inherited,
        *,
        label: str = "",
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> None:
        """Record each call of a method of one object as a span, until `detach`.

        Args:
            method: an attribute of the class, so that type checkers and imports detect a renamed method.
            unit_of: takes the method's arguments and returns the unit.
            label: label of the span, by default the name of the method.
            before, after: take the method's arguments, before the span starts and after it ends.
        """
        timeline, name = self._timeline, method.__name__
        label = label or name.lstrip("_")
        had, call = name in vars(target), getattr(target, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not timeline.is_running:
                # A graph that outlives the profile keeps hooks created during the profile.
                return call(*args, **kwargs)
            if before is not None:
                before(*args, **kwargs)
            timeline.begin(label, category, unit_of(*args, **kwargs))
            try:
                return call(*args, **kwargs)
            finally:
                timeline.end()
                if after is not None:
                    after(*args, **kwargs)

        setattr(target, name, timed)
        self._undo.callback(setattr, target, name, call) if had else self._undo.callback(delattr, target, name)


def _unit_of_reduction(reduction: Reduction) -> str:
    return reduction.unit.name
