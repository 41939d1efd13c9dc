"""The folder of a run of `zeroshard train` as data of the page: losses, bytes by rank, plan and measurements.

Owns the reading of `metrics.jsonl` and `summary.json`; `zeroshard/train/metrics.py` documents their records. It must
not know torch or import the writer of the files. Read `read_runs` first.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from zeroshard.report.files import parse, read_json, read_text, reading
from zeroshard.report.player import PLAYER_COLUMNS
from zeroshard.report.schema import VERSION, Comparison, Losses, Model, PageData, RankClass

__all__ = ["read_runs"]

_SUMMARY: Final = "summary.json"
_AT_MOST: Final = "transient"
"""The column whose prediction is a peak, not the bytes between steps."""


def read_runs(folders: Sequence[str | Path]) -> PageData:
    r"""Read one or several runs; a run without a summary has only losses.

    Args:
        folders: `runs/NAME`, each with `metrics.jsonl` and, after the end of the run, `summary.json`.

    Returns:
        Data for `write_page`, with the losses of all runs, and the bytes and comparisons of ended runs.

    Raises:
        ValueError: no folder is given, a folder has no run, or a file of a run is damaged or not a regular file.
        OSError: a file cannot be read.

    ```python
    import json, pathlib, tempfile
    from zeroshard.report.runs import read_runs

    with tempfile.TemporaryDirectory() as folder:
        line = json.dumps({"kind": "step", "step": 1, "loss": 5.5})
        pathlib.Path(folder, "metrics.jsonl").write_text(line + "\n")
        assert read_runs([folder])["losses"][0]["loss"] == [5.5]
    ```
    """
    if not folders:
        raise ValueError("folders is empty: give at least one folder of a run, such as runs/NAME")
    runs = [(Path(folder), _read_summary(Path(folder))) for folder in folders]
    ended = [(folder, summary) for folder, summary in runs if summary is not None]
    names = {path: _name(path, summary) for path, summary in runs}
    data = PageData(
        version=VERSION,
        kind="run",
        title=", ".join(names.values()),
        losses=[_read_losses(folder, names[folder]) for folder, _ in runs],
    )
    if not ended:
        return data
    held: set[str] = set()
    ranks: list[RankClass] = []
    comparison: list[Comparison] = []
    for folder, summary in ended:
        # With several runs, labels start with the name of the run.
        label = f"{names[folder]}: " if len(runs) > 1 else ""
        with reading(str(folder / _SUMMARY)):
            held.update(column for rank in summary["ranks"] for column in rank["resident_bytes"])
            ranks += _ranks(summary["ranks"], label)
            comparison += _comparison(summary["ranks"], label)
            if len(ended) == 1:
                data["model"] = Model(name=summary["model"], parameters_numel=summary["parameters_numel"])
                split = {"tensor": summary["tensor"]} if summary.get("tensor", 1) > 1 else {}
                data["options"] = {
                    "row": summary["row"],
                    "ranks": summary["world_size"],
                    **split,
                    "steps": summary["steps"],
                    "tokens/s": round(summary["tokens_per_s"]),
                }
    data["ranks"], data["comparison"] = ranks, comparison
    data["columns"] = [*PLAYER_COLUMNS, *sorted(held - {*PLAYER_COLUMNS})]
    return data


def _name(folder: Path, summary: Mapping[str, Any] | None) -> str:
    return str(summary.get("name", "")) if summary else folder.resolve().name


def _read_summary(folder: Path) -> Mapping[str, Any] | None:
    path = folder / _SUMMARY
    if not path.exists():
        return None
    summary = read_json(path)
    if not isinstance(summary, dict) or not isinstance(summary.get("ranks"), list):
        raise ValueError(f"{path} has no bytes by rank: the file is not from zeroshard train")
    return summary


def _read_losses(folder: Path, name: str) -> Losses:
    """Read the losses of a run, without an incomplete last line."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{folder} has no run: {path.name} is missing; give the folder that zeroshard train wrote")
    losses = Losses(run=name, step=[], loss=[])
    lines = read_text(path).split("\n")
    for number, line in enumerate(lines[:-1], 1):
        where = f"{path}, line {number},"
        record = parse(line, where)
        with reading(where):
            if record["kind"] == "step":
                loss = float(record["loss"])  # non-finite values are stored as strings
                losses["step"].append(int(record["step"]))
                losses["loss"].append(loss if math.isfinite(loss) else None)
    return losses


def _ranks(ranks: Sequence[Mapping[str, Any]], label: str) -> list[RankClass]:
    """Group ranks that hold the same bytes into classes."""
    return [
        RankClass(
            name=f"{label}{_ranks_text(members)}",
            count=len(members),
            resident_bytes={column: nbytes for column, nbytes in ranks[members[0]]["resident_bytes"].items() if nbytes},
            peak_bytes=None,
        )
        for members in _classes([rank["resident_bytes"] for rank in ranks])
    ]


def _comparison(ranks: Sequence[Mapping[str, Any]], label: str) -> list[Comparison]:
    """Compare the held and sent bytes of ranks with predictions, in one line for equal ranks."""
    found = []
    for what, rows in _pairs(ranks).items():
        for members in _classes(rows):
            predicted, measured = rows[members[0]]
            name = f"{label}{what}, {_ranks_text(members)}"
            found.append(Comparison(what=name, unit="B", predicted=predicted, measured=measured))
    return found


def _pairs(ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return (predicted, measured) of each rank, by quantity."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    columns = ranks[0]["predicted_bytes"]
    for column in [*(one for one in PLAYER_COLUMNS if one in columns), *sorted(columns.keys() - {*PLAYER_COLUMNS})]:
        source = "peak_bytes" if column == _AT_MOST else "resident_bytes"
        what = f"{column}, at most" if column == _AT_MOST else column
        pairs[what] = [(rank["predicted_bytes"][column], rank[source].get(column, 0)) for rank in ranks]
    for kind in ranks[0]["predicted_sent_bytes"]:
        pairs[f"sent to {kind}"] = [
            (rank["predicted_sent_bytes"][kind], rank["sent_bytes"].get(kind, 0)) for rank in ranks
        ]
    return {what: rows for what, rows in pairs.items() if any(any(row) for row in rows)}


def _classes(values: Sequence[Any]) -> list[list[int]]:
    """Return the indices of equal values, grouped in the order of their first occurrence."""
    classes: list[list[int]] = []
    for place, value in enumerate(values):
        for members in classes:
            if values[members[0]] == value:
                members.append(place)
                break
        else:
            classes.append([place])
    return classes


def _ranks_text(members: Sequence[int]) -> str:
    if len(members) == 1:
        return f"rank {members[0]}"
    if members[-1] - members[0] == len(members) - 1:
        return f"ranks {members[0]} to {members[-1]}"
    return f"ranks {', '.join(map(str, members))}"
