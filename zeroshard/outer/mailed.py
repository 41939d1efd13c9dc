"""An island that is a launch of its own: its model exchanges through a mailbox.

Owns when the model of `zs.shard(outer=)` exchanges so, and what it counts. It must not know sockets. Read `apart.py`
and `island_exchange.py` first.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import final

import torch

from zeroshard.core.engine import Engine
from zeroshard.outer.apart import Apart, with_states
from zeroshard.outer.island_model import join_islands
from zeroshard.outer.island_source import Logged
from zeroshard.outer.options import CELLS, Outer
from zeroshard.table.trace import Memory
from zeroshard.update.optimizer import ShardedOptimizer

__all__ = ["Mailed"]


@final
class Mailed(Apart):
    """The island of a model, seen from this rank.

    Args:
        options: with an address.
        optimizers: the model's, including those attached later.
        known: those that `zs.shard` was given, whose classes must be equal on all islands.

    Raises:
        MailboxError: on every rank; the mailbox cannot be reached, or refuses this island.

    Collective: see `join_islands`; every rank of this island must call.
    """

    def __init__(
        self,
        engine: Engine,
        options: Outer,
        optimizers: Sequence[ShardedOptimizer],
        known: Sequence[torch.optim.Optimizer],
    ) -> None:
        super().__init__(engine, optimizers)
        source = None
        if options.replay is not None:
            source = Logged(Path(options.replay) / f"{options.island}-{engine.mesh.rank}", options.island)
        self._island = join_islands(engine, options.alone(), optimizers=known, source=source)

    def exchange(self) -> None:
        """See `Apart`."""
        self._island.after_step()

    def finish(self) -> None:
        """See `Apart`: puts what was not put yet, and leaves; nobody waits for this island afterwards."""
        self._engine.leave_passes("zero.finish()")
        self._island.finish()

    @contextmanager
    def written(self, gathered: AbstractContextManager[None]) -> Iterator[None]:
        """See `Apart`. Collective: also `Island.come_back`; every rank of this island must enter."""
        if not self._island.is_first:
            raise RuntimeError(
                f"{self._engine.mesh} gathered(writeback=True) on an island with a mailbox: what it writes would be "
                "taken for what this island has learned. Load weights before zs.shard(): those of the first island "
                "are the anchors."
            )
        with gathered:
            yield
        self._island.come_back()

    def loaded(self) -> None:
        """See `Apart`: the optimizer continues as it was saved, with the parameters of `Island.come_back`."""
        self.recount()
        self._island.come_back()

    def counted(self, memory: Memory) -> Memory:
        """See `Apart`."""
        nbytes = self._island.nbytes
        return with_states(memory, CELLS["host"], nbytes, nbytes)

    def sent_bytes(self) -> Counter[str]:
        """See `Apart`: changes are no message between ranks; the logs of island and mailbox have them."""
        return Counter()

    def check_copies(self) -> None:
        """See `Apart`: islands that do not wait have no values in common."""

    def close(self) -> None:
        """See `Apart`."""
        self._island.close()
