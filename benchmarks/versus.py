"""Two checkouts of this library beside each other: time and memory of a step, and whether the bits are the same.

    git worktree add /tmp/before HEAD~1
    python -m benchmarks.versus /tmp/before --case gpt-30m --stages 0 1 3 --rounds 60 --output versus.json

Owns the comparison. Each checkout trains in processes of its own, started once; they take turns of a step while the
others wait for their pipe, so that what slows the machine down slows both: the quotient of each two turns is what
counts. Peaks of memory are compared with `MALLOC_MMAP_THRESHOLD_=131072` in the environment: without it they are what
the C library's allocator keeps, which differs by 5% between two runs of one checkout. Peers are compared by
`benchmarks/run.py`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any, Final, final

from benchmarks.machine import circumstances, write_result
from benchmarks.report import Ratio, ratio_of_medians, show

__all__ = ["main"]

ROOT: Final = Path(__file__).parents[1]
SIDES: Final = ("before", "now")
TIMES: Final = ("step_s", "cpu_s")
WARM_UP: Final = 6
"""Turns that are not counted: passes are agreed in the first steps."""


@final
class Side:
    """The ranks of one checkout, which train when they are told to."""

    def __init__(self, tree: Path, folder: Path, ranks: int, job: dict[str, Any]) -> None:
        folder.mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, str(Path(__file__)), "--job", json.dumps({**job, "store": str(folder / "store")})]
        self._ranks = [
            subprocess.Popen(
                [*command, "--rank", f"{rank}/{ranks}"],
                env=environment,
                cwd=tree,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def turn(self) -> dict[str, Any]:
        """Train a step; return the slowest rank's seconds, all ranks' CPU time, the largest memory, and all bits."""
        lines = self._tell("go")
        return {
            "step_s": max(line["step_s"] for line in lines),
            "cpu_s": sum(line["cpu_s"] for line in lines),
            "peak_bytes": max(line["peak_bytes"] for line in lines),
            "loss": [line["loss"] for line in lines],
        }

    def end(self) -> list[int]:
        """Return a checksum of the parameters by rank, and end the processes."""
        found = [line["parameters"] for line in self._tell("end")]
        for process in self._ranks:
            process.wait()
        return found

    def _tell(self, what: str) -> list[dict[str, Any]]:
        """Send a line to all ranks, and return what each answers."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(f"{what}\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in self._ranks if process.stdout is not None]


def compare(before: Path, job: dict[str, Any], ranks: int, rounds: int) -> dict[str, Any]:
    """Return the times of both sides by round, and whether losses and parameters are the same bits."""
    with tempfile.TemporaryDirectory(prefix="versus-") as folder:
        sides = {
            name: Side(tree, Path(folder, name), ranks, job)
            for name, tree in zip(SIDES, (before.resolve(), ROOT), strict=True)
        }
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
        for number in range(WARM_UP + rounds):
            for name in SIDES if number % 2 else reversed(SIDES):
                turns[name].append(sides[name].turn())
        ends = {name: side.end() for name, side in sides.items()}
    series = {field: {name: [turn[field] for turn in turns[name][WARM_UP:]] for name in SIDES} for field in TIMES}
    peaks = {name: max(turn["peak_bytes"] for turn in turns[name]) for name in SIDES}
    return {
        **job,
        **series,
        **{f"{field}, now to before": _quotient(**series[field]) for field in TIMES},
        "peak_bytes": peaks,
        "ratio_of_peaks": peaks["now"] / peaks["before"],
        "same_bits": ends["now"] == ends["before"]
        and all(a["loss"] == b["loss"] for a, b in zip(*turns.values(), strict=True)),
    }


def _quotient(before: list[float], now: list[float]) -> Ratio:
    """Return the median of the quotients of two turns, with its 95% interval by resampling."""
    return ratio_of_medians([b / a for a, b in zip(before, now, strict=True)], [1.0] * len(now))


def train(job: dict[str, Any], rank: int, ranks: int) -> None:
    """Be one rank: train a step for each line of standard input, and say what it took."""
    import torch
    import torch.distributed as dist

    import zeroshard as zs
    from benchmarks.cases import BATCHES, CASES, make_batch, make_model

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{job['store']}", rank=rank, world_size=ranks)
    case = CASES[job["case"]]
    model = make_model(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    options = {"units": list(model.blocks)} if job["units"] == "blocks" else {}
    transport = {"shared_memory": job["shared_memory"]}
    # The state before may be from before there were settings.
    options |= {"settings": zs.Settings(**transport)} if hasattr(zs, "Settings") else transport
    zero = zs.shard(model, optimizer, stage=job["stage"], **options)
    batches = [make_batch(case, 1, rank, step) for step in range(BATCHES)]
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of training
    for step, line in enumerate(sys.stdin):
        if line != "go\n":
            break
        dist.barrier()
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        loss = model(batches[step % BATCHES])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        peak = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
        found = {"step_s": step_s, "cpu_s": cpu_s, "peak_bytes": int(peak.split()[1]) * 1024}
        print(json.dumps(found | {"loss": float(loss.detach()).hex()}), flush=True)
    with zero.gathered():
        crc = 0
        for parameter in model.parameters():
            crc = zlib.crc32(parameter.detach().clone().numpy().tobytes(), crc)
    print(json.dumps({"parameters": crc}), flush=True)
    dist.barrier()
    os._exit(0)


def main() -> None:
    """Compare each stage over each transport; print a line for each."""
    parser = argparse.ArgumentParser(description="Compare a step of two checkouts.")
    parser.add_argument("before", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--case", default="gpt-30m")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--units", choices=("found", "blocks"), default="found", help="blocks: units=model.blocks")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job is not None:
        rank, ranks = map(int, arguments.rank.split("/"))
        train(arguments.job, rank, ranks)
    if arguments.before is None:
        parser.error("the other checkout is missing")
    results = []
    for stage in arguments.stages:
        for shares in (True, False):
            job = {"case": arguments.case, "stage": stage, "shared_memory": shares, "units": arguments.units}
            results.append(found := compare(arguments.before, job, arguments.ranks, arguments.rounds))
            print(
                f"{arguments.case}, stage {stage}, {'shared memory' if shares else 'messages'}: "
                f"time {show(found['step_s, now to before'])}, CPU {show(found['cpu_s, now to before'])}, "
                f"memory {found['ratio_of_peaks']:.3f}, {'same bits' if found['same_bits'] else 'OTHER BITS'}",
                flush=True,
            )
            if arguments.output:
                write_result(
                    arguments.output,
                    circumstances("benchmarks.versus")
                    | {"MALLOC_MMAP_THRESHOLD_": os.environ.get("MALLOC_MMAP_THRESHOLD_"), "results": results},
                )


if __name__ == "__main__":
    main()
