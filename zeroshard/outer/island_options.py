"""The arguments of an island that is a launch of its own, checked.

Owns their names, defaults and refusals. It must not know sockets or models.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import final

from zeroshard.outer.mailbox_codec import check_bits
from zeroshard.outer.mailbox_order import check_name
from zeroshard.outer.mailbox_wire import parse_address

__all__ = ["IslandOptions"]


@final
@dataclass(frozen=True)
class IslandOptions:
    """How an island exchanges what it learned with others, through a mailbox.

    Args:
        island: the name of this island, one that no other has.
        islands: their number at the start, by which each change is divided.
        every: steps between exchanges.
        staleness: 0 waits in each exchange for all islands (BSP); a number bounds by how many exchanges the fastest may
            lead (SSP); None never waits (ASP).
        address: "host:port" of the mailbox.
        secret_file: a file with the secret that islands and mailbox have in common.
        log: a folder for everything that this island sends and takes in; None for no log.
        bits: of an element of a change in messages: 32 for the values themselves, 8 or 4.
        held: changes of others that each rank may have in memory; by default 4 for each island, at least 16.
        patience_s: after so many seconds without an answer the mailbox counts as gone, and an exchange does not wait.
        arrive_s: how long the first contact with the mailbox may take.

    Raises:
        ValueError, TypeError: an argument is out of range.

    >>> from zeroshard.outer.island_options import IslandOptions
    >>> IslandOptions("a", 2, every=10, staleness=4, address="127.0.0.1:29400", secret_file="secret").every
    10
    """

    island: str
    islands: int
    every: int = 50
    staleness: int | None = 0
    address: str = ""
    secret_file: str | Path = ""
    log: str | Path | None = None
    bits: int = 32
    held: int | None = None
    patience_s: float = 10.0
    arrive_s: float = 300.0

    def __post_init__(self) -> None:
        check_name(self.island)
        for name, least in (("islands", 1), ("every", 1), ("staleness", 0), ("held", 1)):
            value = getattr(self, name)
            if value is None and name in ("staleness", "held"):
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be a whole number; got {value!r}.")
            if value < least:
                raise ValueError(f"{name} must be at least {least}; got {value}.")
        check_bits(self.bits)
        if self.islands > 1024:
            raise ValueError(f"islands must be at most 1,024; got {self.islands:,}.")
        for name in ("patience_s", "arrive_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0 seconds; got {getattr(self, name)}.")
        parse_address(self.address)
        if not str(self.secret_file):
            raise ValueError("secret_file= is missing: a file with the secret that the mailbox has, too.")

    @property
    def most_held(self) -> int:
        """Changes of others that may be in memory."""
        return max(16, 4 * self.islands) if self.held is None else self.held
