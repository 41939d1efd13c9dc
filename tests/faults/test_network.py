"""Two hosts and a network between them that breaks: each side names the other within its heartbeat.

A host is a network namespace; making one needs root, and `ip`.
"""

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from zeroshard.testing import RankFailure, run_ranks

from .job import loss_of, make

HEARTBEAT_S = 2.0
ADDRESSES = ("10.77.0.1", "10.77.0.2")
HOST_OF_RANK = (0, 0, 1)
WORLD = len(HOST_OF_RANK)
LINK = "zs0"
PORT = "29500"
CLONE_NEWNET = 0x40000000


def ip(*words: str) -> None:
    """Run the tool, or skip the test with what it says."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Make two namespaces with a cable between them; yield their names."""
    if shutil.which("ip") is None:
        pytest.skip("no network namespaces here: there is no `ip`")
    names = [f"zeroshard-{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", LINK, "netns", names[0], "type", "veth", "peer", "name", LINK, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", LINK)
            ip("-n", name, "link", "set", LINK, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def join(hosts: list[str]) -> int:
    """Move this process to its host, and join the process group there; return the rank."""
    rank = int(os.environ["RANK"])
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/var/run/netns/{hosts[HOST_OF_RANK[rank]]}", os.O_RDONLY)
    assert libc.setns(namespace, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    # Rank 0 holds the store itself, as there is no launcher on its host.
    os.environ.update(MASTER_ADDR=ADDRESSES[0], MASTER_PORT=PORT, GLOO_SOCKET_IFNAME=LINK)
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    dist.init_process_group("gloo")
    return rank


def cut(fault: str, rank: int) -> None:
    """Break the network, on the rank that can."""
    commands = {
        ("the link goes down", 2): ["ip", "link", "set", LINK, "down"],
        ("nothing reaches the second host", 0): ["ip", "route", "add", "blackhole", ADDRESSES[1]],
        ("nothing reaches the first host", 2): ["ip", "route", "add", "blackhole", ADDRESSES[0]],
    }
    if (fault, rank) in commands:
        subprocess.run(commands[fault, rank], check=True)


def train_apart(folder: str, hosts: list[str], fault: str) -> int:
    """Train over two hosts, whose network breaks in the third step; return this rank's host. Runs on a rank."""
    rank = join(hosts)
    os.dup2(os.open(f"{folder}/{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    # These hosts are one in truth, where ranks would need no network.
    model, optimizer, _ = make(3, watchdog_s=40.0, heartbeat_s=HEARTBEAT_S, shared_memory=False)
    for step in range(6):
        loss = loss_of(model, step, rank)
        if step == 3:
            Path(folder, f"broken-{rank}").write_text(repr(time.time()))
            cut(fault, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    return HOST_OF_RANK[rank]


@pytest.mark.rotates
def test_two_hosts_train(tmp_path: Path, hosts: list[str]) -> None:
    done = run_ranks(train_apart, WORLD, str(tmp_path), hosts, "nothing", process_group=False, timeout_s=40.0)
    assert done == list(HOST_OF_RANK)


@pytest.mark.product
@pytest.mark.parametrize(
    "fault", ["the link goes down", "nothing reaches the second host", "nothing reaches the first host"]
)
def test_a_broken_network_is_named_within_the_heartbeat(tmp_path: Path, hosts: list[str], fault: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(train_apart, WORLD, str(tmp_path), hosts, fault, process_group=False, timeout_s=40.0)
    began = max(float((tmp_path / f"broken-{rank}").read_text()) for rank in range(WORLD))
    causes = {
        0: f"rank 2: no sign of life for {HEARTBEAT_S:g} s",
        1: f"rank 2: no sign of life for {HEARTBEAT_S:g} s",
        2: f"the store of the process group, at rank 0's host or its launcher's, has not answered for {HEARTBEAT_S:g}",
    }
    for rank, cause in causes.items():
        # Where the end of rank 2 can be seen, the wait for it fails, which is an error as any other.
        assert failure.value.errors[rank].type_name in ("ProcessExit", "RankMismatchError")
        said = tmp_path / f"{rank}.err"
        assert cause in said.read_text()
        assert said.stat().st_mtime - began <= HEARTBEAT_S + 1.0
