"""The transport gloo: tagged messages for shards, gloo's own collectives for small tensors.

Owns the messages. It must not know units, passes or parameters. Read `wire/comm.py` first.

Note: gloo
    Point-to-point in place is 2.7 to 4 times as fast as gloo's own all-gather and reduce-scatter, which copy through
    fresh pages, and it fixes the order of the sum: rank 0 first, at the chunk's owner. Messages carry tags, because
    without them, equal-sized messages of different units would mix without an error if ranks disagree. A rank whose
    gradients are incomplete when others reduce them sends a marker instead of its values. The whole sum is computed
    later, so its bits do not depend on the order of arrival.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from zeroshard.table.trace import Ledger
from zeroshard.table.wires import Wire
from zeroshard.wire.codec import Codec, sum_in_rank_order
from zeroshard.wire.comm import Pending, Tag
from zeroshard.wire.linked import LinkedComm
from zeroshard.wire.links import CONTROL, Links
from zeroshard.wire.memory import Memory
from zeroshard.wire.mesh import Axis

__all__ = ["GlooComm"]

Tensor = torch.Tensor
Ranks = tuple[int, ...]


class GlooComm(LinkedComm):
    """Tagged point-to-point messages for shards, gloo's own collectives for small tensors. See "Note: gloo"."""

    def __init__(self, links: Links, ledger: Ledger, wire: Wire, memory: Memory | None = None) -> None:
        super().__init__(links, ledger, CONTROL, wire, memory)
        self.can_postpone = True

    def gather(self, full: Tensor, tag: Tag, kind: str = "gather", axis: Axis = "shard") -> Pending:
        return self._gather(full, self.mesh.ranks_of(axis), tag, kind)

    def reduce(self, full: Tensor | None, own: Tensor, codec: Codec, scale: float, tag: Tag) -> Pending:
        return self._reduce(full, own, self.mesh.shard_ranks, codec, scale, tag, "reduce")

    def reduce_copies(self, own: Tensor, codec: Codec, scale: float, tag: Tag, *, is_ready: bool = True) -> Pending:
        ranks = self.mesh.replica_ranks
        part = own.view(len(ranks), -1)[ranks.index(self.mesh.rank)]
        summed = self._reduce(own if is_ready else None, part, ranks, codec, scale, tag, "replicate")
        return Pending(lambda: summed.wait() and self._gather(own, ranks, tag, "replicate").wait())

    def route(self, given: Tensor, taken: Tensor, counts: Sequence[Sequence[int]], tag: Tag, kind: str) -> Pending:
        ranks, place, number = self.mesh.shard_ranks, self.mesh.shard_rank, tag.message(Tag.GATHER)
        sent, heard = given.split_with_sizes([*counts[place]]), taken.split_with_sizes([row[place] for row in counts])
        peers = self._peers(ranks)
        messages = [self._receive(heard[peer], ranks[peer], number, tag.what) for peer in peers if counts[peer][place]]
        messages += [self._send(sent[peer], ranks[peer], number, tag.what) for peer in peers if counts[place][peer]]
        heard[place].copy_(sent[place])
        self.sent_bytes[kind] += given.nbytes - sent[place].nbytes
        return Pending(lambda: self.links.wait(messages, tag.what))

    def _gather(self, full: Tensor, ranks: Ranks, tag: Tag, kind: str) -> Pending:
        chunks, peers = full.view(len(ranks), -1), self._peers(ranks)
        own = chunks[ranks.index(self.mesh.rank)]
        works = [self._receive(chunks[place], ranks[place], tag.message(Tag.GATHER), tag.what) for place in peers]
        works += [self._send(own, ranks[place], tag.message(Tag.GATHER), tag.what) for place in peers]
        self.sent_bytes[kind] += own.nbytes * len(peers)
        return Pending(lambda: self.links.wait(works, tag.what))

    def _reduce(
        self, full: Tensor | None, own: Tensor, ranks: Ranks, codec: Codec, scale: float, tag: Tag, kind: str
    ) -> Pending:
        chunks = None if full is None else full.view(len(ranks), -1)
        self.sent_bytes[kind] += codec.nbytes(own.numel()) * (len(ranks) - 1)
        # In pieces of at most `wire_bytes`. The first has a message from every rank, so all ranks know whether others
        # follow: if a rank is not ready, none does.
        messages = (len(ranks) - 1) * (1 if codec.is_message(own) else 2)
        size = self.wire.piece_numel(own.numel(), codec.name, messages)

        def take(numel: int) -> Tensor:
            # Also a last, shorter piece takes the buffers of a whole one: the pool would keep shorter ones, too.
            return self.pool.take(codec.message_numel(size), codec.dtype, own.device)[: codec.message_numel(numel)]

        def start(piece: slice) -> Pending:
            part = None if chunks is None else chunks[:, piece]
            return self._reduce_piece(part, own[piece], ranks, codec, scale, tag, take)

        # The first piece starts immediately, the others during the wait.
        pieces = [slice(at, min(at + size, own.numel())) for at in range(0, max(1, own.numel()), max(1, size))]
        first = start(pieces[0])
        return Pending(lambda: first.wait() and all(start(piece).wait() for piece in pieces[1:]))

    def _reduce_piece(
        self, chunks: Tensor | None, own: Tensor, ranks: Ranks, codec: Codec, scale: float, tag: Tag,
        take: Callable[[int], Tensor],
    ) -> Pending:  # fmt: skip
        """Start the reduction of one piece; see `reduce`.

        Args:
            take: returns a pooled buffer for the message for this number of elements.
        """
        place, numel, number = ranks.index(self.mesh.rank), own.numel(), tag.message(Tag.REDUCE)
        taken = {peer: take(numel) for peer in self._peers(ranks)}
        works = [self._receive(buffer, ranks[peer], number, tag.what) for peer, buffer in taken.items()]
        if chunks is None:
            given = [take(numel)]
            given[0][:1].view(torch.uint8).fill_(255)
            sent = dict.fromkeys(taken, given[0])
        else:
            sent = {peer: _encoded(chunks[peer], codec, take) for peer in taken}
            given = [] if codec.is_message(chunks) else list(sent.values())
            # Padding has arbitrary content, possibly the marker of an earlier use of the buffer.
            for chunk in filter(_is_marked, sent.values()):
                chunk[:1] = float("nan")
        works += [self._send(chunk, ranks[peer], number, tag.what) for peer, chunk in sent.items()]

        def finish() -> bool:
            self.links.wait(works, tag.what)
            is_ready = chunks is not None and not any(map(_is_marked, taken.values()))
            if chunks is not None and is_ready:
                dtype = torch.promote_types(own.dtype, torch.float32)
                blocks = {peer: codec.decoded_blocks(message, dtype) for peer, message in taken.items()}
                blocks[place] = codec.rounded_blocks(chunks[place], dtype)
                sum_in_rank_order([blocks[peer] for peer in range(len(ranks))], scale, own)
            for buffer in [*taken.values(), *given]:
                self.pool.give(buffer)
            return is_ready

        return Pending(finish)

    def _peers(self, ranks: Ranks) -> list[int]:
        """Return the indices of the other ranks, starting after this rank to spread the load over receivers."""
        place = ranks.index(self.mesh.rank)
        return [(place + step) % len(ranks) for step in range(1, len(ranks))]

    def _send(self, chunk: Tensor, peer: int, tag: int, what: str) -> dist.Work:
        return self.links.start(lambda: dist.isend(chunk, group=self.group, tag=tag, group_dst=peer), what)

    def _receive(self, chunk: Tensor, peer: int, tag: int, what: str) -> dist.Work:
        return self.links.start(lambda: dist.irecv(chunk, group=self.group, tag=tag, group_src=peer), what)


def _encoded(values: Tensor, codec: Codec, take: Callable[[int], Tensor]) -> Tensor:
    """Return the message for values: the values themselves if possible, else a buffer."""
    if codec.is_message(values):
        return values
    codec.encode(values, message := take(values.numel()))
    return message


def _is_marked(message: Tensor) -> bool:
    """Return whether the first element of a message has all bits set: its sender is not ready."""
    return bool((message[:1].view(torch.uint8) == 255).all())
