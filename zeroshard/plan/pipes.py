"""The places of a pipe in a plan: when messages arrive, and the plans of all places as one.

Owns the time of a step over all places. It must not know what a place does with its time and memory: each place has a
film of its own (`step/piped.py`), and schedules are those of `table/pipeline.py`. Needs no torch.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from statistics import median

from zeroshard.plan.job import Options, job_of_shape
from zeroshard.plan.result import Plan
from zeroshard.plan.shape.shapes import Transformer
from zeroshard.plan.step.film import Film, LaneSpan
from zeroshard.plan.step.rank_job import Job
from zeroshard.plan.step.simulate import make_film
from zeroshard.table.pipeline import RECEIVES, Kind, play

__all__ = ["jobs_of_places", "joined", "timed"]


def jobs_of_places(shape: Transformer, options: Options, *, is_coarse: bool = False) -> list[Job]:
    """Return the job of the first rank at each place of a shape, with times."""
    places = range(options.pipe)
    return timed([job_of_shape(shape, options, is_coarse=is_coarse, place=place) for place in places], options)


def timed(jobs: Sequence[Job], options: Options) -> list[Job]:
    """Return the jobs of all places, with the times at which messages arrive and the last backward ends.

    A film of each place without waits for messages tells how long its forwards and backwards take; with these the
    schedule is played over all places.
    """
    pipes = [job.pipe for job in jobs if job.pipe is not None]
    schedule, device = pipes[0].schedule, options.device
    seconds = {kind: [0.0] * schedule.all_chunks for kind in (Kind.FORWARD, Kind.BACKWARD)}
    tails = list[float]()
    for job, pipe in zip(jobs, pipes, strict=True):
        passes = [action for action in pipe.actions if action.kind in seconds]
        took = list(zip(passes, (phase.stop_s - phase.start_s for phase in make_film(job).phases), strict=False))
        for kind, chunk in {(action.kind, action.chunk) for action in passes}:
            seconds[kind][chunk] = median(took_s for action, took_s in took if action[:2] == (kind, chunk))
        # With the last backward, gradients are reduced.
        tails.append(took[-1][1] - seconds[Kind.BACKWARD][passes[-1].chunk])
    most_bytes = max(sum(nbytes for _, nbytes in borders) for borders in pipes[0].messages.values())
    message_s = device.collective_s("send", most_bytes, device.spread(options.pipe, options.place_ranks))
    spans = play(schedule, seconds, message_s)
    end_s = max(one[-1][-1] + tail for one, tail in zip(spans, tails, strict=True))
    ready = [{action: stop_s for action, _, stop_s in one if action.kind in RECEIVES} for one in spans]
    return [
        dataclasses.replace(job, pipe=dataclasses.replace(pipe, ready_s=ready_s, end_s=end_s))
        for job, pipe, ready_s in zip(jobs, pipes, ready, strict=True)
    ]


def joined(plans: Sequence[Plan]) -> Plan:
    """Return the plans of all places as one, with the film of the fullest place."""
    fullest = max(plans, key=lambda one: one.reserved_bytes)
    step_s = max(one.step_s for one in plans)
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
        shown=sum(len(one.ranks) for one in plans[: plans.index(fullest)]),
        save_bytes=max(one.save_bytes for one in plans),
        host_bytes=max(one.host_bytes for one in plans),
        file_bytes=max(one.file_bytes for one in plans),
        idle=tuple(idle),
        later_s=step_s - fullest.step_s,
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
