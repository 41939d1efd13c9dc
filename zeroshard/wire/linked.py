"""The common base of transports over process groups: small collectives over all ranks.

Owns votes, broadcasts and all-gathers of tensors that are not shards. It must not know units, passes or parameters.
Read
`wire/comm.py` and `wire/links.py` first.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.table.groups import PART
from zeroshard.table.trace import Ledger
from zeroshard.table.wires import Wire
from zeroshard.torch_private import bytes_in
from zeroshard.wire.comm import Channel, Comm, Pending, Tag, Vote, unexpanded
from zeroshard.wire.links import CONTROL, Links
from zeroshard.wire.memory import Memory

__all__ = ["LinkedComm"]

Tensor = torch.Tensor
CHANNEL_BITS, TURN_BITS, HOP_BITS = 2, 22, 5
"""Fields of the tags of votes: the channel, its count modulo a power of two, and the hop."""


class LinkedComm(Comm):
    """The common base of transports over process groups: small collectives over all ranks.

    Args:
        group: the name of `group`.
    """

    def __init__(self, links: Links, ledger: Ledger, group: str, wire: Wire, memory: Memory | None = None) -> None:
        super().__init__(links.mesh, ledger, wire, memory)
        self.links, self.watchdog, self._name = links, links.watchdog, group
        self._votes: Counter[Channel] = Counter()
        # torch 2.13 renamed it and warns at the old name; 2.11 has only that.
        self.all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks for tensors."""
        return self.links.groups[self._name]

    def span(self, across: Comm) -> None:
        super().span(across)
        if across.watchdog is not None:
            self.links.follow(across.watchdog)

    def close(self) -> None:
        super().close()
        self.links.close()

    def call_before_waits(self, catch_up: Callable[[], None]) -> None:
        self.links.before_wait = catch_up

    def post(self, values: list[int], what: str, channel: Channel) -> Vote:
        # Dissemination: after hop k a rank knows the minima over the 2**k ranks up to it. Counting a rank twice does
        # not change a minimum, so this works for any number of ranks.
        ranks = self.mesh.tensor_ranks if channel is Channel.TENSOR else range(self.mesh.world_size)
        place, size, group = ranks.index(self.mesh.rank), len(ranks), self.links.groups[CONTROL]
        hops = (size - 1).bit_length()
        self._votes[channel] = turn = (self._votes[channel] + 1) % (1 << TURN_BITS)
        first_tag = Tag.VOTES + ((channel << TURN_BITS | turn) << HOP_BITS)
        self.sent_bytes["agree"] += 8 * len(values) * hops

        def start(hop: int, least: list[int]) -> tuple[Tensor, list[dist.Work]]:
            after, before, tag = ranks[(place + (1 << hop)) % size], ranks[place - (1 << hop)], first_tag + hop
            # Emulated ranks send nothing.
            told, heard = (torch.tensor(least, dtype=torch.int64, device="cpu") for _ in range(2))
            receive = self.links.start(lambda: dist.irecv(heard, group=group, tag=tag, group_src=before), what)
            send = self.links.start(lambda: dist.isend(told, group=group, tag=tag, group_dst=after), what)
            return heard, [receive, send]

        # The first hop starts immediately; the others follow when the vote is read. One rank alone makes none.
        hop, least, started = 0, values, start(0, values) if hops else None

        def hear() -> list[int]:
            nonlocal hop, least, started
            while started is not None:
                heard, works = started
                self.links.wait(works, what)  # an interrupted wait is repeated
                hop, least = hop + 1, [*map(min, least, heard.tolist())]
                started = start(hop, least) if hop < hops else None
            return least

        return Vote(hear)

    def run(self, tensor: Tensor, start: Callable[[dist.ProcessGroup], Any], what: str, name: str) -> None:
        """Start a collective on `tensor` on a process group, and wait for it.

        Args:
            name: name of the group; a group with the same ranks is used if this one does not support the tensor.
        """
        self.links.run(lambda: start(self.links.groups[name]), what)

    def send(self, tensor: Tensor, rank: int, tag: Tag) -> Pending:
        self.sent_bytes["pipe"] += tensor.nbytes
        return self.message(dist.isend, tensor, tag, group_dst=rank)

    def receive(self, tensor: Tensor, rank: int, tag: Tag) -> Pending:
        return self.message(dist.irecv, tensor, tag, group_src=rank)

    def message(self, start: Callable[..., Any], tensor: Tensor, tag: Tag, **peer: int) -> Pending:
        """Start a message between this rank and one other.

        Args:
            start: `dist.isend` or `dist.irecv`.
        """
        group, number = self.links.groups[CONTROL], tag.message(Tag.GATHER)
        work = self.links.start(lambda: start(tensor, group=group, tag=number, **peer), tag.what)
        return Pending(lambda: self.links.wait([work], tag.what))

    def flag(self, flags: Tensor, what: str) -> None:
        largest = dist.ReduceOp.MAX
        self.run(flags, lambda group: dist.all_reduce(flags, largest, group=group, async_op=True), what, self._name)
        self.sent_bytes["agree"] += flags.nbytes

    def broadcast(self, tensor: Tensor, what: str, kind: str, *, is_part: bool = False) -> None:
        # gloo rejects non-contiguous tensors and some dtypes; bytes always work.
        raw = bytes_in(tensor) if tensor.numel() else tensor.new_zeros(1, dtype=torch.uint8)
        is_part &= PART in self.links.groups  # without the group, all ranks have the same parts
        first, name = (self.mesh.data_ranks[0], PART) if is_part else (0, self._name)
        self.run(tensor, lambda group: dist.broadcast(raw, group_src=0, group=group, async_op=True), what, name)
        if tensor.numel() and raw.data_ptr() != tensor.data_ptr():
            data = raw.view(tensor.dtype).view(tensor.shape)
            unexpanded(tensor, tensor.stride()).copy_(unexpanded(data, tensor.stride()))
        self.sent_bytes[kind] += raw.nbytes if self.mesh.rank == first else 0

    def collect(self, tensor: Tensor, what: str, kind: str = "agree") -> Tensor:
        raw = bytes_in(tensor)
        rows = raw.new_empty(self.mesh.world_size, raw.numel())
        self.run(
            tensor, lambda group: self.all_gather(rows.view(-1), raw, group=group, async_op=True), what, self._name
        )
        self.sent_bytes[kind] += tensor.nbytes * (self.mesh.world_size - 1)
        return rows.view(tensor.dtype).view(self.mesh.world_size, *tensor.shape)
