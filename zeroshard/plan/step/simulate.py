"""The simulation of one step: the memory that earlier steps left, the micro-batches, the update.

Owns the order of these parts; `passes.py` plays a pass, `updating.py` the update. Read both first. Needs no torch.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, final

from zeroshard.plan.step.clock import Clock
from zeroshard.plan.step.elsewhere import Elsewhere
from zeroshard.plan.step.film import Event, Film, Phase, bytes_by_column, bytes_elsewhere
from zeroshard.plan.step.passes import Passes
from zeroshard.plan.step.piped import Place
from zeroshard.plan.step.rank_job import Border, Job
from zeroshard.plan.step.staging import buffer_bytes, file_staging_bytes
from zeroshard.plan.step.storages import Storages
from zeroshard.plan.step.updating import published_before, update
from zeroshard.table.spec import itemsize
from zeroshard.table.step import Phase as PassPhase
from zeroshard.table.step import Steady

__all__ = ["make_film", "resident_bytes"]

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


def make_film(job: Job, *, is_first: bool = False, is_settled: bool = False) -> Film:
    """Simulate a step.

    Args:
        is_first: whether the optimizer has no states yet, which it then makes in its update.
        is_settled: whether pooled buffers of an earlier step are there, which takes twice the time to find out.
    """
    rank = _Rank(job)
    film = rank.step(is_first=is_first)
    if is_first or not (is_settled or job.is_repeated):
        return film
    left = rank.storages.pooled(), rank.elsewhere.carried(), rank.place.free() if rank.place is not None else []
    return _Rank(job, *left).step(is_first=False) if any(left) else film


@final
class _Rank:
    """A rank in one step.

    Args:
        pooled: elements and dtype of each buffer that an earlier step left.
        carried: as in `Elsewhere`.
        free: as in `Place`.
    """

    def __init__(
        self,
        job: Job,
        pooled: Sequence[tuple[int, str]] = (),
        carried: Mapping[int, float] = MappingProxyType({}),
        free: Sequence[Border] = (),
    ) -> None:
        self._job, self._pooled = job, pooled
        self._clock = Clock(job.device, job.dtype, job.spans, job.seconds, job.system)
        self._unmade: dict[str, Sequence[tuple[str, int]]] = {}
        """What the first step has still to make and keep, by moment."""
        self.storages = Storages(self._clock, keeps=job.wire.keeps_buffers, is_mapped=job.wire.is_in_place)
        self.elsewhere = Elsewhere(job, self._clock, self.storages, carried)
        self._passes = Passes(job, self._clock, self.storages, self.elsewhere)
        self.place = None if job.pipe is None else Place(job.pipe, self._clock, self.storages, free)

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
        make(job.outer.kept_bytes, "states", "", "anchors and their states", memory=job.outer.memory)
        self._unmade = dict(job.made)
        self._make_kept("model")
        if job.system.keeps_gradients:
            self._passes.landing.hold_kept()
        if not is_first:
            self._make_states()
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

    def step(self, *, is_first: bool) -> Film:
        """Simulate a step."""
        job, clock = self._job, self._clock
        before = self.before(is_first=is_first)
        self._make_kept("start")
        self._passes.arrivals = {} if is_first else published_before(job, clock)
        phases: list[Phase] = []
        count = min(job.micro_batches, MOST_MICRO_BATCHES)
        repeated = Counter[tuple[str, str]]()
        if self.place is not None:
            self._play_place(phases, self.place)
        for number in range(count if self.place is None else 0):
            before_it = _totals(clock)
            self._play_micro_batch(phases, is_reduced=number == count - 1 or not job.no_sync, is_first=number == 0)
            if number == 1:
                repeated = _totals(clock)
                repeated.subtract(before_it)
        start_s, offload_s = clock.now_s, clock.offload_s
        self._passes.let_go()
        # Norms that clip gradients, the updates, and the roundings; from here on little waits for the device.
        self.storages.queue(UPDATE_QUEUED * sum(len(one.parameters) for one in job.updates))
        self.storages.pass_by(job.checked_bytes, "transient", "", "gradients to check")
        if is_first:
            self._make_states()
        update(job, clock, self.storages, self.elsewhere, self._passes.landing.used)
        self.storages.drop(self.storages.make(job.outer.buffer_bytes, "transient", "", "changes of islands"))
        self.storages.synchronize()
        self._passes.landing.end_step()
        phases.append(Phase("update", start_s, clock.now_s))
        update_s = clock.now_s - start_s - (clock.offload_s - offload_s)
        totals = _totals(clock)
        for key, each in repeated.items():
            totals[key] += max(0, job.micro_batches - count) * each
        sent, busy_s = (
            {name: value for (part, name), value in totals.items() if part == wanted and value}
            for wanted in ("sent", "busy")
        )
        return Film(
            tuple(before),
            tuple(self.storages.events),
            tuple(clock.lanes),
            tuple(phases),
            tuple(clock.ticks),
            MappingProxyType({name: int(nbytes) for name, nbytes in sent.items()}),
            totals["time", "step"],
            totals["time", "exposed"],
            update_s,
            totals["time", "offload"],
            MappingProxyType(busy_s),
            job.device.is_cpu,
        )

    def _play_micro_batch(self, phases: list[Phase], *, is_reduced: bool, is_first: bool) -> None:
        job, inputs = self._job, self.storages.make(self._job.input_bytes, "activations", "", "inputs")
        for phase in PHASES:
            self._play(phases, job, phase, job.passes(is_reduced=is_reduced, is_first=is_first))
        self.storages.drop(inputs)

    def _play_place(self, phases: list[Phase], place: Place) -> None:
        pipe, no_sync, last = self._job.pipe, self._job.no_sync, self._job.micro_batches - 1
        inputs = self.storages.make(self._job.input_bytes * (last + 1), "activations", "", "inputs")

        def play(chunk: int, micro_batch: int, phase: PassPhase, numbers: dict[int, int], has_graph: bool) -> None:
            assert pipe is not None
            self._passes.numbers, self._passes.has_graph, own = numbers, has_graph, pipe.chunks[chunk]
            self._play(phases, own, phase, own.passes(is_reduced=micro_batch == last or not no_sync))

        place.run(play)
        self.storages.drop(inputs)

    def _play(self, phases: list[Phase], job: Job, phase: PassPhase, steady: tuple[Steady, Steady]) -> None:
        """Play a pass.

        Args:
            job: that has its script.
        """
        start_s, (forward, backward) = self._clock.now_s, steady
        self._make_kept(phase)
        if phase == "forward":
            self._passes.play(job.told.forward, forward, phase)
        else:
            self._passes.play(job.told.backward, backward, phase)
            self._passes.landing.end_pass()
        phases.append(Phase(phase, start_s, self._clock.now_s))


def _states_of_parameters(job: Job) -> Iterator[tuple[str, int, str, int]]:
    """Yield the states of each parameter, as `Account.states` has those of buckets."""
    for one in job.updates:
        for bucket, index in one.trained.parameters:
            start, stop = bucket.layout.overlap(index, *bucket.states)
            nbytes = (stop - start) * one.per_element * itemsize(bucket.formats.state)
            yield bucket.names[index], nbytes, bucket.row.states.memory, one.counter_bytes


def _totals(clock: Clock) -> Counter[tuple[str, str]]:
    """Return times and bytes until now, by what they are."""
    found = Counter[tuple[str, str]]()
    found.update({("sent", kind): nbytes for kind, nbytes in clock.sent.items()})
    for part, values in (
        ("time", {"step": clock.now_s, "exposed": clock.exposed_s, "offload": clock.offload_s}),
        ("busy", clock.busy_s),
    ):
        found.update({(part, name): value for name, value in values.items()})
    return found
