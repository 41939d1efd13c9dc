"""An update in pieces: the body of the user's optimizer runs over subsets of its entries in turn.

Owns the order of the work before, in and after each piece. It must not know which data pieces copy, or their source.
Read `update/optimizer.py` with it.

Note: an update in pieces
    torch runs an optimizer's pre-hooks, then the body of its `step`, then its post-hooks. Our pre-hook, the last one,
    runs the body once for each piece and empties the groups, so that the body that torch runs next updates nothing. Our
    post-hook, the first one, restores the entries. User hooks run once a step and see the original groups. The inputs
    of a piece are copied during the update of the previous piece, and its results during the update of the next one.
    All ranks run pieces in the same order, since pieces may communicate. The body must treat each parameter separately,
    which admission tests (`update/admission.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import final

import torch

from zeroshard.torch_private import body_of, version_of

__all__ = ["Piece", "Resident", "keep_change", "update_in_pieces"]

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
    """Entries on the device, which need no copies.

    Args:
        groups: the entries of each group.
    """

    def __init__(self, groups: Sequence[list[Tensor]]) -> None:
        self._groups = groups

    def entries(self) -> Sequence[list[Tensor]]:
        """See `Piece`."""
        return self._groups


def update_in_pieces(optimizer: torch.optim.Optimizer, pieces: Iterable[Piece]) -> Callable[[], None]:
    """Run the body of an optimizer's step over each piece in turn, and leave its groups empty.

    After an exception, the groups have their original entries.

    Args:
        pieces: created lazily, one ahead of the update.

    Returns: a function that restores the entries.
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


def keep_change(held: Tensor, given: Tensor, left: Tensor | None) -> None:
    """Write what an optimizer has left as a gradient over the held one.

    Args:
        given: what the optimizer was given: the memory of `held`, or a converted copy.
    """
    is_copy = given.data_ptr() != held.data_ptr()
    if left is not None and (left is not given or (is_copy and version_of(given))):
        held.copy_(left)


def _next(queue: Iterator[Piece]) -> Piece | None:
    """Start and return the next piece; None after the last."""
    piece = next(queue, None)
    if piece is not None:
        piece.start()
    return piece
