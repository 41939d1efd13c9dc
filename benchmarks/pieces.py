"""The time and the transient memory of a step by messages, by the bytes that one exchange may take.

    python -m benchmarks.pieces --ranks 2 4 --rounds 20

Owns the measurement that the default of `Settings(wire_bytes=)` is chosen by. All sizes are trained in the same
processes; in each round each makes one step, in an order drawn anew, so that what slows the machine down slows all. On
a machine with other work the minimum of a size is what counts, and the CPU time of all ranks tells more than the time
on the clock. All sizes must give the same losses, bit for bit.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import circumstances, write_result
from zeroshard.table.settings import WIRE_BYTES
from zeroshard.table.sizes import MIB

__all__ = ["main"]

SIZES = tuple(number * MIB for number in (1, 4, 16, 32, 64, 256))
WARM_UP = 4
"""Rounds that are not counted: passes are agreed in the first steps."""
RESULT = Path(__file__).parent / "results" / "pieces.json"


def train(case_name: str, stage: int, rounds: int, rank: int, ranks: int, store: str) -> list[dict[str, Any]]:
    """Be one rank; return for each size its seconds by round, its losses and its transient bytes."""
    import torch
    import torch.distributed as dist

    import zeroshard as zs
    from benchmarks.cases import BATCHES, CASES, make_batch, make_model

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    case = CASES[case_name]
    batches = [make_batch(case, 1, rank, step) for step in range(BATCHES)]
    contestants = []
    for nbytes in SIZES:
        model = make_model(case)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        settings = zs.Settings(shared_memory=False, wire_bytes=nbytes)
        contestants.append((model, optimizer, zs.shard(model, optimizer, stage=stage, settings=settings)))
    found: list[dict[str, Any]] = [{"wire_bytes": nbytes, "step_s": [], "cpu_s": [], "loss": []} for nbytes in SIZES]
    order, draw = list(range(len(SIZES))), random.Random(0)
    for step in range(WARM_UP + rounds):
        draw.shuffle(order)
        for index in order:
            model, optimizer, _ = contestants[index]
            dist.barrier()
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            loss = model(batches[step % BATCHES])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= WARM_UP:
                found[index]["step_s"].append(time.perf_counter() - begin_s)
                found[index]["cpu_s"].append(time.process_time() - begin_cpu_s)
            found[index]["loss"].append(float(loss.detach()).hex())
    for one, (_, _, zero) in zip(found, contestants, strict=True):
        one["transient_bytes"] = zero.memory().peak_bytes["transient"]
    dist.barrier()
    return found


def measure(case: str, stage: int, rounds: int, ranks: int) -> dict[str, Any]:
    """Start the ranks; return a row for each size, of the slowest rank in each round."""
    with tempfile.TemporaryDirectory(prefix="pieces-") as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-m", "benchmarks.pieces", "--case", case, "--stages", str(stage)]
        command += ["--rounds", str(rounds), "--store", str(Path(folder, "store"))]
        started = [
            subprocess.Popen([*command, "--rank", f"{rank}/{ranks}"], env=environment, stdout=subprocess.PIPE)
            for rank in range(ranks)
        ]
        outputs = [process.communicate()[0] for process in started]
    by_rank = [json.loads(output.splitlines()[-1]) for output in outputs]
    rows = []
    for index, nbytes in enumerate(SIZES):
        own = [found[index] for found in by_rank]
        times = [max(of_ranks) for of_ranks in zip(*(one["step_s"] for one in own), strict=True)]
        assert all(one["loss"] == found[0]["loss"] for one, found in zip(own, by_rank, strict=True)), "other bits"
        cpu = [sum(of_ranks) for of_ranks in zip(*(one["cpu_s"] for one in own), strict=True)]
        row = {"wire_bytes": nbytes, "transient_bytes": max(one["transient_bytes"] for one in own)}
        for name, values in (("step_s", times), ("cpu_s", cpu)):
            row |= {name: values, f"least_{name}": min(values), f"median_{name}": statistics.median(values)}
        rows.append(row)
    base = next(row for row in rows if row["wire_bytes"] == WIRE_BYTES)
    for row in rows:
        for name in ("least_step_s", "median_step_s", "least_cpu_s", "median_cpu_s"):
            row[f"{name}, to default"] = row[name] / base[name]
    return {"case": case, "ranks": ranks, "stage": stage, "sizes": rows}


def main() -> None:
    """Measure; print a table for each number of ranks and stage."""
    parser = argparse.ArgumentParser(description="Time a step by messages, by wire_bytes.")
    parser.add_argument("--case", default="gpt-30m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        rank, ranks = map(int, asked.rank.split("/"))
        print(json.dumps(train(asked.case, asked.stages[0], asked.rounds, rank, ranks, asked.store)), flush=True)
        os._exit(0)
    results = []
    for ranks in asked.ranks:
        for stage in asked.stages:
            results.append(found := measure(asked.case, stage, asked.rounds, ranks))
            print(f"{asked.case}, {ranks} ranks, stage {stage}")
            for row in found["sizes"]:
                quotients = [f"{name} {value:.3f}" for name, value in row.items() if name.endswith("default")]
                nbytes = f"transient {row['transient_bytes'] / MIB:.1f} MiB"
                print(f"  {row['wire_bytes'] // MIB:4} MiB: {'; '.join([*quotients, nbytes])}", flush=True)
            write_result(asked.output, circumstances("benchmarks.pieces") | {"results": results})


if __name__ == "__main__":
    main()
