"""The command line: what to run, what is told."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import circumstances, write_result

from .exhaustive import Size
from .pipe_program import SCHEDULES, PipeProgram, draw_pipe
from .program import TRANSPORTS, Program, draw
from .work import Counts, exhaust, exhaust_pipes, pipes_randomly, randomly, read, replayed, shrink

__all__ = ["main"]

EVERY_S = 30.0
SIZES = ((2, 4), (3, 3))
"""Ranks, and units with the root."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run programs, print what came of them; 1 where one was wrong."""
    given = _parse(arguments)
    if given.replay is not None:
        return _replay(given)
    begin_s, parts = time.monotonic(), dict[str, dict[str, Any]]()
    known, bad = circumstances("tools.explore"), False
    for name, work in _plan(given):
        told = _Told(name, parts, given.output, known)
        counts = work(told)
        told.end(counts)
        bad |= bool(counts.bad)
        for text, seed, fault in counts.bad[: given.shown]:
            _show(read(text), seed, fault)
    print(f"{time.monotonic() - begin_s:.0f} s in all")
    return int(bad)


def _plan(given: argparse.Namespace) -> list[tuple[str, Callable[["_Told"], Counts]]]:
    if given.pipes:
        return _plan_pipes(given)
    plan: list[tuple[str, Callable[[_Told], Counts]]] = []
    if given.exhaustive:
        sizes = [(given.ranks, given.units)] if given.ranks else SIZES
        for transport in given.transports:
            for ranks, units in sizes:
                size = Size(ranks, units, transport)
                plan.append((f"all: {size}", lambda told, size=size: exhaust(size, given.jobs, told)))  # type: ignore[misc]
    if given.random:
        ranks = f"{given.ranks} ranks" if given.ranks else "2 to 6 ranks"
        plan.append(
            (
                f"random: {ranks}, seeds from {given.seed}",
                lambda told: randomly(given.seed, given.random, given.ranks, given.jobs, told),
            )
        )
    return plan


def _plan_pipes(given: argparse.Namespace) -> list[tuple[str, Callable[["_Told"], Counts]]]:
    count, jobs, share = given.pipes, given.jobs, given.share
    plan: list[tuple[str, Callable[[_Told], Counts]]] = []
    if given.exhaustive:
        fails = not given.without_failures
        name = f"pipelines, {count} micro-batches, each departure of one rank{', one failure at each mark' * fails}"
        name += f", {', '.join(given.schedules)}" * (given.schedules != list(SCHEDULES))
        name += f", share {share[0]} of {share[1]}" * (share[1] > 1)
        options = {"has_failures": fails, "schedules": given.schedules, "share": share}
        plan.append((name, lambda told: exhaust_pipes(count, jobs, told, **options)))
    if given.each_pass:
        name = f"pipelines, {count} micro-batches, one rank in each pass"
        plan.append((name, lambda told: exhaust_pipes(count, jobs, told, has_failures=False, is_each=True)))
    if given.random:
        name = f"pipelines, {count} micro-batches, random, seeds from {given.seed}"
        plan.append((name, lambda told: pipes_randomly(count, given.seed, given.random, jobs, told)))
    return plan


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.explore", description="Explore the order of collectives.")
    parser.add_argument("--exhaustive", action="store_true", help="all programs of two sizes, or of --ranks, --units")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS), help="of these")
    parser.add_argument("--units", type=int, default=3, help="with the root")
    parser.add_argument("--random", type=int, default=0, help="how many random programs")
    parser.add_argument("--ranks", type=int, default=0, help="of each program; by default of 2 to 6")
    parser.add_argument("--pipes", type=int, default=0, help="pipelines of so many micro-batches, 2 places of 2 ranks")
    parser.add_argument("--without-failures", action="store_true", help="with --pipes --exhaustive: no rank fails")
    parser.add_argument(
        "--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), help="with --pipes --exhaustive: of these"
    )
    parser.add_argument("--share", type=_share, default=(1, 1), help="with --pipes --exhaustive: 2/5, the second fifth")
    parser.add_argument("--each-pass", action="store_true", help="with --pipes: a rank departs in each pass, or none")
    parser.add_argument("--seed", type=int, default=1, help="of the first random program; the next ones follow")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--replay", help="a seed, or a program as it was printed: run it, and print its events")
    parser.add_argument("--choices", type=int, help="with --replay: the seed of who goes on")
    parser.add_argument("--shown", type=int, default=3, help="how many failures to shrink and print")
    parser.add_argument("--output", type=Path, help="a file for the counts, as JSON")
    given = parser.parse_args(arguments)
    if not (given.exhaustive or given.random or given.replay or (given.pipes and given.each_pass)):
        parser.error("give --exhaustive, --random or --replay, or --pipes with --each-pass")
    return given


def _share(text: str) -> tuple[int, int]:
    number, shares = map(int, text.split("/"))
    if not 1 <= number <= shares:
        raise ValueError(text)
    return number, shares


class _Told:
    """Prints and writes how far one part is, now and then."""

    def __init__(self, name: str, parts: dict[str, dict[str, Any]], output: Path | None, known: dict[str, Any]) -> None:
        self._name, self._parts, self._output, self._known = name, parts, output, known
        self._begin_s = self._told_s = time.monotonic()

    def __call__(self, counts: Counts, progress: str) -> None:
        if time.monotonic() - self._told_s > EVERY_S:
            self._told_s = time.monotonic()
            print(f"{self._line(counts)}; {progress}", file=sys.stderr, flush=True)
            self._write(counts, progress)

    def end(self, counts: Counts) -> None:
        """Tell what came of it."""
        print(self._line(counts), flush=True)
        print(f"  {_text(counts.verdicts)}\n  most units at once: {_text(counts.peaks)}", flush=True)
        self._write(counts, "all")

    def _line(self, counts: Counts) -> str:
        states = f", {len(counts.states)} states" if counts.states else ""
        return (
            f"{self._name}: {counts.programs} programs, {counts.runs} runs{states}, {counts.collectives} collectives, "
            f"{len(counts.bad)} wrong, {time.monotonic() - self._begin_s:.0f} s"
        )

    def _write(self, counts: Counts, progress: str) -> None:
        self._parts[self._name] = {
            "progress": progress,
            "programs": counts.programs,
            "runs": counts.runs,
            "states": len(counts.states),
            "collectives": counts.collectives,
            "seconds": round(time.monotonic() - self._begin_s, 1),
            "verdicts, of each program as of the one that was run for it": dict(sorted(counts.verdicts.items())),
            "runs by kind": dict(sorted(counts.kinds.items())),
            "most units at once": dict(sorted(counts.peaks.items())),
            "wrong": [{"program": json.loads(text), "seed": seed, "fault": fault} for text, seed, fault in counts.bad],
        }
        if self._output is not None:
            write_result(self._output, self._known | {"parts": self._parts})


def _text(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _show(program: Program | PipeProgram, seed: int | None, fault: str) -> None:
    print(f"\n{fault}\n  found with {program.to_json()}")
    less, outcome = shrink(program, seed)
    choices = "" if seed is None else f" --choices {seed}"
    print(f"  smaller: python -m tools.explore --replay '{less.to_json()}'{choices}")
    for text in outcome.faults:
        print(f"    {text}")


def _replay(given: argparse.Namespace) -> int:
    is_seed, seeds = given.replay.isdigit(), given.choices
    program = read(given.replay) if not is_seed else draw(int(given.replay), given.ranks)
    if is_seed and given.pipes:
        program = draw_pipe(int(given.replay), given.pipes)
    seed = seeds if seeds is not None or not is_seed else int(given.replay)
    outcome = replayed(program, seed)
    print(program.to_json())
    for rank in outcome.ranks:
        print(f"rank {rank.number}: {rank.ending}")
        for event in rank.order.history.trace.events:
            print(f"  {event.step} {event.phase:8} {event.kind:8} {event.unit or 'root'}")
    print(outcome.verdict, *outcome.faults, sep="\n")
    return int(bool(outcome.faults))
