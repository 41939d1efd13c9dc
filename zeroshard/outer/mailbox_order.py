"""The order in which changes are added, and their sum: one formula for islands, the mailbox and a replay.

Owns which changes come in what order, and the arithmetic on flat arrays. It must not know where they come from.

Note: the sum
    The changes of one version are added in the order of islands, and the sum is multiplied by 1 / islands, where
    `islands` is their number at the start; this is added to the anchors, version after version. With a staleness of 0
    each exchange is one version with all islands, so that the anchors have the bits of a synchronous mean. The order of
    islands is that of their names, shorter ones first: "9" comes before "10".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np

__all__ = ["Change", "DTYPES", "Fold", "Versions", "add_changes", "check_name", "in_order", "name_order", "newer_than"]

Change = tuple[int, str]
"""A version and the name of the island that put it."""

Versions = dict[str, int]
"""The newest version of each island."""

DTYPES: Final = ("<f4", "<f8")
"""Of changes and anchors."""

_CHARACTERS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_MOST_CHARACTERS: Final = 64


@dataclass(frozen=True)
class Fold:
    """Changes to be added to the anchors, in order, and the versions that are in them afterwards."""

    changes: tuple[Change, ...]
    versions: Versions


def check_name(name: object) -> str:
    """Return the name of an island.

    Raises:
        ValueError: it has characters other than letters, digits, ".", "_" and "-", or is too long.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_CHARACTERS or not _CHARACTERS.issuperset(name):
        raise ValueError(
            f"island must be a name of 1 to {_MOST_CHARACTERS} letters, digits, '.', '_' or '-'; got "
            f"{str(name)[:80]!r}."
        )
    return name


def name_order(name: str) -> tuple[int, str]:
    """Return the key that sorts names of islands."""
    return len(name), name


def in_order(changes: Iterable[Change]) -> list[Change]:
    """Return changes by version, and by island within a version."""
    return sorted(changes, key=lambda change: (change[0], name_order(change[1])))


def newer_than(taken: Mapping[str, int], there: Mapping[str, Sequence[int]]) -> list[Change]:
    """Return the changes among `there`, the versions of each island, that are newer than those taken, in order."""
    return in_order(
        (version, name) for name, versions in there.items() for version in versions if version > taken.get(name, 0)
    )


def add_changes(anchors: np.ndarray, changes: Sequence[tuple[Change, np.ndarray]], islands: int) -> None:
    """Add changes, which are in order, to anchors in place.

    Args:
        anchors: (n,), fp32 or fp64.
        changes: each with its values, (n,) of the dtype of the anchors.
        islands: the number of islands at the start, by which each change is divided.
    """
    scale = anchors.dtype.type(1.0 / islands)
    for _, versions in groupby(changes, key=lambda change: change[0][0]):
        (_, total), *others = versions
        for _, other in others:
            total = total + other
        anchors += total * scale
