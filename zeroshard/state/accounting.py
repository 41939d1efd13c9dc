"""Bytes: what a rank holds, what it will hold, what a step sends.

Owns the sums behind `zero.memory()` and `zero.traffic()`. Measured numbers come from the tensors that are there,
predicted ones from layouts, the residency row and the schedule alone.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import final

import torch

from zeroshard.core import schedule
from zeroshard.core.backends import SHOWN_NUMEL
from zeroshard.core.buffer import Bucket
from zeroshard.core.comm import Comm
from zeroshard.core.engine import Engine
from zeroshard.core.layout import choose_buffer
from zeroshard.core.optimizer import ShardedOptimizer, is_cut
from zeroshard.core.parameter import slot_of
from zeroshard.core.trace import Memory
from zeroshard.core.unit import Unit

__all__ = ["measure", "predict_step_bytes"]

Buffer = tuple[int, torch.dtype, bool]
"""A buffer: elements, dtype, and whether it is a gradient of autograd's that serves once, and is not pooled."""


def measure(engine: Engine, optimizers: Sequence[ShardedOptimizer]) -> Memory:
    """Return the bytes held now, held at most, and predicted, by column."""
    buckets = [bucket for unit in engine.units for bucket in unit.buckets]
    parameters, padding = _owned([(b, b.resident_range, b.dtype) for b in buckets])
    held_masters, spare = _owned_masters(buckets)
    gradients, more = (sum(column) for column in zip((0, 0), *(b.grads.nbytes for b in buckets), strict=True))
    states, counters = _count_states(optimizers)
    now = {
        "parameters": parameters,
        "gradients": gradients,
        "states": states + held_masters,
        "padding": padding + spare + more + counters,
        "transient": engine.ledger.now["transient"],
    }
    for column, nbytes in now.items():
        engine.ledger.note(column, nbytes)
    return Memory(now, {column: engine.ledger.peak[column] for column in now}, _predict(engine, optimizers, buckets))


def predict_step_bytes(units: Sequence[Unit]) -> int:
    """Return what this rank gathers, reduces and publishes in a step with one micro-batch.

    Source: Rajbhandari et al. 2020, section 7.
    """
    gathers = 2 * any(not unit.is_whole for unit in units)
    return sum(u.sent_bytes("gather") * gathers + u.sent_bytes("reduce") + u.sent_bytes("publish") for u in units)


def _predict(engine: Engine, optimizers: Sequence[ShardedOptimizer], buckets: Sequence[Bucket]) -> dict[str, int]:
    trained = [bucket for unit in engine.units for bucket in unit.reducible()]
    parameters, padding = _owned([(b, b.resident_range, b.dtype) for b in buckets])
    held_masters, spare = _owned_masters(buckets)
    gradients, more = _owned([(b, b.grads.range, b.dtypes.grad) for b in trained])
    states = counters = wide_bytes = 0
    for one in optimizers:
        wide_bytes = max(wide_bytes, sum(m.numel() * _state_itemsize(m) for m in one.masters if _is_widened(m)))
        per_element, counter = one.state_cost or (0, 0)
        masters = [m for m in one.masters if any(slot_of(m).bucket is b for b in trained)]
        states += per_element * sum(m.numel() * _state_itemsize(m) for m in masters)
        counters += counter * len(masters)
    return {
        "parameters": parameters,
        "gradients": gradients,
        "states": states + held_masters,
        "padding": padding + spare + more + counters,
        "transient": _predict_transient(engine.units, engine.comm, wide_bytes),
    }


def _predict_transient(units: Sequence[Unit], comm: Comm, wide_bytes: int) -> int:
    """Return the most bytes of whole units, gradients on their way and wire buffers.

    Args:
        wide_bytes: of masters while they are updated in fp32, when no unit is whole.
    """
    full = tuple(unit.full_bytes for unit in units)
    passes = schedule.plain_marks(len(units))
    whole = max(wide_bytes, *(schedule.peak_units(schedule.replay(record, marks), full) for record, marks in passes))
    if comm.mesh.shard_size == 1:
        return whole
    pool, root, others = _Pool(), units[0], list(reversed(units[1:]))
    most_bytes = -1
    while pool.most_bytes > most_bytes:  # a later step may find the buffers of an earlier one in other places
        most_bytes = pool.most_bytes
        # The root's gradients land first and are reduced last.
        of_root = pool.take(_stages(root))
        before: list[Buffer] = []
        for unit in [*others, root]:
            taken = of_root if unit is root else pool.take(_stages(unit))
            pool.give(before)  # the reduction before this one is finished before this one starts
            before = taken + pool.take(_wires(unit, comm))
            if comm.is_in_place:
                pool.give(before)
                before = []
        pool.give(before)
    return whole + pool.most_bytes


@final
class _Pool:
    """What `core/buffer.py` pools, in integers."""

    def __init__(self) -> None:
        self.most_bytes = self._bytes = 0
        self._free: dict[torch.dtype, list[int]] = defaultdict(list)

    def take(self, wanted: Sequence[Buffer]) -> list[Buffer]:
        """Return a buffer for each that is wanted."""
        taken = []
        for numel, dtype, is_adopted in wanted:
            free = self._free[dtype]
            place, replaced = (None, None) if is_adopted else choose_buffer(free, numel)
            if replaced is not None:
                self._bytes -= free.pop(replaced) * dtype.itemsize
            if place is None:
                self._bytes += numel * dtype.itemsize
            self.most_bytes = max(self.most_bytes, self._bytes)
            taken.append((numel if place is None else free.pop(place), dtype, is_adopted))
        return taken

    def give(self, buffers: Sequence[Buffer]) -> None:
        """Take buffers back."""
        for numel, dtype, is_adopted in buffers:
            if is_adopted:
                self._bytes -= numel * dtype.itemsize
            else:
                self._free[dtype].append(numel)


def _stages(unit: Unit) -> list[Buffer]:
    """Return the buffers that the unit's gradients land in."""
    sharded = [bucket for bucket in unit.reducible() if not bucket.grads.is_whole]
    return [(b.layout.full_numel, b.dtypes.grad, b.grads.adopts) for b in sharded]


def _wires(unit: Unit, comm: Comm) -> list[Buffer]:
    """Return the pooled buffers of the unit's reduction."""
    wires: list[Buffer] = []
    for bucket in unit.reducible():
        shard, dtypes, mesh = bucket.layout.shard_numel, bucket.dtypes, comm.mesh
        if not comm.is_in_place:
            is_rounded = dtypes.reduce != dtypes.grad
            wires += [(shard, dtypes.reduce, False)] * (mesh.shard_size - 1) * (1 + is_rounded)
        elif bucket.grads.adopts:
            wires.append((mesh.shard_size * min(shard, SHOWN_NUMEL), dtypes.grad, False))
        wires += [(shard // mesh.replicas, dtypes.reduce, False)] * (mesh.replicas - 1)
        if mesh.replicas > 1 and bucket.grads.is_whole:
            # The sum of one copy lies apart until the other copies have theirs.
            wires.append((shard, dtypes.grad, False))
    return wires


def _owned(parts: Sequence[tuple[Bucket, tuple[int, int], torch.dtype]]) -> tuple[int, int]:
    """Return the bytes of ranges of buckets, held in some dtype, as (of parameters, padding)."""
    owned = total = 0
    for bucket, (start, stop), dtype in parts:
        owned += bucket.layout.owned_numel(start, stop) * dtype.itemsize
        total += (stop - start) * dtype.itemsize
    return owned, total - owned


def _state_itemsize(master: torch.Tensor) -> int:
    """Return the bytes of a state's element: as the master while it is updated."""
    return torch.float32.itemsize if _is_widened(master) else master.itemsize


def _is_widened(master: torch.Tensor) -> bool:
    return slot_of(master).bucket.dtypes.is_stochastic


def _owned_masters(buckets: Sequence[Bucket]) -> tuple[int, int]:
    """Return the bytes of master weights that are kept apart, as (of parameters, padding)."""
    return _owned([(b, b.masters_range, b.dtypes.master) for b in buckets if b.has_masters])


def _count_states(optimizers: Sequence[ShardedOptimizer]) -> tuple[int, int]:
    """Return the bytes of states as (one element for each of a slice, counters)."""
    states = counters = 0
    for one in optimizers:
        for master in one.masters:
            for key, value in one.optimizer.state.get(master, {}).items():
                if is_cut(key, value, master):
                    states += value.nbytes
                elif isinstance(value, torch.Tensor):
                    counters += value.nbytes
    return states, counters
