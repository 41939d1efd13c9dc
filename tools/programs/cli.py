"""The command: draws programs, runs them, counts, and shrinks what failed."""

import argparse
import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.machine import circumstances, write_result

from .draw import draw, draw_pair, with_faults, with_offload
from .planted import look_for_mends
from .ranks import BAD, CHUNK, Task, Verdict, examine, reason_of
from .shrink import shrink
from .wide import FEATURES, draw_wide, lacking, table_of, with_untreated
from .write import script_of

__all__ = ["main"]

SHOWN = 5
EVERY_S = 60.0
"""Between reports, at least."""
REFUSED = 0.05
"""Of the programs, at most; programs of the wider drawing may ask for what is refused by name."""
LEAST = (300, 20)
"""Programs that have each feature, and each pair."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run as many programs as asked for; the exit status is 1 where one went wrong or too many were refused."""
    given = _parse(arguments)
    if given.planted is not None:
        look_for_mends(given.planted, tuple(given.search) if given.search else None)
    seeds = [given.replay] if given.replay is not None else range(given.seed, given.seed + given.count)

    def task_of(seed: int) -> Task:
        if given.pairs:
            return draw_pair(seed, given.ranks)
        if given.wide:
            return with_untreated(draw_wide(seed, given.ranks))
        spec = draw(seed, given.ranks)
        spec = with_offload(spec) if given.offload else spec
        return (with_faults(spec) if given.faults else spec,)

    if given.print:
        print(script_of(task_of(seeds[0])[0]))
    if given.count_only:
        _count([draw_wide(seed, given.ranks)["features"] for seed in seeds])
        return
    told = _Told(given, time.monotonic())

    def run(some: Sequence[int]) -> None:
        # Drawn here: all programs of a long run at once would be much memory.
        tasks = [task_of(seed) for seed in some]
        examine(tasks, given.ranks, lambda at, verdict: told(some[at], verdict, tasks[at][0].get("features", ())))
        told.progress()

    with ThreadPoolExecutor(given.jobs) as pool:
        for _ in pool.map(run, [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]):
            pass
    told.report()
    for seed, verdict in told.bad[: given.shown]:
        print(f"\n--- seed {seed}: {verdict.kind}\n{verdict.text}")
        if given.shrink:
            smallest, last = shrink(task_of(seed), verdict)
            print(f"--- the smallest: {last.kind} {last.text}\n{script_of(smallest[0])}")
            if len(smallest) == 2:
                print(f"# the other: options {smallest[1]['options']}, resumes={smallest[1].get('resumes', True)}")
    print("bad seeds:", [(seed, one.kind, _first_line(one)) for seed, one in told.bad])
    sys.exit(1 if told.bad or (not given.wide and told.kinds["refused"] > REFUSED * len(seeds)) else 0)


def _count(drawn: Sequence[Sequence[str]]) -> None:
    """Print how many programs have each feature and each pair."""
    counts = Counter(itertools.chain.from_iterable(drawn))
    both = Counter(pair for features in drawn for pair in itertools.combinations(features, 2))
    print(table_of(counts, both))
    few = lacking(counts, both, *LEAST)
    print(f"features below {LEAST[0]}, pairs below {LEAST[1]}: {', '.join(few) or 'none'}")
    if few:
        sys.exit(1)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.programs", description="Random programs against an oracle.")
    parser.add_argument("--count", type=int, default=200, help="how many programs")
    parser.add_argument("--ranks", type=int, default=2, help="rank processes")
    parser.add_argument("--seed", type=int, default=1, help="of the first program; the next ones follow")
    parser.add_argument("--jobs", type=int, default=1, help="sets of ranks at once")
    parser.add_argument("--pairs", action="store_true", help="compare pairs of programs bit for bit")
    parser.add_argument(
        "--offload", action="store_true", help="move states and parameters, at stage 3, in all programs"
    )
    parser.add_argument(
        "--wide",
        action="store_true",
        help="add features: options, places, treatments, ranks; count them and their pairs",
    )
    parser.add_argument("--count-only", action="store_true", help="with --wide: count features and pairs, run nothing")
    parser.add_argument(
        "--planted", nargs="?", const="", metavar="NAME", help="take mends back, and run the programs that find them"
    )
    parser.add_argument(
        "--search", nargs=2, type=int, metavar=("FIRST", "COUNT"), help="with --planted: seeds to look for finders in"
    )
    parser.add_argument("--faults", action="store_true", help="add steps with gradients that are not finite")
    parser.add_argument("--replay", type=int, help="run the program of one seed")
    parser.add_argument("--print", action="store_true", help="print the first program")
    parser.add_argument("--shrink", action=argparse.BooleanOptionalAction, default=True, help="shrink what failed")
    parser.add_argument("--shown", type=int, default=SHOWN, help="how many failures to shrink and print")
    parser.add_argument("--output", type=Path, help="a file for the counts, as JSON")
    parser.add_argument("--digests", type=Path, help="a file for a line a program: seed, verdict, CRC-32 of its bits")
    return parser.parse_args(arguments)


class _Told:
    """What is known of a run: prints how far it is and writes the counts, once a minute at most and at the end."""

    def __init__(self, given: argparse.Namespace, begin_s: float) -> None:
        self._given, self._begin_s, self._told_s = given, begin_s, begin_s
        self._lock = threading.Lock()
        # Asked for now: the repository may move on while programs run.
        self._circumstances = circumstances("tools.programs")
        self.kinds: Counter[str] = Counter()
        self.bad: list[tuple[int, Verdict]] = []
        self._features: Counter[str] = Counter()
        self._both: Counter[tuple[str, str]] = Counter()
        self._refused: Counter[str] = Counter()
        self._refused_seeds: dict[str, list[int]] = {}
        self._worst, self._digests = 0.0, dict[int, str]()

    def __call__(self, seed: int, verdict: Verdict, features: Sequence[str] = ()) -> None:
        with self._lock:
            self._features.update(features)
            self._both.update(itertools.combinations(features, 2))
            self.kinds[verdict.kind] += 1
            self._digests[seed] = f"{seed} {verdict.kind} {verdict.digest:08x}\n"
            if verdict.kind in BAD:
                self.bad.append((seed, verdict))
                print(f"seed {seed}: {verdict.kind} {_first_line(verdict)}", file=sys.stderr, flush=True)
            elif verdict.kind == "refused":
                reason = reason_of(verdict.text)
                self._refused[reason] += 1
                self._refused_seeds.setdefault(reason, []).append(seed)
            self._worst = max(self._worst, verdict.error if verdict.kind == "right" else 0.0)

    def progress(self) -> None:
        """Print and write what is known, unless that was done a moment ago."""
        with self._lock:
            if time.monotonic() - self._told_s > EVERY_S:
                self._told_s = time.monotonic()
                print(self._line(), file=sys.stderr, flush=True)
                self._write()

    def report(self) -> None:
        """Print and write what came of the run."""
        self.bad.sort(key=lambda one: one[0])
        print(self._line())
        if self._given.wide:
            print(table_of(self._features, self._both))
            few = lacking(self._features, self._both, *LEAST)
            print(f"features below {LEAST[0]}, pairs below {LEAST[1]}: {', '.join(few) or 'none'}")
        if self._given.digests is not None:
            self._given.digests.write_text("".join(text for _, text in sorted(self._digests.items())))
        for reason, count in self._refused.most_common():
            print(f"  refused {count:6}  {reason}  (seed {self._refused_seeds[reason][0]})")
        self._write()

    def _line(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
        seconds = time.monotonic() - self._begin_s
        return f"{seconds:6.0f} s  {self.kinds.total()} programs: {counts}; at most {self._worst:.2g} of the tolerance"

    def _write(self) -> None:
        given = self._given
        if given.output is None:
            return
        result = {
            "ranks": given.ranks,
            "pairs": given.pairs,
            "faults": given.faults,
            "offload": given.offload,
            "wide": given.wide,
            "first seed": given.seed,
            "asked for": given.count,
        }
        result |= {"run": self.kinds.total(), "seconds": round(time.monotonic() - self._begin_s, 1)}
        result |= {"verdicts": {kind: self.kinds[kind] for kind in ("right", "refused", "diverging", *BAD)}}
        result |= {"refused": dict(self._refused.most_common())}
        result |= {"refused, first seeds": {reason: some[:SHOWN] for reason, some in self._refused_seeds.items()}}
        if given.wide:
            result["features"] = {name: self._features[name] for name in FEATURES}
            result["pairs"] = {f"{one} + {other}": self._both[one, other] for one, other in sorted(self._both)}
        result["greatest error, of the tolerance"] = self._worst
        result["bad"] = [{"seed": seed, "verdict": one.kind, "text": _first_line(one)} for seed, one in self.bad]
        write_result(given.output, self._circumstances | result)


def _first_line(verdict: Verdict) -> str:
    return verdict.text.split("\n", 1)[0][:200]
