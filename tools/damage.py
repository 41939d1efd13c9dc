"""Damage a small checkpoint in every way there is, fail every file operation of a save and a load, and count.

    python -m tools.damage

The first that goes unseen, or is not told as it should be, ends it with an error. `make test` does a part of the same.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.machine import circumstances, write_result
from tests.checkpoint import small
from tests.checkpoint.damage import FAULTS, flip_bits, replace_files, swap_files, truncate
from tests.checkpoint.faulty import fail_each_operation_of_load, fail_each_operation_of_save, refuse
from zeroshard.testing import run_ranks

__all__ = ["main"]

TIMEOUT_S = 300.0
WORLD = 2


def main() -> None:
    """Do everything, print the counts, and write them."""
    parser = argparse.ArgumentParser(description="Damage a checkpoint in every way, and count.")
    parser.add_argument("--output", type=Path, help="a file for the counts, as JSON")
    arguments = parser.parse_args()
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zeroshard-damage-") as name:
        counts = damage(Path(name)) | operations(Path(name))
    for what, count in counts.items():
        print(f"{count:8,}  {what}")
    if arguments.output:
        seconds = round(time.monotonic() - begin_s, 1)
        write_result(arguments.output, circumstances("tools.damage") | {"counts": counts, "seconds": seconds})


def damage(folder: Path) -> dict[str, int]:
    """Return how often a checkpoint was damaged, by how."""
    pristine = small.write(folder)
    checkpoint = Path(shutil.copytree(pristine, folder / "damaged"))
    counts = {"bytes": sum(path.stat().st_size for path in pristine.iterdir())}
    counts |= {"bits flipped": flip_bits(checkpoint), "truncations": truncate(checkpoint)}
    for fault in FAULTS:
        place = folder / fault.__name__
        counts[f"files: {fault.__name__.replace('_', ' ')}"] = replace_files(fault, pristine, place)
    return counts | {"files: swap two": swap_files(pristine, folder / "swapped")}


def operations(folder: Path) -> dict[str, int]:
    """Return how many file operations were failed, one at a time, of either rank."""
    counts = {}
    for rank in range(WORLD):
        for what, target, extra in (
            ("save", fail_each_operation_of_save, (refuse,)),
            ("load", fail_each_operation_of_load, ()),
        ):
            place = folder / f"{what}-{rank}"
            found = run_ranks(target, WORLD, str(place), rank, *extra, timeout_s=TIMEOUT_S)[rank]
            counts[f"operations of a {what} that failed on rank {rank}"] = sum(bool(name) for name, _ in found)
    return counts


if __name__ == "__main__":
    main()
