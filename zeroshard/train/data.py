"""Batches: the tokens that each rank reads in each step.

Owns the order of the data. Must not know the text, the model, the engine or the process group: tokens, rank and world
size are plain arguments. Read `training_batch` first, then `heldout_batches`.

Note: data order
    The global batch of a step is a pure function of the seed and the step, and each rank reads a contiguous part.
    Therefore the data and their order are the same at any rank count, accumulation and stage, and any step can be
    repeated without the steps before it. If the ranks do not divide the batch, some ranks read one window more, and
    the loop weights each micro-batch by its windows.

Note: packing
    Windows are cut from the concatenated documents at any position, so batches have no padding. A token marks the end
    of each document; attention is not masked there, and the model learns to ignore earlier documents.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor

__all__ = ["IGNORED", "count_scored", "heldout_batches", "training_batch"]

IGNORED: Final = -1


def training_batch(
    tokens: Tensor, *, seed: int, step: int, batch: int, context: int, rank: int = 0, world_size: int = 1
) -> tuple[Tensor, Tensor]:
    """Return a rank's part of the global batch of one step: windows at random offsets, and their next tokens.

    Args:
        tokens: (numel,), any integer dtype.
        seed: seed of the data order.
        step: index of the step, from 0.
        batch: number of windows of the global batch, at least `world_size`.
        context: tokens per window.
        rank: index of the part to return.
        world_size: number of parts.

    Returns:
        Inputs and targets, each (share, context), int64; a target is the token after its input. The shares of ranks
        differ by at most one window.
    """
    first, last = (batch * part // world_size for part in (rank, rank + 1))
    draw = np.random.default_rng([seed, step])
    starts = draw.integers(0, tokens.numel() - context, size=batch)[first:last]
    windows = torch.stack([tokens[start : start + context + 1].long() for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


def count_scored(ends: Tensor, limit_bytes: int = 0) -> tuple[int, int]:
    """Return the number of scored tokens, and the bytes of text that they cover. The first token is never scored.

    Args:
        ends: (numel,), int64: for each token, the number of bytes of text up to its end.
        limit_bytes: maximum number of bytes to score, from the beginning, but at least one token; 0 for all.
    """
    first, last = int(ends[0]), ends.numel() - 1
    if limit_bytes:
        within = int(torch.searchsorted(ends, first + limit_bytes, right=True)) - 1
        last = max(within, int(torch.searchsorted(ends, first, right=True)))
    return last, int(ends[last]) - first


def heldout_batches(
    tokens: Tensor, *, batch: int, context: int, scored: int, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a rank's part of the held-out text, in adjacent windows: each token except the first is a target once.

    Every rank yields the same number of batches of one shape, because forward passes contain collectives. Zeros pad the
    end, with `IGNORED` as their targets.

    Args:
        tokens: (numel,), any integer dtype.
        batch: windows per batch on each rank.
        context: tokens per window.
        scored: number of target tokens, from the second token on.
        rank: index of the part to return.
        world_size: number of parts.

    Yields:
        Inputs and targets, each (batch, context), int64.
    """
    per_round = batch * context * world_size
    padded = -(-scored // per_round) * per_round
    inputs = torch.zeros(padded, dtype=torch.long)
    targets = torch.full((padded,), IGNORED, dtype=torch.long)
    inputs[:scored] = tokens[:scored].long()
    targets[:scored] = tokens[1 : scored + 1].long()
    shape = (padded // per_round, world_size, batch, context)
    yield from zip(inputs.view(shape)[:, rank], targets.view(shape)[:, rank], strict=True)
