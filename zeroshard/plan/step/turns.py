"""Updates of whole matrices in a plan: owners, rounds, time and memory.

Owns the clock of such an update. Owners and rounds are from `table/owners.py`, as in the engine. It must not know how
memory is counted (`film.py`). Needs no torch. Read "Note: the exchange" in `update/exchange.py` first.

Note: the clocks of other ranks
    A rank waits for the slowest owner of a round, because owners send new values. Therefore `play` keeps a clock for
    each rank of a replica. All ranks start the update together, and need the same time for updates of slices.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType
from typing import Final, final

from zeroshard.plan.machine.hardware import Cost, Device
from zeroshard.plan.step.clock import Clock
from zeroshard.plan.step.storages import Storages
from zeroshard.table.bytes import Owned
from zeroshard.table.owners import plan_rounds
from zeroshard.table.pool import Buffer
from zeroshard.table.spec import itemsize

__all__ = ["KINDS", "Turn", "play", "shown_ranks", "turns_of"]

Shape = tuple[int, ...]
NEWTON_SCHULZ_STEPS: Final = 5
NARROW: Final = "bfloat16"
"""Dtype of the iterations of torch's Muon."""
WIDE: Final = 4
"""Bytes of an element of updates outside the iterations."""


@final
@dataclass(frozen=True)
class Kind:
    """The update of one parameter by an optimizer, by shape.

    Args:
        passing_bytes: the peak of temporary memory.
        left_bytes: what of it a loop over parameters keeps until it has the temporary memory of the next one.
        total: numbers for each element of all parameters of a group, which one call updates.
    """

    kernels: Callable[[Shape], Sequence[Cost]]
    passing_bytes: Callable[[Shape], int]
    left_bytes: Callable[[Shape], int] = lambda shape: 0
    total: int = 0


def _matrices(shape: Shape) -> tuple[int, int, int]:
    """Return the number of matrices in a stack of this shape, and their sides, the shorter side first."""
    *stack, rows, columns = shape if len(shape) < 4 else (shape[0], math.prod(shape[1:]))
    return math.prod(stack), min(rows, columns), max(rows, columns)


def _newton_schulz(shape: Shape) -> Sequence[Cost]:
    """Return the kernels of torch's Muon: momentum, five iterations of three products, weight decay and update."""
    count, m, n = _matrices(shape)
    around = [Cost(0, float(nbytes * m * n)) for nbytes in (12, 12, 6, 2, 4, 8, 10)]
    products = [(m, m, n), (m, m, m), (m, n, m)] * NEWTON_SCHULZ_STEPS
    iterations = [Cost(2.0 * a * b * c, 2.0 * (a * b + b * c + a * c), "matmul", a, b) for a, b, c in products]
    return [*around, *iterations] * count


def _newton_schulz_bytes(shape: Shape) -> int:
    """Return the peak of temporary memory in an update of Muon.

    That is the update in fp32, and, in the last product of an iteration, a factor, the result, and two square matrices.
    """
    _, m, n = _matrices(shape)
    return m * n * (WIDE + 2 * itemsize(NARROW)) + 2 * m * m * itemsize(NARROW)


def _adafactor(shape: Shape) -> Sequence[Cost]:
    """Return the kernels of torch's Adafactor: norms, the estimate of second moments, and the update."""
    return [Cost(0, float(nbytes * math.prod(shape))) for nbytes in (4, 4, 4, 4, 8, 8, 8, 12, 4, 12)]


_IN_LOOPS: Final = lambda s: math.prod(s) * WIDE * (1 if s[1:] else 2), lambda s: math.prod(s) * WIDE
"""Of Adafactor: the estimate becomes the update; for a vector, its square is also held."""
_ON_LISTS: Final = (lambda s: 0,) * 2
KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "newton-schulz": Kind(_newton_schulz, _newton_schulz_bytes),
        "adafactor": Kind(_adafactor, *_IN_LOOPS),
        "adafactor on lists": Kind(_adafactor, *_ON_LISTS, total=1),
        # The updates of all parameters of a group are there before the first is added to its moment.
        "adafactor with moments": Kind(_adafactor, *_IN_LOOPS, total=1),
        "adafactor on lists with moments": Kind(_adafactor, *_ON_LISTS, total=2),
        # Values and gradients are read, and values written; of temporary memory, the trace is `plan/named.py`'s.
        "other": Kind(lambda shape: [Cost(0, 3.0 * WIDE * math.prod(shape))], lambda shape: 0),
    }
)
"""Kinds of updates, by name."""


@final
@dataclass(frozen=True)
class Turn:
    """Parameters that are updated at once: a round of an exchange, or all matrices if each rank updates all.

    Args:
        rank: index of this rank in the replica.
        numels: elements that this rank sends in total, and that it owns; empty without an exchange.
        dtypes: dtypes of gradients and of values.
        most_numel: maximum of the elements that a rank sends or receives in one direction.
        stays_numel: elements that this rank keeps as their owner.
        held_bytes: temporary memory of this rank during the update: copies of received parts, and memory of kernels.
        update_s: seconds of each rank of the replica; one entry if all ranks do the same.
    """

    rank: int
    numels: tuple[int, ...]
    dtypes: tuple[str, str]
    most_numel: int
    stays_numel: int
    held_bytes: int
    update_s: Sequence[float]

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to owners, and back as an owner."""
        if not self.numels:
            return 0
        grad, value = map(itemsize, self.dtypes)
        given, owned = (numel - self.stays_numel for numel in self.numels)
        return given * (grad + value) + owned * value


def shown_ranks(ranks: int, owned: Sequence[int], most: int) -> list[tuple[str, int, int]]:
    """Return the ranks of a replica, besides the first, that a plan shows: (name, number of such ranks, index).

    Args:
        owned: bytes of states by rank, all equal where they differ only in padding.
        most: maximum number of ranks that are shown separately.
    """
    if ranks <= most:
        return [(f"rank {rank}", 1, rank) for rank in range(1, ranks)]
    order = sorted(range(1, ranks), key=lambda rank: (-owned[rank], rank))
    groups = [[*some] for _, some in groupby(order, owned.__getitem__)]
    if len(groups) <= most and len({*owned}) > 1:
        return [
            (f"rank {some[0]}" if len(some) == 1 else f"{len(some)} ranks like rank {some[0]}", len(some), some[0])
            for some in groups
        ]
    if len({*owned}) == 1:  # shards differ only in padding, the last shard most
        order = [ranks - 1, *range(1, ranks - 1)]
    name = f"rank {order[0]}" + ", with the most states" * (owned[order[0]] > owned[0])
    name = "the last shard" if len({*owned}) == 1 else name
    rest = [("the others" if len({*owned}) == 1 else "the others, about", ranks - 2, order[1])] if ranks > 2 else []
    return [*rest, (name, 1, order[0])]


def turns_of(matrices: Sequence[Owned], device: Device) -> list[Turn]:
    """Return the updates after those of slices, in the order of the engine.

    Args:
        matrices: of one optimizer.
    """

    @cache
    def seconds(kind: str, shape: Shape) -> float:
        return sum(device.kernel_s(cost, NARROW) for cost in KINDS[kind].kernels(shape))

    here, away = list[Owned](), dict[tuple[str, str], list[Owned]]()
    for matrix in matrices:
        if matrix.bucket.is_trained and matrix.bucket.updates_all:
            here.append(matrix)
        elif matrix.bucket.is_trained:
            formats = matrix.bucket.formats
            away.setdefault((formats.grad, formats.state), []).append(matrix)
    here_s = [sum(seconds(one.kind, one.shape) for one in here)]
    found = [Turn(0, (), ("", ""), 0, 0, _held_bytes(here), here_s)] if here else []
    for dtypes, some in away.items():
        parts = [one.bucket.layout.numels_by_rank(one.index) for one in some]
        rank = some[0].bucket.rank
        for turn in plan_rounds([one.owner for one in some], parts):
            counts = turn.counts
            given, taken = [sum(row) for row in counts], [sum(column) for column in zip(*counts, strict=True)]
            stays = [row[place] for place, row in enumerate(counts)]
            most = max(max(out, back) - same for out, back, same in zip(given, taken, stays, strict=True))
            mine = [some[place] for place in turn.bundles[rank]]
            # A matrix that arrives alone is contiguous; several matrices arrive rank by rank.
            joined = sum(map(itemsize, dtypes)) * taken[rank] * (len(mine) > 1)
            times = [sum(seconds(some[n].kind, some[n].shape) for n in bundle) for bundle in turn.bundles]
            numels = given[rank], taken[rank]
            found.append(Turn(rank, numels, dtypes, most, stays[rank], joined + _held_bytes(mine), times))
    return found


def _held_bytes(matrices: Sequence[Owned]) -> int:
    """Return the peak of temporary memory of consecutive updates of matrices, without gradients in another dtype."""
    converted, most = 0, 0
    for one in matrices:
        formats = one.bucket.formats
        converted += math.prod(one.shape) * itemsize(formats.state) * (formats.grad != formats.state)
    for _, some in groupby(matrices, attrgetter("group")):
        group = [(KINDS[one.kind], one.shape) for one in some]
        left = [0, *(kind.left_bytes(shape) for kind, shape in group)]
        passing = (kind.passing_bytes(shape) for kind, shape in group)
        total = sum(kind.total * math.prod(shape) * WIDE for kind, shape in group)
        most = max(most, total + max(map(sum, zip(left, passing, strict=False))))
    return converted + most


def play(turns: Sequence[Turn], clock: Clock, storages: Storages, update_slices: Callable[[], None]) -> None:
    """Simulate an update: of slices first, then turn by turn, in the order of `optim/pieces.py`.

    Args:
        update_slices: updates parameters that are not updated as a whole; the same on all ranks.
    """
    clocks = [0.0] * max((len(one.update_s) for one in turns), default=1)
    queue = [_Piece(one, clock, storages, clocks) for one in turns]
    for piece in queue[:1]:
        piece.start()
    update_slices()
    clocks[:] = [clock.now_s] * len(clocks)
    for place, piece in enumerate(queue):
        if place + 1 < len(queue):
            queue[place + 1].start()
        piece.update()
        if place:
            queue[place - 1].close()
    for piece in queue[-1:]:
        piece.close()


@final
class _Piece:
    """A turn during the simulation, in the steps of `update/exchange.py`."""

    def __init__(self, turn: Turn, clock: Clock, storages: Storages, clocks: list[float]) -> None:
        self._turn, self._clock, self._storages, self._clocks = turn, clock, storages, clocks
        self._buffers: list[Buffer] = []
        self._there_s = self._back_s = 0.0

    def start(self) -> None:
        """Allocate the buffers, and send gradients and values to the owners."""
        take, what = self._storages.take, "matrices on their way"
        # An empty exchange also takes a buffer.
        self._buffers = [
            take(max(1, numel), dtype, "", what) for dtype in self._turn.dtypes for numel in self._turn.numels
        ]
        self._there_s = self._send("matrices to their owners", self._turn.dtypes)

    def _send(self, what: str, dtypes: Sequence[str]) -> float:
        if not self._turn.numels:
            return 0.0
        works = [("all-to-all", self._turn.most_numel * itemsize(dtype), "shard") for dtype in dtypes]
        return self._clock.collect("gather", what, works, not_before_s=max(self._clocks))

    def update(self) -> None:
        """Wait for the matrices, update, and start to send new values back."""
        turn, storages = self._turn, self._storages
        self._clock.wait("matrices", self._there_s)
        storages.give(self._buffers[:1])
        held = storages.make(turn.held_bytes, "transient", "", "the optimizer's kernels")
        self._clock.compute("update of matrices", turn.update_s[turn.rank])
        for rank, took_s in enumerate(turn.update_s):
            self._clocks[rank] = max(self._clocks[rank], self._there_s) + took_s
        storages.drop(held)
        storages.give(self._buffers[1:2])
        self._back_s = self._send("matrices from their owners", turn.dtypes[1:])

    def close(self) -> None:
        """Wait for the new values."""
        self._clock.wait("new values of matrices", self._back_s)
        self._clocks[:] = [max(clock, self._back_s) for clock in self._clocks]
        self._storages.give(self._buffers[2:])
