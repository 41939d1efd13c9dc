"""The ZeRO paper's figures as pictures: published bars next to predicted bars, as PNG and SVG.

Owns the drawings. Needs matplotlib (the extra `zeroshard[report]`), imported when a picture is drawn. It must not know
how numbers are predicted: it draws the tables of `evidence/paper.py`.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, final

from zeroshard.evidence.paper import Reproduction
from zeroshard.evidence.paper_tables import Table
from zeroshard.report.pictures import save_figures

__all__ = ["write_paper_plots"]

_WIDTH: Final = 0.4
_PAPER, _PREDICTED = "#8C8C8C", "#0072B2"


@final
@dataclass(frozen=True)
class _Plot:
    """The columns of a table to draw.

    Args:
        labels: columns that label a group of bars.
        paper, predicted: columns of the bars; bars without a value are omitted.
        unit: unit of both columns.
    """

    labels: tuple[str, ...]
    paper: str
    predicted: str
    unit: str


_PLOTS: Final[Mapping[str, tuple[str, _Plot]]] = MappingProxyType(
    {
        "figure_1": ("figure_1", _Plot(("states",), "paper GB", "predicted GB", "GB of model states")),
        "figure_2": ("figure_2", _Plot(("model",), "paper", "predicted", "teraFLOPS of a device")),
        "figure_2_ratio": ("figure_2", _Plot(("model",), "ratio paper", "ratio", "times the baseline")),
        "figure_3": ("figure_3", _Plot(("devices",), "PFLOPS paper", "PFLOPS", "petaFLOPS of all devices")),
        "figure_4": ("figure_4", _Plot(("model",), "paper", "predicted", "teraFLOPS of a device")),
        "figure_6": ("figure_6", _Plot(("configuration",), "paper B", "predicted B", "billions of parameters")),
        "figure_7": ("figure_7", _Plot(("model", "configuration"), "paper GB", "predicted GB", "GB at most")),
        "figure_8": ("figure_8", _Plot(("model", "configuration"), "paper", "predicted", "teraFLOPS of a device")),
    }
)


def write_paper_plots(found: Reproduction, folder: str | Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draw the figures of the paper, with published and predicted values.

    Args:
        found: the result of `zeroshard.evidence.paper.reproduce`.
        folder: created if missing; files of the same names are overwritten.
        formats: formats of the files: "png", "svg", or another format of matplotlib.

    Returns:
        The files, each `NAME.FORMAT`.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    drawings = {
        name: functools.partial(_draw, table=found.tables[table], plot=plot) for name, (table, plot) in _PLOTS.items()
    }
    return save_figures(drawings, folder, formats)


def bars_of(table: Table, plot: _Plot) -> list[tuple[str, float | None, float | None]]:
    """Return the label, the published and the predicted value of each group of bars; without means."""
    places = {column.title: place for place, column in enumerate(table.columns)}
    rows = []
    for row in table.rows:
        label = "\n".join(str(row[places[name]]) for name in plot.labels)
        values = [row[places[name]] for name in (plot.paper, plot.predicted)]
        paper, predicted = (None if value is None else float(value) for value in values)
        if not label.startswith("mean"):
            rows.append((label, paper, predicted))
    return rows


def _draw(axes: Any, table: Table, plot: _Plot) -> None:
    rows = bars_of(table, plot)
    for shift, kind, color in ((-_WIDTH / 2, "published", _PAPER), (_WIDTH / 2, "predicted", _PREDICTED)):
        heights = [(place, row[1 if kind == "published" else 2]) for place, row in enumerate(rows)]
        there = [(place + shift, height) for place, height in heights if height is not None]
        bars = axes.bar([x for x, _ in there], [y for _, y in there], width=_WIDTH, label=kind, color=color)
        axes.bar_label(bars, fmt="%.3g", fontsize=7)
    axes.set_xticks(range(len(rows)), [label for label, _, _ in rows], fontsize=8)
    axes.set_ylabel(plot.unit)
    axes.set_title(table.title, fontsize=10)
    axes.legend(frameon=False, fontsize=8)
