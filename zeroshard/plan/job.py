"""The options of a plan, and the job of one rank that follows from them.

Owns the options, their checks, and the conversion of a shape's tapes and specs into a `Job`. It must not know the
result of a job (`planning.py`). Needs no torch. Read `film.py` first.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, final

from zeroshard.describe.axes import axes_of, check_count
from zeroshard.describe.exchanges import Foreseen, foresee
from zeroshard.describe.offload import Offload, check_in_files, row_with
from zeroshard.describe.parameters import check_patterns
from zeroshard.plan.machine.hardware import Cost, Device, Span
from zeroshard.plan.named import OPTIMIZERS, PRECISIONS, States, own_units, passing_bytes_of, specs_of, updates_of
from zeroshard.plan.places import layers_of
from zeroshard.plan.shape.nanotron import nanotron_parts
from zeroshard.plan.shape.shapes import Transformer
from zeroshard.plan.shape.tape import Parts, coarse, instructions
from zeroshard.plan.shape.transformer import Workload, tapes
from zeroshard.plan.step.rank_job import Account, Job, Piped, account_of, tied_unit
from zeroshard.plan.step.script import Call, script_of
from zeroshard.plan.step.system import ZEROSHARD, System, device_of
from zeroshard.table.activations import Activations, Chain, Offloaded, Partitioned, Recomputed, fits
from zeroshard.table.bytes import Updates
from zeroshard.table.cells import Residency
from zeroshard.table.groups import communicators
from zeroshard.table.pipeline import RECEIVES, Schedule, training_of
from zeroshard.table.settings import WIRE_BYTES
from zeroshard.table.spec import Formats, UnitSpec, itemsize, with_last
from zeroshard.table.stages import name_of_row
from zeroshard.table.whole import ELEMENTWISE
from zeroshard.table.wires import SHOWN_NUMEL, HostWire, Messages, Native, Silence, Wire

__all__ = [
    "Options",
    "Treatment",
    "check_options",
    "job_of_shape",
    "load_of",
    "outside_bytes_of",
    "parts_of",
    "specs_of_layers",
    "treatment_of",
    "wire_of",
]

TOKEN_BYTES: Final = 8
"""Bytes of a token or target: torch's int64."""
Timed = tuple[Device, str, str]
"""A device, and dtypes of other kernels and of products."""

EMBEDDINGS: Final = ("wte", "embed_tokens")

FILED: Final = frozenset(["momentum", *map(str.lower, ELEMENTWISE)])
"""Optimizers with support for states in files and updates after `step()`."""

COUNTS: Final = MappingProxyType(
    {name: name for name in ("world_size", "batch", "tensor", "micro_batches", "pipe", "chunks", "wire_bytes")}
    | {"sequence": "seq", "replicas": "mesh"}
)
"""Numbers of a plan, with the names of their arguments."""


@final
@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a plan.

    Args:
        world_size: number of ranks.
        device: the device of each rank.
        batch: sequences per micro-batch and rank.
        sequence: tokens per sequence.
        row: row of the residency table, with its activations.
        precision: a name in `PRECISIONS`.
        chosen: the precision itself, for modules; `precision` is then its name.
        chosen_formats: dtypes that follow from `chosen` for a parameter in fp32.
        wire_bytes: maximum bytes of the buffers of one exchange, as in `zs.Settings(wire_bytes=)`.
        replicas: number of replicas of the sharded state.
        islands, outer: number of islands, and the `zs.Outer` that says how they exchange.
        outer_passing: numbers for each element that a step of its optimizer has beside its states.
        tensor: number of ranks of tensor parallelism.
        is_sequence_parallel: whether the other operations are split by tokens over these ranks.
        optimizer: a name in `OPTIMIZERS`, or the class names of `optimizers`, joined by "+".
        optimizers: the optimizers of a module's parameters.
        micro_batches: number of micro-batches per step.
        system: the program.
        shared_memory: whether CPU ranks of one host read each other's memory, as in `zs.Settings(shared_memory=)`.
        zeros: fraction of zeros in the results of ReLUs, for compressed activations of modules; None if unknown.
        fused: whether the optimizer updates in one kernel, which needs no temporary memory.
        offload: the state that is stored in other memory.
        no_sync: whether only the last micro-batch reduces gradients.
        elementwise: of `optimizers`, as in `zs.Settings`.
        pipe: number of places of a pipe; the others are the options of one place, but for `world_size`.
        schedule, chunks, recompute: of the pipe; the number of chunks at each place; whether chunks run again.
        block_s, bytes_part: of a pipe that is cut by time: seconds of each block of a shape, with embedding and head;
            how much bytes count, as in `mixed`. None: the cut of `system`.
    """

    world_size: int
    device: Device
    batch: int = 1
    sequence: int
    row: Residency
    precision: str = "bf16"
    replicas: int = 1
    islands: int = 1
    outer: Any = None
    outer_passing: float = 0.0
    tensor: int = 1
    is_sequence_parallel: bool = False
    optimizer: str = "adamw"
    micro_batches: int = 1
    system: System = ZEROSHARD
    shared_memory: bool = True
    zeros: float | None = None
    fused: bool = False
    offload: Offload | None = None
    optimizers: tuple[Any, ...] = ()
    chosen: Any = None
    chosen_formats: Formats | None = None
    wire_bytes: int = WIRE_BYTES
    no_sync: bool = False
    elementwise: bool | None = None
    pipe: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: bool = False
    block_s: tuple[float, ...] = ()
    bytes_part: float | None = None

    def __post_init__(self) -> None:
        # Caches are keyed by these numbers, and a numpy integer equals a Python integer.
        for name, asked in COUNTS.items():
            object.__setattr__(self, name, check_count(asked, getattr(self, name)))
        if not isinstance(self.is_sequence_parallel, bool):
            raise TypeError(f"sequence_parallel must be True or False, got {self.is_sequence_parallel!r}.")

    @property
    def shard_ranks(self) -> int:
        """Number of ranks over which one replica of the state, or that of an island, is sharded."""
        return self.place_ranks // self.tensor // self.replicas // self.islands

    @cached_property
    def training(self) -> Schedule:
        """The schedule of a step, of one place without a pipe; raises as `training_of`."""
        return training_of(self.schedule, self.pipe, self.micro_batches, self.chunks, recompute=self.recompute)

    def layers_of(self, model: Transformer) -> Sequence[range]:
        """Return the layers of each chunk, as `layers_of`."""
        return layers_of(model, self.training.all_chunks, self.system.cut, self.block_s, self.bytes_part or 0.0)

    @property
    def place_ranks(self) -> int:
        """Number of ranks at one place of the pipe."""
        return self.world_size // self.pipe

    def foreseen(self, units: Sequence[UnitSpec]) -> Foreseen:
        """Return the exchanges of a rank with these units."""
        return foresee(self, units)

    @property
    def spans(self) -> Mapping[str, Span]:
        """Where the ranks of each axis are."""
        shards, tensor = self.shard_ranks, self.tensor
        sizes = {"shard": (shards, tensor), "replicate": (self.replicas, tensor * shards), "tensor": (tensor, 1)}
        sizes["pipe"] = self.pipe, self.place_ranks
        return {name: self.device.spread(*size) for name, size in sizes.items()}

    @property
    def node_processes(self) -> int:
        """Number of ranks on one node."""
        return min(self.world_size, self.device.node_ranks)

    @property
    def room_bytes(self) -> int:
        """Device memory of a rank: on a CPU its part of the memory that the ranks of a node share."""
        return self.device.memory_bytes // (self.node_processes if self.device.is_cpu else 1)

    @property
    def placed_row(self) -> Residency:
        """The row with the offloaded cells of `offload`."""
        return row_with(self.row, self.offload, is_alone=self.shard_ranks * self.replicas == 1)

    @property
    def is_fused(self) -> bool:
        """Whether updates take nothing beside the states: by one kernel, or because they are not on the device."""
        is_named = self.states.is_fused and not self.optimizers
        return self.fused or not (self.device.is_cpu or (self.placed_row.states.is_on_device and not is_named))

    @property
    def states(self) -> States:
        """The states of the optimizer; of several optimizers, the states of the first known one."""
        return next((OPTIMIZERS[name] for name in self.optimizer.split("+") if name in OPTIMIZERS), States(0, 0))

    @property
    def is_filed(self) -> bool:
        """Whether the optimizer supports states in files, and updates on the host after `step()`."""
        return all(name in FILED for name in self.optimizer.split("+"))

    @property
    def formats(self) -> Formats:
        """Dtypes by column."""
        return self.chosen_formats or PRECISIONS[self.precision]

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens per step, over all ranks."""
        return self.batch * self.sequence * self.micro_batches * (self.place_ranks // self.tensor)

    def words(self) -> Mapping[str, str | int]:
        """Return the options as readable text."""
        reduced = ("last" if self.no_sync else "each") + ", recompute" * self.recompute
        return {
            "system": self.system.name,
            "ranks": self.world_size,
            "device": self.device.name,
            "row": name_of_row(dataclasses.replace(self.placed_row, activations=Activations())),
            "activations": str(self.row.activations),
            "precision": self.precision,
            "copies": self.replicas,
            "islands": self.islands,
            "tensor": self.tensor,
            "pipe": self.pipe,
            "schedule": f"{self.schedule}, chunks={self.chunks}, reduce={reduced}" if self.pipe > 1 else "none",
            "sequence parallel": "yes" if self.is_sequence_parallel else "no",
            "micro-batch": self.batch,
            "sequence": self.sequence,
            "micro-batches": self.micro_batches,
            "optimizer": self.optimizer,
            "loss": self.system.kernels.loss,
        }


def check_options(options: Options) -> None:
    """Raise if no run can have these options.

    Raises:
        ValueError: ranks do not divide, or the optimizer does not support what is asked.
    """
    if options.world_size % options.pipe:
        raise ValueError(f"pipe={options.pipe} places must divide the {options.world_size} rank(s).")
    axes_of(options.replicas, options.place_ranks // options.islands, options.tensor)
    if options.states.whole is not None and options.tensor > 1:
        raise ValueError(
            f"optimizer={options.optimizer!r} needs whole matrices, and tensor={options.tensor} splits them. Use an "
            "element-wise optimizer, such as adamw, with tensor parallelism, or tensor=1."
        )
    check_in_files([options.placed_row.states], options.optimizer, is_elementwise=options.is_filed)


class Treatment(NamedTuple):
    """The treatment of saved tensors in a tape: the arguments of `tape.instructions`."""

    name: str = "keep"
    input_parts: int = 1
    is_input_offloaded: bool = False


def treatment_of(chain: Chain, options: Options) -> Treatment:
    """Return the treatment of a chain; `notes_of` lists what a tape does not predict.

    Raises:
        ValueError: the chain recomputes segments of several modules, which tapes do not support.
    """
    links = {type(link): link for link in chain}
    how = links.get(Recomputed)
    if not isinstance(how, Recomputed):
        return Treatment()
    if how.every != 1:
        raise ValueError(f"activations={how}: segments of several modules cannot be planned; plan every=1.")
    # With tokens split over the tensor ranks, each rank already has a separate part.
    parts = options.tensor if Partitioned in links and not options.is_sequence_parallel else 1
    name = "recompute-rest" if how.keeps == "products" else "recompute"
    return Treatment(name, parts, links.get(Offloaded) == Offloaded())


def outside_bytes_of(options: Options) -> int:
    """Return the device bytes of a process outside the allocator: its context, and its communicators.

    These are the default group's and those of each mesh that ranks have; other programs have one for each axis.
    """
    axes = {"shard": options.shard_ranks, "tensor": options.tensor, "replicate": options.replicas}
    groups = sum(ranks > 1 for ranks in (*axes.values(), options.islands, options.pipe))
    if groups and options.system == ZEROSHARD:
        islands = [{"replicate": options.islands}] * (options.islands > 1)
        meshes = [axes, *islands, *[{"pipe": options.pipe}] * (options.pipe > 1)]
        groups = 1 + sum(len(communicators(mesh)) for mesh in meshes)
    return options.device.context_bytes + groups * options.device.communicator_bytes


def wire_of(options: Options) -> Wire:
    """Return the transport of a device's collectives."""
    if options.shard_ranks * options.replicas == 1:
        return Silence()
    if not options.device.is_cpu:
        return Native(not options.system.kernels.program, accumulates=options.no_sync and options.micro_batches > 1)
    is_shared = options.shared_memory and options.shard_ranks > 1
    return HostWire(SHOWN_NUMEL, options.wire_bytes) if is_shared else Messages(options.wire_bytes)


def job_of_shape(
    model: Transformer, options: Options, *, is_coarse: bool = False, rank: int = 0, place: int = 0
) -> Job:
    """Return the job of a rank in a step of a shape.

    Args:
        is_coarse: combine the instructions of each unit, for searches.
        rank: index of the rank among those that state is sharded over.
        place: along the pipe.

    Raises:
        ValueError: the tensor ranks do not divide a size of the model, the sequence is too long, or a pattern matches
            no unit.
    """
    check_options(options)
    check_shape(model, options)
    formats, device, system = options.formats, device_of(options.device, options.system), options.system
    row = dataclasses.replace(options.placed_row, activations=Activations())
    schedule = options.training
    layers = options.layers_of(model)
    own = tuple(layer for chunk in schedule.chunks_of(place) for layer in layers[chunk])
    sharding = model, own, options.tensor, row, formats, options.shard_ranks, options.replicas, rank, system.keeps_last
    specs = specs_of_layers(*sharding)
    updates, account = _account(options.optimizer, device, *sharding)
    passing = passing_bytes_of(updates, [options.states.passing], is_cpu=device.is_cpu, is_fused=options.is_fused)
    names = [*own_units(model)]
    for pattern, _ in options.row.activations.units:
        if not any(fits(name, pattern) for name in names):
            shown = ", ".join(name for name in names if name)
            raise ValueError(f"activations= names {pattern!r}, which matches no unit of {model.name}; units: {shown}.")
    check_patterns(options.row, names)
    load, made = load_of(options), made_of(model, specs, options, own)
    kernels = device, formats.param, system.products or formats.param
    summed = (kernels, system.queue_s(device)[0]) if is_coarse else None

    def calls_of(layers: Collection[int]) -> Iterator[Call]:
        for unit, kind in _uses(model, specs, layers):
            chain = options.row.activations.of_unit(unit.name) if kind in ("block", "dense") else ()
            yield Call(unit.number, parts_of(model, load, kind, treatment_of(chain, options), summed))

    job = Job(
        specs,
        [*calls_of(own)] if options.pipe == 1 else [],
        updates,
        wire_of(options),
        device,
        formats.param,
        options.spans,
        options.micro_batches,
        2 * load.tokens * TOKEN_BYTES,
        passing_bytes=passing,
        account=account,
        host_ranks=options.node_processes,
        is_early=options.is_filed,
        no_sync=options.no_sync,
        seconds=partial(_kernel_s, (device, formats.param, system.products)) if system.products else None,
        system=system,
        made=made,
        outer=options.foreseen(specs),
        recomputes=any(isinstance(link, Recomputed) for link in options.row.activations.chain),
    )
    if options.pipe == 1:
        return job
    border_bytes = load.tokens * model.hidden * load.itemsize // (options.tensor if load.is_sequence_parallel else 1)
    border = [("hidden states", border_bytes)]
    messages = {(kind, chunk): border for kind in RECEIVES for chunk in range(schedule.all_chunks)}
    ends = [border_bytes] * (schedule.all_chunks - 1) + [0]
    chunks = {
        one: dataclasses.replace(job, script=script_of([*calls_of(layers[one])], ends[one]))
        for one in schedule.chunks_of(place)
    }
    ends_at = 0, schedule.places - 1
    tied = [tied_unit(unit, ends_at) for unit in specs if model.is_tied and unit.name.endswith(EMBEDDINGS)]
    return dataclasses.replace(job, pipe=Piped(schedule, place, chunks, messages, tied))


def made_of(
    model: Transformer, specs: Sequence[UnitSpec], options: Options, own: Sequence[int]
) -> Mapping[str, Sequence[tuple[str, int]]]:
    """Return the memory that a program makes once, as in `Job.made`.

    Args:
        own: what the place has, as in `layers_of`.
    """
    system, found = options.system, dict[str, list[tuple[str, int]]]()
    numel = sum(bucket.layout.numel for unit in specs for bucket in unit.reduced)
    if system.bucket_bytes and options.shard_ranks * options.replicas > 1:
        is_copy = system.bucket_bytes < 0 and not options.row.is_cut
        nbytes = numel * itemsize(options.formats.param) if is_copy else max(0, system.bucket_bytes)
        found["model"] = [("buckets of gradients", nbytes)]
    if system.tensor_buffers and options.tensor > 1:
        whole_bytes = options.batch * options.sequence * model.hidden * itemsize(options.formats.param)
        found["start"] = [("buffer of gathered hidden states", whole_bytes)] * system.tensor_buffers
    if system.workspaces_bytes:
        workspace = ("workspace of matrix products", system.workspaces_bytes)
        rotary = ("cosines and sines", options.sequence * model.head_width // 2 * 2)
        count = 2 * sum(0 <= one < model.layers for one in own)
        found |= {"forward": [workspace] + [rotary] * count, "backward": [workspace]}
    return found


def load_of(options: Options) -> Workload:
    """Return a micro-batch of one rank."""
    return Workload(
        batch=options.batch,
        sequence=options.sequence,
        itemsize=itemsize(options.formats.param),
        tensor=options.tensor,
        is_sequence_parallel=options.is_sequence_parallel,
        kernels=options.system.kernels,
    )


def check_shape(model: Transformer, options: Options) -> None:
    """Raise if a shape cannot be split or used as requested.

    Raises:
        ValueError: the tensor ranks do not divide heads or widths, the sequence exceeds learned positions, or a
            schedule of the pipe is not supported.
    """
    options.layers_of(model)
    if options.sequence > model.sequence and model.block == "gpt2":
        raise ValueError(f"{model.name} learned {model.sequence:,} positions; got sequence={options.sequence:,}.")
    for name in ("heads", "kv_heads", "inner"):
        if getattr(model, name) % options.tensor:
            raise ValueError(
                f"tensor={options.tensor} does not divide the {getattr(model, name):,} {name} of {model.name}."
            )
    if options.is_sequence_parallel and options.sequence % options.tensor:
        raise ValueError(f"tensor={options.tensor} does not divide sequence={options.sequence}.")


def _uses(model: Transformer, specs: Sequence[UnitSpec], layers: Collection[int]) -> Iterator[tuple[UnitSpec, str]]:
    """Yield the units of some layers in order of use, each with the kind of its tape."""
    by_name = {unit.name: unit for unit in specs}
    embedding = next((unit for unit in specs if unit.name.endswith(EMBEDDINGS)), None)
    blocks = {
        int(unit.name.rpartition(".")[2]): unit for unit in specs if ".h." in unit.name or ".layers." in unit.name
    }
    if -1 in layers and embedding is not None:
        yield embedding, "embedding"
    yield from ((blocks[layer], model.kind_of(layer)) for layer in layers if 0 <= layer < model.layers)
    head = by_name.get("lm_head", embedding)
    if model.layers in layers and head is not None:
        yield head, "head"


@lru_cache(256)
def specs_of_layers(
    model: Transformer,
    layers: Sequence[int],
    tensor: int,
    row: Residency,
    formats: Formats,
    ranks: int,
    replicas: int,
    rank: int,
    keeps_last: bool = True,
) -> tuple[UnitSpec, ...]:
    """Return the units of some layers; the embedding comes with the first one, norm and head with the last.

    Args:
        keeps_last: as of a system; a part of the layers ends before the backward begins.
    """
    is_first, is_last = -1 in layers, model.layers in layers
    units = dict(own_units(model, tensor))
    units[""] = tuple(one for one in units[""] if (is_first if "wpe" in one[0] else is_last))
    ends = {"lm_head": is_last, **dict.fromkeys(EMBEDDINGS, is_first or (is_last and model.is_tied))}
    for name in [*units][1:]:
        last = name.rpartition(".")[2]
        if not ends.get(last, last.isdecimal() and int(last) in layers):
            del units[name]
    specs = specs_of(units, row, formats, ranks, replicas=replicas, rank=rank)
    head = next((unit for unit in specs[::-1] if unit.name.endswith(EMBEDDINGS) or not model.is_tied), specs[0])
    return with_last(specs, head.number) if keeps_last and is_first and is_last else specs


@lru_cache(256)
def _account(optimizer: str, device: Device, model: Transformer, *sharding: Any) -> tuple[Sequence[Updates], Account]:
    updates = [updates_of(specs_of_layers(model, *sharding), OPTIMIZERS[optimizer], model.sides_of)]
    return updates, account_of(updates, device)


@lru_cache(1024)
def parts_of(
    model: Transformer, load: Workload, kind: str, treatment: Treatment, summed: tuple[Timed, float] | None
) -> Parts:
    """Return the instructions of a kind of unit.

    Args:
        kind: "embedding", "block", "dense" or "head".
        summed: combine them, with kernels of this device, and the seconds of its host for a kernel.
    """
    if summed is None and load.kernels.program == "nanotron":
        if treatment != Treatment():
            raise ValueError("activations= of nanotron: its kernels are planned without recomputation; leave it out.")
        return nanotron_parts(model, load.batch, load.sequence, load.tensor)[kind]
    if summed is None:
        return instructions(
            tapes(model, load)[kind],
            treatment.name,
            input_parts=treatment.input_parts,
            is_input_offloaded=treatment.is_input_offloaded,
        )
    return coarse(parts_of(model, load, kind, treatment, None), partial(_kernel_s, summed[0]), summed[1])


def _kernel_s(kernels: Timed, cost: Cost) -> float:
    """Return the seconds of a kernel of a device, with a dtype, and another one of matrix products."""
    device, dtype, products = kernels
    return device.kernel_s(cost, products if cost.kind == "matmul" else dtype)
