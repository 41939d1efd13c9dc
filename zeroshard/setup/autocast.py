"""The rejection of an autocast that Accelerate was asked for and does not apply.

Owns the names of Accelerate that tell, which are not public; `tests/integrations/test_stock.py` holds them. Accelerate,
and with it the Trainer of Transformers, applies `mixed_precision=` in the forward of models that it prepares. A sharded
model is not prepared on several ranks, so it would train in float32 without a word.
"""

import sys
from typing import Final, final

import torch
from torch import nn

from zeroshard.core.hooks import Eager
from zeroshard.wire.mesh import Mesh

__all__ = ["RefuseUnapplied"]

LOOKS: Final = 3
"""Number of forwards with gradients to check. User code may create its Accelerator after `zs.shard`."""
_STATE: Final = "accelerate.state"
_PREPARED: Final = "_original_forward"
"""The attribute of a model whose forward Accelerate runs under autocast."""


@final
class RefuseUnapplied(Eager):
    """Pre-hook of the first forwards of a float32 model: raises if Accelerate has a mixed precision without effect."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh, self._left = mesh, LOOKS

    def _run(self, module: nn.Module, args: object) -> None:
        if not self._left or not torch.is_grad_enabled():
            return
        self._left -= 1
        asked = _asked_of_accelerate()
        if asked == "no" or _PREPARED in module.__dict__ or torch.is_autocast_enabled(self._mesh.device.type):
            return
        precision = asked if asked == "fp16" else "bf16"
        raise RuntimeError(
            f"{self._mesh} Accelerate has mixed_precision={asked!r} (TrainingArguments({precision}=True) sets it, too) "
            "but applies autocast only in models that it prepares, so this sharded model would train in float32. Write "
            f"zs.shard(..., precision={precision!r}) and leave Accelerate's mixed_precision at 'no'; or call the model "
            "under `with accelerator.autocast():`."
        )


def _asked_of_accelerate() -> str:
    """Return the mixed precision of this process's Accelerator; "no" without one. Imports nothing."""
    state = getattr(sys.modules.get(_STATE), "AcceleratorState", None)
    return str(getattr(state, "_shared_state", {}).get("_mixed_precision") or "no")
