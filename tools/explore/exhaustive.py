"""All programs of two steps of one size, up to renaming of ranks: with a re-entry, with a failure, with neither.

Owns which programs there are, and which need not be run. It must not know how one is run.

Note: what is not run
    What ranks do in a step depends on what each does in it and on what their orders decide by at its beginning
    (`run.state_of`). So all first steps are run, with each re-entry and each failure; of those that leave the same
    state, one of these programs continues with each second step, and is counted for all of them. The first step is not
    run again each time.
    Where the ranks' states are equal, second steps that differ by the names of ranks count once.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .program import Op, Path, Program, Transport, failures_in, flat, orders, orders_again

__all__ = ["Class", "Size", "first_steps", "is_plain", "second_steps"]


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
        first: one of them; a plain one, if there is one.
        is_symmetric: whether all ranks are in the same state.
        plain: how many enter no unit again and have no failure.
        other: how many do.
    """

    first: Program
    is_symmetric: bool
    plain: int = 0
    other: int = 0

    def add(self, program: Program) -> None:
        """Count another."""
        if is_plain(program):
            if not self.plain:
                self.first = program
            self.plain += 1
        else:
            self.other += 1


def first_steps(size: Size) -> Iterator[Program]:
    """Yield all first steps, ranks in the order of what they use."""
    for paths, again in _combinations(size, is_ordered=False):
        program = Program(size.ranks, size.units, _step(paths), None, size.transport)
        yield program
        if not again:
            yield from _with_failures(program, range(2))


def second_steps(one: Class, size: Size) -> Iterator[tuple[Program, int]]:
    """Yield the programs that continue with each second step, and how many programs each stands for."""
    for paths, again in _combinations(size, is_ordered=not one.is_symmetric):
        program = replace(one.first, ops=one.first.ops + _step(paths))
        if not again:
            yield program, one.plain + one.other
        if again and one.plain:
            yield program, one.plain
        elif one.plain:
            for failed in _with_failures(program, range(4, 6)):
                yield failed, one.plain


def is_plain(program: Program) -> bool:
    """Tell whether no unit is entered again, and no rank fails."""
    return program.failure is None and not any(len(set(path)) < len(path) for op in program.ops for path in op.paths)


def _step(paths: tuple[Path, ...]) -> tuple[Op, ...]:
    return Op("forward", paths), Op("backward"), Op("norm"), Op("step")


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
