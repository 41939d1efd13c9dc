"""What transports over process groups have in common: small things between all ranks.

Owns agreements, broadcasts and all-gathers of what is not a shard. It must not know units, passes or parameters. Read
`wire/comm.py` and `wire/links.py` first.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from zeroshard.table.trace import Ledger
from zeroshard.table.wires import Wire
from zeroshard.wire.codec import Codec
from zeroshard.wire.comm import Comm, Pending
from zeroshard.wire.links import CONTROL, PART, Links
from zeroshard.wire.memory import Memory

__all__ = ["LinkedComm"]

Tensor = torch.Tensor


class LinkedComm(Comm):
    """What transports over process groups have in common: small things between all ranks.

    Args:
        group: the name of `group`.
    """

    def __init__(self, links: Links, ledger: Ledger, group: str, wire: Wire, memory: Memory | None = None) -> None:
        super().__init__(links.mesh, ledger, wire, memory)
        self.links, self.watchdog, self._name = links, links.watchdog, group
        # torch 2.13 renamed it and warns at the old name; 2.11 has only that.
        self.all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks for what is not a small number."""
        return self.links.groups[self._name]

    def encoded(self, values: Tensor, codec: Codec) -> Tensor:
        """Return the message for some values: themselves, where they are one, else in a pooled buffer."""
        if codec.is_message(values):
            return values
        message = self.pool.take(codec.message_numel(values.numel()), codec.dtype, values.device)
        codec.encode(values, message)
        return message

    def in_pieces(self, numel: int, codec: Codec, messages: int, start: Callable[[slice], Pending]) -> Pending:
        """Begin an exchange of `numel` elements that each rank owns, in pieces of at most `wire_bytes`.

        The first piece is under way at once, the others while somebody waits; none follows where a rank is not ready.

        Args:
            messages: as in `Wire.piece_numel`.
            start: begins one piece.
        """
        size = max(1, self.wire.piece_numel(numel, codec.name, messages))
        pieces = [slice(at, min(at + size, numel)) for at in range(0, max(1, numel), size)]
        first = start(pieces[0])
        return Pending(lambda: first.wait() and all(start(piece).wait() for piece in pieces[1:]))

    def agree(self, values: list[int], what: str) -> list[int]:
        tensor, group = torch.tensor(values, dtype=torch.int64), self.links.groups[CONTROL]
        self.links.run(lambda: dist.all_reduce(tensor, dist.ReduceOp.MIN, group=group, async_op=True), what)
        self.sent_bytes["agree"] += tensor.nbytes
        found: list[int] = tensor.tolist()
        return found

    def broadcast(self, tensor: Tensor, what: str, kind: str, *, is_part: bool = False) -> None:
        # gloo refuses tensors that are not contiguous, and some dtypes: bytes are always right.
        data = tensor.contiguous()
        raw = data.view(-1).view(torch.uint8) if data.numel() else data.new_zeros(1, dtype=torch.uint8)
        is_part &= PART in self.links.groups  # else all ranks have the same parts
        first, group = (self.mesh.data_ranks[0], self.links.groups[PART]) if is_part else (0, self.group)
        self.links.run(lambda: dist.broadcast(raw, first, group=group, async_op=True), what)
        if data.data_ptr() != tensor.data_ptr():
            tensor.copy_(data)
        self.sent_bytes[kind] += raw.nbytes if self.mesh.rank == first else 0

    def collect(self, tensor: Tensor, what: str, kind: str = "agree") -> Tensor:
        rows, mine = tensor.new_empty((self.mesh.world_size, *tensor.shape)), tensor.contiguous().view(-1)
        self.links.run(lambda: self.all_gather(rows.view(-1), mine, group=self.group, async_op=True), what)
        self.sent_bytes[kind] += tensor.nbytes * (self.mesh.world_size - 1)
        return rows
