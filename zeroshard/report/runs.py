"""The folder of a run of `zeroshard train` as data of the page: curves, bytes by rank, plan and measurements.

Owns the reading of `config.toml`, `metrics.jsonl` and `summary.json`; `zeroshard/train/metrics.py` documents their
records. It must not know torch or import the writer of the files. Read `read_runs` first.
"""

import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from zeroshard.report.files import parse, read_json, read_text, reading
from zeroshard.report.player import PLAYER_COLUMNS
from zeroshard.report.schema import (
    VERSION,
    Comparison,
    Curves,
    Heldout,
    Model,
    Option,
    PageData,
    RankClass,
    Result,
    Source,
)

__all__ = ["read_runs"]

_SUMMARY: Final = "summary.json"
_NATS: Final = "nats/token"
_CURVES: Final = ("learning_rate", "grad_norm", "tokens_per_s", "mfu", "memory_bytes")
"""Columns of `Curves` besides the loss, which a record may lack."""
_PLACES: Final = ("run.name", "run.folder")
_AT_MOST: Final = "transient"
"""The column whose prediction is a peak, not the bytes between steps."""


def read_runs(folders: Sequence[str | Path]) -> PageData:
    r"""Read one or several runs; a run without a summary has only curves.

    Args:
        folders: `runs/NAME`, each with `metrics.jsonl`, `config.toml` and, after the end of the run, `summary.json`.

    Returns:
        Data for `write_page`, with the curves of all runs, and the bytes and comparisons of ended runs.

    Raises:
        ValueError: no folder is given, a folder has no run, or a file of a run is damaged or not a regular file.
        OSError: a file cannot be read.

    ```python
    import json, pathlib, tempfile
    from zeroshard.report.runs import read_runs

    with tempfile.TemporaryDirectory() as folder:
        line = json.dumps({"kind": "step", "step": 1, "loss": 5.5})
        pathlib.Path(folder, "metrics.jsonl").write_text(line + "\n")
        assert read_runs([folder])["curves"][0]["loss"] == [5.5]
    ```
    """
    if not folders:
        raise ValueError("folders is empty: give at least one folder of a run, such as runs/NAME")
    runs = [(Path(folder), _read_summary(Path(folder))) for folder in folders]
    names = _names(runs)
    read = [_read_curves(folder, names[folder]) for folder, _ in runs]
    curves = [one for one, _ in read]
    _set_clocks(curves, [times for _, times in read])
    data = PageData(
        version=VERSION,
        title=", ".join(names.values()),
        sources=[
            _source(folder, names[folder], summary, one) for (folder, summary), one in zip(runs, curves, strict=True)
        ],
        curves=curves,
    )
    held: set[str] = set()
    ranks: list[RankClass] = []
    comparison: list[Comparison] = []
    for place, (folder, summary) in enumerate(runs):
        if summary is None:
            continue
        # With several runs, labels start with the name of the run.
        label = f"{names[folder]}: " if len(runs) > 1 else ""
        with reading(str(folder / _SUMMARY)):
            held.update(column for rank in summary["ranks"] for column in rank["resident_bytes"])
            ranks += _ranks(summary["ranks"], place)
            comparison += _comparison(summary["ranks"], label)
    if ranks:
        data["ranks"], data["comparison"] = ranks, comparison
        data["columns"] = [*PLAYER_COLUMNS, *sorted(held - {*PLAYER_COLUMNS})]
    return data


def _source(folder: Path, name: str, summary: Mapping[str, Any] | None, curves: Curves) -> Source:
    """Return what the overview shows of a run: its score, and its settings."""
    options = _read_options(folder)
    if summary is None:
        found = [("training loss, last step", next((one for one in reversed(curves["loss"]) if one is not None), None))]
        heldout = curves.get("heldout", Heldout(step=[], loss=[]))["loss"]
        scores = [*[("held-out loss", one) for one in heldout[-1:]], *found]
        results = [Result(what=what, value=value, unit=_NATS) for what, value in scores if value is not None]
        results.append(Result(what="steps", value=curves["step"][-1] if curves["step"] else 0, unit=""))
        return Source(kind="run", name=name, state="unfinished", results=results, options=options)
    with reading(str(folder / _SUMMARY)):
        first, plan, mfu = summary["ranks"][0], summary.get("plan", {}), summary.get("mfu")
        peaks = {key: (plan.get(key) or {}).get("peak_bytes") for key in ("measured", "predicted")}
        losses = [
            ("held-out loss", summary["final_heldout_loss"], _NATS),
            ("bits per byte of held-out text", summary["bits_per_byte"], ""),
            ("training loss, mean of the last steps", summary["final_train_loss"], _NATS),
        ]
        others = [
            ("speed of all ranks", summary["tokens_per_s"], "tokens/s"),
            ("steps", summary["steps"], ""),
            ("of the devices' peak (MFU)", mfu and 100 * mfu, "%"),
            ("tokens", summary["tokens"], ""),
            ("time of the steps", summary["train_s"], "s"),
            ("state memory of rank 0, peak", sum(first["peak_bytes"].values()), "B"),
            ("allocator's peak of rank 0", peaks["measured"], "B"),
            ("allocator's peak of rank 0, planned", peaks["predicted"] if peaks["measured"] else None, "B"),
        ]
        for what, value, _ in others:
            if value is not None and not math.isfinite(float(value)):
                raise ValueError(f"{what} is {value}")
        # Losses of a run that diverged are not finite.
        known = [(what, _finite(value), unit) for what, value, unit in [*losses, *others] if value is not None]
        options = {"ranks": summary["world_size"], **(options or {"row": summary["row"]})}
        options |= {f"version of {library}": str(version) for library, version in summary["versions"].items()}
        return Source(
            kind="run",
            name=name,
            state="interrupted" if summary["is_interrupted"] else "complete",
            model=Model(name=summary["model"], parameters_numel=summary["parameters_numel"]),
            results=[Result(what=what, value=value, unit=unit) for what, value, unit in known],
            options=options,
        )


def _names(runs: Sequence[tuple[Path, Mapping[str, Any] | None]]) -> dict[Path, str]:
    """Return the names of runs; runs of one name are told apart by their folders, as in `zeroshard plot`."""
    found = {path: str(summary.get("name", "")) if summary else path.resolve().name for path, summary in runs}
    count = Counter(found.values())
    return {path: name if count[name] == 1 else str(path) for path, name in found.items()}


def _read_summary(folder: Path) -> Mapping[str, Any] | None:
    path = folder / _SUMMARY
    if not path.exists():
        return None
    summary = read_json(path)
    if not isinstance(summary, dict) or not isinstance(summary.get("ranks"), list):
        raise ValueError(f"{path} has no bytes by rank: the file is not from zeroshard train")
    return summary


def _read_options(folder: Path) -> dict[str, Option]:
    """Return the settings of a run by name, such as "train.steps"; those of its place and name are left out."""
    path = folder / "config.toml"
    if not path.exists():
        return {}
    with reading(str(path)):
        sections = tomllib.loads(read_text(path))
        settings = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {
        name: value if isinstance(value, bool | int | str) or _is_finite(value) else str(value)
        for name, value in settings.items()
        if name not in _PLACES
    }


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _set_clocks(curves: Sequence[Curves], times: Sequence[Sequence[float | None]]) -> None:
    """Give runs that were made at the same time, such as islands, a common clock: seconds since the first step."""
    spans = [[one for one in some if one is not None] for some in times]
    if len(spans) < 2 or not all(spans) or max(map(min, spans)) >= min(map(max, spans)):
        return
    begin = min(map(min, spans))
    for curve, some in zip(curves, times, strict=True):
        curve["clock_s"] = [None if one is None else one - begin for one in some]


def _read_curves(folder: Path, name: str) -> tuple[Curves, list[float | None]]:
    """Read the records of a run, without an incomplete last line; a curve that no record has is left out.

    Returns:
        The curves, and the time of each step in seconds since the epoch.
    """
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{folder} has no run: {path.name} is missing; give the folder that zeroshard train wrote")
    steps = dict[str, list[Any]]((key, []) for key in ("step", "loss", "time", *_CURVES))
    heldout = Heldout(step=[], loss=[])
    lines = read_text(path).split("\n")
    for number, line in enumerate(lines[:-1], 1):
        where = f"{path}, line {number},"
        record = parse(line, where)
        with reading(where):
            if record["kind"] == "step":
                steps["step"].append(int(record["step"]))
                steps["loss"].append(_finite(record["loss"]))
                for key in ("time", *_CURVES):
                    steps[key].append(_finite(record.get(key)))
                if peaks := record.get("peak_bytes"):
                    steps["memory_bytes"][-1] = float(sum(peaks.values()))
            elif record["kind"] == "eval":
                heldout["step"].append(int(record["step"]))
                heldout["loss"].append(_finite(record["loss"]))
    curves = Curves(run=name, step=steps["step"], loss=steps["loss"])
    curves |= {key: steps[key] for key in _CURVES if any(value is not None for value in steps[key])}  # type: ignore[typeddict-item]
    if heldout["step"]:
        curves["heldout"] = heldout
    return curves, steps["time"]


def _finite(value: Any) -> float | None:
    """Return a number of a record; None if it is missing or not finite, which is stored as a string."""
    number = float("nan") if value is None else float(value)
    return number if math.isfinite(number) else None


def _ranks(ranks: Sequence[Mapping[str, Any]], source: int) -> list[RankClass]:
    """Group ranks that hold the same bytes into classes."""
    return [
        RankClass(
            name=_ranks_text(members),
            count=len(members),
            resident_bytes={column: nbytes for column, nbytes in ranks[members[0]]["resident_bytes"].items() if nbytes},
            peak_bytes=None,
            source=source,
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
