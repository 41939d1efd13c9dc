"""NCCL's own collectives for shards, gloo for the small numbers that the host reads.

Owns the bytes on the wire. It must not know units, passes or parameters. Read `wire/comm.py` first.

Note: NCCL
    Its own in-place collectives, asynchronous; reductions have their own communicator, since two collectives on one
    communicator serialize. Waiting orders the current stream after the collective, so buffers need no stream of their
    own. NCCL chooses the order of its sums.
"""

from typing import final

import torch
import torch.distributed as dist

from zeroshard.table.trace import Ledger
from zeroshard.table.wires import Native
from zeroshard.wire.codec import Codec
from zeroshard.wire.comm import Pending, Tag
from zeroshard.wire.linked import LinkedComm
from zeroshard.wire.links import Links
from zeroshard.wire.mesh import Axis

__all__ = ["NcclComm"]

Tensor = torch.Tensor
ALL, GATHERS, REDUCES, COPIES, PARTS = "all", "gathers", "reductions", "copies", "parts"
"""The process groups."""


@final
class NcclComm(LinkedComm):
    """NCCL's own collectives for shards, gloo for the small numbers that the host reads. See "Note: NCCL"."""

    def __init__(self, links: Links, ledger: Ledger, wire_bytes: int) -> None:
        links.new_group(ALL, "nccl")
        super().__init__(links, ledger, ALL, Native(wire_bytes))
        for name, axis in ((GATHERS, "shard"), (REDUCES, "shard"), (COPIES, "replicate"), (PARTS, "tensor")):
            if name != PARTS or len(links.mesh.tensor_ranks) > 1:
                links.new_group(name, "nccl", axis)
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def gather(self, full: Tensor, tag: Tag, kind: str = "gather", axis: Axis = "shard") -> Pending:
        ranks, group = self.mesh.ranks_of(axis), self.links.groups[GATHERS if axis == "shard" else PARTS]
        own = full.view(len(ranks), -1)[ranks.index(self.mesh.rank)]
        work = self.all_gather(full, own, group=group, async_op=True)
        self.sent_bytes[kind] += own.nbytes * (len(ranks) - 1)
        return Pending(lambda: self.links.wait([work], tag.what))

    def reduce(self, full: Tensor | None, own: Tensor, codec: Codec, scale: float, tag: Tag) -> Pending:
        assert full is not None, "NCCL sums what it is given"
        if not codec.is_summable:
            raise ValueError(f"{self.mesh} NCCL adds messages up, but not those of {codec.name!r}: use reduce=a dtype.")
        size, group, is_in_place = self.mesh.shard_size, self.links.groups[REDUCES], codec.is_message(full)
        chunks = full.view(size, -1)
        self.sent_bytes["reduce"] += codec.nbytes(own.numel()) * (size - 1)

        def start(piece: slice) -> Pending:
            result = own[piece]
            rows = chunks if is_in_place else self.pool.take(size * result.numel(), codec.dtype, own.device)
            rows = rows.view(size, -1)
            for row, message in zip(chunks[:, piece], rows, strict=True) if not is_in_place else ():
                codec.encode(row, message)
            part, sent = rows[self.mesh.shard_rank], rows.view(-1)
            work = self._reduce_scatter(part, sent, op=dist.ReduceOp.SUM, group=group, async_op=True)
            return self._scaled(work, is_in_place, sent, part, result, scale, tag)

        return start(slice(None)) if is_in_place else self.in_pieces(own.numel(), codec, size, start)

    def reduce_copies(self, own: Tensor, codec: Codec, scale: float, tag: Tag, *, is_ready: bool = True) -> Pending:
        self.sent_bytes["replicate"] += 2 * codec.nbytes(own.numel()) * (self.mesh.replicas - 1) // self.mesh.replicas

        def start(piece: slice) -> Pending:
            sent = self.encoded(own[piece], codec)
            work = dist.all_reduce(sent, group=self.links.groups[COPIES], async_op=True)
            return self._scaled(work, codec.is_message(own), sent, sent, own[piece], scale, tag)

        return start(slice(None)) if codec.is_message(own) else self.in_pieces(own.numel(), codec, 1, start)

    def _scaled(
        self, work: dist.Work, is_in_place: bool, sent: Tensor, part: Tensor, own: Tensor, scale: float, tag: Tag
    ) -> Pending:
        """Return what waits for a sum, and leaves the scaled `part` of what was `sent` in `own`."""

        def finish() -> None:
            self.links.wait([work], tag.what)
            own.copy_(part)
            own.mul_(scale)
            if not is_in_place:
                # Whoever takes it next writes to it on the stream that has waited for the collective.
                self.pool.give(sent)

        return Pending(finish)
