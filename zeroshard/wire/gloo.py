"""gloo: messages between ranks, tagged, and gloo's own collectives for small things.

Owns the bytes on the wire. It must not know units, passes or parameters. Read `wire/comm.py` first.

Note: gloo
    Point-to-point in place is 2.7 to 4 times as fast as gloo's own all-gather and reduce-scatter, which copy through
    fresh pages, and it fixes the order of the sum: rank 0 first, at the chunk's owner. Messages carry tags, because
    equal-sized messages of different units would otherwise mix without an error when ranks disagree. A rank whose
    gradients are not all there when others reduce them sends a message that says so, in place of its values: the sum
    is made later, in one part, so its bits do not depend on who was early.
"""

import torch
import torch.distributed as dist

from zeroshard.table.trace import Ledger
from zeroshard.table.wires import Messages, Wire
from zeroshard.wire.comm import Pending
from zeroshard.wire.linked import LinkedComm
from zeroshard.wire.links import CONTROL, Links
from zeroshard.wire.memory import Memory
from zeroshard.wire.sums import sum_in_rank_order

__all__ = ["GlooComm"]

Tensor = torch.Tensor
Ranks = tuple[int, ...]


class GlooComm(LinkedComm):
    """Tagged point-to-point for shards, gloo's own collectives for small things. See "Note: gloo"."""

    def __init__(self, links: Links, ledger: Ledger, wire: Wire | None = None, memory: Memory | None = None) -> None:
        super().__init__(links, ledger, CONTROL, wire or Messages(), memory)
        self.can_postpone = True

    def gather(self, full: Tensor, tag: int, what: str, kind: str = "gather") -> Pending:
        return self._gather(full, self.mesh.shard_ranks, tag, what, kind)

    def reduce(self, full: Tensor | None, own: Tensor, wire: torch.dtype, scale: float, tag: int, what: str) -> Pending:
        return self._reduce(full, own, self.mesh.shard_ranks, wire, scale, tag, what, "reduce")

    def reduce_copies(
        self, own: Tensor, wire: torch.dtype, scale: float, tag: int, what: str, *, is_ready: bool = True
    ) -> Pending:
        ranks = self.mesh.replica_ranks
        part = own.view(len(ranks), -1)[ranks.index(self.mesh.rank)]
        summed = self._reduce(own if is_ready else None, part, ranks, wire, scale, tag, what, "replicate")
        return Pending(lambda: summed.wait() and self._gather(own, ranks, tag, what, "replicate").wait())

    def _gather(self, full: Tensor, ranks: Ranks, tag: int, what: str, kind: str) -> Pending:
        chunks, own = full.view(len(ranks), -1), full.view(len(ranks), -1)[ranks.index(self.mesh.rank)]
        peers = self._peers(ranks)
        works = [self._receive(chunks[place], ranks[place], 2 * tag, what) for place in peers]
        works += [self._send(own, ranks[place], 2 * tag, what) for place in peers]
        self.sent_bytes[kind] += own.nbytes * len(peers)
        return Pending(lambda: self.links.wait(works, what))

    def _reduce(
        self,
        full: Tensor | None,
        own: Tensor,
        ranks: Ranks,
        wire: torch.dtype,
        scale: float,
        tag: int,
        what: str,
        kind: str,
    ) -> Pending:
        chunks, place = None if full is None else full.view(len(ranks), -1), ranks.index(self.mesh.rank)
        taken = {peer: self.pool.take(own.numel(), wire, own.device) for peer in self._peers(ranks)}
        works = [self._receive(buffer, ranks[peer], 2 * tag + 1, what) for peer, buffer in taken.items()]
        if chunks is None:
            given = [self.pool.take(own.numel(), wire, own.device)]
            given[0][:1].view(torch.uint8).fill_(255)
            sent = dict.fromkeys(taken, given[0])
        else:
            sent = {peer: self._round(chunks[peer], wire) for peer in taken}
            given = [chunk for chunk in sent.values() if chunk.dtype != chunks.dtype]
            # What lies between parameters is anything, also the mark of a buffer that was used before.
            for chunk in filter(_is_marked, sent.values()):
                chunk[:1] = float("nan")
        works += [self._send(chunk, ranks[peer], 2 * tag + 1, what) for peer, chunk in sent.items()]
        self.sent_bytes[kind] += own.numel() * wire.itemsize * len(taken)

        def finish() -> bool:
            self.links.wait(works, what)
            is_ready = chunks is not None and not any(map(_is_marked, taken.values()))
            if chunks is not None and is_ready:
                sum_in_rank_order([taken.get(peer, chunks[place]) for peer in range(len(ranks))], wire, scale, own)
            for buffer in [*taken.values(), *given]:
                self.pool.give(buffer)
            return is_ready

        return Pending(finish)

    def _peers(self, ranks: Ranks) -> list[int]:
        """Return the places of the others; starting with the next one spreads the first messages over all receivers."""
        place = ranks.index(self.mesh.rank)
        return [(place + step) % len(ranks) for step in range(1, len(ranks))]

    def _round(self, chunk: Tensor, wire: torch.dtype) -> Tensor:
        """Return `chunk` in the wire's dtype: itself, or a copy in a pooled buffer."""
        if chunk.dtype == wire:
            return chunk
        return self.pool.take(chunk.numel(), wire, chunk.device).copy_(chunk)

    def _send(self, chunk: Tensor, peer: int, tag: int, what: str) -> dist.Work:
        return self.links.start(lambda: dist.isend(chunk, group=self.group, tag=tag, group_dst=peer), what)

    def _receive(self, chunk: Tensor, peer: int, tag: int, what: str) -> dist.Work:
        return self.links.start(lambda: dist.irecv(chunk, group=self.group, tag=tag, group_src=peer), what)


def _is_marked(message: Tensor) -> bool:
    """Tell whether a message begins with the NaN whose bits are all set: its sender is not ready."""
    return bool((message[:1].view(torch.uint8) == 255).all())
