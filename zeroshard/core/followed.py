"""What ranks do with the buffers of modules where they meet; `whole/module_buffers.py` follows the first rank.

Owns the interface, and the case in which each rank keeps its own. It must not know modules.
"""

from collections.abc import Sequence
from typing import Protocol, final

__all__ = ["Followed", "OwnBuffers"]


class Followed(Protocol):
    """The buffers of a model, at the places where ranks meet."""

    def digest(self, *, is_followed: bool) -> int:
        """Return, at the end of a backward, a number for the buffers that changed since ranks had equal values.

        Args:
            is_followed: whether the backward sums gradients over all ranks; otherwise the number is 0.
        """

    def numbers(self) -> list[int]:
        """Return numbers whose minima over ranks say which buffers changed on any rank."""

    def agree(self, least: Sequence[int]) -> None:
        """Take the minima of `numbers()`, empty if all ranks had equal digests."""

    def begin_forward(self, *, is_followed: bool) -> None:
        """Take the values of the first rank, if a forward before this one changed buffers. Collective: a broadcast.

        Args:
            is_followed: whether ranks will sum the gradients of this forward.
        """

    def settle(self) -> None:
        """Take the values of the first rank before a step. Collective: a broadcast, if any rank changed a buffer."""


@final
class OwnBuffers:
    """Each rank keeps its own buffers."""

    def digest(self, *, is_followed: bool) -> int:
        """See `Followed`."""
        return 0

    def numbers(self) -> list[int]:
        """See `Followed`."""
        return []

    def agree(self, least: Sequence[int]) -> None:
        """See `Followed`."""

    def begin_forward(self, *, is_followed: bool) -> None:
        """See `Followed`."""

    def settle(self) -> None:
        """See `Followed`."""
