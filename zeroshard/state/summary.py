"""A table of a sharded model, one line for each unit.

Owns the columns and their text. Every number is asked of units, buckets and optimizers; `state/accounting.py` has the
same bytes by column of the residency table.
"""

from collections.abc import Sequence

import torch

from zeroshard.core.buffer import Bucket
from zeroshard.core.engine import Engine
from zeroshard.core.optimizer import ShardedOptimizer
from zeroshard.core.parameter import slot_of
from zeroshard.core.unit import Unit
from zeroshard.state.accounting import predict_step_bytes

__all__ = ["summarize"]

HEADS = ("unit", "parameters", "elements", "dtype", "kept", "shard", "padding", "resident bytes", "sent bytes")


def summarize(engine: Engine, optimizers: Sequence[ShardedOptimizer], row: str, cut: str) -> str:
    """Return the table, as lines of text with aligned columns.

    Columns: parameters and elements of the unit; its dtypes; whether this rank keeps its parameters whole or its shard
    of them; the elements of a shard and how many percent of the bucket are padding; the bytes that this rank holds of
    it now (parameters, masters, gradients, states, padding); the bytes that it sends for it in a step with one
    micro-batch.

    Args:
        row: the residency row in words.
        cut: where rank boundaries may fall.
    """
    states = _states_by_unit(engine.units, optimizers)
    lines = [_line(unit, states[unit.number]) for unit in engine.units]
    total = _total(engine.units, sum(states))
    return "\n".join([f"{engine.mesh} {row}, cut by {cut}", *_aligned([HEADS, *lines, total])])


def _line(unit: Unit, state_bytes: int) -> tuple[str, ...]:
    dtypes = sorted({str(bucket.dtype).removeprefix("torch.") for bucket in unit.buckets})
    return (
        unit.name or "(root)",
        f"{len(unit.parameters):,}",
        f"{unit.numel:,}",
        "+".join(dtypes) or "-",
        "-" if not unit.buckets else "whole" if unit.is_whole else "sharded",
        f"{sum(bucket.layout.shard_numel for bucket in unit.buckets):,}",
        _percent(unit.buckets),
        f"{_resident_bytes(unit) + state_bytes:,}",
        f"{predict_step_bytes([unit]):,}",
    )


def _total(units: Sequence[Unit], state_bytes: int) -> tuple[str, ...]:
    buckets = [bucket for unit in units for bucket in unit.buckets]
    return (
        "total",
        f"{sum(len(unit.parameters) for unit in units):,}",
        f"{sum(unit.numel for unit in units):,}",
        "",
        "",
        f"{sum(bucket.layout.shard_numel for bucket in buckets):,}",
        _percent(buckets),
        f"{sum(map(_resident_bytes, units)) + state_bytes:,}",
        f"{predict_step_bytes(units):,}",
    )


def _percent(buckets: Sequence[Bucket]) -> str:
    """Return how much of the buckets is padding."""
    full = sum(bucket.layout.full_numel for bucket in buckets)
    numel = sum(bucket.layout.numel for bucket in buckets)
    return f"{100 * (full - numel) / full:.1f}%" if full else "-"


def _resident_bytes(unit: Unit) -> int:
    """Return the bytes of parameters, masters and gradients that this rank keeps, padding included."""
    total = 0
    for bucket in unit.buckets:
        start, stop = bucket.resident_range
        total += (stop - start) * bucket.dtype.itemsize + sum(bucket.grads.nbytes)
        total += bucket.masters.nbytes if bucket.has_masters else 0
    return total


def _states_by_unit(units: Sequence[Unit], optimizers: Sequence[ShardedOptimizer]) -> list[int]:
    """Return the bytes of the optimizers' states for each unit, counters included."""
    found = [0] * len(units)
    for one in optimizers:
        for master in one.masters:
            values = one.optimizer.state.get(master, {}).values()
            found[slot_of(master).unit] += sum(v.nbytes for v in values if isinstance(v, torch.Tensor))
    return found


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of equal columns: words to the left, numbers to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    is_word = [head in ("unit", "dtype", "kept") for head in rows[0]]
    return [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, is_word, strict=True)
        ).rstrip()
        for row in rows
    ]
