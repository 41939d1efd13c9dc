"""Plans and searches as text for a terminal.

Owns the words and columns. Must not compute: every number is asked of a plan.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from zeroshard.plan.planning import Plan
    from zeroshard.plan.search import Search

__all__ = ["render_plan", "render_search"]

_T = TypeVar("_T")
GIB: Final = 2**30
BAR: Final = 40
SHOWN_LIVE: Final = 6
SHOWN_CHANGES: Final = 5
SHOWN_FRONTIER: Final = 12
SAYS: Final = {
    "fits": "fits, with the error of nine plans in ten on top",
    "tight": "tight: fits as predicted, but not with the error of nine plans in ten on top",
    "no": "does not fit",
}


PLAIN: Final = (("copies", 1), ("tensor", 1), ("sequence parallel", "no"), ("micro-batches", 1))
"""Options that need no mention."""


def render_plan(plan: "Plan") -> str:
    """Return a plan as a person reads it at a glance."""
    device, options = plan.asked.device, plan.options
    lines = [
        f"{plan.model}: {_count(plan.parameters_numel)} parameters"
        + f" ({_count(plan.used_numel)} used by each token)" * (plan.used_numel != plan.parameters_numel),
        ", ".join(f"{name} {value}" for name, value in options.items() if (name, value) not in PLAIN),
        "",
        f"memory of a rank, GiB                          {plan.verdict.upper()}: {SAYS[plan.verdict]}",
    ]
    resident = plan.resident_bytes
    rows = [(name, nbytes) for name, nbytes in resident.items() if nbytes]
    rows.append(("the rest at the peak", plan.film.peak[0] - sum(resident.values())))
    rows.append(("reserved beside that", max(0, plan.reserved_bytes - plan.film.peak[0])))
    rows.append(("context, communicators", plan.outside_bytes))
    lines += [_bar(name, nbytes, device.memory_bytes) for name, nbytes in rows]
    lines.append(_bar("in all", plan.total_bytes, device.memory_bytes) + f" of {device.memory_bytes / GIB:.1f}")
    lines += ["", f"at the peak ({plan.film.peak_phase}):"]
    lines += [
        f"  {nbytes / GIB:8.2f}  {column}: {what}" + f" of {unit}" * bool(unit)
        for column, unit, what, nbytes in plan.live[:SHOWN_LIVE]
    ]
    film = plan.film
    parts = {"computing": film.step_s - film.exposed_s - film.update_s}
    parts |= {"waiting for others": film.exposed_s, "update": film.update_s}
    each = plan.tokens_per_s / plan.asked.world_size
    lines += [
        "",
        f"time of a step      {_seconds(plan.step_s)}: "
        + ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in parts.items()),
        f"speed               {plan.tokens_per_s:,.0f} tokens/s, {each:,.0f} a rank, {plan.mfu:.1%} of the peak; "
        f"{plan.gpu_hours(1e9):,.1f} device-hours for 1e9 tokens",
        "sent by a rank      "
        + (", ".join(f"{kind} {nbytes / 1e9:,.2f} GB" for kind, nbytes in film.sent_bytes.items()) or "nothing"),
        f"first step          peak {plan.first.peak[0] / GIB:.2f} GiB, {_seconds(plan.first.step_s)}",
        f"asynchronous save   {plan.save_bytes / GIB:.2f} GiB of the host's memory for each rank",
    ]
    if plan.verdict != "fits" and plan.changes:
        lines += ["", "what would help, fastest first:"]
        lines += [
            f"  {one.what:26} {one.total_bytes / GIB:7.1f} GiB  {one.tokens_per_s:12,.0f} tokens/s  {one.verdict}"
            for one in plan.changes[:SHOWN_CHANGES]
        ]
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)


def render_search(found: "Search") -> str:
    """Return the frontier and the best plan of a search."""
    heads = ("ranks", "row", "copies", "tensor", "micro-batch", "activations", "GiB at most", "tokens/s a rank", "")
    shown = _thinned(found.frontier, SHOWN_FRONTIER)
    rows = [
        (
            *(str(one.options.words()[name]) for name in heads[:6]),
            f"{one.peak_bytes / GIB:.1f}",
            f"{one.tokens_per_s / one.options.world_size:,.0f}",
            one.verdict,
        )
        for one in shown
    ]
    text = [f"{found.model.name}: {len(found.candidates):,} configurations; the frontier of memory and speed:", ""]
    text += _aligned([heads, *rows])
    text += ["", "the fastest that fits:" if found.best is not None else "None of them fits."]
    return "\n".join(text + ([str(found.best)] if found.best is not None else []))


def _thinned(items: Sequence[_T], count: int) -> list[_T]:
    """Return some items, evenly chosen, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


def _bar(name: str, nbytes: int, of: int) -> str:
    width = min(BAR, round(BAR * nbytes / of))
    return f"  {name:24}{nbytes / GIB:9.2f}  {'█' * width}{'·' * (BAR - width)}"


def _count(numel: int) -> str:
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if numel >= size:
            return f"{numel / size:.2f}{letter}"
    return f"{numel:,}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    table = list(rows)
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
