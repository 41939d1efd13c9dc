"""Tables of results: columns, rows and notes, as plain text and as a mapping for JSON.

Owns the layout of the tables of `paper.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from zeroshard.table.sizes import aligned

__all__ = ["Column", "Table", "Target", "Value"]

Value = str | int | float | bool | None
"""The value of a field, or None."""
WIDTH: Final = 120


class Column(NamedTuple):
    """A column: its title, and the format of its numbers, as in `format`."""

    title: str
    digits: str = ""


@final
@dataclass(frozen=True)
class Table:
    """A table or a figure of the paper, with published and predicted values.

    Args:
        name: name in JSON, e.g. "figure_2".
        rows: one value per column.
        notes: sentences below the table.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    notes: Sequence[str] = ()

    def render(self) -> str:
        """Return the table as plain text."""
        head = [column.title for column in self.columns]
        body = [[_shown(v, c.digits) for v, c in zip(row, self.columns, strict=True)] for row in self.rows]
        texts = [place for place in range(len(head)) if all(isinstance(row[place], str) for row in self.rows)]
        lines = aligned([head, *body], texts)
        rule = "-" * max(map(len, lines))
        return "\n".join([self.title, rule, lines[0], rule, *lines[1:], *(wrapped(note) for note in self.notes)])

    def as_mapping(self) -> Mapping[str, object]:
        """Return title, rows by column title, and notes."""
        titles = [column.title for column in self.columns]
        rows = [dict(zip(titles, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": list(self.notes)}


@final
@dataclass(frozen=True)
class Target:
    """A target of the reproduction, and its result."""

    what: str
    wanted: str
    reached: str
    is_met: bool


def _shown(value: Value, digits: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else format(value, digits)


def wrapped(text: str) -> str:
    """Return a sentence in indented lines of at most `WIDTH` characters."""
    lines = ["  "]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > WIDTH:
            lines.append("  ")
        lines[-1] += word if lines[-1] == "  " else f" {word}"
    return "\n".join(lines)
