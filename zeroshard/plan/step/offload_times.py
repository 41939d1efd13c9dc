"""The update of what lies elsewhere, as a schedule: the host's processors, the bus and the disk, piece by piece.

Owns the order of pieces and the clocks of four lanes: "host" (updates, and rounding of what was updated), "back" (to
the device), "read" and "write" (of files). Must not know buckets nor memory (`film.py`). Needs no torch.

Note: the order of pieces
    In memory of the host all is updated at once, then rounded and sent back, bucket by bucket. In files a piece is read
    while the one before it is updated, and written while the next one is; a piece is waited for two pieces later.
    `optim/pieces.py` and `update/streamed.py` are that order in the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, final

__all__ = ["Lanes", "PINNED", "Work", "bring", "bring_ahead", "play_update"]

PINNED: Final = 2
"""Pinned buffers; the host waits for the copy from the one that it fills again."""
SETTLED: Final = 3 * PINNED
"""Pieces after which each takes as long as the one before it."""


class Work(NamedTuple):
    """The update of one bucket's part elsewhere, in seconds of all of it.

    `pieces` is in how many parts it goes through the disk, 0 for memory, and `copies` in how many over the bus.
    `disk_s` is for one direction; `written_s` is for parameters in the file that are only written.
    """

    name: str
    update_s: float
    round_s: float
    back_s: float
    copies: int = 1
    disk_s: float = 0.0
    pieces: int = 0
    written_s: float = 0.0


@final
@dataclass
class Lanes:
    """When each lane is free, and what ran on them, in seconds.

    Args:
        now_s: the moment that the program is at.
    """

    now_s: float
    free_s: dict[str, float]
    spans: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    """By lane and what it is: from the beginning of the first part to the end of the last."""
    busy_s: dict[str, float] = field(default_factory=dict)
    """By lane."""
    buffers: list[float] = field(default_factory=lambda: [0.0] * PINNED)
    """When the last copy from each pinned buffer is over, the next one to be filled first."""

    def run(self, lane: str, took_s: float, what: str, *, not_before_s: float = 0.0) -> float:
        """Put work on a lane, and return when it is done."""
        start_s = max(self.now_s, not_before_s, self.free_s.get(lane, 0.0))
        stop_s = self.free_s[lane] = start_s + took_s
        if took_s:
            self.busy_s[lane] = self.busy_s.get(lane, 0.0) + took_s
            self.spans[lane, what] = self.spans.get((lane, what), (start_s, stop_s))[0], stop_s
        return stop_s

    def go_on(self, later_s: float, works: Sequence[tuple[str, str, float]]) -> None:
        """Let lanes go on as they do until so much later: their names, what runs, and the seconds of it."""
        self.now_s += later_s
        self.buffers[:] = [one + later_s for one in self.buffers]
        for lane, what, took_s in works:
            self.free_s[lane] += later_s
            if took_s:
                self.busy_s[lane] += took_s
                self.spans[lane, what] = self.spans[lane, what][0], self.free_s[lane]


def play_update(works: Sequence[Work], lanes: Lanes) -> float:
    """Play the update of some buckets, in order; return when all parameters are on the device.

    On return `lanes.now_s` is when the program goes on: with the last copy issued, and the last piece written.
    """
    in_memory = [one for one in works if not one.pieces]
    for one in in_memory:
        lanes.now_s = lanes.run("host", one.update_s, f"update of {one.name}")
    arrived_s = lanes.now_s
    for one in in_memory:
        arrived_s = max(arrived_s, bring(one, 1, lanes))
    return max(arrived_s, _stream([one for one in works if one.pieces], lanes))


def bring(one: Work, parts: int, lanes: Lanes, lane: str = "host") -> float:
    """Round one of some equal parts of a bucket, and send it back; return when it is there.

    Args:
        lane: whose time the rounding is.
    """
    copies = max(1, -(-one.copies // parts))
    round_s, back_s = one.round_s / parts / copies, one.back_s / parts / copies
    names = f"rounding of {one.name}", f"parameters of {one.name}"
    before_s = arrived_s = lanes.now_s
    for _ in range(min(copies, SETTLED)):
        lanes.now_s, before_s = max(lanes.now_s, lanes.buffers.pop(0)), arrived_s
        lanes.now_s = lanes.run(lane, round_s, names[0])
        arrived_s = lanes.run("back", back_s, names[1])
        lanes.buffers.append(arrived_s)
    if (rest := copies - SETTLED) > 0:
        # Each of the others arrives as long after the one before it.
        later_s = rest * (arrived_s - before_s)
        lanes.go_on(later_s, ((lane, names[0], rest * round_s), ("back", names[1], rest * back_s)))
        arrived_s += later_s
    return arrived_s


def bring_ahead(one: Work, lanes: Lanes) -> float:
    """Copy parameters of another memory to the device, in a thread; return when they are there.

    From a file, the thread begins to read a piece before it waits for the piece before, and reads into a buffer once
    the last copy from the buffer is over.
    """
    if not one.disk_s:
        return bring(one, 1, lanes, "copier")
    what, arrived_s = f"parameters of {one.name}", lanes.now_s
    lanes.now_s = max(lanes.now_s, lanes.free_s.get("copier", 0.0))

    def begin() -> float:
        lanes.now_s = max(lanes.now_s, lanes.buffers.pop(0))
        return lanes.run("read", one.disk_s / one.copies, what)

    read_s = begin()
    for place in range(one.copies):
        present_s, read_s = read_s, begin() if place + 1 < one.copies else 0.0
        lanes.now_s = max(lanes.now_s, present_s)
        arrived_s = lanes.run("back", one.back_s / one.copies, what)
        lanes.buffers.append(arrived_s)
    lanes.free_s["copier"] = lanes.now_s
    return arrived_s


def _stream(works: Sequence[Work], lanes: Lanes) -> float:
    """Play updates through files; return when all parameters are on the device."""
    pieces = [one for one in works for _ in range(one.pieces)]
    arrived_s = written_s = before_s = lanes.now_s
    read_s = [lanes.run("read", pieces[0].disk_s / pieces[0].pieces, pieces[0].name)] if pieces else []
    for place, one in enumerate(pieces):
        if place + 1 < len(pieces):
            ahead = pieces[place + 1]
            read_s.append(lanes.run("read", ahead.disk_s / ahead.pieces, ahead.name))
        lanes.now_s = max(lanes.now_s, read_s[place])
        lanes.now_s = lanes.run("host", one.update_s / one.pieces, f"update of {one.name}")
        arrived_s = max(arrived_s, bring(one, one.pieces, lanes))
        before_s, written_s = written_s, lanes.run("write", (one.disk_s + one.written_s) / one.pieces, one.name)
        lanes.now_s = max(lanes.now_s, before_s)
    lanes.now_s = max(lanes.now_s, written_s)
    return max(arrived_s, lanes.now_s)
