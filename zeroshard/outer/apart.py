"""Islands as the handle of a model sees them, whichever way they exchange.

Owns that interface, and the count of steps. It must not know exchanges: `islands.py` has those of one launch, and
`mailed.py` those of launches of their own.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from zeroshard.core.engine import Engine
from zeroshard.table.bytes import add_bytes
from zeroshard.table.cells import Cell
from zeroshard.table.trace import Memory
from zeroshard.update.optimizer import ShardedOptimizer
from zeroshard.whole.masters import check_trained, left_out

__all__ = ["Apart", "with_states"]


def with_states(memory: Memory, cell: Cell, now: int, later: int) -> Memory:
    """Return `memory` with bytes of states more.

    Args:
        cell: where they are.
        now: bytes of this moment and of the peak.
        later: predicted bytes.
    """

    def more(columns: Mapping[str, int], nbytes: int) -> dict[str, int]:
        counted = Counter(columns)
        add_bytes(counted, "states", cell, (nbytes, 0))
        return dict(counted)

    return Memory(more(memory.resident_bytes, now), more(memory.peak_bytes, now), more(memory.predicted_bytes, later))


class Apart(ABC):
    """A model that an island trains by itself.

    Args:
        optimizers: the model's, including those attached later.
    """

    def __init__(self, engine: Engine, optimizers: Sequence[ShardedOptimizer]) -> None:
        self._engine, self._optimizers = engine, optimizers
        self._left = left_out(engine)
        self.steps = 0
        """Steps so far, skipped ones included."""
        self._seen, self._before = 0, list[int]()
        """The steps that each optimizer has made since the count began, and those of each before that."""

    def follow(self, one: ShardedOptimizer) -> None:
        """Count the steps of the last optimizer of the model; one that was attached later has made those of now."""
        self._before.append(one.steps - self._seen)
        self._engine.undo.keep(one.optimizer.register_step_post_hook(self._after_step))

    def count(self) -> int:
        """Return the steps that each optimizer of the model has made since the count began."""
        return min((one.steps - n for one, n in zip(self._optimizers, self._before, strict=True)), default=0)

    def recount(self) -> None:
        """Begin to count anew, after a load has changed the steps of the optimizers."""
        self._seen, self._before = 0, [one.steps for one in self._optimizers]

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The hook also runs after a step of the class that an optimizer extends, and after that of each optimizer.
        if (count := self.count()) <= self._seen:
            return
        self._seen = count
        self.steps += 1
        check_trained(self._engine, self._left, "zs.shard(outer=)")
        self.exchange()

    @abstractmethod
    def exchange(self) -> None:
        """Begin and end the exchanges that are due after this step."""

    @abstractmethod
    def finish(self) -> None:
        """Exchange what was not exchanged yet. See `Zero.finish`."""

    @abstractmethod
    def written(self, gathered: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Return `gathered(writeback=True)` such that what it writes is no change that the island has learned.

        Raises:
            RuntimeError: on entry, if islands have more than what they have in common.
        """

    @abstractmethod
    def loaded(self) -> None:
        """Go on after `Zero.load`."""

    @abstractmethod
    def counted(self, memory: Memory) -> Memory:
        """Return `memory` with what islands keep besides the engine's state."""

    @abstractmethod
    def sent_bytes(self) -> Counter[str]:
        """Return the bytes that this rank has sent to other islands, by kind as in `Traffic`."""

    @abstractmethod
    def check_copies(self) -> None:
        """Raise on every rank unless what islands have in common is equal. See `Zero.check_copies`."""

    def check_detach(self) -> None:  # noqa: B027 (most islands may end at any time)
        """Raise if islands cannot end now."""

    @abstractmethod
    def close(self) -> None:
        """End the connections, when no rank uses them any more."""
