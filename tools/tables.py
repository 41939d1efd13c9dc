"""Write the README's tables from the summaries of real runs.

    for s in 0 1 2 3; do zeroshard train --stage $s --depth 12 --steps 4 --name stage-$s; done
    zeroshard train --name default
    python tools/tables.py runs

Each table stands between `<!-- table: NAME -->` and `<!-- end -->`; what is there is replaced.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

COLUMNS = ("states", "gradients", "parameters", "transient")
KEPT = {
    "stage 0": ("replicated", "replicated", "replicated"),
    "stage 1": ("sharded", "replicated", "replicated"),
    "stage 2": ("sharded", "sharded", "replicated"),
    "stage 3": ("sharded", "sharded", "sharded"),
}


def residency_table(summaries: list[dict[str, Any]]) -> str:
    """Return the residency table: where each column lives, in megabytes of rank 0, and what a step sends."""
    first = summaries[0]
    lines = [
        f"CPU, gloo, 2 cores. {first['model']}; fp32, AdamW, {first['world_size']} ranks.",
        "MB (1e6 bytes) of each rank.",
        "",
        "| | optimizer states | gradients | parameters | kept in all | transient, at most | sent a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in summaries:
        rank = one["ranks"][0]
        if rank["predicted_bytes"] != rank["peak_bytes"]:
            raise SystemExit(f"{one['name']}: predicted {rank['predicted_bytes']}, measured {rank['peak_bytes']}")
        held, sent = rank["resident_bytes"], sum(rank["sent_bytes"][kind] for kind in ("gather", "reduce"))
        cells = [f"{kept} {_mb(held[column])}" for kept, column in zip(KEPT[one["row"]], COLUMNS[:3], strict=True)]
        cells += [_mb(sum(held[column] for column in COLUMNS[:3])), _mb(rank["peak_bytes"]["transient"])]
        lines.append(f"| {one['row']} | {' | '.join(cells)} | {_mb(sent / one['steps'])} |")
    lines += ["", "Predicted before the run, and measured in it: equal to the byte, in every cell."]
    return "\n".join(lines)


def run_table(one: dict[str, Any]) -> str:
    """Return what the default run came to."""
    data = one["data"]
    return "\n".join(
        [
            f"CPU, gloo, 2 cores: `make train`, {one['model'].split(':')[1].strip()} on {data['train_bytes']:,} bytes "
            f"of Python's documentation, {one['row']}, {one['world_size']} ranks.",
            "",
            "| bits per byte, held out | steps | tokens/s | seconds |",
            "|---|---|---|---|",
            f"| {one['bits_per_byte']:.3f} | {one['steps']:,} | {one['tokens_per_s']:,.0f} | {one['wall_s']:.0f} |",
        ]
    )


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.2f}"


def fill(text: str, name: str, table: str) -> str:
    """Return `text` with a table in its place."""
    place = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not place.search(text):
        raise SystemExit(f"there is no place for the table '{name}'")
    return place.sub(lambda match: f"{match[1]}{table}\n{match[2]}", text)


def main(runs: Path, page: Path) -> None:
    """Fill both tables."""
    stages = [json.loads((runs / f"stage-{stage}" / "summary.json").read_text()) for stage in range(4)]
    text = fill(page.read_text(), "residency", residency_table(stages))
    page.write_text(fill(text, "run", run_table(json.loads((runs / "default" / "summary.json").read_text()))))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"), Path(__file__).parent.parent / "README.md")
