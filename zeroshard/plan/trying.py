"""Quick simulations of configurations, and the changes that a plan suggests.

Owns `Candidate`, the result of a simulation with coarse units, which a search and the advice of a plan compare. Needs
no torch. Read `tape.coarse` first.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Final, final

from zeroshard.describe.treatments import activations_of
from zeroshard.plan.job import Options, check_options, check_shape, job_of_shape, outside_bytes_of
from zeroshard.plan.pipes import quick_film
from zeroshard.plan.result import Change, Plan, Verdict, verdict_of, wide_bytes
from zeroshard.plan.shape.shapes import Transformer
from zeroshard.plan.step.simulate import make_film
from zeroshard.plan.systems import with_loss
from zeroshard.table.activations import Recomputed
from zeroshard.table.stages import STAGES

__all__ = ["Candidate", "Simulated", "candidate_of", "changes_of"]

MOVABLE: Final = ("parameters", "states", "padding")
"""Columns that offload can move, in whole or in part, besides gradients, which exist only during a step. Parameters
move only where they are sharded."""
MOST_CHANGES: Final = 6
"""Maximum number of changes that are planned in full; each takes as long as the plan itself."""


@final
@dataclass(frozen=True)
class Candidate:
    """A configuration, with its memory and time.

    Args:
        peak_bytes: maximum allocated bytes.
        verdict: whether `reserved_bytes` fit the device, or `peak_bytes` where reserved memory is unknown.
        reserved_bytes: bytes that the allocator reserves; None if the configuration was not planned in full.
        movable_bytes: maximum bytes on the device of the state that offload can move.
        least_bytes: maximum allocated bytes before the update if that state took no memory.
        gradient_bytes: the part of these that gradients take, of which the host may hold fewer bytes.
        passes_s: seconds of the step without its update.
        backward_s: of the last backward.
        host_s: of an update of all of that state on the host.
        place: of a pipe, the fullest one.
    """

    options: Options
    peak_bytes: int
    step_s: float
    verdict: Verdict
    reserved_bytes: int | None = None
    movable_bytes: int = 0
    least_bytes: int = 0
    gradient_bytes: int = 0
    passes_s: float = 0.0
    backward_s: float = 0.0
    host_s: float = 0.0
    place: int = 0

    def as_planned(self, plan: Plan) -> "Candidate":
        """Return this configuration with the verdict, reserved memory and time of retries of its plan in full."""
        step_s = self.step_s + plan.retries.steady_s
        return dataclasses.replace(self, verdict=plan.verdict, reserved_bytes=plan.reserved_bytes, step_s=step_s)

    @property
    def total_bytes(self) -> int:
        """As `Plan.total_bytes`; with allocated for reserved bytes if the configuration was not planned in full."""
        return (self.reserved_bytes or self.peak_bytes) + outside_bytes_of(self.options)

    @property
    def has_room(self) -> bool:
        """Whether the device has room for what is allocated."""
        return self.peak_bytes + outside_bytes_of(self.options) <= self.options.room_bytes

    @property
    def excess_bytes(self) -> float:
        """The bytes that must leave the device for it to have its margin; at most 0 if it has."""
        taken_bytes = wide_bytes(self.peak_bytes, outside_bytes_of(self.options), self.options)
        return taken_bytes - self.options.room_bytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all ranks."""
        return self.options.tokens_per_step / self.step_s


@final
class Simulated:
    """Simulations of the configurations of a shape, each made once."""

    def __init__(self, shape: Transformer) -> None:
        self.simulate = partial(candidate_of, shape)
        self.known: dict[Options, Candidate] = {}

    def __call__(self, options: Options) -> Candidate:
        """Return the simulation of a configuration, which is kept."""
        if options not in self.known:
            self.known[options] = self.simulate(options)
        return self.known[options]

    def fastest_first(
        self,
        bounds: Iterable[Candidate],
        speed: Callable[[Candidate], float],
        wanted: Callable[[Candidate], bool],
        looked_at: Callable[[int], None] = lambda count: None,
    ) -> Iterator[Candidate]:
        """Yield configurations from the fastest on, of equal ones that with less memory first.

        Only those are simulated that a bound does not leave out.

        Args:
            bounds: of each configuration, what no simulation is below, or the simulation itself.
            speed: to order by; a bound has at least that of the simulation.
            wanted: whether to yield a simulation; of a bound, whether it may be.
            looked_at: called with the number of configurations that are done.
        """
        heap = [(-speed(one), one.peak_bytes, place, one) for place, one in enumerate(bounds)]
        heapify(heap)
        count, done = len(heap), set[int]()
        while heap:
            *_, place, one = heappop(heap)
            if place in done and wanted(one):
                yield one
            elif place not in done and wanted(one):
                done.add(place)
                one = self(one.options)
                heappush(heap, (-speed(one), one.peak_bytes, place, one))
            looked_at(count - len(heap))


def candidate_of(shape: Transformer, options: Options) -> Candidate:
    """Simulate a configuration with coarse units: the instructions of each unit are combined."""
    if options.pipe > 1:
        job, film, passes_s, step_s = quick_film(shape, options)
    else:
        job = job_of_shape(shape, options, is_coarse=True)
        film = make_film(job, is_settled=True)
        passes_s, step_s = film.step_s - film.update_s, film.step_s
    host_bytes = options.node_processes * film.host_peak_bytes
    verdict = verdict_of(film.peak[0], outside_bytes_of(options), options, host_bytes)
    held = sum(sum(b.held_gradient_bytes) for unit in job.units for b in unit.reduced if b.row.gradients.is_on_device)
    columns = MOVABLE if options.row.cuts_parameters else MOVABLE[1:]
    movable_bytes = sum(film.resident_bytes[column] for column in columns) + held
    backward_s = film.phases[-2].stop_s - film.phases[-2].start_s
    host_s = options.device.host_s(sum(job.sums.moved_bytes), options.node_processes)
    return Candidate(
        options, film.peak[0], step_s, verdict, movable_bytes=movable_bytes,
        least_bytes=film.least_bytes({*columns, "gradients"}), gradient_bytes=held, passes_s=passes_s,
        backward_s=backward_s, host_s=host_s, place=job.pipe.place if job.pipe is not None else 0,
    )  # fmt: skip


def changes_of(shape: Transformer, plan: Plan, whole: Callable[[Transformer, Options], Plan]) -> Sequence[Change]:
    """Return the fastest changes of one option that need less memory than a plan, fastest first.

    Args:
        plan: the plan to change.
        whole: `plan_shape`, which plans a configuration in full, with all operations and the allocator.
    """
    tried = list[tuple[str, Candidate]]()
    for what, changed in _neighbours(plan.asked):
        try:
            check_options(changed)
            check_shape(shape, changed)
            one = candidate_of(shape, changed)
        except ValueError:
            continue
        if one.peak_bytes < plan.peak_bytes:
            tried.append((what, one))
    best = sorted(tried, key=lambda pair: -pair[1].tokens_per_s)[:MOST_CHANGES]
    made = ((what, whole(shape, one.options)) for what, one in best)
    found = [Change(what, one.options, one.verdict, one.total_bytes, one.tokens_per_s) for what, one in made]
    return sorted((one for one in found if one.total_bytes < plan.total_bytes), key=lambda one: -one.tokens_per_s)


def _neighbours(options: Options) -> Iterator[tuple[str, Options]]:
    """Yield a description and the changed options for each possible change of one option."""
    row = options.row
    for number, other in STAGES.items():
        changed = dataclasses.replace(other, activations=row.activations)
        if changed != row and options.shard_ranks > 1:
            yield f"stage {number}", dataclasses.replace(options, row=changed)
    has_recomputation = any(isinstance(link, Recomputed) for link in row.activations.chain)
    for name in ("recompute-rest", "recompute"):
        changed = dataclasses.replace(row, activations=activations_of(name))
        if changed != row and not (has_recomputation and name == "recompute-rest"):
            yield f"activations {name}", dataclasses.replace(options, row=changed)
    if options.system.kernels.loss == "logits":
        yield "a chunked loss", dataclasses.replace(options, system=with_loss(options.system, "chunked"))
    if options.batch > 1 and options.batch % 2 == 0:
        halved = dataclasses.replace(options, batch=options.batch // 2, micro_batches=2 * options.micro_batches)
        yield f"micro-batches of {halved.batch}", halved
    if options.replicas > 1:
        yield "one copy of the state", dataclasses.replace(options, replicas=1)
    if 2 * options.tensor <= options.device.node_ranks:
        yield f"tensor {2 * options.tensor}", dataclasses.replace(options, tensor=2 * options.tensor)
    yield f"{2 * options.world_size} ranks", dataclasses.replace(options, world_size=2 * options.world_size)
