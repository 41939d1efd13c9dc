"""The search for the fastest configuration that fits, and the cost of each change of a configuration.

Owns the choice of candidates, the frontier of memory against speed, and the changes that a plan suggests. Candidates
are simulated with coarse units (`tape.coarse`), which preserves peak and time. Candidates of the frontier and the best
candidates are planned in full, with the allocator: their verdicts include reserved memory.

Note: what is not simulated
    `bounds.py` knows in closed form what no simulation is below. Configurations are taken from the fastest on, by this
    bound until they are simulated (`fastest_first`): one whose bound has no room, or takes more memory than a faster
    one, is neither on the frontier nor the best. So a search finds what it would find with all of them simulated.
"""

import dataclasses
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, product
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any, Final, NamedTuple, final

from zeroshard.describe.asked import Asked, resolve
from zeroshard.describe.axes import check_count
from zeroshard.describe.offload import Offload
from zeroshard.plan.bounds import bound_of
from zeroshard.plan.given import IMPORTED, optimizers_named
from zeroshard.plan.job import Options, check_options, check_shape
from zeroshard.plan.machine.hardware import Device
from zeroshard.plan.machine.profiles import device_for
from zeroshard.plan.named import PRECISIONS
from zeroshard.plan.numbers import thinned
from zeroshard.plan.offloading import choose_offload
from zeroshard.plan.planning import LONGEST, plan_alone, plan_shape
from zeroshard.plan.result import Plan
from zeroshard.plan.shape.shapes import Transformer, shape_of
from zeroshard.plan.step.system import ZEROSHARD
from zeroshard.plan.sums import micro_batches_of
from zeroshard.plan.systems import with_loss
from zeroshard.plan.trying import Candidate, Simulated
from zeroshard.table.sizes import GIB, aligned
from zeroshard.table.stages import STAGES, row_of_stage

__all__ = ["Search", "search"]

BATCHES: Final = (1, 2, 4, 8, 16, 32)
TREATMENTS: Final = ("keep", "recompute-rest", "recompute")
TENSORS: Final = (1, 2, 4, 8)
PIPES: Final = (1, 2, 4, 8)
MICRO_BATCHES: Final = 4
"""Of a step, for each place of a pipe, where nothing is asked: then a pipe is idle for a fifth of the time at most."""
LISTED: Final = 2000
"""Maximum number of printed candidates, evenly chosen."""


@final
@dataclass(frozen=True)
class Search:
    """The result of a search over configurations of one model.

    Args:
        count: number of configurations.
        candidates: those that were simulated.
        frontier: the Pareto frontier of allocated memory and tokens per second, sorted by memory, of the configurations
            that have room; if none has, the one that takes the least. Verdicts of the frontier include reserved memory;
            those of other candidates count only allocated memory.
        best: for each number of ranks, the plan of the fastest configuration that fits, or None.
        reasons: the reason for offload, for each number of ranks whose best plan offloads.
        offloads_tried: number of simulated configurations with offload; the best ones are among `candidates`.
        left_out: number of configurations that an interrupted search did not look at.
    """

    model: Transformer
    count: int
    candidates: Sequence[Candidate]
    frontier: Sequence[Candidate]
    best: Mapping[int, Plan | None]
    reasons: Mapping[int, str] = field(default_factory=dict)
    offloads_tried: int = 0
    left_out: int = 0

    def __str__(self) -> str:
        return _render(self)

    def __repr__(self) -> str:
        return f"<Search over {self.count} configurations of {self.model.name}; print() shows the frontier>"

    def to_json(self) -> dict[str, Any]:
        """Return the frontier, the candidates and the best plans as JSON values."""
        return {
            "version": 1,
            "model": self.model.name,
            "candidates": self.count,
            "simulated": len(self.candidates),
            "frontier": [_plain(one) for one in self.frontier],
            "configurations": [_plain(one) for one in thinned(self.candidates, LISTED)],
            "best": {ranks: plan and plan.to_json() for ranks, plan in self.best.items()},
            "reasons": dict(self.reasons),
            "offloads_tried": self.offloads_tried,
            "left_out": self.left_out,
        }


@contextmanager
def _without_collector() -> Iterator[None]:
    """Leave cyclic garbage alone meanwhile: plans are millions of objects without cycles, and looking at each of them
    again and again took a quarter of a search.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_without_collector()
def search(
    model: Any,
    *,
    world_size: int | Sequence[int],
    device: str | Device = "h100-80",
    seq: int | None = None,
    precision: str | None = None,
    optimizer: str = "adamw",
    stages: Sequence[int] = tuple(STAGES),
    batches: Sequence[int] = BATCHES,
    tensors: Sequence[int] = TENSORS,
    pipes: Sequence[int] = PIPES,
    activations: Sequence[str] = TREATMENTS,
    batch_tokens: int | None = None,
    loss: str | None = None,
    offload: Sequence[str] = ("host",),
    progress: Callable[[int, int], None] | None = None,
    prune: bool = True,
    processes: int = 1,
) -> Search:
    """Simulate many configurations of a model, and return the frontier and the fastest configuration that fits.

    Args:
        world_size: number of ranks, or several such numbers.
        stages, batches, tensors, activations: values to try: ZeRO stages, micro-batches in sequences, ranks of tensor
            parallelism (within a node), treatments of activations. The search also tries one replica of the sharded
            state up to one per node.
        pipes: numbers of places of a pipe to try, with schedule "1f1b".
        batch_tokens: tokens of a step, over all ranks, so that all configurations train equally; by default one
            micro-batch per step, and four for each place of a pipe.
        loss: as in `zs.plan`.
        offload: places for states, and for parameters at stage 3, in the order of trial: "host", and folders if the
            machines have a disk; () for no offload. The search offloads, without a pipe, if nothing fits without
            offload, or if that is faster; `Search.reasons` says which. On a CPU, device and host share one memory, so
            nothing is moved.
        progress: called with the number of configurations that were looked at, and of all.
        prune: whether only configurations are simulated that may be on the frontier or the best.
        processes: number of processes, of which each plans for some of the numbers of ranks; the result is the same. On
            Linux they are forks of this one, if it has one thread; otherwise this one makes all plans.

    A KeyboardInterrupt ends the search: the result has the configurations that were simulated before, without offload.

    Raises:
        ValueError: as `zs.plan`, or no configuration is possible.
        TypeError: the model is a module, or a value is no list.

    ```python
    import zeroshard as zs

    found = zs.search("gpt2-xl", world_size=8, device="a100-40", seq=1024, batches=(1, 4))
    assert found.best[8].verdict == "fits"
    ```
    """
    if hasattr(model, "named_parameters") or (isinstance(model, str) and IMPORTED.fullmatch(model)):
        what = model if isinstance(model, str) else type(model).__name__
        raise TypeError(f"A search takes shapes only; got {what}. Plan a module with zs.plan() or without --search.")
    shape, preset, processes = shape_of(model), device_for(device), check_count("processes", processes)
    asked_sizes = list(world_size) if isinstance(world_size, Iterable) else [world_size]
    values: dict[str, Any] = {"world_size": asked_sizes, "stages": stages, "batches": batches, "tensors": tensors}
    values |= {"pipes": pipes, "activations": activations, "offload": offload}
    if wrong := [name for name, one in values.items() if isinstance(one, str) or not isinstance(one, Iterable)]:
        raise TypeError(f"{wrong[0]}: a search takes several values, as a list; got {values[wrong[0]]!r}.")
    if empty := [name for name, one in values.items() if not one and name != "offload"]:
        raise ValueError(f"{', '.join(empty)}: a search needs at least one value to try; got none.")
    places = _places_of(offload, preset)
    named = preset.half_precision if precision is None else precision
    resolved = [
        resolve(Asked(stage=n, activations=one, precision=named), 1, precisions=PRECISIONS)
        for n in stages
        for one in activations
    ]
    start = Options(
        world_size=asked_sizes[0],
        device=preset,
        sequence=seq if seq is not None else min(shape.sequence, LONGEST),
        row=row_of_stage(0),
        precision=resolved[0].precision,
        optimizer=optimizers_named(optimizer)[0],
        system=ZEROSHARD if loss is None else with_loss(ZEROSHARD, loss),
    )
    sizes = [dataclasses.replace(start, world_size=one).world_size for one in asked_sizes]
    rows = [row for one in resolved for row in one.rows]
    asked = [
        options
        for ranks, row, batch, tensor, pipe in product(sizes, rows, sorted(batches), tensors, pipes)
        for options in _widths(_over(start, world_size=ranks, row=row, batch=batch, tensor=tensor, pipe=pipe))
    ]
    configurations, refusals = list[Options](), list[ValueError]()
    for options in asked:
        try:
            configurations.append(_checked(shape, options, batch_tokens))
        except ValueError as refusal:
            refusals.append(refusal)
    if not configurations:
        asked_tokens = f" with batch_tokens={batch_tokens}" * (batch_tokens is not None)
        raise ValueError(f"No configuration of {shape.name} on {world_size} ranks{asked_tokens}: {refusals[0]}")
    simulated, bounds, done = Simulated(shape), list[Candidate](), 0

    def tell(looked_at: int) -> None:
        nonlocal done
        done = looked_at
        if progress is not None:
            progress(done, len(configurations))

    try:
        bounds += map(partial(bound_of, shape) if prune else simulated, configurations)
        _simulate_frontier(bounds, simulated, tell)
    except KeyboardInterrupt:
        bounds, places = [*simulated.known.values()], []  # what comes now takes a few seconds
        if not bounds:
            raise
    plan = lru_cache(maxsize=16)(partial(plan_shape, shape))

    def fullest(one: Candidate) -> Plan:
        return plan(one.options) if one.options.pipe == 1 else plan_alone(shape, one.options, one.place)

    _plan_frontier(bounds, simulated, plan)

    def best_of(ranks: int) -> _Best:
        some, tried = [one for one in bounds if one.options.world_size == ranks], 0
        alone = [one for one in some if one.options.pipe == 1]
        for fitting in chain(_fitting(fullest, some, simulated), [None]):
            chosen = choose_offload(alone, fitting and fitting.tokens_per_s, places, simulated, plan)
            tried += chosen.tried
            if chosen.candidate is not None:
                return _Best(chosen.candidate, chosen.reason, tried)
            # A plan of all places of a pipe takes seconds.
            if fitting is not None and plan(fitting.options).verdict == "fits":
                return _Best(fitting, "", tried)
        return _Best(None, "", tried)

    best, reasons, tried = dict[int, Plan | None](), dict[int, str](), 0
    for ranks, top in zip(sizes, _bests(sizes, best_of, simulated, preset, processes), strict=True):
        best[ranks], tried = top.candidate and plan(top.candidate.options), tried + top.tried
        if top.candidate is not None and top.reason:
            reasons[ranks], simulated.known[top.candidate.options] = top.reason, top.candidate
    _plan_frontier(bounds, simulated, plan)
    found = (*simulated.known.values(),)
    return Search(
        shape, len(configurations), found, tuple(frontier_of(found)), MappingProxyType(best), MappingProxyType(reasons),
        tried, len(configurations) - done,
    )  # fmt: skip


class _Best(NamedTuple):
    """The fastest configuration that fits a number of ranks, the reason for its offload, and how many were tried."""

    candidate: Candidate | None
    reason: str
    tried: int


def _bests(
    sizes: Sequence[int], best_of: Callable[[int], _Best], simulated: Simulated, device: Device, processes: int
) -> Iterator[_Best]:
    """Yield the best of each number of ranks; forked processes make some, and this one what they do not return."""
    can_fork = sys.platform == "linux" and threading.active_count() == 1 and not current_process().daemon
    parts = [sizes[place::processes] for place in range(processes)] if can_fork else [sizes]
    context, lines = get_context("fork" if can_fork else None), list[Connection]()

    def here(one: Candidate) -> Candidate:  # a device is equal to itself alone
        return dataclasses.replace(one, options=dataclasses.replace(one.options, device=device))

    def run(line: Connection, some: Sequence[int]) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
        before = simulated.known.copy()
        made = {ranks: best_of(ranks) for ranks in some}
        line.send((made, [one for options, one in simulated.known.items() if options not in before]))

    for some in filter(None, parts[1:]):
        mine, theirs = context.Pipe(duplex=False)
        context.Process(target=run, args=(theirs, some), daemon=True).start()
        theirs.close()
        lines.append(mine)
    found = {ranks: best_of(ranks) for ranks in parts[0]}
    for line in lines:
        with suppress(EOFError):  # its process has ended: this one makes what it had to
            made, known = line.recv()
            found |= {
                ranks: one._replace(candidate=one.candidate and here(one.candidate)) for ranks, one in made.items()
            }
            simulated.known.update((one.options, one) for one in map(here, known))
    yield from (found[ranks] if ranks in found else best_of(ranks) for ranks in sizes)


def _over(start: Options, *, pipe: int, **changed: Any) -> Options:
    """Return options over a number of places of a pipe."""
    micro_batches = MICRO_BATCHES * pipe if pipe > 1 else 1
    return dataclasses.replace(start, **changed, pipe=pipe, micro_batches=micro_batches, no_sync=pipe > 1)


def _places_of(asked: Sequence[str], device: Device) -> list[str]:
    """Return the places that a search may move something to.

    Raises:
        TypeError: a text, which would be read as a list of letters.
        ValueError, TypeError: a place that is none.
    """
    return [str(Offload(to=place).to) for place in asked if not device.is_cpu]


def _plain(one: Candidate) -> dict[str, Any]:
    """Return a candidate as JSON values."""
    named = ("peak_bytes", "reserved_bytes", "total_bytes", "step_s", "tokens_per_s", "verdict")
    return {"options": dict(one.options.words())} | {name: getattr(one, name) for name in named}


def _widths(options: Options) -> Iterator[Options]:
    """Yield numbers of copies: one, one for each node, and powers of two between."""
    nodes = max(1, options.place_ranks // options.device.node_ranks)
    is_sharded = options.row != dataclasses.replace(row_of_stage(0), activations=options.row.activations)
    most = nodes if is_sharded else 1
    for replicas in sorted({most, *(2**power for power in range(most.bit_length()))}):
        yield dataclasses.replace(options, replicas=replicas)


def _checked(shape: Transformer, options: Options, batch_tokens: int | None) -> Options:
    """Return a configuration with the micro-batches of its step.

    Raises:
        ValueError: its sizes do not divide.
    """
    if options.tensor > options.device.node_ranks:
        raise ValueError(f"tensor={options.tensor} is more than the {options.device.node_ranks} ranks of a node.")
    if batch_tokens is not None:
        options = dataclasses.replace(options, micro_batches=micro_batches_of(batch_tokens, options))
    check_options(options)
    check_shape(shape, options)
    return options


def _simulate_frontier(
    bounds: Sequence[Candidate], simulated: Simulated, tell: Callable[[int], None] = lambda count: None
) -> None:
    """Simulate what may be on the frontier."""
    least: Candidate | None = None

    def is_wanted(one: Candidate) -> bool:
        return one.has_room and (least is None or one.peak_bytes < least.peak_bytes)

    for one in simulated.fastest_first(bounds, _speed, is_wanted, tell):
        least = one
    if least is None:
        next(simulated.fastest_first(bounds, lambda one: -one.peak_bytes, lambda one: True))


def _plan_frontier(bounds: Sequence[Candidate], simulated: Simulated, plan: Callable[[Options], Plan]) -> None:
    """Plan the frontier in full; what beats a configuration that retries slow takes its place."""
    known = simulated.known
    while some := [one for one in frontier_of(known.values()) if one.reserved_bytes is None]:
        for one in some:
            known[one.options] = one.as_planned(plan(one.options))
        _simulate_frontier(bounds, simulated)


def frontier_of(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return what has room, and no other candidate beats in memory and in tokens a second of each rank, by memory."""
    best, found = 0.0, list[Candidate]()
    ordered = sorted(candidates, key=lambda one: (one.peak_bytes, -_speed(one)))
    for one in [one for one in ordered if one.has_room] or ordered[:1]:
        if _speed(one) > best:
            best = _speed(one)
            found.append(one)
    return found


def _speed(one: Candidate) -> float:
    return one.tokens_per_s / one.options.world_size


def _fitting(
    fullest: Callable[[Candidate], Plan], bounds: Sequence[Candidate], simulated: Simulated
) -> Iterator[Candidate]:
    """Yield the configurations that fit in full, fastest first; of a pipe, those whose fullest place fits."""
    order = simulated.fastest_first(bounds, lambda one: one.tokens_per_s, lambda one: one.verdict == "fits")
    return (one for one in order if fullest(one).verdict == "fits")


SHOWN: Final = 12
"""Entries of the frontier that a person is shown."""


def _render(found: Search) -> str:
    """Return the frontier and the best plan of a search."""
    named = ("ranks", "row", "copies", "tensor", "pipe", "micro-batches", "micro-batch", "activations")
    heads = (*named[:6], "each", named[-1], "GiB at peak", "in total", "tokens/s a rank", "")
    rows = [
        (
            *(str(one.options.words()[name]) for name in named),
            f"{one.peak_bytes / GIB:.1f}",
            f"{one.total_bytes / GIB:.1f}",
            f"{one.tokens_per_s / one.options.world_size:,.0f}",
            one.verdict,
        )
        for one in thinned(found.frontier, SHOWN)
    ]
    interrupted = f", interrupted: {found.left_out:,} were not looked at" if found.left_out else ""
    count = f"{found.count:,} configurations ({len(found.candidates):,} simulated{interrupted})"
    title = f"{found.model.name}: {count}; the frontier of memory and speed:"
    text = [title, "", *aligned([heads, *rows]), "", "the fastest that fits:"]
    text += [
        f"  {ranks:6,} ranks: "
        + ("none" if plan is None else f"{plan.tokens_per_s:,.0f} tokens/s with {_row(plan)}")
        + (f"; {found.reasons[ranks]}" if ranks in found.reasons else "")
        for ranks, plan in found.best.items()
    ]
    only = next(iter(found.best.values())) if len(found.best) == 1 else None
    return "\n".join(text + ([] if only is None else ["", str(only)]))


def _row(plan: Plan) -> str:
    words, moved = plan.options, plan.asked.offload
    named = ("copies", "tensor", "pipe", "micro-batches", "micro-batch")
    row = str(words["row"]) if moved is None else f"stage {_stage_of(plan.asked)}, {_moved(moved)} ({plan.moved})"
    return ", ".join([row, f"activations {words['activations']}", *(f"{n} {words[n]}" for n in named)])


def _stage_of(options: Options) -> int:
    """Return the stage of a configuration of a search, without what it moves elsewhere."""
    row = dataclasses.replace(options.row, activations=row_of_stage(0).activations)
    return next(number for number, one in STAGES.items() if one == row)


def _moved(offload: Offload) -> str:
    """Return what an offload moves, as `--offload` reads it."""
    parts = {"states": offload.states, "parameters": offload.parameters}
    return "offload " + ",".join([*(f"{name}={part:g}" for name, part in parts.items() if part), f"to={offload.to}"])
