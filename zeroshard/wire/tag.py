"""What tells messages and meetings apart: the layout of tags, and of places on the board.

Owns all numbers that transports mark an exchange with. Equal tags on all ranks mean one exchange; a tag repeats itself
long after its messages are gone.
"""

from typing import Final, NamedTuple

__all__ = ["AGREEMENTS", "BUCKETS", "GATHER", "PASSES", "REDUCE", "Tag"]

BUCKETS: Final = 1 << 15
"""Buckets that a model may have."""
PASSES: Final = 1 << 15
"""Passes whose tags differ."""
GATHER, REDUCE = 0, 1
"""The exchanges of one tag."""
AGREEMENTS: Final = 4 * BUCKETS
"""The first place on the board behind those of buckets."""


class Tag(NamedTuple):
    """The exchange of one bucket in one pass.

    Args:
        number: of the pass, or from `Order.next_number`; it may be of any size.
        bucket: number of the bucket, below `BUCKETS`.
        what: the exchange in words, for errors.
    """

    number: int
    bucket: int
    what: str

    @property
    def about(self) -> int:
        """What a meeting on the board is about, below 2**30: the board has 32 bits for it."""
        return self.number % PASSES * BUCKETS + self.bucket

    def message(self, kind: int) -> int:
        """Return the tag of messages of a `GATHER` or a `REDUCE`, below 2**31: gloo's tags have 31 bits."""
        return 2 * self.about + kind

    def place(self, kind: int, *, has_read: bool = False) -> int:
        """Return the place on the board to say where values lie, or to say that they were read."""
        return 4 * self.bucket + 2 * kind + has_read
