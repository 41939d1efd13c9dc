"""The idle time of pipelines beside the papers' formulas, and beside torch's schedules in the same launch.

    python -m benchmarks.pipelines --rounds 8 --output benchmarks/results/pipelines.json

Four places, one process each. A module of each place sleeps 100 ms in a forward and 200 ms in a backward, so cores do
not matter; with `chunks` at a place, each sleeps its part. The idle part of a step is 1 - (what a place computes, the
mean of all) / (the time of the step). Schedules, numbers of micro-batches, and zeroshard and torch take turns; of the
rounds the least time counts.

With "recompute" chunks run again while the gradient is on its way (`recompute=True`); with "inside" the second forward
is a part of the backward, as where blocks are recomputed.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroshard as zs
from benchmarks.machine import circumstances, write_result
from benchmarks.report import aligned
from zeroshard.table.pipeline import Kind, play, schedule_of
from zeroshard.testing import run_ranks

__all__ = ["main"]

PLACES: Final = 4
FORWARD_S: Final = 0.1
BACKWARD_S: Final = 0.2
WIDTH: Final = 16
ROWS: Final = 2
SCHEDULES: Final = {"naive": 1, "gpipe": 1, "1f1b": 1, "interleaved": 2}
"""The chunks at each place, by schedule."""
RECOMPUTED: Final = ("gpipe", "1f1b")
"""The schedules that also run with recomputation, with the largest number of micro-batches."""
TORCH: Final = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}


class Sleep(torch.autograd.Function):
    """Changes nothing, and takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int, back_s: float) -> Tensor:
        ctx.back_s = back_s / parts
        time.sleep(FORWARD_S / parts)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.back_s)
        return grad, None, None


class Slow(nn.Module):
    """A layer that sleeps."""

    def __init__(self, parts: int, back_s: float = BACKWARD_S) -> None:
        super().__init__()
        self.layer, self.parts, self.back_s = nn.Linear(WIDTH, WIDTH), parts, back_s

    def forward(self, x: Tensor) -> Tensor:
        """Pass (rows, width) through."""
        # The layer first: the backward of a module whose input needs no gradient would not sleep.
        found: Tensor = Sleep.apply(self.layer(x), self.parts, self.back_s)  # type: ignore[no-untyped-call]
        return found


Step = Callable[[], object]


def _ours(schedule: str, micro: int, mesh: DeviceMesh, again: str = "") -> Step:
    chunks = SCHEDULES[schedule]
    torch.manual_seed(0)
    back_s = BACKWARD_S + FORWARD_S * (again == "inside")
    model = nn.Sequential(*(Slow(chunks, back_s) for _ in range(PLACES * chunks)))
    cut = [str(number) for number in range(1, PLACES * chunks)]
    options = {"schedule": schedule, "micro_batches": micro, "cut": cut, "stage": 0, "loss": F.mse_loss}
    pipe = zs.pipeline(model, mesh=mesh, chunks=chunks, recompute=again == "recompute", **options)
    batch = torch.ones(ROWS * micro, WIDTH)

    def step() -> None:
        pipe.step(batch, batch)
        model.zero_grad()

    return step


def _torchs(schedule: str, micro: int, mesh: DeviceMesh) -> Step:
    from torch.distributed import pipelining

    chunks, place, device = SCHEDULES[schedule], mesh.get_local_rank("pipe"), torch.device("cpu")
    parts = nn.ModuleList(Slow(chunks) for _ in range(chunks))
    group, example = mesh["pipe"].get_group(), torch.zeros(ROWS, WIDTH, requires_grad=True)
    stages = [
        pipelining.PipelineStage(
            part,
            place + PLACES * number,
            PLACES * chunks,
            device,
            group=group,
            input_args=example,
            output_args=example,
        )
        for number, part in enumerate(parts)
    ]
    make = getattr(pipelining, TORCH[schedule])
    runs = make(stages if chunks > 1 else stages[0], n_microbatches=micro, loss_fn=F.mse_loss)
    batch = torch.ones(ROWS * micro, WIDTH)

    def step() -> None:
        if place == 0:
            runs.step(batch)
        elif place == PLACES - 1:
            runs.step(target=batch)
        else:
            runs.step()
        parts.zero_grad()

    return step


def measure(rounds: int, sizes: list[int]) -> dict[str, list[float]]:
    """Return the seconds of each contestant's steps, by round."""
    mesh = init_device_mesh("cpu", (PLACES, 1), mesh_dim_names=("pipe", "shard"))
    steps: dict[str, Step] = {}
    for micro in sizes:
        for schedule in SCHEDULES:
            steps[f"zeroshard {schedule} {micro}"] = _ours(schedule, micro, mesh)
            if schedule in TORCH:
                steps[f"torch {schedule} {micro}"] = _torchs(schedule, micro, mesh)
    for schedule in RECOMPUTED:
        for again in ("recompute", "inside"):
            steps[f"zeroshard {schedule} {again} {max(sizes)}"] = _ours(schedule, max(sizes), mesh, again)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            begin_s = time.perf_counter()
            step()
            dist.barrier()
            if number:  # in the first one shapes are learned
                found[name].append(time.perf_counter() - begin_s)
    return found


def table_of(schedule: str, micro: int, again: str = "") -> tuple[float, float]:
    """Return the seconds of a step by the table, and those for which a place computes, the mean of all."""
    chunks = SCHEDULES[schedule]
    recomputed = range(PLACES * chunks) if again == "recompute" else ()
    table = schedule_of(schedule, PLACES, micro, chunks, recomputed=recomputed)
    back_s = BACKWARD_S + FORWARD_S * (again == "inside")
    each = {Kind.FORWARD: FORWARD_S, Kind.BACKWARD: back_s, Kind.RECOMPUTE: FORWARD_S}
    seconds = {kind: [one_s / chunks] * table.all_chunks for kind, one_s in each.items()}
    spans = play(table, seconds)
    computed = sum(stop_s - start_s for place in spans for action, start_s, stop_s in place if action.kind in each)
    return max(place[-1][-1] for place in spans), computed / PLACES


def idle_of(seconds: float, computed_s: float) -> float:
    """Return the part of a step in which a place waits."""
    return 1 - computed_s / seconds


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print and write idle times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    found = run_ranks(measure, PLACES, given.rounds, given.micro_batches, timeout_s=300 + 200 * given.rounds)[0]
    rows, table = [["schedule", "micro-batches", "formula", "zeroshard", "torch"]], []
    cases = [(schedule, "", micro) for micro in given.micro_batches for schedule in SCHEDULES]
    cases += [
        (schedule, again, max(given.micro_batches)) for schedule in RECOMPUTED for again in ("recompute", "inside")
    ]
    for schedule, again, micro in cases:
        name = f"{schedule} {again}".strip()
        step_s, computed_s = table_of(schedule, micro, again)
        formula = round(idle_of(step_s, computed_s), 4)
        seconds = {who: found.get(f"{who} {name} {micro}") for who in ("zeroshard", "torch")}
        idle = {who: round(idle_of(min(some), computed_s), 4) for who, some in seconds.items() if some}
        table.append({"schedule": name, "micro_batches": micro, "formula": formula, **idle})
        shown = (f"{idle[who]:.1%}" if who in idle else "-" for who in seconds)
        rows.append([name, str(micro), f"{formula:.1%}", *shown])
    print("\n".join(aligned([" | ".join(row) for row in rows])))
    if given.output is not None:
        write_result(given.output, {**circumstances("benchmarks.pipelines"), "idle": table, "seconds": found})


if __name__ == "__main__":
    main()
