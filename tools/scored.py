"""Write what the repository says of published runs, from one scorecard: margins of plans, a result, a table.

    zeroshard scorecard --data published_runs.csv --json > card.json
    python -m tools.scored card.json   # margins.json, benchmarks/results/scorecard.json, the table of docs/plan.md
    python -m tools.scored             # the table and the margins again, from the result

A test compares both with the result.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import circumstances, put_table, write_result

__all__ = ["margins_of", "summary_of", "table_of", "write"]

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "scorecard.json"
MARGINS = ROOT / "zeroshard" / "plan" / "margins.json"
PAGE = ROOT / "docs" / "plan.md"
LEAST, WORST = 5, 0.05
"""The least rows of a line of the table; the part of the rows of time that are listed one by one."""
KEPT = ("groups", "margins", "systems", "sources", "halves", "labels", "skipped")


def summary_of(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a result keeps of a scorecard: all sums, and the rows of time with the largest errors."""
    timed = sorted((one for one in card["records"] if one["group"] == "time"), key=lambda one: -abs(one["error"]))
    rest = [abs(one["error"]) for one in timed[round(WORST * len(timed)) :]]
    worst = timed[: round(WORST * len(timed))]
    apart = [abs(one["error"]) for one in timed if not one["source"].startswith("HF")]
    means = {"without the worst 5%": rest, "outside the playbook": apart}
    return {
        **{key: card[key] for key in KEPT},
        "time_mean_error": {name: sum(errors) / max(1, len(errors)) for name, errors in means.items()},
        "time_worst": [f"{one['source'][:40]}: {one['label']}: {one['error']:+.0%}" for one in worst],
    }


def margins_of(result: Mapping[str, Any]) -> str:
    """Return the text of `margins.json`: a line for each kind of run."""
    lines = [
        f"  {json.dumps(kind)}: "
        + json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in one.items()})
        for kind, one in result["margins"].items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def table_of(result: Mapping[str, Any]) -> str:
    """Return the table of the page: systems and groups with enough rows, and both halves of time."""
    lines = ["| | rows | median error | nine in ten below | within 10% | within 15% |", "|---|--:|--:|--:|--:|--:|"]
    named = {f"{key.partition(': ')[2]}, {key.partition(': ')[0]}": one for key, one in result["systems"].items()}
    named |= {f"time, {name}": one for name, one in result["halves"].items()}
    lines += [
        f"| {name} | {one['count']:,} | {one['median']:.1%} | {one['p90']:.1%} | {one['within_10']:.0%} "
        f"| {one['within_15']:.0%} |"
        for name, one in sorted(named.items())
        if one["count"] >= LEAST
    ]
    return "\n".join(lines)


def write(result: Mapping[str, Any]) -> None:
    """Write the margins and the table."""
    MARGINS.write_text(margins_of(result))
    PAGE.write_text(put_table(PAGE.read_text(), "scorecard", table_of(result)))


if __name__ == "__main__":
    if sys.argv[1:]:
        card = json.loads(Path(sys.argv[1]).read_text())
        write_result(RESULT, {**circumstances("tools.scored"), **summary_of(card)})
    write(json.loads(RESULT.read_text()))
