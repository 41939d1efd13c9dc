"""The buffers that a reduction takes, by transport: what arrives apart from where it is wanted, and what is converted.

Owns sizes alone; `wire/` moves the bytes, with a transport for each class here. Read `table/spec.py` first.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from zeroshard.table.spec import BucketSpec, Message, message_of

__all__ = ["HostWire", "Messages", "Native", "Silence", "Wire"]


class Wire(ABC):
    """A transport, as far as sizes go."""

    is_in_place: bool = False
    """Whether ranks of one copy read each other's memory: nothing is received in buffers, nothing is on its way."""

    @abstractmethod
    def among_shards(self, bucket: BucketSpec) -> list[Message]:
        """Return the buffers of a sum over the ranks of one copy of the state."""

    def reduction(self, bucket: BucketSpec) -> list[Message]:
        """Return the buffers of a bucket's reduction."""
        shard, formats, copies = bucket.layout.shard_numel, bucket.formats, bucket.replicas
        wanted = self.among_shards(bucket) + self.among_copies(bucket)
        if copies > 1 and bucket.holds_whole_gradients:
            # The sum of one copy lies apart until the other copies have theirs.
            wanted.append((shard, formats.grad))
        return wanted

    def among_copies(self, bucket: BucketSpec) -> list[Message]:
        """Return the buffers of a sum over copies of the state: by messages, pieces of a shard."""
        return _exchanged(bucket, bucket.layout.shard_numel // bucket.replicas, bucket.replicas)


def _exchanged(bucket: BucketSpec, numel: int, ranks: int) -> list[Message]:
    """Return a buffer for each message that arrives, and for each that is encoded before it is sent."""
    is_encoded = bucket.formats.reduce != bucket.formats.grad
    return [message_of(bucket.formats.reduce, numel)] * (ranks - 1) * (1 + is_encoded)


@final
@dataclass(frozen=True)
class Silence(Wire):
    """One rank: nothing moves."""

    def among_shards(self, bucket: BucketSpec) -> list[Message]:
        return []


@final
@dataclass(frozen=True)
class Messages(Wire):
    """Point to point."""

    def among_shards(self, bucket: BucketSpec) -> list[Message]:
        return _exchanged(bucket, bucket.layout.shard_numel, bucket.layout.world_size)


@final
@dataclass(frozen=True)
class HostWire(Wire):
    """Memory of the host: only what lies elsewhere is copied to where all see it, `shown_numel` elements at a time."""

    shown_numel: int
    is_in_place = True

    def among_shards(self, bucket: BucketSpec) -> list[Message]:
        layout = bucket.layout
        shown = layout.world_size * min(layout.shard_numel, self.shown_numel)
        return [(shown, bucket.formats.grad)] if bucket.adopts else []


@final
@dataclass(frozen=True)
class Native(Wire):
    """A backend's own collectives, of dtypes alone: what is converted, is converted whole."""

    def among_shards(self, bucket: BucketSpec) -> list[Message]:
        is_converted = bucket.formats.reduce != bucket.formats.grad
        return [(bucket.layout.full_numel, bucket.formats.reduce)] * is_converted

    def among_copies(self, bucket: BucketSpec) -> list[Message]:
        is_converted = bucket.formats.reduce != bucket.formats.grad and bucket.replicas > 1
        return [(bucket.layout.shard_numel, bucket.formats.reduce)] * is_converted
