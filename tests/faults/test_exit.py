"""The end of a program that destroys nothing: the engine's process groups go, and one that is the user's own stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, os

@atexit.register  # first, and so last: what is left when everything else of the program has ended
def tell():
    import torch.distributed as dist
    print(dist.is_initialized(), flush=True)

import torch, zeroshard as zs
import torch.distributed as dist

torch.set_num_threads(1)
if os.environ["MADE_BY"] == "user":
    dist.init_process_group("gloo", init_method=os.environ["MEETING"], rank=int(os.environ["RANK"]), world_size=2)
else:
    zs.init()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
zs.shard(model, optimizer, settings=zs.Settings(watchdog_s=30.0, shared_memory=os.environ["SHARES"] == "1"))
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
"""
RUNS = 1
"""Of each maker. The transport changes from run to run, and the first ones of the two makers differ in it."""


@pytest.mark.product
@pytest.mark.parametrize("maker", ["user", "zeroshard"])
def test_a_process_group_of_the_users_own_outlives_the_engine(tmp_path: Path, maker: str) -> None:
    for number in range(int(os.environ.get("ZEROSHARD_EXITS", RUNS))):
        meeting = tmp_path / f"meeting-{number}"
        environment = os.environ | {
            "MADE_BY": maker, "MEETING": f"file://{meeting}", "SHARES": str((number + (maker == "user")) % 2),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                env=environment | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for rank in ranks:
            out, error = rank.communicate(timeout=60)
            assert rank.returncode == 0, f"run {number}: {error[-2000:]}"
            assert out == f"{maker == 'user'}\n", f"run {number}"


def _free_port() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
