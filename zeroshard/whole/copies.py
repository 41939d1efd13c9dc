"""The comparison of values that several ranks hold copies of.

Owns the comparison. Each rank computes its own copies, so a bit error from memory or a kernel stays on its rank, and
later steps spread its effects. It must not know repairs: it only reports.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from zeroshard.core.changes import torn_on_ranks
from zeroshard.core.engine import Engine
from zeroshard.core.slot import Slot, slot_of
from zeroshard.optim.packed import parts_of
from zeroshard.table.errors import RankMismatchError
from zeroshard.torch_private import has_split
from zeroshard.update.optimizer import ShardedOptimizer, is_cut
from zeroshard.whole.owned import is_stored, own_state

__all__ = ["check_copies", "sum_bits"]

Tensor = torch.Tensor

WORD_BYTES: Final = torch.int64.itemsize
PIECE_NUMEL: Final = 1 << 24
"""Elements that are summed at a time: whole words of any dtype."""


@dataclass(frozen=True)
class Copy:
    """This rank's copy of a value; the ranks that differ from it only along `axes` hold the others."""

    name: str
    value: Tensor
    axes: tuple[str, ...]


def check_copies(engine: Engine, model: nn.Module, optimizers: Sequence[ShardedOptimizer]) -> None:
    """Raise on every rank unless all copies are equal, bit for bit. See `Zero.check_copies`."""
    engine.leave_passes("check_copies()")
    is_alone = engine.mesh.world_size == 1
    copies = [] if is_alone else list(_copies(engine, model, optimizers))
    failure = _difference(engine, copies) if copies or is_alone else ""
    if not engine.order.votes.span("check_copies()", int(not failure)) and not failure:
        failure = "Copies at another place of the pipe are no longer equal; the errors there name them."
    if failure:
        raise RankMismatchError(f"{engine.mesh} {failure}")
    engine.check_tied("check_copies()")


def _difference(engine: Engine, copies: Sequence[Copy]) -> str:
    """Return what differs between ranks that hold copies, or is torn, equal on every rank; "" if nothing is."""
    what = f"the comparison of {len(copies)} copies"
    changes = [bucket.changes for unit in engine.units for bucket in unit.buckets]
    if engine.order.barrier(what, any(one.torn for one in changes))[1]:
        return torn_on_ranks(changes, engine.comm, what)
    if not copies:
        return ""
    sums = torch.stack([sum_bits(copy.value).to(engine.mesh.device) for copy in copies])
    axes = sorted({copy.axes for copy in copies})
    totals = torch.stack([sums[[copy.axes == one for copy in copies]].sum() for one in axes])
    if not _differ(engine, engine.comm.collect(totals, what), axes).any():
        return ""
    rows = engine.comm.collect(sums, what)
    first = int(_differ(engine, rows, [copy.axes for copy in copies]).nonzero()[0])
    held = engine.mesh.lines([f"{value & 2**64 - 1:016x}" for value in rows[:, first].tolist()])
    return (
        f"The copies of {copies[first].name} are no longer equal; sums of their bits:\n{held}\n"
        "Memory or a kernel of a rank failed, user code changed the copy of one rank, or ranks along 'tensor' got "
        "other data or random numbers. Load a checkpoint, and check that rank's host."
    )


def _copies(engine: Engine, model: nn.Module, optimizers: Sequence[ShardedOptimizer]) -> Iterator[Copy]:
    """Yield this rank's copies of values that other ranks also hold, with equal names in equal order on every rank."""
    has_replicas, has_axis = engine.mesh.replicas > 1, len(engine.mesh.tensor_ranks) > 1
    for path, module in model.named_modules() if has_axis else ():
        # A layer whose parameters are split may have buffers for its part.
        if not has_split(map(type, module.parameters(recurse=False))):
            named = module.named_buffers(path, recurse=False)
            yield from (Copy(f"buffer '{name}'", buffer, ("tensor",)) for name, buffer in named)
    for unit in engine.units:
        for bucket in unit.buckets:
            is_whole, slots = bucket.spec.is_whole, [slot_of(parameter) for parameter in bucket.parameters]
            if has_replicas and not is_whole:
                yield Copy(f"the shard of {bucket.spec.name}", bucket.shard, ("replicate",))
            for slot in slots:
                if is_whole:
                    yield Copy(f"parameter '{slot.name}'", bucket.views[slot.index], _axes(slot, is_cut=False))
                    continue
                if not (has_axis and slot.form.is_alike):
                    continue
                value = bucket.shard[slice(*bucket.layout.parts(*bucket.spec.shard)[slot.index])]
                yield Copy(f"the part of '{slot.name}' in a shard", value, ("tensor",))
    for one in optimizers:
        for master in one.entries:
            slot = slot_of(master)
            spec = slot.bucket.spec
            axes = _axes(slot, is_cut=not spec.updates_all)
            if spec.updates_all or has_replicas or (has_axis and slot.form.is_alike):
                yield from _copies_of_states(one, master, axes)


def _axes(slot: Slot, *, is_cut: bool) -> tuple[str, ...]:
    """Return the axes along which ranks hold equal values of a parameter, or of a part of it in their shards."""
    return ("replicate", *(["shard"] * (not is_cut)), *(["tensor"] * slot.form.is_alike))


def _copies_of_states(one: ShardedOptimizer, master: Tensor, axes: tuple[str, ...]) -> Iterator[Copy]:
    """Yield the copies of the master values and the states of one parameter."""
    slot = slot_of(master)
    if slot.bucket.spec.has_masters:
        yield Copy(f"the master values of '{slot.name}'", slot.bucket.master(slot.index), axes)
    if slot.updater is not None:
        # Only owners have the states, in each replica: every rank compares one sum.
        sums = [sum_bits(value) for value in own_state(one, master).values() if is_stored(value)]
        none = torch.zeros(1, dtype=torch.int64, device=slot.bucket.device)
        yield Copy(f"the states of '{slot.name}'", torch.stack(sums) if sums else none, axes)
        return
    state = one.optimizer.state.get(master, {})
    parts = parts_of(one.optimizer, state)
    for key, value in sorted(state.items(), key=lambda one: repr(one[0])):
        if key in parts or is_cut(key, value, master):
            yield Copy(f"{key} of '{slot.name}'", value, axes)


def sum_bits(value: Tensor) -> Tensor:
    """Return the sum of a tensor's memory as integers, modulo 2**64, 0-d int64; every single bit changes it.

    A value in a file, or one number for all elements, is read in pieces.
    """
    return torch.stack([_sum_words(piece) for piece in value.detach().reshape(-1).split(PIECE_NUMEL)]).sum()


def _sum_words(piece: Tensor) -> Tensor:
    """Return `sum_bits` of (numel,).

    Words of 8 bytes are summed in place; narrower words would first be copied to wider ones.
    """
    # A single element is contiguous at any stride, but only a stride of 1 can be viewed as bytes.
    raw = (piece if piece.stride() == (1,) else piece.clone(memory_format=torch.contiguous_format)).view(torch.uint8)
    if raw.storage_offset() % WORD_BYTES:
        raw = raw.clone()
    end = raw.numel() // WORD_BYTES * WORD_BYTES
    return raw[:end].view(torch.int64).sum() + raw[end:].sum(dtype=torch.int64)


def _differ(engine: Engine, rows: Tensor, axes: Sequence[tuple[str, ...]]) -> Tensor:
    """Return, for each column of (world_size, columns), whether ranks that hold copies disagree.

    Args:
        axes: of the copies of each column.
    """

    def differ(names: tuple[str, ...]) -> Tensor:
        ranks = engine.mesh.rows(*names)
        return (rows[ranks] != rows[ranks[:, :1]]).any(0).any(0)

    differs = {names: differ(names) for names in set(axes)}
    return torch.stack([differs[names][column] for column, names in enumerate(axes)])
