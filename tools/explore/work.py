"""Runs spread over processes, and their counts.

Owns the processes and the sums. Each has a crew of its own.
"""

import gc
import hashlib
import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .exhaustive import Class, Size, first_steps, is_plain, second_steps
from .pipe_program import (
    SCHEDULES,
    PipeProgram,
    draw_pipe,
    plain_programs,
    smaller_pipes,
    with_one_departure,
    with_one_in_each_pass,
)
from .pipe_run import PipeOutcome, failures_of, run_pipe
from .program import Program, draw, smaller
from .run import Outcome, chooser, run
from .world import Crew

__all__ = ["Counts", "crew", "exhaust", "exhaust_pipes", "pipes_randomly", "randomly", "read", "replayed", "shrink"]

MOST_RANKS = 6
SHOWN = 20
Bad = tuple[str, int | None, str]
"""A program that failed, as JSON; the seed of its choices; its first fault."""
_CREW: list[Crew] = []


@dataclass
class Counts:
    """What came of runs.

    Args:
        programs: how many, with those that are like one that was run.
        kinds: runs by what programs do.
        states: what ranks' orders decide by after a first step, as digests.
    """

    programs: int = 0
    runs: int = 0
    collectives: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    peaks: Counter[str] = field(default_factory=Counter)
    states: set[bytes] = field(default_factory=set)
    bad: list[Bad] = field(default_factory=list)

    def add(self, other: "Counts") -> None:
        """Add what another process counted."""
        self.programs += other.programs
        self.runs += other.runs
        self.collectives += other.collectives
        self.verdicts += other.verdicts
        self.kinds += other.kinds
        self.peaks |= other.peaks
        self.states |= other.states
        self.bad = (self.bad + other.bad)[:SHOWN]

    def count(self, program: Any, seed: int | None, outcome: Any, weight: int = 1) -> None:
        """Count a run that stands for `weight` programs."""
        self.programs += weight
        self.runs += 1
        self.collectives += outcome.collectives
        self.verdicts[("one fails: " if program.failure else "") + outcome.verdict] += weight
        self.peaks |= outcome.peaks
        if outcome.faults and len(self.bad) < SHOWN:
            self.bad.append((program.to_json(), seed, outcome.faults[0]))


def crew() -> Crew:
    """Return this process's ranks."""
    if not _CREW:
        _CREW.append(Crew(MOST_RANKS))
    return _CREW[0]


def read(text: str) -> Program | PipeProgram:
    """Return the program that was written as JSON."""
    return PipeProgram.from_json(text) if '"micro_batches"' in text else Program.from_json(text)


def shrink(program: Any, seed: int | None) -> tuple[Any, Any]:
    """Return the smallest program found that fails alike, and its outcome."""
    outcome = replayed(program, seed)
    is_found = True
    while is_found:
        is_found = False
        for less in smaller_pipes(program) if isinstance(program, PipeProgram) else smaller(program):
            found = replayed(less, seed)
            if found.faults and _kind_of(found) & _kind_of(outcome):
                program, outcome, is_found = less, found, True
                break
    return program, outcome


def _kind_of(outcome: Outcome | PipeOutcome) -> set[str]:
    return {"".join(c for c in fault.split(": ", 1)[-1] if not c.isdigit())[:40] for fault in outcome.faults}


def replayed(program: Program | PipeProgram, seed: int | None) -> Outcome | PipeOutcome:
    """Return what comes of a program, with the choices of a seed."""
    choose = None if seed is None else chooser(seed)
    return run_pipe(program, crew(), choose) if isinstance(program, PipeProgram) else run(program, crew(), choose)


def _run(program: Program, seed: int | None, *, keeps_states: bool = False) -> Outcome:
    return run(program, crew(), None if seed is None else chooser(seed), keeps_states=keeps_states)


# -- all programs of a size -------------------------------------------------------------------------------------------


def exhaust(size: Size, jobs: int, told: Callable[[Counts, str], None]) -> Counts:
    """Run all programs of a size."""
    counts, classes = Counts(), dict[bytes, Class]()
    firsts = list(first_steps(size))
    with _pool(jobs) as pool:
        chunks = [firsts[start : start + 50] for start in range(0, len(firsts), 50)]
        for some, found in pool.imap(_first, chunks):
            counts.add(found)
            for program, digest, is_symmetric in some:
                classes.setdefault(digest, Class(program, is_symmetric)).add(program)
            told(counts, f"{counts.runs} of {len(firsts)} first steps")
        # Those that take longest come first, so that processes end together.
        tasks = [(one, size) for one in sorted(classes.values(), key=lambda one: one.plain == 0)]
        for done, found in enumerate(pool.imap_unordered(_second, tasks), 1):
            counts.add(found)
            told(counts, f"second steps behind {done} of {len(tasks)} states")
    return counts


def _first(some: list[Program]) -> tuple[list[tuple[Program, bytes, bool]], Counts]:
    counts, found = Counts(), []
    for program in some:
        outcome = _run(program, None, keeps_states=True)
        counts.count(program, None, outcome)
        counts.kinds[f"1 step, {_kind(program)}"] += 1
        if outcome.verdict == "right":
            state = outcome.states[0]
            assert isinstance(state, tuple)
            digest = hashlib.blake2b(repr(state).encode(), digest_size=12).digest()
            found.append((program, digest, len(set(state)) == 1))
            counts.states.add(digest)
    return found, counts


def _second(task: tuple[Class, Size]) -> Counts:
    counts = Counts()
    first = _run(task[0].first, None)
    for program, weight in second_steps(*task):
        counts.count(program, None, run(program, crew(), behind=first), weight)
        counts.kinds[f"2 steps, {_kind(program)}"] += 1
    return counts


def _kind(program: Program) -> str:
    return "one fails" if program.failure else "plain" if is_plain(program) else "one enters a unit again"


# -- random programs --------------------------------------------------------------------------------------------------


def randomly(first: int, count: int, ranks: int, jobs: int, told: Callable[[Counts, str], None]) -> Counts:
    """Run the programs of `count` seeds, each with choices of its own.

    Args:
        ranks: how many; 0 for 2 to 6.
    """
    counts = Counts()
    tasks = [(start, min(250, first + count - start), ranks) for start in range(first, first + count, 250)]
    with _pool(jobs) as pool:
        for done, found in enumerate(pool.imap_unordered(_drawn, tasks), 1):
            counts.add(found)
            told(counts, f"{min(count, 250 * done)} of {count} programs")
    return counts


def _drawn(task: tuple[int, int, int]) -> Counts:
    first, count, ranks = task
    counts = Counts()
    for seed in range(first, first + count):
        program = draw(seed, ranks)
        counts.count(program, seed, _run(program, seed))
        counts.kinds[f"{program.ranks} ranks"] += 1
    return counts


# -- pipelines --------------------------------------------------------------------------------------------------------


def exhaust_pipes(
    micro_batches: int,
    jobs: int,
    told: Callable[[Counts, str], None],
    *,
    has_failures: bool,
    is_each: bool = False,
    schedules: Collection[str] = SCHEDULES,
    share: tuple[int, int] = (1, 1),
) -> Counts:
    """Run each departure of one rank in a pipeline, alone and with each failure of one rank in the same step.

    Args:
        has_failures: whether ranks fail, too; those of programs without a departure fail in the first two steps.
        is_each: instead, run all programs of which one rank departs in each pass of the second step, or none, without
            failures: for schedules with one chunk at each place.
        share: `(2, 5)` for the second fifth of the programs without a failure; all shares together are all programs.
    """
    tasks: list[tuple[PipeProgram, bool]] = []
    for plain in plain_programs(micro_batches):
        if plain.schedule not in schedules:
            continue
        is_more = plain.is_tied or plain.is_recomputed
        if is_each:
            found = with_one_in_each_pass(plain, 1) if plain.chunks == 1 and not is_more else iter(())
            tasks += [(program, False) for program in found]
            continue
        tasks.append((plain, has_failures))
        tasks += [(program, has_failures and not is_more) for program in with_one_departure(plain)]
    number, shares = share
    return _spread(_pipes, tasks[number - 1 :: shares], 20 if is_each or not has_failures else 1, jobs, told)


def _spread(
    function: Callable[[Any], Counts], tasks: list[Any], size: int, jobs: int, told: Callable[[Counts, str], None]
) -> Counts:
    counts = Counts()
    chunks = [tasks[start : start + size] for start in range(0, len(tasks), size)]
    with _pool(jobs) as pool:
        for done, found in enumerate(pool.imap_unordered(function, chunks), 1):
            counts.add(found)
            told(counts, f"{min(len(tasks), done * size)} of {len(tasks)} programs without a failure")
    return counts


def _pipes(tasks: list[tuple[PipeProgram, bool]]) -> Counts:
    counts = Counts()
    for program, has_failures in tasks:
        outcome = run_pipe(program, crew())
        counts.count(program, None, outcome)
        counts.kinds[_kind_of_pipe(program)] += 1
        if has_failures and not outcome.faults:
            steps = [one.step for one in program.departures] or [0, 1]
            for failed in failures_of(program, outcome, steps):
                counts.count(failed, None, run_pipe(failed, crew()))
                counts.kinds[_kind_of_pipe(failed)] += 1
    return counts


def pipes_randomly(
    micro_batches: int, first: int, count: int, jobs: int, told: Callable[[Counts, str], None]
) -> Counts:
    """Run the pipelines of `count` seeds, each with choices of its own."""
    tasks = [(micro_batches, seed) for seed in range(first, first + count)]
    return _spread(_drawn_pipes, tasks, 50, jobs, told)


def _drawn_pipes(tasks: list[tuple[int, int]]) -> Counts:
    counts = Counts()
    for micro_batches, seed in tasks:
        program = draw_pipe(seed, micro_batches)
        counts.count(program, seed, replayed(program, seed))
        counts.kinds[_kind_of_pipe(program)] += 1
    return counts


def _kind_of_pipe(program: PipeProgram) -> str:
    departs = f"{len(program.departures)} departures" if program.departures else "no departure"
    return f"{program.schedule}, {departs}{', one fails' if program.failure else ''}"


# -- processes --------------------------------------------------------------------------------------------------------


class _Here:
    """A pool of this process alone."""

    def __enter__(self) -> "_Here":
        _prepare()
        return self

    def __exit__(self, *_: object) -> None: ...

    def imap(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        return map(function, tasks)

    imap_unordered = imap


def _pool(jobs: int) -> Any:
    # Fresh processes: torch and fork do not go together.
    if jobs == 1:
        return _Here()
    context = multiprocessing.get_context("spawn")
    return context.Pool(jobs, _prepare_on, (context.Value("i", 0),))


def _prepare_on(count: Any) -> None:
    """Stay on one core: threads that take turns lose half of their time where they change it."""
    cores = sorted(os.sched_getaffinity(0))
    with count.get_lock():
        os.sched_setaffinity(0, {cores[count.value % len(cores)]})
        count.value += 1
    _prepare()


def _prepare() -> None:
    """Leave away the warnings of `core/order.py`, and the collector's work on what was there before.

    What a run leaves is in cycles: without frequent full collections it takes 5 GiB after a quarter of an hour.
    """
    logging.getLogger("zeroshard.core.order").setLevel(logging.ERROR)
    gc.freeze()
    gc.set_threshold(20_000, 5, 5)
