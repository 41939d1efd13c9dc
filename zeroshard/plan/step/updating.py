"""The update of a simulated rank: on the device, then elsewhere, then the parameters that are published.

Owns their order. It must not know how pieces of whole matrices follow one another (`turns.py`) nor what other memories
do (`elsewhere.py`). Needs no torch.
"""

from collections.abc import Collection, Sequence
from functools import partial
from operator import attrgetter

from zeroshard.plan.machine.hardware import Cost
from zeroshard.plan.step.clock import Clock
from zeroshard.plan.step.elsewhere import Elsewhere
from zeroshard.plan.step.rank_job import Job
from zeroshard.plan.step.storages import Storages
from zeroshard.plan.step.turns import play
from zeroshard.table.schedule import Record
from zeroshard.table.spec import UnitSpec, itemsize
from zeroshard.table.step import update_actions
from zeroshard.table.trace import Event, event_of

__all__ = ["note_arrival", "published_before", "update"]


def update(job: Job, clock: Clock, storages: Storages, elsewhere: Elsewhere, used: Collection[int]) -> None:
    """Update all parameters, and gather those that ranks keep whole.

    Args:
        used: the numbers of the buckets with gradients.
    """
    start_s, sums, clock.phase = clock.now_s, job.sums, "step"
    columns = sums.wide_bytes, sums.wide_apart_bytes, sums.moved_bytes, sums.turns
    for wide_bytes, wide_apart_bytes, moved_bytes, turns in zip(*columns, strict=True):
        wide = storages.make(wide_bytes, "transient", "", "masters in fp32")
        apart = storages.make(wide_apart_bytes, "transient", "", "masters in fp32", memory="host")
        play(turns, clock, storages, partial(_update_slices, job, clock, storages, moved_bytes))
        clock.sent["shard update"] += sum(turn.sent_bytes for turn in turns)
        storages.drop(apart)
        storages.drop(wide)
    elsewhere.update(start_s)
    (optimizers, updated), buckets = _updated(job), {b.number: b for unit in job.units for b in unit.buckets}
    pending, flat = list[tuple[UnitSpec, float]](), _publish_flat(job, clock, storages)
    for kind, number in update_actions(job.units, optimizers):
        if kind == "update":
            if number in used:
                start, stop = (bucket := buckets[number]).states
                clock.note(kind, bucket.unit, (stop - start) * itemsize(bucket.formats.master))
            continue
        if kind == "step":
            for unit, until_s in pending:
                clock.wait(unit.name, until_s)
                note_arrival(clock, unit)
            pending.clear()
            clock.tick(Event(0, "step", "step", "", 0))
            for storage in flat:
                storages.drop(storage)
            continue
        unit = job.units[number].updated(updated)
        clock.tick(event_of(unit, 0, "step", kind, Record()))
        clock.free_s["gather"] = max(clock.free_s["gather"], clock.now_s)
        if not flat and not _is_beside(job, unit):
            pending.append((unit, _publish(clock, unit)))


def published_before(job: Job, clock: Clock) -> dict[int, float]:
    """Publish what the update of the step before publishes beside this step; return when each unit arrives."""
    optimizers, updated = _updated(job)
    numbers = [number for kind, number in update_actions(job.units, optimizers) if kind == "publish"]
    return {n: _publish(clock, unit) for n in numbers if _is_beside(job, unit := job.units[n].updated(updated))}


def _updated(job: Job) -> tuple[Sequence[Collection[int]], frozenset[int]]:
    """Return the numbers of the buckets that each optimizer updates, and those of all."""
    optimizers = [one.buckets for one in job.updates]
    return optimizers, frozenset[int]().union(*optimizers)


def note_arrival(clock: Clock, unit: UnitSpec) -> None:
    """Note the wait for each published bucket."""
    for _ in filter(attrgetter("is_published"), unit.buckets):
        clock.note("wait", unit.name)


def _is_beside(job: Job, unit: UnitSpec) -> bool:
    """Whether the updated parameters of a unit arrive beside the next forward, as `Unit.publish` has them."""
    return job.wire.overlaps and job.system.publishes_beside and unit.is_whole


def _publish(clock: Clock, unit: UnitSpec) -> float:
    nbytes = sum(b.layout.full_numel * itemsize(b.formats.param) for b in unit.buckets if b.is_published)
    return clock.collect("gather", unit.name, [("gather", nbytes, "shard")])


def _publish_flat(job: Job, clock: Clock, storages: Storages) -> list[int]:
    """Gather all updated parameters at once, through flat copies, if the program does that; return these."""
    buckets = [b for unit in job.units for b in unit.buckets if b.is_published] if job.system.publishes_flat else []
    ranks = max((bucket.layout.world_size for bucket in buckets), default=1)
    if ranks == 1:
        return []
    shard_bytes = sum(b.layout.shard_numel * itemsize(b.formats.param) for b in buckets)
    # A flat copy of the shard, one tensor for each rank, and the buffer in which NCCL gathers.
    sizes = [shard_bytes] * (ranks + 1) + [shard_bytes * ranks]
    taken = [storages.make(nbytes, "transient", "", "parameters to publish") for nbytes in sizes]
    clock.wait("parameters", clock.collect("gather", "parameters", [("gather", shard_bytes * ranks, "shard")]))
    return taken


def _update_slices(job: Job, clock: Clock, storages: Storages, moved_bytes: int) -> None:
    """Update what is on the device, but for what is updated whole."""
    kernels = storages.make(job.passing_bytes[0], "transient", "", "the optimizer's kernels")
    # The norm of the gradients for clipping reads them once more, and scaling rewrites them.
    clock.compute("update", clock.kernel_s(Cost(0, float(moved_bytes))))
    storages.drop(kernels)
