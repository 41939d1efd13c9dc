"""What `make test` runs: a share of what takes time, and with every share all that is quick or finds planted bugs.

Owns the rule. Of `TURNS` rotations each runs its share of what rotates, and `make test-all` runs everything. There are
four kinds of things that rotate:

- cases of a test marked `product`, which checks one property for many worlds, stages, seeds or models;
- values of a loop inside a test, which are given to `third`: the first value and a third of the others;
- a test or case marked `rotates`, which says little that other tests do not; `rotates(together=True)` marks a file
  whose tests share what takes time, so that one rotation has all of them;
- any test of which a case takes `COSTLY_S` or more, as `tests/seconds.json` has them measured (`tools/seconds.py`).

Each case that rotates runs in one of the rotations. A case that finds a planted bug (`tools/planted.py`) runs in each,
its loops as a whole; of a product that a bug names without a case, the first does. The rotation "common" is what all
of them have: bugs that it finds are found by each (`tools.planted --rotation common`).
"""

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pytest

from tools.planted import BUGS
from tools.seconds import seconds_of_tests

Value = TypeVar("Value")

TURNS = 11
"""A prime number, so that every eleventh case of a table meets all values of its parameters."""

COSTLY_S = 1.0
"""With quicker ones a rotation takes a minute and a half."""
COSTLY = frozenset(name for name, took_s in seconds_of_tests().items() if took_s >= COSTLY_S)
"""Tests of which a case takes that long."""

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


def turn_of(rotation: str) -> int | None:
    """Return which of `TURNS` turns a rotation is; none for "all", and one that no case has for "common".

    A rotation may be any number, such as that of commits: loops then have other values when a turn comes again.
    """
    if rotation == "common":
        return -1
    return None if rotation == "all" else int(rotation) % TURNS


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
    if RUNNING.rotation == "common":
        return values[:1]
    shift = zlib.crc32(RUNNING.case.encode())
    return [
        value for place, value in enumerate(values) if place == 0 or (place + shift - int(RUNNING.rotation)) % 3 == 0
    ]


def share(amount: float) -> float:
    """Return what a test that runs for a time, or to a number, has of it in this rotation: a third, as for `third`."""
    return amount if is_whole() else amount / 3


def split(items: Sequence[pytest.Item], rotation: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests that run in a rotation, and those that do not, each in the order of `items`.

    Turns are shifted by a number of the test, so that no rotation has the first cases of all products.
    """
    now = turn_of(rotation)
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    cases = Counter[str]()
    for item in items:
        name = item.nodeid.partition("[")[0]
        case, cases[name] = cases[name], cases[name] + 1
        mark = item.get_closest_marker("rotates")
        if mark is not None and mark.kwargs.get("together"):
            turn = zlib.crc32(name.partition("::")[0].encode()) % TURNS
        else:
            turn = (zlib.crc32(name.encode()) + case) % TURNS
        if now in (None, turn) or item.nodeid in NAMED:
            is_kept = True
        elif item.get_closest_marker("product") is not None:
            is_kept = case == 0 and finds_a_bug(item.nodeid)
        else:
            is_kept = finds_a_bug(item.nodeid) or (mark is None and name not in COSTLY)
        (kept if is_kept else left_out).append(item)
    return kept, left_out
