"""Lose the power at every moment of a save, a retention, an import and an export, in every way, and count.

    python -m tools.powerloss
    python -m tools.powerloss --most 14 --seed 7

File operations are recorded; after each, everything that was not flushed may be on the disk or not, in any combination
(`tests/checkpoint/powerloss.py` says which). Each distinct outcome is laid out on a disk, and the next run starts on
it. The first that loses what was committed, or that a run cannot start on, ends it with an error. `make test` does a
part of the same.
"""

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

from benchmarks.machine import circumstances, write_result
from tests.checkpoint import cuts
from tests.checkpoint.cuts import SCENARIOS
from tests.checkpoint.powerloss import try_all

__all__ = ["main"]


def main() -> None:
    """Try every scenario, print the counts, and write them."""
    parser = argparse.ArgumentParser(description="Lose the power in every way, and count.")
    parser.add_argument("--most", type=int, default=12, help="changes that are combined in every way; more by chance")
    parser.add_argument("--samples", type=int, default=2000, help="combinations drawn at a moment where there are more")
    parser.add_argument("--starts", type=int, help="outcomes of each scenario to start on; all by default")
    parser.add_argument("--seed", type=int, default=1, help="chooses what is drawn")
    parser.add_argument("--only", choices=SCENARIOS, help="one scenario")
    parser.add_argument("--output", type=Path, help="a file for the counts, as JSON")
    arguments = parser.parse_args()
    begin_s, found = time.monotonic(), {}
    for name, scenario in SCENARIOS.items():
        if arguments.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory(prefix="zeroshard-powerloss-") as folder:
            outcome = cuts.prepare(Path(folder))
            operations = scenario.operations(Path(folder, "recorded"))
            limits = {key: getattr(arguments, key) for key in ("most", "samples", "starts", "seed")}
            counts = try_all(operations, outcome, scenario.start, **limits)
        found[name] = dataclasses.asdict(counts)
        print(name, *(f"{count:,} {what}" for what, count in found[name].items()), sep="  ", flush=True)
    if arguments.output:
        seconds = round(time.monotonic() - begin_s, 1)
        write_result(arguments.output, circumstances("tools.powerloss") | {"counts": found, "seconds": seconds})


if __name__ == "__main__":
    main()
