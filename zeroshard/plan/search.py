"""Many plans: which configuration is fastest and fits, and what each change of one costs.

Owns the choice of candidates, the frontier of memory against speed, and the changes that a plan proposes. Candidates
are simulated with each unit summed up (`tape.coarse`), which keeps peak and time; the best are planned wholly.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, final

from zeroshard.describe.treatments import activations_of
from zeroshard.plan.film import make_film
from zeroshard.plan.hardware import Device, device_named
from zeroshard.plan.job import Options, check_options, check_shape, job_of_shape
from zeroshard.plan.planning import Change, Plan, Verdict, plan_shape, shape_of, verdict_of
from zeroshard.plan.shapes import Transformer
from zeroshard.table.activations import Recomputed
from zeroshard.table.stages import STAGES, row_of_stage

__all__ = ["Candidate", "Search", "changes_of", "search"]

BATCHES: Final = (1, 2, 4, 8, 16, 32)
TREATMENTS: Final = ("keep", "recompute-rest", "recompute")
TENSORS: Final = (1, 2, 4, 8)


@final
@dataclass(frozen=True)
class Candidate:
    """A configuration, and what it comes to.

    Args:
        peak_bytes: allocated at most; what the allocator reserves beside that is in a plan alone.
    """

    options: Options
    peak_bytes: int
    step_s: float
    verdict: Verdict

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.options.tokens_per_step / self.step_s


@final
@dataclass(frozen=True)
class Search:
    """Configurations of one model.

    Args:
        candidates: all that were simulated.
        frontier: those that no other beats in both memory and tokens a second, by memory.
        best: the plan of the fastest that fits; None where none does.
    """

    model: Transformer
    candidates: Sequence[Candidate]
    frontier: Sequence[Candidate]
    best: Plan | None

    def __str__(self) -> str:
        from zeroshard.plan.text import render_search

        return render_search(self)

    def to_json(self) -> dict[str, Any]:
        """Return the frontier and the best plan as numbers, texts, lists and mappings."""
        return {
            "version": 1,
            "model": self.model.name,
            "candidates": len(self.candidates),
            "frontier": [
                {
                    "options": dict(one.options.words()),
                    "peak_bytes": one.peak_bytes,
                    "step_s": one.step_s,
                    "tokens_per_s": one.tokens_per_s,
                    "verdict": one.verdict,
                }
                for one in self.frontier
            ],
            "best": None if self.best is None else self.best.to_json(),
        }


def search(
    model: Any,
    *,
    world_size: int | Sequence[int],
    device: str | Device = "h100-80",
    seq: int | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    stages: Sequence[int] = tuple(STAGES),
    batches: Sequence[int] = BATCHES,
    tensors: Sequence[int] = TENSORS,
    activations: Sequence[str] = TREATMENTS,
    global_batch: int | None = None,
) -> Search:
    """Simulate many configurations of a model, and return the frontier and the fastest that fits.

    Args:
        world_size: ranks, or several numbers of ranks.
        stages, batches, tensors, activations: what is tried: ZeRO stages, micro-batches in sequences, ranks that
            products are split over (within a node), treatments of activations. Copies of the sharded state are tried
            from one to one a node.
        global_batch: sequences of a step, over all ranks; one micro-batch a step where not said.

    Raises:
        ValueError: as `zs.plan`, or nothing could be tried.

    ```python
    import zeroshard as zs

    found = zs.search("gpt2-xl", world_size=8, device="a100-40", seq=1024, batches=(1, 4))
    assert found.best is not None and found.best.verdict == "fits"
    ```
    """
    shape, preset = shape_of(model), device_named(device)
    sizes = [world_size] if isinstance(world_size, int) else list(world_size)
    start = Options(
        world_size=sizes[0],
        device=preset,
        sequence=seq if seq is not None else min(shape.sequence, 4096),
        row=row_of_stage(0),
        precision=precision,
        optimizer=optimizer,
    )
    rows = [dataclasses.replace(row_of_stage(n), activations=activations_of(a)) for n in stages for a in activations]
    asked = [
        options
        for ranks, row, batch, tensor in product(sizes, rows, batches, tensors)
        for options in _widths(dataclasses.replace(start, world_size=ranks, row=row, batch=batch, tensor=tensor))
    ]
    candidates = [one for options in asked if (one := _try(shape, options, global_batch)) is not None]
    if not candidates:
        raise ValueError(f"No configuration of {shape.name} on {world_size} ranks has sizes that divide.")
    return Search(shape, tuple(candidates), tuple(frontier_of(candidates)), _best(shape, candidates))


def _widths(options: Options) -> Iterator[Options]:
    """Yield numbers of copies: one, one for each node, and powers of two between."""
    replicas = 1
    nodes = max(1, options.world_size // options.device.node_ranks)
    is_sharded = options.row != dataclasses.replace(row_of_stage(0), activations=options.row.activations)
    while replicas <= (nodes if is_sharded else 1):
        yield dataclasses.replace(options, replicas=replicas)
        replicas *= 2


def _try(shape: Transformer, options: Options, global_batch: int | None) -> Candidate | None:
    """Simulate a configuration; None where its sizes do not divide."""
    if options.tensor > options.device.node_ranks:
        return None
    if global_batch is not None:
        at_once = options.batch * (options.world_size // options.tensor)
        if at_once == 0 or global_batch % at_once:
            return None
        options = dataclasses.replace(options, micro_batches=global_batch // at_once)
    try:
        check_options(options)
        check_shape(shape, options)
    except ValueError:
        return None
    return candidate_of(shape, options)


def candidate_of(shape: Transformer, options: Options) -> Candidate:
    """Simulate a configuration with each unit summed up."""
    film = make_film(job_of_shape(shape, options, is_coarse=True))
    device = options.device
    outside_bytes = device.context_bytes + (1 + (options.tensor > 1)) * device.communicator_bytes
    return Candidate(options, film.peak[0], film.step_s, verdict_of(film.peak[0], outside_bytes, device))


def frontier_of(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return what no other candidate beats in memory and in tokens a second of each rank, by memory."""
    best, found = 0.0, list[Candidate]()
    for one in sorted(candidates, key=lambda one: (one.peak_bytes, -_speed(one))):
        if _speed(one) > best:
            best = _speed(one)
            found.append(one)
    return found


def _speed(one: Candidate) -> float:
    return one.tokens_per_s / one.options.world_size


def _best(shape: Transformer, candidates: Sequence[Candidate]) -> Plan | None:
    """Return the plan of the fastest candidate that fits when it is planned wholly."""
    for one in sorted(candidates, key=lambda one: -one.tokens_per_s):
        if one.verdict != "no":
            plan = plan_shape(shape, one.options)
            if plan.verdict == "fits":
                return plan
    return None


def changes_of(plan: Plan) -> Sequence[Change]:
    """Return what would lower a plan's memory, each with its price, fastest first."""
    if plan.shape is None:
        return ()
    options, found = plan.asked, list[Change]()
    for what, changed in _neighbours(options):
        try:
            check_options(changed)
            check_shape(plan.shape, changed)
        except ValueError:
            continue
        one = candidate_of(plan.shape, changed)
        if one.peak_bytes < plan.peak_bytes:
            total_bytes = one.peak_bytes + plan.outside_bytes
            found.append(Change(what, changed.words(), one.verdict, total_bytes, one.tokens_per_s))
    return tuple(sorted(found, key=lambda one: -one.tokens_per_s))


def _neighbours(options: Options) -> Iterator[tuple[str, Options]]:
    """Yield changes of one option."""
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
    if options.batch > 1 and options.batch % 2 == 0:
        halved = dataclasses.replace(options, batch=options.batch // 2, micro_batches=2 * options.micro_batches)
        yield f"micro-batches of {halved.batch}", halved
    if options.replicas > 1:
        yield "one copy of the state", dataclasses.replace(options, replicas=1)
    if 2 * options.tensor <= options.device.node_ranks:
        yield f"tensor {2 * options.tensor}", dataclasses.replace(options, tensor=2 * options.tensor)
    yield f"{2 * options.world_size} ranks", dataclasses.replace(options, world_size=2 * options.world_size)
