"""Bytes as text, in the same binary units wherever the package prints memory, files or traffic."""

from typing import Final

__all__ = ["GIB", "MIB", "size_text"]

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
