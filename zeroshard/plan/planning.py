"""The prediction of a run: memory, time, traffic, and suggested changes.

Owns the plan and its verdict. It must not know how a step is simulated (`film.py`) or how models are described
(`job.py`, `traced.py`). Shapes need no torch; modules are traced with torch.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, Final, NamedTuple

from zeroshard.describe.asked import Asked, choose, resolve
from zeroshard.describe.axes import check_count
from zeroshard.describe.offload import Offload, OffloadLike, reached, text_of
from zeroshard.describe.parameters import ParametersLike
from zeroshard.describe.rows import StageLike
from zeroshard.describe.treatments import ActivationsLike
from zeroshard.plan import sums
from zeroshard.plan.given import inputs_of, longest_of, module_of, optimizers_named
from zeroshard.plan.job import Options, check_options, job_of_shape, outside_bytes_of
from zeroshard.plan.machine.allocator import Action, simulate
from zeroshard.plan.machine.allocator import Event as Call
from zeroshard.plan.machine.hardware import Device
from zeroshard.plan.machine.profiles import device_for
from zeroshard.plan.machine.retries import NO_RETRIES, Retries, play_steps
from zeroshard.plan.named import PRECISIONS, own_units
from zeroshard.plan.offloading import automatic_offload
from zeroshard.plan.pipes import block_seconds, jobs_of_places, joined, timed
from zeroshard.plan.result import Plan, RankClass
from zeroshard.plan.shape.shapes import Transformer, shape_of
from zeroshard.plan.step.film import Film, calls_of, made_between
from zeroshard.plan.step.rank_job import Job
from zeroshard.plan.step.simulate import make_films, resident_bytes
from zeroshard.plan.step.system import System
from zeroshard.plan.step.turns import shown_ranks
from zeroshard.plan.systems import precision_of_system, system_named, with_loss
from zeroshard.plan.trying import changes_of
from zeroshard.table.cells import Residency
from zeroshard.table.pipeline import training_of
from zeroshard.table.settings import WIRE_BYTES
from zeroshard.table.spec import Formats
from zeroshard.table.whole import owned_bytes

__all__ = ["LONGEST", "make_plan", "plan_alone", "plan_shape"]

LISTED: Final = 12
"""Entries of a live set that a plan keeps."""
Traces = dict[Options, tuple[list[Any], Sequence[str]]]
"""Traces of the places of one module, and where each begins, by options."""
PARTS: Final[Sequence[float | None]] = (0.0, 0.5, 1.0)
"""How much bytes count, of the cuts that are planned for a pipe that is cut by time."""
LONGEST: Final = 4096
"""Tokens of a sequence, at most, where none are asked for."""
ALIKE: Final = 1e-3
"""Part of a peak that ranks may differ by, in what they keep and in what their updates take, and share a simulation."""
SETTLED: Final = 4
"""Steps after the first one until the layout of a full device repeats; the second one changes it most."""


def make_plan(
    model: Any,
    *,
    world_size: int,
    device: str | Device = "h100-80",
    batch: int | None = None,
    seq: int | None = None,
    stage: StageLike = None,
    residency: Residency | str | None = None,
    precision: Any = None,
    activations: ActivationsLike = None,
    offload: OffloadLike = None,
    parameters: ParametersLike = None,
    mesh: Any = None,
    tensor: int = 1,
    sequence_parallel: bool = False,
    optimizer: Any = "adamw",
    micro_batches: int = 1,
    batch_tokens: int | None = None,
    shared_memory: bool = True,
    zeros: float | None = None,
    fused: bool = False,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    loss: Callable[[Any], Any] | str | None = None,
    units: Sequence[object] | None = None,
    reads: Callable[[Any], bool | int | float] | None = None,
    parallelize: Callable[[Any, Any], Any] | None = None,
    ignored: Sequence[object] = (),
    wire_bytes: int = WIRE_BYTES,
    no_sync: bool = False,
    elementwise: bool | None = None,
    pipe: int = 1,
    schedule: str = "1f1b",
    chunks: int | None = None,
    reduce: str = "auto",
    recompute: bool = False,
    cut: Sequence[str] | str | None = None,
    outer: Any = None,
    system: str | System = "zeroshard",
) -> Plan:
    """Predict a run: memory by column and at its peak, time of a step, traffic, and whether it fits.

    The prediction needs no device and builds no model. A shape, or a `config.json` of a supported type, needs no torch;
    it assumes fused kernels for norms, attention and gates. Modules are traced without changes.

    Args:
        model: the name of a bundled shape (`zeroshard.plan.shape.shapes.SHAPES`), the path of a Transformers
            `config.json` or its folder, "package.module:function" (the function returns a module, or a module and its
            inputs), a `Transformer`, a configuration object of Transformers, or any `nn.Module`, which may be on the
            meta device and is not changed.
        world_size: number of ranks.
        device: the name of a preset (`zeroshard.plan.machine.presets.DEVICES`), "this" or the file of a profile, as
            `zeroshard doctor` writes it, or a `Device`.
        batch: sequences per micro-batch and rank; by default 1. For a module with inputs, neither this nor `seq`.
        seq: tokens per sequence; by default the maximum of the model, but at most 4,096.
        stage, residency, activations, offload, parameters: as in `zs.shard`. Stage "auto" is the lowest stage whose
            plan fits, or 3; offload "auto" is the one whose plan fits and is fastest, or everything.
        precision: "bf16", "fp16", "fp32", or another name in `zeroshard.plan.named.PRECISIONS`; by default bf16 if the
            device supports it, else fp16. Or an argument of `zs.shard`: a dtype, a `zs.Precision`, and for modules a
            mapping from module classes and patterns of module names.
        mesh: number of replicas of the sharded state, or the DeviceMesh for `zs.shard`.
        tensor: number of ranks of tensor parallelism; also given by a mesh with an axis "tensor". The parameters of a
            module are split by `parallelize`, or are already DTensors.
        sequence_parallel: for shapes, whether the other operations are split by tokens over these ranks.
        optimizer: a name in `zeroshard.plan.named.OPTIMIZERS`; for modules also an optimizer of their parameters, or
            several, as in `zs.shard`. "muon" and "adafactor" have the groups of `zs.optim.muon_groups`, over all
            parameters.
        micro_batches: number of micro-batches per step.
        batch_tokens: tokens of a step, over all ranks, from which the number of micro-batches follows.
        shared_memory: whether CPU ranks of one host read each other's memory, as in `zs.Settings(shared_memory=)`.
        zeros: for compressed activations of a module, the fraction of zeros in the results of ReLUs, from 0 to 1. By
            default these results count as uncompressed, and a note says so.
        fused: whether the optimizer has `fused=True`. On a CPU, torch's default updates parameters in a loop, with
            temporary memory.
        inputs: for modules, the positional or keyword arguments of forward for one micro-batch; by default, what models
            of Transformers take, with `batch` and `seq`. Tokens are counted in these inputs, or samples if no input has
            integers of 32 or 64 bits. Models of Transformers have the attention mask of these inputs' padding.
        loss: for modules, a function from the output to the loss; by default the output itself, its `loss`, or its sum.
            For shapes, the kernels of the cross-entropy: "logits" (in fp32, with their log-softmax), "fused" (one
            kernel over logits), or "chunked" (logits of 1,024 tokens at a time, computed again in the backward).
        units: for modules, as in `zs.shard`.
        reads: for modules, returns the values of tensors that the module reads, as in `if x.any():`.
        parallelize: for modules, a function that splits a copy on the meta device over the mesh of `tensor` ranks, like
            `parallelize_module(module, mesh, plan)`. Collectives are emulated, so the process must not have a process
            group. A module that is already split needs no function.
        ignored: for modules, as in `zs.shard`. Only the values of these parameters are counted.
        wire_bytes: as in `zs.Settings(wire_bytes=)`.
        no_sync: whether only the last micro-batch of a step reduces gradients, as with `Zero.no_sync()`.
        elementwise: of the optimizers of a module, as in `zs.Settings(elementwise=)`.
        pipe: number of places of a pipe; also given by a mesh with an axis "pipe". `micro_batches` is then that of
            `zs.pipeline`, and a plan has classes of ranks by place.
        schedule, chunks, reduce, recompute: as in `zs.pipeline`.
        cut: for modules, as in `zs.pipeline`; or "time": of the cuts that balance time, bytes, or half of each, the
            fastest that fits; `Plan.cut` has the names.
        outer: as in `zs.shard`: the replicas of `mesh` are islands. Peaks are of a step in which an exchange ends,
            traffic and times of the film of steps between exchanges; see `Plan.outer` for these.
        system: the program that trains: a name in `zeroshard.plan.systems.SYSTEMS`, such as "fsdp2" or "deepspeed-3",
            or a `System`. Its stage and precision are those of the plan unless these are given. For a module, its
            kernels are the module's own.

    Returns: the plan; `print(plan)` shows it.

    Raises:
        ValueError: a name is unknown, or numbers are inconsistent.
        TypeError: `model` has an unsupported type.
        RuntimeError: the step of a module depends on values that `reads` does not return.

    ```python
    import zeroshard as zs

    plan = zs.plan("llama-3-8b", world_size=8, device="h100-80", seq=8192, stage=3, activations="recompute")
    print(plan)
    assert plan.verdict == "fits"
    ```
    """
    preset, system = device_for(device), system_named(system)
    if outer is not None and not hasattr(outer, "apart"):
        raise TypeError(f"outer takes a zs.Outer; got {outer!r}.")
    mesh, islands = (mesh, 1) if outer is None else outer.apart(mesh, check_count("world_size", world_size))
    sharing = Asked(
        stage=system.stage if stage is None and residency is None else stage,
        residency=residency,
        activations=activations,
        offload=system.moved() if offload is None else offload,
        parameters=parameters,
        precision=precision_of_system(system, preset) if precision is None else precision,
        mesh=mesh,
    )
    ranks = check_count("world_size", world_size) // islands
    ranks //= 1 if hasattr(mesh, "mesh_dim_names") else check_count("pipe", pipe)
    resolved = resolve(sharing, ranks, tensor=check_count("tensor", tensor), precisions=PRECISIONS)
    model, own_inputs = module_of(model)
    inputs = own_inputs if inputs is None else inputs
    shape = None if hasattr(model, "named_parameters") else shape_of(model)
    longest = longest_of(model) if shape is None else shape.sequence
    if isinstance(loss, str):
        if shape is None:
            raise TypeError(f"loss: a name is of shapes only; {type(model).__name__} is a module.")
        system, loss = with_loss(system, loss), None
    name, optimizers = optimizers_named(optimizer, model if shape is None else None, ignored)
    chosen = _precision_of(resolved.precision, shape)
    axes = dict(resolved.axes)
    is_split = axes.get("tensor", 1) > 1
    if pipe not in (1, places := axes.get("pipe", pipe)):
        raise ValueError(f"pipe={pipe}, but mesh= has {places} rank(s) along 'pipe'. Leave pipe= out.")
    micro_batches = check_count("micro_batches", micro_batches)
    if outer is not None:
        outer.check_axes({**axes, "pipe": places})
    if places == 1 and recompute:
        raise ValueError("recompute=True is of the chunks of a pipe; without one use activations='recompute'.")
    if places == 1 and (schedule != "1f1b" or reduce != "auto"):
        raise ValueError(f"schedule={schedule!r}, reduce={reduce!r} are of a pipe; give pipe=, or leave them out.")
    if places > 1 and no_sync:
        raise ValueError("no_sync=True is of loops over micro-batches; a pipe has reduce='last' or reduce='each'.")
    options = Options(
        world_size=world_size, device=preset, row=resolved.rows[0], offload=resolved.offload, system=system,
        batch=1 if batch is None else batch, sequence=min(longest or LONGEST, LONGEST) if seq is None else seq,
        micro_batches=micro_batches, replicas=axes.get("replicate", 1), tensor=axes.get("tensor", 1),
        is_sequence_parallel=sequence_parallel or (shape is not None and is_split and system.is_sequence_parallel),
        precision=chosen[0], chosen=chosen[1], chosen_formats=chosen[2], optimizer=name, optimizers=optimizers,
        fused=fused, elementwise=elementwise, shared_memory=shared_memory, zeros=zeros, wire_bytes=wire_bytes,
        no_sync=reduce != "each" if places > 1 else no_sync or system.no_sync,
        pipe=places, schedule=schedule, recompute=recompute, islands=islands, outer=outer,
        outer_passing=sums.passing_of_outer(outer, is_cpu=preset.is_cpu),
    )  # fmt: skip
    check_options(options)
    if shape is None:
        from zeroshard.plan.traced import tokens_of  # torch is needed for modules only

        if inputs is not None and (batch is not None or seq is not None):
            raise ValueError(
                f"batch={batch}, seq={seq}: the micro-batch of a {type(model).__name__} is its inputs. Leave batch= "
                "and seq= out, and change inputs=, or what the package.module:function returns."
            )
        made = inputs_of(model, options.batch, options.sequence) if inputs is None else inputs
        tokens = tokens_of(made)
        if inputs is not None or tokens != options.batch * options.sequence:
            options = dataclasses.replace(options, batch=tokens, sequence=1)
        inputs = made
    if batch_tokens is not None:
        options = dataclasses.replace(options, micro_batches=sums.micro_batches_of(batch_tokens, options))
    training = training_of(schedule, places, options.micro_batches, chunks, reduce, recompute=recompute)
    options = dataclasses.replace(options, chunks=training.chunks)
    if isinstance(cut, str) and (cut != "time" or places == 1):
        raise ValueError(f"cut= takes names of modules, or 'time', of a pipe; got {cut!r} and pipe={places}.")
    given = {"inputs": inputs, "loss": loss, "units": units, "reads": reads, "parallelize": parallelize}
    names = None if cut == "time" else cut
    given |= {"ignored": ignored or None, "cut": names}
    if shape is None and sequence_parallel:
        raise ValueError("sequence_parallel=True is for shapes: modules have SequenceParallel() in parallelize=.")
    if shape is not None and (others := [name for name, value in given.items() if value is not None]):
        raise TypeError(f"{', '.join(others)}: of modules only; {shape.name} is a shape.")

    parts = PARTS if cut == "time" else (None,)
    if shape is not None and cut == "time":
        options = dataclasses.replace(options, block_s=block_seconds(shape, options))

    known: Traces = {}

    def planned(one: Options) -> Plan:
        if shape is not None:
            return plan_shape(shape, one)
        return plan_module(model, one, inputs, loss, units, reads, parallelize, ignored, names, known)

    @functools.cache
    def plan(row: Residency, offload: Offload | None) -> Plan:
        tried = [dataclasses.replace(options, row=row, offload=offload, bytes_part=part) for part in parts]
        found = min(map(planned, tried), key=_rank_of)
        if found.verdict == "fits" or places == 1 or reduce != "auto":
            return found
        return min((found, *(planned(dataclasses.replace(one, no_sync=False)) for one in tried)), key=_rank_of)

    def offload_for(row: Residency) -> tuple[Offload | None, bool]:
        # Of what a pipe is tried with, what takes least memory.
        no_sync = options.no_sync and (places == 1 or reduce != "auto")
        one = dataclasses.replace(options, row=row, bytes_part=parts[0], no_sync=no_sync)
        return automatic_offload(shape, one, functools.partial(plan, row))

    chosen_row, chosen_offload, _ = choose(
        resolved, lambda *one: plan(*one).verdict == "fits", offload_for, shares_memory=preset.is_cpu
    )
    changes = None if shape is None else functools.partial(changes_of, shape, whole=plan_shape)
    return dataclasses.replace(plan(chosen_row, chosen_offload), find_changes=changes)


def _rank_of(plan: Plan) -> tuple[bool, float]:
    """Return a number that is lower for better plans: of those that fit the fastest, else that with the least bytes."""
    return plan.verdict != "fits", plan.step_s if plan.verdict == "fits" else plan.total_bytes


def _precision_of(asked: Any, shape: Transformer | None) -> tuple[str, Any, Formats | None]:
    """Return the name of a precision; for a precision without a name in plans, also the precision and its formats.

    Args:
        shape: the planned shape; None for a module.

    Raises:
        ValueError, TypeError: the value is no precision, or names modules of a shape.
    """
    if isinstance(asked, str):
        return asked, None, None
    import torch  # the caller has it

    from zeroshard.describe.precision import precision_of

    found = precision_of(asked)
    if shape is not None and found.modules:
        raise ValueError(f"precision= by module is of modules only; {shape.name} is a shape.")
    name = str(found.param or "as parameters are").removeprefix("torch.") + ", by module" * bool(found.modules)
    return name, found, found.formats_of(torch.float32, is_kept=False)


def plan_module(
    model: Any,
    options: Options,
    inputs: Sequence[Any] | Mapping[str, Any],
    loss: Callable[[Any], Any] | None,
    units: Sequence[object] | None,
    reads: Callable[[Any], bool | int | float] | None,
    parallelize: Callable[[Any, Any], Any] | None,
    ignored: Sequence[object],
    cut: Sequence[str] | None,
    known: Traces,
) -> Plan:
    """Return the plan of a module.

    Args:
        known: traces of the same module by options without offload, which a plan with another offload uses again.

    Raises:
        ValueError: something is ignored of a module that is split here, whose copy has other parameters; or an
            optimizer cannot be sharded.
    """
    import torch  # needed for modules only

    from zeroshard.optim.admission import check_optimizers
    from zeroshard.plan.traced import trace_places

    homes = {id(parameter): name for name, parameter in model.named_parameters()}
    check_optimizers(homes, options.optimizers, options.elementwise, is_cut=options.row.is_cut)
    if parallelize is not None and (options.chosen is not None or ignored):
        raise ValueError(
            "parallelize= with ignored=, or with a precision that is no name: plan() splits a copy of the module, so "
            "name neither parameters nor modules. Give plan() a module that has been parallelized."
        )
    key = dataclasses.replace(options, offload=None)
    with torch.inference_mode(mode=False), torch.enable_grad(), ExitStack() as stack:  # steps train, wherever asked for
        if parallelize is not None:
            from zeroshard.plan.trace.splitting import split

            model, units = split(model, options.tensor, parallelize, units, stack)
        if not (is_known := key in known and parallelize is None):
            known[key] = trace_places(model, options, inputs, loss, cut, units, ignored, reads=reads, homes=homes)
        traced, starts = known[key]
        traced = [one.again(options) for one in traced] if is_known else traced
    numel = traced[0].parameters_numel if options.pipe == 1 else sum(one.numel() for one in model.parameters())
    flops = sum(one.flops for one in traced) * options.micro_batches * options.place_ranks
    jobs = [one.job for one in traced] if options.pipe == 1 else timed([one.job for one in traced], options)
    plans = [
        _plan(
            type(model).__name__,
            (numel, None),
            options,
            job,
            flops,
            (one.kept_bytes / max(1, one.tokens), 1, 0.0),
            one.others,
            one.notes,
            one.output_bytes,
        )
        for one, job in zip(traced, jobs, strict=True)
    ]
    return joined(plans, starts) if options.pipe > 1 else plans[0]


def plan_shape(shape: Transformer, options: Options) -> Plan:
    """Return the plan of a shape."""
    if options.pipe == 1:
        return plan_alone(shape, options, 0)
    plans = [plan_place(shape, options, job, place) for place, job in enumerate(jobs_of_places(shape, options))]
    blocks = [*(name for name in own_units(shape) if name.rpartition(".")[2].isdecimal()), "lm_head"]
    return joined(plans, [blocks[layers[0]] for layers in options.layers_of(shape)[1:]])


def plan_alone(shape: Transformer, options: Options, place: int) -> Plan:
    """Return the plan of one place of a pipe, whose memory is that of the run: with as few micro-batches as fill it."""
    if options.pipe > 1 and options.schedule == "1f1b":
        options = dataclasses.replace(options, micro_batches=min(options.micro_batches, options.pipe + 1))
    return plan_place(shape, options, job_of_shape(shape, options, place=place), place)


def plan_place(shape: Transformer, options: Options, job: Job, place: int) -> Plan:
    """Return the plan of a place of a pipe, from its job; without a pipe there is one place."""
    flops = sums.flops_of(shape, options) * options.tokens_per_step
    numels, kept = (shape.numel(), shape.used_numel()), sums.activations_of_shape(shape, options)
    others = _other_ranks(shape, options, job, place)
    notes, out = sums.notes_of(shape, options), sums.output_bytes_of(shape, options)
    return _plan(shape.name, numels, options, job, flops, kept, others, notes, out)


def _plan(
    name: str,
    numels: tuple[int, int | None],
    options: Options,
    job: Job,
    flops: float,
    activations: tuple[float, int, float],
    others: Sequence[tuple[str, int, Job]] = (),
    notes: Sequence[str] = (),
    output_bytes: int = 0,
) -> Plan:
    """Return the plan of a job.

    Args:
        numels: of all parameters, and of those that each token is multiplied with.
        flops: of a step of all ranks.
        activations: as in `Plan`.
        others: classes of ranks besides the first: name, count, job.
        notes: what is not predicted.
        output_bytes: of what the model returns beside the loss.
    """
    played, compute_dtype = {0: _play(job, options)}, sums.compute_dtype_of(job)
    alone = options.place_ranks - sum(count for _, count, _ in others)
    ranks = [_class_of("rank 0" if alone == 1 else "each rank", alone, played[0])]
    for title, count, one in others:
        # What a step does is the same on all ranks; these are quick to make without it.
        other = dataclasses.replace(one, calls=job.calls, script=job.script, pipe=job.pipe)
        if (alike := _alike(title, count, (job, other), ranks[0], played[0].film)) is None:
            alike = _class_of(title, count, played.setdefault(len(ranks), _play(other, options)))
        ranks.append(alike)
    shown = max(played, key=lambda number: ranks[number].fullness)
    first, film, reserved_bytes, retries = played[shown]
    live = tuple((one.column, one.unit, one.what, one.nbytes) for one in film.live_at(film.peak[1])[:LISTED])
    files_bytes = film.elsewhere_bytes.get("file", 0) * options.node_processes
    return Plan(
        name, *numels, options, options.words(), tuple(ranks), live, film, first, flops,
        sums.save_bytes_of(job) * (options.islands == 1), sums.host_bytes_of(options, film), files_bytes,
        outside_bytes_of(options),
        (*notes, *sums.notes_of_run(options, compute_dtype, reserved_bytes, output_bytes)),
        tuple(unit.numel for unit in job.units), sums.element_bytes_of(job), activations, retries=retries,
        owned_bytes=tuple(owned_bytes(job.updates, options.shard_ranks)), moved=text_of(reached(job.units)),
        shown=shown, compute_dtype=compute_dtype, outer=job.outer,
    )  # fmt: skip


class _Played(NamedTuple):
    """The first and a steady step of a rank, and what the allocator makes of them."""

    first: Film
    film: Film
    reserved_bytes: int
    retries: Retries


def _play(job: Job, options: Options) -> _Played:
    first, film = make_films(job)
    # The rules are those of the allocator of GPUs; that of a CPU keeps nothing.
    steps = chain.from_iterable(_steps(first, film, options))
    reserved_bytes = film.everywhere_bytes if options.device.is_cpu else simulate(steps).peak_reserved_bytes
    # What is left of it on this device after its retries.
    retries = _retries_of(first, film, reserved_bytes, options)
    return _Played(first, film, retries.reserved_bytes or reserved_bytes, retries)


def _class_of(title: str, count: int, played: _Played) -> RankClass:
    film = played.film
    return RankClass(
        title, count, film.resident_bytes, film.peak[0], film.allocated_bytes, played.reserved_bytes,
        film.elsewhere_bytes,
    )  # fmt: skip


def _alike(title: str, count: int, jobs: tuple[Job, Job], first: RankClass, film: Film) -> RankClass | None:
    """Return what another rank holds, if its steps need no simulation: at each moment as much less as between steps.

    Ranks that own other matrices, keep more or update larger slices have steps of their own; padding makes it less.

    Args:
        jobs: of the first rank, and of this one.
        first, film: of the first rank.
    """
    here, elsewhere = resident_bytes(other := jobs[1], film)
    less_bytes = sum(first.resident_bytes.values()) - sum(here.values())
    # On a CPU, what lies on the host comes from the same allocator.
    less_host_bytes = (first.elsewhere_bytes.get("host", 0) - elsewhere.get("host", 0)) * film.is_cpu
    more_bytes = sum(elsewhere.values()) - sum(first.elsewhere_bytes.values()) - less_bytes
    passing_bytes = [sum((*one.passing_bytes, *one.sums.wide_bytes, *one.sums.wide_apart_bytes)) for one in jobs]
    differs_bytes = max(more_bytes, abs(passing_bytes[1] - passing_bytes[0]))
    if differs_bytes > ALIKE * film.everywhere_bytes or any(t.numels for turns in other.sums.turns for t in turns):
        return None
    return RankClass(
        title, count, here, first.peak_bytes - less_bytes, first.allocator_bytes - less_bytes - less_host_bytes,
        first.reserved_bytes - less_bytes - less_host_bytes, elsewhere,
    )  # fmt: skip


def _retries_of(first: Film, film: Film, reserved_bytes: int, options: Options) -> Retries:
    """Return the allocator's retries where the device has room for what is allocated, but not for what is reserved."""
    room = options.room_bytes - outside_bytes_of(options)
    if options.device.is_cpu or not max(film.peak[0], first.peak[0]) <= room < reserved_bytes:
        return NO_RETRIES
    return play_steps(_steps(first, film, options, SETTLED), room, options.device)


def _other_ranks(shape: Transformer, options: Options, job: Job, place: int) -> list[tuple[str, int, Job]]:
    """Return the classes of the other ranks: shards differ in how much of them is padding, and in what owners keep."""
    if options.shard_ranks == 1:
        return []
    end, owned = options.place_ranks // options.shard_ranks, owned_bytes(job.updates, options.shard_ranks)
    others = [("the others", options.place_ranks - 1 - end, 0), ("the last shard", end, options.shard_ranks - 1)]
    if len({*owned}) > 1:
        shown = shown_ranks(options.shard_ranks, owned, 1)
        return [(title, n * end, job_of_shape(shape, options, rank=rank, place=place)) for title, n, rank in shown]
    return [
        (title, count, job_of_shape(shape, options, is_coarse=True, rank=rank, place=place))
        for title, count, rank in others
        if count > 0
    ]


def _steps(first: Film, film: Film, options: Options, steady: int = 2) -> Iterator[Iterator[Call]]:
    """Yield the allocator's calls of a first step and of some steady ones, over one set of what is resident.

    Segments that the system probes go back to the driver when the model is there.
    """
    probes = [f"probe {number}" for number in range(options.system.probed_bytes >> 30)]
    taken = [*(Call(one, 1 << 30) for one in probes), *(Call(one, 0, action=Action.FREE) for one in probes)]
    emptied = [Call(one, 0, action=Action.EMPTY) for one in probes[:1]]
    yield chain(taken, calls_of(first.before), emptied, calls_of(first.events), made_between(first, film))
    # States were made in the first step; what a later step makes has numbers of its own.
    shift = 1 + max((one.storage for one in (*film.before, *film.events)), default=0)
    made = {one.storage for one in film.before}
    for number in range(1, steady + 1):
        yield calls_of(film.events, shift=number * shift * 2, but=made)
