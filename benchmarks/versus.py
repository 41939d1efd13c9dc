"""Two checkouts of this library beside each other: time and memory of a step, and whether the bits are the same.

    git worktree add /tmp/before HEAD~1
    python -m benchmarks.versus /tmp/before --case gpt-30m --stages 0 1 3 --rounds 15 --output versus.json

Owns the comparison. Each checkout trains in processes of its own, started once; they take turns of some steps while the
others wait for their pipe, so that what slows the machine down slows both. Peers are compared by `benchmarks/run.py`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any, Final, final

from benchmarks.machine import circumstances, write_result

__all__ = ["main"]

ROOT: Final = Path(__file__).parents[1]
SIDES: Final = ("before", "now")
STEPS: Final = 3
"""Steps of a turn."""
WARM_UP: Final = 2
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
        """Train some steps; return the slowest rank's seconds, the largest memory, and all ranks' bits."""
        lines = self._tell("go")
        return {
            "step_s": max(line["step_s"] for line in lines),
            "peak_bytes": max(line["peak_bytes"] for line in lines),
            "losses": [line["losses"] for line in lines],
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
    times = {name: [turn["step_s"] for turn in turns[name][WARM_UP:]] for name in SIDES}
    peaks = {name: max(turn["peak_bytes"] for turn in turns[name]) for name in SIDES}
    return {
        **job,
        "step_s": times,
        "ratio_of_medians": statistics.median(times["now"]) / statistics.median(times["before"]),
        "ratio_of_minima": min(times["now"]) / min(times["before"]),
        "peak_bytes": peaks,
        "ratio_of_peaks": peaks["now"] / peaks["before"],
        "same_bits": ends["now"] == ends["before"]
        and all(a["losses"] == b["losses"] for a, b in zip(*turns.values(), strict=True)),
    }


def train(job: dict[str, Any], rank: int, ranks: int) -> None:
    """Be one rank: train a turn for each line of standard input, and say what it took."""
    import torch
    import torch.distributed as dist

    import zeroshard as zs
    from benchmarks.cases import CASES, make_batch, make_model

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{job['store']}", rank=rank, world_size=ranks)
    case = CASES[job["case"]]
    model = make_model(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    options = {"units": list(model.blocks)} if job["units"] == "blocks" else {}
    zero = zs.shard(model, optimizer, stage=job["stage"], shared_memory=job["shared_memory"], **options)
    batches = [make_batch(case, 1, rank, step) for step in range(STEPS)]
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of training
    for line in sys.stdin:
        if line != "go\n":
            break
        dist.barrier()
        begin_s, losses = time.perf_counter(), []
        for batch in batches:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        step_s = (time.perf_counter() - begin_s) / STEPS
        peak = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
        bits = [float(loss).hex() for loss in losses]
        print(json.dumps({"step_s": step_s, "peak_bytes": int(peak.split()[1]) * 1024, "losses": bits}), flush=True)
    with zero.gathered():
        crc = 0
        for parameter in model.parameters():
            crc = zlib.crc32(parameter.detach().numpy().tobytes(), crc)
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
    parser.add_argument("--rounds", type=int, default=15)
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
                f"time {found['ratio_of_medians']:.3f} (minima {found['ratio_of_minima']:.3f}), "
                f"memory {found['ratio_of_peaks']:.3f}, {'same bits' if found['same_bits'] else 'OTHER BITS'}",
                flush=True,
            )
            if arguments.output:
                write_result(arguments.output, circumstances("benchmarks.versus") | {"results": results})


if __name__ == "__main__":
    main()
