"""The specification of a model on one rank: units, their buckets, and all consequences of the residency row.

Owns every consequence of the residency table, in names and integers. The engine builds its buckets from these records,
and the planner reads the same records. Read `table/cells.py` and `table/layout.py` first.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import final, get_args

from zeroshard.table.cells import Residency, Until
from zeroshard.table.layout import Layout
from zeroshard.table.schedule import ROOT

__all__ = [
    "BLOCK_NUMEL",
    "BucketSpec",
    "CODECS",
    "Formats",
    "Message",
    "Range",
    "SCALED_NUMEL",
    "Staying",
    "UnitSpec",
    "itemsize",
    "message_of",
    "with_last",
]

Range = tuple[int, int]
"""Elements of a bucket, as (start, stop)."""
Message = tuple[int, str]
"""A flat tensor: elements, and their dtype by torch's name."""

BLOCK_NUMEL = 1 << 16
"""Elements that are encoded and summed at a time."""
SCALED_NUMEL = 256
"""Elements that share a scale, in codecs of few bits."""


def _scaled(bits: int, numel: int) -> Message:
    """Return the message of a codec of few bits: codes, and four bytes for each scale."""
    return -(-numel * bits // 8) + 4 * -(-numel // SCALED_NUMEL), "uint8"


CODECS: Mapping[str, Callable[[int], Message]] = MappingProxyType(
    {f"scaled{bits}": partial(_scaled, bits) for bits in (8, 4)}
)
"""The codecs besides dtypes, by name: each returns the message for a number of elements."""


def message_of(codec: str, numel: int) -> Message:
    """Return the message for `numel` elements.

    Args:
        codec: the name of a dtype, whose messages are the elements themselves, or of an entry in `CODECS`.
    """
    return CODECS[codec](numel) if codec in CODECS else (numel, codec)


@cache
def itemsize(dtype: str) -> int:
    """Return the bytes of an element of a dtype."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


@final
@dataclass(frozen=True)
class Formats:
    """The formats of a parameter and its training state, by torch's names of dtypes.

    Args:
        param: dtype in which modules compute.
        reduce: dtype of a gradient in messages, or the name of a codec in `CODECS`.
        grad: dtype of a held gradient.
        master: dtype of the master weights between steps.
        state: dtype of optimizer states, and of master weights during their update.
    """

    param: str
    reduce: str
    grad: str
    master: str
    state: str


@final
@dataclass(frozen=True)
class BucketSpec:
    """One flat tensor of a unit: parameters that share dtypes and trainability.

    Args:
        name: the unit's name, for errors.
        number: number of the bucket in the model; a part of the tag of every message.
        names: names of the parameters, in registration order.
        row: the cells of this bucket; the memory of states is also that of master weights.
        rank: index of this rank among the ranks over which the bucket is sharded.
        replicas: number of replicas of the sharded state.
        is_trained: whether any of its parameters requires gradients.
        is_updated: whether an optimizer updates it.
    """

    name: str
    number: int
    names: tuple[str, ...]
    layout: Layout
    formats: Formats
    row: Residency
    rank: int
    replicas: int
    is_trained: bool = True
    is_updated: bool = True

    @cached_property
    def full(self) -> Range:
        """The whole bucket."""
        return 0, self.layout.full_numel

    @cached_property
    def shard(self) -> Range:
        """The elements that this rank owns: its shard of parameters, states and reduced gradients."""
        return self.layout.shard_range(self.rank)

    @cached_property
    def parameters(self) -> Range:
        """The parameters that this rank keeps between passes."""
        return self.row.parameters.kept_range(self.layout, self.rank)

    @cached_property
    def gradients(self) -> Range:
        """The gradients that this rank holds between a reduction and `zero_grad`."""
        return self.row.gradients.kept_range(self.layout, self.rank)

    @cached_property
    def states(self) -> Range:
        """The elements that this rank updates."""
        return self.row.states.kept_range(self.layout, self.rank)

    @cached_property
    def here(self) -> Range:
        """The parameters that this rank keeps on its device between passes."""
        return self.parameters if self.row.parameters.is_on_device else (self.shard[1], self.shard[1])

    @cached_property
    def is_whole(self) -> bool:
        """Whether parameters stay full on the device, so that their use needs no gather and no copy."""
        return self.parameters == self.full and self.row.parameters.is_on_device

    @cached_property
    def moves_gradients(self) -> bool:
        """Whether gradients are on the device between steps, and states are not: the update needs copies of them."""
        return not self.row.states.is_on_device and self.row.gradients.is_on_device

    @cached_property
    def can_update_late(self) -> bool:
        """Whether the host can update after the step: with all it needs, and before a gather, which can wait."""
        return self.row.states.memory == self.row.gradients.memory == "host" and self.is_gathered

    @property
    def unit(self) -> str:
        """The name of the unit, as events have it: "" for the root."""
        return self.name if self.name != "the root" else ""

    @cached_property
    def holds_whole_gradients(self) -> bool:
        """Whether the held gradients span the full bucket."""
        return self.gradients == self.full

    @cached_property
    def lands_on_held(self) -> bool:
        """Whether the first gradients of a step may arrive in the memory of held gradients itself."""
        return self.holds_whole_gradients and self.row.gradients.is_on_device

    @cached_property
    def updates_all(self) -> bool:
        """Whether this rank updates every element, and so needs full sums of gradients."""
        return self.states == self.full

    @cached_property
    def has_masters(self) -> bool:
        """Whether there are separate masters: of another dtype than the parameters, or in another memory."""
        return self.formats.master != self.formats.param or self.row.states.memory != self.row.parameters.memory

    @cached_property
    def lands_on_sums(self) -> bool:
        """Whether gradients are added to the held sums on arrival, because no other rank contributes."""
        return self.layout.world_size == self.replicas == 1

    @cached_property
    def held_gradient_bytes(self) -> tuple[int, int]:
        """Bytes of the gradients that this rank holds, as (parameters, padding)."""
        owned, padding = self.bytes_of(self.gradients, self.formats.grad)
        return owned, 0 if self.lands_on_sums else padding

    @cached_property
    def is_gathered(self) -> bool:
        """Whether parameters are gathered before use and released after it."""
        return not self.is_whole and self.layout.full_numel > 0

    @cached_property
    def is_reduced(self) -> bool:
        """Whether gradients are reduced, and an optimizer keeps states: neither exists for frozen parameters."""
        return self.is_trained and self.layout.full_numel > 0

    @property
    def is_updated_in_pieces(self) -> bool:
        """Whether its update reads and writes states in pieces, which lie in a file."""
        return self.row.states.is_in_file

    @cached_property
    def is_published(self) -> bool:
        """Whether updated parameters are gathered after a step: every rank keeps all, and updates a part."""
        return self.is_updated and self.is_whole and not self.updates_all and self.layout.full_numel > 0

    @cached_property
    def adopts(self) -> bool:
        """Whether the tensor from autograd can be reduced in place: without padding and conversion."""
        is_one = len(self.names) == 1 and self.layout.numel == self.layout.full_numel
        return is_one and not self.holds_whole_gradients and self.formats.param == self.formats.grad

    @cached_property
    def lands_as_message(self) -> bool:
        """Whether gradients may be converted for their message as they land: all at once, and bf16 cannot overflow."""
        is_other = self.formats.reduce == "bfloat16" != self.formats.grad
        return is_other and bool(self.unit) and not (self.holds_whole_gradients or self.adopts)

    def bytes_of(self, held: Range, dtype: str) -> tuple[int, int]:
        """Return the bytes of a range of the bucket as (parameters, padding)."""
        owned = self.layout.owned_numel(*held)
        return owned * itemsize(dtype), (held[1] - held[0] - owned) * itemsize(dtype)

    def sent_bytes(self, kind: str) -> int:
        """Return the bytes that this rank sends for one event: "gather", "reduce" or "publish"."""
        nbytes, numel = 0, self.layout.shard_numel
        if (kind == "gather" and self.is_gathered) or (kind == "publish" and self.is_published):
            nbytes = numel * itemsize(self.formats.param)
        elif kind == "reduce":
            # If every rank updates all elements, the sums are also gathered.
            count, dtype = message_of(self.formats.reduce, numel)
            nbytes = count * itemsize(dtype) + self.updates_all * numel * itemsize(self.formats.grad)
        return nbytes * (self.layout.world_size - 1)


@final
@dataclass(frozen=True)
class UnitSpec:
    """Parameters that are gathered and reduced together.

    Args:
        number: place among the model's units; 0 is the root.
        name: the module's name, "" for the root.
        is_last: whether a forward uses it last, by the order of parameters, so that its backward finds it gathered.
    """

    number: int
    name: str
    buckets: tuple[BucketSpec, ...]
    is_last: bool = False

    @cached_property
    def is_whole(self) -> bool:
        """Whether no bucket is gathered for use."""
        return all(bucket.is_whole for bucket in self.buckets)

    @cached_property
    def kept_until(self) -> Until:
        """Until when cells keep the unit gathered: the latest of its buckets."""
        found = {bucket.row.parameters.released for bucket in self.buckets if bucket.is_gathered}
        return max(found, key=get_args(Until).index, default="use")

    @cached_property
    def released(self) -> Until:
        """When the unit is released after it was gathered."""
        is_gathered = any(bucket.is_gathered for bucket in self.buckets)
        return "backward" if self.is_last and is_gathered and self.kept_until == "use" else self.kept_until

    @property
    def is_held(self) -> bool:
        """Whether the unit stays gathered from a forward to the end of its backward, or longer."""
        return self.released != "use"

    @cached_property
    def full_bytes(self) -> int:
        """Bytes of the gathered buckets, including padding."""
        return sum(b.layout.full_numel * itemsize(b.formats.param) for b in self.buckets if b.is_gathered)

    @cached_property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(bucket.layout.numel for bucket in self.buckets)

    @cached_property
    def reduced(self) -> Sequence[BucketSpec]:
        """The buckets whose gradients are reduced."""
        return [bucket for bucket in self.buckets if bucket.is_reduced]

    def updated(self, numbers: Collection[int]) -> "UnitSpec":
        """Return the unit where optimizers have entries of these buckets alone."""
        if all(b.is_updated == (b.number in numbers) for b in self.buckets):
            return self
        return replace(self, buckets=tuple(replace(b, is_updated=b.number in numbers) for b in self.buckets))

    @cached_property
    def landing_bytes(self) -> int:
        """Bytes of this rank's gradients as allocated by autograd, if they wait there until the unit is complete."""
        waiting = [bucket for bucket in self.reduced if self.number != ROOT and not bucket.adopts]
        return sum(b.layout.numel * itemsize(b.formats.param) for b in waiting)

    def sent_bytes(self, kind: str) -> int:
        """Return the bytes that this rank sends for one event of `kind`."""
        return sum(bucket.sent_bytes(kind) for bucket in (self.reduced if kind == "reduce" else self.buckets))

    def wire_dtypes(self, kind: str) -> str:
        """Return the dtypes of the messages of an event of `kind`, as "bfloat16" or "bfloat16+float32"."""
        return "" if kind == "release" else self._reduce_dtypes if kind == "reduce" else self._param_dtypes

    @cached_property
    def _reduce_dtypes(self) -> str:
        return "+".join(sorted({bucket.formats.reduce for bucket in self.reduced}))

    @cached_property
    def _param_dtypes(self) -> str:
        return "+".join(sorted({bucket.formats.param for bucket in self.buckets}))


@final
class Staying:
    """The units that stay gathered after a pass, by number.

    Args:
        units: all units of a model.
    """

    def __init__(self, units: Sequence[UnitSpec]) -> None:
        self.to_backward = frozenset(unit.number for unit in units if unit.is_held)
        """From a forward to its backward, or longer."""
        self.to_step = frozenset(unit.number for unit in units if unit.released == "step")
        held_last = (u.number for u in units if u.is_last and u.is_held and u.kept_until == "use" and u.number != ROOT)
        self.last = next(held_last, None)
        """The unit that stays only because a forward is expected to use it last."""


def with_last(units: Sequence[UnitSpec], last: int) -> tuple[UnitSpec, ...]:
    """Return the units of a model, with those noted that its forward uses last: the root, and the unit `last`.

    Nothing is noted for a model that is not trained, whose forwards no backward follows.
    """
    is_trained = any(bucket.is_trained for unit in units for bucket in unit.buckets)
    return tuple(replace(unit, is_last=is_trained and unit.number in (ROOT, last)) for unit in units)
