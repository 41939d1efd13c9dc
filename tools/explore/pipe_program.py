"""Programs for pipelines: schedule, what ranks do otherwise than the record says, which rank fails where.

Owns programs as data, and which there are. It must not know the engine or the runner.

Note: programs
    Two places of two ranks. Each chunk has the root and two units; `(1, 2)` as a path uses the first, then the second,
    as in `program.py`. All ranks take this path in each pass, but for *departures*: one rank, in one pass, takes
    another path, or gets no gradient of a unit. *Marks* are the events of one rank in a step of the pipeline: modules
    that it enters and leaves, gradients that land, and messages that it sends, begins to receive, and waits for. A
    failure is at one of them: an exception of user code, or, at a message, the error of a broken connection.
"""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Literal

from .program import Path, flat, orders, orders_again

__all__ = [
    "CHUNKS",
    "Departure",
    "PLACES",
    "PipeFailure",
    "PipeProgram",
    "RANKS",
    "SCHEDULES",
    "departures_in",
    "draw_pipe",
    "plain_programs",
    "smaller_pipes",
    "with_one_departure",
    "with_one_in_each_pass",
]

PLACES, RANKS = 2, 2
"""Places along the pipe, and ranks at each."""
UNITS = 3
"""Of each chunk, with the root."""
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved")
CHUNKS = {"interleaved": 2}
"""Chunks at each place, where they are several."""
MARKS = 23
"""Of one rank for a micro-batch of a chunk, about."""
PLAIN: Path = flat((1, 2))
REDUCES: tuple[Literal["last", "each"], ...] = ("last", "each")


@dataclass(frozen=True)
class Departure:
    """One rank does something else in the forward of one micro-batch, and in its backward.

    Args:
        silent: units, among those of the chunk, that get no gradient though they were used.
    """

    rank: int
    step: int
    chunk: int
    micro_batch: int
    path: Path = PLAIN
    silent: tuple[int, ...] = ()


@dataclass(frozen=True)
class PipeFailure:
    """One rank raises, once, at a mark of a step."""

    rank: int
    step: int
    mark: int


@dataclass(frozen=True)
class PipeProgram:
    """What ranks do in some steps of a pipeline.

    Args:
        is_tied: whether the first and the last chunk have a unit in common.
        is_whole: whether parameters stay whole, as at stages 0 to 2.
        until: when units that were gathered are released: after each "use", after the "backward", behind the "step".
        is_recomputed: whether forwards run twice, the first time without a graph.
    """

    schedule: str
    micro_batches: int
    reduce: Literal["last", "each"] = "last"
    departures: tuple[Departure, ...] = ()
    failure: PipeFailure | None = None
    steps: int = 3
    is_tied: bool = False
    is_whole: bool = False
    until: Literal["use", "backward", "step"] = "use"
    is_recomputed: bool = False

    @property
    def chunks(self) -> int:
        """How many there are at each place."""
        return CHUNKS.get(self.schedule, 1)

    def to_json(self) -> str:
        """Return it as one line, which `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "PipeProgram":
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        departures, failure = fields.pop("departures"), fields.pop("failure")
        some = (Departure(**{**one, "path": tuple(one["path"]), "silent": tuple(one["silent"])}) for one in departures)
        return cls(**fields, departures=tuple(some), failure=PipeFailure(**failure) if failure else None)


# -- all of a kind ----------------------------------------------------------------------------------------------------


def plain_programs(micro_batches: int) -> Iterator[PipeProgram]:
    """Yield the programs without departures: each schedule, each moment of sums; also with a tied unit, recomputed."""
    for name, schedule, reduce in itertools.product(("", "is_tied", "is_recomputed"), SCHEDULES, REDUCES):
        plain = PipeProgram(schedule, micro_batches, reduce)
        yield replace(plain, **{name: True}) if name else plain


def other_paths() -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Yield all that a rank may do otherwise in a forward: path, and units without a gradient."""
    for order in (*orders(UNITS), *orders_again(UNITS)):
        if flat(order) != PLAIN:
            yield flat(order), ()
    yield (1, 2, -2, -1), ()
    yield (2, 1, -1, -2), ()
    for silent in ((1,), (2,), (1, 2)):
        yield PLAIN, silent


def departures_in(program: PipeProgram, step: int, ranks: tuple[int, ...]) -> Iterator[Departure]:
    """Yield the departures of each of these ranks in each pass of a step."""
    for rank in ranks:
        for chunk in range(rank // RANKS, PLACES * program.chunks, PLACES):
            for micro in range(program.micro_batches):
                for path, silent in other_paths():
                    yield Departure(rank, step, chunk, micro, path, silent)


def with_one_departure(program: PipeProgram, steps: tuple[int, ...] = (0, 1)) -> Iterator[PipeProgram]:
    """Yield a program with each departure of one rank: in the pass that agrees, and in the one that follows.

    The ranks of a place are alike but for their names, so one of each departs.
    """
    for step in steps:
        for departure in departures_in(program, step, tuple(range(0, PLACES * RANKS, RANKS))):
            yield replace(program, departures=(departure,), steps=step + 2)


def with_one_in_each_pass(program: PipeProgram, step: int) -> Iterator[PipeProgram]:
    """Yield a program with each way for one rank to use other units, or none, in each forward of a step."""
    passes = [
        (place, chunk, micro)
        for place in range(PLACES)
        for chunk in range(place, PLACES * program.chunks, PLACES)
        for micro in range(program.micro_batches)
    ]
    paths = [flat(order) for order in orders(UNITS) if flat(order) != PLAIN]
    ways = [
        [None, *(Departure(place * RANKS + at, step, chunk, micro, path) for at in range(RANKS) for path in paths)]
        for place, chunk, micro in passes
    ]
    for chosen in itertools.product(*ways):
        yield replace(program, departures=tuple(one for one in chosen if one is not None))


# -- random programs --------------------------------------------------------------------------------------------------


def draw_pipe(seed: int, micro_batches: int) -> PipeProgram:
    """Return the program of a seed: often with departures, on any ranks, at times with a failure.

    The mark of a failure may be behind the last one of its step: then there is none.
    """
    r = random.Random(seed)
    program = PipeProgram(
        r.choice(SCHEDULES),
        micro_batches,
        r.choice(REDUCES),
        steps=r.choice([2, 2, 2, 3, 3, 4]),
        is_tied=r.random() < 0.3,
        is_whole=r.random() < 0.1,
        until=r.choice(["use", "use", "use", "use", "backward", "step"]),
        is_recomputed=r.random() < 0.2,
    )
    found: dict[tuple[int, ...], Departure] = {}
    others = list(other_paths())
    for _ in range(r.choice([0, 1, 1, 1, 2, 3, 6])):
        rank, step = r.randrange(PLACES * RANKS), r.randrange(program.steps - 1)
        chunk = r.randrange(program.chunks) * PLACES + rank // RANKS
        micro = r.randrange(micro_batches)
        found[rank, step, chunk, micro] = Departure(rank, step, chunk, micro, *r.choice(others))
    failure = None
    if r.random() < 0.5:
        mark = r.randrange(MARKS * micro_batches * program.chunks)
        failure = PipeFailure(r.randrange(PLACES * RANKS), r.randrange(program.steps - 1), mark)
    return replace(program, departures=tuple(found.values()), failure=failure)


def smaller_pipes(program: PipeProgram) -> Iterator[PipeProgram]:
    """Yield programs with one thing less."""
    if program.failure is not None:
        yield replace(program, failure=None)
    for departure in program.departures:
        yield replace(program, departures=tuple(one for one in program.departures if one is not departure))
    last = max([one.step for one in (*program.departures, program.failure) if one is not None], default=0)
    if program.steps - 1 > last:
        yield replace(program, steps=program.steps - 1)
    for name in ("is_tied", "is_whole", "is_recomputed"):
        if getattr(program, name):
            yield replace(program, **{name: False})
    if program.until != "use":
        yield replace(program, until="use")
    if program.failure is not None and program.failure.mark:
        yield replace(program, failure=replace(program.failure, mark=program.failure.mark - 1))
