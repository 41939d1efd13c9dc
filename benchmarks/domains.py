"""What a stopped model costs another one in the same launch: steps of two ranks beside idle and beside stopped ranks.

    python -m benchmarks.domains --rounds 8

Four processes; two train a model of their own (`zs.shard(mesh=)`), and so do the other two, which idle, or are stopped
(SIGSTOP) for five seconds. Rounds alternate. The result is the time of 50 steps beside stopped ranks over that beside
idle ones: the median of the rounds' ratios, and their extremes.
"""

import argparse
import os
import statistics
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from benchmarks.machine import circumstances, write_result
from zeroshard.testing import run_ranks

__all__ = ["main"]

STEPS = 50
STOPPED_S = 5.0
STOP = f"kill -STOP $0; sleep {STOPPED_S}; kill -CONT $0"
KINDS = ("idle", "stopped")


def compare(rounds: int, width: int, depth: int) -> list[dict[str, float]]:
    """Return, on the ranks that train, the seconds of 50 steps by round and kind."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))
    is_other = mesh.get_local_rank("model") == 0
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    zs.shard(model, optimizer, mesh=mesh["shard"])
    batch, found = torch.randn(16, width), list[dict[str, float]]()

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    for number in range(rounds):
        took = {}
        for kind in KINDS if number % 2 else KINDS[::-1]:
            dist.barrier()
            if is_other:
                if kind == "stopped":
                    subprocess.Popen(["sh", "-c", STOP, str(os.getpid())]).wait()
                continue
            time.sleep(0.2)  # until the others are stopped
            begin_s = time.perf_counter()
            for _ in range(STEPS):
                step()
            took[kind] = time.perf_counter() - begin_s
        found.append(took)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Compare, and print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    found = run_ranks(compare, 4, given.rounds, given.width, given.depth, timeout_s=300 + 60 * given.rounds)[2]
    ratios = [one["stopped"] / one["idle"] for one in found]
    result = {"seconds": found, "median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    idle_s = statistics.median(one["idle"] for one in found)
    print(
        f"{STEPS} steps: {idle_s:.2f} s beside idle ranks; beside ranks that are stopped for {STOPPED_S:g} s, times "
        f"{result['median']:.3f} ({result['least']:.3f} to {result['most']:.3f} in {given.rounds} rounds)"
    )
    if given.output is not None:
        write_result(given.output, {**circumstances("benchmarks.domains"), **result})


if __name__ == "__main__":
    main()
