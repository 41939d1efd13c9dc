"""What every transport must do: one process, messages, memory of the host, NCCL's code, emulated ranks."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeroshard as zs
from benchmarks.gpu import Nobody, fake_ranks
from tools.emulated import Device, EmulatedLinks
from zeroshard.table.settings import WIRE_BYTES
from zeroshard.table.spec import BLOCK_NUMEL
from zeroshard.table.trace import Ledger
from zeroshard.testing import run_ranks
from zeroshard.wire.codec import Codec, Rounded
from zeroshard.wire.comm import Comm, SoloComm, Tag
from zeroshard.wire.mesh import Mesh, current_mesh
from zeroshard.wire.nccl import NcclComm
from zeroshard.wire.transports import make_comm

TIMEOUT_S = 120.0
SIZES = (1, 7, 64, (1 << 20) + 3)
"""Elements of a shard; the last is a few more than are shown at once in memory of the host."""
FEW = 1 << 10
"""Shards of more elements are tried in fp32 alone."""
LATE = 2 * BLOCK_NUMEL + 64
"""What a rank is not ready for: several pieces, where a transport sends in pieces."""
KINDS = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


@final
class Shifted(Codec):
    """Elements rounded to eighths, behind a number for each block: nothing that a backend could add up."""

    def __init__(self) -> None:
        super().__init__("float32")

    def message_numel(self, numel: int) -> int:
        return numel + -(-numel // BLOCK_NUMEL)

    def encode(self, values: Tensor, message: Tensor) -> None:
        parts = message.split(self.message_numel(BLOCK_NUMEL))
        for block, part in zip(values.split(BLOCK_NUMEL), parts, strict=True):
            part[0] = 7.0
            part[1:] = (8 * block).round() + 7.0

    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        return ((message[1:] - message[0]) / 8).to(dtype)


CASES = (
    (torch.float32, Rounded("float32")),
    (torch.float32, Rounded("bfloat16")),
    (torch.float64, Rounded("float64")),
    (torch.float32, Shifted()),
)
"""The dtype of what is held, and the codec."""


def messages(mesh: Mesh, ledger: Ledger, wire_bytes: int = WIRE_BYTES) -> Comm:
    return make_comm(mesh, zs.Settings(watchdog_s=20.0, shared_memory=False, wire_bytes=wire_bytes), ledger)


def pieces(mesh: Mesh, ledger: Ledger) -> Comm:
    return messages(mesh, ledger, 1)


def host(mesh: Mesh, ledger: Ledger) -> Comm:
    comm = make_comm(mesh, zs.Settings(watchdog_s=20.0), ledger)
    assert comm.wire.is_in_place
    return comm


def native(mesh: Mesh, ledger: Ledger) -> Comm:
    DEVICES.append(Device(seed=mesh.rank))
    return NcclComm(EmulatedLinks(mesh, 20.0, 20.0, DEVICES[-1]), ledger)


def native_eager(mesh: Mesh, ledger: Ledger) -> Comm:
    comm = native(mesh, ledger)
    DEVICES[-1].eagerness = 1.0
    return comm


def native_late(mesh: Mesh, ledger: Ledger) -> Comm:
    comm = native(mesh, ledger)
    DEVICES[-1].eagerness = 0.0
    return comm


DEVICES: list[Device] = []
"""The emulated devices of this process."""

MAKERS: dict[str, Callable[[Mesh, Ledger], Comm]] = {
    "messages": messages,
    "messages in pieces": pieces,
    "host": host,
    "native": native,
    "native at once": native_eager,
    "native as late as can be": native_late,
}
IN_RANK_ORDER = ("messages", "messages in pieces", "host")
"""Whose sums have an order that is known."""


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32, key: int = 0) -> Tensor:
    """Return what a rank has, which all know."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * key + rank)).to(dtype)


def fold(parts: list[Tensor], codec: Codec, scale: float) -> Tensor:
    """Return the sum in rank order of what each rank has, as others decode it, in fp32 or better."""
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    total, *others = (torch.cat(list(codec.rounded_blocks(part, dtype))) for part in parts)
    for other in others:
        total = total + other
    return total * scale


class Asked:
    """One transport on one rank; what it did wrong is in `wrong`."""

    def __init__(self, name: str, replicas: int) -> None:
        joined = current_mesh()
        axes = (("replicate", replicas), ("shard", joined.world_size // replicas))
        self.name, self.ledger, self.mesh = name, Ledger(), replace(joined, axes=axes)
        self.comm, self.wrong = MAKERS[name](self.mesh, self.ledger), list[str]()

    def expect(self, found: Any, expected: Any, what: str) -> None:
        is_same = torch.equal(found, expected) if isinstance(found, Tensor) else found == expected
        if not is_same:
            self.wrong.append(f"{what}: {str(found)[:200]}, not {str(expected)[:200]}")

    def memory(self, numel: int, dtype: torch.dtype, *, shared: bool) -> Tensor:
        """Return (numel,) where gradients are, in the transport's own memory, or in this process's alone."""
        return (
            self.comm.pool.memory.zeros(numel, dtype, self.mesh.device) if shared else torch.zeros(numel, dtype=dtype)
        )

    def cases(self) -> tuple[tuple[torch.dtype, Codec], ...]:
        """Return what the transport can reduce: a backend that adds messages up cannot do so for every codec."""
        return tuple(case for case in CASES if case[1].is_summable or self.name in IN_RANK_ORDER)

    def gathers(self) -> None:
        ranks, place = self.mesh.shard_ranks, self.mesh.shard_rank
        for number, size in enumerate(SIZES):
            for dtype in KINDS if size < FEW else KINDS[:1]:
                for shared in (True, False):
                    full = self.memory(len(ranks) * size, dtype, shared=shared)
                    full.view(len(ranks), -1)[place] = values(self.mesh.rank, size, key=number).to(dtype)
                    before = self.comm.sent_bytes["state"]
                    pending = self.comm.gather(full, Tag(number, number, "a gather"), "state")
                    self.expect(pending.wait() and pending.wait(), True, "a gather, waited for twice")
                    expected = torch.cat([values(rank, size, key=number).to(dtype) for rank in ranks])
                    self.expect(full, expected, f"gather of {size} {dtype}, shared {shared}")
                    sent = self.comm.sent_bytes["state"] - before
                    self.expect(sent, size * dtype.itemsize * (len(ranks) - 1), f"bytes of a gather of {size} {dtype}")

    def reductions(self) -> None:
        ranks, place = self.mesh.shard_ranks, self.mesh.shard_rank
        for number, size in enumerate(SIZES):
            for held, codec in self.cases() if size < FEW else self.cases()[::3]:
                for shared, apart in ((True, True), (True, False), (False, True)):
                    full = self.memory(len(ranks) * size, held, shared=shared)
                    full.copy_(values(self.mesh.rank, full.numel(), held, number))
                    own = torch.full((size,), 9.0, dtype=held) if apart else full.view(len(ranks), -1)[place]
                    before = self.comm.sent_bytes["reduce"]
                    pending = self.comm.reduce(full, own, codec, 0.5, Tag(number, number, "a reduction"))
                    what = f"reduction of {size} {held} as {codec.name}, shared {shared}, apart {apart}"
                    self.expect(pending.wait(), True, f"{what}: all were ready")
                    theirs = [values(rank, full.numel(), held, number).view(len(ranks), -1) for rank in ranks]
                    expected = fold([rows[place] for rows in theirs], codec, 0.5).to(held)
                    if self.name in IN_RANK_ORDER:
                        self.expect(own, expected, what)
                    else:
                        step = torch.finfo(codec.dtype).eps * sum(rows[place].abs().max() for rows in theirs)
                        self.expect(bool(((own - expected).abs() <= 2 * step).all()), True, what)
                    others = [row for row in range(len(ranks)) if row != place]
                    self.expect(full.view(len(ranks), -1)[others], theirs[place][others], f"{what}: the others' shards")
                    sent = self.comm.sent_bytes["reduce"] - before
                    self.expect(sent, codec.nbytes(size) * (len(ranks) - 1), f"{what}: bytes")

    def not_ready(self) -> None:
        if not self.comm.can_postpone:
            return
        ranks, place = self.mesh.shard_ranks, self.mesh.shard_rank
        for late in range(len(ranks)):
            full = self.memory(len(ranks) * LATE, torch.float32, shared=True)
            full.copy_(values(self.mesh.rank, full.numel()))
            own, kept = torch.zeros(LATE), full.clone()
            given = None if place == late else full
            found = self.comm.reduce(given, own, Rounded("float32"), 1.0, Tag(late, 0, "a late reduction")).wait()
            self.expect(found, False, f"place {late} was not ready")
            self.expect(full, kept, f"what waits for place {late}")

    def several_at_once(self) -> None:
        ranks, place = self.mesh.shard_ranks, self.mesh.shard_rank
        fulls = [self.memory(len(ranks) * size, torch.float32, shared=True) for size in (64, 7, 64)]
        pending = []
        for number, full in enumerate(fulls):
            full.view(len(ranks), -1)[place] = values(self.mesh.rank, full.numel() // len(ranks), key=number)
            pending.append(self.comm.gather(full, Tag(5, number, f"gather {number}")))
        for one in reversed(pending):
            one.wait()
        for number, full in enumerate(fulls):
            expected = torch.cat([values(rank, full.numel() // len(ranks), key=number) for rank in ranks])
            self.expect(full, expected, f"gather {number} of three at once")

    def routes(self) -> None:
        ranks, place = self.mesh.shard_ranks, self.mesh.shard_rank
        count = len(ranks)
        plans = [[[(3 * a + b) % 5 for b in range(count)] for a in range(count)]]  # each its own, some nothing
        plans.append([[0] * (count - 1) + [7 + a] for a in range(count)])  # all to the last one
        plans.append([[SIZES[-1] if a == 0 else 0 for _ in range(count)] for a in range(count)])  # all from the first
        plans.append([[0] * count] * count)
        for number, counts in enumerate(plans):
            for dtype in KINDS if number != 2 else KINDS[:1]:
                for shared in (True, False):
                    given = self.memory(max(1, sum(counts[place])), dtype, shared=shared)[: sum(counts[place])]
                    given.copy_(values(self.mesh.rank, given.numel(), key=number).to(dtype))
                    taken = self.memory(max(1, sum(row[place] for row in counts)), dtype, shared=shared)
                    taken = taken[: sum(row[place] for row in counts)]
                    before, kept = self.comm.sent_bytes["update"], given.clone()
                    pending = self.comm.route(given, taken, counts, Tag(number, number, "a route"), "update")
                    what = f"route {number} of {dtype}, shared {shared}"
                    self.expect(pending.wait() and pending.wait(), True, f"{what}, waited for twice")
                    theirs = [values(r, sum(row), key=number).to(dtype) for r, row in zip(ranks, counts, strict=True)]
                    parts = [one.split(row)[place] for one, row in zip(theirs, counts, strict=True)]
                    self.expect(taken, torch.cat(parts), what)
                    self.expect(given, kept, f"{what}: what was given")
                    sent = self.comm.sent_bytes["update"] - before
                    self.expect(sent, (given.numel() - counts[place][place]) * dtype.itemsize, f"{what}: bytes")

    def routes_at_once(self) -> None:
        ranks, place = self.mesh.shard_ranks, self.mesh.shard_rank
        counts, pending = [[5 + a + b for b in range(len(ranks))] for a in range(len(ranks))], []
        for number in range(3):
            given = self.memory(sum(counts[place]), torch.float32, shared=True)
            given.copy_(values(self.mesh.rank, given.numel(), key=number))
            taken = self.memory(sum(row[place] for row in counts), torch.float32, shared=True)
            pending.append(
                (self.comm.route(given, taken, counts, Tag(7, number, "one of three"), "update"), given, taken)
            )
        for number, (one, _, taken) in enumerate(pending):
            one.wait()
            theirs = [values(r, sum(row), key=number) for r, row in zip(ranks, counts, strict=True)]
            parts = [each.split(row)[place] for each, row in zip(theirs, counts, strict=True)]
            self.expect(taken, torch.cat(parts), f"route {number} of three at once")

    def copies(self) -> None:
        ranks = self.mesh.replica_ranks
        if len(ranks) == 1:
            return
        for held, codec in self.cases():
            own = values(self.mesh.rank, 64 * len(ranks), held)
            before, what = self.comm.sent_bytes["replicate"], f"the sum over copies of {held} as {codec.name}"
            done = self.comm.reduce_copies(own, codec, 0.25, Tag(6, 0, what)).wait()
            self.expect(done, True, what)
            expected = fold([values(rank, own.numel(), held) for rank in ranks], codec, 0.25)
            step = 1e-6 if codec.name != "bfloat16" else 2**-7
            self.expect(bool(torch.allclose(own, expected.to(held), rtol=step, atol=step)), True, what)
            sent = self.comm.sent_bytes["replicate"] - before
            # Where a backend adds messages up, the sums come back as messages, too.
            summed_bytes = 64 * held.itemsize if self.name in IN_RANK_ORDER else codec.nbytes(64)
            self.expect(sent, (codec.nbytes(64) + summed_bytes) * (len(ranks) - 1), f"bytes of {what}")

    def small_things(self) -> None:
        rank, world = self.mesh.rank, self.mesh.world_size
        given = {
            "a matrix": torch.arange(6.0).view(2, 3) + rank,
            "not contiguous": (torch.arange(6.0).view(2, 3) + rank).t(),
            "integers": torch.tensor([rank, 2**62]),
            "truths": torch.tensor([rank == 0, True]),
            "a number": torch.tensor(float(rank)),
            "nothing": torch.zeros(0),
            "bfloat16": torch.full((3,), float(rank), dtype=torch.bfloat16),
        }
        for what, tensor in given.items():
            expected = tensor - rank if what in ("a matrix", "not contiguous") else tensor.clone()
            if what in ("integers", "truths", "a number", "bfloat16"):
                expected = {"integers": torch.tensor([0, 2**62]), "truths": torch.tensor([True, True])}.get(
                    what, torch.zeros_like(tensor)
                )
            self.comm.broadcast(tensor, what, "start")
            self.expect(tensor, expected, f"broadcast of {what}")
        self.expect(self.comm.agree([rank, -rank, 2**62, 5], "a minimum"), [0, 1 - world, 2**62, 5], "agree")
        self.expect(self.comm.agree([rank] * 40, "many"), [0] * 40, "agree on many")
        flags = torch.tensor([float(rank == 0), 0.0, float(rank == world - 1)])
        self.comm.flag(flags, "a maximum")
        self.expect(flags, torch.tensor([1.0, 0.0, 1.0]), "flag")
        rows = self.comm.collect(torch.tensor([[rank, 7]]), "rows")
        self.expect(rows, torch.tensor([[[each, 7]] for each in range(world)]), "collect")
        texts = self.comm.texts("é" * 3000 if rank == world - 1 else f"rank {rank}", "texts")
        self.expect(texts[:-1], [f"rank {each}" for each in range(world - 1)], "texts")
        self.expect(texts[-1].rstrip("\ufffd"), "é" * 2048, "a long text")


def ask(name: str, replicas: int = 1) -> list[str]:
    """Ask a transport everything, twice; return what was wrong."""
    asked, held = Asked(name, replicas), []
    for _ in range(2):
        for question in (
            asked.gathers, asked.reductions, asked.not_ready, asked.several_at_once, asked.routes, asked.routes_at_once,
            asked.copies, asked.small_things,
        ):  # fmt: skip
            question()
        held.append(asked.ledger.now["transient"])
    asked.expect(held[1], held[0], "buffers of the second round beside the first")
    for device in DEVICES:
        device.check()
        asked.expect(device.host_waits, [], "waits of the host for a device")
    return asked.wrong


@pytest.mark.product
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (3, 1), (4, 2)])
def test_a_transport_does_what_the_engine_asks_for(name: str, world: int, replicas: int) -> None:
    assert run_ranks(ask, world, name, replicas, timeout_s=TIMEOUT_S) == [[]] * world


def refused() -> str:
    """Ask NCCL's code for a sum of messages that cannot be added up."""
    asked = Asked("native", 1)
    with pytest.raises(ValueError) as error:
        asked.comm.reduce(torch.zeros(128), torch.zeros(64), Shifted(), 1.0, Tag(0, 0, ""))
    return str(error.value)


def test_a_codec_that_nccl_cannot_add_up_is_refused_by_name() -> None:
    for rank, text in enumerate(run_ranks(refused, 2)):
        assert text.startswith(f"[rank {rank}/2] NCCL cannot sum messages") and "'float32'" in text


def wrong_sum(name: str) -> list[str]:
    """Ask a transport whose owner forgets the last rank's part."""
    asked = Asked(name, 1)
    reduce = asked.comm.reduce

    def forgetful(full: Tensor | None, own: Tensor, *rest: Any) -> Any:
        if full is not None and asked.mesh.rank == asked.mesh.world_size - 1:
            full = torch.zeros_like(full)
        return reduce(full, own, *rest)

    asked.comm.reduce = forgetful  # type: ignore[method-assign]
    asked.reductions()
    return asked.wrong


@pytest.mark.product
@pytest.mark.parametrize("name", MAKERS)
def test_a_transport_that_loses_a_part_is_found(name: str) -> None:
    assert all(run_ranks(wrong_sum, 2, name, timeout_s=TIMEOUT_S))


LATE_S = 0.1


def reuse(name: str) -> list[str]:
    """Overwrite what a transport was given as soon as a wait ends, while the first rank is late to read it."""
    asked = Asked(name, 1)
    ranks, place = asked.mesh.shard_ranks, asked.mesh.shard_rank
    memory: Any = asked.comm.pool.memory
    if place == 0 and memory.is_shared:
        of_peer = memory.of_peer

        def late(*where: Any) -> Tensor:
            time.sleep(LATE_S)
            return of_peer(*where)

        memory.of_peer = late
    for number in range(2):
        full = asked.memory(64 * len(ranks), torch.float32, shared=True)
        full.view(len(ranks), -1)[place] = values(place, 64, key=number)
        asked.comm.gather(full, Tag(number, 0, "a gather"), "state").wait()
        expected = torch.cat([values(rank, 64, key=number) for rank in ranks])
        asked.expect(full, expected, f"gather {number}")
        full.copy_(values(place, full.numel(), key=number))
        given, taken = asked.memory(8 * len(ranks), torch.float32, shared=True), torch.zeros(8 * len(ranks))
        given.copy_(values(place, given.numel(), key=number))
        pending = asked.comm.route(given, taken, [[8] * len(ranks)] * len(ranks), Tag(number, 2, "a route"), "update")
        if place == 0:
            time.sleep(LATE_S)
        pending.wait()
        given.fill_(9.0)
        expected = torch.cat([values(r, given.numel(), key=number).split(8)[place] for r in range(len(ranks))])
        asked.expect(taken, expected, f"route {number}")
        own = torch.zeros(64)
        pending = asked.comm.reduce(full, own, Rounded("float32"), 1.0, Tag(number, 1, "a reduction"))
        if place == 0:
            time.sleep(LATE_S)
        pending.wait()
        full.fill_(9.0)
        parts = [values(rank, full.numel(), key=number).view(len(ranks), -1)[place] for rank in ranks]
        asked.expect(bool(torch.allclose(own, fold(parts, Rounded("float32"), 1.0))), True, f"reduction {number}")
    return asked.wrong


@pytest.mark.parametrize("name", MAKERS)
def test_what_was_given_may_be_overwritten_when_a_wait_ends(name: str) -> None:
    assert run_ranks(reuse, 2, name, timeout_s=TIMEOUT_S) == [[]] * 2


def test_one_process_changes_nothing() -> None:
    comm = SoloComm(Mesh(0, 1, 0, torch.device("cpu")), Ledger())
    full = values(0, 64)
    codec, tag = Rounded("bfloat16"), Tag(0, 0, "")
    assert comm.gather(full, tag).wait() and comm.reduce(full, full, codec, 1.0, tag).wait()
    assert comm.reduce_copies(full, codec, 1.0, tag).wait()
    comm.broadcast(full, "", "start")
    assert torch.equal(full, values(0, 64))
    taken = torch.zeros(64)
    assert comm.route(full, taken, [[64]], tag, "update").wait() and torch.equal(taken, full)
    assert (comm.agree([3, -4], ""), comm.collect(full, "").shape, comm.texts("x", "")) == ([3, -4], (1, 64), ["x"])
    assert not comm.sent_bytes


def test_emulated_ranks_count_and_shape_as_real_ones() -> None:
    mesh = Mesh(0, 4, 0, torch.device("cpu"), (("shard", 4),))
    with fake_ranks(4):
        comm = NcclComm(Nobody(mesh), Ledger())  # type: ignore[arg-type]
        full, own = values(0, 256), torch.zeros(64)
        assert comm.gather(full, Tag(0, 0, "")).wait()
        assert comm.reduce(full, own, Rounded("bfloat16"), 1.0, Tag(0, 0, "")).wait()
        assert comm.agree([1, 2], "") == [1, 2]
        assert comm.collect(own, "").shape == (4, 64)
        assert comm.sent_bytes == {"gather": 3 * 256, "reduce": 3 * 128, "agree": 2 * 16 + 3 * 256}
    assert not dist.is_initialized()
