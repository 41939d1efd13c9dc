"""Fragments: the parts of a model that islands exchange one after the other, with their anchors.

Owns the division of units into fragments, this rank's part of each, and the memory of anchors, of outer states and of
what rounding lost. It must not know messages or steps. Read `formula.py` and `core/buffer.py` first.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch

from zeroshard.core.buffer import Bucket
from zeroshard.core.engine import Engine
from zeroshard.core.slot import Slot, slot_of
from zeroshard.core.unit import Unit
from zeroshard.outer import formula
from zeroshard.outer.options import Outer
from zeroshard.store.stores import MEMORIES, DeviceStore, Store
from zeroshard.wire.codec import Codec
from zeroshard.wire.comm import Comm, Tag
from zeroshard.wire.transports import codec_of

__all__ = ["Fragment", "Part", "fragments_of", "store_of"]

Tensor = torch.Tensor


def store_of(options: Outer, device: torch.device) -> Store:
    """Return the memory of anchors, outer states and what rounding lost."""
    far = MEMORIES.get(options.cell.memory)
    return DeviceStore(device) if far is None else far(device, options.cell.place)


@final
@dataclass(frozen=True)
class Part:
    """What this rank has of one bucket in a fragment: its shard, also where it updates all elements.

    Args:
        start: the first of its elements in the fragment.
    """

    bucket: Bucket
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.bucket.layout.shard_numel

    def values(self) -> Tensor:
        """Return (numel,): this rank's master weights, a view."""
        first = self.bucket.spec.shard[0] - self.bucket.spec.states[0]
        return self.bucket.array()[first : first + self.numel].detach()

    def of(self, flat: Tensor) -> Tensor:
        """Return this part of a tensor of the fragment."""
        return flat[self.start : self.start + self.numel]

    def slices(self) -> Iterator[tuple[Slot, int, int]]:
        """Yield each parameter with the elements of the fragment that are this rank's of it."""
        first = self.bucket.spec.shard[0]
        for parameter in self.bucket.parameters:
            slot = slot_of(parameter)
            start, stop = self.bucket.layout.overlap(slot.index, *self.bucket.spec.shard)
            yield slot, self.start + start - first, self.start + max(start, stop) - first


@final
class Fragment:
    """Units that are exchanged together.

    Args:
        number: its place among the fragments.
        units: at least one, with trained parameters.
        options: how islands exchange.
        store: the memory of the anchors.
    """

    def __init__(self, number: int, units: Sequence[Unit], options: Outer, store: Store) -> None:
        self.number, self.units, self.parts = number, list(units), list[Part]()
        self.numel = 0
        for bucket in (bucket for unit in units for bucket in unit.buckets if bucket.spec.is_reduced):
            self.parts.append(Part(bucket, self.numel))
            self.numel += bucket.layout.shard_numel
        # In fp32 at least: changes are small beside parameters.
        self.dtype = torch.float32
        for part in self.parts:
            self.dtype = torch.promote_types(self.dtype, part.values().dtype)
        self.anchor = torch.nn.Parameter(store.zeros(self.numel, self.dtype))
        self.codec: Codec = codec_of(options.codec(dtype := str(self.dtype).removeprefix("torch.")))
        self.lost: Tensor | None = None if self.codec.name == dtype else store.zeros(self.numel, self.dtype)
        self.exchanged_at = 0
        """The step at which its parameters became the anchors; -1 if the island's own were mixed in."""

    def __str__(self) -> str:
        return f"fragment {self.number}"

    def take_anchors(self) -> None:
        """Make the present parameters the anchors, and forget what rounding lost."""
        for part in self.parts:
            part.of(self.anchor.data).copy_(part.values())
        if self.lost is not None:
            self.lost.zero_()

    def change(self) -> Tensor:
        """Return (numel,): the change of the parameters since the last exchange, in the anchors' memory."""
        found = torch.empty_like(self.anchor.data)
        for part in self.parts:
            formula.change_of(part.values(), part.of(self.anchor.data), part.of(found))
        return found

    @torch.no_grad()
    def mix_in(self, own: float) -> None:
        """Replace the parameters by the anchors, or mix both; see `formula.mixed`. Then call `publish`."""
        for part in self.parts:
            formula.mixed(part.values(), part.of(self.anchor.data), own)

    def publish(self, engine: Engine, what: str) -> None:
        """Let all ranks of the island have new master weights where they keep them.

        Collective: all-gathers of what is updated or kept whole; every rank of the island must call.
        """
        number, comm = engine.order.next_number(), engine.comm
        for unit in self.units:
            for part in self.parts:
                if part.bucket in unit.buckets:
                    _gather(part.bucket, comm, Tag(number, part.bucket.number, what))
                    part.bucket.follow_masters()
            for pending in unit.publish(comm, number, what, "state"):
                pending.wait()
            for part in self.parts:
                if part.bucket in unit.buckets:
                    part.bucket.count_update()


@torch.no_grad()
def _gather(bucket: Bucket, comm: Comm, tag: Tag) -> None:
    """Gather the masters that every rank updates, and of which each has changed its shard."""
    if not bucket.spec.updates_all or comm.mesh.shard_size == 1:
        return
    masters = bucket.array().detach()
    full = masters.to(comm.mesh.device, copy=True) if masters.device != comm.mesh.device else masters
    comm.gather(full, tag, "state").wait()
    if full is not masters:
        masters.copy_(full)


def fragments_of(units: Iterable[Unit], options: Outer, store: Store) -> list[Fragment]:
    """Divide the units with trained parameters into fragments of about equal bytes; units are never cut.

    Args:
        units: at least as many with trained parameters as there are fragments.
    """
    trained = [unit for unit in units if any(bucket.spec.is_reduced for bucket in unit.buckets)]
    sizes = [sum(b.layout.full_numel for b in unit.buckets if b.spec.is_reduced) for unit in trained]
    return [Fragment(number, part, options, store) for number, part in enumerate(options.divided(trained, sizes))]
