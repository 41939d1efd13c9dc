"""The rejection of an autocast that Accelerate was asked for and does not apply.

Owns the moment and the text. Accelerate, and with it the Trainer of Transformers, applies `mixed_precision=` in the
forward of models that it wraps. It takes a sharded model as it is on several ranks, so the model would compute in
float32 without a word. Read `accelerate_private.py` first.
"""

from typing import Final, final

import torch
from torch import nn

from zeroshard.accelerate_private import AUTOCAST, asked, warn_if_uncompiled
from zeroshard.core.hooks import Eager
from zeroshard.wire.mesh import Mesh

__all__ = ["RefuseUnapplied"]

LOOKS: Final = 3
"""Number of forwards with gradients to check. User code may create its Accelerator after `zs.shard`."""


@final
class RefuseUnapplied(Eager):
    """Pre-hook of a model's first forwards: raises if Accelerate has a mixed precision without effect.

    Args:
        is_float32: whether the model computes in float32.
    """

    def __init__(self, mesh: Mesh, *, is_float32: bool) -> None:
        super().__init__()
        self._mesh, self._is_float32, self._left = mesh, is_float32, LOOKS
        self._is_first = True

    def _run(self, module: nn.Module, args: object) -> None:
        if not self._left:
            return
        if self._is_first and self._mesh.rank == 0 and self._mesh.world_size > 1:
            warn_if_uncompiled(module)
        self._is_first = False
        self._left -= torch.is_grad_enabled()  # before training, each evaluation is checked
        kind, precision = self._mesh.device.type, str(asked("_mixed_precision") or "no")
        if precision == "no" or not self._is_float32 or AUTOCAST in vars(module) or torch.is_autocast_enabled(kind):
            return
        ours = precision if precision == "fp16" else "bf16"
        raise RuntimeError(
            f"{self._mesh} Accelerate has mixed_precision={precision!r} (TrainingArguments({ours}=True) sets it, too) "
            "but applies no autocast to a sharded model on several ranks, which would compute in float32. Write "
            f"zs.shard(..., precision={ours!r}) and leave Accelerate's mixed_precision at 'no'; or call the model "
            "under `with accelerator.autocast():`."
        )
