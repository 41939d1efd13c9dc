"""All programs of two steps of one size, up to renaming of ranks.

Owns which programs there are, and which need not be run. It must not know how one is run.

Note: what is not run
    What ranks do in a step depends on what each does in it and on what their orders decide by at its beginning
    (`run.state_of`). So all first steps are run, with each re-entry and each failure; of those that leave the same
    state, one goes on with each second step, and counts for all of them. Where the ranks' states are equal, second
    steps that differ by the names of ranks count once.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .program import Op, Path, Program, Transport, failures_in, flat, orders, orders_again

__all__ = ["Class", "Size", "first_steps", "second_steps"]


class Size(NamedTuple):
    """Which programs: how many ranks, how many units with the root, over which transport."""

    ranks: int
    units: int
    transport: Transport

    def __str__(self) -> str:
        return f"{self.ranks} ranks, root and {self.units - 1} units, {self.transport}"


@dataclass
class Class:
    """First steps that leave the same state.

    Args:
        first: one of them, with the fewest re-entries and failures.
        is_symmetric: whether all ranks are in the same state.
        counts: how many there are, by whether a unit is entered again and whether a rank fails.
    """

    first: Program
    is_symmetric: bool
    counts: Counter[tuple[bool, bool]] = field(default_factory=Counter)

    def members(self, *, again: bool, fails: bool) -> int:
        """Return how many may go on with a second step that enters a unit again, or fails, as no program does twice."""
        return sum(count for (a, f), count in self.counts.items() if not (a and again) and not (f and fails))


def first_steps(size: Size) -> Iterator[tuple[Program, bool]]:
    """Yield all first steps, ranks in the order of what they use, and whether one enters a unit again."""
    for paths, again in _combinations(size, is_ordered=False):
        program = Program(size.ranks, size.units, _step(paths), None, size.transport)
        yield program, again
        for failed in _with_failures(program, range(2)):
            yield failed, again


def second_steps(one: Class, size: Size, *, again: bool, fails: bool) -> Iterator[Program]:
    """Yield the programs that go on with each second step.

    Args:
        again: whether these enter a unit again.
        fails: whether a rank fails in these.
    """
    for paths, is_again in _combinations(size, is_ordered=not one.is_symmetric):
        if is_again == again:
            program = replace(one.first, ops=one.first.ops + _step(paths))
            if fails:
                yield from _with_failures(program, range(3, 5))
            else:
                yield program


def _step(paths: tuple[Path, ...]) -> tuple[Op, ...]:
    return Op("forward", paths), Op("backward"), Op("step")


def _with_failures(program: Program, ops: Sequence[int]) -> Iterator[Program]:
    for op in ops:
        for failure in failures_in(program, op):
            yield replace(program, failure=failure)


def _combinations(size: Size, *, is_ordered: bool) -> Iterator[tuple[tuple[Path, ...], bool]]:
    """Yield what each rank uses, with at most one re-entry in all; in each order of ranks, or in one."""
    plain, again = list(map(flat, orders(size.units))), list(map(flat, orders_again(size.units)))
    if is_ordered:
        for paths in itertools.product(plain, repeat=size.ranks):
            yield paths, False
        for place in range(size.ranks):
            for paths in itertools.product(*(again if rank == place else plain for rank in range(size.ranks))):
                yield paths, True
    else:
        for paths in itertools.combinations_with_replacement(plain, size.ranks):
            yield paths, False
        for path in again:
            for others in itertools.combinations_with_replacement(plain, size.ranks - 1):
                yield (path, *others), True
