"""What a mailbox notes of its islands: what all of them must have in common, and the state of each.

Owns the comparison. It must not know who joins (`mailbox_book.py`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from zeroshard.outer.mailbox_codec import Form
from zeroshard.outer.mailbox_files import stored_bytes
from zeroshard.outer.mailbox_order import Versions
from zeroshard.table.sizes import GIB

__all__ = ["ACTIVE", "DONE", "Facts", "GONE", "HERE", "LEFT", "Member"]

ACTIVE, DONE, GONE, LEFT = "active", "done", "gone", "left"
HERE: Final = (ACTIVE, DONE)
"""States of islands that take changes in."""
_REMEDIES: Final[Mapping[str, str]] = MappingProxyType(
    {"shards": " Give islands equal units=, precision= and frozen parameters, and stage 0 all or none."}
)
"""By fact: what makes it equal, where that is not the fact itself."""


@dataclass(frozen=True)
class Facts:
    """What all islands must have in common.

    Args:
        islands: their number at the start.
        ranks: of each island.
        staleness: None if nobody waits.
        bits: of an element of a change, see `Form`.
        dtype: of anchors, as numpy writes it.
        others: what else must be equal: the interval, the model, the optimizer, versions of libraries.
    """

    islands: int
    ranks: int
    staleness: int | None
    bits: int
    dtype: str
    others: Mapping[str, Any]

    @property
    def form(self) -> Form:
        """The form of changes."""
        return Form(self.bits, self.dtype)

    def lack_of_room(self, islands: int, numels: Iterable[int], most_bytes: int) -> str:
        """Say which room the slowest one of islands may lack for its next change, or nothing.

        It then has taken in what others had put before, up to the staleness less, and they have put at most the
        staleness and one more. Without a staleness nobody waits, but a change whose parts do not fit is never whole.

        Args:
            numels: elements of the ranks' shards.
            most_bytes: of changes on the disk.
        """
        stale = self.staleness
        count = islands if stale is None else (islands - 1) * (2 * stale + 1) + stale + 1
        if (need := count * sum(map(self.stored_bytes, numels))) <= most_bytes:
            return ""
        why = "a change might never be whole" if stale is None else f"islands could wait forever at staleness {stale}"
        return (
            f"{why}: the mailbox may have to hold {count} changes, {need:,} bytes, and holds {most_bytes:,}. Start it "
            f"with --most-gib {1.01 * need / GIB:.3g}" + ", or islands with a smaller staleness." * bool(stale)
        )

    def stored_bytes(self, numel: int) -> int:
        """Return the size of the file of a change of `numel` elements."""
        return stored_bytes(self.form.nbytes(numel), self.form.piece_bytes)

    def difference(self, other: "Facts", name: str) -> str:
        """Say in which fact the island of this name differs, or nothing."""
        mine, theirs = vars(self) | dict(self.others), vars(other) | dict(other.others)
        for key in sorted((mine.keys() | theirs.keys()) - {"others"}):
            if mine.get(key) != theirs.get(key):
                text = f"island '{name}' has {key}={theirs.get(key)!r}, the other islands {key}={mine.get(key)!r}."
                return text + _REMEDIES.get(key, "")
        return ""


@dataclass
class Member:
    """An island.

    Args:
        launch: names the start of the island; a restart has another.
        since: the version behind which it continues.
    """

    name: str
    launch: str
    since: int
    state: str = ACTIVE
    taken: dict[int, Versions] = field(default_factory=dict)
    """By rank: the newest version taken in from each island."""
    heard_s: float = 0.0
    lines: int = 0
    """Open connections."""
