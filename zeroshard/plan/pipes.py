"""The places of a pipe in a plan: when messages arrive, and the plans of all places as one.

Owns the time of a step over all places. It must not know what a place does with its time and memory: each place has a
film of its own (`step/piped.py`), and schedules are those of `table/pipeline.py`. Needs no torch.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache
from statistics import median

from zeroshard.plan.job import Options, Treatment, job_of_shape, load_of, parts_of, treatment_of
from zeroshard.plan.result import Plan
from zeroshard.plan.shape.shapes import Transformer
from zeroshard.plan.step.film import Film, LaneSpan
from zeroshard.plan.step.rank_job import Job
from zeroshard.plan.step.simulate import make_film
from zeroshard.table.pipeline import RECEIVES, Action, Kind, Schedule, Spans, play

__all__ = ["block_seconds", "jobs_of_places", "joined", "quick_film", "timed"]


def block_seconds(shape: Transformer, options: Options) -> tuple[float, ...]:
    """Return the seconds of the kernels of each block, the first with the embedding, the last with the head."""
    load, treatment = load_of(options), treatment_of(options.row.activations.chain, options)

    @cache
    def took_s(kind: str) -> float:
        parts = parts_of(shape, load, kind, treatment if kind in ("block", "dense") else Treatment(), None)
        costs = [one.cost for one in (*parts.forward, *parts.backward) if one.cost is not None]
        return sum(options.device.kernel_s(one, options.formats.param) for one in costs)

    found = [took_s(shape.kind_of(layer)) for layer in range(shape.layers)]
    found[0] += took_s("embedding")
    found[-1] += took_s("head")
    return tuple(found)


def jobs_of_places(shape: Transformer, options: Options) -> list[Job]:
    """Return the job of the first rank at each place of a shape, with times."""
    jobs, quick = (
        [job_of_shape(shape, options, is_coarse=is_coarse, place=place) for place in range(options.pipe)]
        for is_coarse in (False, True)
    )
    return timed(jobs, options, quick)


def timed(jobs: Sequence[Job], options: Options, quick: Sequence[Job] = ()) -> list[Job]:
    """Return the jobs of all places, with the times at which messages arrive and the last backward ends.

    Args:
        quick: the same with coarse units, which take as long.

    Raises:
        ValueError: units stay whole after their use, so what a pass gathers depends on the passes before it.
    """
    if any(unit.is_held for job in jobs for unit in job.units):
        raise ValueError("parameters= of a pipe that stay whole after their use are not planned: plan 'sharded'.")
    schedule = options.training
    spans, end_s = _played(schedule, [(job, make_film(job)) for job in quick or jobs], options)
    found = list[Job]()
    for job, one in zip(jobs, spans, strict=True):
        assert job.pipe is not None
        ready_s = {action: stop_s for action, _, stop_s in one if action.kind in RECEIVES}
        found.append(dataclasses.replace(job, pipe=dataclasses.replace(job.pipe, ready_s=ready_s, end_s=end_s)))
    return found


def quick_film(shape: Transformer, options: Options) -> tuple[Job, Film, float, float]:
    """Return job and film of the fullest place, with coarse units, and the seconds of all passes and of a step.

    Of places with equal layers, the first one is simulated: it has the most micro-batches in flight. With "1f1b" these
    are no more than places, as are gradients under way, so the film has no more than both; with "interleaved" no more
    than two rounds.
    """
    schedule = options.training
    most = 2 * options.pipe + (options.schedule == "1f1b")
    is_short = options.schedule == "1f1b" or options.micro_batches % options.pipe == 0
    if options.schedule in ("1f1b", "interleaved") and is_short:
        options = dataclasses.replace(options, micro_batches=min(options.micro_batches, most))
    layers, kinds = options.layers_of(shape), dict[tuple[object, ...], tuple[Job, Film]]()
    places = list[tuple[Job, Film]]()
    for place in range(options.pipe):
        own = [layers[chunk] for chunk in schedule.chunks_of(place)]
        kind = place == 0, place == options.pipe - 1, *map(len, own)
        if shape.dense_layers or kind not in kinds:
            job = job_of_shape(shape, options, is_coarse=True, place=place)
            kinds[kind] = job, make_film(job, is_settled=True)
        places.append(kinds[kind])
    _, end_s = _played(schedule, places, options)
    update_s = max(film.step_s - film.phases[-1].start_s for _, film in places)
    return *max(places, key=lambda one: one[1].peak[0]), end_s, end_s + update_s


def _played(schedule: Schedule, places: Sequence[tuple[Job, Film]], options: Options) -> tuple[Spans, float]:
    """Return when each action of each place runs, and when the last backward ends.

    Args:
        places: job and film of each place; of the film, how long passes take and when first forwards end.
    """
    seconds = {kind: [0.0] * schedule.all_chunks for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)}
    tails, most_bytes = list[float](), 0
    longer_s, least_s = dict[Action, float](), dict[Action, float]()
    for place, (job, film) in enumerate(places):
        assert job.pipe is not None
        passes = [action for action in job.pipe.actions if action.kind in seconds]
        numbers = dict(zip(job.pipe.chunks, schedule.chunks_of(place), strict=True))  # a film may be of another place
        for kind, chunk in {(action.kind, action.chunk) for action in passes}:
            phases = [one for action, one in zip(passes, film.phases, strict=False) if action[:2] == (kind, chunk)]
            took_s, number = [one.stop_s - one.start_s for one in phases], numbers[chunk]
            # The first forward waits for what the last update publishes; with the last backward, gradients are reduced.
            alike = {Kind.FORWARD: took_s[1:], Kind.BACKWARD: took_s[:-1]}.get(kind, took_s)
            seconds[kind][number] = median(alike or took_s)
            if kind is Kind.FORWARD:
                least_s[Action(kind, number, 0)] = phases[0].stop_s
            elif kind is Kind.BACKWARD:
                last = Action(kind, number, schedule.micro_batches - 1)
                longer_s[last] = took_s[-1] - seconds[kind][number]
        tails.append(longer_s.pop(Action(Kind.BACKWARD, numbers[passes[-1].chunk], schedule.micro_batches - 1)))
        most_bytes = max(sum(nbytes for _, nbytes in borders) for borders in job.pipe.messages.values())
    sent_s = options.device.collective_s("send", most_bytes, options.spans["pipe"])
    if options.system.message_s:  # the host waits for the messages, and queues nothing meanwhile
        for some in seconds.values():
            some[:] = [took_s + options.system.message_s / 2 + sent_s for took_s in some]
    spans = play(schedule, seconds, sent_s, longer_s, least_s)
    return spans, max(one[-1][-1] + tail for one, tail in zip(spans, tails, strict=True))


def joined(plans: Sequence[Plan], cut: Sequence[str]) -> Plan:
    """Return the plans of all places as one, with the film of the fullest place."""
    fullest = max(plans, key=lambda one: one.reserved_bytes)
    ranks = [
        dataclasses.replace(one, name=f"place {place}" + f", {one.name}" * (len(plan.ranks) > 1))
        for place, plan in enumerate(plans)
        for one in plan.ranks
    ]
    end_s = max(one.film.phases[-1].start_s for one in plans)
    idle = [1 - sum(stop_s - start_s for _, start_s, stop_s in one.film.phases[:-1]) / end_s for one in plans]
    lanes = [
        span
        for place, one in enumerate(plans)
        for span in _lane(f"place {place}, idle {idle[place]:.0%}", one.film, end_s)
    ]
    return dataclasses.replace(
        fullest,
        ranks=tuple(ranks),
        film=dataclasses.replace(fullest.film, lanes=(*lanes, *fullest.film.lanes)),
        shown=sum(len(one.ranks) for one in plans[: plans.index(fullest)]) + fullest.shown,
        save_bytes=max(one.save_bytes for one in plans),
        host_bytes=max(one.host_bytes for one in plans),
        file_bytes=max(one.file_bytes for one in plans),
        notes=tuple(dict.fromkeys(note for one in plans for note in one.notes)),
        idle=tuple(idle),
        cut=tuple(cut),
        later_s=max(one.step_s for one in plans) - fullest.step_s,
    )


def _lane(name: str, film: Film, end_s: float) -> Iterator[LaneSpan]:
    """Yield what a place does until the last backward of all places, with the waits between."""
    before_s = 0.0
    for phase, start_s, stop_s in film.phases[:-1]:
        if start_s > before_s:
            yield LaneSpan(name, before_s, start_s, "idle", is_exposed=True)
        yield LaneSpan(name, start_s, before_s := stop_s, phase)
    if end_s > before_s:
        yield LaneSpan(name, before_s, end_s, "idle", is_exposed=True)
