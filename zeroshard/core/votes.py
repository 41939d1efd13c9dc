"""Votes of ranks on their place in the program: posted early, read when a result depends on them.

Owns the posted and unread votes of this rank, and the errors for ranks at different places, or with results that were
computed too early. It must not know passes or units: `core/order.py` defines content and consequences.

Note: posted and read
    Each rank posts a vote at the same places of the program: the beginning of a forward, the end of each pass, a norm,
    a step. It reads votes in order, as late as possible; meanwhile the queued kernels of a device run, and every action
    must be valid for any outcome. Reading early is always allowed. A rank serves a request when it reads the vote, so
    it reads all posted votes before its host waits for other ranks in any other way.
Note: rounds
    After a vote with a request, all ranks that have read it vote in rounds, in a separate channel, and read each vote
    at once. So later votes that a rank has already posted stay valid.
"""

import weakref
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

from zeroshard.table.errors import RankMismatchError
from zeroshard.wire.comm import MOST_UNREAD, Channel, Comm, Vote

__all__ = ["Ask", "Told", "Votes"]

_NOTHING = 1 << 40
"""The number for no request in a vote; requests have smaller numbers."""


@final
class Ask(NamedTuple):
    """A request in rounds. All ranks serve the smallest of all ranks' requests first."""

    is_reduction: bool
    place: int
    """The place of its unit in the order of the pass, below 2**31."""
    is_new: bool
    """Whether it is no repetition: False if the unit was released too early."""

    def is_same(self, other: "Ask") -> bool:
        """Return whether both are for the same kind and unit, so that one action serves both."""
        return self[:2] == other[:2]

    @property
    def number(self) -> int:
        """A number with the same order, for a vote."""
        return self.is_reduction << 32 | self.place << 1 | self.is_new


def ask_of(number: int) -> Ask | None:
    """Return the request with a number of a vote; None for no request."""
    return None if number == _NOTHING else Ask(bool(number >> 32), (number & 0xFFFFFFFF) >> 1, bool(number & 1))


@final
@dataclass(frozen=True)
class Told:
    """The result of a vote: the smallest request, and the minimum and maximum payload."""

    request: Ask | None
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
        # First: before any wait, also of all places, a rank reads what it has posted here.
        self._across = None if comm.across is comm else Votes(comm.across)
        self.fault = ""
        """Why the next step must not be made, as far as this rank knows."""
        catch_up = weakref.WeakMethod(self.read)
        for one in (comm, comm.across):
            one.call_before_waits(lambda: read() if (read := catch_up()) else None)

    def post(
        self, place: str, then: Then = lambda told: None, payload: int = 0, request: Ask | None = None, what: str = ""
    ) -> None:
        """Post that this rank is at `place`; `read` will call `then` with the result.

        Args:
            place: equal on all ranks, or each raises when it reads the vote.
            what: a more precise description of this rank's place.
        Collective: see `Comm.post`; all ranks post the same number of votes.
        """
        if len(self._unread) == MOST_UNREAD:
            self.read()
        vote = self._comm.post(_numbers(place, payload, request), what or place, Channel.PLACES)
        self._unread.append((vote, what or place, then))

    def read(self) -> None:
        """Read all posted votes in order, and call their continuations.

        Raises:
            RankMismatchError: ranks are at different places.
        """
        if self._is_reading:
            return
        self._is_reading = True
        try:
            while self._unread:
                vote, what, then = self._unread[0]
                numbers = vote.read()  # an interrupted vote stays unread
                self._unread.popleft()
                then(self._told(numbers, what))
        finally:
            self._is_reading = False

    def meet(self, place: str, payload: int = 0, request: Ask | None = None, what: str = "") -> Told:
        """Post a vote and wait for its result; earlier votes are read first."""
        told: list[Told] = []
        self.post(place, told.append, payload, request, what)
        self.read()
        return told[0]

    def span(self, place: str, payload: int = 0) -> int:
        """Wait until all places of a pipe are at `place`, outside passes; return the least payload, or this one's.

        Raises:
            RankMismatchError: places of the pipe are at different places of the program.
        Collective: with a pipe, all-reduce of 40 bytes; every rank of the mesh must call.
        """
        return payload if self._across is None else self._across.meet(place, payload).least

    def round(self, place: str, payload: int = 0, request: Ask | None = None, what: str = "") -> Told:
        """Post this rank's request after a vote with a request, and wait for the result."""
        vote = self._comm.post(_numbers(place, payload, request), what or place, Channel.ROUNDS)
        return self._told(vote.read(), what or place)

    def note_early(self, what: str) -> None:
        """Record that this rank computed a result too early: a request followed."""
        self.fault = (
            f"some ranks had answered {what} that other ranks requested, so their result lacks its sum. Ranks that ran "
            "equal passes so far now differ: drop this step's gradients with zero_grad() and continue. If ranks may "
            "differ in a backward, call zero.agree(True) on every rank before clipping gradients."
        )

    def raise_fault(self, place: str) -> None:
        """Raise what some ranks know of the step at `place`. Collective: every rank must call."""
        fault, self.fault = self.fault, ""
        text = max(self._comm.across.texts(fault, "why the step must not be made"))
        raise RankMismatchError(f"{self._comm.mesh} At {place}: {text} Nothing was changed on any rank.")

    def _told(self, numbers: list[int], what: str) -> Told:
        request, first, last, least, greatest = numbers
        if first != -last:
            lines = self._comm.mesh.lines(self._comm.texts(what, "the places of all ranks"))
            raise RankMismatchError(
                f"{self._comm.mesh} Ranks are at different places of the program:\n{lines}\nAll ranks must make the "
                "same passes (at stage 3 equally many under no_sync()), norms and steps in the same order, and call "
                "save(), load() and gathered(). For one rank use `for _ in zero.on_first_rank():`, no `if rank == 0:`."
            )
        return Told(ask_of(request), least, -greatest)


def _numbers(place: str, payload: int, request: Ask | None) -> list[int]:
    """Return the numbers of a vote, in a form whose minima over ranks give minimum and maximum of each."""
    number = zlib.crc32(place.encode(errors="surrogatepass"))
    return [_NOTHING if request is None else request.number, number, -number, payload, -payload]
