"""Bytes: what a rank holds, what it will hold, what a step sends.

Owns the sums behind `zero.memory()` and `zero.traffic()`. Measured numbers come from the tensors that are there;
`table/bytes.py` predicts the others from records alone.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from zeroshard.core.engine import Engine
from zeroshard.core.optimizer import ShardedOptimizer, is_cut
from zeroshard.core.slot import slot_of
from zeroshard.core.unit import Unit
from zeroshard.table.bytes import Updates, apart_masters_bytes, kept_bytes, predict, step_bytes
from zeroshard.table.trace import Memory

__all__ = ["TREATED", "measure", "predict_step_bytes"]

TREATED = ("activations", "captured")
"""Columns that are there with treatments of activations only."""


def measure(engine: Engine, optimizers: Sequence[ShardedOptimizer]) -> Memory:
    """Return the bytes held now, held at most, and predicted, by column."""
    buckets = [bucket for unit in engine.units for bucket in unit.buckets]
    parameters, masters, padding = kept_bytes([bucket.spec for bucket in buckets])
    gradients, more = (sum(column) for column in zip((0, 0), *(b.grads.nbytes for b in buckets), strict=True))
    states, counters, apart = _count_states(optimizers)
    for bucket in buckets:
        apart[bucket.spec.row.states.memory] += apart_masters_bytes(bucket.spec)
        apart["host"] += bucket.grads.apart_bytes
    now = {
        "parameters": parameters,
        "gradients": gradients,
        "states": states + masters,
        "padding": padding + more + counters,
        "transient": engine.ledger.now["transient"],
    }
    if engine.has_moved_states:
        now["states"], apart["host"] = 0, apart["host"] + now["states"]
    rows = {cell.memory for bucket in buckets for cell in (bucket.spec.row.states, bucket.spec.row.gradients)}
    now |= {memory: apart[memory] for memory in ("file", "host") if memory in rows or apart[memory]}
    now |= {column: engine.ledger.now[column] for column in TREATED if column in engine.ledger.now}
    for column, nbytes in now.items():
        engine.ledger.note(column, nbytes)
    predicted = predict([u.described() for u in engine.units], [_updates(o) for o in optimizers], engine.comm.wire)
    return Memory(now, {column: engine.ledger.peak[column] for column in now}, predicted)


def predict_step_bytes(units: Sequence[Unit]) -> int:
    """Return what this rank gathers, reduces and publishes in a step with one micro-batch."""
    return step_bytes([unit.described() for unit in units])


def _updates(optimizer: ShardedOptimizer) -> Updates:
    slots = [slot_of(master) for master in optimizer.masters]
    return Updates([(slot.bucket.spec, slot.index) for slot in slots], *(optimizer.state_cost or (0, 0)))


def _count_states(optimizers: Sequence[ShardedOptimizer]) -> tuple[int, int, Counter[str]]:
    """Return the bytes of states as (one element for each of a slice, counters, the same elsewhere by memory)."""
    states, counters, apart = 0, 0, Counter[str]()
    for one in optimizers:
        for master in one.masters:
            spec, index = slot_of(master).bucket.spec, slot_of(master).index
            for key, value in one.optimizer.state.get(master, {}).items():
                if is_cut(key, value, master) and index < spec.apart:
                    apart[spec.row.states.memory] += value.nbytes
                elif is_cut(key, value, master):
                    states += value.nbytes
                elif isinstance(value, torch.Tensor):
                    counters += value.nbytes
    return states, counters, apart
