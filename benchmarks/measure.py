"""One rank of a measurement: it builds the contestants of a job, runs them, and writes down what the kernel counted.

Owns clocks, counters and the order of steps. It must not know what a contestant is made of, nor how results are shown.
Started by `run.py`, once for each rank: `python -m benchmarks.measure FOLDER`. Read `measure_time` first.

Note: interleaved
    All contestants of a job live in the same processes, and in each round each of them makes one step, in an order
    drawn anew for each round. So a machine that slows down slows all of them, and ratios hold. They share one heap:
    what one frees may serve another, which is why memory is measured in launches of their own. And what one leaves to
    its next step would be done in the others' time: a contestant must finish in `step` what it began there.
Note: bytes on the wire
    The kernel's own count for each TCP socket of this process (`tcpi_bytes_sent`, less what was sent again): payload
    without headers, and unlike the counters of the loopback interface, free of what other processes send.
"""

import gc
import importlib
import json
import os
import random
import socket
import struct
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed as dist

from benchmarks.cases import CASES, Case, make_batch, make_model
from benchmarks.peers import CONTESTANTS, Running

__all__ = ["Job", "Series", "measure_memory", "measure_time", "sent_bytes"]

_SENT_AND_RESENT: Final = struct.Struct("<200xQQ")
"""Where `tcpi_bytes_sent` and `tcpi_bytes_retrans` lie in the kernel's `struct tcp_info` (linux/tcp.h, since 4.19)."""

_PATIENCE: Final = timedelta(minutes=10)


@final
@dataclass(frozen=True)
class Job:
    """What one launch measures.

    Args:
        kind: "time" (all contestants interleaved) or "memory" (one contestant).
        case: a name of `CASES`.
        samples: of a micro-batch.
        contestants: names of `CONTESTANTS`.
        warmup: rounds that are not recorded.
        rounds: recorded rounds, a step of each contestant in each.
    """

    kind: str
    case: str
    samples: int
    contestants: tuple[str, ...]
    warmup: int
    rounds: int


@final
@dataclass
class Series:
    """What one contestant did on one rank, a number for each recorded round, and what it had predicted."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    wire_bytes: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    predicted: dict[str, int] = field(default_factory=dict)


def measure_time(job: Job) -> dict[str, Any]:
    """Return each contestant's `Series`, by name. Collective: every rank must call."""
    case, rank = CASES[job.case], dist.get_rank()
    running = {name: CONTESTANTS[name].build(make_model(case), job.samples) for name in job.contestants}
    series = {name: Series() for name in job.contestants}
    for number in range(job.warmup + job.rounds):
        if number == job.warmup:
            # What lives by now lives to the end: Python's collector need not look at it in anybody's step.
            gc.collect()
            gc.freeze()
        for name in _order(job.contestants, number):
            batch = make_batch(case, job.samples, rank, number)
            recorded = series[name] if number >= job.warmup else Series()
            _measure_step(running[name], batch, recorded)
    for name, one in running.items():
        series[name].predicted = _predictions(one)
    return {name: asdict(one) for name, one in series.items()}


def _order(names: Sequence[str], number: int) -> list[str]:
    """Return the names in the order of this round, the same on every rank."""
    return random.Random(number).sample(list(names), len(names))


def _measure_step(running: Running, batch: torch.Tensor, series: Series) -> None:
    before_bytes = sent_bytes()
    dist.barrier()
    before_cpu_s, before_s = time.process_time(), time.perf_counter()
    loss = running.step(batch)
    series.wall_s.append(round(time.perf_counter() - before_s, 6))
    series.cpu_s.append(round(time.process_time() - before_cpu_s, 6))
    dist.barrier()
    series.wire_bytes.append(sent_bytes() - before_bytes)
    series.loss.append(float(loss))


def measure_memory(job: Job) -> dict[str, Any]:
    """Return the resident bytes of one contestant above imports, at most, by the kernel's high-water mark.

    Returns: `peak_bytes` from the bare imports on, `step_peak_bytes` in the recorded steps alone, and predictions.

    Collective: every rank must call.
    """
    (name,) = job.contestants
    _import_all(CONTESTANTS[name].module)
    before = _status_bytes("VmRSS")
    _forget_peak()
    running, case = CONTESTANTS[name].build(make_model(CASES[job.case]), job.samples), CASES[job.case]
    _run(running, case, job, range(job.warmup))
    first = _status_bytes("VmHWM") - before
    _forget_peak()
    _run(running, case, job, range(job.warmup, job.warmup + job.rounds))
    last = _status_bytes("VmHWM") - before
    return {"peak_bytes": max(first, last), "step_peak_bytes": last, "predicted": _predictions(running)}


def _import_all(module: str) -> None:
    """Import what a training step imports, the compiler that the first optimizer of a process brings included."""
    importlib.import_module(module)
    weight = torch.nn.Parameter(torch.ones(1))
    torch.optim.AdamW([weight], fused=True).zero_grad()


def _run(running: Running, case: Case, job: Job, rounds: range) -> None:
    for number in rounds:
        running.step(make_batch(case, job.samples, dist.get_rank(), number))
    dist.barrier()


def _predictions(running: Running) -> dict[str, int]:
    """Return what zeroshard says about itself; nothing for the others."""
    if running.zero is None:
        return {}
    memory, traffic = running.zero.memory(), running.zero.traffic()
    return {
        "step_bytes": traffic.predicted_step_bytes,
        "held_bytes": sum(memory.predicted_bytes.values()),
    }


# -- what the kernel counts ------------------------------------------------------------------------------------------


def sent_bytes() -> int:
    """Return the bytes that the open TCP sockets of this process have sent, as the kernel counts them."""
    return sum(_sent_by(int(name)) for name in os.listdir("/proc/self/fd"))


def _sent_by(descriptor: int) -> int:
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as one:
            if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6):
                return 0
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:  # closed since it was listed
        return 0
    if len(info) < _SENT_AND_RESENT.size:
        raise RuntimeError(
            f"The kernel's tcp_info has {len(info)} bytes, so no count of bytes sent: use Linux 4.19 on."
        )
    sent, resent = _SENT_AND_RESENT.unpack_from(info)
    return int(sent - resent)


def _status_bytes(key: str) -> int:
    """Return a line of /proc/self/status, which has kB, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}.")


def _forget_peak() -> None:
    """Reset the high-water mark (VmHWM) to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def main(folder: Path) -> None:
    """Run the job of a folder as the rank that the environment names, and leave the result there."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 to its own FSDP: names that it changed
    torch.set_num_threads(1)
    text = json.loads((folder / "job.json").read_text())
    job = Job(**{**text, "contestants": tuple(text["contestants"])})
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=_PATIENCE
    )
    dist.barrier()
    result = {"time": measure_time, "memory": measure_memory}[job.kind](job)
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    # A library's thread that is still there can abort the interpreter's end; the result is written by now.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
