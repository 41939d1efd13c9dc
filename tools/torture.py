"""Kill a small training with `kill -9` at random, again and again, and count what came of it.

    python -m tools.torture --kills 300
    python -m tools.torture --minutes 60 --seed 7
    python -m tools.torture --kills 200 --ranks 2 4 --tensor 2
    python -m tools.torture --kills 300 --ranks 2 4 --pipe 2 4

Each start trains, saves after every step and goes on from the newest checkpoint; in half of the jobs ranks take
different paths through the model, and in two of three states and parameters are offloaded. One rank, or all, kill
themselves after a random time: while they join, are sharded, compute, communicate, write (at once or in the
background), flush, rename or load. After each kill the newest checkpoint that was known to be committed must be whole,
and the survivors must have ended by themselves in time; at its end each job must have the losses, parameters and states
of one that nothing disturbed, bit for bit. Jobs on a pipe (`--pipe`) draw a schedule, and may die at any action of a
place; half of them take 100 steps, continue after each kill in another layout, and must have losses within 1e-4 of the
undisturbed ones. The exit status is 1 where one had not, and what it left is kept.

Most of the time is waited, so several processes (`--jobs`) share the kinds of jobs and the kills.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.machine import circumstances, write_result
from tests.faults.torture import Counts, Torture

__all__ = ["main"]

PROMISED_S = 10.0
"""Of docs/reliability.md: where a save in the background has to end first, survivors take longest."""


def main() -> None:
    """Run until there were enough kills, or for long enough."""
    parser = argparse.ArgumentParser(description="Kill a training at random and look at what is left.")
    parser.add_argument("--kills", type=int, default=300, help="how many; 0 for no limit")
    parser.add_argument("--minutes", type=float, default=0.0, help="for how long; 0 for no limit")
    parser.add_argument("--seed", type=int, default=1, help="chooses when and whom")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3], help="rank counts to choose from")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], help="stages to choose from")
    parser.add_argument("--tensor", type=int, nargs="+", default=[1], help="sizes of the axis to choose from")
    parser.add_argument("--pipe", type=int, nargs="+", default=[1], help="numbers of places to choose from")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="jobs at a time; one for each core")
    parser.add_argument("--promised", type=float, default=PROMISED_S, help="seconds in which survivors end")
    parser.add_argument("--output", type=Path, help="a file for the counts, as JSON")
    arguments = parser.parse_args()
    if not arguments.kills and not arguments.minutes:
        parser.error("give --kills or --minutes")

    begin_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="zeroshard-torture-"))
    jobs = max(1, min(arguments.jobs, arguments.kills or arguments.jobs))
    # Fresh processes: torch is imported in them, and torch and fork do not go together.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=end_with_parent) as pool:
        parts = [pool.submit(run_part, arguments, folder, (number, jobs), begin_s) for number in range(jobs)]
        counts = sum((part.result() for part in parts), Counts())
    seconds = time.monotonic() - begin_s
    print(f"{seconds:6.0f} s  {line_of(counts)}")
    told = {
        "Where the processes were, by phase": counts.phases,
        "Where the processes were, more closely": counts.places,
        "Jobs run to their end": counts.kinds,
    }
    for what, counted in told.items():
        print(f"{what}:")
        for place, number in counted.most_common():
            print(f"  {number:5}  {place}")
    if exits_s := sorted(counts.exits_s):
        median = statistics.median(exits_s)
        print(f"{len(exits_s)} kills left survivors: gone after {median:.1f} s, at most {exits_s[-1]:.1f} s")
    for problem in counts.problems:
        print(problem)
    if counts.problems:
        print(f"what is left: {folder}")
    else:
        shutil.rmtree(folder)
    if arguments.output:
        found = vars(counts) | {key: dict(getattr(counts, key).most_common()) for key in ("phases", "places", "kinds")}
        found["exits_s"] = [round(one, 2) for one in exits_s]
        found |= {"seed": arguments.seed, "seconds": round(seconds, 1)}
        write_result(arguments.output, circumstances("tools.torture") | found)
    sys.exit(1 if counts.problems else 0)


def run_part(arguments: argparse.Namespace, folder: Path, part: tuple[int, int], begin_s: float) -> Counts:
    """Run one process's share of the kills, and say now and then how far it is."""
    number, parts = part
    kills = arguments.kills // parts + (number < arguments.kills % parts)
    told_s = time.monotonic()

    def is_enough(counts: Counts) -> bool:
        nonlocal told_s
        seconds = time.monotonic() - begin_s
        if time.monotonic() - told_s > 10.0:
            told_s = time.monotonic()
            print(f"{seconds:6.0f} s  {number + 1}/{parts}: {line_of(counts)}", flush=True)
        is_late = bool(arguments.minutes) and seconds >= 60 * arguments.minutes
        return is_late or (bool(arguments.kills) and counts.kills >= kills)

    own = folder / f"part-{number + 1}"
    own.mkdir()
    options = {"part": part, "promised_s": arguments.promised, "tensors": arguments.tensor}
    options["pipes"] = arguments.pipe
    return Torture(own, arguments.seed, arguments.ranks, arguments.stages, **options).run(is_enough)


def end_with_parent() -> None:
    """End this process, and with it its ranks, when the tool is gone, however that ended."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def line_of(counts: Counts) -> str:
    """Return the counts in one line."""
    return (
        f"{counts.kills} kills, {counts.resumed} starts from a checkpoint, {counts.jobs} jobs run to their end, "
        f"{counts.lost} checkpoints lost, {counts.mismatched} jobs not bitwise equal, {counts.failed} starts failed"
    )


if __name__ == "__main__":
    main()
