"""A unit: parameters that are gathered and reduced together, and their operations.

Owns the unit's buckets and the state of its gather. `core/order.py` decides when to run operations, `wire/comm.py`
implements them. See "Note: a step" in `core/engine.py`.

Note: the life of a unit at stage 3
    1. released: its storage is empty, its parameters are of the raising class.
    2. `start_gather`: allocates memory, copies this rank's shard, receives the other shards.
    3. `wait`: the values have arrived; the parameters change to the readable class. Modules compute.
    4. `release`: frees the memory, and restores the raising class.
    5. In backward, the same again, while gradients arrive in each bucket, local to this rank.
    6. `start_reduction`, and with the next unit's reduction or at the end of the pass (at once in shared memory),
        `Reduction.finish`: adds this rank's shard of the sum to the held gradients.
Note: one sum a pass
    The bits of a sum depend on the order of its additions. So each unit is reduced once per pass, when the gradients of
    all ranks are complete, whatever the order in which ranks use units. A rank whose gradients are incomplete reports
    that it is not ready; then every rank keeps its gradients, and the unit is reduced when the pass closes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, final

import torch

from zeroshard.core.buffer import Bucket
from zeroshard.core.changes import Changes
from zeroshard.core.dtypes import LossScale
from zeroshard.core.grads import FlatGradients, Local
from zeroshard.core.slot import Slot, slot_of
from zeroshard.core.states import Own, Presence, Scope
from zeroshard.store.ahead import Waitable
from zeroshard.table.spec import UnitSpec
from zeroshard.torch_private import NoSubclasses, accumulator_of, has_compiled, is_profiling, profiled, will_run
from zeroshard.wire.comm import Comm, Pending, Tag

__all__ = ["Reduction", "Unit", "advanced"]

Tensor = torch.Tensor
_is_trained = attrgetter("requires_grad")
Summed = tuple[Bucket, FlatGradients, Local | None, Tensor, Pending]
"""A bucket, its gradients, this rank's (None if it was not ready), the place of its shard of the sum, and the sum."""


@final
@dataclass(frozen=True)
class Reduction:
    """The reduction of one unit under way; `Unit.start_reduction` launches it.

    Args:
        scope: the ranks over which gradients are summed.
        where: the communicator, the number of the pass, and a text for errors.
    """

    unit: "Unit"
    scope: Scope
    where: tuple[Comm, int, str]
    sums: Sequence[Summed]
    copies: list[tuple[Scope, Pending]] = field(default_factory=list)
    """For each sum, once it is waited for: its scope, and the sum over replicas."""

    def advance(self) -> bool:
        """Wait for the sums within this replica and start those over replicas; return whether to finish at once.

        On a device, the sums over replicas have the computation of the next unit beside them.
        """
        if self.copies:
            return True
        comm, are_ready = self.where[0], list[bool]()
        for bucket, _, _, _, pending in self.sums:
            are_ready.append(pending.wait())
            bucket.tell("wait")
        for (bucket, grads, _, own, _), is_ready in zip(self.sums, are_ready, strict=True):
            # Sums within this replica are added to the held sums, and the total is summed over replicas.
            scope = min(grads.scope, self.scope)
            pending = Pending(partial(bool, is_ready))
            if scope is Scope.ALL:
                pending = self.unit.reduce_copies(bucket, own, *self.where, is_ready=is_ready)
            self.copies.append((scope, pending))
        if not (comm.wire.overlaps and comm.mesh.replicas > 1):
            return True
        for _, grads, local, _, _ in self.sums:
            grads.drop_full(local)
        return not self.copies

    def finish(self) -> list[Pending] | None:
        """Add the sums to the held gradients, and return the gathers of sums that every rank needs in full.

        Returns None if a rank was not ready; the gradients are then local again.
        """
        self.advance()
        tails: list[Pending] | None = []
        for (bucket, grads, local, own, _), (scope, copies) in zip(self.sums, self.copies, strict=True):
            is_ready = copies.wait()
            if local is None or tails is None or not is_ready:
                tails = None
                if local is not None:
                    grads.take_back(local)
                continue
            grads.scope = scope
            grads.add_reduced(local, own)
            tails += self.unit.complete_sum(bucket, grads, own, *self.where)
        return tails


def advanced(reductions: list[Reduction], before: "Unit | None") -> list[Reduction]:
    """Advance reductions; return those to finish, and leave those that stay under way beside the one of `before`."""
    is_other = before is not None and all(one.unit is not before for one in reductions)
    ended, staying = list[Reduction](), list[Reduction]()
    for one in reductions:
        (ended if one.advance() or not is_other else staying).append(one)
    reductions[:] = staying
    return ended


@final
class Unit:
    """Parameters that are gathered and reduced together.

    Args:
        scale: factor of sums of gradients.
        blocks: the modules, for a unit of several modules, which is left when a module of another unit begins.
    """

    def __init__(self, spec: UnitSpec, buckets: Sequence[Bucket], scale: float, blocks: tuple[Any, ...]) -> None:
        self.spec, self.number, self.name = spec, spec.number, spec.name
        self.buckets, self.scale, self.blocks = list(buckets), scale, blocks
        self.parameters: list[torch.nn.Parameter] = []
        self._classes: list[tuple[type[torch.nn.Parameter], type[torch.nn.Parameter]]] = []
        """For each parameter: its class while gathered, and its class while released."""
        self._gathered = [bucket for bucket in buckets if bucket.spec.is_gathered]
        self._known: tuple[list[tuple[bool, bool]], UnitSpec] = [], spec
        self.presence = Presence.WHOLE
        self._pending: list[Waitable] = []
        self._coming: list[Bucket] = []
        """The buckets whose values are being received."""
        self.calls = 0
        """Number of calls with gradients whose backward has not ended."""
        self.users = 0
        """Number of modules that currently compute with the unit."""
        self.landed = 0
        """Number of gradients that arrived in this pass."""
        self._missing: dict[int, Tensor] = {}
        """After the first gradient: the parameters without a gradient in this pass, by identity."""
        self.is_read_outside = False
        """Whether code outside its modules has read its parameters, which keeps it gathered to the end of the pass."""
        self.has_end_hint = False
        self.recomputed = 0
        """Number of recomputed calls, of which the graph has plain views of parameters, before the end of each."""
        self.loss_scale: LossScale | None = None
        self.look: Callable[[Iterable[Tensor]], list[Any]]
        """Checks sums of gradients for a loss scale."""

    def __str__(self) -> str:
        return f"unit '{self.name}'" if self.name else "the root unit"

    def __repr__(self) -> str:
        return f"Unit({self.name or '(root)'!r}, {self.numel:,} parameters, {len(self.buckets)} buckets)"

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return self.spec.numel

    @property
    def has_local(self) -> bool:
        """Whether this rank has unreduced gradients of the unit."""
        return any(bucket.grads.has_local for bucket in self.reducible())

    @property
    def waits(self) -> bool:
        """Whether gradients wait for a sum over all ranks, including those of parameters frozen since then."""
        return any(b.grads.scope is Scope.COPY or (b.layout.full_numel and b.grads.has_local) for b in self.buckets)

    @property
    def is_deferred(self) -> bool:
        """Whether a sum over replicas was deferred to a later pass."""
        return any(bucket.grads.scope is Scope.COPY for bucket in self.buckets)

    @property
    def slots(self) -> list[Slot]:
        """The slots of its parameters, in registration order."""
        return [slot_of(p) for p in self.parameters]

    def described(self) -> UnitSpec:
        """Return the current specification of the unit: trained and updated buckets may change."""
        trained = self.reducible()
        if (now := [(bucket in trained, bucket.has_states) for bucket in self.buckets]) != self._known[0]:
            specs = [replace(b.spec, is_trained=t, is_updated=u) for b, (t, u) in zip(self.buckets, now, strict=True)]
            self._known = now, replace(self.spec, buckets=tuple(specs))
        return self._known[1]

    def reducible(self) -> list[Bucket]:
        """Return the non-empty buckets with a trainable parameter; equal on every rank."""
        with NoSubclasses():  # a released parameter would run Python code at each event of a pass
            return [b for b in self.buckets if b.layout.full_numel and any(map(_is_trained, b.parameters))]

    # -- changes in place -----------------------------------------------------------------------------------------

    @property
    def changes(self) -> list[Changes]:
        """The changes of user code in each bucket."""
        return [bucket.changes for bucket in self.buckets]

    def note_changes(self) -> None:
        """Record changes since the last call, for parameters that are never released."""
        for bucket in self.buckets if self.spec.is_whole else ():
            bucket.changes.note()

    def keep_changes(self) -> None:
        """Apply the changes that ranks agreed on."""
        for bucket in self.buckets:
            if bucket.changes.values is not None:
                bucket.keep()
                bucket.changes.clear()

    def drop_changes(self) -> None:
        """Drop the changes that ranks did not agree on; replicated parameters already have the new values."""
        for bucket in self.buckets:
            if not bucket.spec.is_whole:
                bucket.changes.clear()

    # -- parameters -------------------------------------------------------------------------------------------------

    def start_gather(self, comm: Comm, number: int, where: str, kind: str = "gather") -> None:
        """Start to gather the unit; no effect if it is gathered (another rank requested it again)."""
        self._coming = self._gathered
        for bucket in self._gathered:
            if self.presence is Presence.RELEASED:
                bucket.await_update()
                bucket.open()
            tag = Tag(number, bucket.number, f"the gather of {self} in {where}")
            self._pending.append(bucket.brought(partial(comm.gather, bucket.full, tag, kind), self.name))
        self.presence = Presence.COMING if self._pending else Presence.WHOLE

    def wait(self) -> None:
        """Wait for the values."""
        if self.presence is Presence.COMING:
            while self._pending:
                if is_profiling():
                    with profiled("wait for the gather of", self.name):
                        self._pending[0].wait()
                else:
                    self._pending[0].wait()
                self._pending.pop(0)  # an interrupted wait is repeated
            for bucket in self._coming:
                bucket.tell("wait")
                bucket.changes.restore()
                bucket.arriving = None
            self.let_read(Presence.WHOLE)

    @property
    def is_coming(self) -> bool:
        """Whether updated values of a unit that stays whole are under way."""
        return self.presence is Presence.COMING and self.spec.is_whole

    def release(self) -> int:
        """Free the memory, and return its bytes; a pending gather is awaited first, because others still send."""
        nbytes = 0
        self.wait()
        for bucket in self._gathered:
            bucket.changes.note()
            nbytes += bucket.close()
        if not self.spec.is_whole:
            self.let_read(Presence.RELEASED)
        return nbytes

    def hold(self) -> int:
        """Have reads outside passes raise, as of a released unit, unless its cells keep it; return its number.

        What such a read returns would outlive the memory of the unit.
        """
        self.wait()
        if self.spec.kept_until == "use":
            self._coming = []
            self.let_read(Presence.COMING)
        return self.number

    def rest(self) -> None:
        """Minimize the memory of a gathered unit that is not in use."""
        for bucket in self._gathered:
            bucket.rest()

    def let_read(self, presence: Presence) -> None:
        """Change the result of a read of the parameters: values, or an error."""
        if presence is not Presence.WHOLE:  # otherwise at the end, so that a wait repeats an interrupted change
            self.presence = presence
        if len(self._classes) != len(self.parameters):
            self._classes = [slot.form.classes for slot in self.slots]
        for parameter, classes in zip(self.parameters, self._classes, strict=True):
            parameter.__class__ = classes[presence is not Presence.WHOLE]
        self.presence = presence

    def publish(self, comm: Comm, number: int, what: str, kind: str, *, is_forced: bool = False) -> list[Pending]:
        """Start to gather updated parameters that are replicated and updated in parts.

        Args:
            is_forced: include parameters without an optimizer.

        Returns: what to wait for; nothing where computation overlaps, and reads of the parameters wait. Compiled code
        reads parameters where no class is asked.
        """
        due = [b for b in self.buckets if b.spec.is_published and (is_forced or b.has_states)]
        pending = [comm.gather(bucket.full, Tag(number, bucket.number, what), kind) for bucket in due]
        if is_forced or not pending or not (comm.wire.overlaps and self.spec.is_whole) or has_compiled():
            return pending
        self._coming, self._pending = due, [*pending]
        for bucket in due:
            bucket.arriving = self.wait
        self.let_read(Presence.COMING)
        return []

    # -- gradients --------------------------------------------------------------------------------------------------

    @property
    def local_bytes(self) -> int:
        """Bytes of unreduced gradients."""
        return sum(b.layout.full_numel * b.dtypes.grad.itemsize for b in self.reducible())

    def start_reduction(self, comm: Comm, number: int, where: str, scope: Scope, *, is_ready: bool) -> Reduction:
        """Start to sum its gradients over ranks.

        Args:
            is_ready: whether this rank's gradients are complete.
        """
        what, sums = f"the reduction of {self} in {where}", list[Summed]()
        for bucket in self.reducible():
            if (grads := bucket.flat) is None:
                bucket.grads.hand_over()
                bucket.grads.scope = min(bucket.grads.scope, scope)
                if self.loss_scale is not None:
                    bucket.grads.landing.wait()
                    self.note_overflow(bucket.grads.tensors())
                continue
            local = grads.take_local(comm.mesh.replicas) if is_ready else None
            scale = self.scale if comm.mesh.replicas == 1 else 1.0
            own = local.place if local else grads.own_shard()
            full, tag = local.full if local else None, Tag(number, bucket.number, what)
            sums.append((bucket, grads, local, own, comm.reduce(full, own, bucket.codec, scale, tag)))
        return Reduction(self, scope, (comm, number, what), sums)

    def has_landed(self) -> list[bool]:
        """Return for each parameter whether a gradient arrived since ranks last agreed on used parameters."""
        none = Own.NONE
        return [own is not none for bucket in self.buckets for own in bucket.grads.own]

    def take_used(self, flags: Iterator[bool]) -> None:
        """Apply the agreed flags: for each parameter, whether any rank used it."""
        for bucket in self.buckets:
            bucket.grads.take_used(flags)

    def count_landed(self, parameter: Tensor) -> bool:
        """Count a gradient, and return whether all gradients have arrived."""
        if not self.landed:
            self._missing = dict(zip(map(id, self.parameters), self.parameters, strict=True))
        self.landed += 1
        self._missing.pop(id(parameter), None)
        return self.has_all_landed()

    def has_all_landed(self) -> bool:
        """Return whether every trainable parameter has a gradient in this pass."""
        return self.landed > 0 and not any(map(_is_trained, self._missing.values()))

    def is_complete(self) -> bool:
        """Return whether the backward pass of this thread will produce no more gradients of the unit."""
        waits_for = self._missing.values() if self.landed else self.parameters
        return not any(p.requires_grad and will_get_gradient(p) for p in waits_for)

    def finish_deferred(self, comm: Comm, number: int, where: str) -> list[Pending]:
        """Run the deferred sums over replicas; return their gathers, as `Reduction.finish` does."""
        tails, what = [], f"the deferred reduction of {self} in {where}"
        for bucket in self.buckets:
            if bucket.grads.scope is Scope.COPY:
                bucket.grads.scope = Scope.ALL
                if (grads := bucket.flat) is not None:
                    self.reduce_copies(bucket, own := grads.own_shard(), comm, number, what).wait()
                    grads.keep_shard(own)
                    tails += self.complete_sum(bucket, grads, own, comm, number, what)
        return tails

    def reduce_copies(
        self, bucket: Bucket, own: Tensor, comm: Comm, number: int, what: str, *, is_ready: bool = True
    ) -> Pending:
        """Start to sum this rank's shard of gradients over replicas, if any; messages of hosts are waited for.

        The wait returns False if a replica is not ready.
        """
        if comm.mesh.replicas == 1:
            return Pending(partial(bool, is_ready))
        tag, before = Tag(number, bucket.number, what), comm.sent_bytes["replicate"]
        pending = comm.reduce_copies(own, bucket.codec, self.scale, tag, is_ready=is_ready)
        if not comm.wire.overlaps:
            pending = Pending(partial(bool, pending.wait()))
        bucket.tell("all-reduce", comm.sent_bytes["replicate"] - before)
        return pending

    def note_overflow(self, sums: Iterable[Tensor]) -> None:
        """Record for the loss scale whether a sum is not finite."""
        if self.loss_scale is not None:
            self.loss_scale.noted += self.look(sums)

    def complete_sum(
        self, bucket: Bucket, grads: FlatGradients, own: Tensor, comm: Comm, number: int, what: str
    ) -> list[Pending]:
        """Check a sum for the loss scale, and start to gather it if every rank needs the full sum."""
        self.note_overflow(() if self.loss_scale is None else grads.parts_of(own))
        if grads.scope is Scope.COPY or not bucket.spec.updates_all or comm.mesh.shard_size == 1:
            return []
        return [comm.gather(grads.hold(), Tag(number, bucket.number, what), kind="reduce")]

    def copy_arrived(self, *, is_sent: bool = False) -> None:
        """Copy gradients that wait for the completion of the unit; see `FlatGradients`."""
        for bucket in self.buckets:
            if bucket.flat is not None:
                bucket.flat.copy_arrived(is_sent=is_sent)

    def end_backward(self) -> None:
        """Reset the state of one backward pass."""
        self.copy_arrived()
        for bucket in self.buckets:
            bucket.grads.landing.end_pass()
        self.landed = 0
        self.has_end_hint, self.recomputed = False, 0


def will_get_gradient(parameter: Tensor) -> bool:
    """Return whether the current backward pass of this thread reaches `parameter`."""
    return will_run(accumulator_of(parameter))
