"""The simulation of one step: the memory that earlier steps left, the micro-batches, the update.

Owns the order of these parts; `passes.py` plays a pass, `updating.py` the update. Read both first. Needs no torch.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple, final

from zeroshard.plan.step.clock import Clock
from zeroshard.plan.step.elsewhere import Elsewhere
from zeroshard.plan.step.film import OUTER_STATES, Event, Film, Phase, bytes_by_column, bytes_elsewhere
from zeroshard.plan.step.passes import Passes
from zeroshard.plan.step.piped import Place
from zeroshard.plan.step.rank_job import Border, Job
from zeroshard.plan.step.staging import buffer_bytes, file_staging_bytes
from zeroshard.plan.step.storages import Storages
from zeroshard.plan.step.updating import published_before, update
from zeroshard.table.step import Phase as PassPhase
from zeroshard.table.step import steady_passes

__all__ = ["make_film", "make_films", "resident_bytes"]

PHASES: Final[tuple[PassPhase, PassPhase]] = ("forward", "backward")
UPDATE_QUEUED: Final = 5
"""Kernels that the host queues for each parameter in an update."""
MOST_MICRO_BATCHES: Final = 3
"""That are played one by one: the first, one that stands for all between, and the last."""


def resident_bytes(job: Job, film: Film) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return what another rank has between steps: on the device by column, and in other memories by memory.

    Args:
        job: of that rank.
        film: of this one's steady step, whose pools are as large.
    """
    events = _Rank(job).before(is_first=False)
    found = bytes_by_column(events)
    found["transient"] = film.resident_bytes["transient"]
    return MappingProxyType(found), MappingProxyType(bytes_elsewhere(events))


def make_film(job: Job, *, is_settled: bool = False) -> Film:
    """Simulate a steady step.

    Args:
        is_settled: whether pooled buffers of earlier steps are there, which takes two or three times the time.
    """
    return make_films(job, is_first=job.wire.keeps_buffers)[1] if is_settled else _Rank(job).step()


def make_films(job: Job, *, is_first: bool = True) -> tuple[Film, Film]:
    """Simulate steps until one leaves the pools that it found; return the films of the first and the last of them.

    What continues after a step and the buffers of a pipe are taken over once: they do not add up.

    Args:
        is_first: whether the optimizer makes its states in the first of them.
    """
    rank = _Rank(job)
    first, left = rank.step(is_first=is_first), rank.left()
    if not is_first and not any(left):
        return first, first
    while True:
        rank = _Rank(job, left)
        film, before, left = rank.step(), left, rank.left()
        if left.pooled == before.pooled:
            return first, film


class _Left(NamedTuple):
    """What a step leaves to the next one.

    Args:
        pooled: elements and dtype of each buffer in the pool, in order of size.
        carried: as in `Elsewhere`.
        free: as in `Place`.
    """

    pooled: Sequence[tuple[int, str]] = ()
    carried: Mapping[int, float] = MappingProxyType({})
    free: Sequence[Border] = ()


@final
class _Rank:
    """A rank in one step, after a step that left something or nothing."""

    def __init__(self, job: Job, left: _Left | None = None) -> None:
        left = left or _Left()
        self._job, self._pooled = job, left.pooled
        self._clock = Clock(job.device, job.dtype, job.spans, job.seconds, job.system)
        self._unmade: dict[str, Sequence[tuple[str, int]]] = {}
        """What the first step has still to make and keep, by moment."""
        self._agrees, self._known = False, set[tuple[int, PassPhase, bool, frozenset[int]]]()
        """Whether ranks agree on each request in the first pass of a kind, and the kinds that were played."""
        self._agreed: dict[int, tuple[PassPhase, ...]] = {}
        """By chunk, ("forward",) if the last forward was such a pass."""
        self._phases: list[Phase] = []
        self._inputs = -1
        self.storages = Storages(self._clock, keeps=job.wire.keeps_buffers, is_mapped=job.wire.is_in_place)
        self.elsewhere = Elsewhere(job, self._clock, self.storages, left.carried)
        self._passes = Passes(job, self._clock, self.storages, self.elsewhere)
        self.place = None if job.pipe is None else Place(job.pipe, self._clock, self.storages, left.free)

    def left(self) -> _Left:
        """Return what the step leaves."""
        return _Left(sorted(self.storages.pooled()), self.elsewhere.carried(), self.place.free() if self.place else ())

    def before(self, *, is_first: bool) -> Sequence[Event]:
        """Take the memory that is in use when a step begins; return the events of that memory."""
        job, make, is_mapped = self._job, self.storages.make, self._job.wire.is_in_place
        for unit in job.units:
            for bucket in unit.buckets:
                memory, is_shared = bucket.row.parameters.memory, is_mapped and bucket.here == bucket.parameters
                parameters, padding = bucket.bytes_of(bucket.parameters, bucket.formats.param)
                # Of what is cast for each gather, only the masters are kept.
                kept = 1 - job.system.keeps_masters_alone * bucket.is_gathered * bucket.has_masters
                parameters, padding = kept * parameters, kept * padding
                make(parameters, "parameters", unit.name, "parameters", is_mapped=is_shared, memory=memory)
                make(padding, "padding", unit.name, "padding", is_mapped=is_shared, memory=memory)
                if bucket.has_masters:
                    memory = bucket.row.states.memory
                    masters, padding = bucket.bytes_of(bucket.states, bucket.formats.master)
                    make(masters, "states", unit.name, "masters", memory=memory)
                    make(padding, "padding", unit.name, "padding of masters", memory=memory)
        make(job.buffer_bytes, "parameters", "", "buffers")
        make(job.outer.kept_bytes - job.outer.states_bytes, "states", "", "anchors", memory=job.outer.memory)
        if not is_first:
            make(job.outer.states_bytes, "states", "", OUTER_STATES, memory=job.outer.memory)
        self._unmade = dict(job.made)
        self._make_kept("model")
        if job.system.keeps_gradients:
            self._passes.landing.hold_kept()
        self._has_states = not is_first or all(one.is_made for one in job.updates)
        if self._has_states:
            self._make_states()
        if not is_first:
            self.elsewhere.stock()
            self._passes.landing.hold_kept()
            self._make_kept(*job.made)
        for numel, dtype in self._pooled:
            self.storages.stock(numel, dtype)
        if self.place is not None:
            self.place.stock()
        found, self.storages.events = self.storages.events, []
        return found

    def _make_states(self) -> None:
        """Take the memory of optimizer states, and of the buffers that offloaded states pass through from then on."""
        job, make = self._job, self.storages.make
        each = [*_states_of_parameters(job)] if job.system.has_parameter_states else []
        for name, states_bytes, memory, counter_bytes in each or job.sums.states:
            if not each:
                make(states_bytes, "states", name, "states", memory=memory)
            make(counter_bytes, "padding", name, "counters")
            for part in [states_bytes // 2] * 2 * bool(each):
                make(part, "states", name, "states", memory=memory)
        for what, nbytes in (
            ("buffers for files", file_staging_bytes(job.units, job.updates)),
            ("pinned buffers", buffer_bytes(job.units, is_cpu=job.device.is_cpu)),
        ):
            make(nbytes, "transient", "", what, is_mapped=True, memory="host")

    def _make_kept(self, *moments: str) -> None:
        """Make what the first step makes at these moments and never gives back."""
        for moment in moments:
            for what, nbytes in self._unmade.pop(moment, ()):
                self.storages.make(nbytes, "transient", "", what)

    def step(self, *, is_first: bool = False) -> Film:
        """Simulate a step."""
        job, clock = self._job, self._clock
        self._agrees = is_first and job.system.agrees
        before = self.before(is_first=is_first)
        # A steady step is one in which an exchange ends, with the messages of its beginning.
        under_way_bytes = 0 if is_first or not job.outer.delay else job.outer.under_way_bytes
        messages = self.storages.make(under_way_bytes, "transient", "", "messages between islands")
        self._make_kept("start")
        self._passes.arrivals = {} if is_first else published_before(job, clock)
        count = min(job.micro_batches, MOST_MICRO_BATCHES)
        repeated = Counter[tuple[str, str]]()
        if not is_first:
            self._bind()
        if self.place is not None:
            self._play_place(self.place)
        for number in range(count if self.place is None else 0):
            before_it = _totals(clock)
            self._bind()
            for phase in PHASES:
                self._play(job, phase, is_reduced=number == count - 1 or not job.no_sync, is_first=number == 0)
            if number == 1:
                repeated = _totals(clock)
                repeated.subtract(before_it)
        start_s, offload_s, exposed_s = clock.now_s, clock.offload_s, clock.exposed_s
        if self.place is not None:
            self.place.add_up()
        self._passes.let_go()
        # Norms that clip gradients, the updates, and the roundings; from here on little waits for the device.
        self.storages.queue(UPDATE_QUEUED * sum(len(one.parameters) for one in job.updates))
        self.storages.pass_by(job.passing_bytes[1], "transient", "", "gradients to check")
        if not self._has_states:
            self._make_states()
        update(job, clock, self.storages, self.elsewhere, self._passes.landing.used)
        self._exchange(messages, is_first=is_first)
        self.storages.synchronize()
        self._passes.landing.end_step()
        self.storages.drop(self._inputs)
        self._phases.append(Phase("update", start_s, clock.now_s))
        totals = _totals(clock)
        for key, each in repeated.items():
            totals[key] += max(0, job.micro_batches - count) * each
        sent = {name: int(nbytes) for (part, name), nbytes in totals.items() if part == "sent" and nbytes}
        busy_s = {name: value for (part, name), value in totals.items() if part == "busy" and value}
        lists = tuple(before), tuple(self.storages.events), tuple(clock.lanes), tuple(self._phases), tuple(clock.ticks)
        return Film(
            *lists,
            MappingProxyType(sent),
            totals["time", "step"],
            totals["time", "exposed"] - (clock.exposed_s - exposed_s),
            clock.now_s - start_s - (clock.offload_s - offload_s),
            totals["time", "offload"],
            MappingProxyType(busy_s),
            job.device.is_cpu,
        )

    def _exchange(self, messages: int, *, is_first: bool) -> None:
        """Exchange changes with other islands, if the step does, and drop the messages that were under way."""
        outer = self._job.outer
        nbytes, ends = outer.at_first if is_first else (outer.buffer_bytes, True)
        self.storages.drop(messages)
        self.storages.pass_by(nbytes, "transient", "", "changes of islands")
        if is_first and ends:
            self.storages.make(outer.states_bytes // outer.fragments, "states", "", OUTER_STATES, memory=outer.memory)
        self.storages.pass_by(outer.moving_bytes * ends, "transient", "", "means of islands")

    def _bind(self) -> None:
        """Make a batch. A loop has the one before until then, also through the update, and that of the step before."""
        before, count = self._inputs, 1 if self.place is None else self._job.micro_batches
        self._inputs = self.storages.make(self._job.input_bytes * count, "activations", "", "inputs")
        self.storages.drop(before)

    def _play_place(self, place: Place) -> None:
        pipe, no_sync, last = self._job.pipe, self._job.no_sync, self._job.micro_batches - 1
        self._bind()

        def play(chunk: int, micro_batch: int, phase: PassPhase, numbers: dict[int, int], has_graph: bool) -> None:
            assert pipe is not None
            self._passes.numbers, self._passes.has_graph, own = numbers, has_graph, pipe.chunks[chunk]
            self._play(own, phase, chunk, is_reduced=micro_batch == last or not no_sync)

        place.run(play)

    def _play(self, job: Job, phase: PassPhase, chunk: int = 0, *, is_reduced: bool, is_first: bool = True) -> None:
        """Play a pass.

        Args:
            job: that has its script.
            chunk: of a place of a pipe.
        """
        told, start_s, place = job.told, self._clock.now_s, PHASES.index(phase)
        make = partial(steady_passes, job.units, told.uses, is_reduced=is_reduced, is_first=is_first)
        agreed = self._agreed.get(chunk, ()) * place  # that of the forward before
        passes = make(agreed=agreed)
        kind = chunk, phase, is_reduced and phase == "backward", passes[place].record.carried
        if self._agrees and kind not in self._known:
            passes = make(agreed=(agreed := (*agreed, phase)))
        self._known.add(kind)
        self._make_kept(phase)
        self._passes.play((told.forward, told.backward)[place], passes[place], phase)
        if phase == "forward":
            self._agreed[chunk] = agreed
        else:
            self._passes.landing.end_pass()
        self._phases.append(Phase(phase, start_s, self._clock.now_s))


def _states_of_parameters(job: Job) -> Iterator[tuple[str, int, str, int]]:
    """Yield the states of each parameter, as `Account.states` has those of buckets."""
    for one in job.updates:
        for entry in one.trained.parameters:
            bucket, counter_bytes = entry.bucket, entry.counter_bytes
            yield bucket.names[entry.index], entry.state_bytes, bucket.row.states.memory, counter_bytes


def _totals(clock: Clock) -> Counter[tuple[str, str]]:
    """Return times and bytes until now, by what they are."""
    times = {"step": clock.now_s, "exposed": clock.exposed_s, "offload": clock.offload_s}
    found = Counter[tuple[str, str]]()
    for part, values in (("sent", clock.sent), ("time", times), ("busy", clock.busy_s)):
        found.update({(part, name): value for name, value in values.items()})
    return found
