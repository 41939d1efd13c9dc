"""One step of one rank as a film: what lies in memory and what the device and its network do, at each moment.

Owns the order of a step: units gathered, computed, released and reduced as `table/schedule.py` says, and the clock of
each lane. Must not know models (`tape.py` has what a unit does) nor what a rank should do about a result
(`planning.py`). Needs no torch.

Note: lanes
    "compute" runs one kernel after the other. "gather" and "reduce" run one collective after the other beside it, each
    from when it was issued. The compute lane waits where a unit is not whole yet, and at the end of a pass for its
    reductions; what it waits is exposed. Exchanges along the tensor axis are part of an operation, so compute waits;
    for copies of activations to the host and back it waits, too.
    With offload there are "out" and "back", the two directions of the bus, "host", its processors, "copier", the thread
    that fills pinned buffers ahead of use, and "read" and "write" of a disk. Gradients go out in the order of the
    compute lane, which so waits for each. It waits for the update elsewhere as a whole where the step does, and else,
    unit by unit, in the next forward (`carried`), and for parameters that lie elsewhere where they are used. These
    waits are `offload_s`, and no part of `exposed_s`.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from types import MappingProxyType
from typing import Final, NamedTuple, final

from zeroshard.describe.offload import written_bytes
from zeroshard.plan.machine import rules
from zeroshard.plan.machine.hardware import Cost, Device, Span
from zeroshard.plan.shape.tape import GIVEN, INPUT, Instruction, Parts
from zeroshard.plan.step.offload_times import PINNED, Lanes, Work, bring, play_update, read_ahead
from zeroshard.plan.step.staging import buffer_bytes, file_staging_bytes, piece_numel
from zeroshard.plan.step.turns import Hands, Turn, play
from zeroshard.table import schedule
from zeroshard.table.bytes import Owned, Updates
from zeroshard.table.pool import Buffer, Buffers
from zeroshard.table.spec import BLOCK_NUMEL, BucketSpec, UnitSpec, itemsize
from zeroshard.table.wires import Wire

__all__ = [
    "COLUMNS",
    "Call",
    "Event",
    "Film",
    "Job",
    "LaneSpan",
    "Phase",
    "Script",
    "Tick",
    "make_film",
    "resident_bytes",
]

MOST_PIECES: Final = 64
"""Of a bucket in files that are played one by one; more of them change a step by less than one of them takes."""
COLUMNS: Final = ("parameters", "gradients", "states", "padding", "activations", "transient")


class Event(NamedTuple):
    """Memory is taken, or given back (`nbytes` below 0), at a time in seconds from the start of the step.

    `is_mapped` tells of pages that the ranks of a host map together, and of buffers for files: torch's allocator does
    not see them. `memory` is the device's, the host's or a file's.
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
    """The engine issues something: "gather", "release", "reduce" or "publish"."""

    at_s: float
    kind: str
    unit: str
    nbytes: int


@final
@dataclass(frozen=True)
class Call:
    """A use of a unit in a forward: what it does there and in the backward."""

    unit: int
    parts: Parts


@final
@dataclass(frozen=True)
class Script:
    """What a model that was traced does: instructions with the number of their unit, whose tensors have one numbering.

    Between them stand "need" and "leave", the uses of units.
    """

    forward: Sequence[tuple[int, Instruction]]
    backward: Sequence[tuple[int, Instruction]]


@final
@dataclass(frozen=True)
class Account:
    """What optimizers keep and move; searches make it once for many jobs.

    Args:
        states: (name of the bucket, bytes of states, bytes of them in another memory, that memory, bytes of counters).
        wide_bytes, moved_bytes: of each optimizer: masters that are widened, and all that an update on the device reads
            and writes.
        wide_apart_bytes: of each optimizer: masters that are widened on the host.
        moved_apart_bytes: by number of the bucket, what an update elsewhere reads and writes.
    """

    states: Sequence[tuple[str, int, int, str, int]]
    wide_bytes: Sequence[int]
    moved_bytes: Sequence[int]
    wide_apart_bytes: Sequence[int]
    moved_apart_bytes: Mapping[int, int]


def account_of(updates: Sequence[Updates]) -> Account:
    """Return the account of some optimizers."""
    states: list[tuple[str, int, int, str, int]] = []
    moved_bytes: list[int] = []
    moved_apart = Counter[int]()
    for one in updates:
        by_bucket: dict[int, list[tuple[BucketSpec, int]]] = {}
        moved = 0
        for bucket, index in one.trained.parameters:
            by_bucket.setdefault(bucket.number, []).append((bucket, index))
            start, stop = bucket.layout.overlap(index, *bucket.states)
            sizes = bucket.formats
            # Master and states are read and written, the gradient read, the rounded parameter written.
            kept = one.per_element * itemsize(sizes.state) + one.element_bytes
            each = 2 * itemsize(sizes.master) + 2 * kept + itemsize(sizes.grad)
            if index < bucket.apart:
                moved_apart[bucket.number] += (stop - start) * each
            else:
                moved += (stop - start) * (each + itemsize(sizes.param) * bucket.has_masters)
        moved_bytes.append(moved)
        for places in by_bucket.values():
            bucket, of_bucket = places[0][0], replace(one, parameters=places, whole=())
            kept_bytes = of_bucket.state_bytes(), of_bucket.state_bytes(is_apart=True)
            states.append((bucket.name, *kept_bytes, bucket.row.states.memory, one.counter_bytes * len(places)))
        states += [_states_of(owned) for owned in one.trained.whole if owned.is_kept]
    return Account(
        tuple(states),
        tuple(one.numel_bytes(only_wide=True) for one in updates),
        tuple(moved_bytes),
        tuple(one.numel_bytes(only_wide=True, is_apart=True) for one in updates),
        MappingProxyType(dict(moved_apart)),
    )


def _states_of(one: Owned) -> tuple[str, int, int, str, int]:
    """Return the states of a parameter that this rank updates whole, as in `Account`."""
    is_apart, memory = one.index < one.bucket.apart, one.bucket.row.states.memory
    here = (0, one.state_bytes) if is_apart else (one.state_bytes, 0)
    return one.bucket.name, *here, memory, one.counter_bytes


@final
@dataclass(frozen=True)
class Job:
    """What one rank does in a step.

    Args:
        units: as this rank sees them, the root first.
        calls: uses of units, in order of the forward; none where there is a script.
        updates: what the optimizer updates and keeps.
        wire: the transport of gradients and parameters.
        device: whose kernels run.
        dtype: of products.
        spans: where the ranks of each axis are: "shard", "replicate", "tensor", "expert".
        micro_batches: forwards and backwards of a step.
        input_bytes: of one micro-batch, there from its start to its end.
        buffer_bytes: of buffers of the model.
        keeps_gradients: whether the memory of gradients stays from step to step, as with
            `zero_grad(set_to_none=False)`.
        seconds: of one kernel; the device's own formula where not given.
        script: of a model that was traced.
        update_bytes: that the optimizer's kernels take beside its states.
        account: of the updates, where it is known already.
        host_ranks: ranks of a node, which share its processors and its disk.
        is_early: whether the optimizer is one whose update on the host may go on after `step()`.
        turns: of each of `updates`, how what is updated whole is exchanged and updated; none where nothing is.
    """

    units: Sequence[UnitSpec]
    calls: Sequence[Call]
    updates: Sequence[Updates]
    wire: Wire
    device: Device
    dtype: str
    spans: Mapping[str, Span]
    micro_batches: int = 1
    input_bytes: int = 0
    buffer_bytes: int = 0
    keeps_gradients: bool = False
    seconds: Callable[[Cost], float] | None = None
    script: Script | None = None
    update_bytes: int = 0
    account: Account | None = None
    host_ranks: int = 1
    is_early: bool = False
    turns: Sequence[Sequence[Turn]] = ()

    @property
    def is_repeated(self) -> bool:
        """Whether a steady step is played after another one, so that its pools are those that this one left."""
        return self.script is not None or self.device.is_cpu


@final
@dataclass(frozen=True)
class Film:
    """A step as it was simulated.

    Args:
        all_before: what is there when the step begins, in all memories.
        all_events: in all memories.
        sent_bytes: that the rank sends, by axis and kind.
        step_s, exposed_s, update_s: of the step; waits of the compute lane in it; its update and what follows.
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
        return tuple(one for one in self.all_before if one.memory == "device")

    @cached_property
    def events(self) -> Sequence[Event]:
        """Those of the device's memory."""
        return tuple(one for one in self.all_events if one.memory == "device")

    @cached_property
    def elsewhere_bytes(self) -> Mapping[str, int]:
        """What is kept in other memories when the step begins, by memory."""
        return MappingProxyType(_elsewhere(self.all_before))

    @cached_property
    def everywhere_bytes(self) -> int:
        """The most bytes on device and host together."""
        start = sum(one.nbytes for one in self.all_before if one.memory != "file")
        return max(accumulate((one.nbytes for one in self.all_events if one.memory != "file"), initial=start))

    @cached_property
    def host_peak_bytes(self) -> int:
        """The most bytes on the host: what is offloaded, and the buffers that it passes through."""
        start = sum(one.nbytes for one in self.all_before if one.memory == "host")
        return max(accumulate((one.nbytes for one in self.all_events if one.memory == "host"), initial=start))

    @cached_property
    def resident_bytes(self) -> Mapping[str, int]:
        """What is there when the step begins, by column."""
        return MappingProxyType(_by_column(self.before))

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
    def resident_mapped_bytes(self) -> int:
        """What of `resident_bytes` lies in pages that the ranks of a host map together."""
        return sum(one.nbytes for one in self.before if one.is_mapped)

    @cached_property
    def allocated_bytes(self) -> int:
        """The most bytes that torch's allocator has handed out at a time."""
        return self._most(is_mapped=False)

    @cached_property
    def mapped_bytes(self) -> int:
        """The most bytes of this rank's pages that the ranks of a host map together."""
        return self._most(is_mapped=True)

    def _most(self, *, is_mapped: bool) -> int:
        # Where the device is the host's processor, what lies on the host comes from the same allocator.
        memories = ("device", "host") if self.is_cpu else ("device",)
        start = sum(one.nbytes for one in self.all_before if one.is_mapped == is_mapped and one.memory in memories)
        wanted = (one for one in self.all_events if one.is_mapped == is_mapped and one.memory in memories)
        return max(accumulate((one.nbytes for one in wanted), initial=start))

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

    def allocations(self) -> Iterator[rules.Event]:
        """Yield the calls of the allocator, for `plan/machine/allocator.py`: this step after what was there before."""
        return calls_of((*self.before, *self.events))


def calls_of(events: Iterable[Event]) -> Iterator[rules.Event]:
    """Yield the calls of the allocator that events stand for."""
    for one in events:
        if one.nbytes > 0:
            yield rules.Event(one.storage, one.nbytes)
        else:
            yield rules.Event(one.storage, 0, action=rules.Action.FREE)


def _by_column(events: Iterable[Event]) -> dict[str, int]:
    sums = Counter(dict.fromkeys(COLUMNS, 0))
    for one in events:
        sums[one.column] += one.nbytes * (one.memory == "device")
    return dict(sums)


def _elsewhere(events: Iterable[Event]) -> dict[str, int]:
    sums = Counter[str]()
    for one in events:
        if one.memory != "device" and one.column != "transient":
            sums[one.memory] += one.nbytes
    return dict(sums)


def resident_bytes(job: Job, film: Film) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return what another rank has between steps: on the device by column, and in other memories by memory.

    Args:
        job: of that rank.
        film: of this one's steady step, whose pools are as large.
    """
    events = _Camera(job).resident()
    found = _by_column(events)
    found["transient"] = film.resident_bytes["transient"]
    return MappingProxyType(found), MappingProxyType(_elsewhere(events))


def make_film(job: Job, *, is_first: bool = False, is_settled: bool = False) -> Film:
    """Simulate a step.

    Args:
        is_first: whether the optimizer has no states yet, which it then makes in its update.
        is_settled: whether pooled buffers of an earlier step are there, which takes twice the time to find out.
    """
    camera = _Camera(job)
    film = camera.run(is_first=is_first)
    if is_first or not (is_settled or job.is_repeated):
        return film
    return _Camera(job, camera.pooled(), camera.carried()).run(is_first=False)


@final
@dataclass
class _Whole:
    """A unit that is whole, or on its way: when it is, and when what lies elsewhere has been brought."""

    storages: list[int]
    ready_s: float
    brought_s: float


@final
class _Camera:
    """The state of the simulation."""

    def __init__(
        self, job: Job, pooled: Sequence[tuple[int, str]] = (), carried: Mapping[int, float] = MappingProxyType({})
    ) -> None:
        self._job, self._now_s, self._pooled = job, 0.0, pooled
        self._account = job.account or account_of(job.updates)
        self._events: list[Event] = []
        self._lanes: list[LaneSpan] = []
        self._ticks: list[Tick] = []
        self._phases: list[Phase] = []
        self._free_s = dict.fromkeys(("gather", "reduce", "out", "back", "host", "copier", "read", "write"), 0.0)
        self._sent: Counter[str] = Counter()
        self._open: dict[int, tuple[int, str, str, str, bool, str]] = {}
        self._next = 0
        self._whole: dict[int, _Whole] = {}
        self._buffers = Buffers()
        self._landing: dict[int, list[Buffer]] = {}
        self._before: list[Buffer] = []
        self._reduced_s = 0.0
        self._leaving: list[tuple[BucketSpec, bool]] = []
        """Buckets whose sums go to the host when their reduction is over, and whether nothing lies there yet."""
        self._held: set[int] = set()
        self._summed: set[int] = set()
        self._places = {
            name: (bucket, unit.number) for unit in job.units for bucket in unit.buckets for name in bucket.names
        }
        self._missing: dict[int, set[str]] = {}
        self._local: dict[int, Buffer] = {}
        self._loose: set[str] = set()
        self._exposed_s = self._offload_s = 0.0
        self._busy_s: dict[str, float] = {}
        self._updating = dict(carried)
        """Units whose update on the host goes on after the step that began it, and when it ends."""
        self._buffers_s = [0.0] * PINNED
        self._schedule = schedule.Schedule(schedule.Record(), lambda _: False)
        self._seconds: dict[Cost, float] = {}

    # -- memory -----------------------------------------------------------------------------------------------------

    def _make(
        self, nbytes: int, column: str, unit: str, what: str, *, is_mapped: bool = False, memory: str = "device"
    ) -> int:
        number, self._next = self._next, self._next + 1
        self._begin_storage(number, nbytes, column, unit, what, is_mapped, memory)
        return number

    def _begin_storage(
        self, number: int, nbytes: int, column: str, unit: str, what: str, is_mapped: bool, memory: str
    ) -> None:
        if nbytes:
            self._open[number] = (nbytes, column, unit, what, is_mapped, memory)
            self._events.append(Event(self._now_s, nbytes, number, column, unit, what, is_mapped, memory))

    def _drop(self, number: int) -> None:
        if number in self._open:
            nbytes, column, unit, what, is_mapped, memory = self._open.pop(number)
            self._events.append(Event(self._now_s, -nbytes, number, column, unit, what, is_mapped, memory))

    def _turn(self, number: int, column: str, unit: str, what: str) -> None:
        """Let a storage be something else from here on."""
        if number in self._open:
            nbytes, *_, is_mapped, memory = self._open[number]
            self._drop(number)
            self._begin_storage(number, nbytes, column, unit, what, is_mapped, memory)

    def _take(self, numel: int, dtype: str, unit: str, what: str, *, is_adopted: bool = False) -> Buffer:
        """Take a pooled buffer, or memory of its own for a gradient that fills its bucket."""
        buffer, gone = (Buffer(numel, None), None) if is_adopted else self._buffers.take(numel, dtype)
        if gone is not None:
            self._drop(gone.memory)
        if buffer.memory is None:
            is_mapped = self._job.wire.is_in_place and not is_adopted
            buffer.memory = self._make(numel * itemsize(dtype), "transient", unit, what, is_mapped=is_mapped)
        return buffer

    def pooled(self) -> list[tuple[int, str]]:
        """Return elements and dtype of each pooled buffer that is there after a step."""
        return [(one.numel, str(kind)) for kind, free in self._buffers.free.items() for one in free]

    def carried(self) -> Mapping[int, float]:
        """Return when the updates that go on after the step end, by unit, in seconds from its end."""
        return {unit: ready_s - self._now_s for unit, ready_s in self._updating.items()}

    def _give(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            if buffer.kind is None:
                self._drop(buffer.memory)
            else:
                self._buffers.give(buffer)

    # -- the step ---------------------------------------------------------------------------------------------------

    def resident(self) -> Sequence[Event]:
        """Return what is there before a steady step."""
        self._lay_out(is_first=False)
        return self._events

    def _lay_out(self, *, is_first: bool) -> None:
        """Make what is there before a step."""
        job = self._job
        for unit in job.units:
            for bucket in unit.buckets:
                parameters, padding = bucket.bytes_of(bucket.here, bucket.formats.param)
                self._make(parameters, "parameters", unit.name, "parameters", is_mapped=job.wire.is_in_place)
                self._make(padding, "padding", unit.name, "padding", is_mapped=job.wire.is_in_place)
                here = bucket.apart_states[1], bucket.states[1]
                masters, padding = bucket.bytes_of(here, bucket.formats.master)
                self._make(masters * bucket.has_masters, "states", unit.name, "masters")
                self._make(padding * bucket.has_masters, "padding", unit.name, "padding of masters")
                row, sizes = bucket.row, bucket.formats
                for column, what, memory, (start, stop), dtype in (
                    ("parameters", "parameters", row.parameters.memory, bucket.apart_shard, sizes.param),
                    ("states", "masters", bucket.master_memory, bucket.apart_states, sizes.master),
                ):
                    nbytes = (stop - start) * itemsize(dtype) * (what == "parameters" or not bucket.shares_apart)
                    self._make(nbytes, column, unit.name, what, memory=memory)
        self._make(job.buffer_bytes, "parameters", "", "buffers")
        if not is_first:
            self._make_states()
            self._make_staging()
        for unit in job.units if not is_first else ():
            for bucket in filter(self._is_kept, unit.reduced):
                self._hold(bucket)
        for numel, dtype in self._pooled:
            buffer = Buffer(numel, dtype)
            what = "pooled buffer"
            buffer.memory = self._make(numel * itemsize(dtype), "transient", "", what, is_mapped=job.wire.is_in_place)
            self._buffers.give(buffer)

    def run(self, *, is_first: bool) -> Film:
        """Make what is there before a step, and play the step."""
        job = self._job
        units = job.units
        buckets = [bucket for unit in units for bucket in unit.buckets]
        self._lay_out(is_first=is_first)
        before, self._events = self._events, []
        sent = Counter[str]()
        for _ in range(min(job.micro_batches, 2)):
            before_sent = self._sent.copy()
            start_s, begun_s, exposed_s = self._now_s, self._now_s, self._exposed_s
            offload_s, busy_before = self._offload_s, self._busy_s.copy()
            inputs = self._make(job.input_bytes, "activations", "", "inputs")
            self._forward()
            self._mark("forward", start_s)
            start_s = self._now_s
            self._backward()
            self._mark("backward", start_s)
            self._drop(inputs)
            one_s, exposed_s = self._now_s - begun_s, self._exposed_s - exposed_s
            offload_s = self._offload_s - offload_s
            busy_s = {lane: took_s - busy_before.get(lane, 0.0) for lane, took_s in self._busy_s.items()}
            sent = self._sent - before_sent
        start_s, before_s = self._now_s, self._offload_s
        self._update(buckets, is_first=is_first)
        self._mark("update", start_s)
        update_s = self._now_s - start_s - (self._offload_s - before_s)
        more = max(0, job.micro_batches - 2)
        for kind, nbytes in sent.items():
            self._sent[kind] += more * nbytes
        return Film(
            tuple(before),
            tuple(self._events),
            tuple(self._lanes),
            tuple(self._phases),
            tuple(self._ticks),
            MappingProxyType({kind: nbytes for kind, nbytes in self._sent.items() if nbytes}),
            self._now_s + more * one_s,
            self._exposed_s + more * exposed_s,
            update_s,
            self._offload_s + more * offload_s,
            MappingProxyType({lane: took_s + more * busy_s.get(lane, 0.0) for lane, took_s in self._busy_s.items()}),
            job.device.is_cpu,
        )

    def _make_states(self) -> None:
        for name, states_bytes, apart_bytes, memory, counter_bytes in self._account.states:
            self._make(states_bytes, "states", name, "states")
            self._make(apart_bytes, "states", name, "states", memory=memory)
            self._make(counter_bytes, "padding", name, "counters")

    def _make_staging(self) -> None:
        """Make the buffers through which offloaded states pass: they stay from the first update on."""
        job = self._job
        nbytes = file_staging_bytes(job.units, job.updates)
        self._make(nbytes, "transient", "", "buffers for files", is_mapped=True, memory="host")
        nbytes = buffer_bytes(job.units, is_cpu=job.device.is_cpu)
        self._make(nbytes, "transient", "", "pinned buffers", is_mapped=True, memory="host")

    def _mark(self, name: str, start_s: float) -> None:
        self._phases.append(Phase(name, start_s, self._now_s))

    def _forward(self) -> None:
        if self._job.script is not None:
            self._numbers: dict[int, int] = {}
            self._play_script(self._job.script.forward, is_backward=False)
            return
        calls = self._job.calls
        order = list(dict.fromkeys(call.unit for call in calls if call.unit != schedule.ROOT))
        requests: list[schedule.Request] = [("gather", unit) for unit in (schedule.ROOT, *order)]
        self._begin(schedule.Record(tuple(requests), self._pinned(), held=self._kept_whole))
        self._need(schedule.ROOT)
        given, self._saved = self._make(0, "activations", "", "inputs"), []
        for call in calls:
            self._need(call.unit)
            numbers = {INPUT: given}
            self._play(call.unit, call.parts.forward, numbers)
            self._saved.append(numbers)
            given = numbers[call.parts.output]
            self._do(self._schedule.leave(call.unit))
        self._do(self._schedule.close())

    def _play_script(self, script: Sequence[tuple[int, Instruction]], *, is_backward: bool) -> None:
        """Play a pass of a model that was traced."""
        job = self._job
        self._missing = {
            unit.number: {name for bucket in unit.reduced for name in bucket.names} & self._landing_names
            for unit in job.units
        }
        missing = {unit: set(names) for unit, names in self._missing.items()}
        needs = Counter(unit for unit, one in script if one.kind == "need")
        begin = schedule.Record(carried=self._kept_whole) if is_backward else schedule.Record(held=self._kept_whole)
        requests: list[schedule.Request] = [("gather", schedule.ROOT)] * (schedule.ROOT not in begin.carried)
        for unit, one in script:
            if one.kind == "need" and unit not in begin.carried and ("gather", unit) not in requests:
                requests.append(("gather", unit))
            if one.kind == "land" and self._is_last(one.what, missing):
                requests.append(("reduce", self._places[one.what][1]))
        # What no pass uses gets no gradients, and nothing of it is reduced.
        late = [n for n in reversed(self._missing) if self._missing[n] and ("reduce", n) not in requests]
        requests += [("reduce", unit) for unit in late] * is_backward
        pinned = frozenset(unit for unit, count in needs.items() if count > 1)
        self._begin(replace(begin, requests=schedule.hoist(requests), pinned=pinned))
        self._need(schedule.ROOT)
        for unit, one in script:
            if one.kind == "need":
                self._need(unit)
            elif one.kind == "leave":
                self._do(self._schedule.leave(unit))
            elif one.kind == "land":
                self._land_gradient(one)
            else:
                self._play(unit, (one,), self._numbers)
        if is_backward:
            for unit in late:
                self._land(unit)
                self._do(self._schedule.land(unit))
            self._end_backward()
        else:
            self._do(self._schedule.close())

    @cached_property
    def _landing_names(self) -> set[str]:
        """Parameters whose gradients come in a traced backward."""
        script = self._job.script
        return set() if script is None else {one.what for _, one in script.backward if one.kind == "land"}

    def _is_last(self, parameter: str, missing: Mapping[int, set[str]]) -> bool:
        """Note a gradient, and tell whether it completes its unit."""
        if parameter not in self._places:
            return False
        names = missing[self._places[parameter][1]]
        names.discard(parameter)
        return not names

    def _land_gradient(self, one: Instruction) -> None:
        """Move a gradient to where it is added up, as `core/grads.py` does; its own memory goes by the trace."""
        if one.what not in self._places:
            return
        bucket, unit = self._places[one.what]
        sizes, given = bucket.formats, self._numbers[one.tensor]
        numel = one.nbytes // itemsize(sizes.param)
        is_taken = one.is_alone and sizes.param == sizes.grad
        if bucket.lands_on_sums:
            if bucket.names.index(one.what) < bucket.apart_gradients:
                self._pass_through(bucket, numel, is_first=one.what not in self._loose, what=one.what)
            elif one.what in self._loose:
                pass  # added in place to what earlier micro-batches left
            elif is_taken:
                self._turn(given, "gradients", bucket.name, one.what)
                del self._numbers[one.tensor]
            else:
                converted = self._make(
                    numel * itemsize(sizes.grad) * (sizes.param != sizes.grad), "transient", bucket.name, "conversion"
                )
                self._make(numel * itemsize(sizes.grad), "gradients", bucket.name, one.what)
                self._drop(converted)
            self._loose.add(one.what)
        elif bucket.number not in self._local:
            if bucket.adopts and is_taken:
                self._turn(given, "transient", bucket.name, "gradients to reduce")
                del self._numbers[one.tensor]
                self._local[bucket.number] = Buffer(numel, None, given)
            else:
                self._begin_local(bucket)
        if self._is_last(one.what, self._missing):
            self._copy_landed(unit, one.nbytes)
            self._do(self._schedule.land(unit))

    def _pass_through(self, bucket: BucketSpec, numel: int, *, is_first: bool, what: str = "") -> None:
        """Copy one rank's gradient to the host, or add it on the device to what came from there.

        Args:
            what: the parameter's name, where its memory on the host is made now.
        """
        sizes, wide_bytes = bucket.formats, numel * itemsize(bucket.formats.grad)
        converted = self._make(wide_bytes * (sizes.param != sizes.grad), "transient", bucket.name, "conversion")
        if is_first:
            self._make(wide_bytes * bool(what), "gradients", bucket.name, what, memory="host")
        self._leave_on_host(bucket, wide_bytes, is_first=is_first)
        self._drop(converted)

    def _leave_on_host(self, bucket: BucketSpec, nbytes: int, *, is_first: bool) -> None:
        """Move gradients out; what lies there already comes to the device before, and is added to."""
        what = f"gradients of {bucket.name}"
        if not is_first and not self._job.device.is_cpu:
            brought = self._make(nbytes, "transient", bucket.name, "sums of gradients")
            self._move("back", what, nbytes)
            self._sent["gradients from the host"] += nbytes
            self._send_out(what, nbytes)
            self._drop(brought)
        else:
            self._send_out(what, nbytes)

    def _begin_local(self, bucket: BucketSpec) -> None:
        """Take the memory that a bucket's gradients land in."""
        if bucket.holds_whole_gradients and bucket.number not in self._summed:
            self._hold(bucket)
        elif bucket.number not in self._local:
            wanted = (bucket.layout.full_numel, bucket.formats.grad, bucket.name, "gradients to reduce")
            self._local[bucket.number] = self._take(*wanted)

    def _end_backward(self) -> None:
        """Close the pass, and wait for its reductions."""
        self._do(self._schedule.close())
        self._finish_before()
        self._wait("reductions", self._reduced_s)

    def _backward(self) -> None:
        if self._job.script is not None:
            self._play_script(self._job.script.backward, is_backward=True)
            return
        calls = list(zip(self._job.calls, self._saved, strict=True))
        last = {call.unit: place for place, (call, _) in enumerate(reversed(calls))}
        requests: list[schedule.Request] = [("gather", schedule.ROOT)] * (schedule.ROOT not in self._kept_whole)
        seen: set[int] = {schedule.ROOT, *self._kept_whole}
        for place, (call, _) in enumerate(reversed(calls)):
            if call.unit not in seen:
                seen.add(call.unit)
                requests.append(("gather", call.unit))
            if last[call.unit] == place and call.unit != schedule.ROOT:
                requests.append(("reduce", call.unit))
        requests.append(("reduce", schedule.ROOT))
        self._begin(schedule.Record(schedule.hoist(requests), self._pinned(), carried=self._kept_whole))
        self._need(schedule.ROOT)
        given = self._make(0, "activations", "", "the loss's gradient")
        for place, (call, numbers) in enumerate(reversed(calls)):
            self._need(call.unit)
            numbers[GIVEN] = given
            given = self._play(call.unit, call.parts.backward, numbers)
            if not place:  # what is outside blocks comes first, and is reduced last
                self._land(schedule.ROOT)
            if last[call.unit] == place and call.unit != schedule.ROOT:
                self._land(call.unit)
                self._copy_landed(call.unit, 0)
                self._do(self._schedule.land(call.unit))
            self._do(self._schedule.leave(call.unit))
        self._drop(given)
        if calls:  # the loss
            self._drop(calls[-1][1].get(calls[-1][0].parts.output, given))
        self._land(schedule.ROOT)
        self._do(self._schedule.land(schedule.ROOT))
        self._end_backward()

    @cached_property
    def _kept_whole(self) -> frozenset[int]:
        """Units that stay whole from forward to backward."""
        return frozenset(unit.number for unit in self._job.units if unit.is_held)

    def _begin(self, record: schedule.Record) -> None:
        self._schedule = schedule.Schedule(record, lambda _: False)

    def _pinned(self) -> frozenset[int]:
        """Return the units that are used more than once: they stay whole from first to last."""
        uses = Counter(call.unit for call in self._job.calls)
        return frozenset(unit for unit, count in uses.items() if count > 1)

    def _need(self, unit: int) -> None:
        self._do(self._schedule.need(unit) or ())
        if unit in self._whole:
            name, whole = self._job.units[unit].name or "the root", self._whole[unit]
            self._wait(f"{name} on the bus", whole.brought_s, is_offload=True)
            self._wait(name, whole.ready_s)

    def _wait(self, what: str, until_s: float, *, is_offload: bool = False) -> None:
        if until_s > self._now_s:
            self._lanes.append(LaneSpan("compute", self._now_s, until_s, f"wait for {what}", is_exposed=True))
            waited_s = until_s - self._now_s
            self._exposed_s += waited_s * (not is_offload)
            self._offload_s += waited_s * is_offload
            self._now_s = until_s

    def _send_out(self, what: str, nbytes: int) -> None:
        """Copy gradients to the host, in the order of the compute lane."""
        if not self._job.device.is_cpu and nbytes:
            self._move("out", what, nbytes)
            self._sent["gradients to the host"] += nbytes

    def _note_busy(self, lane: str, took_s: float) -> None:
        self._busy_s[lane] = self._busy_s.get(lane, 0.0) + took_s

    def _move(self, lane: str, what: str, nbytes: int) -> None:
        start_s = max(self._now_s, self._free_s[lane])
        stop_s = self._free_s[lane] = start_s + self._job.device.copy_s(nbytes)
        self._note_busy(lane, stop_s - start_s)
        self._lanes.append(LaneSpan(lane, start_s, stop_s, what))
        self._wait(f"{what} on the bus", stop_s, is_offload=True)

    def _play(self, number: int, run: Sequence[Instruction], numbers: dict[int, int]) -> int:
        """Play the instructions of a unit; return the storage that is handed on, or one of no bytes."""
        name, handed = self._job.units[number].name, -1
        for one in run:
            if one.kind == "make":
                numbers[one.tensor] = self._make(one.nbytes, "activations", name, one.what)
            elif one.kind == "drop":
                if one.tensor in numbers:  # else it became a gradient
                    self._drop(numbers.pop(one.tensor))
            elif one.kind == "run":
                self._compute(one.what, self._kernel_s(one.cost) if one.cost is not None else one.seconds)
            elif one.kind == "land":
                self._land(number)
                self._pass_gradient(number, one.nbytes)
            elif one.kind == "exchange" and one.exchange is not None:
                exchange = one.exchange
                span = self._job.spans[exchange.axis]
                self._sent[f"{exchange.axis} {exchange.kind}"] += sent_of(exchange.kind, exchange.nbytes, span)
                self._stall(one.what, self._job.device.collective_s(exchange.kind, exchange.nbytes, span))
            elif one.kind == "copy":
                self._sent[one.what] += one.nbytes
                self._stall(one.what, self._job.device.copy_s(one.nbytes))
            elif one.kind == "hand":
                handed = numbers[one.tensor]
        return handed if handed >= 0 else self._make(0, "activations", name, "nothing")

    def _stall(self, what: str, took_s: float) -> None:
        """Let the compute lane do nothing but this exchange or copy."""
        self._lanes.append(LaneSpan("compute", self._now_s, self._now_s + took_s, what, is_exposed=True))
        self._now_s += took_s
        self._exposed_s += took_s

    def _compute(self, what: str, took_s: float) -> None:
        self._lanes.append(LaneSpan("compute", self._now_s, self._now_s + took_s, what))
        self._now_s += took_s

    def _kernel_s(self, cost: Cost) -> float:
        found = self._seconds.get(cost)
        if found is None:
            job = self._job
            found = job.seconds(cost) if job.seconds else job.device.kernel_s(cost, job.dtype)
            self._seconds[cost] = found
        return found

    # -- what the engine issues -------------------------------------------------------------------------------------

    def _do(self, actions: Iterable[schedule.Action]) -> None:
        for kind, unit in actions:
            spec = self._job.units[unit]
            if kind == "gather" and not spec.is_whole:
                self._gather(spec)
            elif kind == "release" and unit in self._whole:
                for storage in self._whole.pop(unit).storages:
                    self._drop(storage)
                self._tick("release", spec.name, 0)
            elif kind == "reduce":
                self._reduce(spec)

    def _gather(self, spec: UnitSpec) -> None:
        # What is read in place takes no memory of this rank.
        storages = [
            self._make(b.layout.full_numel * itemsize(b.formats.param), "transient", spec.name, "whole parameters")
            for b in spec.buckets
            if b.is_gathered and not self._job.wire.is_in_place
        ]
        self._tick("gather", spec.name, spec.sent_bytes("gather"))
        self._await_update(spec)
        brought_s = self._bring(spec)
        gather = [("gather", spec.full_bytes, "shard")]
        stop_s = self._exchange("gather", spec.name, gather, not_before_s=brought_s)
        self._whole[spec.number] = _Whole(storages, stop_s, brought_s)

    def _await_update(self, spec: UnitSpec) -> None:
        """Wait for what the host still updates of a unit, and bring that to the device."""
        if spec.number in self._updating:
            self._wait(f"the update of {spec.name}", self._updating.pop(spec.number), is_offload=True)
            works = [self._work_of(b)._replace(update_s=0.0) for b in spec.buckets if self._is_early(b)]
            lanes = self._lanes_from(self._now_s)
            arrived_s = play_update([work for work in works if work.back_s], lanes)
            self._take_over(lanes)
            self._wait(f"parameters of {spec.name} on the bus", arrived_s, is_offload=True)

    def _bring(self, spec: UnitSpec) -> float:
        """Begin to copy offloaded parameters to the device in a thread; return when they have arrived."""
        job, arrived_s = self._job, 0.0
        for bucket in spec.buckets:
            cell = bucket.row.parameters
            nbytes = (bucket.apart_shard[1] - bucket.apart_shard[0]) * itemsize(bucket.formats.param)
            if not nbytes or (job.device.is_cpu and cell.memory == "host"):
                continue
            lanes = self._lanes_from(self._now_s)
            copy_s = 0.0 if job.device.is_cpu else job.device.copy_s(nbytes)
            copies = max(1, -(-nbytes // max(1, cell.place.staging_bytes // 2)))
            if cell.memory == "file":
                read_s = job.device.disk_s(nbytes, job.host_ranks)
                work = Work(bucket.name, 0.0, 0.0, copy_s, copies, disk_s=read_s)
                arrived_s = max(arrived_s, read_ahead(work, lanes))
            else:
                work = Work(bucket.name, 0.0, job.device.host_s(2 * nbytes, job.host_ranks), copy_s, copies)
                arrived_s = max(arrived_s, bring(work, 1, lanes, "copier"))
            self._take_over(lanes)
            if not job.device.is_cpu:
                self._sent["parameters from the host"] += nbytes
            elif bucket.layout.world_size > 1:
                # On a CPU with several ranks, the program waits before it starts the gather.
                self._wait(f"parameters of {spec.name} in the file", arrived_s, is_offload=True)
        return arrived_s

    def _lanes_from(self, start_s: float) -> Lanes:
        return Lanes(start_s, self._free_s, buffers=self._buffers_s)

    def _take_over(self, lanes: Lanes) -> None:
        """Keep what ran on lanes beside the computation."""
        self._lanes += [LaneSpan(lane, *span, what) for (lane, what), span in lanes.spans.items()]
        for lane, took_s in lanes.busy_s.items():
            self._note_busy(lane, took_s)

    def _exchange(
        self, lane: str, what: str, works: Iterable[tuple[str, int, str]], *, not_before_s: float = 0.0
    ) -> float:
        """Put collectives on a lane, and return when they are done."""
        start_s = max(self._now_s, self._free_s[lane], not_before_s)
        stop_s = start_s
        for kind, nbytes, axis in works:
            stop_s += self._job.device.collective_s(kind, nbytes, self._job.spans[axis])
        if stop_s > start_s:
            self._lanes.append(LaneSpan(lane, start_s, stop_s, what))
        self._free_s[lane] = stop_s
        return stop_s

    def _begin_landing(self, number: int) -> None:
        """Take the memory that a unit's gradients land in."""
        spec = self._job.units[number]
        if self._job.script is not None:
            for bucket in spec.reduced:
                if not bucket.lands_on_sums:
                    self._begin_local(bucket)
            return
        taken = []
        for bucket in spec.reduced:
            if bucket.holds_whole_gradients:
                self._hold(bucket)
            else:
                wanted = (bucket.layout.full_numel, bucket.formats.grad, spec.name, "gradients to reduce")
                taken.append(self._take(*wanted, is_adopted=bucket.adopts))
        self._landing[number] = taken

    def _copy_landed(self, number: int, last_bytes: int) -> None:
        """Copy a unit's gradients together where the transport has them wait; the last one is there by the trace."""
        spec = self._job.units[number]
        if self._job.wire.lands_together:
            waiting = max(0, spec.landing_bytes - last_bytes)
            self._drop(self._make(waiting, "transient", spec.name, "gradients that wait"))

    def _land(self, number: int) -> None:
        if number not in self._landing:
            self._begin_landing(number)

    def _pass_gradient(self, number: int, nbytes: int) -> None:
        """Have one rank's gradient pass through the device on its way to the host."""
        for bucket in self._job.units[number].reduced:
            if bucket.lands_on_sums and bucket.apart_gradients:
                # Which gradient of a unit it is, a shape does not say; together they are as many as go there.
                nbytes = nbytes * bucket.layout.owned_numel(*bucket.apart_states) // bucket.layout.numel
                given = self._make(nbytes, "transient", bucket.name, "gradient on its way")
                numel = nbytes // itemsize(bucket.formats.param)
                self._pass_through(bucket, numel, is_first=bucket.number not in self._summed)
                self._drop(given)

    def _hold(self, bucket: BucketSpec) -> None:
        """Take the memory of sums, which stays to the end of the step."""
        if bucket.number not in self._held:
            self._held.add(bucket.number)
            owned, padding = bucket.gradient_bytes
            is_mapped = self._job.wire.is_in_place and bucket.holds_whole_gradients
            self._make(owned, "gradients", bucket.name, "gradients", is_mapped=is_mapped)
            self._make(bucket.apart_gradient_bytes, "gradients", bucket.name, "gradients", memory="host")
            self._make(padding, "padding", bucket.name, "padding of gradients", is_mapped=is_mapped)

    def _is_kept(self, bucket: BucketSpec) -> bool:
        """Tell whether the memory of sums stays from step to step, as where other ranks read it in place."""
        return self._job.keeps_gradients or (self._job.wire.is_in_place and bucket.holds_whole_gradients)

    def _reduce(self, spec: UnitSpec) -> None:
        taken = self._landing.pop(spec.number, [])
        self._finish_before()
        works: list[tuple[str, int, str]] = []
        before = frozenset(self._summed)
        for bucket in spec.reduced:
            if bucket.lands_on_sums and self._job.script is not None:
                continue
            if bucket.number in self._local:
                taken.append(self._local.pop(bucket.number))
            self._hold(bucket)
            self._summed.add(bucket.number)
            if bucket.lands_on_sums:
                continue
            taken += [self._take(*wanted, spec.name, "wire buffer") for wanted in self._job.wire.reduction(bucket)]
            nbytes = bucket.layout.full_numel * itemsize(bucket.formats.reduce)
            works.append(("all-reduce" if bucket.updates_all else "reduce", nbytes, "shard"))
            if bucket.replicas > 1:
                shard_bytes = nbytes // bucket.layout.world_size
                works.append(("all-reduce", shard_bytes, "replicate"))
                self._sent["replicate all-reduce"] += sent_of("all-reduce", shard_bytes, self._job.spans["replicate"])
            if bucket.apart_gradients:
                self._leaving.append((bucket, bucket.number not in before))
        self._tick("reduce", spec.name, spec.sent_bytes("reduce"))
        self._reduced_s = self._exchange("reduce", spec.name, works)
        # Sums of more than two ranks are made apart, a block at a time, as `wire/codec.py` does.
        for bucket in spec.reduced if self._job.is_repeated else ():
            numel = min(BLOCK_NUMEL, bucket.layout.shard_numel)
            count = min(2, max(0, bucket.layout.world_size - 2))
            self._drop(self._make(4 * numel * count, "transient", spec.name, "partial sums"))
        self._before = taken
        if self._job.wire.is_in_place:
            self._give(taken)
            self._before = []

    def _finish_before(self) -> None:
        """Finish the reduction before: buffers are free, and what is kept on the host goes there."""
        self._give(self._before)
        self._before = []
        leaving, self._leaving = self._leaving, []
        if leaving:
            self._wait("reductions", self._reduced_s)
        for bucket, is_first in leaving:
            self._leave_on_host(bucket, bucket.apart_gradient_bytes, is_first=is_first)

    def _tick(self, kind: str, unit: str, nbytes: int) -> None:
        self._ticks.append(Tick(self._now_s, kind, unit, nbytes))
        self._sent[f"shard {kind}"] += nbytes

    def _update(self, buckets: Sequence[BucketSpec], *, is_first: bool) -> None:
        job, start_s = self._job, self._now_s
        if is_first:
            self._make_states()
            self._make_staging()
        account = self._account
        columns = account.wide_bytes, account.wide_apart_bytes, account.moved_bytes
        for place, (wide_bytes, wide_apart_bytes, moved_bytes) in enumerate(zip(*columns, strict=True)):
            wide = self._make(wide_bytes, "transient", "", "masters in fp32")
            apart = self._make(wide_apart_bytes, "transient", "", "masters in fp32", memory="host")
            turns = job.turns[place] if job.turns else ()
            play(turns, self._hands, partial(self._update_slices, moved_bytes))
            self._sent["shard update"] += sum(turn.sent_bytes for turn in turns)
            self._drop(apart)
            self._drop(wide)
        self._update_elsewhere(start_s)
        for unit in self._published:
            nbytes = sum(b.layout.full_numel * itemsize(b.formats.param) for b in unit.buckets if b.is_published)
            self._tick("publish", unit.name, unit.sent_bytes("publish"))
            self._free_s["gather"] = max(self._free_s["gather"], self._now_s)
            self._wait(unit.name, self._exchange("gather", unit.name, [("gather", nbytes, "shard")]))
        kept = {bucket.name for bucket in buckets if self._is_kept(bucket)}
        for number, (_, column, name, what, *_) in list(self._open.items()):
            if (column == "gradients" or what == "padding of gradients") and name not in kept:
                self._drop(number)
        self._held = {bucket.number for bucket in buckets if bucket.number in self._held and bucket.name in kept}
        self._summed.clear()
        self._loose.clear()

    @cached_property
    def _published(self) -> Sequence[UnitSpec]:
        """The units whose parameters are gathered after the update: of each optimizer, those that it has entries of."""
        numbers = frozenset[int]().union(*(one.buckets for one in self._job.updates))
        units = [unit.updated(numbers) for unit in self._job.units]
        return [
            unit
            for one in self._job.updates
            for unit in units
            if any(b.is_published and b.number in one.buckets for b in unit.buckets)
        ]

    def _update_slices(self, moved_bytes: int) -> None:
        """Update what is on the device, but for what is updated whole."""
        kernels = self._make(self._job.update_bytes, "transient", "", "the optimizer's kernels")
        # The norm of the gradients for clipping reads them once more, and scaling rewrites them.
        self._compute("update", self._kernel_s(Cost(0, float(moved_bytes))))
        self._drop(kernels)

    @cached_property
    def _hands(self) -> Hands:
        """What updates of whole matrices do."""

        def send(what: str, messages: Sequence[int], not_before_s: float) -> float:
            works = [("all-to-all", nbytes, "shard") for nbytes in messages]
            return self._exchange("gather", what, works, not_before_s=not_before_s)

        return Hands(
            lambda numel, dtype: self._take(numel, dtype, "", "matrices on their way"),
            self._give,
            lambda nbytes: self._make(nbytes, "transient", "", "the optimizer's kernels"),
            self._drop,
            self._compute,
            self._wait,
            send,
            lambda: self._now_s,
        )

    def _update_elsewhere(self, start_s: float) -> None:
        """Update what is in other memories, beside the update on the device, which began at `start_s`."""
        job, lanes = self._job, self._lanes_from(start_s)
        apart = [b for unit in job.units for b in unit.buckets if b.apart and b.is_trained]
        copied = []
        for bucket in apart:
            nbytes = self._copied_bytes(bucket)
            copied.append(self._make(nbytes, "transient", bucket.name, "gradients for the update", memory="host"))
            self._sent["gradients to the host"] += nbytes
            lanes.now_s = lanes.run("out", job.device.copy_s(nbytes), f"gradients of {bucket.name}")
        # Whether gradients are finite, and the norm that clips them: each reads all of them.
        read_bytes = 0 if job.device.is_cpu else 2 * sum(b.apart_gradient_bytes for b in apart)
        lanes.now_s = lanes.run("host", job.device.host_s(read_bytes, job.host_ranks), "norms of gradients")
        arrived_s = play_update([self._work_of(bucket) for bucket in apart if not self._is_early(bucket)], lanes)
        for bucket in (b for unit in job.units for b in unit.buckets if b.apart_parameters and b.is_trained):
            # Parameters with masters on the device are copied to their memory.
            numel = max(0, bucket.apart_shard[1] - max(bucket.apart_shard[0], bucket.apart_states[1]))
            nbytes, what = numel * itemsize(bucket.formats.param), f"parameters of {bucket.name}"
            lanes.now_s = lanes.run("out", 0.0 if job.device.is_cpu else job.device.copy_s(nbytes), what)
            if bucket.row.parameters.memory == "file":
                lanes.now_s = lanes.run("write", job.device.disk_s(nbytes, job.host_ranks), what)
        began_s = lanes.now_s
        for unit in job.units:
            for bucket in filter(self._is_early, unit.buckets):
                # In a thread that goes on when the step is over: parameters elsewhere are rounded there.
                work = self._work_of(bucket, is_there=True)
                lanes.run("host", work.update_s + work.round_s, f"update of {bucket.name}", not_before_s=began_s)
                self._updating[unit.number] = self._free_s["host"]
        self._take_over(lanes)
        self._wait("the update elsewhere", max(arrived_s, lanes.now_s), is_offload=True)
        for number in copied:
            self._drop(number)

    def _copied_bytes(self, bucket: BucketSpec) -> int:
        """Return the bytes of gradients that lie on the device, and are copied for the update of states elsewhere."""
        if self._job.device.is_cpu or bucket.apart_gradients:
            return 0
        return bucket.layout.owned_numel(*bucket.apart_states) * itemsize(bucket.formats.master)

    def _is_early(self, bucket: BucketSpec) -> bool:
        """Tell whether the host updates a bucket when the step is over: before each use there is a gather to wait."""
        is_there = bucket.apart and bucket.apart_gradients and bucket.row.states.memory == "host"
        is_known = self._job.is_early and bucket.formats.state == bucket.formats.master
        return bool(is_there and bucket.is_gathered and is_known and not self._job.device.is_cpu)

    def _work_of(self, bucket: BucketSpec, *, is_there: bool | None = None) -> Work:
        """Return the update of a bucket's part in another memory.

        Args:
            is_there: round only what lies in that memory between uses; None for all.
        """
        job, sizes, cell = self._job, bucket.formats, bucket.row.states
        start, stop = bucket.apart_states
        numel, sharing = stop - start, job.host_ranks
        there = max(0, min(stop, bucket.apart_shard[1]) - max(start, bucket.apart_shard[0]))
        sent_bytes = 0 if job.device.is_cpu or is_there else (numel - there) * itemsize(sizes.param)
        self._sent["parameters from the host"] += sent_bytes
        rounded = (
            there if is_there else numel - there if self._is_early(bucket) else numel
        ) - there * bucket.shares_apart
        rounded_bytes = max(0, rounded) * (itemsize(sizes.master) + itemsize(sizes.param))
        pieces, moved_bytes = 0, 0
        if cell.memory == "file":
            kept = max(one.per_element for one in job.updates)
            pieces = min(MOST_PIECES, -(-numel // piece_numel(bucket, kept)))
            moved_bytes = numel * (itemsize(sizes.master) + kept * itemsize(sizes.state))
        return Work(
            bucket.name,
            job.device.host_s(self._account.moved_apart_bytes.get(bucket.number, 0), sharing),
            job.device.host_s(rounded_bytes, sharing),
            job.device.copy_s(sent_bytes),
            max(1, -(-sent_bytes // max(1, cell.place.staging_bytes // 2))),
            job.device.disk_s(moved_bytes, sharing),
            pieces,
            job.device.disk_s(there * written_bytes(bucket), sharing),
        )


def sent_of(kind: str, nbytes: int, span: Span) -> int:
    """Return what one rank sends for a collective."""
    if kind == "send":
        return nbytes
    return nbytes * (span.ranks - 1) // span.ranks * (2 if kind == "all-reduce" else 1)
