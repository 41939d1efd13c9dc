"""The curves of runs, as text, as an SVG picture, or as a page around it.

Owns the drawing. `metrics.py` documents `metrics.jsonl`, which it reads. It needs no library. Read `read_curves` first.
"""

import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from zeroshard.train.inputs import open_input

__all__ = ["as_html", "as_svg", "as_text", "read_curves"]

Points = list[tuple[int, float]]
Curves = dict[str, dict[str, Points]]
"""By metric, by run: steps and values."""

METRICS: Final = MappingProxyType(
    {
        "loss": ("step", "loss", "training loss, nats a token"),
        "heldout": ("eval", "loss", "held-out loss, nats a token"),
        "bits_per_byte": ("eval", "bits_per_byte", "held-out bits per byte"),
        "learning_rate": ("step", "learning_rate", "learning rate"),
        "grad_norm": ("step", "grad_norm", "norm of the gradients"),
        "tokens_per_s": ("step", "tokens_per_s", "tokens a second"),
        "mfu": ("step", "mfu", "part of the devices' peak (MFU)"),
    }
)
"""By name: kind of record, its field, and what it is."""
BLOCKS: Final = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
COLOURS: Final = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d")
WIDTH, HEIGHT, EDGE = 640, 220, 52
MOST_POINTS: Final = 600


def read_curves(folders: Sequence[Path], names: Sequence[str]) -> Curves:
    """Return the curves of runs; a metric that no run has is left out.

    Raises:
        ValueError: a folder has no metrics, or there is no such metric.
    """
    for name in names:
        if name not in METRICS:
            raise ValueError(f"--metrics: there is no metric {name!r}; there are: {', '.join(METRICS)}")
    found: Curves = {name: {} for name in names}
    for folder in folders:
        path = folder / "metrics.jsonl"
        if not path.is_file():
            raise ValueError(f"{folder} is not the folder of a run: it has no metrics.jsonl")
        with open_input(path, "RUN") as file:
            lines = list(file)
        records = [
            _record(line, f"{path}, line {number}", number == len(lines)) for number, line in enumerate(lines, 1)
        ]
        for name in names:
            kind, field, _ = METRICS[name]
            points = [
                (int(one["step"]), float(one[field]))
                for one in records
                if one.get("kind") == kind and one.get(field) is not None and "step" in one
            ]
            if points:
                found[name][str(folder)] = points
    return {name: curves for name, curves in found.items() if curves}


def _record(line: bytes, place: str, is_last: bool) -> Mapping[str, Any]:
    """Return a record; empty for the unfinished last line of a run that goes on.

    Raises:
        ValueError: the line is no record.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        if is_last and not line.endswith(b"\n"):
            return {}
        raise ValueError(f"{place}: no record of a run, but {line[:60]!r}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: no record of a run, but {line[:60]!r}")
    return record


def _thin(points: Points, most: int) -> Points:
    """Return at most so many points: means of equal parts, at their last steps."""
    if len(points) <= most:
        return points
    parts = [points[len(points) * k // most : len(points) * (k + 1) // most] for k in range(most)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def _ranges(by_run: Mapping[str, Points]) -> tuple[int, int, float, float]:
    """Return the least and greatest step, and value, of all finite points: means of parts would hide extremes."""
    points = [point for points in by_run.values() for point in points if math.isfinite(point[1])] or [(0, 0.0)]
    steps, values = zip(*points, strict=True)
    return min(steps), max(steps), min(values), max(values)


def as_text(curves: Curves, width: int) -> str:
    """Return the curves as lines of blocks, with the first and the last value of each, and the range of all."""
    lines = []
    for name, by_run in curves.items():
        lines.append(METRICS[name][2])
        *_, low, high = _ranges(by_run)
        for run, points in by_run.items():
            bars = "".join(_block(value, low, high) for _, value in _thin(points, width))
            first, last = points[0], points[-1]
            lines.append(f"  {bars}")
            lines.append(f"  {run}: {first[1]:.4g} at step {first[0]}, {last[1]:.4g} at step {last[0]}")
        lines.append(f"  from {low:.4g} to {high:.4g}")
        lines.append("")
    return "\n".join(lines).rstrip("\n") or "no curves: the runs have made no steps"


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return "x"
    height = (value - low) / (high - low) if high > low else 0.0
    # Rounding may put a mean of nearly equal values beside them.
    return BLOCKS[round(min(max(height, 0.0), 1.0) * (len(BLOCKS) - 1))]


def as_svg(curves: Curves) -> str:
    """Return one picture, a panel for each metric."""
    panels, runs = list(curves), sorted({run for by_run in curves.values() for run in by_run})
    colours = {run: COLOURS[place % len(COLOURS)] for place, run in enumerate(runs)}
    total = len(panels) * HEIGHT + 24 * len(runs) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" width="{WIDTH}" height="{total}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{total}" fill="white"/>',
    ]
    for place, name in enumerate(panels):
        parts += _panel(name, curves[name], colours, place * HEIGHT)
    for place, run in enumerate(runs):
        y = len(panels) * HEIGHT + 24 * place + 16
        parts.append(f'<line x1="{EDGE}" x2="{EDGE + 24}" y1="{y}" y2="{y}" stroke="{colours[run]}" stroke-width="2"/>')
        parts.append(f'<text x="{EDGE + 32}" y="{y + 4}">{html.escape(_printed(run))}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(name: str, by_run: Mapping[str, Points], colours: Mapping[str, str], top: int) -> list[str]:
    drawn = {
        run: [point for point in _thin(points, MOST_POINTS) if math.isfinite(point[1])]
        for run, points in by_run.items()
    }
    first, last, low, high = _ranges(by_run)
    left, right, upper, lower = EDGE, WIDTH - 16, top + 28, top + HEIGHT - 28

    def x(step: int) -> float:
        return left + (right - left) * (step - first) / max(1, last - first)

    def y(value: float) -> float:
        return lower - (lower - upper) * ((value - low) / (high - low) if high > low else 0.5)

    parts = [
        f'<text x="{left}" y="{top + 18}" font-weight="bold">{html.escape(METRICS[name][2])}</text>',
        f'<path d="M{left} {upper}V{lower}H{right}" fill="none" stroke="#999"/>',
        f'<text x="{left - 6}" y="{upper + 4}" text-anchor="end">{high:.3g}</text>',
        f'<text x="{left - 6}" y="{lower}" text-anchor="end">{low:.3g}</text>',
        f'<text x="{left}" y="{lower + 16}">{first}</text>',
        f'<text x="{right}" y="{lower + 16}" text-anchor="end">step {last}</text>',
    ]
    for run, points in drawn.items():
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colours[run]}" stroke-width="1.5"/>')
        if len(points) == 1:
            parts.append(f'<circle cx="{x(points[0][0]):.1f}" cy="{y(points[0][1]):.1f}" r="3" fill="{colours[run]}"/>')
    return parts


def _printed(text: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def as_html(curves: Curves) -> str:
    """Return a page with the picture, which asks nothing of anybody."""
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>zeroshard: curves of runs</title>'
    return f'{head}\n<body style="margin:2em">\n{as_svg(curves)}</body></html>\n'
