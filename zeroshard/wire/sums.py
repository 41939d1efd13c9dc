"""Sums of what several ranks have, in the order of ranks.

Owns the order of additions, on which it depends that all stages have the same bits.
"""

from collections.abc import Iterable, Sequence

import torch

from zeroshard.wire.codec import BLOCK_NUMEL

__all__ = ["sum_dtype", "sum_in_rank_order"]

Tensor = torch.Tensor


def sum_dtype(held: torch.dtype) -> torch.dtype:
    """Return what sums of a dtype are made in: fp32 or better."""
    return torch.promote_types(held, torch.float32)


def sum_in_rank_order(ranks: Sequence[Iterable[Tensor]], scale: float, out: Tensor) -> None:
    """Leave scale * (values of rank 0 + values of rank 1 + ...) in `out`, which may be where one rank's values lie.

    Args:
        ranks: of each, its values in blocks of BLOCK_NUMEL, in the dtype of sums.
    """
    for result, total, *others, last in zip(out.split(BLOCK_NUMEL), *ranks, strict=True):
        for other in others:
            total = total + other
        if result.dtype == last.dtype:
            torch.add(total, last, out=result).mul_(scale)
        else:
            result.copy_((total + last).mul_(scale))
