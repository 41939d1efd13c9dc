"""The transport of one host: its ranks read each other's gradients and parameters in shared memory.

Owns the exchange over the board and the shared memory. It must not know units, passes or parameters. Read
`wire/comm.py`, `wire/memory.py` and `wire/board.py` first.

Note: the host
    Ranks of one replica of the state on one host exchange through shared memory (`wire/memory.py`). They meet to
    publish offsets (`wire/board.py`), read each other's values, and meet again: a collective ends when no rank reads
    any more. Tensors outside shared memory pass through a pooled buffer, part by part. Only parameters at stage 3 are
    read in place while they are gathered; they change after a barrier that each rank enters when its passes are over.
    Tags, waits and errors are those of gloo.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch

from zeroshard.table.spec import BLOCK_NUMEL
from zeroshard.table.trace import Ledger
from zeroshard.table.wires import SHOWN_NUMEL, HostWire
from zeroshard.wire.board import WORDS
from zeroshard.wire.codec import Codec, sum_in_rank_order
from zeroshard.wire.comm import MOST_UNREAD, Channel, Pending, Tag, Vote
from zeroshard.wire.gloo import GlooComm
from zeroshard.wire.links import Links
from zeroshard.wire.memory import HostMemory
from zeroshard.wire.mesh import Axis

__all__ = ["HostComm"]

Tensor = torch.Tensor
SEEN_NUMEL = 4 * BLOCK_NUMEL
"""Elements of another rank's memory that are read between drops of their pages."""
NOWHERE, NOT_READY = -1, -2
"""Replaces an offset for a tensor outside shared memory."""


@final
class HostComm(GlooComm):
    """Exchange in shared memory within each replica, and by messages between replicas. See "Note: the host"."""

    def __init__(self, links: Links, ledger: Ledger, memory: HostMemory, wire_bytes: int) -> None:
        super().__init__(links, ledger, HostWire(SHOWN_NUMEL, wire_bytes), memory)
        self._memory = memory
        self._agreements: Counter[Channel] = Counter()

    def gather(self, full: Tensor, tag: Tag, kind: str = "gather", axis: Axis = "shard") -> Pending:
        memory, size = self._memory, self.mesh.shard_size
        if axis != "shard" or (offset := memory.offset_of(full)) is None:
            return super().gather(full, tag, kind, axis)
        self.sent_bytes[kind] += full.nbytes // size * (size - 1)
        meeting = memory.board.meet(tag.place(Tag.GATHER), tag.about, offset)

        def finish() -> None:
            self.links.wait([meeting], tag.what)
            if not memory.is_home(full):
                for place, there in meeting.offsets.items():
                    part = memory.of_peer(place, there, full.numel(), full.dtype).view(size, -1)[place]
                    full.view(size, -1)[place] = part
                    memory.drop(place, part)
                self._all_have_read(tag, Tag.GATHER)

        return Pending(finish)

    def reduce(self, full: Tensor | None, own: Tensor, codec: Codec, scale: float, tag: Tag) -> Pending:
        self.sent_bytes["reduce"] += codec.nbytes(own.numel()) * (self.mesh.shard_size - 1)
        offset = NOT_READY if full is None else self._memory.offset_of(full)
        meeting = self._memory.board.meet(tag.place(Tag.REDUCE), tag.about, NOWHERE if offset is None else offset)

        def finish() -> bool:
            self.links.wait([meeting], tag.what)
            is_ready = full is not None and NOT_READY not in meeting.offsets.values()
            if full is not None and is_ready:
                chunks = full.view(self.mesh.shard_size, -1)
                if offset is None or NOWHERE in meeting.offsets.values():
                    show_in_turn(chunks)
                else:
                    self._add_up(meeting.offsets, chunks, chunks[self.mesh.shard_rank], codec, scale, own)
            self._all_have_read(tag, Tag.REDUCE)
            return is_ready

        def show_in_turn(chunks: Tensor) -> None:
            numel = min(own.numel(), SHOWN_NUMEL)
            shown = self.pool.take(self.mesh.shard_size * numel, chunks.dtype, chunks.device)
            rows, at = shown.view(self.mesh.shard_size, -1), self._memory.offset_of(shown)
            assert at is not None, "pools are in the memory of the host"
            for parts, result in zip(chunks.split(numel, dim=1), own.split(numel), strict=True):
                self._all_have_read(tag, Tag.REDUCE)
                for place in self._peers(self.mesh.shard_ranks):
                    rows[place, : result.numel()] = parts[place]
                there = self._memory.board.meet(tag.place(Tag.REDUCE), tag.about, at)
                self.links.wait([there], tag.what)
                self._add_up(there.offsets, rows, parts[self.mesh.shard_rank], codec, scale, result)
            self.pool.give(shown)

        return Pending(finish)

    def route(self, given: Tensor, taken: Tensor, counts: Sequence[Sequence[int]], tag: Tag, kind: str) -> Pending:
        memory, here = self._memory, self.mesh.shard_rank
        offset = memory.offset_of(given) if given.numel() else 0
        meeting = memory.board.meet(tag.place(Tag.GATHER), tag.about, NOWHERE if offset is None else offset)

        def finish() -> None:
            self.links.wait([meeting], tag.what)
            if offset is None or NOWHERE in meeting.offsets.values():
                super(HostComm, self).route(given, taken, counts, tag, kind).wait()
                return
            for place, part in enumerate(taken.split_with_sizes([row[here] for row in counts])):
                source, first = given, sum(counts[place][:here])
                if place != here and part.numel():
                    source = memory.of_peer(place, meeting.offsets[place], sum(counts[place]), given.dtype)
                part.copy_(source[first : first + part.numel()])
                if source is not given:
                    memory.drop(place, source[first : first + part.numel()])
            self.sent_bytes[kind] += (given.numel() - counts[here][here]) * given.itemsize
            self._all_have_read(tag, kind=Tag.GATHER)

        return Pending(finish)

    def _all_have_read(self, tag: Tag, kind: int) -> None:
        """Wait until all ranks have read the values of this rank."""
        self.links.wait([self._memory.board.meet(tag.place(kind, has_read=True), tag.about)], tag.what)

    def _add_up(
        self, offsets: Mapping[int, int], rows: Tensor, mine: Tensor, codec: Codec, scale: float, out: Tensor
    ) -> None:
        """Write to `out` the scaled sum of `mine` and the values of the other ranks.

        Args:
            offsets: the offsets of the values in the other ranks' memory, by rank.
            rows: (N, n): a row for each rank, of which the first `mine.numel()` elements are used.
        """
        dtype = torch.promote_types(mine.dtype, torch.float32)

        def read(other: int) -> Iterator[Tensor]:
            shown = self._memory.of_peer(other, offsets[other], rows.numel(), rows.dtype).view_as(rows)
            for part in shown[self.mesh.shard_rank, : mine.numel()].split(SEEN_NUMEL):
                yield from codec.rounded_blocks(part, dtype)
                self._memory.drop(other, part)

        own = codec.rounded_blocks(mine, dtype)
        sum_in_rank_order([read(rank) if rank in offsets else own for rank in range(len(rows))], scale, out)

    def post(self, values: list[int], what: str, channel: Channel) -> Vote:
        if self.mesh.shard_size < self.mesh.world_size or len(values) >= WORDS:
            return super().post(values, what, channel)
        # A rank that reuses a place has read a vote half a cycle old. All ranks posted in that vote, and therefore have
        # read the votes half a cycle before it: no rank still reads the numbers that are overwritten.
        self._agreements[channel] += 1
        turns = 2 * MOST_UNREAD + 2
        place = Tag.AGREEMENTS + turns * channel + self._agreements[channel] % turns
        meeting = self._memory.board.meet(place, len(values), *values)
        self.sent_bytes["agree"] += 8 * len(values)

        def hear() -> list[int]:
            self.links.wait([meeting], what)
            return [min(each) for each in zip(values, *meeting.numbers.values(), strict=True)]

        return Vote(hear)
