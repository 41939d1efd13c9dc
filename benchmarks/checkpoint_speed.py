"""How long saving and loading take, here and with torch.distributed.checkpoint (FSDP2), step by step in one run.

    python -m benchmarks.checkpoint_speed --output benchmarks/results/checkpoint_speed.json

Owns what is timed. Both train the same model with AdamW over the same ranks. A round saves and loads with either, one
after the other, in fresh folders on one disk; both flush their files to it, and both load what the page cache holds.
Ours computes a checksum of every byte on the way out and compares it on the way in; DCP has none. For DCP only
`dcp.save` and `dcp.load` are timed: making the state dict and handing it to the optimizer come on top. A time is that
of the slowest rank.
"""

import argparse
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import zeroshard as zs
from benchmarks.cases import CASES
from benchmarks.machine import circumstances, write_result
from zeroshard.testing import run_ranks

__all__ = ["main", "measure"]

TIMEOUT_S = 3600.0
OURS, THEIRS = "zeroshard", "torch.distributed.checkpoint"
COPY = "a copy of what a rank writes"


def measure(case: str, stage: int, rounds: int, folder: str) -> dict[str, Any]:
    """Time the rounds on this rank; return seconds by what was done, and the bytes of a checkpoint."""
    zero, state = _train_ours(case, stage), _train_theirs(case)
    seconds: dict[str, list[float]] = defaultdict(list)
    nbytes = {}
    for number in range(rounds):
        place = Path(folder, str(number))
        for name, call in _round(zero, state, place).items():
            seconds[name].append(_timed(call))
        source, target = _make_copy(place / "ours")
        seconds[COPY].append(_timed(lambda source=source, target=target: target.copy_(source)))
        nbytes = {OURS: _bytes_in(place / "ours"), THEIRS: _bytes_in(place / "theirs")}
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(place)
    return {"seconds": dict(seconds), "bytes": nbytes}


def _round(zero: zs.Zero, state: dict[str, Any], place: Path) -> dict[str, Callable[[], object]]:
    """Return what is timed, in order."""
    futures: list[Any] = []
    begin = "asynchronous save, until it returns"
    rest = "asynchronous save, the rest"
    return {
        f"save: {OURS}": lambda: zero.save(place / "ours"),
        f"save: {THEIRS}": lambda: dcp.save(state, checkpoint_id=place / "theirs"),
        f"load: {OURS}": lambda: zero.load(place / "ours"),
        f"load: {THEIRS}": lambda: dcp.load(state, checkpoint_id=place / "theirs"),
        f"{begin}: {OURS}": lambda: zero.save(place / "ours-later", asynchronous=True),
        f"{rest}: {OURS}": zero.wait,
        f"{begin}: {THEIRS}": lambda: futures.append(dcp.async_save(state, checkpoint_id=place / "theirs-later")),
        f"{rest}: {THEIRS}": lambda: futures[0].result(),
    }


def _timed(call: Callable[[], object]) -> float:
    """Return how long a call took on the slowest rank."""
    dist.barrier()
    start_s = time.perf_counter()
    call()
    elapsed = torch.tensor(time.perf_counter() - start_s)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


def _make_copy(checkpoint: Path) -> tuple[Tensor, Tensor]:
    """Return two pieces of memory of the size of what this rank has written; both were touched."""
    files = checkpoint.glob(f"*-{dist.get_rank() + 1:05}-of-*")
    source = torch.ones(sum(file.stat().st_size for file in files), dtype=torch.uint8)
    return source, source.clone()


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _train_ours(case: str, stage: int) -> zs.Zero:
    torch.manual_seed(0)
    model = CASES[case].build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    zero = zs.shard(model, optimizer, stage=stage)
    _step(case, model, optimizer)
    return zero


def _train_theirs(case: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = CASES[case].build()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _step(case, model, optimizer)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def _step(case: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step, so that there are states."""
    model(CASES[case].batch(torch.Generator().manual_seed(dist.get_rank()), 1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    """Measure, print the medians, and write the result."""
    parser = argparse.ArgumentParser(description="Saving and loading, here and with torch.distributed.checkpoint.")
    parser.add_argument("--case", default="gpt-124m", choices=sorted(CASES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written for a while; by default in /tmp")
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zeroshard-bench-", dir=options.folder) as folder:
        arguments = (options.case, options.stage, options.rounds, folder)
        measured = run_ranks(measure, options.ranks, *arguments, timeout_s=TIMEOUT_S)[0]
    medians = {name: median(values[1:] or values) for name, values in measured["seconds"].items()}
    for name, value in medians.items():
        print(f"{value:8.3f} s  {name}")
    if options.output:
        about = {"case": CASES[options.case].title, "ranks": options.ranks, "stage": options.stage}
        about |= {"bytes": measured["bytes"], "median_s": medians, "seconds": measured["seconds"]}
        write_result(options.output, circumstances("benchmarks.checkpoint_speed") | about)


if __name__ == "__main__":
    main()
