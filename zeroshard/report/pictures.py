"""Pictures of a plan or a run for papers and READMEs: PNG and SVG files, one per view with data.

Owns the drawings. Needs matplotlib (the extra `zeroshard[report]`), imported when a picture is drawn. It must not know
torch or the source of the data (`zeroshard/report/schema.py`). Read `write_pictures` first.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from zeroshard.report.check import check_page
from zeroshard.report.player import PLAYER_COLUMNS, player_total, rank_bytes, table_rows
from zeroshard.report.schema import Defaults, Hardware, PageData
from zeroshard.table.sizes import GIB

__all__ = ["save_figures", "write_pictures"]

_BAND: Final = 0.05
_DPI: Final = 160
_BINS: Final = 300
_COLORS: Final = MappingProxyType(
    {
        "parameters": "#0072B2",
        "gradients": "#E69F00",
        "states": "#009E73",
        "padding": "#8C8C8C",
        "activations": "#56B4E9",
        "transient": "#CC79A7",
    }
)
"""The palette of Okabe and Ito, also used on the page."""
_REST: Final = "#D5D9DF"
_SERIES: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
_MARKERS: Final = "osv^DX"
_VERDICTS: Final = MappingProxyType({"fits": ("#009E73", "o"), "tight": ("#E69F00", "^"), "no": ("#D55E00", "x")})


def write_pictures(
    data: PageData | Mapping[str, Any], folder: str | Path, formats: Sequence[str] = ("png", "svg")
) -> list[Path]:
    """Draw pictures of the data: stages, film, frontier, scorecard, comparison and losses.

    Args:
        data: as in `write_page`.
        folder: created if missing; files of the same names are overwritten.
        formats: formats of the files: "png", "svg", or another format of matplotlib.

    Returns:
        The files, each `NAME.FORMAT`.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError, ValueError: the data does not conform to `zeroshard/report/schema.py`.
        OSError: a file cannot be written.
    """
    check_page(data)
    drawings: dict[str, tuple[str, Callable[..., None]]] = {
        "stages": ("player", _draw_stages),
        "film": ("film", _draw_film),
        "frontier": ("frontier", _draw_frontier),
        "scorecard": ("scorecard", _draw_scorecard),
        "comparison": ("comparison", _draw_comparison),
        "losses": ("curves", _draw_losses),
    }
    there = {name: functools.partial(draw, data=data) for name, (key, draw) in drawings.items() if data.get(key)}
    return save_figures(there, folder, formats)


def save_figures(
    drawings: Mapping[str, Callable[[Any], None]], folder: str | Path, formats: Sequence[str]
) -> list[Path]:
    """Draw each picture on separate axes, and save it as `NAME.FORMAT`.

    Args:
        drawings: for each name, a function that draws on the given axes.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    matplotlib, figure_type = _need_matplotlib()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in drawings.items():
        figure = figure_type(figsize=(7.2, 4.0), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        for suffix in formats:
            paths.append(folder / f"{name}.{suffix}")
            # Without a date, and with fixed ids, equal data gives an equal file.
            with matplotlib.rc_context({"svg.hashsalt": name}):
                figure.savefig(paths[-1], dpi=_DPI, metadata={"Date": None} if suffix == "svg" else None)
    return paths


def _need_matplotlib() -> tuple[Any, Any]:
    try:
        return importlib.import_module("matplotlib"), importlib.import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as error:
        raise ImportError(f'pictures need {error.name!r}; install it with: pip install "zeroshard[report]"') from None


def _draw_stages(axes: Any, data: PageData) -> None:
    """Draw one bar per row of the table."""
    player = data["player"]
    assert player is not None
    first = player.get("defaults", Defaults(stage=0, ranks=8, batch=1, sequence=2048))
    setting = {"ranks": first["ranks"], "batch": first["batch"], "sequence": first["sequence"]}
    stages = range(len(table_rows()))
    names = [f"stage {stage}" for stage in stages]
    totals = [player_total(player, stage=stage, **setting) for stage in stages]
    _stack(axes, names, [rank_bytes(player, stage=stage, **setting) for stage in stages], totals)
    axes.axhline(player["capacity_bytes"] / GIB, color="black", linewidth=1)
    capacity = player["capacity_bytes"] / GIB
    axes.annotate("device", (1, capacity), xycoords=("axes fraction", "data"), va="bottom", ha="right", fontsize=9)
    axes.margins(y=0.08)
    axes.set_ylabel("GiB of a rank, in total")
    where = f"{setting['ranks']} ranks, batch {setting['batch']} of {setting['sequence']:,} tokens a rank"
    axes.set_title(f"{_title_of(data, 'player')}: {where}", fontsize=10)


def _title_of(data: PageData, view: str) -> str:
    """Return the name of the model or the plan that a view shows."""
    sources = data.get("sources", [])
    shown = [sources[place] for place in data.get("shows", {}).get(view, range(len(sources)))]
    model = shown[0].get("model") if len(shown) == 1 else None
    return model["name"] if model else shown[0]["name"] if len(shown) == 1 else data["title"]


def _hardware_of(data: PageData, view: str) -> Hardware | None:
    sources = data.get("sources", [])
    shown = data.get("shows", {}).get(view, range(len(sources)))
    return sources[shown[0]].get("hardware") if shown else None


def _stack(axes: Any, names: Sequence[str], bars: Sequence[Mapping[str, float]], totals: Sequence[int]) -> None:
    """Draw bars that reach up to the totals: columns, and the rest, or columns that are scaled to have none."""
    base = np.zeros(len(bars))
    scale = np.array([min(1.0, total / (sum(bar.values()) or 1)) for bar, total in zip(bars, totals, strict=True)])
    for column in PLAYER_COLUMNS:
        heights = np.array([bar.get(column, 0) / GIB for bar in bars]) * scale
        if heights.any():
            axes.bar(names, heights, bottom=base, width=0.6, label=column, color=_COLORS.get(column))
        base += heights
    rest = np.array(totals) / GIB - base
    axes.bar(names, rest, bottom=base, width=0.6, label="other", color=_REST)
    for place, total in enumerate(totals):
        axes.annotate(f"{total / GIB:.1f}", (place, total / GIB), ha="center", va="bottom", fontsize=9)
    axes.legend(frameon=False, fontsize=8)


def _draw_film(axes: Any, data: PageData) -> None:
    """Draw memory over a step, stacked by column, with its peak."""
    film, columns = data["film"], data["columns"]
    assert film is not None
    events, first = film["events"], film.get("initial")
    bytes_of, column_of = np.array(events["nbytes"], dtype=np.int64), np.array(events["column"], dtype=np.int64)
    stacks = np.zeros((len(columns), len(bytes_of) + 1), dtype=np.int64)
    for column in range(len(columns)):
        start = sum(n for n, c in zip(first["nbytes"], first["column"], strict=True) if c == column) if first else 0
        stacks[column] = start + np.concatenate([[0], np.cumsum(np.where(column_of == column, bytes_of, 0))])
    times = np.concatenate([[0.0], np.array(events["t_s"], dtype=float)]) * 1e3
    totals = stacks.sum(axis=0)
    peak = int(totals.argmax())
    kept = _kept_moments(totals)
    axes.stackplot(
        times[kept],
        stacks[:, kept] / GIB,
        labels=columns,
        colors=[_COLORS.get(name, "#F0E442") for name in columns],
        step="post",
    )
    axes.plot(times[peak], totals[peak] / GIB, "kv", markersize=5)
    side = "right" if times[peak] > times[-1] / 2 else "left"
    label, at = f"peak {totals[peak] / GIB:.2f} GiB", (times[peak], totals[peak] / GIB)
    axes.annotate(label, at, xytext=(0, 6), textcoords="offset points", ha=side, fontsize=9)
    axes.margins(x=0)
    axes.set_ylim(0, 1.12 * totals[peak] / GIB)
    for phase in film.get("phases", []):
        axes.axvline(phase["stop_s"] * 1e3, color="black", linewidth=0.6, alpha=0.5)
    axes.set_xlabel("time in the step, ms")
    axes.set_ylabel("GiB")
    axes.set_title(_title_of(data, "film"), fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=len(columns))


def _kept_moments(totals: Any) -> Any:
    """Return the minimum and maximum of each of many equal intervals, which preserves all peaks."""
    edges = np.linspace(0, len(totals), _BINS + 1).astype(int)
    kept = {0, len(totals) - 1}
    for start, stop in itertools.pairwise(edges):
        if stop > start:
            part = totals[start:stop]
            kept |= {int(start + part.argmin()), int(start + part.argmax())}
    return np.array(sorted(kept))


def _draw_frontier(axes: Any, data: PageData) -> None:
    """Draw tokens/s against the memory of all configurations."""
    found = data["frontier"] or []
    for verdict, (color, marker) in _VERDICTS.items():
        some = [one for one in found if one["verdict"] == verdict]
        axes.scatter(
            [one["total_bytes"] / GIB for one in some],
            [one["tokens_per_s"] for one in some],
            s=18,
            c=color,
            marker=marker,
            label=verdict,
        )
    best = [one for one in found if one["is_best"]]
    axes.scatter(
        [one["total_bytes"] / GIB for one in best],
        [one["tokens_per_s"] for one in best],
        s=160,
        c="#009E73",
        marker="*",
        edgecolors="black",
        label="best that fits",
    )
    if hardware := _hardware_of(data, "frontier"):
        axes.axvline(hardware["capacity_bytes"] / GIB, color="black", linewidth=1)
    axes.set_xscale("log")
    low, high = (bound(one["total_bytes"] / GIB for one in found) for bound in (min, max))
    ticks = [tick for tick in (m * 10**p for p in range(-3, 5) for m in (1, 2, 5)) if low / 1.2 <= tick <= high * 1.2]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("total of the fullest rank, GiB")
    axes.set_ylabel("tokens/s, all ranks")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)


def _draw_scorecard(axes: Any, data: PageData) -> None:
    """Draw the error of each prediction, by source; one picture contains all quantities."""
    scores = [one for one in data["scorecard"] or [] if one["measured"] > 0]
    groups = sorted({(one["source"], one["metric"]) for one in scores})
    for place, (source, metric) in enumerate(groups):
        errors = sorted(
            one["predicted"] / one["measured"] - 1
            for one in scores
            if (one["source"], one["metric"]) == (source, metric)
        )
        spread = np.linspace(-0.3, 0.3, len(errors)) if len(errors) > 1 else np.zeros(1)
        axes.scatter(
            place + spread,
            100 * np.array(errors),
            s=14,
            color=_SERIES[place % len(_SERIES)],
            marker=_MARKERS[place % len(_MARKERS)],
        )
        axes.plot([place - 0.35, place + 0.35], [100 * float(np.median(errors))] * 2, color="black", linewidth=1)
    axes.axhspan(-100 * _BAND, 100 * _BAND, color="#56B4E9", alpha=0.25, linewidth=0)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(range(len(groups)), [f"{source}\n{metric}" for source, metric in groups], fontsize=8)
    axes.set_ylabel("error of the prediction, %")
    axes.set_title(f"band: ±{100 * _BAND:g}%, line: median", fontsize=10)


def _draw_comparison(axes: Any, data: PageData) -> None:
    """Draw each prediction relative to its measurement."""
    rows = [one for one in data["comparison"] or [] if one["measured"]]
    places = np.arange(len(rows))[::-1]
    errors = [100 * (one["predicted"] / one["measured"] - 1) for one in rows]
    axes.barh(places, errors, color="#0072B2", height=0.6)
    for place, error in zip(places, errors, strict=True):
        axes.annotate(
            f"{error:+.2f}%",
            (error, place),
            xytext=(4 if error >= 0 else -4, 0),
            textcoords="offset points",
            va="center",
            ha="left" if error >= 0 else "right",
            fontsize=8,
        )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.margins(x=0.2)
    axes.set_yticks(places, [one["what"] for one in rows], fontsize=8)
    axes.set_xlabel("prediction relative to the measurement, %")


def _draw_losses(axes: Any, data: PageData) -> None:
    """Draw the loss curves."""
    for place, run in enumerate(data["curves"] or []):
        values = [np.nan if loss is None else loss for loss in run["loss"]]
        axes.plot(run["step"], values, label=run["run"], color=_SERIES[place % len(_SERIES)], linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    axes.legend(frameon=False, fontsize=8)
