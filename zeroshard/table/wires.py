"""The buffers of a reduction by transport: for received messages and for conversions.

Owns sizes. `wire/` moves the bytes, with a transport for each class here. Read `table/spec.py` first.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import final

from zeroshard.table.pool import Buffer
from zeroshard.table.settings import WIRE_BYTES
from zeroshard.table.spec import BLOCK_NUMEL, BucketSpec, Message, itemsize, message_of

__all__ = ["HostWire", "Messages", "Native", "Reducing", "SHOWN_NUMEL", "Silence", "Wire"]

SHOWN_NUMEL = 16 * BLOCK_NUMEL
"""Elements that a rank copies to shared memory at a time, for tensors outside shared memory."""


class Wire(ABC):
    """The buffer sizes of a transport."""

    is_in_place: bool = False
    """Whether ranks of one replica read each other's memory, without buffers for received messages."""
    lands_together: bool = False
    """Whether the gradients of a unit are copied together when complete: fewer launches, memory of one more unit."""
    overlaps: bool = False
    """Whether the host waits for no collective: sums over replicas end one unit later, updated parameters at their
    next use, with computation beside them."""
    keeps_buffers: bool = True
    """Whether buffers stay in the pool after their use: fresh pages of host memory cost more than the copy to them."""
    wire_bytes: int = WIRE_BYTES
    """Bytes of the buffers of one exchange."""

    def piece_numel(self, numel: int, codec: str, messages: int) -> int:
        """Return the number of a rank's own elements that are exchanged at a time.

        Args:
            codec: as in `Formats.reduce`.
            messages: number of buffers with a place for each element.
        """
        count, dtype = message_of(codec, BLOCK_NUMEL)
        blocks = self.wire_bytes // max(1, messages * count * itemsize(dtype))
        return min(numel, max(1, blocks) * BLOCK_NUMEL)

    def lands_as(self, bucket: BucketSpec) -> str:
        """Return the dtype of the memory in which a bucket's gradients wait for their sum."""
        return bucket.formats.grad

    @abstractmethod
    def among_shards(self, bucket: BucketSpec) -> list[Message]:
        """Return the buffers of a sum over the ranks of one replica of the state."""

    def apart(self, bucket: BucketSpec, *, is_first: bool) -> list[Message]:
        """Return the buffer of the sum of one replica, which is separate until the other replicas have their sums.

        Args:
            is_first: whether held gradients contain no sum yet: their memory then takes the sum, unless this rank's own
                gradients are in it, or a memory of another kind.
        """
        is_free = is_first and not bucket.holds_whole_gradients and bucket.row.gradients.is_on_device
        return [(bucket.layout.shard_numel, bucket.formats.grad)] * (bucket.replicas > 1 and not is_free)

    def among_copies(self, bucket: BucketSpec) -> list[Message]:
        """Return the buffers of a sum over replicas of the state: messages with pieces of a shard."""
        return self.exchanged(bucket, bucket.layout.shard_numel // bucket.replicas, bucket.replicas)

    def exchanged(self, bucket: BucketSpec, numel: int, ranks: int) -> list[Message]:
        """Return a buffer for each received message, and for each message that is encoded before it is sent."""
        codec = bucket.formats.reduce
        messages = (ranks - 1) * (1 + (codec != bucket.formats.grad))
        return [message_of(codec, self.piece_numel(numel, codec, messages))] * messages


@final
@dataclass(frozen=True)
class Silence(Wire):
    """One rank, without communication."""

    def among_shards(self, bucket: BucketSpec) -> list[Message]:
        return []


@final
@dataclass(frozen=True)
class Messages(Wire):
    """Point to point."""

    wire_bytes: int = WIRE_BYTES

    def among_shards(self, bucket: BucketSpec) -> list[Message]:
        return self.exchanged(bucket, bucket.layout.shard_numel, bucket.layout.world_size)


@final
@dataclass(frozen=True)
class HostWire(Wire):
    """Shared memory of a host: other tensors are copied to it, `shown_numel` elements at a time."""

    shown_numel: int
    wire_bytes: int = WIRE_BYTES
    is_in_place = True

    def among_shards(self, bucket: BucketSpec) -> list[Message]:
        layout = bucket.layout
        shown = layout.world_size * min(layout.shard_numel, self.shown_numel)
        return [(shown, bucket.formats.grad)] if bucket.adopts else []


@final
@dataclass(frozen=True)
class Native(Wire):
    """A backend's own collectives, which support only dtypes; a unit is one message, reduced beside computation.

    Buffers return to the allocator of the device, where a forward's activations can use their memory.

    Args:
        accumulates: whether gradients of several micro-batches are added before their sum, in the dtype of held ones.
    """

    lands_together: bool = True
    keeps_buffers: bool = False
    overlaps: bool = True
    accumulates: bool = False

    def lands_as(self, bucket: BucketSpec) -> str:
        is_ready = self.lands_together and not self.accumulates
        return bucket.formats.reduce if is_ready and bucket.lands_as_message else bucket.formats.grad

    def among_shards(self, bucket: BucketSpec) -> list[Message]:
        if self.lands_as(bucket) == bucket.formats.reduce:
            return []
        return self._converted(bucket, bucket.layout.shard_numel, bucket.layout.world_size)

    def apart(self, bucket: BucketSpec, *, is_first: bool) -> list[Message]:
        is_message = self.lands_as(bucket) != bucket.formats.grad
        own = [(bucket.layout.shard_numel, bucket.formats.grad)]
        return own if is_message else super().apart(bucket, is_first=is_first)

    def among_copies(self, bucket: BucketSpec) -> list[Message]:
        return self._converted(bucket, bucket.layout.shard_numel, 1) if bucket.replicas > 1 else []

    def _converted(self, bucket: BucketSpec, numel: int, rows: int) -> list[Message]:
        codec = bucket.formats.reduce
        return [] if codec == bucket.formats.grad else [(rows * numel, codec)]


@final
class Reducing:
    """The buffers of the reductions under way in a simulated backward, as `Order` has them finished and started.

    Args:
        take: returns a buffer of (elements, dtype) for the bucket of this name.
        give: returns buffers.
    """

    def __init__(
        self, wire: Wire, take: Callable[[int, str, str], Buffer], give: Callable[[Sequence[Buffer]], None]
    ) -> None:
        self._wire, self._take, self._give = wire, take, give
        self._buckets: Sequence[BucketSpec] = ()
        self._given, self._messages, self._sums, self._copied = (list[Buffer]() for _ in range(4))

    def start(self, buckets: Sequence[BucketSpec], given: Sequence[Buffer], summed: Collection[int] = ()) -> None:
        """Start the reduction of a unit, whose gradients are in `given`.

        Args:
            summed: numbers of the buckets whose held gradients contain the sum of an earlier micro-batch.
        """
        wire, self._buckets, self._given = self._wire, buckets, [*given]
        for bucket in buckets:
            self._sums += self._taken(bucket, wire.apart(bucket, is_first=bucket.number not in summed))
            self._messages += self._taken(bucket, wire.among_shards(bucket))
        if wire.is_in_place:
            self.advance()

    def advance(self) -> None:
        """Finish the sums over replicas; where there are sums within a replica, start theirs over replicas."""
        self._give(self._messages)
        over, self._copied = self._copied + self._given, []
        for bucket in self._buckets:
            messages = self._taken(bucket, self._wire.among_copies(bucket))
            if self._wire.overlaps:
                self._copied += messages
            else:  # each is waited for before the next is sent
                self._give(messages)
        if self._wire.overlaps and any(bucket.replicas > 1 for bucket in self._buckets):
            self._copied += self._sums
        else:  # these sums are the final ones
            over += self._sums
        self._give(over)
        self._given, self._messages, self._sums, self._buckets = [], [], [], ()

    def finish(self) -> None:
        """Finish all."""
        self.advance()
        self.advance()

    def _taken(self, bucket: BucketSpec, messages: Sequence[Message]) -> list[Buffer]:
        return [self._take(*wanted, bucket.unit) for wanted in messages]
