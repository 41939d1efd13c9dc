"""The memory of one host: ranks that run on it read each other's gradients and parameters where they lie.

Owns the exchange over the board and the shared memory. It must not know units, passes or parameters. Read
`wire/comm.py`, `wire/memory.py` and `wire/board.py` first.

Note: the host
    Ranks of one copy of the state that run on one host exchange through its memory (`wire/memory.py`): they meet to
    say where values lie (`wire/board.py`), read each other's, and meet again when they have, so a collective ends when
    nobody reads any more. What lies elsewhere on some rank, all show each other part by part, in a pooled buffer. Only
    parameters at stage 3 are read for as long as they are gathered, not copied: they change after a barrier that each
    rank enters when its passes are over. Tags, waits and errors are those of gloo.
"""

from typing import final

import torch

from zeroshard.table.trace import Ledger
from zeroshard.table.wires import HostWire
from zeroshard.wire.board import WORDS
from zeroshard.wire.comm import BUCKETS, Pending
from zeroshard.wire.gloo import GlooComm
from zeroshard.wire.links import Links
from zeroshard.wire.memory import HostMemory
from zeroshard.wire.sums import add_up

__all__ = ["HostComm"]

Tensor = torch.Tensor
SHOWN_NUMEL = 1 << 20
"""Elements that a rank shows each other at once of what is not in the memory of the host."""
NOWHERE, NOT_READY = -1, -2
"""In the place of an address in the memory of the host."""
AGREEMENTS = 4 * BUCKETS
"""Places on the board: four of each bucket, then those of agreements."""


@final
class HostComm(GlooComm):
    """Exchange in memory that the ranks of each copy share; messages between copies. See "Note: the host"."""

    def __init__(self, links: Links, ledger: Ledger, memory: HostMemory) -> None:
        super().__init__(links, ledger, HostWire(SHOWN_NUMEL), memory)
        self._memory, self._agreements = memory, 0

    def gather(self, full: Tensor, tag: int, what: str, kind: str = "gather") -> Pending:
        memory, size = self._memory, self.mesh.shard_size
        if (offset := memory.offset_of(full)) is None:
            return super().gather(full, tag, what, kind)
        self.sent_bytes[kind] += full.nbytes // size * (size - 1)
        meeting = memory.meet(4 * (tag % BUCKETS), tag, offset)

        def finish() -> None:
            self.links.wait([meeting], what)
            if not memory.is_home(full):
                for place, there in meeting.offsets.items():
                    part = memory.of_peer(place, there, full.numel(), full.dtype).view(size, -1)[place]
                    full.view(size, -1)[place] = part
                    memory.drop(place, part)
                self.links.wait([memory.meet(4 * (tag % BUCKETS) + 1, tag)], what)

        return Pending(finish)

    def reduce(self, full: Tensor | None, own: Tensor, wire: torch.dtype, scale: float, tag: int, what: str) -> Pending:
        memory = self._memory
        self.sent_bytes["reduce"] += own.numel() * wire.itemsize * (self.mesh.shard_size - 1)
        offset, said = NOT_READY if full is None else memory.offset_of(full), 4 * (tag % BUCKETS) + 2
        meeting = memory.meet(said, tag, NOWHERE if offset is None else offset)

        def all_have_read() -> None:
            self.links.wait([memory.meet(said + 1, tag)], what)

        def finish() -> bool:
            self.links.wait([meeting], what)
            is_ready = full is not None and NOT_READY not in meeting.offsets.values()
            if full is not None and is_ready:
                chunks = full.view(self.mesh.shard_size, -1)
                if offset is None or NOWHERE in meeting.offsets.values():
                    show_in_turn(full, chunks)
                else:
                    add_up(memory, meeting.offsets, full, chunks[self.mesh.shard_rank], wire, scale, own)
            all_have_read()
            return is_ready

        def show_in_turn(full: Tensor, chunks: Tensor) -> None:
            numel = min(own.numel(), SHOWN_NUMEL)
            shown = self.pool.take(self.mesh.shard_size * numel, full.dtype, full.device)
            rows, at = shown.view(self.mesh.shard_size, -1), memory.offset_of(shown)
            assert at is not None, "pools are in the memory of the host"
            for parts, result in zip(chunks.split(numel, dim=1), own.split(numel), strict=True):
                all_have_read()
                for place in self._peers(self.mesh.shard_ranks):
                    rows[place, : result.numel()] = parts[place]
                there = memory.meet(said, tag, at)
                self.links.wait([there], what)
                add_up(memory, there.offsets, shown, parts[self.mesh.shard_rank], wire, scale, result)
            self.pool.give(shown)

        return Pending(finish)

    def agree(self, values: list[int], what: str) -> list[int]:
        if self.mesh.shard_size < self.mesh.world_size or len(values) >= WORDS:
            return super().agree(values, what)
        # At two places in turn: nobody comes to the next agreement but one before all have heard this one.
        self._agreements += 1
        meeting = self._memory.meet(AGREEMENTS + self._agreements % 2, len(values), *values)
        self.links.wait([meeting], what)
        self.sent_bytes["agree"] += 8 * len(values)
        return [min(each) for each in zip(values, *meeting.numbers.values(), strict=True)]
