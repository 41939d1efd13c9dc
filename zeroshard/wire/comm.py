"""The interface of transports: collectives on flat tensors, and the memory in which they are fastest.

Owns the interface. It must not know units, passes or parameters: callers pass flat tensors, and a description for
errors. Each transport is a module of `wire/`; `wire/transports.py` chooses.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.table.trace import Ledger
from zeroshard.table.wires import Silence, Wire
from zeroshard.torch_groups import default_store, named_group
from zeroshard.watch.last_words import waits_outside
from zeroshard.watch.watchdog import Watchdog
from zeroshard.wire.buffers import Pool
from zeroshard.wire.codec import Codec
from zeroshard.wire.memory import Memory, OwnMemory
from zeroshard.wire.mesh import Axis, Mesh

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
    "unexpanded",
]

Tensor = torch.Tensor
TEXT_BYTES = 4096
MOST_UNREAD = 6
"""Votes of one channel that a rank may have posted and not yet read."""


@final
@dataclass(frozen=True, slots=True)
class Tag:
    """The identity of an exchange: one bucket in one pass.

    Distinguishes messages and meetings. A tag repeats only long after its messages were received.

    Args:
        number: number of the pass, or from `Order.next_number`, without a limit.
        bucket: number of the bucket, below `BUCKETS`.
        what: description of the exchange, for errors.
    """

    number: int
    bucket: int
    what: str

    BUCKETS: ClassVar = 1 << 15
    """Maximum number of buckets of a model."""
    PASSES: ClassVar = 1 << 14
    """Number of passes with distinct tags."""
    GATHER: ClassVar = 0
    REDUCE: ClassVar = 1
    AGREEMENTS: ClassVar = 4 * BUCKETS
    """The first place on the board after the places of buckets."""
    VOTES: ClassVar = 1 << 30
    """The first message tag after the tags of buckets; gloo's tags have 31 bits."""

    @property
    def about(self) -> int:
        """The identity of a meeting on the board, below 2**30: the board has 32 bits for it."""
        return self.number % self.PASSES * self.BUCKETS + self.bucket

    def message(self, kind: int) -> int:
        """Return the tag of messages of a `GATHER` or a `REDUCE`, below `VOTES`."""
        return 2 * self.about + kind

    def place(self, kind: int, *, has_read: bool = False) -> int:
        """Return the place on the board to publish an offset, or to confirm that values were read."""
        return 4 * self.bucket + 2 * kind + has_read


class Pending:
    """A collective under way. Call `wait()` once; after it, the result may be read and the inputs reused."""

    def __init__(self, finish: Callable[[], bool | None]) -> None:
        self._finish = finish

    def wait(self) -> bool:
        """Block until the collective is done on this rank. Return False if a rank was not ready for a reduction."""
        finish, self._finish = self._finish, _nothing
        return finish() is not False


def _nothing() -> None:
    return None


class Channel(IntEnum):
    """The sequence of a vote: the n-th vote of a channel on one rank matches the n-th on the other ranks."""

    PLACES = 0
    """Votes that all ranks post at the same places of the program."""
    ROUNDS = 1
    """Rounds about requests, which some ranks enter after others have already posted their next place."""
    OTHERS = 2
    TENSOR = 3
    """Votes among the ranks along "tensor" alone."""


@final
class Vote:
    """A vote under way: numbers of each rank, of which `read()` returns the minima."""

    def __init__(self, hear: Callable[[], list[int]]) -> None:
        self._hear = hear

    def read(self) -> list[int]:
        """Block until all ranks have voted. An interrupted read may be repeated. Does not wait for a device."""
        return self._hear()


class Comm(ABC):
    """The collectives of the engine, over all ranks of the mesh.

    `sent_bytes` counts the bytes that this rank sends in messages or in shared memory, by kind.
    """

    watchdog: Watchdog | None = None

    def __init__(self, mesh: Mesh, ledger: Ledger, wire: Wire, memory: Memory | None = None) -> None:
        self.mesh, self.wire = mesh, wire
        self.pool = Pool(memory or OwnMemory(), ledger, keeps=wire.keeps_buffers)
        """Buffers in the memory that this transport prefers for gradients and parameters."""
        self.sent_bytes: Counter[str] = Counter()
        self._across: Comm | None = None
        self.can_postpone = False
        """Whether a rank may join a reduction to report that it is not ready."""

    @property
    def is_on_host(self) -> bool:
        """Whether tensors are in host memory, where waits block the host until the data can be read.

        On a device, waits block the stream. The host waits only when it reads a value, and then for all queued work.
        """
        return self.mesh.device.type == "cpu"

    @property
    def across(self) -> "Comm":
        """The communicator of all places of a pipe, for what belongs to a step; this one without a pipe."""
        return self._across or self

    def span(self, across: "Comm") -> None:
        """Take over the communicator of all places of a pipe, and its watchdog; what both send is counted together."""
        self._across, across.sent_bytes, self.watchdog = across, self.sent_bytes, across.watchdog

    def close(self) -> None:
        """Close the connections, when no rank uses them any more."""
        if self._across is not None:
            self._across.close()

    @abstractmethod
    def gather(self, full: Tensor, tag: Tag, kind: str = "gather", axis: Axis = "shard") -> Pending:
        """Fill `full` in place from the parts of all ranks.

        Args:
            full: (N * S,) for the N ranks along `axis`, "shard" or "tensor"; rank n provides the elements [n * S, (n +
                1) * S), already in place.
            tag: equal on all ranks for the same bucket and pass.

        Collective: all-gather; each rank sends (N-1) * S elements.
        """

    @abstractmethod
    def reduce(self, full: Tensor | None, own: Tensor, codec: Codec, scale: float, tag: Tag) -> Pending:
        """Sum `full` over the ranks of one replica, multiply by `scale`, and write this rank's shard to `own`.

        Args:
            full: (N * S,) for the N ranks of one replica; the other shards do not change. With `can_postpone`, None if
                this rank is not ready: all ranks learn this, `own` is undefined, and `full` does not change.
            own: (S,), this rank's shard of `full` or other memory.
            codec: encoding of messages; sums are computed in fp32 or better.

        Returns: a handle; its wait returns whether all ranks were ready.

        Collective: reduce-scatter (sum in rank order 0..N-1 if the backend allows); each rank sends (N-1) * S elements.
        """

    @abstractmethod
    def reduce_copies(self, own: Tensor, codec: Codec, scale: float, tag: Tag, *, is_ready: bool = True) -> Pending:
        """Sum this rank's shard over the R >= 2 replicas, and multiply by `scale`, in place.

        Args:
            own: (S,); S is a multiple of R.
            codec: as in `reduce`.
            is_ready: False corresponds to `full=None` in `reduce`.

        Returns: as `reduce`.

        Collective: all-reduce (sum in the order of replicas if the backend allows) over the ranks that keep the same
            shard; each rank sends 2 * (R-1) * S / R elements.
        """

    @abstractmethod
    def route(self, given: Tensor, taken: Tensor, counts: Sequence[Sequence[int]], tag: Tag, kind: str) -> Pending:
        """Send elements to each rank of one replica, and receive elements of each in `taken`.

        Args:
            given: (n,), in the order of the receiving ranks.
            taken: (m,) in other memory, in the order of the sending ranks.
            counts: (N, N): number of elements that the row's rank sends to the column's rank; equal on all ranks.

        Collective: all-to-all over the ranks of one replica; each rank sends its row without its own column.
        """

    def send(self, tensor: Tensor, rank: int, tag: Tag) -> Pending:
        """Send a contiguous tensor to a rank of the mesh; the wait returns when the tensor may be reused.

        Args:
            tag: equal on both ranks. Messages to one rank, with the same parity of `tag.bucket`, are received in the
                order in which they are sent.
        """
        raise AssertionError("one process has nobody to send to")

    def receive(self, tensor: Tensor, rank: int, tag: Tag) -> Pending:
        """Fill a contiguous tensor with the one that a rank of the mesh sends; see `send`."""
        raise AssertionError("one process receives nothing")

    @abstractmethod
    def broadcast(self, tensor: Tensor, what: str, kind: str, *, is_part: bool = False) -> None:
        """Overwrite `tensor` with the values of rank 0.

        Args:
            is_part: whether ranks along the tensor axis have different parts; the source is then the first rank with
                the same part.

        Collective: broadcast; every rank must call.
        """

    def call_before_waits(self, catch_up: Callable[[], None]) -> None:  # noqa: B027 (one process never waits)
        """Register `catch_up`, which is called before the host waits for other ranks (but not recursively).

        It reads posted votes, in which another rank may request an operation that it waits for.
        """

    @abstractmethod
    def post(self, values: list[int], what: str, channel: Channel) -> Vote:
        """Post numbers; the returned vote waits for the minimum of each over all ranks of the channel.

        A channel has at most `MOST_UNREAD` unread votes, which are read in order.

        Collective: all-reduce (minimum) of 8 bytes per number between hosts, in ceil(log2 N) messages per rank.
        """

    def agree(self, values: list[int], what: str) -> list[int]:
        """Return the minimum of each number over all ranks. Collective: see `post`."""
        return self.post(values, what, Channel.OTHERS).read()

    @abstractmethod
    def flag(self, flags: Tensor, what: str) -> None:
        """Replace each number by its maximum over all ranks, in place.

        Args:
            flags: finite numbers on the device of the parameters; the host does not read them.

        Collective: all-reduce (maximum).
        """

    @abstractmethod
    def collect(self, tensor: Tensor, what: str, kind: str = "agree") -> Tensor:
        """Return (world_size, *shape): every rank's `tensor`, by rank. Collective: all-gather; equal shapes."""

    def texts(self, text: str, what: str) -> list[str]:
        """Return every rank's text, cut to 4 KiB, by rank. Collective: all-gather of 4 KiB."""
        data = text.encode(errors="backslashreplace")[:TEXT_BYTES]
        row = torch.zeros(TEXT_BYTES, dtype=torch.uint8, device="cpu")
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else row[:0]
        rows = self.collect(row, what)  # in host memory: no wait for kernels
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


def gather_across_ranks(tensor: Tensor, mesh: Mesh | DeviceMesh | None = None) -> Tensor:
    """Return (world_size, *shape): the tensors of all ranks, by rank; (1, *shape) for one process.

    Args:
        tensor: any tensor, of equal shape and dtype on every rank.
        mesh: the ranks that take part, in its order, such as `zero.mesh` or a part of a DeviceMesh; by default all
            ranks of the default process group.

    Raises:
        TypeError: `tensor` is none.
        ValueError: this rank is not in `mesh`.

    Collective: all-gather; every rank of the mesh must call, and the first call creates a process group of them.

    ```python
    import torch, zeroshard as zs

    assert zs.gather_across_ranks(torch.ones(2)).shape == (1, 2)
    ```
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"gather_across_ranks() takes a tensor, such as torch.tensor(3); got {tensor!r}.")
    if not dist.is_initialized():
        return tensor[None]
    own, ranks = dist.get_rank(), () if mesh is None else ranks_of(mesh)
    if ranks == (own,):
        return tensor[None]
    if ranks and own not in ranks:
        raise ValueError(
            f"[rank {own}/{dist.get_world_size()}] mesh= has the ranks {ranks}, and not this one: only they call."
        )
    rows = [torch.empty_like(tensor) for _ in range(len(ranks) or dist.get_world_size())]
    with waits_outside("gather_across_ranks"):
        dist.all_gather(rows, tensor.contiguous(), _group_of(ranks, tensor.device.type))
    ascending = sorted(ranks) or [*range(len(rows))]
    return torch.stack([rows[ascending.index(rank)] for rank in ranks or ascending])


def ranks_of(mesh: Mesh | DeviceMesh) -> tuple[int, ...]:
    """Return the ranks of the process group that a mesh has, in its order; empty for all of them."""
    return mesh.ranks if isinstance(mesh, Mesh) else tuple(mesh.mesh.flatten().tolist())


def _group_of(ranks: tuple[int, ...], kind: str) -> dist.ProcessGroup | None:
    """Return the process group of ranks, in ascending order, for a device type; None for all ranks of the default one.

    It is not the default one if ranks are named: what one model's ranks exchange must not meet what others do there.
    """
    if not ranks:
        return None
    is_fake, is_part = "fake" in dist.get_backend_config(), len(ranks) < dist.get_world_size()
    backend = "fake" if is_fake else "gloo" if kind == "cpu" else "nccl"
    limit = default_store().timeout  # type: ignore[attr-defined]
    return named_group(sorted(ranks), f"of {kind}", backend, limit, is_part=is_part, is_kept=True)


def mean_across_ranks(tensor: Tensor | float, mesh: Mesh | DeviceMesh | None = None) -> Tensor:
    """Return the mean of a tensor over all ranks, summed in rank order: the result is bitwise equal on all ranks.

    Args:
        tensor: a floating-point tensor, of equal shape on every rank, or a number.
        mesh: the ranks that take part, as in `gather_across_ranks`.

    Collective: as `gather_across_ranks`.

    ```python
    import torch, zeroshard as zs

    assert zs.mean_across_ranks(torch.tensor(3.0)) == 3.0
    ```
    """
    tensor = tensor if isinstance(tensor, Tensor) else torch.tensor(tensor, device="cpu")
    rows = gather_across_ranks(tensor.detach(), mesh)
    return sum(rows[1:], rows[0]) / len(rows)


def unexpanded(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Return one of the elements that lie in one place of a tensor of these strides, as `expand()` makes it."""
    for dim, stride in enumerate(strides):
        if not stride:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor
