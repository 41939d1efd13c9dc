"""Split and sharded training beside FSDP2: a GPT over the axes "shard" and "tensor", 2 x 2 ranks, in one launch.

    python -m benchmarks.split --rounds 24 --output benchmarks/results/split.json
    python -m benchmarks.split --start      # the peak of a start from the meta device, tensor 2

Each contestant trains the same GPT, split by the same plan (`zeroshard/train/models/split.py`, torch's tensor
parallelism), with the same optimizer and data. They take turns of a step, in an order that is drawn for each round; the
ratio is that of the medians. The peak is of torch's CPU allocator, from the first parameter on, in a run of its own
before the turns: memory that ranks share is not the allocator's, so zeroshard is there with messages, too.
"""

import argparse
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroshard as zs
from benchmarks.cases import CASES
from benchmarks.machine import circumstances, write_result
from benchmarks.peaks import measure_peak
from benchmarks.report import aligned, ratio_of_medians
from zeroshard.table.sizes import size_text
from zeroshard.testing import run_ranks
from zeroshard.train.models.gpt import GPT, GPTConfig

__all__ = ["CONTESTANTS", "compare", "main", "start"]

Step = Callable[[Tensor, Tensor], Tensor]
BASE: Final = "FSDP2"
WARMUP: Final = 4
PEAK_STEPS: Final = 2
LOSS_TOLERANCE: Final = 1e-3


def _zeroshard(shared_memory: bool) -> Callable[[nn.Module, torch.optim.Optimizer, DeviceMesh], None]:
    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
        zs.shard(model, optimizer, stage=3, mesh=mesh, settings=zs.Settings(shared_memory=shared_memory))

    return prepare


def _fsdp2(model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    # The optimizer updates what `fully_shard` put in place of the parameters.
    optimizer.param_groups[0]["params"] = list(model.parameters())


CONTESTANTS: Final[Mapping[str, Callable[..., None]]] = {
    BASE: _fsdp2,
    "zeroshard 3": _zeroshard(True),
    "zeroshard 3, messages": _zeroshard(False),
}


def _build(name: str, config: GPTConfig, mesh: DeviceMesh) -> Step:
    """Return a contestant's step: tokens and targets, (batch, time), to the loss."""
    from zeroshard.train.models.split import loss_parallel, split

    torch.manual_seed(0)
    model = GPT(config)
    split(model, mesh["tensor"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    CONTESTANTS[name](model, optimizer, mesh)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            loss: Any = model(tokens, targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole: Tensor = loss.to_local()
        return whole.detach()

    return step


def compare(config: GPTConfig, samples: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return, by contestant, seconds and losses of each round, and the peak in bytes. Collective."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))

    def batch(number: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(100 * mesh.get_local_rank("shard") + number % 4)
        both = torch.randint(config.vocabulary, (samples, config.context + 1), generator=draw)
        return both[:, :-1], both[:, 1:]

    def run(name: str) -> Step:
        step = _build(name, config, mesh)
        for number in range(PEAK_STEPS):
            step(*batch(number))
        return step

    found: dict[str, dict[str, Any]] = {}
    for name in CONTESTANTS:
        peak_bytes = measure_peak(lambda name=name: run(name)).peak_bytes
        found[name] = {"peak_bytes": peak_bytes, "step_s": [], "losses": []}
    steps = {name: _build(name, config, mesh) for name in CONTESTANTS}
    for number in range(WARMUP + rounds):
        for name in random.Random(number).sample([*steps], len(steps)):
            tokens, targets = batch(number)
            dist.barrier()
            begin_s = time.perf_counter()
            loss = steps[name](tokens, targets)
            dist.barrier()
            took_s = time.perf_counter() - begin_s
            if number >= WARMUP:
                found[name]["step_s"].append(took_s)
                found[name]["losses"].append(loss.item())
    return found


def start(case: str) -> tuple[int, int, int]:
    """Start a GPT on the meta device, split over two ranks; return the peak, and the rank's part and largest unit."""
    mesh, sizes = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor")), (0, 0)

    def initialize(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.02)

    def run() -> Any:
        nonlocal sizes
        with torch.device("meta"):
            model = CASES[case].build()
        columns, rows = ColwiseParallel(), RowwiseParallel()
        plan: dict[str, Any] = {"tokens": RowwiseParallel(input_layouts=Replicate()), "head": columns}
        plan |= {f"blocks.*.{name}": columns for name in ("qkv", "up")}
        parallelize_module(model, mesh["tensor"], plan | {f"blocks.*.{name}": rows for name in ("out", "down")})
        model.head.weight = model.tokens.weight
        largest = max(sum(p.nbytes for p in part.parameters()) for part in (*model.blocks, model.tokens))
        # Memory that ranks share is not the allocator's.
        settings = zs.Settings(shared_memory=False)
        zero = zs.shard(model, stage=3, mesh=mesh, weights=initialize, settings=settings)
        sizes = sum(zero.memory().resident_bytes.values()), largest
        return model, zero

    return measure_peak(run).peak_bytes, *sizes


def main(arguments: list[str] | None = None) -> None:
    """Compare, and print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--samples", type=int, default=2, help="of each place along the axis shard")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--start", metavar="CASE", nargs="?", const="gpt-124m", help="measure a start instead")
    given = parser.parse_args(arguments)
    if given.start:
        for rank, (peak, part, unit) in enumerate(run_ranks(start, 2, given.start, timeout_s=600)):
            limit = part + unit
            print(
                f"rank {rank}: peak {peak:,} bytes; its part {part:,} + its largest unit, whole, {unit:,} = {limit:,}"
            )
        return
    config = GPTConfig(given.depth, given.context, given.vocabulary)
    timeout_s = 120.0 + 30 * given.rounds
    by_rank = run_ranks(compare, 4, config, given.samples, given.rounds, timeout_s=timeout_s)
    base, table = by_rank[0][BASE], [" | step | of FSDP2's | allocator peak | of FSDP2's"]
    result: dict[str, Any] = {"parameters": sum(p.numel() for p in GPT(config).parameters())}
    for name in CONTESTANTS:
        one = by_rank[0][name]
        off = max(abs(a / b - 1) for a, b in zip(one["losses"], base["losses"], strict=True))
        if off > LOSS_TOLERANCE:
            raise RuntimeError(f"{name}: losses differ from those of {BASE} by up to {off:.1e}")
        peak, base_peak = (max(found[key]["peak_bytes"] for found in by_rank) for key in (name, BASE))
        ratio, low, high = ratio_of_medians(one["step_s"], base["step_s"])
        result[name] = {**one, "peak_bytes": peak, "step": (ratio, low, high), "peak": peak / base_peak}
        shown = (
            name,
            f"{1e3 * median(one['step_s']):.0f} ms",
            f"{ratio:.3f} ({low:.3f} to {high:.3f})",
            size_text(peak),
            f"{peak / base_peak:.3f}",
        )
        table.append(" | ".join(shown))
    print(f"GPT, {result['parameters']:,} parameters, shard 2 x tensor 2 on CPU, {given.rounds} rounds")
    for line in aligned(table):
        print(line)
    if given.output is not None:
        write_result(given.output, {**circumstances("benchmarks.split"), **vars(given), "output": None, **result})


if __name__ == "__main__":
    main()
