"""An update in pieces: the body of the user's optimizer runs over subsets of its entries in turn.

Owns what a piece is, and the loop over pieces. It must not know where pieces come from (`update/sources.py`), or what
they communicate.

Note: an update in pieces
    torch runs an optimizer's pre-hooks, then the body of its `step`, then its post-hooks. Our pre-hook, the last one,
    runs the body once for each piece and empties the groups, so that the body that torch runs next updates nothing; a
    single piece is updated by the body that torch runs. Our post-hook, the first one, restores the entries. User hooks
    run once a step and see the original groups. The inputs of a piece are copied during the update of the previous
    piece, and its results during the update of the next one. All ranks run pieces in the same order, since pieces may
    communicate. The body must treat each parameter separately, which admission tests (`admission.py`).
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import final

import torch

from zeroshard.torch_private import body_of

__all__ = ["Piece", "Resident", "update_in_pieces"]

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


def update_in_pieces(
    optimizer: torch.optim.Optimizer, update: AbstractContextManager[Iterable[Piece] | Piece | None]
) -> Callable[[], None]:
    """Run the body of an optimizer's step over each piece in turn, and leave its groups empty, or with a single piece.

    After an exception, the groups have their original entries.

    Args:
        update: gives the pieces, which are created lazily, one ahead of the update; see `Source.update`.

    Returns: a function that ends the update of a single piece, and restores the entries.
    """
    groups = list(optimizer.param_groups)
    kept = [group["params"] for group in groups]

    def put(by_group: Iterable[list[Tensor]]) -> None:
        for group, entries in zip(groups, by_group, strict=True):
            group["params"] = entries

    try:
        with update as pieces:
            if pieces is None:
                return lambda: None
            if isinstance(pieces, Piece):
                put(pieces.entries())
                return functools.partial(_end, pieces, lambda: put(kept))
            body, queue = body_of(optimizer), _started(pieces)
            before, present = None, next(queue, None)
            while present is not None:
                ahead = next(queue, None)
                put(present.entries())
                body()
                put([] for _ in groups)  # else they keep these tensors while those of the next piece are made
                present.finish()
                if before is not None:
                    before.close()
                before, present = present, ahead
            if before is not None:
                before.close()
    except BaseException:
        put(kept)
        raise
    put([] for _ in groups)
    return lambda: put(kept)


def _end(piece: Piece, put_back: Callable[[], None]) -> None:
    piece.finish()
    put_back()


def _started(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Start each piece when it is asked for."""
    for piece in pieces:
        piece.start()
        yield piece
