"""Votes between hosts at any number of ranks: the transport's own code on threads, over a network with a clock.

A message takes a fixed time. Each rank has a clock, which a message that it waits for sets forward; nothing sleeps.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from zeroshard.table.trace import Ledger
from zeroshard.table.wires import Messages
from zeroshard.wire import linked
from zeroshard.wire.comm import Channel, Vote
from zeroshard.wire.links import CONTROL
from zeroshard.wire.mesh import Mesh

MESSAGE_S = 50e-6
"""About what a small message takes between two hosts."""


@dataclass
class Network:
    """The messages of all ranks, by sender, receiver and tag."""

    sent: dict[tuple[int, int, int], tuple[list[int], float]] = field(default_factory=dict)
    has_changed: threading.Condition = field(default_factory=threading.Condition)
    counts: dict[int, int] = field(default_factory=dict)


@dataclass
class Rank:
    """One rank's process group and links, as far as votes use them."""

    network: Network
    number: int
    now_s: float = 0.0
    watchdog: Any = None
    before_wait: Any = None

    def __post_init__(self) -> None:
        self.groups = {CONTROL: self}
        self.mesh: Any = None

    def start(self, start: Callable[[], Any], what: str) -> Any:
        return start()

    def send(self, told: torch.Tensor, tag: int, to: int) -> Any:
        with self.network.has_changed:
            key = (self.number, to, tag)
            assert key not in self.network.sent, "two messages look alike"
            self.network.sent[key] = told.tolist(), self.now_s + MESSAGE_S
            self.network.counts[self.number] = self.network.counts.get(self.number, 0) + 1
            self.network.has_changed.notify_all()
        return None

    def receive(self, heard: torch.Tensor, tag: int, of: int) -> Any:
        return heard, (of, self.number, tag)

    def wait(self, works: list[Any], what: str) -> None:
        for heard, key in filter(None, works):
            with self.network.has_changed:
                assert self.network.has_changed.wait_for(lambda key=key: key in self.network.sent, timeout=60)
                values, arrives_s = self.network.sent.pop(key)
            heard.copy_(torch.tensor(values))
            self.now_s = max(self.now_s, arrives_s)


def make(size: int) -> tuple[Network, list[Rank], list[linked.LinkedComm]]:
    network = Network()
    ranks = [Rank(network, number) for number in range(size)]
    comms = []
    for rank in ranks:
        rank.mesh = Mesh(rank.number, size, 0, torch.device("cpu"), (("shard", size),))
        # Only votes are asked for: what else a transport must have is left out.
        kind: Any = type("Votes", (linked.LinkedComm,), {})
        kind.__abstractmethods__ = frozenset()
        comms.append(kind(rank, Ledger(), CONTROL, Messages()))
    return network, ranks, comms


def vote(size: int, of: Callable[[linked.LinkedComm, int], list[list[int]]]) -> tuple[list[Any], Network, list[Rank]]:
    """Have each rank vote in a thread of its own; return what each found."""
    network, ranks, comms = make(size)
    found: list[Any] = [None] * size

    def work(rank: int) -> None:
        found[rank] = of(comms[rank], rank)

    with mock.patch.multiple(
        dist,
        isend=lambda told, group, tag, group_dst: group.send(told, tag, group_dst),
        irecv=lambda heard, group, tag, group_src: group.receive(heard, tag, group_src),
    ):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found, network, ranks


def three(comm: linked.LinkedComm, rank: int) -> list[list[int]]:
    """Post two votes of one channel and one of another, then read them."""
    posted: list[Vote] = [
        comm.post([rank, -rank, 7], "a first", Channel.PLACES),
        comm.post([100 - rank, rank], "a second", Channel.PLACES),
        comm.post([rank * rank], "another", Channel.ROUNDS),
    ]
    return [posted[2].read(), posted[0].read(), posted[1].read()]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 13, 16, 17, 33])
def test_each_rank_learns_the_least_of_all(size: int) -> None:
    found, network, _ = vote(size, three)
    last = size - 1
    assert found == [[[0], [0, -last, 7], [100 - last, 0]]] * size
    assert not network.sent


def test_a_round_of_a_thousand_ranks_takes_ten_messages() -> None:
    found, network, ranks = vote(1000, lambda comm, rank: [comm.post([rank], "a round", Channel.ROUNDS).read()])
    assert found == [[[0]]] * 1000
    assert set(network.counts.values()) == {10}
    # A ring would take 2 * 999 messages one after the other.
    assert max(rank.now_s for rank in ranks) == pytest.approx(10 * MESSAGE_S)
