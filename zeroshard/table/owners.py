"""Which rank updates which whole matrix, and which matrices are exchanged at once. Integers and costs only.

Owns the plan of an exchange. It must not know tensors or transports. Read `core/exchange.py` for what is made of it.

Note: balance
    Costs are balanced over all matrices of an optimizer. Two well-known ways are tried, and the better plan is taken:
    the next largest cost goes to the rank with the least (longest first); or all go to the first rank with room below
    a limit, for the smallest limit that is found by halving (multifit). No plan can be better than the mean or the
    largest cost. All ranks work the plan out for themselves, so it depends on its arguments alone.

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
"""Elements of small matrices that an owner gets at once; a larger matrix comes alone."""
HALVINGS = 16
GAIN = 1.01
"""By how much the first fit must be better: it leaves the last ranks with little to do, and less to keep."""


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
        costs: of the update of each matrix, in any unit.
        numels: elements of each; where costs are equal, ranks get about as many.
        loads: what each rank has to do already.
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
    """Return owners whose costs are within a limit; None where they are not found."""
    owners, sums, rank, before = [0] * len(costs), [*loads], 0, -1.0
    for one in order:
        # Where one did not fit, the next one of the same cost does not.
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
    """What is exchanged at once.

    Args:
        parts: of each matrix, the elements in each rank's slice of it; they follow each other.
        bundles: of each rank, the matrices that it owns, by their places in `parts`.
    """

    parts: Sequence[Sequence[int]]
    bundles: tuple[tuple[int, ...], ...]

    @cached_property
    def counts(self) -> list[list[int]]:
        """Of each rank, the elements that it has of each owner's matrices."""
        ranks = range(len(self.bundles))
        return [[sum(self.parts[one][rank] for one in bundle) for bundle in self.bundles] for rank in ranks]

    def given_numel(self, rank: int) -> int:
        """Return the elements that a rank has of all."""
        return sum(self.counts[rank])

    def owned_numel(self, rank: int) -> int:
        """Return the elements of the matrices that a rank owns."""
        return sum(row[rank] for row in self.counts)


def plan_rounds(owners: Sequence[int], parts: Sequence[Sequence[int]]) -> list[Round]:
    """Return the exchanges of some matrices: in each about one matrix of each owner, large ones first.

    Args:
        owners: of each matrix.
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
    """Take from the end of a queue what is exchanged at once."""
    bundle, numel = list[int](), 0
    while queue and (not bundle or numel + numels[queue[-1]] <= PIECE_NUMEL):
        bundle.append(queue.pop())
        numel += numels[bundle[-1]]
    return tuple(bundle)
