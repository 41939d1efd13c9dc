"""The peak of a step with each treatment of activations, predicted and measured, and the time of the step.

    python -m benchmarks.activations --depth 24 --context 1024 --rounds 3

Owns the comparison; `benchmarks/peaks.py` measures, `zeroshard/plan/trace/tracer.py` predicts. One rank, stage 0, on
the CPU in fp32. The prediction runs the model, with the same treatments and without an engine, on tensors that have no
memory. Each treatment has a process of its own; times are of steps without the profiler, treatments in turn.
"""

import argparse
import json
import operator
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard as zs
from benchmarks.machine import circumstances, write_result
from benchmarks.peaks import measure_peak, peak_of
from zeroshard.activations import recompute_units, treatment_of
from zeroshard.core.saved import SavedTensors
from zeroshard.describe.treatments import activations_of
from zeroshard.describe.units import plan_units
from zeroshard.plan.trace.tracer import trace_step
from zeroshard.plan.trace.treated import Unwatched
from zeroshard.setup.takeover import axis_of
from zeroshard.table.schedule import ROOT
from zeroshard.table.sizes import MIB
from zeroshard.table.trace import Ledger
from zeroshard.train.models.gpt import GPT, Block, GPTConfig
from zeroshard.wire.comm import SoloComm
from zeroshard.wire.mesh import current_mesh

TREATMENTS = ("keep", "recompute", "recompute-sqrt", "recompute-rest", "compress", "recompute+compress-bf16", "offload")
PREDICTED = ("keep", "recompute", "recompute-sqrt", "recompute-rest")
STEPS = 2
RESULT = Path(__file__).parent / "results" / "activations.json"


def treat(model: nn.Module, how: str) -> None:
    """Treat the activations of a model that is not sharded."""
    cell, plans = activations_of(how), plan_units(model, [Block])
    treatment = treatment_of(cell, plans, axis_of(SoloComm(current_mesh(), Ledger())), Ledger())
    if treatment is None:
        return
    under_way = [ROOT]
    saved = SavedTensors([], lambda unit: None, treatment, lambda: under_way[-1])

    def enter(number: int) -> Any:
        return lambda *_: under_way.append(number)

    def leave(number: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            under_way.pop()
            saved.treat(number, output)

        return hook

    for number, plan in enumerate(plans):
        if number != ROOT:
            plan.module.register_forward_pre_hook(enter(number))
            plan.module.register_forward_hook(leave(number))
    hooks = {plan.module: (Unwatched(plan.name), Unwatched()) for plan in plans}
    recompute_units(cell, plans, hooks, saved, Ledger(), lambda *_: None, operator.setitem)
    plain = model.forward

    def forward(*args: Any) -> Any:
        with saved.context():
            output = plain(*args)
            saved.treat(ROOT, output)
        return output

    model.forward = forward


def make(config: GPTConfig, batch: int) -> tuple[GPT, list[Tensor]]:
    """Return a model and a batch."""
    torch.manual_seed(0)
    size = (batch, config.context)
    return GPT(config), [torch.randint(config.vocabulary, size) for _ in range(2)]


def predict(config: GPTConfig, batch: int, how: str) -> int:
    """Return the predicted peak of two steps."""
    with torch.device("meta"):
        model, inputs = make(config, batch)
    treat(model, how)
    trace = trace_step(lambda model, *inputs: model(*inputs), model, inputs, optimizer=torch.optim.AdamW, steps=STEPS)
    return peak_of(trace).nbytes


def train(config: GPTConfig, batch: int, how: str, steps: int) -> tuple[list[float], zs.Memory, list[Any]]:
    """Train; return the seconds of each step, what was held at most, and what keeps everything alive."""
    model, inputs = make(config, batch)
    optimizer = torch.optim.AdamW(model.parameters())
    zero = zs.shard(model, optimizer, stage=0, units=[Block], activations=how)
    times = []
    for _ in range(steps):
        start_s = time.perf_counter()
        model(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start_s)
    return times, zero.memory(), [zero, model, optimizer]


def work(config: GPTConfig, batch: int, how: str, what: str) -> None:
    """Print, as JSON, what one process is to find out."""
    torch.set_num_threads(1)
    found: Any = None
    if what == "peak":
        found = measure_peak(lambda: train(config, batch, how, STEPS)).peak_bytes
    elif what == "predicted":
        found = predict(config, batch, how) if how in PREDICTED else None
    else:
        times, memory, _ = train(config, batch, how, 1 + STEPS)
        found = [min(times[1:]), memory.peak_bytes.get("activations", 0)]
    print(json.dumps(found))


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser()
    for name, default in (("depth", 24), ("context", 1024), ("batch", 1), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--treatments", nargs="*", default=TREATMENTS)
    parser.add_argument("--work", nargs=2)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    config = GPTConfig(asked.depth, asked.context)
    if asked.work:
        work(config, asked.batch, *asked.work)
        return

    def ask(how: str, what: str) -> Any:
        sizes = [f"--{name}={getattr(asked, name)}" for name in ("depth", "context", "batch")]
        command = [sys.executable, "-m", "benchmarks.activations", *sizes, "--work", how, what]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    rows: dict[str, dict[str, Any]] = {}
    for how in asked.treatments:
        rows[how] = {"predicted_bytes": ask(how, "predicted"), "peak_bytes": ask(how, "peak"), "seconds": []}
    for _ in range(asked.rounds):
        for how in asked.treatments:
            seconds, kept_bytes = ask(how, "time")
            rows[how]["seconds"].append(round(seconds, 3))
            rows[how]["kept_bytes"] = kept_bytes
    first = statistics.median(rows[asked.treatments[0]]["seconds"])
    for how, row in rows.items():
        predicted, peak = row["predicted_bytes"], row["peak_bytes"]
        error = "" if predicted is None else f" predicted {predicted / MIB:8.1f} ({predicted / peak - 1:+.2%})"
        times = f"{statistics.median(row['seconds']):6.2f} s, {statistics.median(row['seconds']) / first:.3f}"
        print(f"{how:24} peak {peak / MIB:8.1f} MiB{error:30} saved {row['kept_bytes'] / MIB:8.1f} MiB  {times}")
    if asked.output:
        sizes = {name: getattr(asked, name) for name in ("depth", "context", "batch")}
        write_result(asked.output, {**circumstances("benchmarks.activations"), "sizes": sizes, "rows": rows})


if __name__ == "__main__":
    main()
