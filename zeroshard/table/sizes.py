"""Bytes as text, in the same binary units wherever the package prints memory, files or traffic; tables as text."""

from collections.abc import Collection, Sequence
from typing import Final

__all__ = ["GIB", "MIB", "aligned", "size_text"]

MIB: Final = 1 << 20
GIB: Final = 1 << 30
UNITS: Final = (("GiB", GIB, ".2f"), ("MiB", MIB, ".1f"), ("KiB", 1 << 10, ".1f"))
"""Name, bytes and format of each unit, the largest first."""


def size_text(nbytes: float) -> str:
    """Return bytes with a unit.

    >>> from zeroshard.table.sizes import size_text
    >>> size_text(3 << 29), size_text(5 << 18), size_text(12)
    ('1.50 GiB', '1.2 MiB', '12 bytes')
    """
    return next(
        (f"{nbytes / size:,{form}} {unit}" for unit, size, form in UNITS if nbytes >= size), f"{nbytes:.0f} bytes"
    )


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Return lines with columns of equal widths, aligned to the right but for those in `left`.

    >>> from zeroshard.table.sizes import aligned
    >>> aligned([["unit", "MiB"], ["a", "12"]], left=[0])
    ['unit  MiB', 'a      12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.ljust if place in left else str.rjust for place in range(len(widths))]
    return [
        "  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)).rstrip() for row in rows
    ]
