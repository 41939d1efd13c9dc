"""The last step of a program, after which nothing reads whether it was skipped on a device: its exit does."""

import os
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from unittest import mock
import torch, zeroshard as zs
from zeroshard.wire.comm import Comm

torch.set_num_threads(1)
zs.init()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
with mock.patch.object(Comm, "is_on_host", os.environ["MEMORY"] == "host"):
    zero = zs.shard(model, optimizer, stage=2, precision=os.environ["PRECISION"], settings=zs.Settings(watchdog_s=30.0))
is_bad = os.environ["ENDS"] != "well" and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
model[1].bias.register_hook(lambda grad: grad * float("inf") if is_bad else None)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print("stepped", flush=True)
if os.environ["ENDS"] == "deleted":
    del model, optimizer, zero
if os.environ["ENDS"] == "forked" and os.fork() == 0:
    sys.exit(0)  # a child has no part in it
if os.environ["ENDS"] == "destroyed":
    torch.distributed.destroy_process_group()
if os.environ["ENDS"] == "read":
    try:
        optimizer.zero_grad()  # waits for no device
        model(torch.ones(2, 4)).sum().backward()
    except RuntimeError:
        print("caught", flush=True)
"""


def run(world: int, memory: str, ends: str, precision: str = "fp32") -> list[tuple[int, str, str]]:
    """Run the program; return of each rank its status, what it printed, and its errors."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = os.environ | {
        "MEMORY": memory, "ENDS": ends, "PRECISION": precision, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment | {"RANK": str(rank)}, **pipes)
        for rank in range(world)
    ]
    ended = [(*rank.communicate(timeout=120), rank.returncode) for rank in ranks]
    return [(status, out, error) for out, error, status in ended]


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("ends", ["badly", "deleted", "destroyed"])
def test_a_program_ends_with_the_error_of_its_last_step(ends: str, world: int) -> None:
    for rank, (status, out, error) in enumerate(run(world, "device", ends)):
        assert (status, out) == (1, "stepped\n"), error
        text = f"RuntimeError: [rank {rank}/{world}] The gradient of '1.bias' is not finite; nothing was changed"
        assert error.count(text) == 1


@pytest.mark.rotates
def test_a_child_of_a_program_does_not_tell_its_error() -> None:
    ((status, _, error),) = run(1, "device", "forked")
    assert status == 1
    assert error.count("not finite") == 1


@pytest.mark.rotates
def test_an_error_that_was_caught_is_not_told_again() -> None:
    ((status, out, error),) = run(1, "device", "read")
    assert (status, out) == (0, "stepped\ncaught\n"), error


@pytest.mark.product
@pytest.mark.parametrize(("memory", "ends", "precision"), [("device", "well", "fp32"), ("device", "badly", "fp16")])
def test_a_program_whose_last_step_is_none_of_an_error_ends_well(memory: str, ends: str, precision: str) -> None:
    ((status, out, error),) = run(1, memory, ends, precision)
    assert (status, out) == (0, "stepped\n"), error


@pytest.mark.rotates
def test_on_the_host_the_step_itself_raises() -> None:
    ((status, out, error),) = run(1, "host", "badly")
    assert (status, out) == (1, "")
    assert "The gradient of '1.bias' is not finite; nothing was changed" in error
