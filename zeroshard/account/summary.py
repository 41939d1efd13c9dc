"""A table of a sharded model, one line for each unit, and a check of its units.

Owns the columns and their text, and the warning if sharding parameters saves little memory. All numbers come from
units, buckets and optimizers; `account/accounting.py` has the same bytes by column of the residency table.
"""

import warnings
from collections.abc import Sequence
from types import MappingProxyType

import torch

from zeroshard.account.accounting import predict_step_bytes
from zeroshard.core.buffer import Bucket
from zeroshard.core.engine import Engine
from zeroshard.core.slot import slot_of
from zeroshard.core.unit import Unit
from zeroshard.describe.blocks import LARGE_PART
from zeroshard.describe.offload import reached
from zeroshard.describe.units import UnitPlan
from zeroshard.table.bytes import add_bytes, kept_bytes, on_device, unit_bytes
from zeroshard.table.schedule import ROOT
from zeroshard.table.sizes import aligned, size_text
from zeroshard.update.kernels import describe_waits
from zeroshard.update.optimizer import ShardedOptimizer
from zeroshard.wire.mesh import Mesh

__all__ = ["summarize", "warn_if_whole"]

WARNED_BYTES = 256 << 20
"""A model with fewer bytes of parameters gets no warning: other memory dominates."""

SAVED = MappingProxyType(
    {
        "activations": "activations on the device",
        "products": "results of products kept beside recomputation, before other treatments",
        "captured": "captured by the model's own checkpointing, beside its inputs and untreated",
    }
)
"""Columns of the ledger about activations, in words."""

HEADS = ("unit", "parameters", "elements", "dtype", "kept", "shard", "padding", "resident bytes", "sent bytes")


def summarize(engine: Engine, optimizers: Sequence[ShardedOptimizer], row: str) -> str:
    """Return the table, as lines of text with aligned columns.

    Columns: parameters and elements of the unit; its dtypes; whether this rank keeps whole parameters or a shard; the
    elements of a shard, and the padding in percent of the bucket; the bytes that this rank holds for the unit now
    (parameters, masters, gradients, states, padding); the bytes that this rank sends for the unit in a step with one
    micro-batch. The last line includes the bytes to and from owners of whole parameters. If units are gathered for use,
    a line gives the part that is whole at once. A line for each optimizer counts the parameters that it updates whole.
    On a device, a line names each optimizer whose steps make the host wait.

    Args:
        row: the residency row in words.
    """
    states = _states_by_unit(engine.units, optimizers)
    sent = unit_bytes([unit.described() for unit in engine.units])
    lines = [_line(unit, states[unit.number], sent[unit.number]) for unit in engine.units]
    total = _total(engine.units, sum(states), predict_step_bytes(engine.units, optimizers))
    saved = [
        f"{what}: {engine.ledger.peak[of]:,} bytes at most" for of, what in SAVED.items() if of in engine.ledger.peak
    ]
    words = [place for place, head in enumerate(HEADS) if head in ("unit", "dtype", "kept")]
    table = aligned([HEADS, *lines, total], words)
    waits = [
        describe_waits(engine.guard, one.optimizer) for one in optimizers if engine.guard.is_awaited(one.optimizer)
    ]
    owned = [text for one in optimizers if (text := _owned(one))]
    return "\n".join(
        [
            f"{engine.mesh} {row}",
            *table,
            *_judge(engine.units),
            *_offloaded(engine.units),
            *owned,
            *saved,
            *waits,
        ]
    )


def _owned(one: ShardedOptimizer) -> str:
    """Describe the distribution of an optimizer's whole matrices over ranks; "" if there are none."""
    whole = [master for master in one.masters if slot_of(master).updater is not None]
    if not whole:
        return ""
    loads = one.source.loads
    mean = sum(loads) / len(loads)
    busiest = f"; the busiest of {len(loads)} ranks has {max(loads) / mean:.2f} of the mean cost" if mean else ""
    return f"updated whole by {type(one.optimizer).__name__}: {len(whole)} parameters{busiest}"


def warn_if_whole(mesh: Mesh, units: Sequence[Unit], plans: Sequence[UnitPlan]) -> None:
    """Warn on rank 0 if more than half of a large model is whole at once: sharding its parameters saves little."""
    if mesh.rank or not _is_mostly_whole(units):
        return
    largest = _whole_at_once(units)
    sizes = ", ".join(f"{unit.name or 'the root'} {size_text(unit.spec.full_bytes)}" for unit in largest)
    total = _gathered_bytes(units)
    heavy = [unit.number for unit in largest if unit.spec.full_bytes > total / LARGE_PART]
    opened = {number for number in heavy if [*plans[number].module.children()]}
    classes = {type(plan.module).__name__ for number, plan in enumerate(plans) if number and number not in opened}
    for number in opened:
        children = plans[number].module.children()
        classes |= {type(child).__name__ for child in children if next(child.parameters(), None) is not None}
    remedy = (
        f"Name smaller units, such as units={sorted(classes)}; zero.summary() lists those there are."
        if opened
        else "These are single layers, which units= cannot divide: split the layers, or expect less memory saved."
    )
    whole = sum(unit.spec.full_bytes for unit in largest)
    warnings.warn(
        f"{mesh} {_share(units):.0%} of the parameters are whole at once while the model runs, {size_text(whole)} of "
        f"{size_text(total)} ({sizes}), so sharding parameters saves little memory. {remedy}",
        stacklevel=3,
    )


def _judge(units: Sequence[Unit]) -> list[str]:
    if not _gathered_bytes(units):
        return []
    names = ", ".join(
        (unit.name or "(root)") + " read outside its modules" * unit.is_read_outside for unit in _whole_at_once(units)
    )
    advice = "; more than half, so name smaller units with units=" if _is_mostly_whole(units) else ""
    return [f"whole at once: {_share(units):.1%} of the gathered bytes ({names}){advice}"]


def _offloaded(units: Sequence[Unit]) -> list[str]:
    """Describe the offloaded part of each column, rounded up to whole buckets."""
    lines = []
    for column, one in reached([unit.spec for unit in units]).items():
        what = {"states": "the states of", "parameters": "the parameters with"}[column]
        place = f"in files under {one.place.folder}" if one.place.folder else "in memory of the host"
        lines.append(f"offloaded: {what} {one.fraction:.1%} of the elements lie {place}")
    return lines


def _is_mostly_whole(units: Sequence[Unit]) -> bool:
    # The user requested parameters that stay whole from forward to backward.
    others = [unit for unit in units if unit.spec.kept_until == "use"]
    return _gathered_bytes(others) > WARNED_BYTES and _share(others) > 0.5


def _gathered_bytes(units: Sequence[Unit]) -> int:
    return sum(unit.spec.full_bytes for unit in units)


def _share(units: Sequence[Unit]) -> float:
    """Return the part of the gathered bytes that is whole at once."""
    return sum(unit.spec.full_bytes for unit in _whole_at_once(units)) / _gathered_bytes(units)


def _whole_at_once(units: Sequence[Unit]) -> list[Unit]:
    """Return units that stay whole during a pass, and the two largest others: one in use, one being gathered."""
    kept = [unit for unit in units if unit.number == ROOT or unit.is_read_outside or unit.spec.kept_until != "use"]
    others = sorted((unit for unit in units if unit not in kept), key=lambda unit: -unit.spec.full_bytes)
    return [unit for unit in (*kept, *others[:2]) if unit.spec.full_bytes]


def _line(unit: Unit, state_bytes: int, sent_bytes: int) -> tuple[str, ...]:
    dtypes = sorted({str(bucket.dtype).removeprefix("torch.") for bucket in unit.buckets})
    return (
        unit.name or "(root)",
        f"{len(unit.parameters):,}",
        f"{unit.numel:,}",
        "+".join(dtypes) or "-",
        "-" if not unit.buckets else "whole" if unit.spec.is_whole else "sharded",
        f"{sum(bucket.layout.shard_numel for bucket in unit.buckets):,}",
        _percent(unit.buckets),
        f"{_resident_bytes(unit) + state_bytes:,}",
        f"{sent_bytes:,}",
    )


def _total(units: Sequence[Unit], state_bytes: int, sent_bytes: int) -> tuple[str, ...]:
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
        f"{sent_bytes:,}",
    )


def _percent(buckets: Sequence[Bucket]) -> str:
    """Return the padding in percent of the buckets."""
    full = sum(bucket.layout.full_numel for bucket in buckets)
    numel = sum(bucket.layout.numel for bucket in buckets)
    return f"{100 * (full - numel) / full:.1f}%" if full else "-"


def _resident_bytes(unit: Unit) -> int:
    """Return the bytes of parameters, masters and gradients that this rank keeps, padding included."""
    found = kept_bytes(unit.spec.buckets)
    for bucket in unit.buckets:
        add_bytes(found, "gradients", bucket.spec.row.gradients, bucket.grads.nbytes)
    return on_device(found)


def _states_by_unit(units: Sequence[Unit], optimizers: Sequence[ShardedOptimizer]) -> list[int]:
    """Return the bytes of the optimizers' states on the device for each unit, counters included."""
    found = [0] * len(units)
    for one in optimizers:
        for master in one.entries:
            values = one.optimizer.state.get(master, {}).values()
            slot, is_small = slot_of(master), {id(v) for v in values if isinstance(v, torch.Tensor) and not v.ndim}
            is_here = slot.bucket.spec.row.states.is_on_device
            found[slot.unit] += sum(
                v.nbytes for v in values if isinstance(v, torch.Tensor) and (is_here or id(v) in is_small)
            )
    return found
