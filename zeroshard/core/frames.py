"""Records of forwards and `gathered()` contexts that have begun and not ended.

Owns only the records; `core/engine.py` creates and ends them.
"""

from dataclasses import dataclass, field
from typing import final

import torch

from zeroshard.torch_private import Call

__all__ = ["Frame", "Gathered"]


@final
@dataclass
class Frame:
    """A module whose forward has begun, and the work of its end."""

    module: torch.nn.Module
    units: tuple[int, ...]
    is_recompute: bool
    exception: BaseException | None
    has_grad: bool
    call: Call = field(default_factory=lambda: Call("zeroshard.core.hooks"))
    has_hooks: bool = False
    taken: list[int] = field(default_factory=list)
    between: int | None = None
    """In the outermost frame: the unit of several modules that no module uses now, and the next module may use."""


@final
@dataclass(frozen=True)
class Gathered:
    """The open `gathered()` context: whether it permits changes and includes states."""

    writeback: bool
    states: bool
