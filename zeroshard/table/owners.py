"""The assignment of whole matrices to ranks that update them, and the rounds of their exchange.

Owns the plan of an exchange, in integers and costs. It must not know tensors or transports. `update/exchange.py` runs
the plan.

Note: balance
    Costs are balanced over all matrices of an optimizer, by the better of two known heuristics. Longest first: the next
    largest cost goes to the rank with the smallest load. Multifit: each matrix goes to the first rank with room below a
    limit, with bisection for the smallest limit. The mean and the largest cost are lower bounds. Every rank computes
    the plan, so the plan depends only on its arguments.

Source: Coffman, Garey, Johnson 1978, "An application of bin-packing to multiprocessor scheduling".
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

__all__ = ["PIECE_NUMEL", "Round", "newton_schulz_cost", "plan_owners", "plan_rounds"]

PIECE_NUMEL = 1 << 20
"""Elements of small matrices that an owner receives in one round; a larger matrix has its own round."""
HALVINGS = 16
GAIN = 1.01
"""The required advantage of first fit, which leaves the last ranks with little work and less state."""


def newton_schulz_cost(shape: Sequence[int]) -> float:
    """Return the relative time to orthogonalize a matrix of m rows and n columns, m <= n: 2 m^2 n + m^3.

    That is what the products of one iteration take. Of more than two dimensions the first ones are taken as a stack of
    matrices.
    """
    if len(shape) < 2 or not math.prod(shape):
        return float(math.prod(shape))
    small, large = sorted(shape[-2:])
    return math.prod(shape) * small * (2 + small / large)


def plan_owners(
    costs: Sequence[float], numels: Sequence[int], ranks: int, loads: Sequence[float] | None = None
) -> list[int]:
    """Return the owner of each matrix.

    Args:
        costs: cost of the update of each matrix, in any unit.
        numels: number of elements of each matrix, to balance matrices of equal cost.
        loads: previous load of each rank.
    """
    loads = loads or [0.0] * ranks
    order = sorted(range(len(costs)), key=lambda one: (-costs[one], -numels[one], one))
    best = _longest_first(costs, numels, order, loads)
    low = max([sum(costs, sum(loads)) / ranks, *costs])
    high = max(_sums(best, costs, loads))
    for _ in range(HALVINGS):
        limit = (low + high) / 2
        found = _first_fit(costs, order, loads, limit)
        if found is not None and (most := max(_sums(found, costs, loads))) < high / GAIN:
            best, high = found, most
        else:
            low = limit
    return best


def _sums(owners: Sequence[int], costs: Sequence[float], loads: Sequence[float]) -> list[float]:
    sums = [*loads]
    for owner, cost in zip(owners, costs, strict=True):
        sums[owner] += cost
    return sums


def _longest_first(
    costs: Sequence[float], numels: Sequence[int], order: Sequence[int], loads: Sequence[float]
) -> list[int]:
    owners = [0] * len(costs)
    ranks = [(load, 0, rank) for rank, load in enumerate(loads)]
    heapq.heapify(ranks)
    for one in order:
        load, numel, rank = ranks[0]
        owners[one] = rank
        heapq.heapreplace(ranks, (load + costs[one], numel + numels[one], rank))
    return owners


def _first_fit(costs: Sequence[float], order: Sequence[int], loads: Sequence[float], limit: float) -> list[int] | None:
    """Return owners with loads within a limit; None if first fit finds none."""
    owners, sums, rank, before = [0] * len(costs), [*loads], 0, -1.0
    for one in order:
        # A rank without room for one matrix has no room for the next matrix of the same cost.
        rank = rank if costs[one] == before else 0
        before = costs[one]
        while rank < len(sums) and sums[rank] + before > limit * (1 + 1e-12):
            rank += 1
        if rank == len(sums):
            return None
        owners[one], sums[rank] = rank, sums[rank] + before
    return owners


@final
@dataclass(frozen=True)
class Round:
    """The matrices of one exchange.

    Args:
        parts: for each matrix, the number of elements of each rank's slice.
        bundles: for each rank, the indices in `parts` of the matrices that it owns.
    """

    parts: Sequence[Sequence[int]]
    bundles: tuple[tuple[int, ...], ...]

    @cached_property
    def counts(self) -> list[list[int]]:
        """For each rank, the number of elements of its slices of each owner's matrices."""
        ranks = range(len(self.bundles))
        return [[sum(self.parts[one][rank] for one in bundle) for bundle in self.bundles] for rank in ranks]

    def given_numel(self, rank: int) -> int:
        """Return the number of elements of a rank's slices of all matrices."""
        return sum(self.counts[rank])

    def owned_numel(self, rank: int) -> int:
        """Return the number of elements of the matrices that a rank owns."""
        return sum(row[rank] for row in self.counts)


def plan_rounds(owners: Sequence[int], parts: Sequence[Sequence[int]]) -> list[Round]:
    """Return the rounds of an exchange, each with about one matrix of each owner, large matrices first.

    Args:
        owners: owner of each matrix.
        parts: as in `Round`.
    """
    numels, queues = [sum(one) for one in parts], [list[int]() for _ in parts[0]] if parts else []
    for one in sorted(range(len(owners)), key=lambda one: (numels[one], -one)):
        queues[owners[one]].append(one)
    rounds = []
    while any(queues):
        rounds.append(Round(parts, tuple(_bundle(queue, numels) for queue in queues)))
    return rounds


def _bundle(queue: list[int], numels: Sequence[int]) -> tuple[int, ...]:
    """Take the matrices of one round from the end of a queue."""
    bundle, numel = list[int](), 0
    while queue and (not bundle or numel + numels[queue[-1]] <= PIECE_NUMEL):
        bundle.append(queue.pop())
        numel += numels[bundle[-1]]
    return tuple(bundle)
