"""Tables and plots from result files: nothing here was measured, everything is read from JSON.

Owns medians, spreads and how they are shown. `python -m benchmarks.report` writes the tables into `docs/benchmarks.md`
between its marks, and the plot beside the result files. Read `write_tables` first.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.cases import CASES
from benchmarks.peers import CONTESTANTS, reference_of
from zeroshard.table.sizes import MIB

__all__ = [
    "Ratio",
    "aligned",
    "gpu_table",
    "median_deviation",
    "memory_table",
    "optimizer_table",
    "ratio_of_medians",
    "scaling_table",
    "show",
    "time_table",
    "write_plot",
    "write_tables",
]

RESULTS: Final = Path(__file__).parent / "results"
PAGE: Final = RESULTS / "steps.md"
PLOT: Final = "steps.png"
GPU: Final = "gpu.json"

BEGIN, END = "<!-- table: results -->", "<!-- end -->"
"""What lies between these lines of the page is written by `write_tables`."""

_GB: Final = 1e9
_RESAMPLES: Final = 2000
_OWN_COLOUR, _PEER_COLOUR = "tab:orange", "tab:gray"

Ratio = tuple[float, float, float]
"""A ratio, and the ends of its 95% interval."""

Heats = Sequence[Mapping[str, Any]]
"""The launches of a result, each with its contestants' series."""


def write_tables(results: Path, page: Path) -> None:
    """Write the tables of all result files of a folder into a page.

    Raises:
        ValueError: no results, or a page without the marks.
    """
    found = _read_all(results)
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page} needs one line {BEGIN!r} and one {END!r}, between which the tables go.")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    tables = "\n".join([*_sections(found), *_gpu_section(results / GPU)])
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{after}")


def write_plot(results: Path) -> None:
    """Draw step time and memory of all result files of a folder beside them."""
    found = _read_all(results)
    _plot([result for result in found if result["setting"]["kind"] == "step"], found, results / PLOT)


def _read_all(results: Path) -> list[dict[str, Any]]:
    found = [_read(path) for kind in _TABLES for path in sorted(results.glob(f"{kind}-*.json"))]
    if not found:
        raise ValueError(f"{results} holds no results: run `python -m benchmarks.run --plan all` first.")
    return found


# -- numbers ---------------------------------------------------------------------------------------------------------


def median_deviation(values: Sequence[float]) -> float:
    """Return the median absolute deviation from the median."""
    middle = median(values)
    return median(abs(value - middle) for value in values)


def ratio_of_medians(values: Sequence[float], base: Sequence[float]) -> Ratio:
    """Return the ratio of two medians, with its 95% interval by resampling rounds (pairs).

    Args:
        values, base: one number for each round, of the same rounds.
    """
    pairs = np.array([values, base])
    draws = np.random.default_rng(0).integers(pairs.shape[1], size=(_RESAMPLES, pairs.shape[1]))
    above, below = np.median(pairs[:, draws], axis=2)
    low, high = np.quantile(above / below, [0.025, 0.975])
    return float(median(values) / median(base)), float(low), float(high)


def ratios_of(heats: Heats) -> dict[str, Ratio]:
    """Return each contestant's step time against the reference of the first heat that it took part in."""
    found: dict[str, Ratio] = {}
    for heat in heats:
        series = heat["contestants"]
        base = series[reference_of(series)]["wall_s"]
        for name, one in series.items():
            if name not in found:
                found[name] = ratio_of_medians(one["wall_s"], base)
    return {name: found[name] for name in CONTESTANTS if name in found}


# -- tables ----------------------------------------------------------------------------------------------------------


def _sections(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    scaling = [result for result in results if result["setting"]["kind"] == "scaling"]
    for result in results:
        setting = result["setting"]
        if setting["kind"] != "scaling":
            title = f"{CASES[setting['case']].title}: {setting['ranks']} ranks, micro-batch {setting['samples']}"
            heading = f"### {_TABLES[setting['kind']]}, {title}"
            yield from (heading, "", _where(result), "", *_body(result), "", _origin(result), "")
    if scaling:
        yield from ("### Step time as work grows", "", _where(scaling[0]), "", *scaling_table(scaling), "")
        yield from (line for result in scaling for line in (f"- {_origin(result)}",))
        yield ""


def _gpu_section(path: Path) -> Iterator[str]:
    """Yield the tables of the GPU's result file, if it is there."""
    if not path.exists():
        return
    result = _read(path)
    sizes = result["sizes"]
    yield from (f"### One GPU: {CASES[sizes['case']].title}, micro-batch {sizes['samples']}", "")
    for section in result["sections"]:
        yield from (f"{section['section']}:", "", *gpu_table(section), "")
    if "optimizer" in result:
        yield from ("Optimizer step with fp32 masters:", "", *optimizer_table(result["optimizer"]), "")
    yield from (_origin(result), "")


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


_TABLES: Final = {"step": "Step time", "scaling": "Step time as work grows", "memory": "Memory"}
"""Kinds of result files, in the order of the page, and their titles."""


def _body(result: Mapping[str, Any]) -> list[str]:
    if result["setting"]["kind"] == "memory":
        return memory_table(result["memory"])
    lines = time_table(result["time"], result["setting"])
    if result["sweep"]:
        rounds = _rounds(result["sweep"])
        lines += ["", f"<details><summary>Sweep of the peers' own settings, {rounds} rounds</summary>", ""]
        lines += [*time_table(result["sweep"], result["setting"]), "", "</details>"]
    return lines


def _where(result: Mapping[str, Any]) -> str:
    """Return what a reader of any number must know first."""
    return f"CPU, gloo, {result['machine']['cores']} cores."


def _origin(result: Mapping[str, Any]) -> str:
    """Return a line with what the result depends on."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    gpu = f"{machine['gpu']}; " if "gpu" in machine else ""
    return (
        f"{gpu}{machine['cores']} cores ({machine['cpu']}), {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"Linux {machine['kernel']}, {machine['libc']}; {versions}; commit {result['commit']}; {result['date']}; "
        f"`{result['command']}`."
    )


def time_table(heats: Heats, setting: Mapping[str, Any]) -> list[str]:
    """Return a Markdown table of step times, a line for each contestant, from the first heat that it took part in."""
    ratios, rows, reference = ratios_of(heats), [], ""
    for name, ratio in ratios.items():
        series = next(heat["contestants"] for heat in heats if name in heat["contestants"])
        reference = CONTESTANTS[reference_of(series)].title
        rows.append(_time_row(name, series[name], ratio, setting))
    loads = ", ".join(f"{heat['load_before']:.1f}" for heat in heats)
    return [
        f"| | step, ms (MAD) | tokens/s | to {reference} (95%) | CPU s a step | MiB sent | predicted | losses |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
        *rows,
        "",
        f"{_rounds(heats)} rounds in {len(heats)} launch(es); load of the machine before: {loads}.",
    ]


def _rounds(heats: Heats) -> int:
    return len(next(iter(heats[0]["contestants"].values()))["wall_s"])


def _time_row(name: str, one: Mapping[str, Any], ratio: Ratio, setting: Mapping[str, Any]) -> str:
    step_s = median(one["wall_s"])
    tokens = CASES[setting["case"]].tokens * setting["samples"] * setting["ranks"]
    cells = [
        _name(name),
        f"{step_s * 1e3:.1f} ({median_deviation(one['wall_s']) * 1e3:.1f})",
        f"{tokens / step_s:,.0f}",
        show(ratio),
        f"{median(one['cpu_s']):.3f}",
        f"{median(one['wire_bytes']) / MIB:.1f}",
        f"{one['predicted']['step_bytes'] / MIB:.1f}" if one["predicted"] else "",
        f"{one['loss_deviation']:.0e}" if "loss_deviation" in one else "",
    ]
    return f"| {' | '.join(cells)} |"


def _name(name: str) -> str:
    title = CONTESTANTS[name].title
    return f"**{title}**" if CONTESTANTS[name].library == "zeroshard" else title


def show(ratio: Ratio) -> str:
    """Return a ratio and its interval as text."""
    return f"{ratio[0]:.3f} ({ratio[1]:.3f} to {ratio[2]:.3f})"


def scaling_table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of stage 3 against the sum of the time of computing alone and that of its messages alone."""
    lines = [
        "| | ranks | computing, ms | messages, ms | sum | **zeroshard 3**, ms | to the sum (95%) |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        setting, series = result["setting"], result["time"][0]["contestants"]
        parts = [series[name]["wall_s"] for name in ("bare", "wire")]
        limit, own = [sum(both) for both in zip(*parts, strict=True)], series["zs-3"]["wall_s"]
        times = [f"{median(values) * 1e3:.1f}" for values in (*parts, limit, own)]
        cells = [CASES[setting["case"]].title, str(setting["ranks"]), *times, show(ratio_of_medians(own, limit))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def memory_table(memory: Mapping[str, Any]) -> list[str]:
    """Return a table of peak resident bytes above imports, a pair of columns for each setting of the allocator."""
    titles = list(memory)
    head = " | ".join(f"peak, MiB, {title} | in steps" for title in titles)
    lines = [f"| | {head} | predicted |", f"|---|{'--:|' * (2 * len(titles) + 1)}"]
    for name in memory[titles[0]]:
        found = [memory[title][name] for title in titles]
        cells = [f"{one[key] / MIB:.0f}" for one in found for key in ("peak_bytes", "step_peak_bytes")]
        predicted = f"{found[0]['predicted']['held_bytes'] / MIB:.0f}" if found[0]["predicted"] else ""
        lines.append(f"| {' | '.join([_name(name), *cells, predicted])} |")
    return lines


def gpu_table(section: Mapping[str, Any]) -> list[str]:
    """Return a table of one section of `benchmarks/gpu.py`: step times, and the allocator's peaks."""
    first = section["first"]
    base = section["entrants"][first]
    lines = [
        f"| | step, ms (MAD) | to {first} (95%) | plan | allocated, MiB | to {first} | plan | reserved/allocated |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, one in section["entrants"].items():
        step = f"{median(one['wall_s']) * 1e3:.1f} ({median_deviation(one['wall_s']) * 1e3:.1f})"
        name += " (other losses)" * one.get("deviates", False)
        cells = [name, step, show(ratio_of_medians(one["wall_s"], base["wall_s"]))]
        planned = one.get("planned")
        cells.append(f"{planned['step_s'] * 1e3:.1f}" if planned else "")
        if one["allocated_bytes"]:
            cells += [
                f"{one['allocated_bytes'] / MIB:,.0f}",
                f"{one['allocated_bytes'] / base['allocated_bytes']:.3f}",
                f"{planned['allocated_bytes'] / MIB:,.0f}" if planned else "",
                f"{one['reserved_bytes'] / one['allocated_bytes']:.3f}",
            ]
        else:
            cells += ["", "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def optimizer_table(optimizer: Mapping[str, Any]) -> list[str]:
    """Return a table of an optimizer step's bandwidth beside that of a copy."""
    rates = {
        "optimizer step": optimizer["moved_bytes"] / median(optimizer["step_s"]),
        "copy": optimizer["copy_moved_bytes"] / median(optimizer["copy_s"]),
    }
    rows = [f"| {name} | {rate / _GB:,.1f} | {rate / rates['copy']:.2f} |" for name, rate in rates.items()]
    return ["| | GB/s | to the copy |", "|---|--:|--:|", *rows]


def aligned(lines: Sequence[str]) -> list[str]:
    """Return the lines of a table for a terminal: cells under each other, without Markdown's rule."""
    rows = [[cell.strip() for cell in line.replace("**", "").strip("|").split("|")] for line in lines]
    rows = [row for row in rows if not row[0].startswith("---")]
    cells = [row for row in rows if len(row) > 1]
    widths = [max(len(cell) for cell in column) for column in zip_longest(*cells, fillvalue="")]
    return [
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=False))
        )
        if len(row) > 1
        else row[0]
        for row in rows
    ]


# -- plot ------------------------------------------------------------------------------------------------------------


def _plot(steps: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw a row for each setting: step time against the reference, and peak memory of a rank where it was measured."""
    if not steps:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    places = [(r["setting"]["case"], r["setting"]["ranks"], r["setting"]["samples"]) for r in results]
    memory = {place: r["memory"] for place, r in zip(places, results, strict=True) if "memory" in r}
    figure = Figure(figsize=(13, 4.6 * len(steps)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(steps), 2, squeeze=False)
    for (left, right), result in zip(axes, steps, strict=True):
        setting = result["setting"]
        place = (setting["case"], setting["ranks"], setting["samples"])
        title = f"{place[0]}, {place[1]} ranks, micro-batch {place[2]}"
        ratios = ratios_of(result["time"])
        _bars(left, {name: ratio[0] for name, ratio in ratios.items()}, f"{title}: step time, reference = 1")
        for number, (value, low, high) in enumerate(ratios.values()):
            left.errorbar(value, number, xerr=[[max(0.0, value - low)], [max(0.0, high - value)]], color="black")
        left.axvline(1.0, color="black", linewidth=0.8)
        right.set_visible(place in memory)
        peaks = next(iter(memory[place].values())) if place in memory else {}
        shown = {name: one["peak_bytes"] / MIB for name, one in peaks.items()}
        _bars(right, shown, f"{title}: peak memory, MiB")
    figure.savefig(path, dpi=110)


def _bars(axes: Any, bars: Mapping[str, float], title: str) -> None:
    """Draw horizontal bars, the first on top, zeroshard's in another colour."""
    axes.set_title(title, fontsize=10)
    colours = [_OWN_COLOUR if CONTESTANTS[name].library == "zeroshard" else _PEER_COLOUR for name in bars]
    axes.barh(range(len(bars)), list(bars.values()), color=colours)
    axes.set_yticks(range(len(bars)), [CONTESTANTS[name].title for name in bars], fontsize=8)
    axes.invert_yaxis()


if __name__ == "__main__":
    write_tables(RESULTS, PAGE)
    write_plot(RESULTS)
