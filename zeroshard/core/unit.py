"""One unit: the parameters that are gathered and reduced together, and what happens to them in order of events.

Owns the unit's buckets and the state of its gather. It decides nothing: `core/order.py` says when, `wire/comm.py` how.
"Note: a step" in `core/engine.py` has the whole.

Note: the life of a unit at stage 3
    1. released: its storage is empty, its parameters are of the raising class.
    2. `start_gather`: memory, the own shard, receives from the other ranks.
    3. `wait`: the values are there; the parameters change to the quiet class. Modules compute.
    4. `release`: the memory goes, the raising class comes back.
    5. In backward the same again, while gradients land in each bucket, local to this rank.
    6. `Reduction`, and with the next unit's reduction or at the end of the pass (at once, where ranks read each
       other's memory), `Reduction.finish`: this rank's shard of the sum is added to what is held.
Note: one sum a pass
    The bits of a sum depend on the order of its additions. So each unit is reduced once in a pass, when the gradients
    of all ranks are there, whatever the order in which ranks use units. A rank that is asked earlier says that it is
    not ready; then every rank keeps its gradients, and the unit is reduced when the pass closes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, final

import torch

from zeroshard.core.buffer import Bucket
from zeroshard.core.changes import Changes
from zeroshard.core.grads import FlatGradients, Local
from zeroshard.core.precision import LossScale
from zeroshard.core.slot import Slot, slot_of
from zeroshard.core.states import Own, Presence, Scope
from zeroshard.store.ahead import Waitable
from zeroshard.table.spec import UnitSpec
from zeroshard.torch_private import NoSubclasses, accumulator_of, is_profiling, profiled, will_run
from zeroshard.wire.comm import Comm, Pending, Tag

__all__ = ["Reduction", "Unit"]

Tensor = torch.Tensor
_is_trained = attrgetter("requires_grad")


@final
class Reduction:
    """The reduction of one unit under way.

    Args:
        is_ready: whether this rank's gradients are all there.
    """

    def __init__(self, unit: "Unit", comm: Comm, number: int, where: str, scope: Scope, *, is_ready: bool) -> None:
        self.unit, self._comm, self._number, self._scope = unit, comm, number, scope
        self._what = f"the reduction of {unit} in {where}"
        self._pending: list[tuple[Bucket, FlatGradients, Local | None, Tensor, Pending]] = []
        for bucket in unit.reducible():
            if (grads := bucket.flat) is None:
                bucket.grads.hand_over()
                bucket.grads.scope = min(bucket.grads.scope, scope)
                unit.note_overflow(bucket.grads.tensors())
                continue
            local = grads.take_local(comm.mesh.replicas) if is_ready else None
            scale = unit.scale if comm.mesh.replicas == 1 else 1.0
            own = grads.place_of_sum(local) if local else grads.own_shard()
            full, tag = local.full if local else None, Tag(number, bucket.number, self._what)
            self._pending.append((bucket, grads, local, own, comm.reduce(full, own, bucket.codec, scale, tag)))

    def finish(self) -> list[Pending] | None:
        """Add the sums to what is held, and return what gathers them where every rank needs them whole.

        None: a rank was not ready, and what was handed over is local again.
        """
        tails: list[Pending] | None = []
        for bucket, grads, local, own, pending in self._pending:
            is_ready = pending.wait()
            # What is held within this copy alone is added to there, and summed over copies as a whole.
            scope = min(grads.scope, self._scope)
            if scope is Scope.ALL:
                unit = self.unit
                is_ready = unit.reduce_copies(bucket, own, self._comm, self._number, self._what, is_ready=is_ready)
            if local is None or tails is None or not is_ready:
                tails = None
                if local is not None:
                    grads.take_back(local)
                continue
            grads.scope = scope
            grads.add_reduced(local, own)
            tails += self.unit.complete_sum(bucket, grads, own, self._comm, self._number, self._what)
        if tails is not None and self.unit.after_sum is not None:
            self.unit.after_sum(self.unit)
        return tails


@final
class Unit:
    """Parameters that travel together.

    Args:
        scale: what sums of gradients are multiplied by.
        blocks: where it is of several modules, these: it is left when a module of another unit begins.
    """

    def __init__(self, spec: UnitSpec, buckets: Sequence[Bucket], scale: float, blocks: tuple[Any, ...]) -> None:
        self.spec, self.number, self.name = spec, spec.number, spec.name
        self.buckets, self.scale, self.blocks = list(buckets), scale, blocks
        self.parameters: list[torch.nn.Parameter] = []
        self._classes: list[tuple[type[torch.nn.Parameter], type[torch.nn.Parameter]]] = []
        """Of each parameter: its class while its values are there, and while they are released."""
        self._gathered = [bucket for bucket in buckets if bucket.spec.is_gathered]
        self._known: tuple[list[tuple[bool, bool]], UnitSpec] = [], spec
        self.presence = Presence.WHOLE
        self._pending: list[Waitable] = []
        self.calls = 0
        """Calls with gradients whose backward has not come to its end."""
        self.users = 0
        """Modules that compute with the unit right now."""
        self.landed = 0
        """Gradients that came in this pass."""
        self._missing: dict[int, Tensor] = {}
        """Once one came: the parameters that got none yet in this pass, by identity, whether or not they want one."""
        self.is_read_outside = False
        """Whether code outside its modules has read its parameters, which keeps it whole to the end of that pass."""
        self.has_end_hint = False
        self.is_recomputed = False
        self.after_sum: Callable[[Unit], None] | None = None
        """Told that the sums of its gradients of a backward are there, or on their way to another memory."""
        self.loss_scale: LossScale | None = None
        self.look: Callable[[Iterable[Tensor]], list[Any]]
        """Returns what a loss scale has to know of sums of gradients."""

    def __str__(self) -> str:
        return f"unit '{self.name}'" if self.name else "the root unit"

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return self.spec.numel

    @property
    def has_local(self) -> bool:
        """Whether this rank has gradients of the unit that were not reduced yet."""
        return any(bucket.grads.has_local for bucket in self.reducible())

    @property
    def waits(self) -> bool:
        """Whether gradients of it wait for a sum over all ranks, those of parameters frozen since then included."""
        return any(b.grads.scope is Scope.COPY or b.grads.has_local for b in self.buckets)

    @property
    def is_deferred(self) -> bool:
        """Whether a sum over copies of the state was left to a later pass."""
        return any(bucket.grads.scope is Scope.COPY for bucket in self.buckets)

    @property
    def slots(self) -> list[Slot]:
        """The slots of its parameters, in registration order."""
        return [slot_of(p) for p in self.parameters]

    def described(self) -> UnitSpec:
        """Return what the unit is now: which buckets are trained and updated may change."""
        trained = self.reducible()
        if (now := [(bucket in trained, bucket.has_states) for bucket in self.buckets]) != self._known[0]:
            specs = [replace(b.spec, is_trained=t, is_updated=u) for b, (t, u) in zip(self.buckets, now, strict=True)]
            self._known = now, replace(self.spec, buckets=tuple(specs))
        return self._known[1]

    def reducible(self) -> list[Bucket]:
        """Return the buckets that hold elements and a parameter that wants gradients now; the same on every rank."""
        with NoSubclasses():  # a released parameter would answer in Python, at each event of a pass
            return [b for b in self.buckets if b.layout.full_numel and any(map(_is_trained, b.parameters))]

    # -- changes in place -----------------------------------------------------------------------------------------

    @property
    def changes(self) -> list[Changes]:
        """What user code changed in each bucket."""
        return [bucket.changes for bucket in self.buckets]

    def note_changes(self) -> None:
        """Note what was changed since the last time, where values are always there."""
        for bucket in self.buckets if self.spec.is_whole else ():
            bucket.changes.note()

    def keep_changes(self) -> None:
        """Follow the changes that ranks agreed on."""
        for bucket in self.buckets:
            if bucket.changes.values is not None:
                bucket.keep()
                bucket.changes.clear()

    def drop_changes(self) -> None:
        """Forget the changes that ranks did not agree on; a parameter that stays whole has its new value already."""
        for bucket in self.buckets:
            if not bucket.spec.is_whole:
                bucket.changes.clear()

    # -- parameters -------------------------------------------------------------------------------------------------

    def start_gather(self, comm: Comm, number: int, where: str, kind: str = "gather") -> None:
        """Begin to make the unit whole; harmless where it is (another rank asked again)."""
        for bucket in self._gathered:
            if self.presence is Presence.RELEASED:
                bucket.await_update()
                bucket.open()
            tag = Tag(number, bucket.number, f"the gather of {self} in {where}")
            self._pending.append(bucket.brought(partial(comm.gather, bucket.full, tag, kind), self.name))
        self.presence = Presence.COMING if self._pending else Presence.WHOLE

    def wait(self) -> None:
        """Return when the values are there."""
        if self.presence is Presence.COMING:
            while self._pending:
                if is_profiling():
                    with profiled("wait for the gather of", self.name):
                        self._pending[0].wait()
                else:
                    self._pending[0].wait()
                self._pending.pop(0)  # one that is interrupted is awaited again
            for bucket in self._gathered:
                bucket.changes.restore()
            self.let_read(Presence.WHOLE)

    def release(self) -> int:
        """Give the memory back, and return its bytes; a gather under way is awaited first, since others still send."""
        nbytes = 0
        self.wait()
        for bucket in self._gathered:
            bucket.changes.note()
            nbytes += bucket.close()
        if not self.spec.is_whole:
            self.let_read(Presence.RELEASED)
        return nbytes

    def rest(self) -> None:
        """Have what is whole, but not in use right now, cost as little as its memory can do."""
        for bucket in self._gathered:
            bucket.rest()

    def let_read(self, presence: Presence) -> None:
        """Change what the parameters answer to a read: their values, or an error."""
        self.presence = presence
        if len(self._classes) != len(self.parameters):
            self._classes = [slot.form.classes for slot in self.slots]
        for parameter, classes in zip(self.parameters, self._classes, strict=True):
            parameter.__class__ = classes[presence is Presence.RELEASED]

    def publish(self, comm: Comm, number: int, what: str, kind: str, *, is_forced: bool = False) -> list[Pending]:
        """Begin to gather updated parameters that are kept whole, and updated in parts.

        Args:
            is_forced: those that no optimizer updates, too.
        """
        due = [b for b in self.buckets if b.spec.is_published and (is_forced or b.has_states)]
        return [comm.gather(bucket.full, Tag(number, bucket.number, what), kind) for bucket in due]

    # -- gradients --------------------------------------------------------------------------------------------------

    @property
    def local_bytes(self) -> int:
        """Bytes of its gradients before they are reduced."""
        return sum(b.layout.full_numel * b.dtypes.grad.itemsize for b in self.reducible())

    def start_reduction(self, comm: Comm, number: int, where: str, scope: Scope, *, is_ready: bool) -> Reduction:
        """Begin to sum its gradients over ranks."""
        return Reduction(self, comm, number, where, scope, is_ready=is_ready)

    def has_landed(self) -> list[bool]:
        """Tell of each parameter whether a gradient of it came since ranks last agreed on who used what."""
        none = Own.NONE
        return [own is not none for bucket in self.buckets for own in bucket.grads.own]

    def take_used(self, flags: Iterator[bool]) -> None:
        """Take what ranks agreed on: the next flags tell of its parameters whether some rank used them."""
        for bucket in self.buckets:
            bucket.grads.take_used(flags)

    def count_landed(self, parameter: Tensor) -> bool:
        """Note that a gradient landed, and tell whether all have."""
        if not self.landed:
            self._missing = dict(zip(map(id, self.parameters), self.parameters, strict=True))
        self.landed += 1
        self._missing.pop(id(parameter), None)
        return self.has_all_landed()

    def has_all_landed(self) -> bool:
        """Tell whether every parameter that wants a gradient got one in this pass."""
        return self.landed > 0 and not any(map(_is_trained, self._missing.values()))

    def is_complete(self) -> bool:
        """Tell whether the backward pass that this thread is in will bring no more gradients of the unit."""
        waits_for = self._missing.values() if self.landed else self.parameters
        return not any(p.requires_grad and will_get_gradient(p) for p in waits_for)

    def finish_deferred(self, comm: Comm, number: int, where: str) -> list[Pending]:
        """Sum over copies what earlier passes left to this one; return what gathers it, as `Reduction.finish` does."""
        tails, what = [], f"the deferred reduction of {self} in {where}"
        for bucket in self.buckets:
            if bucket.grads.scope is Scope.COPY:
                bucket.grads.scope = Scope.ALL
                if (grads := bucket.flat) is not None:
                    self.reduce_copies(bucket, own := grads.own_shard(), comm, number, what)
                    grads.keep_shard(own)
                    tails += self.complete_sum(bucket, grads, own, comm, number, what)
        return tails

    def reduce_copies(
        self, bucket: Bucket, own: Tensor, comm: Comm, number: int, what: str, *, is_ready: bool = True
    ) -> bool:
        """Sum this rank's shard of gradients over copies, where there are several; False if a copy is not ready."""
        if comm.mesh.replicas == 1:
            return is_ready
        tag = Tag(number, bucket.number, what)
        return comm.reduce_copies(own, bucket.codec, self.scale, tag, is_ready=is_ready).wait()

    def note_overflow(self, sums: Iterable[Tensor]) -> None:
        """Note for the loss scale if one of the sums is not finite."""
        if self.loss_scale is not None:
            self.loss_scale.noted += self.look(sums)

    def complete_sum(
        self, bucket: Bucket, grads: FlatGradients, own: Tensor, comm: Comm, number: int, what: str
    ) -> list[Pending]:
        """Note what the loss scale has to know of a sum; begin to gather it where every rank needs all of it."""
        self.note_overflow(grads.parts_of(own))
        if grads.scope is Scope.COPY or not bucket.spec.updates_all or comm.mesh.shard_size == 1:
            return []
        return [comm.gather(grads.hold(), Tag(number, bucket.number, what), kind="reduce")]

    def copy_arrived(self) -> None:
        """Copy gradients that wait for one another; see `FlatGradients`."""
        for bucket in self.buckets:
            if bucket.flat is not None:
                bucket.flat.copy_arrived()

    def end_backward(self) -> None:
        """Forget what belonged to one backward pass."""
        self.copy_arrived()
        self.calls = self.landed = 0
        self.has_end_hint = self.is_recomputed = False


def will_get_gradient(parameter: Tensor) -> bool:
    """Tell whether the backward pass that this thread is in reaches `parameter`; a pass is required."""
    return will_run(accumulator_of(parameter))
