"""A run on one host is reached from no other: whatever its processes listen on is the loopback interface."""

import contextlib
import ipaddress
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import zeroshard as zs
from zeroshard.testing import run_ranks

from .job import loss_of, make

ROOT = Path(__file__).parents[2]
LISTENS = "0A"
TIMEOUT_S = 60.0


Listener = tuple[str, int]


def listening(process: int) -> set[Listener]:
    """Return the address and port of each socket at which a process accepts connections; none where it has ended."""
    own = set()
    for descriptor in Path(f"/proc/{process}/fd").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                own.add(match[1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in own:
                address, _, port = fields[1].partition(":")
                found.add((address_of(address), int(port, 16)))
    return found


def address_of(text: str) -> str:
    """Return an address as the kernel prints it, words of four bytes in the host's order, as people write it."""
    words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def tree(process: int) -> list[int]:
    """Return a process and all that it and its children started, as far as they live."""
    found = [process]
    for one in found:
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += [int(child) for child in children.read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def is_loopback(listener: Listener) -> bool:
    return ipaddress.ip_address(listener[0]).is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_what_listens_is_seen(host: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        listener.listen()
        assert listener.getsockname()[:2] in listening(os.getpid())


def train_and_listen(process_group: bool, caller: int) -> tuple[set[Listener], set[Listener]]:
    """Train a step; return what this rank and the process that started the ranks listen on. Runs on a rank."""
    if not process_group:
        zs.init()
    model, optimizer, zero = make(3)
    loss_of(model, 0, zero.mesh.rank).backward()
    optimizer.step()
    dist.barrier()
    found = listening(os.getpid()), listening(caller)
    dist.barrier()
    return found


@pytest.mark.parametrize("process_group", [True, False])
def test_ranks_listen_on_loopback_alone(process_group: bool) -> None:
    before = listening(os.getpid())  # of the tests that this process ran earlier
    for rank, caller in run_ranks(train_and_listen, 3, process_group, os.getpid(), process_group=process_group):
        assert rank, "gloo's connections need a listener"
        assert bool(caller - before) == (not process_group), "the store that torchrun's agent would host"
        assert all(map(is_loopback, rank | caller)), (rank, caller)


@pytest.mark.rotates
def test_a_launched_run_listens_on_loopback_alone(tmp_path: Path) -> None:
    command = [
        "train",
        "--ranks",
        "2",
        "--depth",
        "1",
        "model.context=32",
        "train.steps=1000",
        f"run.folder={tmp_path}",
    ]
    run = subprocess.Popen(
        [sys.executable, "-m", "zeroshard.cli", *command, "run.name=run"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    launcher: set[Listener] = set()
    ranks: set[Listener] = set()
    metrics, end_s = tmp_path / "run" / "metrics.jsonl", time.monotonic() + TIMEOUT_S
    try:
        # Throughout the start, and until ranks have met and trained.
        while not metrics.exists() or '"kind": "step"' not in metrics.read_text():
            assert run.poll() is None, run.stdout and run.stdout.read()
            assert time.monotonic() < end_s, "the run made no step"
            first, *others = tree(run.pid)
            launcher |= listening(first)
            ranks = ranks.union(*map(listening, others))
            time.sleep(0.05)
    finally:
        run.terminate()
        run.wait(TIMEOUT_S)
        assert run.stdout is not None
        run.stdout.close()
    assert launcher and ranks
    assert all(map(is_loopback, launcher | ranks)), (launcher, ranks)
