"""Which cases of products `make test` runs: a third of each, and in every third the first and what finds planted bugs.

Owns the rule. A product is a test marked `product`: it checks one property for many worlds, stages, seeds or models,
and starts processes for each. What each rotation leaves out the other two run, and `make test-all` runs everything.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from tools.planted import BUGS

ROTATIONS = ("0", "1", "2", "all")


NAMED = frozenset(bug.test for bug in BUGS)
"""Cases that find a planted bug (`tools/planted.py`), among other tests."""


def turn_of(number: int, sizes: Iterable[int]) -> int:
    """Return the rotation in which a product's case runs.

    It is the sum of the places that its values have in their parameters: a rotation has the diagonals of a table, so
    every row and every column. The number alone would not do: where a parameter has three values, a rotation would
    have one of them.

    Args:
        number: of the case, from 0.
        sizes: how many values each parameter has, the one that changes from each case to the next first.
    """
    places = 0
    for size in sizes:
        number, place = divmod(number, size)
        places += place
    return (places + number) % 3


def sizes_of(item: pytest.Item) -> list[int]:
    """Return how many values each `parametrize` of a test has, the one that changes fastest first."""
    return [len(list(mark.args[1])) for mark in item.iter_markers("parametrize")][::-1]


def split(items: Sequence[pytest.Item], rotation: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that run in a rotation, and those that do not, each in the order of `items`."""
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    counts: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        number, counts[name] = counts[name], counts[name] + 1
        is_first = number == 0 or item.nodeid in NAMED
        is_always_run = is_first or rotation == "all" or item.get_closest_marker("product") is None
        (kept if is_always_run or turn_of(number, sizes_of(item)) == int(rotation) else left_out).append(item)
    return kept, left_out
