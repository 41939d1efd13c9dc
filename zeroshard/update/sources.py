"""Where the pieces of an optimizer's updates come from, and the parameters that stand for slices in them.

Owns what a source is. It must not know what a source communicates. Read `optim/pieces.py` (what a piece is) and
`update/optimizer.py` with it.

Note: sources
    Each optimizer has one source of pieces. `AtOnce` has none: torch's own call updates all entries. `Background`
    (`background.py`) has a thread update states on the host after the step. `Streams` (`streamed.py`) reads states from
    files and writes them back. `Exchange` (`exchange.py`) sends matrices to the ranks that update them whole.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch

from zeroshard.core.slot import slot_of
from zeroshard.optim.attributes import attributes_of
from zeroshard.optim.pieces import Piece
from zeroshard.store.disk import Disk
from zeroshard.torch_private import version_of

__all__ = ["AtOnce", "Lent", "Source"]

Tensor = torch.Tensor


class Source(ABC):
    """Where the pieces of an optimizer's updates come from."""

    disk: Disk | None = None
    """The file of states or parameters, which its updates write; None without one."""
    choice = ""
    """What ranks must have chosen alike before an update, for the text of their vote."""
    loads: Sequence[float] = ()
    """The cost of the updates of each rank of a replica; empty where no parameter has an owner."""

    def plan(self, groups: Sequence[dict[str, Any]]) -> None:  # noqa: B027 (without owners nothing is planned)
        """Prepare for new groups, which still hold the model's parameters."""

    @abstractmethod
    def update(self) -> AbstractContextManager[Iterable[Piece] | Piece | None]:
        """Begin an update; on exit, end it. On entry, groups must hold their entries.

        Returns: its pieces, in the same order on all ranks; one piece, or None for all entries, if torch's own call
            updates it.

        Raises:
            RuntimeError: on exit, on all ranks, if values could not be read or written on one.
        """

    def check(self) -> None:
        """Raise on all ranks if states are lost. Collective: at most an all-reduce of 8 bytes."""
        if self.disk is not None:
            self.disk.check()


@final
class AtOnce(Source):
    """All entries are in the memory that kernels update."""

    @contextmanager
    def update(self) -> Iterator[None]:
        """See `Source`."""
        yield


@final
class Lent:
    """A parameter that stands for a slice during the update of a piece.

    Args:
        master: the slice.
        values: what the optimizer updates.
        held: the gradient, of any dtype, on any device; None without one.
    """

    def __init__(self, master: Tensor, values: Tensor, held: Tensor | None) -> None:
        self.master, self._values, self._held = master, values, held
        self.entry = torch.nn.Parameter(values, requires_grad=master.requires_grad)
        vars(self.entry).update(attributes_of(slot_of(master).parameter) | attributes_of(master))

    def begin(self) -> Tensor:
        """Return the entry, with its gradient."""
        if self._held is not None:
            self.entry.grad = self._given = self._held.to(self.entry.device, self.entry.dtype)
        return self.entry

    def end(self) -> None:
        """Keep what the optimizer has left as values and as the gradient."""
        if self.entry.data_ptr() != self._values.data_ptr():  # an optimizer may replace `.data`
            self._values.copy_(self.entry.detach())
        if (held := self._held) is None or (left := self.entry.grad) is None:
            return
        is_copy = self._given.data_ptr() != held.data_ptr()
        if left is not self._given or (is_copy and version_of(left)):
            held.copy_(left)

    @property
    def has_dropped(self) -> bool:
        """Whether the optimizer has dropped the gradient."""
        return self._held is not None and self.entry.grad is None
