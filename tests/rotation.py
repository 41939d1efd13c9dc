"""What `make test` runs: a third of each product, and in every third what finds planted bugs.

Owns the rule. What each rotation leaves out the other two run, and `make test-all` runs everything. There are three
kinds of things that rotate:

- cases of a test marked `product`, which checks one property for many worlds, stages, seeds or models, and starts
  processes for each: a third, and at least one;
- values of a loop inside a test, which are given to `third`: the first value and a third of the others;
- a test or case marked `rotates`, which takes seconds and says little that other tests do not: it runs in one rotation.

A case that finds a planted bug (`tools/planted.py`) runs in each rotation, its loops as a whole; of a product that a
bug names without a case, the first does.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pytest

from tools.planted import BUGS

Value = TypeVar("Value")

ROTATIONS = ("0", "1", "2", "all")

NAMED = frozenset(bug.test for bug in BUGS)
"""Cases, tests and files that find a planted bug (`tools/planted.py`)."""


def finds_a_bug(case: str) -> bool:
    """Tell whether a planted bug names a case, its test or its file."""
    return not NAMED.isdisjoint((case, case.partition("[")[0], case.partition("::")[0]))


@dataclass
class Running:
    """What runs in this process, as `tests/conftest.py` says before each test; ranks are not told."""

    rotation: str = "all"
    case: str = ""
    collected: frozenset[str] = frozenset()
    """All cases of this session, whichever the rotation has."""


RUNNING = Running()


def is_whole() -> bool:
    """Tell whether the running test runs as a whole."""
    return RUNNING.rotation == "all" or finds_a_bug(RUNNING.case)


def third(values: Iterable[Value]) -> list[Value]:
    """Return what a loop of the running test has in this rotation: the first value, and a third of the others.

    Which third depends on the test, so that each rotation has the second value of some. All values are returned where
    everything runs, to a test that finds a planted bug, and to a rank, so that a test asks before it starts ranks.
    """
    values = list(values)
    if is_whole():
        return values
    shift = zlib.crc32(RUNNING.case.encode())
    return [value for place, value in enumerate(values) if place == 0 or (place + shift) % 3 == int(RUNNING.rotation)]


def share(amount: float) -> float:
    """Return what a test that runs for a time, or to a number, has of it in this rotation: a third, as for `third`."""
    return amount if is_whole() else amount / 3


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
    """Return the tests that run in a rotation, and those that do not, each in the order of `items`.

    Turns are shifted by a number of the test, so that no rotation has the first cases of all products.
    """
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    turns: dict[str, list[int]] = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        of_test = turns.setdefault(name, [])
        of_test.append((zlib.crc32(name.encode()) + turn_of(len(of_test), sizes_of(item))) % 3)
    places = {name: iter(range(len(of_test))) for name, of_test in turns.items()}
    for item in items:
        name = item.nodeid.partition("[")[0]
        place, of_test = next(places[name]), turns[name]
        if rotation == "all" or item.nodeid in NAMED:
            is_kept = True
        elif item.get_closest_marker("rotates") is not None:
            is_kept = finds_a_bug(item.nodeid) or of_test[place] == int(rotation)
        elif item.get_closest_marker("product") is not None:
            is_first = place == 0 and (int(rotation) not in of_test or finds_a_bug(item.nodeid))
            is_kept = is_first or of_test[place] == int(rotation)
        else:
            is_kept = True
        (kept if is_kept else left_out).append(item)
    return kept, left_out
