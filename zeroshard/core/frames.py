"""Records of forwards and `gathered()` contexts that have begun and not ended.

Owns the records, and takes back what a forward that ended without its hook has done; `core/engine.py` makes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from zeroshard.core.unit import Unit
from zeroshard.table.schedule import ROOT
from zeroshard.torch_private import graph_task
from zeroshard.watch.stacks import Call

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
    has_hooks: bool = False
    taken: list[int] = field(default_factory=list)
    between: int | None = None
    """In the outermost frame: the unit of several modules that no module uses now, and the next module may use."""


@final
class Frames:
    """The modules whose forwards have begun, outermost first.

    Args:
        end_hooks: ends the hooks of saved tensors that the outermost one has begun.
    """

    def __init__(self, units: Sequence[Unit], end_hooks: Callable[[], object]) -> None:
        self._units, self._end_hooks = units, end_hooks
        self.entered: list[Frame] = []

    def undo(self) -> Frame:
        """Undo the local effects of the last entry."""
        frame = self.entered.pop()
        for number in frame.taken:
            self._units[number].users -= 1
        if frame.has_hooks:
            self._end_hooks()
        return frame

    def running(self) -> list[Frame]:
        """Return the entered modules; undo entries of calls that ended without hooks, as by a KeyboardInterrupt."""
        for frame in reversed(self.entered):
            # A thread beside the forward must not undo an entry that its own thread is about to end.
            if (not frame.call.is_own and graph_task() == -1) or frame.call.is_running():
                break
            self.undo()
        return self.entered

    @property
    def are_own(self) -> bool:
        """Whether this thread has entered the innermost module, and not another thread beside this one."""
        return any(frame.call.is_own for frame in self.entered[-1:])

    def unit_under_way(self) -> int:
        """Return the unit of the innermost module."""
        return next((frame.units[-1] for frame in reversed(self.entered) if frame.units), ROOT)


@final
@dataclass(frozen=True)
class Gathered:
    """The open `gathered()` context: whether it permits changes and includes states."""

    writeback: bool
    states: bool
