"""Bytes that a rank holds now, will hold, and sends in a step.

Owns the sums of `zero.memory()` and `zero.traffic()`. Measured numbers come from existing tensors; `table/bytes.py`
predicts the others from records.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from zeroshard.core.engine import Engine
from zeroshard.core.slot import slot_of
from zeroshard.core.unit import Unit
from zeroshard.optim.packed import parts_of
from zeroshard.optim.updates import Entry, updates_of_optimizer
from zeroshard.table.bytes import Updates, add_bytes, columns_of, kept_bytes, predict, step_bytes
from zeroshard.table.trace import Memory
from zeroshard.update.optimizer import ShardedOptimizer, is_cut
from zeroshard.whole.owned import is_stored

__all__ = ["TREATED", "measure", "predict_step_bytes"]

TREATED = ("activations", "captured")
"""Columns that exist only with treatments of activations."""


def measure(engine: Engine, optimizers: Sequence[ShardedOptimizer]) -> Memory:
    """Return the current, peak and predicted bytes, by column."""
    buckets = [bucket for unit in engine.units for bucket in unit.buckets]
    specs = [bucket.spec for bucket in buckets]
    found = kept_bytes(specs)
    for bucket in buckets:
        add_bytes(found, "gradients", bucket.spec.row.gradients, bucket.grads.nbytes)
    _add_states(found, optimizers)
    found["transient"] = engine.ledger.now["transient"]
    if engine.has_moved_states:
        found["host"], found["states"] = found["host"] + found["states"], 0
    now = columns_of(found, specs)
    now |= {column: engine.ledger.now[column] for column in TREATED if column in engine.ledger.now}
    for column, nbytes in now.items():
        engine.ledger.note(column, nbytes)
    predicted = predict([u.described() for u in engine.units], [_updates(o) for o in optimizers], engine.comm.wire)
    return Memory(now, {column: engine.ledger.peak[column] for column in now}, predicted)


def predict_step_bytes(units: Sequence[Unit], optimizers: Sequence[ShardedOptimizer] = ()) -> int:
    """Return the bytes that this rank gathers, reduces, exchanges and publishes in a step with one micro-batch."""
    return step_bytes([unit.described() for unit in units], [*map(_updates, optimizers)])


def _updates(optimizer: ShardedOptimizer) -> Updates:
    def entry_of(master: torch.Tensor) -> Entry:
        slot = slot_of(master)
        owner = -1 if slot.updater is None else slot.updater
        return slot.bucket.spec, slot.index, slot.bucket.places.shapes[slot.index], owner

    return updates_of_optimizer(optimizer.optimizer, entry_of, kept=optimizer.kept)


def _add_states(found: Counter[str], optimizers: Sequence[ShardedOptimizer]) -> None:
    """Add the bytes of states of elements and blocks, and of counters."""
    for one in optimizers:
        for master in one.entries:
            slot = slot_of(master)
            cell, is_whole = slot.bucket.spec.row.states, slot.updater is not None
            state = one.optimizer.state.get(master, {})
            parts = parts_of(one.optimizer, state)
            for key, value in state.items():
                is_of_elements = is_stored(value) if is_whole else key in parts or is_cut(key, value, master)
                if is_of_elements:
                    add_bytes(found, "states", cell, (value.nbytes, 0))
                elif isinstance(value, torch.Tensor):
                    found["padding"] += value.nbytes
