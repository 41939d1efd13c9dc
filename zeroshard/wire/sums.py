"""Sums of what several ranks have, in the order of ranks, straight from their memory where it can be read.

Owns the order of additions and their precision, on which it depends that all stages have the same bits. It must not
know when another rank's memory may be read: `wire/host.py` does.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from zeroshard.wire.memory import HostMemory

__all__ = ["add_up", "sum_in_rank_order"]

Tensor = torch.Tensor

BLOCK_NUMEL: Final = 1 << 16
"""Elements that are added up at once, so that sums stay in the cache."""
SEEN_NUMEL: Final = 1 << 18
"""Elements of another rank's memory that are read before their pages are dropped."""


def add_up(
    memory: HostMemory,
    offsets: Mapping[int, int],
    like: Tensor,
    mine: Tensor,
    wire: torch.dtype,
    scale: float,
    out: Tensor,
) -> None:
    """Leave in `out` the scaled sum of `mine` and of what the other ranks of this host show this one.

    Args:
        offsets: where the others show it, by place.
        like: (N * n,), what it lies in there: a row of n elements for each rank, of which `mine.numel()` count.
        mine, wire, scale, out: as in `sum_in_rank_order`; (m,), m at most n.
    """
    ranks = len(offsets) + 1
    (place,) = set(range(ranks)) - set(offsets)
    seen = {
        other: memory.of_peer(other, at, like.numel(), like.dtype).view(ranks, -1)[place, : mine.numel()]
        for other, at in offsets.items()
    }
    chunks = [seen.get(rank, mine).split(SEEN_NUMEL) for rank in range(ranks)]
    for result, *parts in zip(out.split(SEEN_NUMEL), *chunks, strict=True):
        sum_in_rank_order(parts, wire, scale, result)
        for other in seen:
            memory.drop(other, parts[other])


def sum_in_rank_order(chunks: Sequence[Tensor], wire: torch.dtype, scale: float, out: Tensor) -> None:
    """Leave scale * (chunk of rank 0 + chunk of rank 1 + ...) in `out`, which may be one of them.

    Each is rounded to `wire`, and they are added in fp32 or better.
    """
    dtype = torch.promote_types(chunks[0].dtype, torch.float32)
    for result, *blocks in zip(out.split(BLOCK_NUMEL), *(chunk.split(BLOCK_NUMEL) for chunk in chunks), strict=True):
        total, *others, last = (block.to(wire).to(dtype) for block in blocks)
        for other in others:
            total = total + other
        if result.dtype == dtype:
            torch.add(total, last, out=result).mul_(scale)
        else:
            result.copy_((total + last).mul_(scale))
