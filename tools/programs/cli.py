"""The command: draws programs, runs them, counts, and shrinks what failed."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.machine import circumstances, write_result

from .draw import draw, draw_pair
from .ranks import BAD, Task, Verdict, examine, reason_of
from .shrink import shrink
from .write import script_of

__all__ = ["main"]

SHOWN = 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Run as many programs as asked for; the exit status is 1 where one went wrong."""
    given = _parse(arguments)
    seeds = [given.replay] if given.replay is not None else range(given.seed, given.seed + given.count)
    begin_s = time.monotonic()
    tasks: list[Task] = [draw_pair(seed, given.ranks) if given.pairs else (draw(seed, given.ranks),) for seed in seeds]
    if given.print:
        print(script_of(tasks[0][0]))
    told = _Told(len(tasks), begin_s)
    parts = [list(range(job, len(tasks), given.jobs)) for job in range(given.jobs)]

    def run(part: Sequence[int]) -> list[Verdict]:
        return examine([tasks[at] for at in part], given.ranks, told)

    with ThreadPoolExecutor(given.jobs) as pool:
        found = {}
        for part, some in zip(parts, pool.map(run, parts), strict=True):
            found |= dict(zip(part, some, strict=True))
    verdicts = [found[at] for at in range(len(tasks))]
    seconds = round(time.monotonic() - begin_s, 1)
    print(f"{seconds:.0f} s  {_line(verdicts)}")
    refused = Counter(reason_of(one.text) for one in verdicts if one.kind == "refused")
    for reason, count in refused.most_common():
        print(f"  refused {count:6}  {reason}")
    bad = [(seed, task, one) for seed, task, one in zip(seeds, tasks, verdicts, strict=True) if one.kind in BAD]
    for seed, task, verdict in bad[: given.shown]:
        print(f"\n--- seed {seed}: {verdict.kind}\n{verdict.text}")
        if given.shrink:
            smallest, last = shrink(task, verdict)
            print(f"--- the smallest: {last.kind} {last.text}\n{script_of(smallest[0])}")
            if len(smallest) == 2:
                print(f"# the other: options {smallest[1]['options']}, resumes={smallest[1].get('resumes', True)}")
    print("bad seeds:", [(seed, one.kind, one.text.split("\n")[0][:100]) for seed, _, one in bad])
    if given.output:
        kinds = Counter(one.kind for one in verdicts)
        result = {"ranks": given.ranks, "seed": given.seed, "count": len(tasks), "pairs": given.pairs}
        result |= {"verdicts": dict(kinds), "refused": dict(refused), "seconds": seconds}
        result["bad seeds"] = [seed for seed, _, _ in bad]
        write_result(given.output, circumstances("tools.programs") | result)
    sys.exit(1 if bad else 0)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.programs", description="Random programs against an oracle.")
    parser.add_argument("--count", type=int, default=200, help="how many programs")
    parser.add_argument("--ranks", type=int, default=2, help="rank processes")
    parser.add_argument("--seed", type=int, default=1, help="of the first program; the next ones follow")
    parser.add_argument("--jobs", type=int, default=1, help="sets of ranks at once")
    parser.add_argument("--pairs", action="store_true", help="compare pairs of programs bit for bit")
    parser.add_argument("--replay", type=int, help="run the program of one seed")
    parser.add_argument("--print", action="store_true", help="print the first program")
    parser.add_argument("--shrink", action=argparse.BooleanOptionalAction, default=True, help="shrink what failed")
    parser.add_argument("--shown", type=int, default=SHOWN, help="how many failures to shrink and print")
    parser.add_argument("--output", type=Path, help="a file for the counts, as JSON")
    return parser.parse_args(arguments)


class _Told:
    """Prints how far the run is, every ten seconds."""

    def __init__(self, count: int, begin_s: float) -> None:
        self._count, self._begin_s, self._told_s = count, begin_s, begin_s
        self._known: list[Verdict] = []

    def __call__(self, number: int, verdict: Verdict) -> None:
        self._known.append(verdict)
        if time.monotonic() - self._told_s > 10.0:
            self._told_s = time.monotonic()
            print(f"{self._told_s - self._begin_s:6.0f} s  {_line(self._known)}", file=sys.stderr, flush=True)


def _line(verdicts: Sequence[Verdict]) -> str:
    kinds = Counter(one.kind for one in verdicts)
    worst = max((one.error for one in verdicts if one.kind == "right"), default=0.0)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"{len(verdicts)} programs: {counts}; at most {worst:.2g} of the tolerance"
