"""Conversion of plans, searches and scorecards from JSON into data of the page.

Owns the mapping of their fields to `schema.py`. It must not know torch or the planner. `runs.py` reads runs.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from zeroshard.report.files import read_json, reading
from zeroshard.report.runs import read_runs
from zeroshard.report.schema import (
    VERSION,
    Activation,
    Configuration,
    Defaults,
    Hardware,
    Model,
    PageData,
    Player,
    RankClass,
)

__all__ = ["page_of_plan", "page_of_search", "read_sources"]

_NAMES: Final = ("ranks", "row", "copies", "tensor", "pipe", "micro-batch", "activations")
_STAGE: Final = "stage "
_ALIGN: Final = 64


def read_sources(paths: Sequence[str | Path]) -> PageData:
    """Read folders of runs, and files of plans, searches and scorecards, as one page's data.

    Args:
        paths: `runs/NAME`, or files of `zeroshard plan --json`, `--search --json` or `zeroshard scorecard --json`. If
            several files have the same view, the page shows the view of the first.

    Raises:
        ValueError: a path is none of these.
        OSError: a file cannot be read.
    """
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    files = [Path(path) for path in paths if not Path(path).is_dir()]
    found: list[PageData] = [_read_file(path) for path in files]
    if folders:
        found.append(read_runs(folders))
    if not found:
        raise ValueError("No path was given; give a folder of a run, or a file of `zeroshard plan --json`.")
    data: PageData = found[0]
    for more in found[1:]:
        data = {**more, **data}
    return data


def _read_file(path: Path) -> PageData:
    stored = read_json(path)
    for key, read in (("film", page_of_plan), ("frontier", page_of_search), ("records", _page_of_scorecard)):
        if isinstance(stored, Mapping) and key in stored:
            with reading(str(path)):
                return read(stored)
    raise ValueError(f"{path} is not a plan, a search or a scorecard; write one with `--json`.")


def page_of_plan(plan: Mapping[str, Any]) -> PageData:
    """Return the data of a page for the result of `Plan.to_json`."""
    memory, film, time = plan["memory"], plan["film"], plan["time"]
    details = {"tokens/s": round(time["tokens_per_s"]), "step, s": round(time["step_s"], 4), "verdict": plan["verdict"]}
    return PageData(
        version=VERSION,
        kind="plan",
        title=f"{plan['model']['name']} on {plan['options']['ranks']} ranks of {plan['options']['device']}",
        model=Model(name=plan["model"]["name"], parameters_numel=plan["model"]["parameters"]),
        options={**plan["options"], **details},
        hardware=_hardware(plan),
        columns=film["columns"],
        ranks=[
            RankClass(
                name=one["name"],
                count=one["count"],
                resident_bytes=one["resident_bytes"],
                peak_bytes=one["peak_bytes"],
            )
            for one in memory["ranks"]
        ],
        names=film["names"],
        film={key: film[key] for key in ("initial", "events", "phases", "ticks")},  # type: ignore[typeddict-item]
        lanes=film["lanes"],
        player=_player(plan),
    )


def _hardware(plan: Mapping[str, Any]) -> Hardware:
    memory = plan["memory"]
    usable_bytes = memory["device_bytes"] - memory["outside_bytes"]
    return Hardware(
        name=str(plan["options"]["device"]), capacity_bytes=memory["device_bytes"], usable_bytes=usable_bytes
    )


def _player(plan: Mapping[str, Any]) -> Player:
    sharding, options, hardware = plan["sharding"], plan["options"], _hardware(plan)
    sizes, kept = sharding["element_bytes"], sharding["activations"]
    row = str(options["row"])
    stage = int(row.removeprefix(_STAGE)) if row.startswith(_STAGE) else 0
    return Player(
        units=sharding["units"],
        parameter_bytes=sizes["parameters"],
        gradient_bytes=sizes["gradients"],
        state_bytes=sizes["states"],
        activation=Activation(
            bytes_per_token_block=kept["token_block_bytes"],
            blocks=kept["blocks"],
            fixed_bytes_per_token=kept["token_bytes"],
        ),
        capacity_bytes=hardware["capacity_bytes"],
        usable_bytes=hardware["usable_bytes"],
        align_numel=max(1, _ALIGN // sizes["parameters"]),
        p95_ratio=1 + plan["memory"]["error"]["nine_tenths"],
        defaults=Defaults(
            stage=stage,
            ranks=options["ranks"] // options["tensor"] // options["copies"] // options["pipe"],
            batch=options["micro-batch"],
            sequence=options["sequence"],
        ),
    )


def page_of_search(search: Mapping[str, Any]) -> PageData:
    """Return the data of a page for the result of `Search.to_json`: the frontier, and the plan of the best."""
    plans = [plan for plan in search["best"].values() if plan is not None]
    best = {json.dumps(plan["options"], sort_keys=True) for plan in plans}
    configurations = [
        Configuration(
            label=", ".join(f"{name} {one['options'][name]}" for name in _NAMES),
            peak_bytes=one["peak_bytes"],
            tokens_per_s=one["tokens_per_s"],
            is_best=json.dumps(one["options"], sort_keys=True) in best,
            verdict=one["verdict"],
            options=one["options"],
        )
        for one in search["configurations"]
    ]
    start = page_of_plan(plans[0]) if plans else PageData(version=VERSION, kind="plan", title=search["model"])
    return {**start, "title": f"{search['model']}: {search['candidates']:,} configurations", "frontier": configurations}


def _page_of_scorecard(scorecard: Mapping[str, Any]) -> PageData:
    keys = ("source", "label", "metric", "unit", "predicted", "measured")
    scores = [{key: one[key] for key in keys} for one in scorecard["records"]]
    return PageData(version=VERSION, kind="plan", title="Scorecard", scorecard=scores)  # type: ignore[typeddict-item]
