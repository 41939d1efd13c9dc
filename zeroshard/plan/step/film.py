"""One step of one rank as a film: what lies in memory and what the device and its network do, at each moment.

Owns the records of a step and sums over them. `simulate.py` makes them. It must not know models, nor what a rank should
do about a result (`planning.py`). Needs no torch.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Final, NamedTuple, final

from zeroshard.plan.machine import rules

__all__ = [
    "COLUMNS",
    "Event",
    "Film",
    "LaneSpan",
    "OUTER_STATES",
    "Phase",
    "Tick",
    "bytes_by_column",
    "bytes_elsewhere",
    "calls_of",
    "made_between",
]

COLUMNS: Final = ("parameters", "gradients", "states", "padding", "activations", "transient")
OUTER_STATES: Final = "states of anchors"
"""What the first exchange of each fragment makes, after the first step or in it."""


ALLOC, FREE = rules.Action.ALLOC, rules.Action.FREE


class Event(NamedTuple):
    """Memory is taken, or given back (`nbytes` below 0), at a time in seconds from the start of the step.

    `is_mapped` marks memory that torch's allocator does not track: pages that the ranks of a host share, and buffers
    for files. `memory` is the device's, the host's or a file's.
    """

    at_s: float
    nbytes: int
    storage: int
    column: str
    unit: str
    what: str
    is_mapped: bool = False
    memory: str = "device"


class LaneSpan(NamedTuple):
    """Work on a lane, or a wait of the compute lane (`is_exposed`)."""

    lane: str
    start_s: float
    stop_s: float
    what: str
    is_exposed: bool = False


class Phase(NamedTuple):
    """A part of the step."""

    name: str
    start_s: float
    stop_s: float


class Tick(NamedTuple):
    """An event of the engine's detailed trace, as in `zeroshard.Event`."""

    at_s: float
    kind: str
    unit: str
    nbytes: int
    phase: str = ""
    is_pinned: bool = False
    dtype: str = ""


@final
@dataclass(frozen=True)
class Film:
    """A step as it was simulated.

    Args:
        all_before: what is there when the step begins, in all memories.
        all_events: in all memories.
        sent_bytes: that the rank sends, by axis and kind.
        step_s, exposed_s, update_s: of the step; waits of the compute lane before its update; the update and its waits.
        offload_s: waits of the compute lane for the host, the bus and the disk.
        busy_s: what these three have to do, by lane.
        is_cpu: whether device and host are one memory, of one allocator.
    """

    all_before: Sequence[Event]
    all_events: Sequence[Event]
    lanes: Sequence[LaneSpan]
    phases: Sequence[Phase]
    ticks: Sequence[Tick]
    sent_bytes: Mapping[str, int]
    step_s: float
    exposed_s: float
    update_s: float
    offload_s: float = 0.0
    busy_s: Mapping[str, float] = field(default_factory=dict)
    is_cpu: bool = False

    @property
    def compute_s(self) -> float:
        """What the compute lane computes in forwards and backwards."""
        return self.step_s - self.exposed_s - self.update_s - self.offload_s

    @cached_property
    def before(self) -> Sequence[Event]:
        """What is on the device when the step begins."""
        return tuple(_in(self.all_before, "device"))

    @cached_property
    def events(self) -> Sequence[Event]:
        """Those of the device's memory."""
        return tuple(_in(self.all_events, "device"))

    @cached_property
    def elsewhere_bytes(self) -> Mapping[str, int]:
        """What is kept in other memories when the step begins, by memory."""
        return MappingProxyType(bytes_elsewhere(self.all_before))

    @cached_property
    def everywhere_bytes(self) -> int:
        """The most bytes on device and host together."""
        return self._most("device", "host")

    @cached_property
    def host_peak_bytes(self) -> int:
        """The most bytes on the host: what is offloaded, and the buffers that it passes through."""
        return self._most("host")

    @cached_property
    def resident_bytes(self) -> Mapping[str, int]:
        """What is there when the step begins, by column."""
        return MappingProxyType(bytes_by_column(self.before))

    @cached_property
    def live(self) -> Sequence[int]:
        """Bytes after each event."""
        return tuple(accumulate((one.nbytes for one in self.events), initial=sum(self.resident_bytes.values())))[1:]

    @cached_property
    def peak(self) -> tuple[int, int]:
        """The most bytes, and the place of the event that reaches them."""
        place = max(range(len(self.live)), key=self.live.__getitem__)
        return self.live[place], place

    @cached_property
    def allocated_bytes(self) -> int:
        """The most bytes that torch's allocator has handed out at a time."""
        return self._most(*self._allocator, is_mapped=(False,))

    @cached_property
    def mapped_bytes(self) -> int:
        """The most bytes of this rank's pages that the ranks of a host map together."""
        return self._most(*self._allocator, is_mapped=(True,))

    @property
    def _allocator(self) -> Sequence[str]:
        # Where the device is the host's processor, what lies on the host comes from the same allocator.
        return ("device", "host") if self.is_cpu else ("device",)

    def _most(self, *memories: str, is_mapped: Sequence[bool] = (False, True)) -> int:
        start = sum(one.nbytes for one in _in(self.all_before, *memories) if one.is_mapped in is_mapped)
        wanted = (one.nbytes for one in _in(self.all_events, *memories) if one.is_mapped in is_mapped)
        return max(accumulate(wanted, initial=start))

    def least_bytes(self, moved: Collection[str]) -> int:
        """Return the most bytes on the device before the update, if those of some columns took none."""
        start = sum(nbytes for column, nbytes in self.resident_bytes.items() if column not in moved)
        until_s = self.phases[-1].start_s
        kept = (one.nbytes for one in self.events if one.column not in moved and one.at_s < until_s)
        return max(accumulate(kept, initial=start))

    @cached_property
    def peak_phase(self) -> str:
        """The phase of the peak."""
        at_s = self.events[self.peak[1]].at_s
        place = bisect_right([phase.start_s for phase in self.phases], at_s) - 1
        return self.phases[max(0, place)].name

    def live_at(self, place: int) -> Sequence[Event]:
        """Return what is live after the event at `place`, largest first."""
        live: dict[int, Event] = {one.storage: one for one in self.before}
        for one in self.events[: place + 1]:
            if one.nbytes > 0:
                live[one.storage] = one
            else:
                live.pop(one.storage, None)
        return sorted(live.values(), key=lambda one: -one.nbytes)


def calls_of(events: Iterable[Event], *, shift: int = 0, but: Collection[int] = ()) -> Iterator[rules.Event]:
    """Yield the calls of the allocator that events stand for.

    Args:
        shift: added to the numbers of storages, as of a later step.
        but: storages to leave out.
    """
    for event in events:
        if event.storage not in but:
            yield rules.Event(event.storage + shift, max(0, event.nbytes), 0, ALLOC if event.nbytes > 0 else FREE)


def made_between(first: Film, film: Film) -> Iterator[rules.Event]:
    """Yield the calls for outer states that exchanges make between a first step and a steady one."""
    there = sum(one.nbytes for one in first.events if one.what == OUTER_STATES)
    found = [one for one in film.before if one.what == OUTER_STATES and one.nbytes > there]
    return (rules.Event(one.what, one.nbytes - there) for one in found)


def bytes_by_column(events: Iterable[Event]) -> dict[str, int]:
    """Return the bytes on the device, by column."""
    sums = Counter(dict.fromkeys(COLUMNS, 0))
    for one in _in(events, "device"):
        sums[one.column] += one.nbytes
    return dict(sums)


def bytes_elsewhere(events: Iterable[Event]) -> dict[str, int]:
    """Return the bytes that other memories keep, by memory."""
    sums = Counter[str]()
    for one in events:
        if one.column != "transient":
            sums[one.memory] += one.nbytes
    sums.pop("device", None)
    return dict(sums)


def _in(events: Iterable[Event], *memories: str) -> Iterator[Event]:
    """Yield the events of some memories."""
    return (one for one in events if one.memory in memories)
