"""The least memory and time of a configuration in closed form, so that a search simulates few.

Owns the sums over the units of a shape. It must not know how a step is simulated (`step/`), nor what a search wants
(`search.py`). Needs no torch.

Note: what is counted
    Of memory at a place of the pipe: what is resident, what other micro-batches in flight keep, and for the first and
    the last unit of each kind the peak of its forward and its backward, with the unit whole and the gradients so far.
    Of time: kernels with the exchanges inside operations, or the gathers, or the reductions, whichever takes longest,
    and the update. What is not counted, such as prefetched units and waits, adds to these. So no simulation takes less
    (`tests/plan/test_bounds.py`).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from zeroshard.plan.job import (
    Options,
    Timed,
    Treatment,
    load_of,
    outside_bytes_of,
    parts_of,
    specs_of_layers,
    treatment_of,
    wire_of,
)
from zeroshard.plan.machine.hardware import Cost, Device, Span
from zeroshard.plan.named import OPTIMIZERS, updates_of
from zeroshard.plan.result import verdict_of
from zeroshard.plan.shape.shapes import Transformer
from zeroshard.plan.shape.tape import Instruction
from zeroshard.plan.shape.transformer import Workload
from zeroshard.plan.step.rank_job import account_of
from zeroshard.plan.step.system import device_of
from zeroshard.plan.trying import Candidate
from zeroshard.table.activations import Activations
from zeroshard.table.cells import Residency
from zeroshard.table.spec import Formats, UnitSpec, itemsize
from zeroshard.table.wires import Native

__all__ = ["bound_of"]

AT_ONCE: Final = 2
"""Units whose whole gradients are there at a time: those of one are reduced while those of the next one arrive."""


class _State(NamedTuple):
    """Bytes and seconds of a unit on a rank.

    `resident_bytes` are there between steps, `held_bytes` are its sums of gradients, `buffer_bytes` its whole gradients
    beside these, `whole_bytes` its whole parameters. Offload can move `movable_bytes`. An update reads and writes
    `moved_bytes`.
    """

    resident_bytes: int
    held_bytes: int
    buffer_bytes: int
    whole_bytes: int
    movable_bytes: int
    moved_bytes: int
    gather_s: float
    reduce_s: float
    publish_s: float


class _Work(NamedTuple):
    """What a unit does in a micro-batch, as in `Parts`. Its output takes `given_bytes`, its host `queue_s`."""

    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    given_bytes: int
    forward_s: float
    backward_s: float
    queue_s: float


Units = Sequence[tuple[int, _State, _Work]]
"""The units of a place by kind, in order of use: their number, and what each one keeps and does."""


def bound_of(shape: Transformer, options: Options) -> Candidate:
    """Return the least that a simulation of a configuration finds, as a candidate."""
    device = device_of(options.device, options.system)
    states, works = _states(shape, options, device), _works(shape, options, device)
    placed = options.layers_of(shape)
    places = [
        [(n, states[kind], works[kind.partition(" ")[0]]) for kind, n in _kinds(shape, layers) if n]
        for layers in placed
    ]
    peak_bytes = max(_peak_bytes(units, options, options.pipe - place) for place, units in enumerate(places))
    movable_bytes = max(sum(n * one.movable_bytes for n, one, _ in units) for units in places)
    passes_s, backward_s = _passes_s(places, options)
    # What arrives beside the next forward may cost nothing.
    is_awaited = not (wire_of(options).overlaps and options.system.publishes_beside)
    updates = [
        (is_awaited * sum(n * one.publish_s for n, one, _ in units), sum(n * one.moved_bytes for n, one, _ in units))
        for units in places
    ]
    update_s = max(
        sent_s + device.kernel_s(Cost(0, float(nbytes)), options.formats.param) for sent_s, nbytes in updates
    )
    return Candidate(
        options, peak_bytes, passes_s + update_s, verdict_of(peak_bytes, outside_bytes_of(options), options),
        movable_bytes=(movable_bytes := states["root"].movable_bytes + movable_bytes),
        least_bytes=max(0, peak_bytes - movable_bytes), passes_s=passes_s, backward_s=backward_s,
        gradient_bytes=states["root"].held_bytes + max(sum(n * one.held_bytes for n, one, _ in at) for at in places),
        host_s=options.device.host_s(min(nbytes for _, nbytes in updates), options.node_processes),
    )  # fmt: skip


def _passes_s(places: Sequence[Units], options: Options) -> tuple[float, float]:
    """Return the least seconds until the last gradient is reduced, and of a backward."""
    count, reduced = options.micro_batches, 1 if options.no_sync else options.micro_batches
    times, begun_s = list[tuple[float, float, float]](), 0.0
    for units in places:
        gather_s, reduce_s = sum(n * one.gather_s for n, one, _ in units), sum(n * one.reduce_s for n, one, _ in units)
        forward_s = max(gather_s, sum(n * work.forward_s for n, _, work in units))
        # The backward may find the last unit gathered, whichever is the largest.
        kept_s = max(one.gather_s for _, one, _ in units) * (options.system.keeps_last and options.pipe == 1)
        backward_s = max(gather_s - kept_s, sum(n * work.backward_s for n, _, work in units))
        last_s = max(backward_s, reduce_s)
        # Until the last backward; the first micro-batch comes through the places before.
        busy_s = begun_s + count * forward_s + (count - reduced) * backward_s + (reduced - 1) * last_s
        times.append((busy_s, backward_s, last_s))
        begun_s += forward_s
    found = ready_s = 0.0
    for busy_s, backward_s, last_s in reversed(times):
        ready_s = max(ready_s, busy_s)  # the last gradients come through the places behind
        found, ready_s = max(found, ready_s + last_s), ready_s + backward_s
    queue_s = max(sum(n * work.queue_s for n, _, work in units) for units in places)
    return max(found, count * queue_s), min(last_s for _, _, last_s in times)


def _kinds(shape: Transformer, layers: Sequence[int]) -> Iterable[tuple[str, int]]:
    """Return how many units of each kind some layers have, in order of use; "head again" is the embedding."""
    blocks = [shape.kind_of(layer) for layer in layers if 0 <= layer < shape.layers]
    kinds = {"embedding": -1 in layers, "dense": blocks.count("dense"), "block": blocks.count("block")}
    head = "head again" if shape.is_tied and -1 in layers else "head"
    return [*kinds.items(), (head, shape.layers in layers)]


def _peak_bytes(units: Units, options: Options, places: int) -> int:
    """Return the least peak of a place.

    Args:
        places: of the pipe, from this one on.
    """
    count, flying = options.micro_batches, min(options.micro_batches, places)
    base = sum(n * (one.resident_bytes + (flying - 1) * work.saved_bytes) for n, one, work in units)
    # Before the last micro-batch there are the gradients of others, whole where only the last one reduces them.
    is_later = count > (flying if options.pipe > 1 else 1)
    is_late = is_later and options.no_sync
    if is_later:
        base += sum(n * (one.buffer_bytes or one.held_bytes if is_late else one.held_bytes) for n, one, _ in units)
    kept, found = 0, [base]
    for n, one, work in units:
        kept += n * work.saved_bytes
        found.append(base + kept + work.forward_bytes + one.whole_bytes)
    for n, one, work in reversed(units):
        there = base + work.given_bytes + one.whole_bytes
        found.append(there + kept + work.backward_bytes)
        kept -= (n - 1) * work.saved_bytes
        base += (0 if is_later else n - 1) * one.held_bytes
        found.append(base + work.given_bytes + one.whole_bytes + kept + work.backward_bytes)
        buffers_bytes = 0 if is_late else min(n, AT_ONCE) * one.buffer_bytes
        found.append(base + work.given_bytes + one.whole_bytes + kept + buffers_bytes)
        kept -= work.saved_bytes
        base += (0 if is_later else 1) * one.held_bytes
    return max(*found, base)


def _states(shape: Transformer, options: Options, device: Device) -> Mapping[str, _State]:
    """Return what units of each kind keep and exchange."""
    row = dataclasses.replace(options.placed_row, activations=Activations())
    ranks, spans = (options.shard_ranks, options.replicas), (options.spans["shard"], options.spans["replicate"])
    machine = device, spans, wire_of(options).is_in_place
    return _states_of(shape, options.tensor, row, options.formats, ranks, options.optimizer, machine)


Machine = tuple[Device, tuple[Span, Span], bool]
"""A device, where shards and replicas are, and whether ranks read each other's memory in place."""


@lru_cache(1024)
def _states_of(
    shape: Transformer,
    tensor: int,
    row: Residency,
    formats: Formats,
    ranks: tuple[int, int],
    optimizer: str,
    machine: Machine,
) -> Mapping[str, _State]:
    layers = {"dense": 0, "block": shape.dense_layers if shape.experts else 0}
    wanted = tuple(sorted({-1, *layers.values(), shape.layers}))
    found = dict[str, _State]()
    for unit in specs_of_layers(shape, wanted, tensor, row, formats, *ranks, 0):
        last = unit.name.rpartition(".")[2]
        kinds = [kind for kind, layer in layers.items() if last == str(layer)]
        kinds = kinds or [{"lm_head": "head", "": "root"}.get(last, "embedding")]
        found |= dict.fromkeys(kinds, _state_of(unit, optimizer, shape, machine))
    again = _State(**dict.fromkeys(_State._fields, 0) | {"whole_bytes": found["embedding"].whole_bytes})
    return {"head": found["embedding"], "head again": again, **found}


def _state_of(unit: UnitSpec, optimizer: str, shape: Transformer, machine: Machine) -> _State:
    device, (shards, replicas), is_direct = machine
    account = account_of([updates_of([unit], OPTIMIZERS[optimizer], shape.sides_of)], device)
    # What is updated whole is kept by one rank, which may be another one.
    states_bytes = (
        0 if OPTIMIZERS[optimizer].whole else sum(nbytes + counters for _, nbytes, _, counters in account.states)
    )
    kept = [one.bytes_of(one.parameters, one.formats.param) for one in unit.buckets]
    parameters_bytes, padding_bytes = sum(map(sum, kept)), sum(padding for _, padding in kept)
    masters_bytes = sum(one.has_masters * sum(one.bytes_of(one.states, one.formats.master)) for one in unit.buckets)
    is_cut = any(one.row.cuts_parameters for one in unit.buckets)
    held_bytes = sum(sum(one.held_gradient_bytes) for one in unit.reduced)
    sent = [one for one in unit.reduced if not one.lands_on_sums]
    apart = [one for one in sent if not one.holds_whole_gradients and not is_direct]
    reduce_s = 0.0
    for one in sent:
        nbytes = one.layout.full_numel * itemsize(one.formats.reduce)
        reduce_s += device.collective_s("all-reduce" if one.updates_all else "reduce", nbytes, shards)
        reduce_s += device.collective_s("all-reduce", nbytes // one.layout.world_size, replicas)
    published_bytes = sum(
        one.layout.full_numel * itemsize(one.formats.param) for one in unit.buckets if one.is_published
    )
    return _State(
        resident_bytes=parameters_bytes + masters_bytes + states_bytes,
        held_bytes=held_bytes,
        buffer_bytes=sum(one.layout.full_numel * itemsize(Native().lands_as(one)) for one in apart),
        whole_bytes=0 if is_direct else unit.full_bytes,
        movable_bytes=masters_bytes + states_bytes + held_bytes + (parameters_bytes if is_cut else padding_bytes),
        moved_bytes=sum(account.moved_bytes),
        gather_s=device.collective_s("gather", unit.full_bytes, shards),
        reduce_s=reduce_s,
        publish_s=device.collective_s("gather", published_bytes, shards),
    )


def _works(shape: Transformer, options: Options, device: Device) -> dict[str, _Work]:
    """Return what units of each kind do."""
    timed: Timed = device, options.formats.param, options.formats.param
    summed, tensor = (timed, options.system.queue_s(device)[0]), options.spans["tensor"]
    load, treatment = load_of(options), treatment_of(options.row.activations.chain, options)
    is_treated = {"embedding": False, "block": True, "head": False}
    is_treated |= {"dense": True} if shape.experts and shape.dense_layers else {}
    return {
        kind: _work_of(shape, load, kind, treatment if treated else Treatment(), summed, tensor)
        for kind, treated in is_treated.items()
    }


@lru_cache(1024)
def _work_of(
    shape: Transformer, load: Workload, kind: str, treatment: Treatment, summed: tuple[Timed, float], span: Span
) -> _Work:
    parts, device = parts_of(shape, load, kind, treatment, summed), summed[0][0]

    def seconds(run: Iterable[Instruction]) -> float:
        found = 0.0
        for one in run:
            if one.kind == "run":
                found += one.seconds
            elif one.exchange is not None:
                found += device.collective_s(one.exchange.kind, one.exchange.nbytes, span)
        return found

    given_bytes = sum(one.nbytes for one in parts.forward if one.kind == "make" and one.tensor == parts.output)
    most = parts.saved_bytes, parts.forward_bytes, parts.backward_bytes, given_bytes
    queue_s = summed[1] * sum(one.launches for one in (*parts.forward, *parts.backward) if one.kind == "run")
    return _Work(*most, seconds(parts.forward), seconds(parts.backward), queue_s)
