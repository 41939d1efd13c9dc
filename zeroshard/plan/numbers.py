"""Numbers and tables as text for a terminal."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from zeroshard.table.sizes import GIB

__all__ = ["bar", "count", "nearest", "seconds", "thinned"]

_T = TypeVar("_T")
BAR: Final = 40


def thinned(items: Sequence[_T], count: int) -> list[_T]:
    """Return at most `count` evenly chosen items, including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


def bar(name: str, nbytes: int, of: int) -> str:
    """Return a line with bytes as a number and as a bar of the total."""
    width = min(BAR, round(BAR * nbytes / of))
    return f"  {name:24}{nbytes / GIB:9.2f}  {'█' * width}{'·' * (BAR - width)}"


def count(numel: int) -> str:
    """Return a number of parameters with about three digits."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if numel >= size:
            return f"{numel / size:.2f}{letter}"
    return f"{numel:,}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the known names that are most like another one, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" Nearest: {', '.join(near)}." if near else ""


def seconds(number: float) -> str:
    """Return a time in seconds or milliseconds."""
    return f"{number:.2f} s" if number >= 1 else f"{1000 * number:.1f} ms"
