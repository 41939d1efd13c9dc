"""The refusal of CUDA graphs that torch.compile records by itself.

Owns where compiled code with `mode="reduce-overhead"` is looked for. `devices.Lane` refuses captures that user code
begins. Read its text first.
"""

from typing import Final, final

from torch import nn

from zeroshard.core.hooks import Eager
from zeroshard.torch_private import is_called_by_cuda_graphs, uses_cuda_graphs

__all__ = ["RefuseGraphs", "refuse_graphs"]

LOOKS: Final = 3
"""Forwards that are looked at. Compiling comes before the first, or after one that was made to see that all is well."""


def refuse_graphs(model: nn.Module) -> None:
    """Raise if a module of the model is compiled to CUDA graphs.

    Raises:
        ValueError: one is; the text names it.
    """
    for name, module in model.named_modules():
        if uses_cuda_graphs(module):
            raise ValueError(f"'{name or type(module).__name__}' {_REASON}")


_REASON: Final = (
    "is compiled to CUDA graphs (torch.compile with mode='reduce-overhead', 'max-autotune', or triton.cudagraphs). "
    "These keep gradients in memory that the next replay overwrites, and addresses of parameters, which change in each "
    "pass of a sharded model. Compile with the default mode, or with 'max-autotune-no-cudagraphs'."
)


@final
class RefuseGraphs(Eager):
    """Before the model's forward, the first times: nothing of it was compiled to CUDA graphs meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._left = LOOKS

    def _run(self, module: nn.Module, args: object) -> None:
        if self._left:
            self._left -= 1
            refuse_graphs(module)
            if is_called_by_cuda_graphs():
                raise ValueError(f"{type(module).__name__} {_REASON}")
