"""Kill a small training with `kill -9` at random, again and again, and count what came of it.

    python -m tools.torture --kills 300
    python -m tools.torture --minutes 60 --seed 7

Each start trains, saves after every step and goes on from the newest checkpoint; in half of the jobs ranks take
different paths through the model. One rank, or all, kill themselves after a random time: while they join, are sharded,
compute, communicate, write (at once or in the background), flush, rename or load. After each kill the newest checkpoint
that was known to be committed must be whole; at its end each job must have the losses, parameters and states of one
that nothing disturbed, bit for bit. The exit status is 1 where one had not, and what it left is kept.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import circumstances, write_result
from tests.faults.torture import Counts, Torture

__all__ = ["main"]


def main() -> None:
    """Run until there were enough kills, or for long enough."""
    parser = argparse.ArgumentParser(description="Kill a training at random and look at what is left.")
    parser.add_argument("--kills", type=int, default=300, help="how many; 0 for no limit")
    parser.add_argument("--minutes", type=float, default=0.0, help="for how long; 0 for no limit")
    parser.add_argument("--seed", type=int, default=1, help="chooses when and whom")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3], help="rank counts to choose from")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], help="stages to choose from")
    parser.add_argument("--output", type=Path, help="a file for the counts, as JSON")
    arguments = parser.parse_args()
    if not arguments.kills and not arguments.minutes:
        parser.error("give --kills or --minutes")

    begin_s, told_s = time.monotonic(), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="zeroshard-torture-"))

    def is_enough(counts: Counts) -> bool:
        nonlocal told_s
        seconds = time.monotonic() - begin_s
        if time.monotonic() - told_s > 10.0:
            told_s = time.monotonic()
            print(f"{seconds:6.0f} s  {line_of(counts)}", flush=True)
        is_late = bool(arguments.minutes) and seconds >= 60 * arguments.minutes
        return is_late or (bool(arguments.kills) and counts.kills >= arguments.kills)

    counts = Torture(folder, arguments.seed, arguments.ranks, arguments.stages).run(is_enough)
    seconds = time.monotonic() - begin_s
    print(f"{seconds:6.0f} s  {line_of(counts)}")
    for what, counted in (("by phase", counts.phases), ("more closely", counts.places)):
        print(f"Where the processes were, {what}:")
        for place, number in counted.most_common():
            print(f"  {number:5}  {place}")
    for problem in counts.problems:
        print(problem)
    if counts.problems:
        print(f"what is left: {folder}")
    if arguments.output:
        found = vars(counts) | {key: dict(getattr(counts, key).most_common()) for key in ("phases", "places")}
        found |= {"seed": arguments.seed, "seconds": round(seconds, 1)}
        write_result(arguments.output, circumstances("tools.torture") | found)
    sys.exit(1 if counts.problems else 0)


def line_of(counts: Counts) -> str:
    """Return the counts in one line."""
    return (
        f"{counts.kills} kills, {counts.resumed} starts from a checkpoint, {counts.jobs} jobs run to their end, "
        f"{counts.lost} checkpoints lost, {counts.mismatched} jobs not bitwise equal"
    )


if __name__ == "__main__":
    main()
