"""The engine: entry and exit of modules, arrival of gradients, begin and end of backward passes.

Owns the state of one sharded model, and serves its hooks (`core/hooks.py`) and parameters (`core/parameter.py`). It
maps each call to the current pass, which `core/order.py` executes. Read `core/order.py` and `core/unit.py` first.

Note: a step
    Forward. The entry of the model (`Engine.enter`) completes passes that an exception interrupted, posts a vote, and
    opens a pass. The entry of a module gathers its unit (`Order.need`), and issues the next gathers within the window;
    its exit releases the unit (`Order.leave`). Saved tensors of autograd go through `core/saved.py`. Backward. Its
    first event (`_enter_backward`) opens a pass, and a callback of autograd closes it. Unpacking a saved parameter
    gathers its unit again. Autograd passes each gradient to `Engine.landed`, which moves it into its bucket
    (`Gradients.land`). After the last gradient of a unit, `Order.land` reduces the unit in its recorded order
    (`Unit.start_reduction`). `Order.close` reduces the other units, and votes on the parameters that this rank used.
    Update. Each rank reads the votes of past passes, and ranks vote on the update (`Order.settle`). The user's
    optimizer then updates this rank's slices, unless `core/guard.py` prevents it, and `ShardedOptimizer` gathers
    replicated parameters (`Order.publish`). `zero_grad` drops the gradients (`Gradients.clear`).
Note: threads
    Autograd runs the backward of each device's nodes on a thread of that device, and CPU nodes on the caller's thread.
    A model that uses several devices (for example, with a loss on the CPU) has hooks called from several threads. All
    ranks follow one sequence of actions, so hooks are serialized: `alone`. A thread that waits for a collective blocks
    the others, whose requests come later in the sequence anyway.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from zeroshard.activations.recompute import refuse_reentrant
from zeroshard.core.dtypes import LossScale
from zeroshard.core.flights import Flights
from zeroshard.core.frames import Frame, Frames, Gathered
from zeroshard.core.guard import guard_of
from zeroshard.core.hints import hint_begin, hint_end
from zeroshard.core.norms import LocalNorms, total_norms
from zeroshard.core.order import Order
from zeroshard.core.passes import Pass
from zeroshard.core.saved import SavedTensors, Treatment
from zeroshard.core.slot import NormsOfPlaces, Slot
from zeroshard.core.states import Presence, Scope
from zeroshard.core.undo import Ending, Undo
from zeroshard.core.unit import Unit
from zeroshard.devices import Lane, alone
from zeroshard.table.schedule import ROOT
from zeroshard.table.trace import Ledger
from zeroshard.torch_private import call_after_backward, graph_task, set_slot, slot_grad
from zeroshard.wire.comm import Comm, Tag
from zeroshard.wire.mesh import Mesh, slice_of

__all__ = ["Engine"]

Tensor = torch.Tensor


@final
class Engine(Ending):
    """The state of one sharded model.

    Args:
        treatment: the treatment of the tensors that autograd saves.
    """

    def __init__(
        self, mesh: Mesh, comm: Comm, units: list[Unit], ledger: Ledger, treatment: Treatment | None = None
    ) -> None:
        self.mesh, self.comm, self.units, self.ledger = mesh, comm, units, ledger
        self.lane = Lane(mesh, mesh.device)
        # Autograd uses a single thread for the CPU.
        self.lock = threading.RLock() if mesh.device.type != "cpu" else None
        self.slots: dict[str, Slot] = {}
        self.undo, self.backwards, self.assigned = Undo(), 0, set[Slot]()
        """The number of backward passes that have ended; parameters whose gradients user code has assigned since."""
        self.order = Order(units, comm)
        self.catch_up, self.answer, ledger.listener = self.order.catch_up, self.order.answer, self.order.history.note
        self.is_sharded = self.order.is_sharded
        self.has_frames = self.is_sharded or treatment is not None
        """Whether modules with units have forward hooks."""
        self.gathered: Gathered | None = None
        self.scope = Scope.ALL
        """The ranks over which the next backward sums gradients."""
        self.loss_scale: LossScale | None = None
        self.is_updating = False
        """Whether the body of an optimizer's step runs, whose functions of gradients are of slices on purpose."""
        self.is_skipping = False
        """Whether the current step is skipped because gradients overflowed: slices then have no gradients."""
        self.has_moved_states = False
        """Whether `offload_states()` moved states away, which prevents updates."""
        has_far = any(not bucket.spec.row.states.is_on_device for unit in units for bucket in unit.buckets)
        self.guard = guard_of(comm, updates_on_host=has_far)
        self.norms_of_places: NormsOfPlaces = lambda norms, *_: norms
        self.check_caller: Callable[[], None] = lambda: None
        """Called before each backward, and before gradients are assigned; see `parallel/pipe.py`."""
        self.follow_entries: Callable[[], None] = lambda: None
        """Has parameters follow what code has written to optimizers' entries outside steps; see `whole/written.py`."""
        self.check_written: Callable[[], None] = lambda: None
        """Called before each backward."""
        self.check_tied: Callable[[str], None] = lambda what: None
        """Compares parameters that several places of a pipe have, after what user code did."""
        self.check_forward: Callable[[str, Any], None] = lambda name, inputs: None
        """Called before each forward, with the name of a method that is not the model's forward, and its inputs."""
        self.unread: Callable[[], None] | None = None
        """Reads whether the last update was skipped, and acts on it; None if the host knows."""
        self._await_update: Callable[[], None] = lambda: None
        """Waits for the update in the background."""
        self.flights, self._task, self.inside = Flights(units), -1, ""
        """`inside` is the action of a pipeline that runs, which other calls must not interrupt."""
        self._norms, self.copy = LocalNorms(()), slice_of(mesh.along("shard", "tensor"))
        """The ranks whose parts form the full gradients."""
        buckets = [(unit.number, bucket) for unit in units for bucket in unit.buckets]
        self._frames = Frames(units, lambda: self.saved.pop())
        self.saved = SavedTensors(buckets, self._need_in_backward, treatment, self._frames.unit_under_way)

    def take_slots(self, slots: Iterable[Slot]) -> None:
        """Register the slots of parameters, in registration order, and connect them with this engine."""
        for place, slot in enumerate(slots):
            slot.owner, slot.place = weakref.ref(self), place
            self.slots[slot.name] = slot
        self._norms = LocalNorms([*self.slots.values()])

    def use_loss_scale(self, loss_scale: LossScale) -> None:
        """Multiply the gradients of the model's outputs by a loss scale, and skip steps that overflow."""
        self.loss_scale = loss_scale
        for unit in self.units:
            unit.loss_scale, unit.look = loss_scale, self.guard.look

    def learn(self) -> None:
        """Finish the last update, and read whether it was skipped, before states are read or gradients change.

        Raises:
            RuntimeError: gradients were not finite, without a loss scale; nothing was changed.
        """
        self._await_update()
        self.read_answer(is_needed=True)

    @alone
    def await_published(self, numbers: Iterable[int] | None = None) -> None:
        """Wait for updated parameters that are under way, of these units or of all."""
        if coming := [n for n in (range(len(self.units)) if numbers is None else numbers) if self.units[n].is_coming]:
            with self.lane.joined():
                for number in coming:
                    self.units[number].wait()

    def begin_update(self, *, is_skipped: bool) -> None:
        """Begin the update of an optimizer's step; slices of a skipped one have no gradients."""
        self.is_updating, self.is_skipping = True, is_skipped

    def end_update(self) -> bool:
        """End the update, and return whether it was skipped."""
        was_skipped, self.is_skipping = self.is_skipping, False
        return was_skipped

    def note_update(self, updated: Iterable[Slot], unread: Callable[[], None] | None) -> None:
        """Record an update.

        Args:
            updated: the parameters whose gradients were applied.
            unread: reads whether the device skipped it, and acts on it; None if the host knows.
        """
        self.assigned.difference_update(updated)
        self.unread = unread

    def continue_update(self, wait: Callable[[], None], check: Callable[[], None]) -> None:
        """Let an update continue in the background.

        Args:
            wait: waits for it.
            check: raises on all ranks if it failed on one; see `Order.check_update`.
        """
        self._await_update, self.order.check_update = wait, check

    def read_answer(self, *, is_needed: bool) -> None:
        """Read whether the last update was skipped, if this is needed now, or if the loss scale follows from it.

        The host would wait for the end of the last backward, and the device for the host.
        """
        if self.unread is not None and (is_needed or self.loss_scale is not None):
            read, self.unread = self.unread, None
            read()

    @contextmanager
    def let_read(self, *, writeback: bool, states: bool) -> Iterator[None]:
        """Let code inside read full parameters, and change them (`writeback`), without passes."""
        self.gathered = Gathered(writeback, states)
        try:
            yield
        finally:
            self.gathered = None

    @contextmanager
    def reducing_over(self, scope: Scope, *, at_most: bool = True) -> Iterator[None]:
        """Reduce the gradients of backwards inside over these ranks; `at_most` keeps a narrower scope from outside."""
        before, self.scope = self.scope, min(self.scope, scope) if at_most else scope
        try:
            yield
        finally:
            self.scope = before

    def move_states(self, *, is_away: bool) -> None:
        """Record that the states were moved away from the device, which prevents updates, or back."""
        self.has_moved_states = is_away

    # -- forward ----------------------------------------------------------------------------------------------------

    @alone
    def enter(self, module: torch.nn.Module, name: str, units: tuple[int, ...], inputs: Any) -> None:
        """Begin a module's forward: gather its units, and begin a pass in the outermost module."""
        if self.gathered is not None:
            return
        is_recompute, has_grad = graph_task() != -1, torch.is_grad_enabled()
        if not self._frames.running() and not is_recompute:
            self.check_forward(name, inputs)
            self.lane.begin(f"the forward of {type(module).__name__}")
            # When gathered, units wait for their own part of an update in the background.
            self.read_answer(is_needed=False)
            self._complete()
            if name in self.flights.parts:
                # Evaluation that leaves gradients on must be possible on one rank alone.
                is_followed = has_grad and module.training and self.scope is Scope.ALL
                self.order.buffers.begin_forward(is_followed=is_followed)
        self.await_published(units)
        frame = Frame(module, units, is_recompute, sys.exception(), has_grad)
        if not self.has_frames:  # the model and its forward methods, of which one may call another
            self._frames.entered.append(frame)
            return
        if is_recompute:
            self._enter_backward()
        elif not self._frames.entered:
            self._open_forward(frame, name)
        else:
            self.lane.check(f"the forward of '{name}'")
        self._frames.entered.append(frame)
        between, self._frames.entered[0].between = self._frames.entered[0].between, None
        if between is not None and between not in units:
            self.order.leave(between)
        for number in units:
            self.order.need(number)
            self.units[number].users += 1
            frame.taken.append(number)
        if is_recompute:
            for number in units:
                self.units[number].recomputed += 1
        elif has_grad:
            self.flights.use(units)
            for number in hint_end(inputs, units, self._end_units):
                self.units[number].has_end_hint = True

    @alone
    def exit(self, module: torch.nn.Module, outputs: Any) -> None:
        """End a module's forward: release its units, and end the pass in the outermost module."""
        if self.gathered is not None or not self._frames.running() or self._frames.entered[-1].module is not module:
            return
        frame = self._frames.undo()
        if not self.has_frames or frame.is_recompute or sys.exception() is not frame.exception:
            # A recomputation saved plain aliases, so the unit stays gathered until its backward ends. Ranks may also
            # fail alone, so nothing is communicated after an exception; the next entry completes the pass.
            return
        for number in frame.taken:
            if not self.units[number].users and self.units[number].blocks and self._frames.entered:
                self._frames.entered[0].between = number
            elif not self.units[number].users:
                self.order.leave(number)
        self.saved.treat(frame.units[-1] if frame.units else self._frames.unit_under_way(), outputs)
        if frame.has_grad:
            hint_begin(outputs, frame.units, self._need_in_backward, self.flights.arrival())
        if not self._frames.entered:
            self.order.close()

    def _open_forward(self, frame: Frame, name: str) -> None:
        key, place = self.flights.forward_of(name, has_grad=frame.has_grad, is_apart=self.scope is not Scope.ALL)
        if self.is_sharded and frame.has_grad:
            self.flights.begin(key)
        # Also without gradients: code inside may enable them, as in models of forces.
        try:
            self.saved.push()
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.mesh} torch.func.grad, vjp, jacrev and hessian disable the hooks that gather parameters for a "
                "backward. Use torch.autograd.grad, or enter `with zero.gathered():` around them, on every rank."
            ) from error
        frame.has_hooks = True
        self.order.open("forward", key, place=place if self.is_sharded else "", holds=frame.has_grad)

    def leave_passes(self, what: str) -> None:
        """Raise inside a forward or a backward, before any change; complete passes that an exception interrupted.

        Collective: if a pass is open, on every rank.
        """
        self.check_outside_backward(what)
        if self._is_in_forward:
            raise RuntimeError(f"{self.mesh} {what} inside a forward of the model: leave it first.")
        self.lane.begin(what)
        self.learn()
        self.await_published()
        self._complete()

    def check_outside_backward(self, what: str) -> None:
        """Raise in a hook that runs inside a backward, while gradients are being reduced, or in a step of a pipe."""
        if self.inside:
            raise RuntimeError(f"{self.mesh} {what} inside {self.inside}: other places wait. Call it after that.")
        if graph_task() != -1:
            raise RuntimeError(
                f"{self.mesh} {what} inside a backward (in a hook on a gradient or a tensor): gradients are still "
                "being computed and reduced. Wait until backward() returns."
            )

    def _complete(self) -> None:
        """Complete passes that an exception interrupted."""
        if self.order.current is not None:
            while self._frames.entered:
                self._frames.undo()
            self.saved.forget()
            self.close(self.order.current)

    def close(self, pass_: Pass) -> None:
        """Close the open pass, and end what belongs to it."""
        try:
            self.order.close()
        finally:
            if pass_.phase == "backward":
                self.backwards, self._task = self.backwards + 1, -1
                self.flights.end()
                for unit in self.units:
                    unit.end_backward()
            self._norms.forget()

    @alone
    def demand(self, number: int) -> bool:
        """Gather a unit for code outside its modules until the end of the pass; return False without an open pass.

        Updated parameters of a unit that stays whole are waited for, inside a pass or not.
        """
        if self.units[number].spec.is_whole:
            self.await_published([number])
            return True
        if graph_task() != -1 and self.is_sharded:
            self._need_in_backward(number)
            return True
        if not (self._is_in_forward and self._frames.are_own):
            return False
        self.order.need(number)
        self.units[number].is_read_outside = True
        if torch.is_grad_enabled():
            self.flights.used.add(number)
        return True

    # -- backward ---------------------------------------------------------------------------------------------------

    @property
    def _is_in_forward(self) -> bool:
        """Whether a forward pass is open; a backward inside a forward belongs to it, and reduces nothing."""
        return bool(self._frames.running()) and self.order.current is not None and self.order.current.phase == "forward"

    def _enter_backward(self) -> None:
        """Open a backward pass at the first event in it."""
        if (self._task == (task := graph_task()) and self.order.current is not None) or self._is_in_forward:
            self.lane.check("a part of the backward")
            return
        self.check_caller()
        self.check_written()
        self.lane.begin("the backward")
        refuse_reentrant()
        self.learn()
        self.await_published()
        self._complete()
        self._task = task
        kind, numbers = self.flights.kind_of(task)
        key, used = ("backward", kind, self.scope is not Scope.RANK), self.flights.used
        pass_ = self.order.open("backward", key, scope=self.scope, expected=set(used), numbers=numbers)
        call_after_backward(lambda: self._end_backward(pass_))
        if ROOT in used:
            self.order.need(ROOT)

    @alone
    def _end_backward(self, pass_: Pass) -> None:
        if self.order.current is pass_:
            # Autograd runs this on the stream of the caller of backward(), which has waited for the streams of all
            # nodes.
            self.lane.begin("the end of the backward")
            self.close(pass_)

    @alone
    def _need_in_backward(self, number: int) -> None:
        if self.gathered is not None or graph_task() == -1:
            if self.units[number].presence is Presence.RELEASED:
                raise RuntimeError(
                    f"{self.mesh} A tensor saved from {self.units[number]} was read outside a backward pass while the "
                    "unit is released. Use `with zero.gathered():` around the code that reads it."
                )
            return
        if self.lock is not None or self._task != graph_task() or self.order.current is None:
            self._enter_backward()
        self.order.need(number)

    @alone
    def landed(self, parameter: Tensor) -> None:
        """Take the gradient of a parameter from autograd. Called by the parameter's hook, once per backward."""
        # The most frequent code of a step: it checks invariants without function calls.
        slot: Slot = parameter.__dict__["_zeroshard"]
        grad: Tensor | None = slot_grad(parameter)
        set_slot(parameter, None)
        if grad is None:
            return
        if self.gathered is not None:
            raise RuntimeError(
                f"{self.mesh} backward() reached '{slot.name}' under gathered(), where gradients are not reduced. "
                "Leave the context before training, forward included, or use torch.no_grad() inside it."
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.mesh} backward(create_graph=True) is not supported: the reduction would detach the gradient of "
                f"'{slot.name}' from its graph. Use torch.autograd.grad(..., create_graph=True), and call backward() "
                "on a value computed from its results."
            )
        if self._frames.entered and self._is_in_forward:
            raise RuntimeError(
                f"{self.mesh} backward() reached '{slot.name}' inside the forward of a sharded model. Use "
                "torch.autograd.grad there, which does not touch parameters' gradients, or call backward() after the "
                "forward."
            )
        if self.lock is not None or self._task != graph_task() or self.order.current is None:
            self._enter_backward()
        scale, unit = 1.0 / self.loss_scale.value if self.loss_scale is not None else 1.0, self.units[slot.unit]
        if slot.bucket.spec.lands_on_sums:
            scale *= unit.scale
        grad = slot.form.part(grad)
        slot.bucket.grads.land(slot.index, grad.to_dense() if grad.layout is not torch.strided else grad, scale)
        if unit.count_landed(parameter):
            self.order.land(unit.number)
            is_trained_whole = unit.landed == len(unit.parameters)
            if self.is_sharded and is_trained_whole and not unit.has_end_hint and not unit.recomputed:
                self.order.leave(unit.number)

    @alone
    def _end_units(self, units: tuple[int, ...]) -> bool:
        """Release units whose backward is over: autograd runs nodes of later calls first, so none remain.

        Returns: whether the hint counts; a backward inside a forward ends nothing.
        """
        if self._is_in_forward:
            return False
        self._enter_backward()
        for number in units:
            unit = self.units[number]
            # A backward forgets the calls of all forwards before it.
            unit.calls, unit.recomputed = max(0, unit.calls - 1), max(0, unit.recomputed - 1)
            if not unit.calls and not unit.recomputed:
                if unit.landed and not unit.has_all_landed() and unit.is_complete():
                    self.order.land(number)
                self.order.leave(number)
        return True

    # -- gradients --------------------------------------------------------------------------------------------------

    def change_gradients(self, what: str, *, is_forgotten: bool = False) -> None:
        """Prepare for a change of gradients by user code; raise inside a backward. Collective: maybe."""
        if graph_task() != -1:  # checked inline: `zero_grad` calls this once per parameter
            self.check_outside_backward(what)
        if not is_forgotten:
            self.check_caller()
        # An update in the background uses its gradients until it ends.
        self.read_answer(is_needed=False) if is_forgotten else self.learn()
        self.catch_up()
        self._norms.forget()

    @alone
    def norms(self, p: float, dtype: torch.dtype | None = None) -> Tensor:
        """Return read-only (parameters,) fp64: the p-norm of the full gradient of each parameter, in order.

        Args:
            p: the order of the norm.
            dtype: dtype to which elements are converted first; see `LocalNorms`.

        Raises:
            RuntimeError: gradients of this rank are not yet reduced.

        Collective: on the first call after gradients changed, an all-gather of 8 bytes per parameter; every rank must
            call.
        """
        self.leave_passes("A norm of gradients")
        if (known := self._norms.known(p, dtype)) is not None:
            return known
        self.check_reduced("A norm")
        if p <= 0:
            # For orders that are not additive, missing gradients must not count as zeros.
            self.catch_up()
        self.answer(f"a {p:g}-norm of gradients in {dtype or 'their dtypes'}")
        local = self._norms.of(p, dtype, is_behind=self.order.is_behind)
        # Replicas have equal sums, so only the ranks of one replica count.
        rows = self.comm.collect(local, f"a {p:g}-norm of gradients")[self.copy]
        # Kept at the end, because `answer` may have reduced late requests of other ranks.
        return self._norms.keep(p, dtype, total_norms(rows, p))

    def check_reduced(self, what: str) -> None:
        """Raise if gradients of `no_sync` passes wait for a reduction."""
        if any(unit.waits for unit in self.units):
            self.catch_up()
        if waiting := [unit for unit in self.units if unit.waits]:
            raise RuntimeError(
                f"{self.mesh} {what} needs reduced gradients, but the last backward ran under no_sync() or last=False: "
                f"the gradients of {len(waiting)} unit(s), {waiting[0]} first, are not summed over all ranks. Run the "
                "last backward outside no_sync(), or pass last=True to the last pipe.step()."
            )

    def full_gradient(self, slot: Slot) -> Tensor:
        """Return the full gradient of a parameter. Collective: all-gather of its bucket; every rank must call."""
        self.leave_passes("full_tensor()")
        self.check_reduced("full_tensor()")
        self.order.barrier(f"the whole gradient of '{slot.name}'")
        tag = Tag(self.order.next_number(), slot.bucket.number, f"the gradient of '{slot.name}'")
        return slot.form.whole(slot.bucket.whole_gradient(slot.index, self.comm, tag))
