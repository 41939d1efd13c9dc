"""Draw the sample of published runs that the tests judge the planner by.

    python tools/sample_published.py published_runs.csv tests/plan/data/published_sample.csv

Each source gives rows in proportion to its number, and at least one, each group of the largest source at least eight;
which ones is drawn with a fixed seed.
"""

import csv
import random
import sys
from collections import defaultdict
from pathlib import Path

SEED = 14
ROWS = 130
LEAST = 8


def sample(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the drawn rows, in the order of the file."""
    by_source: dict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        name = row["source"].split("[")[0].split(" (")[0]
        # The releases of one project count as one source, and memory, time and labels of the largest apart.
        name = "Megatron-Bridge" if name.startswith("Megatron-Bridge") else name[:24]
        if name.startswith("HF"):
            layout = f"{row['tp'] == '1'} {row['pp'] == '1'}" if row["measured_metric"].startswith("gpu_mem") else ""
            name += f" {row['measured_metric']} {layout}"
        by_source[name].append(place)
    drawn, generator = list[int](), random.Random(SEED)
    for name, places in sorted(by_source.items()):
        number = max(LEAST if name.startswith("HF") else 1, round(ROWS * len(places) / len(rows)))
        drawn += generator.sample(places, min(number, len(places)))
    return [rows[place] for place in sorted(drawn)]


def main(source: str, target: str) -> None:
    """Read a file of published runs, and write the sample."""
    with Path(source).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    with Path(target).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sample(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
