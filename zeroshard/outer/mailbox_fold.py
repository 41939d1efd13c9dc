"""Adds changes that all islands have taken in to the mailbox's anchors, piece by piece.

Owns the new anchors' files. It must not know which changes are due (`Book.plan_fold`).
"""

from contextlib import ExitStack

import numpy as np

from zeroshard.outer.mailbox_book import Book
from zeroshard.outer.mailbox_files import PartWriter
from zeroshard.outer.mailbox_order import Fold, add_changes

__all__ = ["fold"]


def fold(book: Book, due: Fold) -> None:
    """Write the next anchors, and make them the valid ones. A few pieces are in memory at a time.

    Raises:
        OSError, MailboxError: a file cannot be read or written; nothing has changed.
    """
    assert book.facts is not None
    facts = book.facts
    for rank in range(facts.ranks):
        with ExitStack() as opened:
            number, _, anchors = book.open_anchors(rank)
            opened.callback(anchors.close)
            changes = [book.open_change(version, name, rank) for version, name in due.changes]
            for change in changes:
                opened.callback(change.close)
            writer = PartWriter(book.shelf.anchors(number + 1, rank), book.nbytes(rank))
            opened.callback(writer.close)
            for piece, *others in zip(anchors, *changes, strict=True):
                total = np.frombuffer(piece, facts.dtype).copy()
                values = [facts.form.decode(np.frombuffer(other, np.uint8), total.size) for other in others]
                add_changes(total, list(zip(due.changes, values, strict=True)), facts.islands)
                writer.add(total.tobytes())
            writer.flush()
            writer.place()
    book.finish_fold(due)
