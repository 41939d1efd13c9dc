"""Bytes before anything runs: what a rank holds between steps, at most during one, and sends.

Owns the sums over units; `table/spec.py` says what each bucket keeps, `table/schedule.py` what is whole at once,
`table/wires.py` what a reduction takes. `state/accounting.py` puts what is measured beside it.

Source: Rajbhandari et al. 2020, sections 5 and 7.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from zeroshard.table import schedule
from zeroshard.table.pool import Buffer, Buffers
from zeroshard.table.spec import BucketSpec, UnitSpec, itemsize
from zeroshard.table.wires import Wire

__all__ = ["Updates", "apart_masters_bytes", "kept_bytes", "predict", "step_bytes"]


@final
@dataclass(frozen=True)
class Updates:
    """What one optimizer updates and keeps.

    Args:
        parameters: buckets, and places in them.
        per_element: numbers that it keeps for each element.
        counter_bytes: that it keeps for each parameter.
    """

    parameters: Sequence[tuple[BucketSpec, int]]
    per_element: int
    counter_bytes: int

    def numel_bytes(self, *, only_wide: bool = False, is_apart: bool = False) -> int:
        """Return the bytes of one state for each element of what this rank updates on its device.

        Args:
            only_wide: count only masters that are updated in another dtype than they are kept in.
            is_apart: count what is updated in the other memory instead.
        """
        total = 0
        for bucket, index in self.parameters:
            if (index < bucket.apart) is not is_apart:
                continue
            start, stop = bucket.layout.overlap(index, *bucket.states)
            is_wide = bucket.formats.state != bucket.formats.master
            total += (stop - start) * itemsize(bucket.formats.state) * (is_wide or not only_wide)
        return total


def kept_bytes(buckets: Sequence[BucketSpec]) -> tuple[int, int, int]:
    """Return the bytes that stay on the device between steps: (parameters, masters beside them, padding of both)."""
    parameters, padding = _owned_bytes((b, b.parameters, b.formats.param) for b in buckets)
    here = ((b, (b.apart_states[1], b.states[1]), b.formats.master) for b in buckets if b.has_masters)
    masters, spare = _owned_bytes(here)
    return parameters, masters, padding + spare


def apart_masters_bytes(bucket: BucketSpec) -> int:
    """Return the bytes of master values in the other memory, padding included."""
    start, stop = bucket.apart_states
    return (stop - start) * itemsize(bucket.formats.master)


def _owned_bytes(parts: Iterable[tuple[BucketSpec, tuple[int, int], str]]) -> tuple[int, int]:
    """Return the bytes of ranges of buckets, held in some dtype, as (of parameters, padding)."""
    owned = padding = 0
    for bucket, held, dtype in parts:
        more, rest = bucket.bytes_of(held, dtype)
        owned, padding = owned + more, padding + rest
    return owned, padding


def predict(units: Sequence[UnitSpec], updates: Sequence[Updates], wire: Wire) -> dict[str, int]:
    """Return the bytes that a rank holds in training, by column; for "transient" the most at once.

    Columns are of the device, but for "host" and "file", of those memories, where something is offloaded.
    """
    buckets = [bucket for unit in units for bucket in unit.buckets]
    reduced = {bucket.number for unit in units for bucket in unit.reduced}
    parameters, masters, padding = kept_bytes(buckets)
    gradients, more = (sum(b.gradient_bytes[part] for b in buckets if b.number in reduced) for part in (0, 1))
    states = counters = wide_bytes = 0
    rows = {cell.memory for b in buckets for cell in (b.row.states, b.row.gradients)} - {"device"}
    apart = Counter[str]()
    for bucket in buckets:
        apart[bucket.row.states.memory] += apart_masters_bytes(bucket)
        apart["host"] += bucket.apart_gradient_bytes * (bucket.number in reduced)
    for one in updates:
        wide_bytes = max(wide_bytes, one.numel_bytes(only_wide=True))
        trained = Updates([(b, i) for b, i in one.parameters if b.number in reduced], one.per_element, 0)
        states += one.per_element * trained.numel_bytes()
        for bucket, index in trained.parameters:
            only = Updates([(bucket, index)], 1, 0)
            apart[bucket.row.states.memory] += one.per_element * only.numel_bytes(is_apart=True)
        counters += one.counter_bytes * len(trained.parameters)
    return {
        "parameters": parameters,
        "gradients": gradients,
        "states": states + masters,
        "padding": padding + more + counters,
        "transient": _transient_bytes(units, wire, wide_bytes),
        **{memory: apart[memory] for memory in sorted(rows)},
    }


def step_bytes(units: Sequence[UnitSpec]) -> int:
    """Return what a rank gathers, reduces and publishes in a step with one micro-batch."""
    gathers = 2 * any(not unit.is_whole for unit in units)
    return sum(u.sent_bytes("gather") * gathers + u.sent_bytes("reduce") + u.sent_bytes("publish") for u in units)


def _transient_bytes(units: Sequence[UnitSpec], wire: Wire, wide_bytes: int) -> int:
    """Return the most bytes of whole units, gradients on their way and wire buffers.

    Args:
        wide_bytes: of masters while they are updated in another dtype, when no unit is whole.
    """
    full = tuple(unit.full_bytes for unit in units)
    passes = schedule.plain_marks(len(units))
    whole = max(wide_bytes, *(schedule.peak_units(schedule.replay(record, marks), full) for record, marks in passes))
    if all(bucket.layout.world_size == 1 for unit in units for bucket in unit.buckets):
        return whole
    pool, root, others = _Counted(), units[0], list(reversed(units[1:]))
    most_bytes = -1
    while pool.most_bytes > most_bytes:  # a later step may find the buffers of an earlier one in other places
        most_bytes = pool.most_bytes
        # The root's gradients land first and are reduced last.
        of_root = pool.land(root)
        before: list[Buffer] = []
        for unit in [*others, root]:
            taken = of_root if unit is root else pool.land(unit)
            pool.note(unit.landing_bytes * wire.lands_together)
            pool.give(before)  # the reduction before this one is finished before this one starts
            before = taken + [pool.take(*wanted) for bucket in unit.reduced for wanted in wire.reduction(bucket)]
            if wire.is_in_place:
                pool.give(before)
                before = []
        pool.give(before)
    return whole + pool.most_bytes


@final
class _Counted:
    """Buffers, and their bytes now and at most."""

    def __init__(self) -> None:
        self._buffers, self._now, self.most_bytes = Buffers(), 0, 0

    def land(self, unit: UnitSpec) -> list[Buffer]:
        """Take what the unit's gradients land in; what autograd made is not pooled."""
        sharded = [bucket for bucket in unit.reduced if not bucket.holds_whole_gradients]
        return [self.take(b.layout.full_numel, b.formats.grad, is_adopted=b.adopts) for b in sharded]

    def note(self, nbytes: int) -> None:
        """Count what lies beside the buffers for a moment."""
        self.most_bytes = max(self.most_bytes, self._now + nbytes)

    def take(self, numel: int, dtype: str, *, is_adopted: bool = False) -> Buffer:
        buffer, gone = (Buffer(numel, None), None) if is_adopted else self._buffers.take(numel, dtype)
        if gone is not None:
            self._now -= gone.memory
        if buffer.memory is None:
            buffer.memory = numel * itemsize(dtype)
            self._now += buffer.memory
        self.note(0)
        return buffer

    def give(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            if buffer.kind is None:
                self._now -= buffer.memory
            else:
                self._buffers.give(buffer)
