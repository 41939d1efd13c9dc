"""Conversion of plans, searches and scorecards from JSON into data of the page.

Owns the mapping of their fields to `schema.py`. It must not know torch or the planner. `runs.py` reads runs.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from zeroshard.report.files import read_json, reading
from zeroshard.report.runs import read_runs
from zeroshard.report.schema import (
    VERSION,
    Activation,
    Configuration,
    Defaults,
    Hardware,
    Memory,
    Model,
    PageData,
    Player,
    RankClass,
    Result,
    Source,
)

__all__ = ["page_of_plan", "page_of_search", "read_sources"]

_NAMES: Final = ("ranks", "row", "copies", "tensor", "pipe", "micro-batch", "activations")
_AXES: Final = ("copies", "islands", "tensor", "pipe")
"""Options that divide the ranks into groups, each of which is sharded over its ranks."""
_STAGE: Final = "stage "
_ALIGN: Final = 64
_NAMED: Final = 2
"""The most sources that the title names; of more it says how many there are."""
_PLURALS: Final = MappingProxyType({"plan": "plans", "search": "searches", "run": "runs", "scorecard": "scorecards"})
_VIEWS: Final = MappingProxyType(
    {
        "film": ("film", "lanes", "names"),
        "player": ("player",),
        "frontier": ("frontier",),
        "scorecard": ("scorecard",),
        "comparison": ("comparison",),
        "curves": ("curves",),
    }
)
"""The entries that each view is made of, which come from one file; ranks come from all files."""


def read_sources(paths: Sequence[str | Path]) -> PageData:
    """Read folders of runs, and files of plans, searches and scorecards, as one page's data.

    Args:
        paths: `runs/NAME`, or files of `zeroshard plan --json`, `--search --json` or `zeroshard scorecard --json`. The
            overview shows all of them. If several files have the same other view, the page shows that of the first.

    Raises:
        ValueError: a path is none of these.
        OSError: a file cannot be read.
    """
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    files = [Path(path) for path in paths if not Path(path).is_dir()]
    found: list[PageData] = [page for path in files for page in _read_file(path)]
    if folders:
        found.append(read_runs(folders))
    if not found:
        raise ValueError("No path was given; give a folder of a run, or a file of `zeroshard plan --json`.")
    return _joined(found)


def _joined(pages: Sequence[PageData]) -> PageData:
    """Return one page of several, in which each view names the sources that it shows."""
    data = PageData(version=VERSION, title="", sources=[], shows={}, ranks=[])
    columns: dict[str, None] = {}
    for page in pages:
        first, own = len(data["sources"]), page.get("shows", {})
        data["sources"] += page["sources"]
        for view, entries in _VIEWS.items():
            if page.get(view) and not data.get(view):
                data.update({entry: page[entry] for entry in entries if entry in page})  # type: ignore[typeddict-item,literal-required]
                data["shows"][view] = [first + place for place in own.get(view, range(len(page["sources"])))]
        data["ranks"] += [{**one, "source": first + one.get("source", 0)} for one in page.get("ranks") or ()]  # type: ignore[operator]
        # The indices of a film are into its own columns, which are the first ones.
        more = dict.fromkeys(page.get("columns", ()))
        columns = more | columns if data.get("film") is page.get("film") else columns | more
    if columns:
        data["columns"] = list(columns)
    names = [source["name"] for source in data["sources"]]
    data["title"] = " and ".join(names) if len(names) <= _NAMED else _counts([one["kind"] for one in data["sources"]])
    return data


def _counts(kinds: Sequence[str]) -> str:
    """Return how many there are of each kind: "2 plans, 1 run"."""
    parts = [(kinds.count(kind), kind, plural) for kind, plural in _PLURALS.items()]
    return ", ".join(f"{count} {kind if count == 1 else plural}" for count, kind, plural in parts if count)


def _read_file(path: Path) -> list[PageData]:
    """Return the pages of a file: `plan --system --json` writes a list of plans."""
    stored = read_json(path)
    found = list[PageData]()
    for one in stored if isinstance(stored, list) and stored else [stored]:
        read = next((read for key, read in _READERS.items() if isinstance(one, Mapping) and key in one), None)
        if read is None:
            raise ValueError(f"{path} is not a plan, a search or a scorecard; write one with `--json`.")
        with reading(str(path)):
            found.append(read(one))
    return found


def page_of_plan(plan: Mapping[str, Any]) -> PageData:
    """Return the data of a page for the result of `Plan.to_json`."""
    memory, film, source = plan["memory"], plan["film"], _source_of(plan)
    data = PageData(
        version=VERSION,
        title=source["name"],
        sources=[source],
        columns=film["columns"],
        ranks=[
            RankClass(
                name=one["name"],
                count=one["count"],
                resident_bytes=one["resident_bytes"],
                peak_bytes=one["peak_bytes"],
                total_bytes=one["reserved_bytes"] + memory["outside_bytes"],
                source=0,
            )
            for one in memory["ranks"]
        ],
        names=film["names"],
        film={key: film[key] for key in ("initial", "events", "phases", "ticks")},  # type: ignore[typeddict-item]
        lanes=film["lanes"],
    )
    if player := _player(plan):
        data["player"] = player
    return data


def _source_of(plan: Mapping[str, Any]) -> Source:
    """Return what the overview shows of a plan."""
    options, memory, time = plan["options"], plan["memory"], plan["time"]
    islands = plan.get("islands", {"sent_bytes": 0, "every": 1})  # 0.1.0 wrote none
    sent_bytes = sum(plan["traffic"].values()) + islands["sent_bytes"] // islands["every"]
    program = f" with {options['system']}" if options.get("system", "zeroshard") != "zeroshard" else ""
    results = [
        ("speed of all ranks", time["tokens_per_s"], "tokens/s"),
        ("step", time["step_s"], "s"),
        ("of the device's peak (MFU)", 100 * time["mfu"], "%"),
        ("sent per rank and step", sent_bytes, "B"),
    ]
    return Source(
        kind="plan",
        name=f"{plan['model']['name']}{program} on {options['ranks']} ranks of {options['device']}, {options['row']}",
        verdict=plan["verdict"],
        model=Model(name=plan["model"]["name"], parameters_numel=plan["model"]["parameters"]),
        hardware=_hardware(plan),
        memory=Memory(total_bytes=memory["total_bytes"], parts=memory["total_parts"]),
        results=[Result(what=what, value=value, unit=unit) for what, value, unit in results],
        options=options,
    )


def _hardware(plan: Mapping[str, Any]) -> Hardware:
    memory = plan["memory"]
    usable_bytes = memory["device_bytes"] - memory["outside_bytes"]
    return Hardware(
        name=str(plan["options"]["device"]), capacity_bytes=memory["device_bytes"], usable_bytes=usable_bytes
    )


def _player(plan: Mapping[str, Any]) -> Player | None:
    """Return the stage player of a plan; None for rows that are no ZeRO stage, as with offload."""
    row = str(plan["options"]["row"])
    if not row.removeprefix(_STAGE).isdecimal():
        return None
    sharding, options, hardware = plan["sharding"], plan["options"], _hardware(plan)
    sizes, kept = sharding["element_bytes"], sharding["activations"]
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
        p90_ratio=1 + plan["memory"]["error"]["nine_tenths"],
        defaults=Defaults(
            stage=int(row.removeprefix(_STAGE)),
            ranks=options["ranks"] // math.prod(options.get(axis, 1) for axis in _AXES),
            batch=options["micro-batch"],
            sequence=options["sequence"],
        ),
        total_bytes=plan["memory"]["total_bytes"],
    )


def page_of_search(search: Mapping[str, Any]) -> PageData:
    """Return the data of a page for the result of `Search.to_json`: the frontier, and the plan of the best."""
    plans = [plan for plan in search["best"].values() if plan is not None]
    fastest = {json.dumps(plan["options"], sort_keys=True) for plan in plans}
    configurations = [
        Configuration(
            label=", ".join(f"{name} {one['options'][name]}" for name in _NAMES),
            total_bytes=one["total_bytes"],
            tokens_per_s=one["tokens_per_s"],
            is_best=json.dumps(one["options"], sort_keys=True) in fastest,
            verdict=one["verdict"],
            options=one["options"],
        )
        for one in search["configurations"]
    ]
    source = Source(
        kind="search",
        name=f"{search['model']}: {search['candidates']:,} configurations",
        results=[
            Result(what="configurations", value=search["candidates"], unit=""),
            Result(what="of these listed here", value=len(configurations), unit=""),
            Result(what="listed and fit", value=sum(one["verdict"] == "fits" for one in configurations), unit=""),
        ],
    )
    start = PageData(version=VERSION, title=source["name"], sources=[source])
    if plans:
        # The best plan is a source of its own: its verdict and total are those of one configuration.
        start = page_of_plan(max(plans, key=lambda plan: plan["time"]["tokens_per_s"]))
        (best,) = start["sources"]
        best["name"] = f"the fastest that fits: {best['name']}"
        source |= {"hardware": best["hardware"], "model": best["model"]}
        source["results"] += [{**one, "what": f"{one['what']}, fastest that fits"} for one in best["results"][:1]]
        start["sources"] = [source, best]
        start["shows"] = {"frontier": [0], "film": [1], "player": [1]}
        start["ranks"] = [{**one, "source": 1} for one in start["ranks"] or ()]
    return {**start, "title": source["name"], "frontier": configurations}


def _page_of_scorecard(scorecard: Mapping[str, Any]) -> PageData:
    keys = ("source", "label", "metric", "unit", "predicted", "measured")
    scores = [{key: one[key] for key in keys} for one in scorecard["records"]]
    errors = [abs(one["predicted"] / one["measured"] - 1) for one in scores if one["measured"]]
    results = [
        *[Result(what="median error", value=100 * statistics.median(errors), unit="%") for _ in errors[:1]],
        Result(what="predictions beside measurements", value=len(scores), unit=""),
    ]
    source = Source(kind="scorecard", name="Scorecard", results=results)
    return PageData(version=VERSION, title="Scorecard", sources=[source], scorecard=scores)  # type: ignore[typeddict-item]


_READERS: Final = MappingProxyType({"film": page_of_plan, "frontier": page_of_search, "records": _page_of_scorecard})
"""What reads a file, by an entry that only files of that kind have."""
