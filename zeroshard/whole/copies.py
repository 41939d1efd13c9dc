"""The comparison of values that several ranks hold copies of.

Owns the comparison. Each rank computes its own copies, so a bit error from memory or a kernel stays on its rank, and
later steps spread its effects. It must not know repairs: it only reports.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from zeroshard.core.engine import Engine
from zeroshard.core.slot import slot_of
from zeroshard.optim.packed import parts_of
from zeroshard.table.errors import RankMismatchError
from zeroshard.update.optimizer import ShardedOptimizer, is_cut
from zeroshard.whole.owned import is_stored, own_state

__all__ = ["check_copies"]

Tensor = torch.Tensor

WORD_BYTES: Final = torch.int64.itemsize
PIECE_NUMEL: Final = 1 << 24
"""Elements that are summed at a time: whole words of any dtype."""


@dataclass(frozen=True)
class Copy:
    """This rank's copy of a value. `is_everywhere`: all ranks hold the value, not only those with the same shard.

    Ranks along the tensor axis hold different parts.
    """

    name: str
    value: Tensor
    is_everywhere: bool


def check_copies(engine: Engine, optimizers: Sequence[ShardedOptimizer]) -> None:
    """Raise on every rank unless all copies are equal, bit for bit. See `Zero.check_copies`."""
    engine.leave_passes("check_copies()")
    copies = [] if engine.mesh.world_size == 1 else list(_copies(engine, optimizers))
    failure = _difference(engine, copies) if copies else ""
    if not engine.order.votes.span("check_copies()", int(not failure)) and not failure:
        failure = "Copies at another place of the pipe are no longer equal; the errors there name them."
    if failure:
        raise RankMismatchError(f"{engine.mesh} {failure}")


def _difference(engine: Engine, copies: Sequence[Copy]) -> str:
    """Return what differs between ranks that hold copies, equal on every rank; "" if nothing does."""
    what = f"the comparison of {len(copies)} copies"
    engine.order.barrier(what)
    sums = torch.stack([_sum_bits(copy.value).to(engine.mesh.device) for copy in copies])
    is_everywhere = torch.tensor([copy.is_everywhere for copy in copies], device=sums.device)
    both = torch.stack([sums[is_everywhere].sum(), sums[~is_everywhere].sum()])
    differs = _differ(engine, engine.comm.collect(both, what), torch.tensor([True, False], device=sums.device))
    if not differs.any():
        return ""
    rows = engine.comm.collect(sums, what)
    first = int(_differ(engine, rows, is_everywhere).nonzero()[0])
    held = engine.mesh.lines([f"{value & 2**64 - 1:016x}" for value in rows[:, first].tolist()])
    return (
        f"The copies of {copies[first].name} are no longer equal; sums of their bits:\n{held}\n"
        "Memory or a kernel of a rank failed, or user code changed the copy of one rank. Load a checkpoint, "
        "and check that rank's host."
    )


def _copies(engine: Engine, optimizers: Sequence[ShardedOptimizer]) -> Iterator[Copy]:
    """Yield this rank's copies of values that other ranks also hold, with equal names in equal order on every rank."""
    has_replicas = engine.mesh.replicas > 1
    for unit in engine.units:
        for bucket in unit.buckets:
            if bucket.spec.is_whole:
                views = zip(bucket.spec.names, bucket.views, strict=True)
                yield from (Copy(f"parameter '{name}'", view, True) for name, view in views)
            elif has_replicas:
                yield Copy(f"the shard of {bucket.spec.name}", bucket.shard, False)
    for one in optimizers:
        for master in one.masters:
            slot = slot_of(master)
            is_everywhere = slot.bucket.spec.updates_all
            if not is_everywhere and not has_replicas:
                continue
            spec = slot.bucket.spec
            if spec.has_masters:
                yield Copy(f"the master values of '{slot.name}'", slot.bucket.master(slot.index), is_everywhere)
            if slot.updater is not None:
                # Only owners have the states, in each replica: every rank compares one sum.
                sums = [_sum_bits(value) for value in own_state(one, master).values() if is_stored(value)]
                none = torch.zeros(1, dtype=torch.int64, device=slot.bucket.device)
                yield Copy(f"the states of '{slot.name}'", torch.stack(sums) if sums else none, is_everywhere)
                continue
            state = one.optimizer.state.get(master, {})
            parts = parts_of(one.optimizer, state)
            for key, value in sorted(state.items()):
                if key in parts or is_cut(key, value, master):
                    yield Copy(f"{key} of '{slot.name}'", value, is_everywhere)


def _sum_bits(value: Tensor) -> Tensor:
    """Return the sum of a tensor's memory as integers, modulo 2**64, 0-d int64; every single bit changes it.

    A value in a file, or one number for all elements, is read in pieces.
    """
    return torch.stack([_sum_words(piece) for piece in value.detach().reshape(-1).split(PIECE_NUMEL)]).sum()


def _sum_words(piece: Tensor) -> Tensor:
    """Return `_sum_bits` of (numel,).

    Words of 8 bytes are summed in place; narrower words would first be copied to wider ones.
    """
    # A single element is contiguous at any stride, but only a stride of 1 can be viewed as bytes.
    raw = (piece if piece.stride() == (1,) else piece.clone(memory_format=torch.contiguous_format)).view(torch.uint8)
    if raw.storage_offset() % WORD_BYTES:
        raw = raw.clone()
    end = raw.numel() // WORD_BYTES * WORD_BYTES
    return raw[:end].view(torch.int64).sum() + raw[end:].sum(dtype=torch.int64)


def _differ(engine: Engine, rows: Tensor, is_everywhere: Tensor) -> Tensor:
    """Return, for each column of (world_size, columns), whether ranks that hold copies disagree."""

    def differ(*axes: str) -> Tensor:
        ranks = engine.mesh.rows(*axes)
        return (rows[ranks] != rows[ranks[:, :1]]).any(0).any(0)

    return torch.where(is_everywhere, differ("replicate", "shard"), differ("replicate"))
