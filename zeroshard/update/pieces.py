"""An update in pieces: the body of the user's optimizer runs over subsets of its entries in turn.

Owns what pieces and their sources are, the loop over pieces, and the parameters that stand for slices in it. It must
not know where a source has its pieces from, or what they communicate. Read `update/optimizer.py` with it.

Note: an update in pieces
    torch runs an optimizer's pre-hooks, then the body of its `step`, then its post-hooks. Our pre-hook, the last one,
    runs the body once for each piece and empties the groups, so that the body that torch runs next updates nothing. Our
    post-hook, the first one, restores the entries. User hooks run once a step and see the original groups. The inputs
    of a piece are copied during the update of the previous piece, and its results during the update of the next one.
    All ranks run pieces in the same order, since pieces may communicate. The body must treat each parameter separately,
    which admission tests (`update/admission.py`).
Note: sources
    Each optimizer has one source of pieces. `AtOnce` has none: torch's own call updates all entries. `Background`
    (`background.py`) has a thread update states on the host after the step. `Streams` (`streamed.py`) reads states from
    files and writes them back. `Exchange` (`exchange.py`) sends matrices to the ranks that update them whole.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch

from zeroshard.store.disk import Disk
from zeroshard.torch_private import body_of, version_of

__all__ = ["AtOnce", "Lent", "Piece", "Resident", "Source", "update_in_pieces"]

Tensor = torch.Tensor


class Piece(ABC):
    """A part of an update: its entries, and the copies before and after."""

    def start(self) -> None:  # noqa: B027 (pieces on the device copy nothing)
        """Begin the copies of the update's inputs; called one piece ahead."""

    @abstractmethod
    def entries(self) -> Sequence[list[Tensor]]:
        """Wait for the inputs; return the entries of each group during this piece."""

    def finish(self) -> None:  # noqa: B027
        """Begin the copies of the results."""

    def close(self) -> None:  # noqa: B027
        """Wait for the copies of the results; called after the update of the next piece."""


@final
class Resident(Piece):
    """Entries in the memory that kernels update, which need no copies.

    Args:
        groups: the entries of each group.
    """

    def __init__(self, groups: Sequence[list[Tensor]]) -> None:
        self._groups = groups

    def entries(self) -> Sequence[list[Tensor]]:
        """See `Piece`."""
        return self._groups


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
    def update(self) -> AbstractContextManager[Iterable[Piece] | None]:
        """Begin an update; on exit, end it. On entry, groups must hold their entries.

        Returns: its pieces, in the same order on all ranks; None if torch's own call updates all entries.

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


def update_in_pieces(
    optimizer: torch.optim.Optimizer, update: AbstractContextManager[Iterable[Piece] | None]
) -> Callable[[], None]:
    """Run the body of an optimizer's step over each piece in turn, and leave its groups empty.

    After an exception, the groups have their original entries.

    Args:
        update: gives the pieces, which are created lazily, one ahead of the update; see `Source.update`.

    Returns: a function that restores the entries.
    """
    groups = list(optimizer.param_groups)
    kept = [group["params"] for group in groups]

    def put_back() -> None:
        for group, entries in zip(groups, kept, strict=True):
            group["params"] = entries

    try:
        with update as pieces:
            if pieces is None:
                return lambda: None
            body, queue = body_of(optimizer), _started(pieces)
            before, present = None, next(queue, None)
            while present is not None:
                ahead = next(queue, None)
                for group, entries in zip(groups, present.entries(), strict=True):
                    group["params"] = entries
                body()
                present.finish()
                if before is not None:
                    before.close()
                before, present = present, ahead
            if before is not None:
                before.close()
    except BaseException:
        put_back()
        raise
    for group in groups:
        group["params"] = []
    return put_back


def _started(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Start each piece when it is asked for."""
    for piece in pieces:
        piece.start()
        yield piece


@final
class Lent:
    """A parameter that stands for a slice during the update of a piece.

    Args:
        master: the slice.
        values: what the optimizer updates.
        held: the gradient, of any dtype, on any device.
    """

    def __init__(self, master: Tensor, values: Tensor, held: Tensor) -> None:
        self.master, self._values, self._held = master, values, held
        self.entry = torch.nn.Parameter(values)

    def begin(self) -> Tensor:
        """Return the entry, with its gradient."""
        self.entry.grad = self._given = self._held.to(self.entry.device, self.entry.dtype)
        return self.entry

    def end(self) -> None:
        """Keep what the optimizer has left as values and as the gradient."""
        if self.entry.data_ptr() != self._values.data_ptr():  # an optimizer may replace `.data`
            self._values.copy_(self.entry.detach())
        held, given, left = self._held, self._given, self.entry.grad
        is_copy = given.data_ptr() != held.data_ptr()
        if left is not None and (left is not given or (is_copy and version_of(given))):
            held.copy_(left)
