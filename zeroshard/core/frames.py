"""What is entered and not left: forwards of modules, and the context that gathers everything.

Owns the records alone; `core/engine.py` makes them and undoes what they stand for.
"""

from dataclasses import dataclass, field
from typing import Any, final

import torch

from zeroshard.torch_private import Call

__all__ = ["Frame", "Gathered"]


@final
@dataclass
class Frame:
    """One entered module: what its exit must undo."""

    module: torch.nn.Module
    units: tuple[int, ...]
    is_recompute: bool
    exception: BaseException | None
    has_grad: bool
    call: Call = field(default_factory=lambda: Call("zeroshard.core.hooks"))
    saved: Any = None
    taken: list[int] = field(default_factory=list)
    between: int | None = None
    """In the outermost frame: the unit of several modules that no module uses now, and the next one may."""


@final
@dataclass(frozen=True)
class Gathered:
    """The `gathered()` context that is open: what may be changed and read in it."""

    writeback: bool
    states: bool
