"""Whether the values of a tensor may be read: an encoding or a comparison asks before it does.

Owns the answer. It must not know what is read.
"""

from enum import Enum

import torch

from zeroshard.torch_private import is_fake

__all__ = ["Values", "is_plain", "values_of"]


class Values(Enum):
    """Who may read the values of a tensor, and when."""

    HOST = "host"
    """The host, at once."""
    DEVICE = "device"
    """Kernels: the host sees a flag or a number later, and never waits for it."""
    NEVER = "never"
    """Nobody: a tensor of a trace has a size and no memory."""


def values_of(tensor: torch.Tensor) -> Values:
    """Return whether the values of a tensor may be read."""
    if is_fake(tensor) or tensor.is_meta:
        return Values.NEVER
    return Values.HOST if tensor.device.type == "cpu" else Values.DEVICE


def is_plain(tensor: object) -> bool:
    """Return whether a tensor is numbers in a storage and no more, as those of subclasses may be."""
    return type(tensor) is torch.Tensor or is_fake(tensor)
