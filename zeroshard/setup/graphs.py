"""The rejection of CUDA graphs that torch.compile records.

Owns the search for compiled code with `mode="reduce-overhead"`. `devices.Lane` rejects captures by user code; read its
docstring first.
"""

from typing import Final, final

from torch import nn

from zeroshard.core.hooks import Eager
from zeroshard.torch_private import is_called_by_cuda_graphs, uses_cuda_graphs

__all__ = ["RefuseGraphs", "refuse_graphs"]

LOOKS: Final = 3
"""Number of forwards to check. User code compiles before the first forward, or after a trial forward."""


def refuse_graphs(model: nn.Module) -> None:
    """Raise if a module of the model is compiled to CUDA graphs.

    Raises:
        ValueError: a module is compiled to CUDA graphs; the error names the module.
    """
    for name, module in model.named_modules():
        if uses_cuda_graphs(module):
            raise ValueError(f"'{name or type(module).__name__}' {_REASON}")


_REASON: Final = (
    "is compiled to CUDA graphs (torch.compile with mode='reduce-overhead', 'max-autotune', or triton.cudagraphs). "
    "CUDA graphs keep gradients in memory that the next replay overwrites, and record addresses of parameters, which "
    "change in each pass of a sharded model. Compile with the default mode, or with 'max-autotune-no-cudagraphs'."
)


@final
class RefuseGraphs(Eager):
    """Pre-hook of the model's first forwards: raises if a module was compiled to CUDA graphs."""

    def __init__(self) -> None:
        super().__init__()
        self._left = LOOKS

    def _run(self, module: nn.Module, args: object) -> None:
        if self._left:
            self._left -= 1
            refuse_graphs(module)
            if is_called_by_cuda_graphs():
                raise ValueError(f"{type(module).__name__} {_REASON}")
