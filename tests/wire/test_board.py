"""Meetings in shared memory: what is said is heard, and a wait that cannot end says why."""

import mmap
import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest

from zeroshard.wire.board import ABOUT_BITS, BOARD_BYTES, TURNS, WORDS, Board, is_supported

pytestmark = pytest.mark.skipif(not is_supported(), reason="boards need Linux on x86-64")

LIMIT = timedelta(seconds=5)


def boards(pids: list[int]) -> list[Board]:
    """Return one board for each rank, all in this process."""
    words = [memoryview(mmap.mmap(-1, BOARD_BYTES)).cast("q") for _ in pids]
    return [Board(words, rank, pids) for rank in range(len(pids))]


def test_everybody_hears_everybody() -> None:
    three = boards([os.getpid()] * 3)
    for turn in range(4):
        meetings = [board.meet(7, 5, turn, -rank) for rank, board in enumerate(three)]
        for rank, meeting in enumerate(meetings):
            meeting.wait(LIMIT)
            assert meeting.numbers == {other: [turn, -other] for other in range(3) if other != rank}


def test_meetings_at_different_places_may_be_heard_in_any_order() -> None:
    one, two = boards([os.getpid()] * 2)
    said = [one.meet(place, 1, place) for place in (0, 1, 2)]
    heard = [two.meet(place, 1, 10 * place) for place in (2, 0, 1)]
    for meeting in reversed(said):
        meeting.wait(LIMIT)
    assert [meeting.numbers[1] for meeting in said] == [[0], [10], [20]]
    for meeting in heard:
        meeting.wait(LIMIT)
    assert [meeting.numbers[0] for meeting in heard] == [[2], [0], [1]]


def test_a_rank_that_is_ahead_does_not_hold_up_the_others() -> None:
    one, two = boards([os.getpid()] * 2)
    first = one.meet(0, 1)
    two.meet(0, 1)
    two.meet(0, 2)
    first.wait(LIMIT)


def test_a_word_said_just_before_the_wait_begins_ends_it() -> None:
    one, two = boards([os.getpid()] * 2)
    one.meet(0, 1)
    two.meet(0, 1)
    said = (1 << ABOUT_BITS) | 1
    one._await(1, 0, said, time.monotonic() + 1)


def test_ranks_that_meet_for_different_things_are_told() -> None:
    one, two = boards([os.getpid()] * 2)
    meeting = one.meet(0, 3)
    two.meet(0, 4)
    with pytest.raises(RuntimeError, match="rank 1 of this host met for 4, this rank for 3"):
        meeting.wait(LIMIT)


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    one, _ = boards([os.getpid()] * 2)
    with pytest.raises(RuntimeError, match="Timed out waiting for rank 1"):
        one.meet(0, 1).wait(timedelta(seconds=0.05))


def test_a_process_that_ends_is_noticed_at_once() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    one, _ = boards([os.getpid(), child.pid])
    meeting = one.meet(0, 1)
    child.kill()
    before_s = time.monotonic()
    # Not reaped yet: such a process still has its number.
    with pytest.raises(RuntimeError, match="Connection closed: the process of rank 1"):
        meeting.wait(timedelta(seconds=30))
    assert time.monotonic() - before_s < 10
    child.wait()


def test_what_a_process_said_before_it_ended_is_heard() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    one, two = boards([os.getpid(), child.pid])
    meeting = one.meet(0, 1, 0)
    child.kill()
    two.meet(0, 1, 42)
    meeting.wait(LIMIT)
    assert meeting.numbers == {1: [42]}
    child.wait()


def test_meetings_are_counted_across_the_end_of_a_word() -> None:
    three = boards([os.getpid()] * 3)
    for board in three:
        board._counts[7] = TURNS - 2
        board._words[board._rank][WORDS * 7] = (TURNS - 2) << ABOUT_BITS | 5
    ahead = None
    for turn in range(5):
        meetings = [board.meet(7, 5, turn) for board in three[:2]]
        with pytest.raises(RuntimeError, match="Timed out waiting for rank 2"):
            meetings[0].wait(timedelta(seconds=0.01))
        last = three[2].meet(7, 5, turn)
        for meeting in meetings:
            meeting.wait(LIMIT)
        if turn % 2:
            # One that is ahead, past the end, does not hold up the others.
            ahead = three[0].meet(7, 5, turn + 1), three[1].meet(7, 5, turn + 1)
        last.wait(LIMIT)
        if ahead is not None:
            three[2].meet(7, 5, turn + 1).wait(LIMIT)
            ahead = None
    with pytest.raises(RuntimeError, match="rank 1 of this host met for 4, this rank for 3"):
        three[1].meet(7, 4)
        three[0].meet(7, 3).wait(LIMIT)
