"""Change checkpoints in every way that a program can think of, and see that each is read right or refused by name.

    python -m tools.fuzz --seconds 3600
    python -m tools.fuzz --replay findings/finding-0.json
    python -m tools.fuzz --what mailbox --seconds 600

With `--what mailbox`, what peers send to the mailbox of islands is changed instead.

Each input may take 1 s of the processor and 64 MiB of memory, must be accepted or end in an error that names the file,
and must leave memory as it was. The exit status is 1 where one did not; it is written to `--findings`. A run ends at a
time, so another run of the same seed tries the same inputs, but not as many.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import circumstances, write_result
from tests.checkpoint.fuzz import Counts, Fuzzer
from tests.outer.fuzz import Fuzzer as MailboxFuzzer

__all__ = ["main"]

TOLD_S = 30.0


def main() -> None:
    """Run for long enough, print the counts, and write them."""
    parser = argparse.ArgumentParser(description="Fuzz what reads checkpoints, or the mailbox of islands.")
    parser.add_argument("--what", choices=("checkpoints", "mailbox"), default="checkpoints", help="what is fuzzed")
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long")
    parser.add_argument("--seed", type=int, default=1, help="chooses the inputs")
    parser.add_argument("--findings", type=Path, default=Path("findings"), help="a folder for inputs that are wrong")
    parser.add_argument("--replay", type=Path, nargs="*", default=[], help="judge these findings, and nothing else")
    parser.add_argument("--output", type=Path, help="a file for the counts, as JSON")
    arguments = parser.parse_args()
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zeroshard-fuzz-") as folder:
        fuzzer = (Fuzzer if arguments.what == "checkpoints" else MailboxFuzzer)(Path(folder), arguments.seed)
        for path in arguments.replay:
            print(f"{path}: {fuzzer.judge_file(path.read_bytes()) or 'right'}")
        while not arguments.replay and (left_s := arguments.seconds - (time.monotonic() - begin_s)) > 0:
            fuzzer.run(min(TOLD_S, left_s), arguments.findings)
            print(f"{time.monotonic() - begin_s:6.0f} s  {line_of(fuzzer.counts)}", flush=True)
    about = circumstances("tools.fuzz")
    print(f"seed {arguments.seed}, commit {about.get('commit', 'unknown')}")
    for finding in fuzzer.counts.findings:
        print(finding)
    if arguments.output:
        seconds = round(time.monotonic() - begin_s, 1)
        write_result(arguments.output, about | vars(fuzzer.counts) | {"seed": arguments.seed, "seconds": seconds})
    sys.exit(1 if fuzzer.counts.findings else 0)


def line_of(counts: Counts) -> str:
    """Return the counts in one line."""
    return (
        f"{counts.inputs} inputs, {counts.accepted} accepted, {counts.edges} edges, {counts.kept} kept, "
        f"at most {counts.slowest_s:.2f} s and {counts.largest_bytes / 2**20:.0f} MiB, {len(counts.findings)} findings"
    )


if __name__ == "__main__":
    main()
