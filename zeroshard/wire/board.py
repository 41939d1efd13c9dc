"""How the ranks of one host meet without messages: each writes what it has to say where all can read it.

Owns the places of meetings and the wait for them. It must not know what is met for: callers number the places, and
see to it that what is said is heard before it is overwritten.

Note: order of writes
    What a rank wrote before it says so must be there for who hears it. x86 keeps the order of stores and of loads as
    they are made, and nothing here orders them on other processors: `is_supported` is False there.
Note: waits
    A rank looks for some microseconds, since the others are mostly there or nearly so, and then ever more seldom, so
    that it does not take the processor from them. A process that ends is noticed by its pidfd, also while nobody has
    waited for it yet.
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
"""64-bit words of a place: how often and about what something was said there last, and up to seven numbers."""
ABOUT_BITS: Final = 32
ABOUT: Final = (1 << ABOUT_BITS) - 1
TURNS: Final = 1 << 31
"""Meetings at one place are counted modulo this, since words have a sign; ranks are at most one apart."""
PLACES: Final = 1 << 18
"""More than enough: only those that are used take memory."""
BOARD_BYTES: Final = 8 * WORDS * PLACES

LOOKS: Final = 500
"""Looks before the first pause, some tens of microseconds."""
PAUSE_S: Final = 20e-6
LONGEST_PAUSE_S: Final = 1e-3


def is_supported() -> bool:
    """Tell whether processes can meet here by memory alone."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "pidfd_open")


@final
class Board:
    """This rank's board and those of the others.

    Args:
        words: the boards, by rank, as 64-bit numbers.
        rank: this one's place among them.
        pids: their processes.
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
        """Tell the others some numbers; what is returned waits for theirs.

        Args:
            place: where; meetings at one place follow each other. Who says something again overwrites what it said, so
                the numbers of a meeting are sure only until another rank may come to the next one there.
            about: what for, in 32 bits; every rank must meet for the same.
        """
        own, first = self._words[self._rank], WORDS * place
        self._counts[place] = turn = (self._counts[place] + 1) % TURNS
        for index, number in enumerate(numbers, first + 1):
            own[index] = number
        # One store tells how often and about what; the numbers are there before it.
        own[first] = said = turn << ABOUT_BITS | about
        return Meeting(self, first, said, len(numbers))

    def hear(self, first: int, said: int, count: int, limit: timedelta) -> dict[int, list[int]]:
        """Return the others' numbers of one meeting, by rank; see `Meeting.wait`."""
        end_s = time.monotonic() + limit.total_seconds()
        for other in self._ends:
            if self._words[other][first] != said:
                self._await(other, first, said, end_s)
        return {other: self._words[other][first + 1 : first + 1 + count].tolist() for other in self._ends}

    def _await(self, other: int, first: int, said: int, end_s: float) -> None:
        words, looks, pause_s = self._words[other], 0, PAUSE_S
        stale: int | None = None
        # Most looks find the word that the last one found: one comparison.
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
    """Tell whether `word` is of an earlier meeting than `said`."""
    return 0 < ((said >> ABOUT_BITS) - (word >> ABOUT_BITS)) % TURNS < TURNS // 2


@final
class Meeting:
    """What this rank said in one meeting, and, once waited for, what the others said: `numbers`, by rank."""

    def __init__(self, board: Board, first: int, said: int, count: int) -> None:
        self._board, self._first, self._said, self._count = board, first, said, count
        self.numbers: dict[int, list[int]] = {}

    @property
    def offsets(self) -> dict[int, int]:
        """The one number that each of the others said."""
        return {place: number for place, (number,) in self.numbers.items()}

    def wait(self, limit: timedelta) -> None:
        """Return when every rank has said its numbers.

        Raises:
            RuntimeError: a rank's process ended, it met for something else, or `limit` is over.
        """
        self.numbers = self._board.hear(self._first, self._said, self._count, limit)
