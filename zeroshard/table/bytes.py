"""Predicted bytes: held between steps, held at the peak of a step, and sent.

Owns the sums over units. `table/spec.py` says what each bucket keeps, `table/step.py` which units are gathered at once,
`table/wires.py` which buffers a reduction takes. `account/accounting.py` has the measured bytes.

Source: Rajbhandari et al. 2020, sections 5 and 7.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple, final

from zeroshard.table.cells import DEVICE, FAR, Cell
from zeroshard.table.owners import plan_rounds
from zeroshard.table.pool import Buffer, Buffers
from zeroshard.table.schedule import ROOT
from zeroshard.table.spec import BucketSpec, UnitSpec, itemsize
from zeroshard.table.step import plain_uses, steady_passes
from zeroshard.table.wires import Reducing, Wire

__all__ = [
    "Cost",
    "Owned",
    "Sliced",
    "Updates",
    "add_bytes",
    "columns_of",
    "kept_bytes",
    "on_device",
    "predict",
    "step_bytes",
    "unit_bytes",
]

COLUMNS: Final = ("parameters", "gradients", "states", "padding", "transient")
"""Bytes of the device."""


@final
class Cost(NamedTuple):
    """What an optimizer keeps of a slice.

    Args:
        per_element: state values per element, in the dtype in which masters are updated.
        counter_bytes: bytes of counters.
        element_bytes: bytes per element of states that lie packed, or are of another dtype.
        block_bytes: bytes per block of `block_numel` elements of states that lie packed; the last block may be smaller.
    """

    per_element: int
    counter_bytes: int
    element_bytes: int = 0
    block_bytes: int = 0
    block_numel: int = 1

    def each_bytes(self, size: int) -> int:
        """Return the bytes of states per element, without those of blocks; a state value has `size` bytes."""
        return self.per_element * size + self.element_bytes

    def saved_bytes(self, size: int) -> int:
        """Return the bytes per element in a save, where what lies packed, in a byte each, is a value each."""
        return self.each_bytes(size) + self.element_bytes * (size - 1) * (self.block_bytes > 0)


@final
@dataclass(frozen=True, slots=True)
class Sliced:
    """A parameter of which each rank updates its slice: a bucket, the index there, and what is kept of the slice."""

    bucket: BucketSpec
    index: int
    cost: Cost

    @property
    def is_kept(self) -> bool:
        """Whether this rank has states of the parameter: each rank has its slice's."""
        return True

    @property
    def counter_bytes(self) -> int:
        """Bytes of the slice's counters."""
        return self.cost.counter_bytes

    @property
    def numel(self) -> int:
        """Elements of this rank's slice."""
        start, stop = self.bucket.layout.overlap(self.index, *self.bucket.states)
        return stop - start

    @property
    def state_bytes(self) -> int:
        """Bytes of the slice's states, without counters."""
        cost, numel = self.cost, self.numel
        blocks = -(-numel // cost.block_numel)
        return numel * cost.each_bytes(itemsize(self.bucket.formats.state)) + blocks * cost.block_bytes


@final
@dataclass(frozen=True)
class Owned:
    """A parameter that is updated as a whole by one rank of a replica, or by every rank if every rank updates all.

    Args:
        index: index of the parameter in the bucket.
        state_bytes, counter_bytes: bytes of its optimizer states and counters.
        cost: balances owners.
        kind: says how long an update takes, and what memory: a key of `plan.step.turns.KINDS`.
        owner: the rank that updates it; -1 until `make_updates` chooses it.
        group: the index of its group in the optimizer.
    """

    bucket: BucketSpec
    index: int
    shape: tuple[int, ...]
    state_bytes: int
    counter_bytes: int
    cost: float = 0.0
    kind: str = "other"
    owner: int = -1
    group: int = 0

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.bucket.layout.numels[self.index]

    @property
    def is_kept(self) -> bool:
        """Whether this rank has the states of the parameter."""
        return self.bucket.updates_all or self.owner == self.bucket.rank

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in a step: gradient and values to the owner, or new values as the owner."""
        if self.bucket.updates_all:
            return 0
        numel, formats = self.bucket.layout.numels_by_rank(self.index)[self.bucket.rank], self.bucket.formats
        if self.owner == self.bucket.rank:
            return (self.bucket.layout.numels[self.index] - numel) * itemsize(formats.state)
        return numel * (itemsize(formats.grad) + itemsize(formats.state))


@final
@dataclass(frozen=True)
class Updates:
    """The parameters and states of one optimizer.

    Args:
        parameters: those of which each rank updates its slice.
        whole: parameters that are updated as a whole.
        unused: (bucket's number, index) of parameters that get no gradients.
        is_made: whether the states are there before the first step, as of an Adagrad.
    """

    parameters: Sequence[Sliced]
    whole: Sequence[Owned] = field(default=(), kw_only=True)
    unused: Collection[tuple[int, int]] = field(default=(), kw_only=True)
    is_made: bool = field(default=False, kw_only=True)

    @cached_property
    def trained(self) -> "Updates":
        """The same of the parameters that get gradients: an optimizer makes no states of others."""

        def is_used(bucket: BucketSpec, index: int) -> bool:
            return bucket.is_reduced and (bucket.number, index) not in self.unused

        whole = [one for one in self.whole if is_used(one.bucket, one.index)]
        return replace(self, parameters=[one for one in self.parameters if is_used(one.bucket, one.index)], whole=whole)

    @property
    def entries(self) -> "Sequence[Sliced | Owned]":
        """What is updated, in slices or whole."""
        return [*self.parameters, *self.whole]

    @cached_property
    def buckets(self) -> frozenset[int]:
        """The numbers of the buckets with entries in the optimizer, those of frozen parameters included."""
        return frozenset(one.bucket.number for one in self.entries)

    @cached_property
    def kept(self) -> Mapping[int, int]:
        """The most state values per element of a slice, by the bucket's number."""
        found = dict[int, int]()
        for one in self.parameters:
            number = one.bucket.number
            found[number] = max(found.get(number, 0), one.cost.per_element)
        return found

    def numel_bytes(self, *, only_wide: bool = False, is_apart: bool = False) -> int:
        """Return the bytes of one state of all elements that this rank updates on its device.

        Args:
            only_wide: count only masters that are updated in another dtype than they are stored in.
            is_apart: count the elements that are updated in other memories instead.
        """
        wanted = ((b.formats, n) for b, n in self._slices(is_apart=is_apart, has_whole=only_wide))
        return sum(n * itemsize(f.state) for f, n in wanted if not only_wide or f.state != f.master)

    def state_bytes(self, *, is_apart: bool = False) -> int:
        """Return the bytes of all states, without counters, that this rank updates on its device or in other memory."""
        here = (one for one in self.entries if one.bucket.row.states.is_on_device is not is_apart)
        return sum(one.state_bytes for one in here if one.is_kept)

    def _slices(self, *, is_apart: bool, has_whole: bool = False) -> Iterator[tuple[BucketSpec, int]]:
        """Yield the bucket of each parameter, and the number of elements of this rank's slice."""
        for one in self.entries:
            if isinstance(one, Owned) and not has_whole:
                continue
            if one.bucket.row.states.is_on_device is not is_apart:
                start, stop = one.bucket.layout.overlap(one.index, *one.bucket.states)
                yield one.bucket, stop - start


def kept_bytes(buckets: Iterable[BucketSpec]) -> Counter[str]:
    """Return the bytes of parameters and separate masters between steps, by column of `predict`."""
    found = Counter[str]()
    for one in buckets:
        add_bytes(found, "parameters", one.row.parameters, one.bytes_of(one.parameters, one.formats.param))
        if one.has_masters:
            add_bytes(found, "states", one.row.states, one.bytes_of(one.states, one.formats.master))
    return found


def add_bytes(found: Counter[str], column: str, cell: Cell, nbytes: tuple[int, int]) -> None:
    """Add (bytes of elements, bytes of padding) of a cell to its column and to "padding", or to its memory."""
    if cell.is_on_device:
        found[column] += nbytes[0]
        found["padding"] += nbytes[1]
    else:
        found[cell.memory] += sum(nbytes)


def on_device(found: Mapping[str, int]) -> int:
    """Return the bytes of the columns of `predict` that are on the device."""
    return sum(nbytes for column, nbytes in found.items() if column not in FAR)


def columns_of(found: Counter[str], buckets: Iterable[BucketSpec]) -> dict[str, int]:
    """Return the bytes of the device by column, and those of each other memory that holds a column of a bucket."""
    far = {cell.memory for bucket in buckets for cell in bucket.row.state} | {one for one in FAR if found[one]}
    return {column: found[column] for column in (*COLUMNS, *sorted(far - {DEVICE}))}


def predict(units: Sequence[UnitSpec], updates: Sequence[Updates], wire: Wire) -> dict[str, int]:
    """Return the bytes that a rank holds in training, by column; for "transient", the peak.

    All columns are bytes of the device, except "host" and "file" with offload.
    """
    buckets = [bucket for unit in units for bucket in unit.buckets]
    found, exchanged = kept_bytes(buckets), list[list[Owned]]()
    for bucket in buckets:
        if bucket.is_reduced:
            add_bytes(found, "gradients", bucket.row.gradients, bucket.held_gradient_bytes)
    wide_bytes = max((one.numel_bytes(only_wide=True) for one in updates), default=0)
    for one in updates:
        for entry in (entry for entry in one.trained.entries if entry.is_kept):
            add_bytes(found, "states", entry.bucket.row.states, (entry.state_bytes, 0))
            found["padding"] += entry.counter_bytes
        exchanged.append([owned for owned in one.trained.whole if not owned.bucket.updates_all])
    found["transient"] = _transient_bytes(units, wire, wide_bytes, exchanged)
    return columns_of(found, buckets)


def step_bytes(units: Sequence[UnitSpec], updates: Sequence[Updates] = ()) -> int:
    """Return the bytes that a rank sends in a step with one micro-batch; see `unit_bytes`."""
    return sum(unit_bytes(units)) + sum(o.sent_bytes for one in updates for o in one.whole)


def unit_bytes(units: Sequence[UnitSpec]) -> list[int]:
    """Return what each unit of a model sends in a step with one micro-batch.

    A backward is taken to end at the first unit with trained parameters, by their order, so that those before it are
    gathered once. With trained parameters in the root, which may be used at any place, it is taken to use all units.
    """
    first = min((unit.number for unit in units if unit.reduced), default=len(units))
    return [
        unit.sent_bytes("gather") * (1 if unit.is_held or unit.number < first else 2)
        + unit.sent_bytes("reduce")
        + unit.sent_bytes("publish")
        for unit in units
    ]


def _transient_bytes(
    units: Sequence[UnitSpec], wire: Wire, wide_bytes: int, exchanged: Sequence[Sequence[Owned]] = ()
) -> int:
    """Return the peak bytes of gathered units, gradients before their reduction and buffers of messages.

    Args:
        wide_bytes: bytes of masters during an update in another dtype, when no unit is gathered.
        exchanged: the parameters of each optimizer that are sent to owners.
    """
    uses, pool, most_bytes = plain_uses(len(units)), _Counted(wire), -1
    forward, backward = steady_passes(units, uses)
    steps = [*zip(uses.forward, forward.actions, strict=True), *zip(uses.backward, backward.actions, strict=True)]
    is_alone = all(bucket.layout.world_size == 1 for unit in units for bucket in unit.buckets)
    while pool.most_bytes > most_bytes:  # the order of free buffers may differ in a later step
        most_bytes = pool.most_bytes
        landed: dict[int, list[Buffer]] = {}
        reducing = Reducing(wire, lambda numel, dtype, _: pool.take(numel, dtype), pool.give)
        for (mark, number), actions in steps:
            if mark == "land" and not is_alone:
                # The gradients of the root arrive first and are reduced last.
                for unit in (ROOT, number):
                    landed[unit] = landed[unit] if unit in landed else pool.land(units[unit])
                pool.note(units[number].landing_bytes * wire.lands_together)
            for kind, unit in actions:
                if kind != "reduce":
                    pool.hold(units[unit].full_bytes * (1 if kind == "gather" else -1))
                elif not is_alone:
                    reducing.advance()
                    reducing.start(units[unit].reduced, landed[unit])
        reducing.finish()
        pool.hold(-sum(unit.full_bytes for unit in units if unit.released == "step"))
        pool.hold(wide_bytes)
        for one in exchanged:
            pool.exchange(one)
        pool.hold(-wide_bytes)
    return pool.most_bytes


@final
class _Counted:
    """Buffers, with their current and peak bytes."""

    def __init__(self, wire: Wire) -> None:
        self._buffers, self._wire, self._now, self.most_bytes = Buffers(), wire, 0, 0

    def land(self, unit: UnitSpec) -> list[Buffer]:
        """Take the buffers of the unit's gradients; tensors that autograd allocated are not pooled."""
        sharded = [bucket for bucket in unit.reduced if not bucket.holds_whole_gradients]
        return [self.take(b.layout.full_numel, self._wire.lands_as(b), is_adopted=b.adopts) for b in sharded]

    def exchange(self, owned: Sequence[Owned]) -> None:
        """Take and return the buffers of an exchange in rounds, like `update/exchange.py`."""
        kinds: dict[tuple[str, str], list[Owned]] = {}
        for one in owned:
            kinds.setdefault((one.bucket.formats.grad, one.bucket.formats.state), []).append(one)
        before, present = list[Buffer](), list[Buffer]()
        for dtypes, some in kinds.items():
            rank, parts = some[0].bucket.rank, [one.bucket.layout.numels_by_rank(one.index) for one in some]
            for turn in plan_rounds([one.owner for one in some], parts):
                numels = max(1, turn.given_numel(rank)), max(1, turn.owned_numel(rank))
                ahead = [self.take(numel, dtype) for dtype in dtypes for numel in numels]
                # Gradients are freed after they are read, values a round later.
                self.give(present[:2] + before)
                before, present = present[2:], ahead
        self.give(present[:2] + before + present[2:])

    def hold(self, nbytes: int) -> None:
        """Hold more bytes in addition to the buffers, or fewer."""
        self._now += nbytes
        self.note(0)

    def note(self, nbytes: int) -> None:
        """Count bytes that are held briefly in addition to the buffers."""
        self.most_bytes = max(self.most_bytes, self._now + nbytes)

    def take(self, numel: int, dtype: str, *, is_adopted: bool = False) -> Buffer:
        is_kept = self._wire.keeps_buffers and not is_adopted
        buffer, gone = self._buffers.take(numel, dtype) if is_kept else (Buffer(numel, None), None)
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
