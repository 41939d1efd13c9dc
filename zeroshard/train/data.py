"""Batches: which tokens each step and each rank reads.

Owns the order of the data. Must not know the text, the model, the engine or the process group: tokens, rank and world
size are plain arguments. Read `training_batch` first, then `heldout_batches`.

Note: data order
    The global batch of a step is a pure function of the seed and the step, and a rank reads its contiguous part. So a
    run sees the same data in the same order at any rank count, any accumulation and any stage, and any step can be
    repeated without those before it. Where the ranks do not divide the batch, some read one window more than others,
    and the loop weighs each micro-batch by its windows.

Note: packing
    Windows are cut from all documents side by side, wherever they begin and end, so no place in a batch is empty. A
    token marks where a document ends; attention is not masked there, and the model learns to look no further.
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
    """Return a rank's part of the global batch of one step: windows at random places, and the tokens that follow.

    Args:
        tokens: (numel,), any integer dtype.
        seed: chooses the order of the data.
        step: counts from 0.
        batch: windows of the global batch, at least `world_size`.
        context: tokens of a window.
        rank: the part to return.
        world_size: the number of parts.

    Returns:
        Inputs and targets, each (share, context), int64; a target is the token after its input. The shares of ranks
        differ by one window at most.
    """
    first, last = (batch * part // world_size for part in (rank, rank + 1))
    draw = np.random.default_rng([seed, step])
    starts = draw.integers(0, tokens.numel() - context, size=batch)[first:last]
    windows = torch.stack([tokens[start : start + context + 1].long() for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


def count_scored(ends: Tensor, limit_bytes: int = 0) -> tuple[int, int]:
    """Return how many tokens are scored, and how many bytes of text they stand for. The first one never is.

    Args:
        ends: (numel,), int64: how many bytes of the text end with each token.
        limit_bytes: score no more than this many bytes, the first ones, but at least one token's; 0 for all.
    """
    first, last = int(ends[0]), ends.numel() - 1
    if limit_bytes:
        within = int(torch.searchsorted(ends, first + limit_bytes, right=True)) - 1
        last = max(within, int(torch.searchsorted(ends, first, right=True)))
    return last, int(ends[last]) - first


def heldout_batches(
    tokens: Tensor, *, batch: int, context: int, scored: int, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a rank's part of the held-out text, in windows side by side: each token but the first is a target once.

    Every rank yields equally many batches of one shape, as the collectives inside a forward pass need it. What is
    missing at the end is padded with zeros, whose targets are `IGNORED`.

    Args:
        tokens: (numel,), any integer dtype.
        batch: windows of a batch, on each rank.
        context: tokens of a window.
        scored: how many tokens, the first ones but one, are targets.
        rank: the part to return.
        world_size: the number of parts.

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
