"""What ranks tell one another of where they are: posted at once, read when an answer depends on it.

Owns the votes that this rank has posted and not read, and the errors where ranks are at different places, or relied on
what others had not told yet. It must not know passes or units: `core/order.py` says what is told, and what follows.

Note: posted and read
    Each rank posts a vote at the same places of the program: the beginning of a forward, the end of each pass, a norm,
    a step. It reads votes in order, as late as it can: what it does meanwhile must be right whatever they say, and on
    a device the kernels that it queued run. Reading early is always allowed. A rank that is asked for something in a
    vote answers when it reads it, so it reads what is posted before its host waits for other ranks in any other way.
Note: rounds
    Where some rank asks for something in a vote, all ranks, having read it, go on in rounds: votes in a channel of
    their own, each read at once. So votes that one rank has posted behind it keep their meaning.
"""

import weakref
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from zeroshard.table.errors import RankMismatchError
from zeroshard.wire.comm import MOST_UNREAD, Channel, Comm, Vote

__all__ = ["NOTHING", "Told", "Votes"]

NOTHING = 1 << 40
"""The request of a rank that asks for nothing; the others lie below."""


@final
@dataclass(frozen=True)
class Told:
    """What all ranks told in one vote: the smallest request, and the least and the greatest payload."""

    request: int
    least: int
    greatest: int


Then = Callable[[Told], None]


@final
class Votes:
    """The votes of one model's ranks."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._unread: deque[tuple[Vote, str, Then]] = deque()
        self._is_reading = False
        self.early = ""
        """What this rank answered, sure that no rank would ask for anything, before one did."""
        catch_up = weakref.WeakMethod(self.read)
        comm.call_before_waits(lambda: read() if (read := catch_up()) else None)

    def post(
        self, place: str, then: Then = lambda told: None, payload: int = 0, request: int = NOTHING, what: str = ""
    ) -> None:
        """Tell the other ranks that this one is at `place`; `read` will call `then` with what all told.

        Args:
            place: the same on all ranks, or each raises when it reads the vote.
            what: this rank's place in words, where `place` does not say all.
        Collective: see `Comm.post`; all ranks post the same number of votes.
        """
        if len(self._unread) == MOST_UNREAD:
            self.read()
        vote = self._comm.post(_numbers(place, payload, request), what or place, Channel.PLACES)
        self._unread.append((vote, what or place, then))

    def read(self) -> None:
        """Read all votes that are posted, in order, and do what follows from each.

        Raises:
            RankMismatchError: ranks are at different places.
        """
        if self._is_reading:
            return
        self._is_reading = True
        try:
            while self._unread:
                vote, what, then = self._unread[0]
                numbers = vote.read()  # one that is interrupted stays to be read
                self._unread.popleft()
                then(self._told(numbers, what))
        finally:
            self._is_reading = False

    def meet(self, place: str, payload: int = 0, request: int = NOTHING, what: str = "") -> Told:
        """Tell the others as `post` does, and wait until all are there; earlier votes are read first."""
        told: list[Told] = []
        self.post(place, told.append, payload, request, what)
        self.read()
        return told[0]

    def round(self, place: str, payload: int = 0, request: int = NOTHING, what: str = "") -> Told:
        """Tell what this rank asks for now, behind a vote in which some rank asked for something; wait for all."""
        vote = self._comm.post(_numbers(place, payload, request), what or place, Channel.ROUNDS)
        return self._told(vote.read(), what or place)

    def raise_early(self, place: str) -> None:
        """Raise because some ranks answered too early. Collective: every rank must call."""
        early, self.early = self.early, ""
        texts = self._comm.texts(early, "what was answered too early")
        raise RankMismatchError(
            f"{self._comm.mesh} At {place}: some ranks had answered {max(texts)} that others asked for, so that its "
            "sum is missing there. Nothing was changed on any rank. Ranks that did the same for several passes now "
            "differ: forget this step's gradients with zero_grad() and go on, and where ranks may differ in a backward "
            "call zero.agree(True) on every rank before gradients are clipped."
        )

    def _told(self, numbers: list[int], what: str) -> Told:
        request, first, last, least, greatest = numbers
        if first != -last:
            places = self._comm.texts(what, "the places of all ranks")
            lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(places))
            raise RankMismatchError(
                f"{self._comm.mesh} Ranks are at different places of the program:\n{lines}\nAll ranks must make the "
                "same passes, norms and steps in the same order, and call save(), load() and gathered(). What rank "
                "0 does alone goes into `for _ in zero.on_first_rank():`, in the place of `if rank == 0:`."
            )
        return Told(request, least, -greatest)


def _numbers(place: str, payload: int, request: int) -> list[int]:
    """Return what is told, so that minima over ranks are the smallest and the greatest of each."""
    number = zlib.crc32(place.encode())
    return [request, number, -number, payload, -payload]
