"""Gradients of a simulated rank: where each one arrives, their reduction, and the sums that stay to the end of a step.

Owns their memory and the lane of reductions. It must not know the order of a pass (`passes.py`). `core/grads.py` and
`core/unit.py` do this in the engine; read the note of the first. Needs no torch.
"""

from collections import Counter
from collections.abc import MutableMapping
from functools import partial
from typing import final

from zeroshard.plan.shape.tape import Instruction
from zeroshard.plan.step.chains import chains_of
from zeroshard.plan.step.clock import Clock, sent_of
from zeroshard.plan.step.elsewhere import Elsewhere
from zeroshard.plan.step.rank_job import Job
from zeroshard.plan.step.storages import Storages
from zeroshard.table.pool import Buffer
from zeroshard.table.spec import BLOCK_NUMEL, BucketSpec, UnitSpec, itemsize
from zeroshard.table.wires import Reducing

__all__ = ["Landing"]


@final
class Landing:
    """The gradients of one rank."""

    def __init__(self, job: Job, clock: Clock, storages: Storages, elsewhere: Elsewhere) -> None:
        self._job, self._clock, self._storages, self._elsewhere = job, clock, storages, elsewhere
        self._homes = {name: bucket for unit in job.units for bucket in unit.reduced for name in bucket.names}
        self._local: dict[int, Buffer] = {}
        """By bucket, the memory of this rank's gradients until they are reduced."""
        self._owned: dict[int, int] = {}
        """By bucket, the elements that this rank updates."""
        self._held: set[int] = set()
        """Buckets with memory for sums."""
        self._summed: set[int] = set()
        """Buckets whose sums hold the gradients of an earlier micro-batch."""
        self.used: set[int] = set()
        """Buckets with gradients in this step."""
        self._arrived: set[int] = set()
        """Buckets of a rank alone whose gradients arrive in this pass."""
        self._last_bytes = 0
        """The bytes of the gradient that arrived last, where the trace has its memory."""
        self._reducing = Reducing(job.wire, partial(storages.take, what="wire buffer"), storages.give)
        self._leaving: list[tuple[BucketSpec, bool]] = []
        """Buckets whose sums go to the host when their reduction is over, and whether nothing lies there yet."""
        self._reduced_s = 0.0
        self._under_way: list[BucketSpec] = []
        """The buckets of the last reduction, until it is finished."""
        self._chains = chains_of(job.units) if job.system.chain_bytes else {}
        """By bucket, the elements of each reduction to one rank."""
        self._later: list[tuple[str, int, str]] = []
        """Exchanges of a program that makes them after the last backward."""
        self._tails: list[BucketSpec] = []
        """Those whose sums every rank gathers, until the pass ends."""

    # -- arrival ----------------------------------------------------------------------------------------------------

    def land(self, spec: UnitSpec, one: Instruction, numbers: MutableMapping[int, int]) -> None:
        """Move a gradient to where it is added up.

        Args:
            one: names a parameter, and its tensor; or neither, for gradients of a shape's unit.
            numbers: the storages of tensors; a gradient that stays in its memory leaves them.
        """
        is_named = one.tensor >= 0
        self._last_bytes = one.nbytes if is_named else 0
        for bucket in spec.reduced if not is_named else [self._homes[one.what]] if one.what in self._homes else []:
            self.used.add(bucket.number)
            is_taken = is_named and one.is_alone and bucket.formats.param == bucket.formats.grad
            if bucket.lands_on_sums:
                self._add(bucket, one, numbers, is_taken=is_taken)
            elif bucket.adopts and is_taken and bucket.number not in self._local:
                storage, numel = numbers.pop(one.tensor), one.nbytes // itemsize(bucket.formats.param)
                self._storages.turn(storage, "transient", bucket.name, "gradients to reduce")
                self._local[bucket.number] = Buffer(numel, None, storage)
            else:
                self._begin(bucket, is_adopted=bucket.adopts and not is_named)

    def _add(self, bucket: BucketSpec, one: Instruction, numbers: MutableMapping[int, int], *, is_taken: bool) -> None:
        """Add one rank's gradient to the sum; the first one's own memory is the sum from here on, if it can be."""
        storages, sizes, is_first = self._storages, bucket.formats, bucket.number not in self._summed
        is_named = one.tensor >= 0
        self._arrived.add(bucket.number)
        if not is_named:  # the memory of all sums at once
            self._hold(bucket)
        numel, is_away = one.nbytes // itemsize(sizes.param), False
        if not bucket.row.gradients.is_on_device:
            if not is_named:  # a shape does not say which gradient it is; together they are this rank's
                owned = self._owned.get(bucket.number) or bucket.layout.owned_numel(*bucket.states)
                self._owned[bucket.number] = owned
                numel = numel * owned // bucket.layout.numel
            is_away = numel > 0
        if not is_away and (is_taken or not is_named or not is_first):
            if is_first and is_taken:
                storages.turn(numbers.pop(one.tensor), "gradients", bucket.name, one.what)
            return
        nbytes, way = numel * itemsize(sizes.grad), "gradient on its way"
        if is_named and is_first:
            storages.make(nbytes, "gradients", bucket.name, one.what, memory="host" if is_away else "device")
        if not is_away or self._job.device.is_cpu:
            # What is added in another dtype is converted; the first one is, as it is copied.
            storages.pass_by(nbytes * (sizes.param != sizes.grad and not is_first), "transient", bucket.name, way)
            return
        if is_named and one.is_alone:
            storages.turn(storage := numbers.pop(one.tensor), "transient", bucket.name, way)
        else:
            storage = storages.make(numel * itemsize(sizes.param), "transient", bucket.name, way)
        self._elsewhere.leave(bucket, nbytes, storage, is_first=is_first)

    def _begin(self, bucket: BucketSpec, *, is_adopted: bool = False) -> None:
        """Take the memory that a bucket's gradients arrive in.

        Args:
            is_adopted: whether that is the memory of a gradient that fills the bucket.
        """
        numel, dtype, what = bucket.layout.full_numel, self._job.wire.lands_as(bucket), "gradients to reduce"
        if bucket.holds_whole_gradients and bucket.number not in self._summed:
            self._hold(bucket)
        elif bucket.number in self._local:
            pass
        elif is_adopted:
            storage = self._storages.make(numel * itemsize(dtype), "transient", bucket.name, what)
            self._local[bucket.number] = Buffer(numel, None, storage)
        else:
            self._local[bucket.number] = self._storages.take(numel, dtype, bucket.name, what)

    def copy(self, spec: UnitSpec) -> None:
        """Copy a unit's gradients together where the transport has them wait; the trace has the last one's memory."""
        if self._job.wire.lands_together:
            waiting = max(0, spec.landing_bytes - self._last_bytes)
            self._storages.pass_by(waiting, "transient", spec.name, "gradients that wait")

    # -- sums -------------------------------------------------------------------------------------------------------

    def hold_kept(self) -> None:
        """Take the memory of sums that stays from step to step, as where other ranks read it in place."""
        for bucket in (bucket for unit in self._job.units for bucket in unit.reduced if self._is_kept(bucket)):
            self._hold(bucket)

    def _hold(self, bucket: BucketSpec) -> None:
        """Take the memory of sums, which stays to the end of the step."""
        if bucket.number not in self._held:
            self._held.add(bucket.number)
            owned, padding = bucket.held_gradient_bytes
            is_mapped = self._job.wire.is_in_place and bucket.lands_on_held
            make, name, memory = self._storages.make, bucket.name, bucket.row.gradients.memory
            make(owned, "gradients", name, "gradients", is_mapped=is_mapped, memory=memory)
            make(padding, "padding", name, "padding of gradients", is_mapped=is_mapped, memory=memory)

    def _is_kept(self, bucket: BucketSpec) -> bool:
        is_kept = self._job.keeps_gradients or self._job.system.keeps_gradients
        return is_kept or (self._job.wire.is_in_place and bucket.holds_whole_gradients)

    def reduce(self, spec: UnitSpec) -> None:
        """Start the reduction of a unit."""
        clock = self._clock
        self.finish_before()
        taken, summed = list[Buffer](), frozenset(self._summed)
        works: list[tuple[str, int, str]] = []
        reduced = [bucket for bucket in spec.reduced if not bucket.lands_on_sums]
        for bucket in reduced:
            self._begin(bucket)  # zeros, where no gradient arrived
            taken += [self._local.pop(bucket.number)] if bucket.number in self._local else []
            if bucket.row.gradients.is_on_device:
                self._hold(bucket)
            else:
                self._leaving.append((bucket, bucket.number not in self._summed))
            self._summed.add(bucket.number)
            nbytes = bucket.layout.full_numel * itemsize(bucket.formats.reduce)
            kind = "all-reduce" if bucket.updates_all or self._job.system.sums_everywhere else "reduce"
            sizes = (numel * itemsize(bucket.formats.reduce) for numel in bucket.layout.numels)
            if (chain := self._chains.get(bucket.number)) is None:
                works += [(kind, one, "shard") for one in self._job.system.exchanges(nbytes, sizes)]
            else:
                works += [("chain", numel * itemsize(bucket.formats.reduce), "shard") for numel in chain]
            if bucket.replicas > 1:
                shard_bytes = nbytes // bucket.layout.world_size
                works.append(("all-reduce", shard_bytes, "replicate"))
                span = self._job.spans["replicate"]
                clock.sent["replicate all-reduce"] += sent_of("all-reduce", shard_bytes, span)
            self._under_way.append(bucket)
        if self._job.system.reduces_beside or self._chains:
            self._reduced_s = clock.collect("reduce", spec.name, works)
            clock.wait("reductions", self._reduced_s * (self._job.system.piece_s > 0 or bool(self._chains)))
        else:
            self._later += works
        if self._job.wire.is_in_place:
            self._add_up()
        self._reducing.start(reduced, taken, summed)

    def _add_up(self) -> None:
        """Add up gradients of more than two ranks on the host: apart, a block at a time, as `wire/codec.py` does."""
        for bucket in self._under_way if self._job.device.is_cpu else ():
            nbytes = 4 * min(BLOCK_NUMEL, bucket.layout.shard_numel) * min(2, max(0, bucket.layout.world_size - 2))
            self._storages.pass_by(nbytes, "transient", bucket.unit, "partial sums")

    def finish(self) -> None:
        """Note that the reduction under way is finished: awaited, then summed over replicas."""
        if not self._job.wire.is_in_place:  # messages are added up once all are there
            self._add_up()
        for bucket in self._under_way:
            self._clock.note("wait", bucket.unit)
        for bucket in self._under_way:
            if bucket.replicas > 1:
                shard_bytes = bucket.layout.shard_numel * itemsize(bucket.formats.reduce)
                nbytes = sent_of("all-reduce", shard_bytes, self._job.spans["replicate"])
                self._clock.note("all-reduce", bucket.unit, nbytes)
            self._tails += [bucket] * (bucket.updates_all and bucket.layout.world_size > 1)
        self._under_way.clear()

    def finish_before(self, *, is_all: bool = False) -> None:
        """Finish the reduction before: buffers are free, and what is kept on the host goes there.

        Args:
            is_all: whether sums over replicas are finished, too, which may stay under way beside the next one.
        """
        self.finish()
        for _ in range(1 + is_all):
            self._reducing.advance()
        leaving, self._leaving = self._leaving, []
        if leaving:
            self._clock.wait("reductions", self._reduced_s)
        for bucket, is_first in leaving:
            self._hold(bucket)
            if self._job.device.is_cpu:
                continue
            nbytes = sum(bucket.held_gradient_bytes)
            storage = self._storages.make(nbytes, "transient", bucket.name, "gradients on their way")
            self._elsewhere.leave(bucket, nbytes, storage, is_first=is_first)

    def end_pass(self) -> None:
        """Wait for the reductions of a backward."""
        sums = Counter[tuple[str, str]]()
        for kind, nbytes, axis in self._later:
            sums[kind, axis] += nbytes
        self._later.clear()
        works = [(kind, nbytes, axis) for (kind, axis), nbytes in sums.items()]
        self._reduced_s = self._clock.collect("reduce", "gradients", works) if works else self._reduced_s
        self.finish_before(is_all=True)
        self._clock.wait("reductions", self._reduced_s)
        for bucket in sorted(self._tails, key=lambda bucket: bucket.number):
            self._clock.note("wait", bucket.unit)
        self._tails.clear()
        self._elsewhere.end_pass()
        self._summed |= self._arrived
        self._arrived.clear()

    def end_step(self) -> None:
        """Give back the memory of gradients, as `zero_grad()` does."""
        kept = [bucket for unit in self._job.units for bucket in unit.buckets if self._is_kept(bucket)]
        names, numbers = {bucket.name for bucket in kept}, {bucket.number for bucket in kept}
        for number, one in list(self._storages.open.items()):
            if (one.column == "gradients" or one.what == "padding of gradients") and one.unit not in names:
                self._storages.drop(number)
        self._held &= numbers
        self._summed.clear()
