"""Training state in memory of the host and in files, in the step of a simulated rank: copies, and the update there.

Owns what moves between memories, and when. It must not know passes or the update on the device. Pieces and lanes are
those of `offload_times.py`; read it first. Needs no torch.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple, final

from zeroshard.describe.offload import written_bytes
from zeroshard.plan.step.clock import Clock
from zeroshard.plan.step.offload_times import Work, bring_ahead, play_update
from zeroshard.plan.step.rank_job import Job
from zeroshard.plan.step.staging import half_bytes, piece_numel
from zeroshard.plan.step.storages import Storages
from zeroshard.table.cells import Cell
from zeroshard.table.spec import BucketSpec, UnitSpec, itemsize

__all__ = ["Elsewhere"]

MOST_PIECES: Final = 64
"""Of a bucket in files that are played one by one; more of them change a step by less than one of them takes."""


class _Left(NamedTuple):
    """Gradients of a bucket on their way to the host: its number, their memory on the device, when they are there."""

    bucket: int
    storage: int
    left_s: float


@final
class Elsewhere:
    """The traffic of one rank between its device and other memories.

    Args:
        carried: units whose update on the host an earlier step left, with the seconds until it ends.
    """

    def __init__(self, job: Job, clock: Clock, storages: Storages, carried: Mapping[int, float]) -> None:
        self._job, self._clock, self._storages = job, clock, storages
        self._is_cpu = job.device.is_cpu
        self._updating = dict(carried)
        places = {b.row.gradients.place for unit in job.units for b in unit.reduced} if not self._is_cpu else ()
        self._unstocked = [place for place in places if place.staging_bytes]
        self._leaving = deque[_Left]()

    def carried(self) -> Mapping[int, float]:
        """Return when the updates that continue after the step end, by unit, in seconds from its end."""
        return {unit: ready_s - self._clock.now_s for unit, ready_s in self._updating.items()}

    # -- parameters -------------------------------------------------------------------------------------------------

    def await_update(self, spec: UnitSpec) -> None:
        """Wait for the update of a unit that the host has not finished, and bring it to the device."""
        if spec.number not in self._updating:
            return
        clock = self._clock
        clock.wait(f"the update of {spec.name}", self._updating.pop(spec.number), is_offload=True)
        works = [self._work_of(b)._replace(update_s=0.0) for b in spec.buckets if self._is_early(b)]
        lanes = clock.lanes_from(clock.now_s)
        arrived_s = play_update([work for work in works if work.back_s], lanes)
        clock.take_over(lanes)
        clock.wait(f"parameters of {spec.name} on the bus", arrived_s, is_offload=True)

    def bring(self, spec: UnitSpec) -> float:
        """Begin to copy offloaded parameters to the device in a thread; return when they have arrived."""
        job, clock, arrived_s = self._job, self._clock, 0.0
        for bucket in spec.buckets:
            cell, nbytes = bucket.row.parameters, _numel_away(bucket) * itemsize(bucket.formats.param)
            disk_s = self._disk_s(cell, nbytes)
            if not nbytes or (self._is_cpu and not disk_s):
                continue
            if disk_s:
                clock.note("read", bucket.unit, nbytes)
            lanes = clock.lanes_from(clock.now_s)
            copy_s = 0.0 if self._is_cpu else job.device.copy_s(nbytes)
            copies = max(1, -(-nbytes // half_bytes(cell.place)))
            work = Work(bucket.name, 0.0, job.device.host_s(2 * nbytes, job.host_ranks), copy_s, copies, disk_s)
            arrived_s = max(arrived_s, bring_ahead(work, lanes))
            clock.take_over(lanes)
            if not self._is_cpu:
                clock.move("copy in", bucket.unit, nbytes, "parameters from the host")
            elif bucket.layout.world_size > 1:
                # On a CPU with several ranks, the program waits before it starts the gather.
                clock.wait(f"parameters of {spec.name} in the file", arrived_s, is_offload=True)
        return arrived_s

    # -- gradients --------------------------------------------------------------------------------------------------

    def stock(self) -> None:
        """Make the buffers through which gradients leave, and which stay, if they are not there yet."""
        while self._unstocked:
            place = self._unstocked.pop()
            self._storages.make(2 * half_bytes(place), "transient", "", "buffers of gradients that leave")

    def leave(self, bucket: BucketSpec, nbytes: int, storage: int, *, is_first: bool) -> None:
        """Begin to move gradients out; what lies there already comes to the device before, and is added to.

        The memory of two buckets may be on its way; the compute lane waits for that of the one before them.

        Args:
            storage: the memory of the gradients on the device.
        """
        clock, way, number = self._clock, self._leaving, bucket.number
        last = next((one.bucket for one in reversed(way) if one.bucket != number), number)
        for one in [one for one in way if one.bucket not in (number, last)]:
            clock.wait("gradients on the bus", one.left_s, is_offload=True)
            self._storages.drop(one.storage)
            way.remove(one)
        self.stock()
        if not is_first:
            clock.move("copy in", bucket.unit, nbytes, "gradients from the host")
        clock.move("copy out", bucket.unit, nbytes, "gradients to the host")
        pieces = max(1, -(-nbytes // half_bytes(bucket.row.gradients.place)))
        left_s = clock.leave(f"gradients of {bucket.name}", nbytes, pieces, is_added=not is_first)
        way.append(_Left(number, storage, left_s))

    def end_pass(self) -> None:
        """Give back the memory of gradients on their way, which the allocator uses again soon."""
        while self._leaving:
            self._storages.drop(self._leaving.popleft().storage)

    # -- the update -------------------------------------------------------------------------------------------------

    def update(self, start_s: float) -> None:
        """Update what is in other memories, beside the update on the device, which began at `start_s`."""
        job, clock, lanes = self._job, self._clock, self._clock.lanes_from(start_s)
        device, buckets = job.device, [b for unit in job.units for b in unit.buckets if b.is_trained]
        here, away, copied, held_bytes = list[BucketSpec](), list[BucketSpec](), [], 0
        for bucket in buckets:
            (here if bucket.row.states.is_on_device else away).append(bucket)
        for bucket in away:
            # Gradients that lie on the device are copied for the update of states elsewhere.
            is_copied, size = bucket.row.gradients.is_on_device and not self._is_cpu, itemsize(bucket.formats.master)
            held_bytes += (not is_copied) * sum(bucket.held_gradient_bytes)
            nbytes = is_copied * bucket.layout.owned_numel(*bucket.states) * size
            for start, stop in bucket.layout.parts(*bucket.states) if is_copied else ():
                clock.move("copy out", bucket.unit, (stop - start) * size, "gradients to the host")
            what = "gradients for the update"
            copied.append(self._storages.make(nbytes, "transient", bucket.name, what, memory="host"))
            lanes.now_s = lanes.run("out", device.copy_s(nbytes), f"gradients of {bucket.name}")
        # Whether gradients are finite, and the norm that clips them: each reads all of them.
        read_bytes = 0 if self._is_cpu else 2 * held_bytes
        lanes.now_s = max(lanes.now_s, clock.free_s["out"] if read_bytes else 0.0)
        lanes.now_s = lanes.run("host", device.host_s(read_bytes, job.host_ranks), "norms of gradients")
        arrived_s = play_update([self._work_of(bucket) for bucket in away if not self._is_early(bucket)], lanes)
        for bucket in filter(_numel_away, here):
            # Parameters with masters on the device are copied to their memory.
            nbytes = _numel_away(bucket) * itemsize(bucket.formats.param)
            what = f"parameters of {bucket.name}"
            if not self._is_cpu:
                clock.note("copy out", bucket.unit, nbytes)
            if written_s := self._disk_s(bucket.row.parameters, nbytes):
                clock.note("write", bucket.unit, nbytes)
            lanes.now_s = lanes.run("out", 0.0 if self._is_cpu else device.copy_s(nbytes), what)
            lanes.now_s = lanes.run("write", written_s, what)
        began_s = lanes.now_s
        for unit in job.units:
            for bucket in filter(self._is_early, unit.buckets):
                # In a thread that continues after the step: parameters elsewhere are rounded there.
                work = self._work_of(bucket, is_there=True)
                lanes.run("host", work.update_s + work.round_s, f"update of {bucket.name}", not_before_s=began_s)
                self._updating[unit.number] = clock.free_s["host"]
        clock.take_over(lanes)
        clock.wait("the update elsewhere", max(arrived_s, lanes.now_s), is_offload=True)
        for number in copied:
            self._storages.drop(number)

    def _disk_s(self, cell: Cell, nbytes: int) -> float:
        """Return how long a read or write of values of a cell takes; 0 in memory."""
        return self._job.device.disk_s(nbytes, self._job.host_ranks) if cell.is_in_file else 0.0

    def _is_early(self, bucket: BucketSpec) -> bool:
        """Return whether the host updates a bucket after the step; a gather before each use waits for it."""
        is_known = self._job.is_early and bucket.formats.state == bucket.formats.master
        return bucket.can_update_late and is_known and not self._is_cpu

    def _work_of(self, bucket: BucketSpec, *, is_there: bool | None = None) -> Work:
        """Return the update of a bucket's part in another memory.

        Args:
            is_there: round only what lies in that memory between uses; None for all.
        """
        job, sizes, cell = self._job, bucket.formats, bucket.row.states
        start, stop = bucket.states
        numel, sharing = stop - start, job.host_ranks
        there = _numel_away(bucket)
        sent_bytes = 0 if self._is_cpu or is_there else (numel - there) * itemsize(sizes.param)
        rounded = there if is_there else numel - there if self._is_early(bucket) else numel
        # Masters that are the parameters themselves are not rounded.
        rounded_bytes = rounded * bucket.has_masters * (itemsize(sizes.master) + itemsize(sizes.param))
        updates = [one for one in job.updates if bucket.number in one.kept]
        kept = max((one.kept[bucket.number] for one in updates), default=0)
        most = max((max(one.kept.values()) for one in updates), default=0)
        is_moved = not (self._is_cpu or is_there or there)
        disk_s = self._disk_s(cell, numel * (itemsize(sizes.master) + kept * itemsize(sizes.state)))
        step = piece_numel(bucket, most) if disk_s else numel
        for piece in (min(step, numel - start) for start in range(0, numel, max(1, step))):
            updated = [itemsize(sizes.master), *[itemsize(sizes.state)] * kept] * (disk_s > 0)
            for kind, moved in (("read", updated), ("write", [*updated, written_bytes(bucket)])):
                for size in filter(None, moved):
                    self._clock.note(kind, bucket.unit, piece * size)
            self._clock.move(
                "copy in", bucket.unit, piece * itemsize(sizes.param) * is_moved, "parameters from the host"
            )
        return Work(
            bucket.name,
            job.device.host_s(job.sums.moved_apart_bytes.get(bucket.number, 0), sharing),
            job.device.host_s(rounded_bytes, sharing),
            job.device.copy_s(sent_bytes),
            max(1, -(-sent_bytes // half_bytes(cell.place))),
            disk_s,
            min(MOST_PIECES, -(-numel // piece_numel(bucket, most))) if disk_s else 0,
            job.device.disk_s(there * written_bytes(bucket), sharing),
        )


def _numel_away(bucket: BucketSpec) -> int:
    """Return how many of the parameters that a rank keeps are off the device between uses."""
    return bucket.parameters[1] - bucket.parameters[0] - (bucket.here[1] - bucket.here[0])
