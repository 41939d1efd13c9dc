"""The job of a model of modules: from a trace of its step, with the units of `zs.shard`.

Owns the conversion of a trace into a film's script. It must not know the result of a step (`film.py`). Read `tracer.py`
and `describe/specs.py` first.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from zeroshard.describe.ignored import ignored_of
from zeroshard.describe.parameters import check_patterns
from zeroshard.describe.precision import Precision, chosen_modules, formats_of_model
from zeroshard.describe.selection import check_activations
from zeroshard.describe.specs import describe_units
from zeroshard.describe.split import local_numel
from zeroshard.describe.units import UnitPlan, plan_units
from zeroshard.optim.keeps import kept_by
from zeroshard.parallel.chunked import Learned
from zeroshard.parallel.cut import Cut, cut_model, own_bytes
from zeroshard.plan import sums
from zeroshard.plan.job import Options, wire_of
from zeroshard.plan.named import passing_bytes_of
from zeroshard.plan.places import mixed
from zeroshard.plan.shape.tape import Instruction
from zeroshard.plan.step.rank_job import Job
from zeroshard.plan.step.script import Script, mark
from zeroshard.plan.step.turns import shown_ranks
from zeroshard.plan.trace.chunks import Chunks, at_place
from zeroshard.plan.trace.events import Category, Landed, Marked, Phase, Trace, unit_of
from zeroshard.plan.trace.fake import on_meta
from zeroshard.plan.trace.splitting import check_split
from zeroshard.plan.trace.tracer import trace_step
from zeroshard.plan.trace.treated import Treated
from zeroshard.plan.trace.uses import UnitWatch
from zeroshard.plan.updates import passing_for, updates_for
from zeroshard.store.bus import SMALL_BYTES
from zeroshard.table.pipeline import Schedule
from zeroshard.table.schedule import ROOT
from zeroshard.table.spec import Formats, UnitSpec
from zeroshard.torch_private import local_of
from zeroshard.tree import find, map_floating

__all__ = ["Traced", "tokens_of", "trace_job", "trace_places"]

BOUNDED: Final = (
    "Compression of a ReLU's results, and of factors with one value besides zero, depends on values: these tensors "
    "count as uncompressed, which is an upper bound. Pass the fraction of zeros in a ReLU's results as zeros=."
)

LEFT: Final = "Of ignored parameters only the values are counted: their gradients and optimizer are the caller's own."
SHOWN_RANKS: Final = 16
"""Maximum number of shards that are shown separately."""

_STAYS: Final = (Category.PARAMETER, Category.BUFFER, Category.OPTIMIZER, Category.INPUT)
"""Categories that the film gets from other sources."""


@final
@dataclass(frozen=True)
class Traced:
    """A model's job, and facts from the trace.

    Args:
        flops: operations of one micro-batch's forward and backward, without recomputation.
        kept_bytes: bytes that a micro-batch's forward keeps for its backward.
        tokens: number of tokens of one micro-batch, as from `tokens_of`.
        output_bytes: of what the model returns beside the loss.
        again: returns the same with another offload, which the trace does not depend on.
        others: (name, count, job) of ranks besides the first, each separately or, if there are many, by what they keep.
    """

    job: Job
    parameters_numel: int
    flops: float
    kept_bytes: int
    tokens: int
    output_bytes: int
    notes: Sequence[str]
    again: Callable[[Options], "Traced"]
    others: Sequence[tuple[str, int, Job]] = ()


def trace_job(
    model: nn.Module,
    options: Options,
    inputs: Sequence[Any] | Mapping[str, Any],
    loss: Callable[[Any], Tensor] | None = None,
    *,
    units: Sequence[object] | None = None,
    reads: Callable[[Tensor], bool | int | float] | None = None,
    homes: Mapping[int, str] = MappingProxyType({}),
    ignored: Sequence[object] = (),
    chunks: Chunks | None = None,
) -> Traced:
    """Trace a step of a model, and return the job of one rank. The model does not change.

    Args:
        inputs: arguments of the model's forward, by position or by name.
        loss: computes the loss from the model's output; by default the output, its `loss`, or its sum.
        units: as in `zs.shard`.
        personality: name of the kernels, "cuda" or "cpu".
        reads: returns values of tensors that the model reads, as in `trace_step`.
        homes: the names of the parameters of `options.optimizers`, by identity.
        ignored: as `zs.shard` takes them.
        chunks: of the model at one place of a pipe, which has no other parameters.

    Raises:
        TypeError: inputs without tensors, or a loss without a graph.
        RuntimeError: the model reads values of tensors.
    """
    tokens = tokens_of(inputs)
    check_split(model, options.tensor)
    precision = options.chosen or _precision(options.formats)
    left = ignored_of(model, ignored)
    formats = {key: one for key, one in formats_of_model(model, precision).items() if key not in left}
    copied, twins = _copy(model, formats, precision)
    plans = plan_units(model, units, left)
    check_activations(options.row.activations, plans, options.tensor)
    check_patterns(options.row, [plan.name for plan in plans])
    # The bytes that a GPU's bus moves while the host issues a copy; on a CPU all tensors move.
    is_cpu, cell, treated = options.device.is_cpu, options.row.activations, None
    if any(cell.chains):
        treated = Treated(cell, plans, twins, options.tensor, 0 if is_cpu else SMALL_BYTES, options.zeros)
    names = {name: number for number, plan in enumerate(plans) for name in plan.entries.values() if number != ROOT}
    ends = _Ends(model, precision, loss)

    def whole(run: nn.Module, given: Any) -> Tensor:
        given = ends.begin(given)
        return ends.finish(run(**given) if isinstance(given, Mapping) else run(*given))

    chunked = None if chunks is None else chunks.of_copy(twins, copied)
    scripts, traces = dict[int, Script](), list[Trace]()
    for chunk in (0,) if chunks is None else chunks.own:
        step, sent, borders = whole, list[Tensor](), tuple[Sequence[Tensor], ...]()
        if chunks is not None and chunked is not None:
            step, borders = chunks.step(chunked, chunk, sent, ends.begin, ends.finish), chunks.borders(chunk)
        for _ in range(1 if treated is None else treated.passes):
            sent.clear()
            watch = UnitWatch(plans, twins, cell)
            trace = trace_step(
                step,
                copied,
                [inputs if isinstance(inputs, Mapping) else tuple(inputs), *borders],
                personality="cpu" if is_cpu else "cuda",
                reads=reads,
                takes_gradients=True,
                treated=treated,
                watch=watch,
            )
        traces.append(trace)
        forward, backward = (_stream(trace, names, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
        scripts[chunk] = Script(forward, backward, watch.partial)
    by_category = _before(trace)
    border_bytes = sum(one.nbytes for some in borders for one in some)
    flops, saved_bytes = (sum(found) for found in zip(*((one.flops, one.saved_bytes()) for one in traces), strict=True))

    saved = {
        id(buffer): buffer
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    }
    # A parameter without a gradient has no states.
    landed = frozenset(one.parameter for trace in traces for one in trace.marks if isinstance(one, Landed))
    taken, kept = passing_for(options), [kept_by(one) for one in options.optimizers]

    def job_at(rank: int, moved: Options) -> Job:
        specs = _specs(plans, moved, precision, rank)
        updates = updates_for(specs, moved, homes, landed, kept)
        passing = passing_bytes_of(updates, taken, is_cpu=is_cpu, is_fused=moved.is_fused)
        return Job(
            specs,
            (),
            updates,
            wire_of(moved),
            moved.device,
            moved.formats.param,
            moved.spans,
            moved.micro_batches,
            by_category[Category.INPUT] - border_bytes,
            by_category[Category.BUFFER] + sum(local_of(p).nbytes for p in model.parameters() if id(p) in left),
            script=scripts[0] if chunks is None else None,
            passing_bytes=passing,
            host_ranks=moved.node_processes,
            is_early=moved.is_filed,
            no_sync=moved.no_sync,
            system=moved.system,
            outer=moved.foreseen(specs),
            saved_buffer_bytes=sum(one.nbytes for one in saved.values()),
        )

    def made(moved: Options) -> Traced:
        job, ranks, each = job_at(0, moved), moved.shard_ranks, moved.place_ranks // moved.shard_ranks
        shown = shown_ranks(ranks, sums.states_by_rank(job.updates, ranks), SHOWN_RANKS)
        if chunks is not None:
            job = dataclasses.replace(job, pipe=chunks.piped(job, scripts, plans))
        return Traced(
            job,
            sum(plan.numel for plan in plans),
            flops,
            saved_bytes,
            tokens,
            ends.returned_bytes,
            [BOUNDED] * (treated is not None and treated.has_bounds)
            + [LEFT] * bool(left)
            + [*dict.fromkeys(note for trace in traces for note in trace.doubts(is_cpu=is_cpu))],
            made,
            [(name, count * each, job_at(rank, moved)) for name, count, rank in shown],
        )

    return made(options)


def trace_places(
    model: nn.Module,
    options: Options,
    inputs: Sequence[Any] | Mapping[str, Any],
    loss: Callable[[Any], Tensor] | None,
    cut: Sequence[str] | None,
    units: Sequence[object] | None,
    ignored: Sequence[object],
    **same: Any,
) -> tuple[list[Traced], Sequence[str]]:
    """Trace a step of each place of a pipe, or of a model without one, as `trace_job`; return the cut, too."""
    trace = functools.partial(trace_job, model, options, inputs, loss, **same)
    if options.pipe == 1:
        return [trace(units=units, ignored=ignored)], ()
    schedule, traced = options.training, list[Traced]()
    found = cut_model(model, cut, schedule.all_chunks)
    learn = functools.partial(_learn, model, schedule, options, inputs, loss, same["reads"])
    learned, took_s = learn(found)
    if options.bytes_part is not None:
        nbytes = own_bytes(model)
        costs = mixed([took_s[name] for name in nbytes], [*nbytes.values()], options.bytes_part)
        again = cut_model(model, None, schedule.all_chunks, dict(zip(nbytes, costs, strict=True)))
        if again.starts != found.starts:
            found, (learned, _) = again, learn(again)
    for place in range(options.pipe):
        own = schedule.chunks_of(place)
        with at_place(model, found, own, units, ignored) as (removed, own_units, own_ignored):
            chunks = Chunks(found, schedule, place, own, removed, learned)
            traced.append(trace(units=own_units, ignored=own_ignored, chunks=chunks))
    return traced, found.starts


def _learn(
    model: nn.Module,
    schedule: Schedule,
    options: Options,
    inputs: Sequence[Any] | Mapping[str, Any],
    loss: Callable[[Any], Tensor] | None,
    reads: Callable[[Tensor], bool | int | float] | None,
    cut: Cut,
) -> tuple[list[Learned], Mapping[str, float]]:
    """Return what crosses the borders of each chunk of a model, from a trace of one after the other.

    Also returns the seconds of the kernels of each module without its children, by name.
    """
    precision = options.chosen or _precision(options.formats)
    copied, twins = _copy(model, formats_of_model(model, precision), precision)
    learned, everything, took_s = list[Learned](), [*range(cut.count)], defaultdict[str, float](float)
    ends = _Ends(model, precision, loss)
    chunks = Chunks(cut, schedule, 0, everything, {}, learned)
    chunked = chunks.of_copy(twins, copied)
    for chunk in everything:
        chunked.own = [chunk]
        step = chunks.step(chunked, chunk, [], ends.begin, ends.finish)
        given = [inputs if isinstance(inputs, Mapping) else tuple(inputs), *chunks.borders(chunk)]
        personality = "cpu" if options.device.is_cpu else "cuda"
        trace = trace_step(step, copied, given, personality=personality, reads=reads, takes_gradients=True)
        # What no module computes is, above all, the loss: it counts with the last module.
        last = {"": [*dict(model.named_modules())][-1]} if chunk == cut.count - 1 else {}
        for order, cost in trace.kernels:
            name = trace.events[min(order, len(trace.events) - 1)].module
            took_s[last.get(name, name)] += options.device.kernel_s(cost, options.formats.param)
    return learned, took_s


def _copy(
    model: nn.Module, formats: Mapping[int, Formats], precision: Precision
) -> tuple[nn.Module, Mapping[nn.Module, nn.Module]]:
    """Return a copy of a model on the meta device in the dtypes of a run, and the copy of each module."""
    copied = on_meta(model, {key: one.param for key, one in formats.items()})
    twins = dict(zip(model.modules(), copied.modules(), strict=True))
    hang_casts(model, twins, precision)
    return copied, twins


@final
class _Ends:
    """The casts around the forward of a model, and its loss."""

    def __init__(self, model: nn.Module, precision: Precision, loss: Callable[[Any], Tensor] | None) -> None:
        dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
        self.begin = functools.partial(_cast, dtype=precision.param or next(dtypes, torch.float32))
        """Casts the inputs."""
        self._model, self._precision, self._loss, self.returned_bytes = model, precision, loss or loss_of, 0
        """`returned_bytes` is what the last forward returned beside the loss."""

    def finish(self, out: Any) -> Tensor:
        """Return the loss of the output of a forward."""
        out = out if self._precision.param is None else _cast(out, self._precision.output or torch.float32)
        made = self._loss(out)
        if not isinstance(made, Tensor) or not made.requires_grad:
            raise TypeError(
                f"No parameter of {type(self._model).__name__} that requires a gradient is in the graph of its output: "
                "pass loss=, or check requires_grad and detach()."
            )
        self.returned_bytes = sum(one.nbytes for one in find(out, Tensor) if one is not made)
        return made


def _specs(plans: Sequence[UnitPlan], options: Options, precision: Precision, rank: int) -> tuple[UnitSpec, ...]:
    """Return the units on a rank of the shards."""
    return describe_units(
        plans,
        options.placed_row,
        precision,
        shard_size=options.shard_ranks,
        shard_rank=rank,
        replicas=options.replicas,
        numel_of=local_numel,
        is_part=options.pipe > 1 or not options.system.keeps_last,
    )


def tokens_of(inputs: Any) -> int:
    """Return the tokens of a micro-batch: elements of the first input of int32 or int64, or else samples.

    Raises:
        TypeError: the inputs are not arguments, or contain no tensor.
        ValueError: the inputs have no elements.
    """
    if not isinstance(inputs, Mapping | list | tuple):
        raise TypeError(
            f"inputs= takes the arguments of the model's forward, [x] or {{'x': x}}; got {type(inputs).__name__}."
        )
    tensors = find(inputs, Tensor)
    if not tensors:
        raise TypeError(f"inputs= must contain a tensor; got {inputs!r}.")
    whole = [one for one in tensors if one.dtype in (torch.int32, torch.int64)]
    tokens = whole[0].numel() if whole else (*tensors[0].shape, 1)[0]
    if tokens < 1:
        raise ValueError(f"inputs= must contain samples; got a tensor of shape {tuple((whole or tensors)[0].shape)}.")
    return int(tokens)


def loss_of(out: Any) -> Tensor:
    """Return the loss in a model's output, or the sum of the output."""
    if isinstance(out, Mapping) and out.get("loss") is not None:
        out = out["loss"]
    elif getattr(out, "loss", None) is not None:
        out = out.loss
    if isinstance(out, Tensor):
        return out if out.numel() == 1 else out.float().sum()
    floating = [one for one in find(out, Tensor) if one.is_floating_point() and one.requires_grad]
    return torch.stack([one.float().sum() for one in floating]).sum() if floating else torch.zeros(())


def _precision(formats: Formats) -> Precision:
    kinds = {name: getattr(torch, getattr(formats, name)) for name in ("param", "reduce", "grad", "master")}
    return Precision() if formats.param == formats.master == "float32" else Precision(**kinds)


def hang_casts(model: nn.Module, twins: Mapping[nn.Module, nn.Module], precision: Precision) -> None:
    """Have modules of the copy that keep a dtype, or have a precision of their own, cast as those of the model do."""
    casts = [(one.module, one.inside, one.outside) for one in chosen_modules(model, precision)]
    for module in model.modules():
        is_kept = precision.param is not None and isinstance(module, precision.keep)
        if is_kept and (own := next(module.parameters(False), None)) is not None:
            casts.append((module, own.dtype, precision.param or own.dtype))
    for module, inside, outside in casts:
        twins[module].register_forward_pre_hook(
            lambda _, args, kwargs, to=inside: _cast((args, kwargs), to), with_kwargs=True
        )
        twins[module].register_forward_hook(lambda _, args, out, to=outside: _cast(out, to))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors at the edge of a model: inputs to what modules compute with, or outputs."""
    return map_floating(value, lambda one: one.to(dtype))


def _before(trace: Trace) -> Mapping[Category, int]:
    """Return the bytes of storages that exist before the step, by category."""
    found = dict.fromkeys(Category, 0)
    for event in trace.events:
        if event.phase is Phase.BEFORE:
            found[event.category] += event.nbytes
    return found


def _stream(trace: Trace, numbers: Mapping[str, int], phase: Phase) -> tuple[tuple[int, Instruction], ...]:
    """Return the events of one phase, in order: instructions with their units, and the marks between them."""
    start = next((event.order for event in trace.events if event.phase is phase), 0)
    stop = max((event.order for event in trace.events if event.phase is phase), default=-1) + 1
    marks: dict[int, list[tuple[int, Instruction]]] = {}
    for one in trace.marks:
        order = min(max(one.order, start), stop)
        if isinstance(one, Landed) and phase is Phase.BACKWARD:
            land = Instruction("land", one.parameter, one.storage, one.nbytes, is_alone=one.is_alone)
            marks.setdefault(order, []).append((ROOT, land))
        elif isinstance(one, Marked) and phase is one.phase:
            marks.setdefault(order, []).append(mark(*one.mark))
    kernels: dict[int, list[Instruction]] = {}
    for order, cost in trace.kernels:
        kernels.setdefault(order, []).append(Instruction("run", "", cost=cost))
    for order, exchange in trace.exchanges:
        kernels.setdefault(order, []).append(Instruction("exchange", exchange.kind, exchange=exchange))
    for order, lane, number, nbytes in trace.copies:
        kind = "issue" if lane else "await"
        kernels.setdefault(order, []).append(Instruction(kind, lane, number, nbytes))
    names, found = frozenset(numbers), list[tuple[int, Instruction]]()
    for order in range(start, stop + 1):
        found += marks.get(order, [])
        if order == stop:
            break
        event = trace.events[order]
        if event.phase is not phase:
            continue
        unit = numbers.get(unit_of(event.module, names), ROOT)
        found += [(unit, one) for one in kernels.get(order, [])]
        if event.nbytes and event.category not in _STAYS:
            kind = "make" if event.nbytes > 0 else "drop"
            found.append((unit, Instruction(kind, event.operation, event.storage, abs(event.nbytes))))
    return tuple(found)
