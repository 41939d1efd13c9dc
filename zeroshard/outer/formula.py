"""The arithmetic of an exchange between islands, on flat tensors.

Owns the formulas for islands of one launch; `island_exchange.py` has those of launches of their own, in numpy. It must
not know ranks, messages or when an exchange happens.

Note: an exchange
    An anchor is what all islands have of a parameter, in fp32 or better. An island's change is its parameter minus the
    anchor, plus what rounding lost of its last change (`encoded`). The mean is the sum of the changes in the order of
    islands, multiplied by 1 / islands (`mean_of`); every island computes it from the same messages, its own included,
    so that anchors stay equal, bit for bit. An anchor then moves by the mean, or by the step of the outer optimizer
    whose gradient is the negative mean (`moved`). The anchor replaces the parameter, or is mixed with it (`mixed`).
"""

from collections.abc import Iterable, Sequence

import torch

from zeroshard.table.spec import BLOCK_NUMEL as BLOCK
from zeroshard.wire.codec import Codec, sum_in_rank_order

__all__ = ["change_of", "encoded", "mean_of", "mixed", "moved"]

Tensor = torch.Tensor


def change_of(values: Tensor, anchor: Tensor, out: Tensor) -> None:
    """Write the change of parameters since an exchange to `out`.

    Args:
        values: (n,), the present parameters (master weights), of any dtype, in any memory.
        anchor: (n,), the parameters of the last exchange.
        out: (n,), of the anchor's dtype and device.
    """
    torch.sub(values.to(anchor.device, anchor.dtype), anchor, out=out)


def encoded(change: Tensor, lost: Tensor | None, codec: Codec, message: Tensor) -> None:
    """Write the message of a change, and keep what rounding loses.

    Args:
        change: (n,), of fp32 or better; it is changed.
        lost: (n,), what rounding lost of the last change, of which the new value is written; None for codecs that lose
            nothing.
        message: (codec.message_numel(n),), on any device.
    """
    if lost is not None:
        change += lost
    here = message if message.device == change.device else torch.empty_like(message, device=change.device)
    codec.encode(change, here)
    if lost is not None:
        blocks = codec.decoded_blocks(here, change.dtype)
        for left, block, told in zip(lost.split(BLOCK), change.split(BLOCK), blocks, strict=True):
            torch.sub(block, told, out=left)
    if here is not message:
        message.copy_(here)


def mean_of(messages: Sequence[Tensor], codec: Codec, islands: int, out: Tensor) -> None:
    """Write the mean of changes to `out`: their sum in the given order, multiplied by 1 / islands.

    Args:
        messages: of one version, in the order of islands.
        islands: the number that the sum is divided by.
        out: (n,), fp32 or better.
    """
    sum_in_rank_order([codec.decoded_blocks(message, out.dtype) for message in messages], 1.0 / islands, out)


def moved(
    anchors: Sequence[torch.nn.Parameter], means: Iterable[Tensor], optimizer: torch.optim.Optimizer | None
) -> None:
    """Move anchors by the mean change of all islands.

    Args:
        means: (n,) for each anchor; an outer optimizer changes them.
        optimizer: the outer optimizer, of these anchors and possibly others, which stay; None adds the mean.
    """
    for anchor, mean in zip(anchors, means, strict=True):
        if optimizer is None:
            anchor.data += mean
        else:
            anchor.grad = mean.neg_()
    if optimizer is not None:
        optimizer.step()
        for anchor in anchors:
            anchor.grad = None


def mixed(values: Tensor, anchor: Tensor, own: float) -> None:
    """Replace parameters by the anchor, or mix both.

    Args:
        values: (n,), the parameters (master weights), of any dtype, in any memory.
        own: the weight of the parameters, in [0, 1).
    """
    if own:
        anchor = torch.lerp(anchor, values.to(anchor.device, anchor.dtype), own)
    values.copy_(anchor.to(values.device, values.dtype))
