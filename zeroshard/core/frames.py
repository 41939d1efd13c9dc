"""Records of forwards and `gathered()` contexts that have begun and not ended.

Owns the records, and what undoes an entry; `core/engine.py` decides what an entry and an exit mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from zeroshard.core.unit import Unit
from zeroshard.table.schedule import ROOT
from zeroshard.torch_private import Call

__all__ = ["Frame", "Frames", "Gathered"]


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
    saved: Any = None
    taken: list[int] = field(default_factory=list)
    between: int | None = None
    """In the outermost frame: the unit of several modules that no module uses now, and the next module may use."""


@final
class Frames:
    """The modules whose forwards have begun and not ended, outermost first; each is a user of its units.

    Args:
        units: all units, indexed by number.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self.open: list[Frame] = []

    def running(self) -> list[Frame]:
        """Return the entered modules; undo entries of calls that ended without hooks, as by a KeyboardInterrupt."""
        while self.open and not self.open[-1].call.is_running():
            self.undo()
        return self.open

    def undo(self) -> Frame:
        """Undo the local effects of the last entry."""
        frame = self.open.pop()
        for number in frame.taken:
            self._units[number].users -= 1
        if frame.saved is not None:
            frame.saved.__exit__(None, None, None)
        return frame

    def unit_under_way(self) -> int:
        """Return the unit of the innermost running module."""
        return next((frame.units[-1] for frame in reversed(self.open) if frame.units), ROOT)


@final
@dataclass(frozen=True)
class Gathered:
    """The open `gathered()` context: whether it permits changes and includes states."""

    writeback: bool
    states: bool
