"""What offload of activations saves and costs, on a CPU over an emulated bus.

`python -m benchmarks.offload` trains a GPT on one rank, once for each treatment, and prints a table: what a step
allocates at its peak, by torch's CPU allocator and above what lies there between steps; the time of a step; what moved;
and how long the computation would have waited for the bus, if the device were so many times as fast as this CPU. Time
that copies take on this CPU, which a device would not spend, counts in the time of the step and not in the stalls.
"""

import argparse
import statistics
import time

import torch

import zeroshard as zs
import zeroshard.activations
from benchmarks.peaks import measure_peak
from tools.virtual_clock import VirtualClock
from zeroshard.activations.offloaded import Offload
from zeroshard.store.bus import EmulatedBus
from zeroshard.table.activations import Offloaded
from zeroshard.table.sizes import MIB
from zeroshard.train.models.gpt import GPT, GPTConfig


class Narrow(GPTConfig):
    """A GPT whose width does not follow from its depth, so that a CPU can train one with many blocks."""

    width = 128  # type: ignore[assignment]


TREATMENTS = (None, "recompute", "recompute+offload", "offload", zs.Offloaded(0.5))
LATENCY_S = 10e-6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--gbps", type=float, default=25.0)
    parser.add_argument("--times", type=float, nargs="*", default=[1.0, 1000.0], help="speeds, in those of this CPU")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    print("| activations | device | peak MiB | step s | to host MiB | copies | host CPU s in copies | stalls |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for treatment in TREATMENTS:
        for times in args.times if "offload" in str(treatment).lower() else args.times[:1]:
            print(row(args, treatment, times))


def row(args: argparse.Namespace, treatment: object, times: float) -> str:
    """Train, and return a line of the table."""
    bus = EmulatedBus(args.gbps, LATENCY_S)
    bus.clock = VirtualClock(lambda: (time.perf_counter() - bus.copying_s) / times)
    links = []

    def make(cell: Offloaded, comm: object) -> Offload:
        links.append(Offload(cell, bus))
        return links[-1]

    zeroshard.activations.LINKS = {Offloaded: make}
    torch.manual_seed(0)
    model = GPT(Narrow(args.depth, args.context))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    zs.shard(model, optimizer, stage=0, activations=treatment)
    tokens = torch.randint(256, (args.batch, args.context + 1))

    def step() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    seconds, stalls, copies = [], [], []
    for _ in range(args.steps):
        before, copying, stalled = time.perf_counter(), bus.copying_s, bus.stalled_s
        step()
        seconds.append(time.perf_counter() - before)
        copies.append(bus.copying_s - copying)
        stalls.append((bus.stalled_s - stalled) / ((seconds[-1] - copies[-1]) / times))
    peak = measure_peak(step).peak_bytes
    cells = (
        treatment or "kept",
        f"{times:g} x",
        f"{peak / MIB:.1f}",
        f"{statistics.median(seconds):.2f}",
        f"{max((link.host_peak_bytes for link in links), default=0) / MIB:.1f}",
        bus.count // (args.steps + 2),
        f"{statistics.median(copies):.3f}",
        f"{statistics.median(stalls):.1%}",
    )
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
