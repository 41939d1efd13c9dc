"""What every transport offers the engine: collectives on flat tensors, and the memory that they are quickest with.

Owns the interface. It must not know units, passes or parameters: callers hand it flat tensors and say in words what
they are for. Each transport is a module beside this one; `wire/transports.py` chooses.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, final

import torch
import torch.distributed as dist

from zeroshard.table.trace import Ledger
from zeroshard.table.wires import Silence, Wire
from zeroshard.watch.watchdog import Watchdog
from zeroshard.wire.codec import Codec
from zeroshard.wire.memory import Memory, OwnMemory
from zeroshard.wire.mesh import Axis, Mesh
from zeroshard.wire.pool import Pool

__all__ = [
    "Channel",
    "Comm",
    "MOST_UNREAD",
    "Pending",
    "SoloComm",
    "Tag",
    "Vote",
    "gather_across_ranks",
    "mean_across_ranks",
]

Tensor = torch.Tensor
TEXT_BYTES = 4096
MOST_UNREAD = 6
"""Votes of one channel that a rank may have posted and not read."""


@final
@dataclass(frozen=True, slots=True)
class Tag:
    """The exchange of one bucket in one pass: what tells messages and meetings apart.

    A tag repeats itself long after its messages are gone.

    Args:
        number: of the pass, or from `Order.next_number`; it may be of any size.
        bucket: number of the bucket, below `BUCKETS`.
        what: the exchange in words, for errors.
    """

    number: int
    bucket: int
    what: str

    BUCKETS: ClassVar = 1 << 15
    """Buckets that a model may have."""
    PASSES: ClassVar = 1 << 14
    """Passes whose tags differ."""
    GATHER: ClassVar = 0
    REDUCE: ClassVar = 1
    AGREEMENTS: ClassVar = 4 * BUCKETS
    """The first place on the board behind those of buckets."""
    VOTES: ClassVar = 1 << 30
    """The first tag of messages behind those of buckets; gloo's tags have 31 bits."""

    @property
    def about(self) -> int:
        """What a meeting on the board is about, below 2**30: the board has 32 bits for it."""
        return self.number % self.PASSES * self.BUCKETS + self.bucket

    def message(self, kind: int) -> int:
        """Return the tag of messages of a `GATHER` or a `REDUCE`, below `VOTES`."""
        return 2 * self.about + kind

    def place(self, kind: int, *, has_read: bool = False) -> int:
        """Return the place on the board to say where values lie, or to say that they were read."""
        return 4 * self.bucket + 2 * kind + has_read


class Pending:
    """A collective under way. `wait()` once; it returns when the result may be read and the inputs reused."""

    def __init__(self, finish: Callable[[], bool | None]) -> None:
        self._finish = finish

    def wait(self) -> bool:
        """Block until the collective is done on this rank; False for a reduction that a rank was not ready for."""
        finish, self._finish = self._finish, _nothing
        return finish() is not False


def _nothing() -> None:
    return None


class Channel(IntEnum):
    """Which sequence a vote belongs to: the n-th in a channel on one rank meets the n-th there on the others."""

    PLACES = 0
    """What ranks tell one another at the same places of the program."""
    ROUNDS = 1
    """Rounds about requests, which some ranks come to while others have told their next places already."""
    OTHERS = 2


@final
class Vote:
    """Numbers that each rank tells the others, on their way; `read()` returns the least of each."""

    def __init__(self, hear: Callable[[], list[int]]) -> None:
        self._hear = hear

    def read(self) -> list[int]:
        """Block until all ranks have told theirs; again, where it was interrupted. No device is waited for."""
        return self._hear()


class Comm(ABC):
    """The collectives that the engine needs, over all ranks of the mesh.

    `sent_bytes` counts what this rank hands to others, over the wire or in memory of the host, by what it is for.
    """

    watchdog: Watchdog | None = None

    def __init__(self, mesh: Mesh, ledger: Ledger, wire: Wire, memory: Memory | None = None) -> None:
        self.mesh, self.wire = mesh, wire
        self.pool = Pool(memory or OwnMemory(), ledger)
        """Buffers in the memory that this transport wants gradients and parameters in, too."""
        self.sent_bytes: Counter[str] = Counter()
        self.can_postpone = False
        """Whether a rank may take part in a reduction to say that it is not ready."""

    @property
    def is_on_host(self) -> bool:
        """Whether its memory is the host's, which waits for what it needs of others and reads it at once.

        On a device the stream waits, and the host only where it reads something: for all that the device was told.
        """
        return self.mesh.device.type == "cpu"

    @abstractmethod
    def gather(self, full: Tensor, tag: Tag, kind: str = "gather", axis: Axis = "shard") -> Pending:
        """Fill `full` from each rank's own part of it, in place.

        Args:
            full: (N * S,) for the N ranks along `axis`, "shard" or "tensor"; the part of the n-th of them, at
                [n * S, (n + 1) * S), is already in place there.
            tag: the same on all ranks for the same bucket and pass.
        Collective: all-gather; each rank sends (N-1) * S elements.
        """

    @abstractmethod
    def reduce(self, full: Tensor | None, own: Tensor, codec: Codec, scale: float, tag: Tag) -> Pending:
        """Sum `full` over the ranks of one copy, multiply by `scale`, and leave this rank's shard of it in `own`.

        Args:
            full: (N * S,) for the N ranks of one copy; the other shards are not changed. None, where `can_postpone`:
                this rank is not ready. Then all ranks learn so, `own` holds anything, and `full` is as it was.
            own: (S,), this rank's shard of `full` itself or any other memory.
            codec: what elements are in messages; sums are made in fp32 or better.
        Returns: what waits for it, and says whether all ranks were ready.
        Collective: reduce-scatter (sum in rank order 0..N-1 where the backend allows); each rank sends (N-1) * S
            elements.
        """

    @abstractmethod
    def reduce_copies(self, own: Tensor, codec: Codec, scale: float, tag: Tag, *, is_ready: bool = True) -> Pending:
        """Sum this rank's shard over the R copies, two at least, and multiply by `scale`, in place.

        Args:
            own: (S,); S is a multiple of R.
            codec: as in `reduce`.
            is_ready: False, where `can_postpone`, as `full` is None in `reduce`.
        Returns: as `reduce`.
        Collective: all-reduce (sum in the order of copies where the backend allows) over the ranks that keep the same
            shard; each sends 2 * (R-1) * S / R elements.
        """

    @abstractmethod
    def route(self, given: Tensor, taken: Tensor, counts: Sequence[Sequence[int]], tag: Tag, kind: str) -> Pending:
        """Send elements to each rank of one copy, and fill `taken` with what each of them sends to this one.

        Args:
            given: (n,), in the order of the ranks that they are for.
            taken: (m,) in other memory, in the order of the ranks that they are from.
            counts: elements that the row's rank sends to the column's; the same on all ranks, zeros included.
        Collective: all-to-all over the ranks of one copy; each sends its row without what it keeps.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, what: str, kind: str, *, is_part: bool = False) -> None:
        """Overwrite `tensor` with rank 0's.

        Args:
            is_part: ranks along the tensor axis have their own parts: take that of the first rank that has the same.
        Collective: broadcast; every rank must call.
        """

    def call_before_waits(self, catch_up: Callable[[], None]) -> None:  # noqa: B027 (one process never waits)
        """Have `catch_up` called before the host of this rank waits for others, but within a call of it.

        It reads the votes that are posted: in one of them another rank may ask for what it needs to go on.
        """

    @abstractmethod
    def post(self, values: list[int], what: str, channel: Channel) -> Vote:
        """Tell the others some numbers; what is returned waits for the least of each.

        At most `MOST_UNREAD` votes of a channel may wait to be read, and they are read in order.
        Collective: all-reduce (minimum) of 8 bytes a number between hosts, in ceil(log2 N) messages a rank.
        """

    def agree(self, values: list[int], what: str) -> list[int]:
        """Return the minimum over ranks of each number. Collective: see `post`."""
        return self.post(values, what, Channel.OTHERS).read()

    @abstractmethod
    def flag(self, flags: Tensor, what: str) -> None:
        """Make each of some numbers the largest of all ranks', in place.

        Args:
            flags: finite, where parameters lie; the host need not know them, and they are not read.
        Collective: all-reduce (maximum).
        """

    @abstractmethod
    def collect(self, tensor: Tensor, what: str, kind: str = "agree") -> Tensor:
        """Return (world_size, *shape): every rank's `tensor`, by rank. Collective: all-gather; equal shapes."""

    def texts(self, text: str, what: str) -> list[str]:
        """Return every rank's text, cut to 4 KiB, by rank. Collective: all-gather of 4 KiB."""
        data = text.encode()[:TEXT_BYTES]
        row = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else row[:0]
        rows = self.collect(row, what)  # of the host: no kernel has to end for it
        return [bytes(r.tolist()).rstrip(b"\0").decode(errors="replace") for r in rows]


@final
class SoloComm(Comm):
    """One process: every collective is the identity."""

    def __init__(self, mesh: Mesh, ledger: Ledger) -> None:
        super().__init__(mesh, ledger, Silence())

    def gather(self, full: Tensor, tag: Tag, kind: str = "gather", axis: Axis = "shard") -> Pending:
        return Pending(_nothing)

    def reduce(self, full: Tensor | None, own: Tensor, codec: Codec, scale: float, tag: Tag) -> Pending:
        return Pending(_nothing)

    def reduce_copies(self, own: Tensor, codec: Codec, scale: float, tag: Tag, *, is_ready: bool = True) -> Pending:
        return Pending(_nothing)

    def route(self, given: Tensor, taken: Tensor, counts: Sequence[Sequence[int]], tag: Tag, kind: str) -> Pending:
        taken.copy_(given)
        return Pending(_nothing)

    def broadcast(self, tensor: Tensor, what: str, kind: str, *, is_part: bool = False) -> None:
        return None

    def post(self, values: list[int], what: str, channel: Channel) -> Vote:
        return Vote(lambda: values)

    def flag(self, flags: Tensor, what: str) -> None:
        return None

    def collect(self, tensor: Tensor, what: str, kind: str = "agree") -> Tensor:
        return tensor[None]


def gather_across_ranks(tensor: Tensor) -> Tensor:
    """Return (world_size, *shape): every rank's tensor, by rank; (1, *shape) for one process.

    Args:
        tensor: the same shape and dtype on every rank.
    Collective: all-gather on the default process group; every rank must call.

    ```python
    import torch, zeroshard as zs

    assert zs.gather_across_ranks(torch.ones(2)).shape == (1, 2)
    ```
    """
    if not dist.is_initialized():
        return tensor[None]
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor.contiguous())
    return torch.stack(rows)


def mean_across_ranks(tensor: Tensor) -> Tensor:
    """Return the mean of every rank's tensor, summed in rank order, so that all ranks get the same bits.

    Args:
        tensor: floating point, the same shape on every rank.
    Collective: all-gather on the default process group; every rank must call.

    ```python
    import torch, zeroshard as zs

    assert zs.mean_across_ranks(torch.tensor(3.0)) == 3.0
    ```
    """
    rows = gather_across_ranks(tensor.detach())
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total / len(rows)
