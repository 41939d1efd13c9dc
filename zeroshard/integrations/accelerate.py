"""What makes Accelerate take a sharded model as it is.

Owns the names of Accelerate that tell, which are not public; `tests/integrations/test_trainers.py` holds them against
the installed release. Imports nothing of Accelerate.
"""

from typing import Final

from torch import nn

import zeroshard as zs

__all__ = ["PREPARED", "mark"]

PREPARED: Final = "_is_accelerate_prepared"
"""The attribute of what `Accelerator.prepare` returns as it is: a model that is wrapped already."""
NO_SYNC: Final = "no_sync"
"""The method of a model that `Accelerator.no_sync` and `Accelerator.accumulate` enter."""


def mark(model: nn.Module, zero: zs.Zero | None) -> None:
    """Let `Accelerator.prepare` return a sharded model unchanged, and `Accelerator.no_sync` delay its reductions.

    Args:
        model: a model of `zs.shard`.
        zero: its handle; None for a model that is not trained.
    """
    setattr(model, PREPARED, True)
    if zero is not None:
        setattr(model, NO_SYNC, zero.no_sync)
