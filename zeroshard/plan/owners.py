"""Updates of whole matrices in a plan: who makes them, in which rounds, how long they take, and what they hold.

Owns the clock of such an update. Owners and rounds are those of `table/owners.py`, as in the engine. Must not know how
memory is counted (`film.py`). Needs no torch. Read "Note: the exchange" in `core/exchange.py` first.

Note: the clocks of other ranks
    A rank waits for the slowest owner of a round, because new values come from there. So `play` keeps a clock for each
    rank of a copy. All of them begin the update together, and have the same time for what they update on slices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final, NamedTuple, final

from zeroshard.plan.hardware import Cost, Device
from zeroshard.table.bytes import Owned, Updates
from zeroshard.table.owners import plan_owners, plan_rounds
from zeroshard.table.pool import Buffer
from zeroshard.table.spec import BucketSpec, itemsize

__all__ = ["Hands", "KINDS", "Matrix", "Turn", "own", "owned_bytes", "play", "shown_ranks", "turns_of"]

Shape = tuple[int, ...]
NEWTON_SCHULZ_STEPS: Final = 5
NARROW: Final = "bfloat16"
"""What torch's Muon iterates in."""
WIDE: Final = 4
"""Bytes of an element of updates before and after that."""


class Matrix(NamedTuple):
    """A parameter that an optimizer updates whole, and its place among the buckets.

    `cost` is what owners are balanced by; `kind` is a key of `KINDS`.
    """

    bucket: BucketSpec
    place: int
    shape: Shape
    cost: float
    state_bytes: int
    counter_bytes: int
    kind: str


@final
@dataclass(frozen=True)
class Kind:
    """How an optimizer updates one parameter: its kernels by shape, and what these hold at most beside its states."""

    kernels: Callable[[Shape], Sequence[Cost]]
    passing_bytes: Callable[[Shape], int]


def _matrices(shape: Shape) -> tuple[int, int, int]:
    """Return the number of matrices that a shape is a stack of, and their sides, the shorter one first."""
    *stack, rows, columns = shape if len(shape) < 4 else (shape[0], _numel(shape[1:]))
    return _numel(tuple(stack)), min(rows, columns), max(rows, columns)


def _numel(shape: Shape) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def _newton_schulz(shape: Shape) -> Sequence[Cost]:
    """Return the kernels of torch's Muon: momentum, five iterations of three products, decay and update."""
    count, m, n = _matrices(shape)
    around = [Cost(0, float(nbytes * m * n)) for nbytes in (12, 12, 6, 2, 4, 8, 10)]
    products = [(m, m, n), (m, m, m), (m, n, m)] * NEWTON_SCHULZ_STEPS
    iterations = [Cost(2.0 * a * b * c, 2.0 * (a * b + b * c + a * c), "matmul", a, b) for a, b, c in products]
    return [*around, *iterations] * count


def _newton_schulz_bytes(shape: Shape) -> int:
    """Return what an update of Muon holds at most.

    That is the update in fp32, and in the last product of an iteration its factor, its result, and two square ones.
    """
    _, m, n = _matrices(shape)
    return m * n * (WIDE + 2 * itemsize(NARROW)) + 2 * m * m * itemsize(NARROW)


def _adafactor(shape: Shape) -> Sequence[Cost]:
    """Return the kernels of torch's Adafactor: norms, the estimate of second moments, and the update."""
    return [Cost(0, float(nbytes * _numel(shape))) for nbytes in (4, 4, 4, 4, 8, 8, 8, 12, 4, 12)]


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "newton-schulz": Kind(_newton_schulz, _newton_schulz_bytes),
        # The estimate becomes the update; of a vector, its square lies beside that.
        "adafactor": Kind(_adafactor, lambda shape: _numel(shape) * WIDE * (1 if len(shape) > 1 else 2)),
        # Values and gradients are read, and values written; what is held is not known.
        "other": Kind(lambda shape: [Cost(0, 3.0 * WIDE * _numel(shape))], lambda shape: 0),
    }
)
"""How parameters are updated, by name."""


@final
@dataclass(frozen=True)
class Turn:
    """What is updated at once: one round of an exchange, or all matrices where each rank updates all.

    Args:
        rank: this one, among those of a copy.
        numels: that this rank gives of all, and that it owns; empty where nothing is exchanged.
        dtypes: of gradients and of values.
        most_numel: that any rank sends or receives one way.
        stays_numel: that this rank gives itself.
        held_bytes: on this rank, while it updates: copies of what came in parts, and what kernels hold.
        update_s: of each rank of a copy; of one where all do the same.
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
        """What this rank sends to owners, and back as one."""
        if not self.numels:
            return 0
        grad, value = map(itemsize, self.dtypes)
        given, owned = (numel - self.stays_numel for numel in self.numels)
        return given * (grad + value) + owned * value


def own(matrices: Sequence[Matrix], ranks: int) -> list[Owned]:
    """Return the matrices of one optimizer with their owners, as each rank computes these for itself.

    Args:
        matrices: in the order of the optimizer's groups.
        ranks: of a copy of the state.
    """
    costs = [one.cost * one.bucket.is_trained for one in matrices]
    numels = [one.bucket.layout.numels[one.place] for one in matrices]
    owners = plan_owners(costs, numels, ranks)
    return [
        Owned(one.bucket, one.place, owner, one.state_bytes, one.counter_bytes)
        for one, owner in zip(matrices, owners, strict=True)
    ]


def owned_bytes(updates: Sequence[Updates], ranks: int) -> list[int]:
    """Return the bytes of states of matrices, counters included, that each rank of a copy keeps."""
    found = [0] * ranks
    for one in (one for some in updates for one in some.whole if one.bucket.is_trained):
        for rank in range(ranks) if one.bucket.updates_all else [one.owner]:
            found[rank] += one.state_bytes + one.counter_bytes
    return found


def shown_ranks(ranks: int, owned: Sequence[int], most: int) -> list[tuple[str, int, int]]:
    """Return the ranks of a copy, besides the first, that a plan shows: name, how many it stands for, and which.

    Args:
        owned: what `owned_bytes` returned.
        most: ranks that are shown one by one.
    """
    if ranks <= most:
        return [(f"rank {rank}", 1, rank) for rank in range(1, ranks)]
    order = sorted(range(1, ranks), key=lambda rank: (-owned[rank], rank))
    if len({*owned}) == 1:  # shards differ in how much of them is padding, the last one most
        order = [ranks - 1, *range(1, ranks - 1)]
    name = f"rank {order[0]}" + ", with the most states" * (owned[order[0]] > owned[0])
    name = "the last shard" if len({*owned}) == 1 else name
    rest = [("the others" if len({*owned}) == 1 else "the others, about", ranks - 2, order[1])] if ranks > 2 else []
    return [*rest, (name, 1, order[0])]


def turns_of(matrices: Sequence[Matrix], owned: Sequence[Owned], device: Device) -> list[Turn]:
    """Return what is updated after the slices, in the order of the engine.

    Args:
        matrices: of one optimizer.
        owned: the same with their owners.
    """
    seconds: dict[tuple[str, Shape], float] = {}

    def update_s(one: Matrix) -> float:
        key = one.kind, one.shape
        if key not in seconds:
            seconds[key] = sum(device.kernel_s(cost, NARROW) for cost in KINDS[one.kind].kernels(one.shape))
        return seconds[key]

    here, away = list[Matrix](), dict[tuple[str, str], list[tuple[Matrix, int]]]()
    for matrix, owner in zip(matrices, (one.owner for one in owned), strict=True):
        if matrix.bucket.is_trained and matrix.bucket.updates_all:
            here.append(matrix)
        elif matrix.bucket.is_trained:
            formats = matrix.bucket.formats
            away.setdefault((formats.grad, formats.state), []).append((matrix, owner))
    found = [Turn(0, (), ("", ""), 0, 0, _held_bytes(here), [sum(map(update_s, here))])] if here else []
    for dtypes, some in away.items():
        parts = [one.bucket.layout.numels_by_rank(one.place) for one, _ in some]
        rank = some[0][0].bucket.rank
        for turn in plan_rounds([owner for _, owner in some], parts):
            counts = turn.counts
            given, taken = [sum(row) for row in counts], [sum(column) for column in zip(*counts, strict=True)]
            stays = [row[place] for place, row in enumerate(counts)]
            most = max(max(out, back) - same for out, back, same in zip(given, taken, stays, strict=True))
            mine = [some[place][0] for place in turn.bundles[rank]]
            # A matrix that came alone is there as it is; several came rank by rank.
            joined = sum(map(itemsize, dtypes)) * taken[rank] * (len(mine) > 1)
            times = [sum(update_s(some[place][0]) for place in bundle) for bundle in turn.bundles]
            numels = given[rank], taken[rank]
            found.append(Turn(rank, numels, dtypes, most, stays[rank], joined + _held_bytes(mine), times))
    return found


def _held_bytes(matrices: Sequence[Matrix]) -> int:
    """Return what updates of matrices hold at most, one after the other, beside gradients in another dtype."""
    converted = 0
    for one in matrices:
        formats = one.bucket.formats
        converted += _numel(one.shape) * itemsize(formats.state) * (formats.grad != formats.state)
    return converted + max((KINDS[one.kind].passing_bytes(one.shape) for one in matrices), default=0)


class Hands(NamedTuple):
    """What an update does to memory and lanes, of the rank that is simulated.

    `take` and `give` are of pooled buffers: elements and dtype; `hold` and `drop` of memory beside them. `compute`
    runs a number of seconds, `wait` waits until a moment, and `send` exchanges matrices: what, the most bytes of a rank
    in each message, and the moment before which it cannot begin; it returns when it is over. `now` is the time.
    """

    take: Callable[[int, str], Buffer]
    give: Callable[[Sequence[Buffer]], None]
    hold: Callable[[int], int]
    drop: Callable[[int], None]
    compute: Callable[[str, float], None]
    wait: Callable[[str, float], None]
    send: Callable[[str, Sequence[int], float], float]
    now: Callable[[], float]


def play(turns: Sequence[Turn], hands: Hands, update_slices: Callable[[], None]) -> None:
    """Play an update: of slices first, then turn by turn, in the order of `core/update.py`.

    Args:
        update_slices: of what is not updated whole; the same on all ranks.
    """
    clocks = [0.0] * max((len(one.update_s) for one in turns), default=1)
    queue = [_Piece(one, hands, clocks) for one in turns]
    for piece in queue[:1]:
        piece.start()
    update_slices()
    clocks[:] = [hands.now()] * len(clocks)
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
    """A turn while it is played: `core/exchange.py` says what each part of it does."""

    def __init__(self, turn: Turn, hands: Hands, clocks: list[float]) -> None:
        self._turn, self._hands, self._clocks = turn, hands, clocks
        self._buffers: list[Buffer] = []
        self._there_s = self._back_s = 0.0

    def start(self) -> None:
        """Take the buffers, and send gradients and values to the owners."""
        turn, hands = self._turn, self._hands
        # An exchange of nothing takes a buffer, too.
        self._buffers = [hands.take(max(1, numel), dtype) for dtype in turn.dtypes for numel in turn.numels]
        self._there_s = self._send("matrices to their owners", turn.dtypes)

    def _send(self, what: str, dtypes: Sequence[str]) -> float:
        if not self._turn.numels:
            return 0.0
        nbytes = [self._turn.most_numel * itemsize(dtype) for dtype in dtypes]
        return self._hands.send(what, nbytes, max(self._clocks))

    def update(self) -> None:
        """Wait for what was sent, update, and begin to send new values back."""
        turn, hands = self._turn, self._hands
        hands.wait("matrices", self._there_s)
        hands.give(self._buffers[:1])
        held = hands.hold(turn.held_bytes)
        hands.compute("update of matrices", turn.update_s[turn.rank])
        for rank, took_s in enumerate(turn.update_s):
            self._clocks[rank] = max(self._clocks[rank], self._there_s) + took_s
        hands.drop(held)
        hands.give(self._buffers[1:2])
        self._back_s = self._send("matrices from their owners", turn.dtypes[1:])

    def close(self) -> None:
        """Wait for the new values."""
        self._hands.wait("new values of matrices", self._back_s)
        self._clocks[:] = [max(clock, self._back_s) for clock in self._clocks]
        self._hands.give(self._buffers[2:])
