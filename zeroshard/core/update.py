"""An update in pieces: the user's optimizer runs its own body over some of its entries, then over the next ones.

Owns the order of what comes before, in and after each piece. It must not know what pieces bring or where from. Read
`core/optimizer.py` beside it.

Note: an update in pieces
    torch runs an optimizer's pre-hooks, then the body of its `step`, then its post-hooks. Our pre-hook, the last one,
    runs the body once for each piece, and leaves the groups without entries for the body that torch runs next, which so
    updates nothing; our post-hook, the first one, puts the entries back. Hooks of user code run once a step and see the
    groups as they were. Each piece begins to bring what it reads while the piece before it is updated, and what that
    one wrote is taken away while the next is updated. All ranks run pieces in one order, since they may communicate.
    The body must treat each parameter by itself: admission tries that (`state/admission.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import final

import torch

from zeroshard.torch_private import body_of

__all__ = ["Piece", "Resident", "update_in_pieces"]

Tensor = torch.Tensor


class Piece(ABC):
    """A part of an update: the entries that it updates, and what comes before and goes after."""

    def start(self) -> None:  # noqa: B027 (parts whose data are on the device have nothing to bring)
        """Begin to bring what the update reads; called while the piece before is due, one piece ahead."""

    @abstractmethod
    def entries(self) -> Sequence[list[Tensor]]:
        """Wait until all is there; return what each group holds during this piece."""

    def finish(self) -> None:  # noqa: B027
        """Begin to take away what was written."""

    def close(self) -> None:  # noqa: B027
        """Wait for that; called when the next piece was updated."""


@final
class Resident(Piece):
    """Entries that are where they are needed.

    Args:
        groups: of each group its entries.
    """

    def __init__(self, groups: Sequence[list[Tensor]]) -> None:
        self._groups = groups

    def entries(self) -> Sequence[list[Tensor]]:
        """See `Piece`."""
        return self._groups


def update_in_pieces(optimizer: torch.optim.Optimizer, pieces: Iterable[Piece]) -> Callable[[], None]:
    """Run the body of an optimizer's step over each piece in turn, and leave its groups without entries.

    With an exception the groups are as they were.

    Args:
        pieces: made as they are needed, one ahead of the update.

    Returns: what puts the entries back.
    """
    groups, body, queue = list(optimizer.param_groups), body_of(optimizer), iter(pieces)
    kept = [group["params"] for group in groups]

    def put_back() -> None:
        for group, entries in zip(groups, kept, strict=True):
            group["params"] = entries

    try:
        before, present = None, _next(queue)
        while present is not None:
            ahead = _next(queue)
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


def _next(queue: Iterator[Piece]) -> Piece | None:
    """Return the next piece, which has begun; None behind the last."""
    piece = next(queue, None)
    if piece is not None:
        piece.start()
    return piece
