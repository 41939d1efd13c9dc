"""Synchronization of the ranks of one host through shared memory, without messages.

Owns the places of meetings and the wait for them. It must not know the purpose of a meeting: callers number the places,
and ensure that numbers are read before they are overwritten.

Note: order of writes
    A rank that reads the word of another rank must also see everything that the other wrote before the word. x86
    preserves the order of stores and of loads. Nothing here orders them on other processors: `is_supported` is False
    there.
Note: waits
    A rank polls for some microseconds, because the others usually arrive within that time, and then with growing pauses
    that leave them the processor. A pidfd shows the end of a process, even before its parent has waited for it.
"""

import os
import platform
import select
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, final

__all__ = ["BOARD_BYTES", "Board", "Meeting", "WORDS", "is_supported"]

WORDS: Final = 8
"""64-bit words of a place: the count and identity of its last meeting, and up to seven numbers."""
ABOUT_BITS: Final = 32
ABOUT: Final = (1 << ABOUT_BITS) - 1
TURNS: Final = 1 << 31
"""Meetings at one place are counted modulo this number, because words are signed; ranks differ by at most one."""
PLACES: Final = 1 << 18
"""Number of places, more than needed: only used places take memory."""
BOARD_BYTES: Final = 8 * WORDS * PLACES

LOOKS: Final = 500
"""Polls before the first pause: some tens of microseconds."""
PAUSE_S: Final = 20e-6
LONGEST_PAUSE_S: Final = 1e-3


def is_supported() -> bool:
    """Return whether this system supports synchronization through memory."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "pidfd_open")


@final
class Board:
    """The boards of all ranks of a host.

    Args:
        words: the boards, by rank, as 64-bit words.
        rank: the index of this rank.
        pids: the process of each rank.
    """

    def __init__(self, words: Sequence[memoryview], rank: int, pids: Sequence[int]) -> None:
        self._words, self._rank = words, rank
        self._counts: Counter[int] = Counter()
        self._ends: dict[int, select.poll] = {}
        for other, pid in enumerate(pids):
            if other != rank:
                descriptor = os.pidfd_open(pid)
                weakref.finalize(self, os.close, descriptor)
                self._ends[other] = select.poll()
                self._ends[other].register(descriptor, select.POLLIN)

    def meet(self, place: int, about: int, *numbers: int) -> "Meeting":
        """Publish numbers; the returned meeting waits for those of the other ranks.

        Args:
            place: the place of the meeting; meetings at one place are sequential. A new meeting overwrites the numbers
                of the previous one, which are valid only until a rank enters it.
            about: identity of the meeting, 32 bits; equal on every rank.
        """
        own, first = self._words[self._rank], WORDS * place
        self._counts[place] = turn = (self._counts[place] + 1) % TURNS
        for index, number in enumerate(numbers, first + 1):
            own[index] = number
        # One store publishes count and identity, after the numbers.
        own[first] = said = turn << ABOUT_BITS | about
        return Meeting(self, first, said, len(numbers))

    def hear(self, first: int, said: int, count: int, limit: timedelta) -> dict[int, list[int]]:
        """Return the numbers of the other ranks in one meeting, by rank; see `Meeting.wait`."""
        end_s = time.monotonic() + limit.total_seconds()
        for other in self._ends:
            if self._words[other][first] != said:
                self._await(other, first, said, end_s)
        return {other: self._words[other][first + 1 : first + 1 + count].tolist() for other in self._ends}

    def _await(self, other: int, first: int, said: int, end_s: float) -> None:
        words, looks, pause_s = self._words[other], 0, PAUSE_S
        stale: int | None = None
        # Most polls find an unchanged word: one comparison.
        while (word := words[first]) == stale or _is_behind(word, said):
            looks, stale = looks + 1, word
            if looks < LOOKS:
                continue
            if self._ends[other].poll(0) and words[first] == stale:
                raise RuntimeError(f"Connection closed: the process of rank {other} of this host ended")
            if time.monotonic() > end_s:
                raise RuntimeError(f"Timed out waiting for rank {other} of this host")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if word >> ABOUT_BITS == said >> ABOUT_BITS and word != said:
            raise RuntimeError(f"rank {other} of this host met for {word & ABOUT}, this rank for {said & ABOUT}")


def _is_behind(word: int, said: int) -> bool:
    """Return whether `word` belongs to an earlier meeting than `said`."""
    return 0 < ((said >> ABOUT_BITS) - (word >> ABOUT_BITS)) % TURNS < TURNS // 2


@final
class Meeting:
    """One meeting of this rank; after the wait, `numbers` has the numbers of the other ranks, by rank."""

    def __init__(self, board: Board, first: int, said: int, count: int) -> None:
        self._board, self._first, self._said, self._count = board, first, said, count
        self.numbers: dict[int, list[int]] = {}

    @property
    def offsets(self) -> dict[int, int]:
        """The single number of each other rank."""
        return {place: number for place, (number,) in self.numbers.items()}

    def wait(self, limit: timedelta) -> None:
        """Wait until every rank has published its numbers.

        Raises:
            RuntimeError: a rank's process ended, a rank is in another meeting, or `limit` is exceeded.
        """
        self.numbers = self._board.hear(self._first, self._said, self._count, limit)
