"""Which algorithm each backend gets: gloo with messages or the memory of the host, and NCCL.

Owns the bytes on the wire. It must not know units, passes or parameters. Read `core/comm.py` first.

Note: gloo
    Point-to-point in place is 2.7 to 4 times as fast as gloo's own all-gather and reduce-scatter, which copy through
    fresh pages, and it fixes the order of the sum: rank 0 first, at the chunk's owner. Messages carry tags, because
    equal-sized messages of different units would otherwise mix without an error when ranks disagree. A rank whose
    gradients are not all there when others reduce them sends a message that says so, in place of its values: the sum
    is made later, in one part, so its bits do not depend on who was early.
Note: the host
    Ranks of one copy of the state that run on one host exchange through its memory (`host/memory.py`): they meet to
    say where values lie (`host/board.py`), read each other's, and meet again when they have, so a collective ends when
    nobody reads any more. What lies elsewhere on some rank, all show each other part by part, in a pooled buffer. Only
    parameters at stage 3 are read for as long as they are gathered, not copied: they change after a barrier that each
    rank enters when its passes are over. Tags, waits and errors are those of gloo.
Note: NCCL
    Its own in-place collectives, asynchronous; reductions have their own communicator, since two collectives on one
    communicator serialize. Waiting orders the current stream after the collective, so buffers need no stream of their
    own. NCCL chooses the order of its sums.
"""

from typing import final

import torch
import torch.distributed as dist

from zeroshard.core.buffer import Pool
from zeroshard.core.comm import BUCKETS, Comm, GroupComm, Pending, SoloComm
from zeroshard.core.mesh import Mesh
from zeroshard.host.board import WORDS
from zeroshard.host.memory import HostMemory
from zeroshard.host.sums import add_up, sum_in_rank_order

__all__ = ["SHOWN_NUMEL", "make_comm"]

Tensor = torch.Tensor
Ranks = tuple[int, ...]
SHOWN_NUMEL = 1 << 20
"""Elements that a rank shows each other at once of what is not in the memory of the host."""
NOWHERE, NOT_READY = -1, -2
"""In the place of an address in the memory of the host."""
AGREEMENTS = 4 * BUCKETS
"""Places on the board: four of each bucket, then those of agreements."""


@final
class GlooComm(GroupComm):
    """Tagged point-to-point for shards, gloo's own collectives for small things. See the notes on gloo and the host."""

    def __init__(self, mesh: Mesh, watchdog_s: float, heartbeat_s: float, pool: Pool, *, shares_host: bool) -> None:
        super().__init__(mesh, watchdog_s, heartbeat_s)
        self.can_postpone = True
        self._data = self._control if len(mesh.tensor_ranks) == 1 else self._new_group("gloo", "replicate", "shard")
        self._pool, self._agreements = pool, 0
        self._memory: HostMemory | None = None
        self._memory = self._share_host(shares_host) if mesh.device.type == "cpu" else None
        if self._memory is not None:
            pool.memory, self.is_in_place = self._memory, True

    def _share_host(self, is_wanted: bool) -> HostMemory | None:
        """Return memory that the ranks of each copy share; None unless each copy is on one host, and all want it."""
        memory, what = HostMemory(self.mesh.shard_rank), "the comparison of hosts"
        cards = self.collect(torch.tensor(memory.card), what)[list(self.mesh.shard_ranks)].tolist()
        return memory if self.agree([int(is_wanted and memory.join(cards))], what)[0] else None

    def gather(self, full: Tensor, tag: int, what: str, kind: str = "gather") -> Pending:
        memory, size = self._memory, self.mesh.shard_size
        offset = memory.offset_of(full) if memory is not None else None
        if memory is None or offset is None:
            return self._gather(full, self.mesh.shard_ranks, tag, what, kind)
        self.sent_bytes[kind] += full.nbytes // size * (size - 1)
        meeting = memory.meet(4 * (tag % BUCKETS), tag, offset)

        def finish() -> None:
            self._wait([meeting], what)
            if not memory.is_home(full):
                for place, there in meeting.offsets.items():
                    part = memory.of_peer(place, there, full.numel(), full.dtype).view(size, -1)[place]
                    full.view(size, -1)[place] = part
                    memory.drop(place, part)
                self._wait([memory.meet(4 * (tag % BUCKETS) + 1, tag)], what)

        return Pending(finish)

    def reduce(self, full: Tensor | None, own: Tensor, wire: torch.dtype, scale: float, tag: int, what: str) -> Pending:
        if (memory := self._memory) is None:
            return self._reduce(full, own, self.mesh.shard_ranks, wire, scale, tag, what, "reduce")
        self.sent_bytes["reduce"] += own.numel() * wire.itemsize * (self.mesh.shard_size - 1)
        offset, said = NOT_READY if full is None else memory.offset_of(full), 4 * (tag % BUCKETS) + 2
        meeting = memory.meet(said, tag, NOWHERE if offset is None else offset)

        def all_have_read() -> None:
            self._wait([memory.meet(said + 1, tag)], what)

        def finish() -> bool:
            self._wait([meeting], what)
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
            shown = self._pool.take(self.mesh.shard_size * numel, full.dtype, full.device)
            rows, at = shown.view(self.mesh.shard_size, -1), memory.offset_of(shown)
            assert at is not None, "pools are in the memory of the host"
            for parts, result in zip(chunks.split(numel, dim=1), own.split(numel), strict=True):
                all_have_read()
                for place in self._peers(self.mesh.shard_ranks):
                    rows[place, : result.numel()] = parts[place]
                there = memory.meet(said, tag, at)
                self._wait([there], what)
                add_up(memory, there.offsets, shown, parts[self.mesh.shard_rank], wire, scale, result)
            self._pool.give(shown)

        return Pending(finish)

    def agree(self, values: list[int], what: str) -> list[int]:
        if self._memory is None or self.mesh.shard_size < self.mesh.world_size or len(values) >= WORDS:
            return super().agree(values, what)
        # At two places in turn: nobody comes to the next agreement but one before all have heard this one.
        self._agreements += 1
        meeting = self._memory.meet(AGREEMENTS + self._agreements % 2, len(values), *values)
        self._wait([meeting], what)
        self.sent_bytes["agree"] += 8 * len(values)
        return [min(each) for each in zip(values, *meeting.numbers.values(), strict=True)]

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
        return Pending(lambda: self._wait(works, what))

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
        taken = {peer: self._pool.take(own.numel(), wire, own.device) for peer in self._peers(ranks)}
        works = [self._receive(buffer, ranks[peer], 2 * tag + 1, what) for peer, buffer in taken.items()]
        if chunks is None:
            given = [self._pool.take(own.numel(), wire, own.device)]
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
            self._wait(works, what)
            is_ready = chunks is not None and not any(map(_is_marked, taken.values()))
            if chunks is not None and is_ready:
                sum_in_rank_order([taken.get(peer, chunks[place]) for peer in range(len(ranks))], wire, scale, own)
            for buffer in [*taken.values(), *given]:
                self._pool.give(buffer)
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
        return self._pool.take(chunk.numel(), wire, chunk.device).copy_(chunk)

    def broadcast(self, tensor: Tensor, what: str, kind: str, *, is_part: bool = False) -> None:
        # gloo refuses tensors that are not contiguous, and some dtypes: bytes are always right.
        data = tensor.contiguous()
        raw = data.view(-1).view(torch.uint8) if data.numel() else data.new_zeros(1, dtype=torch.uint8)
        group, first = (self._data, self.mesh.data_ranks[0]) if is_part else (self._control, 0)
        self._run(lambda: dist.broadcast(raw, first, group=group, async_op=True), what)
        if data.data_ptr() != tensor.data_ptr():
            tensor.copy_(data)
        self.sent_bytes[kind] += raw.nbytes if self.mesh.rank == first else 0

    def collect(self, tensor: Tensor, what: str, kind: str = "agree") -> Tensor:
        rows = [torch.empty_like(tensor) for _ in range(self.mesh.world_size)]
        self._run(lambda: dist.all_gather(rows, tensor.contiguous(), group=self._control, async_op=True), what)
        self.sent_bytes[kind] += tensor.nbytes * (self.mesh.world_size - 1)
        return torch.stack(rows)

    def _send(self, chunk: Tensor, peer: int, tag: int, what: str) -> dist.Work:
        return self._start(lambda: dist.isend(chunk, group=self._control, tag=tag, group_dst=peer), what)

    def _receive(self, chunk: Tensor, peer: int, tag: int, what: str) -> dist.Work:
        return self._start(lambda: dist.irecv(chunk, group=self._control, tag=tag, group_src=peer), what)


@final
class NcclComm(GroupComm):
    """NCCL's own collectives for shards, gloo for the small numbers that the host reads. See "Note: NCCL"."""

    def __init__(self, mesh: Mesh, watchdog_s: float, heartbeat_s: float) -> None:
        super().__init__(mesh, watchdog_s, heartbeat_s)
        self._all = self._new_group("nccl")
        self._data = self._all if len(mesh.tensor_ranks) == 1 else self._new_group("nccl", "replicate", "shard")
        self._gathers = self._new_group("nccl", "shard")
        self._reduces = self._new_group("nccl", "shard")
        self._replicas = self._new_group("nccl", "replicate")
        # torch 2.13 renamed both and warns at the old names; 2.11 has only those.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def gather(self, full: Tensor, tag: int, what: str, kind: str = "gather") -> Pending:
        own = full.view(self.mesh.shard_size, -1)[self.mesh.shard_rank]
        work = self._all_gather(full, own, group=self._gathers, async_op=True)
        self.sent_bytes[kind] += own.nbytes * (self.mesh.shard_size - 1)
        return Pending(lambda: self._wait([work], what))

    def reduce(self, full: Tensor | None, own: Tensor, wire: torch.dtype, scale: float, tag: int, what: str) -> Pending:
        assert full is not None, "NCCL sums what it is given"
        sent = full.to(wire)
        part = sent.view(self.mesh.shard_size, -1)[self.mesh.shard_rank]
        work = self._reduce_scatter(part, sent, op=dist.ReduceOp.SUM, group=self._reduces, async_op=True)
        self.sent_bytes["reduce"] += part.nbytes * (self.mesh.shard_size - 1)

        def finish() -> None:
            self._wait([work], what)
            own.copy_(part)
            own.mul_(scale)

        return Pending(finish)

    def reduce_copies(
        self, own: Tensor, wire: torch.dtype, scale: float, tag: int, what: str, *, is_ready: bool = True
    ) -> Pending:
        sent = own.to(wire)
        work = dist.all_reduce(sent, group=self._replicas, async_op=True)
        self.sent_bytes["replicate"] += 2 * sent.nbytes * (self.mesh.replicas - 1) // self.mesh.replicas

        def finish() -> None:
            self._wait([work], what)
            own.copy_(sent)
            own.mul_(scale)

        return Pending(finish)

    def broadcast(self, tensor: Tensor, what: str, kind: str, *, is_part: bool = False) -> None:
        data = tensor.contiguous()
        group, first = (self._data, self.mesh.data_ranks[0]) if is_part else (self._all, 0)
        self._run(lambda: dist.broadcast(data, first, group=group, async_op=True), what)
        if data.data_ptr() != tensor.data_ptr():
            tensor.copy_(data)
        self.sent_bytes[kind] += data.nbytes if self.mesh.rank == first else 0

    def collect(self, tensor: Tensor, what: str, kind: str = "agree") -> Tensor:
        rows = [torch.empty_like(tensor) for _ in range(self.mesh.world_size)]
        self._run(lambda: dist.all_gather(rows, tensor.contiguous(), group=self._all, async_op=True), what)
        self.sent_bytes[kind] += tensor.nbytes * (self.mesh.world_size - 1)
        return torch.stack(rows)


def _is_marked(message: Tensor) -> bool:
    """Tell whether a message begins with the NaN whose bits are all set: its sender is not ready."""
    return bool((message[:1].view(torch.uint8) == 255).all())


def make_comm(mesh: Mesh, watchdog_s: float, heartbeat_s: float, pool: Pool, *, shares_host: bool) -> Comm:
    """Return the collectives for the mesh's backend, and have `pool` use the memory that they want.

    Args:
        shares_host: whether ranks of one host may exchange in shared memory.
    Collective: makes process groups; every rank must call.
    """
    if mesh.world_size == 1:
        return SoloComm(mesh)
    if "nccl" in dist.get_backend():
        return NcclComm(mesh, watchdog_s, heartbeat_s)
    return GlooComm(mesh, watchdog_s, heartbeat_s, pool, shares_host=shares_host)
