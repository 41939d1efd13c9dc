"""The transport NCCL: its own collectives for shards, gloo for small numbers that the host reads.

Owns the collectives. It must not know units, passes or parameters. Read `wire/comm.py` first.

Note: NCCL
    Collectives are in place and asynchronous. A wait orders the current stream after the collective; buffers need no
    separate stream, and the host does not block. NCCL chooses the order of its sums. Tensors in host memory are sent by
    gloo, as bytes: AdamW's `step`, buffers of modules, and all texts.
Note: communicators
    Collectives on one communicator run in sequence. In a backward, the next unit is gathered while the last unit is
    reduced, so gathers and reductions have separate communicators: on a common one, an urgent gather would wait for a
    reduction. Norms have a third communicator, with broadcasts and gathers over all ranks: a rank may take a norm
    before it has read the request of another rank for a gather in the previous backward (`core/votes.py`), and on a
    common communicator ranks would issue the two in different orders. Other axes of the mesh have their own
    communicators.
Note: scales
    NCCL scales during the reduction, without a further kernel. Elements that are converted for a message are scaled in
    the same kernel, before rounding. So sums in fp16 do not overflow, and the factor is not rounded to a low precision,
    unlike the factor of an average in NCCL. Sums in bf16 are scaled in fp32, where NCCL's factor is not exact.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from zeroshard.table.groups import ALL, BACK, COPIES, FORTH, GATHERS, PART, PARTS, REDUCES, communicators
from zeroshard.table.trace import Ledger
from zeroshard.table.wires import Native
from zeroshard.torch_groups import premultiplied_sum
from zeroshard.wire.codec import Codec
from zeroshard.wire.comm import Pending, Tag
from zeroshard.wire.linked import LinkedComm
from zeroshard.wire.links import CONTROL, HOST_PART, Links
from zeroshard.wire.mesh import Axis, refuse_blocking_nccl

__all__ = ["NcclComm"]

Tensor = torch.Tensor
Begin = Callable[[Tensor, Tensor, Any], Any]


@final
class NcclComm(LinkedComm):
    """NCCL's own collectives for shards, gloo for numbers and tensors of the host. See "Note: NCCL"."""

    def __init__(self, links: Links, ledger: Ledger) -> None:
        refuse_blocking_nccl()
        for name, axes in communicators(dict(links.mesh.axes)).items():
            links.new_group(name, "nccl", *axes)
        super().__init__(links, ledger, ALL, Native())
        if PART in links.groups:
            links.new_group(HOST_PART, "gloo", "replicate", "shard")
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    @property
    def is_on_host(self) -> bool:
        return False

    def _is_of_host(self, tensor: Tensor) -> bool:
        return not self.links.is_on_device(tensor)

    def message(self, start: Callable[..., Any], tensor: Tensor, tag: Tag, **peer: int) -> Pending:
        if self._is_of_host(tensor):
            return super().message(start, tensor, tag, **peer)
        # A message waits for the one before it on its communicator: the two directions of a pipe have one each.
        group = self.links.groups[FORTH if tag.bucket % 2 == 0 else BACK]
        work = self.links.start(lambda: start(tensor, group=group, **peer), tag.what)
        return Pending(lambda: self.links.wait_on_stream(work, tag.what))

    def run(self, tensor: Tensor, start: Callable[[dist.ProcessGroup], Any], what: str, name: str) -> None:
        if self._is_of_host(tensor):
            super().run(tensor, start, what, HOST_PART if name == PART else CONTROL)
        else:
            # The host often reads the result next, before any agreement.
            self.links.wait_on_stream(start(self.links.groups[name]), what, is_last=True)

    def gather(self, full: Tensor, tag: Tag, kind: str = "gather", axis: Axis = "shard") -> Pending:
        ranks, group = self.mesh.ranks_of(axis), self.links.groups[GATHERS if axis == "shard" else PARTS]
        own = full.view(len(ranks), -1)[ranks.index(self.mesh.rank)]
        work = self.all_gather(full, own, group=group, async_op=True)
        self.sent_bytes[kind] += own.nbytes * (len(ranks) - 1)
        return Pending(lambda: self.links.wait_on_stream(work, tag.what, is_last=kind == "state"))

    def reduce(self, full: Tensor | None, own: Tensor, codec: Codec, scale: float, tag: Tag) -> Pending:
        assert full is not None, "NCCL sums what it is given"
        if not codec.is_summable:
            raise ValueError(f"{self.mesh} NCCL cannot sum messages of codec {codec.name!r}: set reduce= to a dtype.")
        size, group = self.mesh.shard_size, self.links.groups[REDUCES]
        self.sent_bytes["reduce"] += codec.nbytes(own.numel()) * (size - 1)

        def begin(part: Tensor, sent: Tensor, op: Any) -> Any:
            return self._reduce_scatter(part, sent, op=op, group=group, async_op=True)

        return self._sum(full, own, self.mesh.shard_rank, begin, codec, scale, size, tag)

    def reduce_copies(self, own: Tensor, codec: Codec, scale: float, tag: Tag, *, is_ready: bool = True) -> Pending:
        size, group = self.mesh.replicas, self.links.groups[COPIES]
        self.sent_bytes["replicate"] += 2 * codec.nbytes(own.numel()) * (size - 1) // size

        def begin(part: Tensor, sent: Tensor, op: Any) -> Any:
            return dist.all_reduce(sent, op, group=group, async_op=True)

        return self._sum(own, own, 0, begin, codec, scale, size, tag)

    def _sum(
        self, full: Tensor, own: Tensor, place: int, begin: Begin, codec: Codec, scale: float, ranks: int, tag: Tag
    ) -> Pending:
        """Start a sum of `full` over ranks; the wait writes this rank's part of the sum to `own`.

        Args:
            full: a row of `own.numel()` elements for each part of the sum.
            place: the row of this rank.
            begin: issues the collective that reads a message and writes this rank's part of the sum to its row.
        """
        if codec.is_message(full):
            op, rest = _folded(scale, ranks, full.dtype)
            part = own if own.dtype == full.dtype else full.view(-1, own.numel())[place]
            work = begin(part, full, op)
            return Pending(lambda: self._finish(work, part, own, rest, tag))
        sent = self.pool.take(full.numel(), codec.dtype, full.device)
        if codec.dtype is torch.bfloat16:
            # Gradients of another rank may have landed in bf16, and all ranks must take the same operation.
            (op, rest), factor = _folded(scale, ranks, codec.dtype), 1.0
        else:
            op, factor = dist.ReduceOp.SUM, scale if codec.dtype is not torch.float16 else min(scale, 1 / ranks)
            rest = scale / factor
        torch.mul(full, factor, out=sent)
        part = sent.view(-1, own.numel())[place]
        work = begin(part, sent, op)
        return Pending(lambda: self._finish(work, part, own, rest, tag, sent))

    def route(self, given: Tensor, taken: Tensor, counts: Sequence[Sequence[int]], tag: Tag, kind: str) -> Pending:
        place = self.mesh.shard_rank
        sent, heard = [*counts[place]], [row[place] for row in counts]
        work = dist.all_to_all_single(taken, given, heard, sent, group=self.links.groups[GATHERS], async_op=True)
        self.sent_bytes[kind] += (given.numel() - sent[place]) * given.itemsize
        return Pending(lambda: self.links.wait_on_stream(work, tag.what))

    def _finish(
        self, work: dist.Work, part: Tensor, own: Tensor, rest: float, tag: Tag, sent: Tensor | None = None
    ) -> None:
        """Wait for a sum, and copy its `part` to `own`."""
        self.links.wait_on_stream(work, tag.what)
        if part is not own:
            own.copy_(part)
        if sent is not None:
            # The next user writes to the buffer on the stream that has waited for the collective.
            self.pool.give(sent)
        if rest != 1.0:
            own.mul_(rest)


def _folded(scale: float, size: int, dtype: torch.dtype) -> tuple[Any, float]:
    """Return the operation that sums over `size` ranks and scales exactly, and the remaining scale."""
    if dtype in (torch.float32, torch.float64) and scale not in (1.0, 1 / size):
        return premultiplied_sum(scale), 1.0
    # NCCL rounds the factor of an average to the dtype.
    is_exact = dtype in (torch.float32, torch.float64)
    rounded = 1 / size if is_exact else torch.tensor(1 / size, dtype=dtype, device="cpu").item()
    if dtype is torch.float16 or (scale != 1.0 and rounded == 1 / size):
        return dist.ReduceOp.AVG, scale / rounded
    return dist.ReduceOp.SUM, scale
