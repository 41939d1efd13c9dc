"""What a run will take, before anything is rented: memory, time, traffic, and what to change.

Owns the plan and its verdict. Must not know how a step is simulated (`film.py`) nor how models are described (`job.py`,
`traced.py`). Needs no torch for a shape; a model is traced with it.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, final

from zeroshard.describe.treatments import ActivationsLike
from zeroshard.plan.allocator import Event as Call
from zeroshard.plan.allocator import Rules, simulate
from zeroshard.plan.film import Film, Job, calls_of, make_film
from zeroshard.plan.hardware import Device, device_named
from zeroshard.plan.job import Options, check_options, job_of_shape, row_of
from zeroshard.plan.shapes import SHAPES, Transformer, read_config, shape_named
from zeroshard.table.cells import Residency
from zeroshard.table.spec import itemsize

__all__ = ["Change", "Plan", "RankClass", "make_plan"]

ERROR: Final = (0.02, 0.08)
"""Median and nine tenths of the errors of memory, in parts, on published runs (docs/plan.md); the verdict uses them."""
DAY_S: Final = 86400
GIB: Final = 2**30
LISTED: Final = 12
"""Entries of a live set that a plan keeps."""

Verdict = Literal["fits", "tight", "no"]


@final
@dataclass(frozen=True)
class RankClass:
    """Ranks that hold the same.

    Args:
        resident_bytes: between steps, by column.
        peak_bytes: allocated at most in a steady step.
        reserved_bytes: by torch's allocator at most, over a first and two steady steps.
    """

    name: str
    count: int
    resident_bytes: Mapping[str, int]
    peak_bytes: int
    reserved_bytes: int


@final
@dataclass(frozen=True)
class Change:
    """Something to change, and its price.

    Args:
        total_bytes: of the device, with it.
        step_s: of a step with it, for the same tokens a step.
    """

    what: str
    options: Mapping[str, str | int]
    verdict: Verdict
    total_bytes: int
    tokens_per_s: float


@final
@dataclass(frozen=True)
class Plan:
    """What a run will take.

    Args:
        model: its name; `parameters_numel` of all its parameters, `used_numel` of those each token is multiplied with.
        options: as a person reads them.
        ranks: classes of ranks that hold the same.
        live: what is there at the peak, largest first: (column, unit, what, bytes).
        film: a steady step of the first rank; `first` its first step.
        flops_per_step: of all ranks: 6 for each parameter and token, and causal attention; no recomputation.
        save_bytes: of host memory that an asynchronous save of a rank takes.
        host_bytes: of host memory that the processes of a node take.
        groups: of ranks, each with a communicator.
        notes: what was not predicted, and why.
        shape: what changes are planned from; None for a model that was traced.
    """

    model: str
    parameters_numel: int
    used_numel: int
    asked: Options
    options: Mapping[str, str | int]
    ranks: Sequence[RankClass]
    live: Sequence[tuple[str, str, str, int]]
    film: Film
    first: Film
    flops_per_step: float
    save_bytes: int
    host_bytes: int
    groups: int
    notes: Sequence[str]
    shape: Transformer | None = None

    # -- memory -----------------------------------------------------------------------------------------------------

    @property
    def resident_bytes(self) -> Mapping[str, int]:
        """Between steps on the first rank, by column."""
        return self.ranks[0].resident_bytes

    @property
    def peak_bytes(self) -> int:
        """Allocated at most in a steady step."""
        return max(one.peak_bytes for one in self.ranks)

    @property
    def reserved_bytes(self) -> int:
        """Reserved at most by torch's allocator."""
        return max(one.reserved_bytes for one in self.ranks)

    @property
    def outside_bytes(self) -> int:
        """Outside the allocator: the context, and a communicator for each group of ranks."""
        device = self.asked.device
        return device.context_bytes + self.groups * device.communicator_bytes

    @property
    def total_bytes(self) -> int:
        """Of the device at most."""
        return self.reserved_bytes + self.outside_bytes

    @property
    def verdict(self) -> Verdict:
        """Whether it fits: "fits" with nine tenths of the known errors on top, "tight" without them, or "no"."""
        return verdict_of(self.reserved_bytes, self.outside_bytes, self.asked.device)

    # -- time -------------------------------------------------------------------------------------------------------

    @property
    def step_s(self) -> float:
        """Of a steady step."""
        return self.film.step_s

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.asked.tokens_per_step / self.step_s

    @property
    def mfu(self) -> float:
        """The part of the devices' peak that the model's own operations are."""
        device = self.asked.device
        peak = device.peak_flops.get(self.asked.formats.param, device.peak_flops["float32"])
        return self.flops_per_step / self.step_s / (peak * self.asked.world_size)

    def gpu_hours(self, tokens: float) -> float:
        """Return the device-hours of a number of tokens."""
        return tokens / self.tokens_per_s * self.asked.world_size / 3600

    # -- what to change ---------------------------------------------------------------------------------------------

    @cached_property
    def changes(self) -> Sequence[Change]:
        """Things that would lower memory, each with its price, fastest first."""
        from zeroshard.plan.search import changes_of  # it makes plans

        return changes_of(self)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the film's events, as numbers, texts, lists and mappings."""
        return {
            "version": 1,
            "model": {"name": self.model, "parameters": self.parameters_numel, "used_parameters": self.used_numel},
            "options": dict(self.options),
            "verdict": self.verdict,
            "memory": {
                "ranks": [dataclasses.asdict(one) | {"resident_bytes": dict(one.resident_bytes)} for one in self.ranks],
                "peak": {
                    "bytes": self.film.peak[0],
                    "phase": self.film.peak_phase,
                    "at_s": self.film.events[self.film.peak[1]].at_s,
                    "live": [dict(zip(("column", "unit", "what", "bytes"), one, strict=True)) for one in self.live],
                },
                "first_step_peak_bytes": self.first.peak[0],
                "reserved_bytes": self.reserved_bytes,
                "outside_bytes": self.outside_bytes,
                "total_bytes": self.total_bytes,
                "device_bytes": self.asked.device.memory_bytes,
                "host_bytes": self.host_bytes,
                "save_bytes": self.save_bytes,
                "error": {"median": ERROR[0], "nine_tenths": ERROR[1]},
            },
            "traffic": dict(self.film.sent_bytes),
            "time": {
                "step_s": self.step_s,
                "first_step_s": self.first.step_s,
                "compute_s": self.step_s - self.film.exposed_s - self.film.update_s,
                "exposed_s": self.film.exposed_s,
                "update_s": self.film.update_s,
                "tokens_per_step": self.asked.tokens_per_step,
                "tokens_per_s": self.tokens_per_s,
                "mfu": self.mfu,
                "gpu_hours_per_1e9_tokens": self.gpu_hours(1e9),
            },
            "changes": [dataclasses.asdict(one) | {"options": dict(one.options)} for one in self.changes],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from zeroshard.plan.text import render_plan  # it reads plans

        return render_plan(self)


def verdict_of(reserved_bytes: int, outside_bytes: int, device: Device) -> Verdict:
    """Return whether a device holds so much, with the calibrated error on what the allocator reserves."""
    if reserved_bytes + outside_bytes > device.memory_bytes:
        return "no"
    return "fits" if reserved_bytes * (1 + ERROR[1]) + outside_bytes <= device.memory_bytes else "tight"


def make_plan(
    model: Any,
    *,
    world_size: int,
    device: str | Device = "h100-80",
    batch: int = 1,
    seq: int | None = None,
    stage: int | None = None,
    residency: Residency | str | None = None,
    precision: str = "bf16",
    activations: ActivationsLike = None,
    mesh: int = 1,
    tensor: int = 1,
    sequence_parallel: bool = False,
    optimizer: str = "adamw",
    micro_batches: int = 1,
) -> Plan:
    """Predict a run: memory by column and at its peak, time of a step, traffic, and whether it fits.

    Nothing is built and no device is needed. A shape, or a `config.json` of a known type, needs no torch.

    Args:
        model: the name of a bundled shape (`zeroshard.plan.shapes.SHAPES`), the path of a Transformers `config.json`
            or of its folder, or a `Transformer`.
        world_size: ranks.
        device: the name of a preset (`zeroshard.plan.hardware.DEVICES`), or a `Device`, such as the one that
            `zeroshard doctor` stored.
        batch: sequences in one micro-batch of one rank.
        seq: tokens of each; the model's longest, at most 4,096, where not said.
        stage, residency, activations: as `zs.shard` takes them.
        precision: "bf16", "fp16", "fp32", or another name in `zeroshard.plan.specs.PRECISIONS`.
        mesh: copies of the sharded state.
        tensor: ranks that products are split over.
        sequence_parallel: whether the rest is split by tokens over these ranks.
        optimizer: a name in `zeroshard.plan.specs.OPTIMIZERS`.
        micro_batches: of a step.

    Raises:
        ValueError: a name that is not known, or numbers that do not go together.
        TypeError: a model that is none of these.

    ```python
    import zeroshard as zs

    plan = zs.plan("llama-3-8b", world_size=8, device="h100-80", seq=8192, stage=3, activations="recompute")
    print(plan)
    assert plan.verdict == "fits"
    ```
    """
    shape = shape_of(model)
    options = Options(
        world_size=world_size,
        device=device_named(device),
        batch=batch,
        sequence=seq if seq is not None else min(shape.sequence, 4096),
        row=row_of(stage, residency, activations),
        precision=precision,
        replicas=mesh,
        tensor=tensor,
        is_sequence_parallel=sequence_parallel,
        optimizer=optimizer,
        micro_batches=micro_batches,
    )
    check_options(options)
    return plan_shape(shape, options)


def shape_of(model: Any) -> Transformer:
    """Return the shape that a name, a path or a `Transformer` means.

    Raises:
        ValueError: no shape has this name, and no file this path.
        TypeError: something else.
    """
    if isinstance(model, Transformer):
        return model
    if isinstance(model, str | Path):
        is_path = isinstance(model, Path) or (model not in SHAPES and Path(model).exists())
        return read_config(model) if is_path else shape_named(str(model))
    raise TypeError(
        f"plan() takes the name of a shape, the path of a config.json or a Transformer; got {type(model).__name__}."
    )


def plan_shape(shape: Transformer, options: Options) -> Plan:
    """Return the plan of a shape."""
    job = job_of_shape(shape, options)
    film, first = make_film(job), make_film(job, is_first=True)
    reserved_bytes = simulate(_steps(first, film), Rules()).peak_reserved_bytes
    ranks = [RankClass("rank 0", 1, film.resident_bytes, film.peak[0], reserved_bytes)]
    if options.shard_ranks > 1:
        ranks += _other_ranks(shape, options, ranks[0])
    return Plan(
        shape.name,
        shape.numel(),
        shape.used_numel(),
        options,
        options.words(),
        tuple(ranks),
        tuple((one.column, one.unit, one.what, one.nbytes) for one in film.live_at(film.peak[1])[:LISTED]),
        film,
        first,
        flops_of(shape, options) * options.tokens_per_step,
        save_bytes_of(job),
        host_bytes_of(options),
        1 + (options.tensor > 1) + (options.replicas > 1),
        tuple(notes_of(options)),
        shape,
    )


def _other_ranks(shape: Transformer, options: Options, first: RankClass) -> list[RankClass]:
    """Return the classes of the other ranks: shards are equal, and differ in how much of them is padding."""
    last = make_film(job_of_shape(shape, options, is_coarse=True, rank=options.shard_ranks - 1))
    others = options.world_size - 1
    if last.resident_bytes == first.resident_bytes:
        return [RankClass("the others", others, first.resident_bytes, first.peak_bytes, first.reserved_bytes)]
    end = options.world_size // options.shard_ranks
    middle = RankClass("the others", others - end, first.resident_bytes, first.peak_bytes, first.reserved_bytes)
    ends = RankClass("the last shard", end, last.resident_bytes, last.peak[0], first.reserved_bytes)
    return [one for one in (middle, ends) if one.count > 0]


def _steps(first: Film, film: Film) -> Iterator[Call]:
    """Yield the allocator's calls of a first and two steady steps, over one set of what is resident."""
    yield from calls_of((*first.before, *first.events))
    # States were made in the first step; what a later step makes has numbers of its own.
    shift = 1 + max((one.storage for one in (*first.before, *first.events)), default=0)
    made = {one.storage for one in film.before}
    for number in (1, 2):
        moved = [
            one._replace(storage=one.storage + number * shift * 2) for one in film.events if one.storage not in made
        ]
        yield from calls_of(moved)


def flops_of(shape: Transformer, options: Options) -> float:
    """Return the operations of the model for each token: 6 for each parameter, and causal attention."""
    width = shape.heads * (sum(shape.latent[2:]) / 2 if shape.latent else shape.head_width)
    embedding = 0 if shape.is_tied else shape.vocabulary * shape.hidden
    return 6.0 * (shape.used_numel() - embedding) + 6.0 * shape.layers * width * options.sequence


def save_bytes_of(job: Job) -> int:
    """Return the bytes that a rank copies to the host for an asynchronous save: its masters and states."""
    total = 0
    for unit in job.units:
        for bucket in unit.buckets:
            start, stop = bucket.states
            total += (stop - start) * itemsize(bucket.formats.master)
    return total + sum(one.per_element * one.numel_bytes() for one in job.updates)


def host_bytes_of(options: Options) -> int:
    """Return the bytes of host memory that processes of one node take: the interpreter and torch, about 3 GB each."""
    return min(options.world_size, options.device.node_ranks) * 3 * 10**9


def notes_of(options: Options) -> list[str]:
    """Return what is not predicted."""
    found = []
    if any(link.word in ("compressed",) for chain in options.row.activations.chains for link in chain):
        found.append("Compression depends on values: activations are counted as if they were kept.")
    return found
