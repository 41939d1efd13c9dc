"""How long saving and loading take, here and with torch.distributed.checkpoint (FSDP2), step by step in one run.

    python -m benchmarks.checkpoint_speed --output benchmarks/results/checkpoint_speed.json

Owns what is timed. Both train the same model with AdamW over the same ranks. A round saves and loads with either, one
after the other and in the other order each time, in fresh folders on one disk; both flush their files to it (DCP's
writer does so by default), and both load what the page cache holds. Ours computes a checksum of every byte on the way
out and compares it on the way in, before anything is changed; DCP has none. For DCP only `dcp.save` and `dcp.load` are
timed: making the state dict and handing it to the optimizer come on top. A time is that of the slowest rank. The first
round is not counted: it makes what both keep.
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
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import zeroshard as zs
from benchmarks.cases import CASES
from benchmarks.machine import circumstances, write_result
from zeroshard.table.sizes import size_text
from zeroshard.testing import run_ranks

__all__ = ["main", "measure", "to_markdown"]

TIMEOUT_S = 3600.0
OURS, THEIRS = "zeroshard", "torch.distributed.checkpoint"
SAVE, LOAD, STALL, REST = "save", "load", "asynchronous save, until it returns", "asynchronous save, the rest"
COPY = "a copy of what a rank writes"


def measure(case: str, stage: int, rounds: int, folder: str) -> dict[str, Any]:
    """Time the rounds on this rank; return seconds by what was done, and the bytes of a checkpoint."""
    zero, state = _train_ours(case, stage), _train_theirs(case)
    # Its own: the collectives of DCP's thread would else mix with those of this one, and hang.
    control = dist.new_group(backend="gloo")
    seconds: dict[str, list[float]] = defaultdict(list)
    nbytes, copy = {}, None
    for number in range(rounds):
        place = Path(folder, str(number))
        for pair in _round(zero, state, place, control):
            for name, calls in list(pair.items())[:: 1 if number % 2 else -1]:
                for what, call in calls.items():
                    seconds[f"{what}: {name}"].append(_timed(call))
        # Kept, as what is saved and the memory for it are: none of it was touched since the last round.
        copy = copy or _make_copy(place / "ours")
        seconds[COPY].append(_timed(copy))
        nbytes = {OURS: _bytes_in(place / "ours"), THEIRS: _bytes_in(place / "theirs")}
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(place)
    return {"seconds": dict(seconds), "bytes": nbytes}


def _round(
    zero: zs.Zero, state: dict[str, Any], place: Path, control: dist.ProcessGroup
) -> list[dict[str, dict[str, Callable[[], object]]]]:
    """Return what is timed: pairs of what either does, by its name, as calls by what they do."""
    futures: list[Any] = []

    def begin() -> None:
        target = place / "theirs-later"
        futures.append(dcp.async_save(state, checkpoint_id=target, process_group=control))

    return [
        {
            OURS: {SAVE: lambda: zero.save(place / "ours")},
            THEIRS: {SAVE: lambda: dcp.save(state, checkpoint_id=place / "theirs")},
        },
        {
            OURS: {LOAD: lambda: zero.load(place / "ours")},
            THEIRS: {LOAD: lambda: dcp.load(state, checkpoint_id=place / "theirs")},
        },
        {
            OURS: {STALL: lambda: zero.save(place / "ours-later", asynchronous=True), REST: zero.wait},
            THEIRS: {STALL: begin, REST: lambda: futures[0].result()},
        },
    ]


def _timed(call: Callable[[], object]) -> float:
    """Return how long a call took on the slowest rank."""
    dist.barrier()
    start_s = time.perf_counter()
    call()
    elapsed = torch.tensor(time.perf_counter() - start_s)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


def _make_copy(checkpoint: Path) -> Callable[[], object]:
    """Return a copy, between two pieces of memory of the size of what this rank has written; both were touched."""
    files = checkpoint.glob(f"*-{dist.get_rank() + 1:05}-of-*")
    source = torch.ones(sum(file.stat().st_size for file in files), dtype=torch.uint8)
    target = source.clone()
    return lambda: target.copy_(source)


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
    # DCP would write a tied weight under each of its names, and be slower by that.
    once = {value.to_local().data_ptr(): name for name, value in of_model.items()}
    return {"model": {name: of_model[name] for name in once.values()}, "optimizer": of_optimizer}


def _step(case: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step, so that there are states."""
    model(CASES[case].batch(torch.Generator().manual_seed(dist.get_rank()), 1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def to_markdown(result: dict[str, Any]) -> str:
    """Return the table that people read: medians, and between which values; the ratio is taken round by round."""
    sizes = ", ".join(f"{name} {size_text(size)}" for name, size in result["bytes"].items())
    lines = [
        f"{result['case']}, AdamW, {result['ranks']} ranks at stage {result['stage']}, "
        f"{result['machine']['cores']} cores; {sizes}. "
        f"Seconds: median of {len(_counted(result, COPY))} rounds (least to most). `{result['command']}`",
        "",
        f"| | {OURS} | {THEIRS} | {THEIRS} / {OURS}, median (least to most) |",
        "|---|---|---|---|",
    ]
    for what in (SAVE, LOAD, STALL, REST):
        ours, theirs = (_counted(result, f"{what}: {name}") for name in (OURS, THEIRS))
        ratios = [other / one for one, other in zip(ours, theirs, strict=True)]
        lines.append(f"| {what} | {_spread(ours)} | {_spread(theirs)} | {_spread(ratios)} |")
    lines.append(f"| {COPY} | {_spread(_counted(result, COPY))} | | |")
    return "\n".join(lines) + "\n"


def _counted(result: dict[str, Any], name: str) -> list[float]:
    """Return the seconds of all rounds but the first."""
    return result["seconds"][name][1:]


def _spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Measure, print the table, and write the result."""
    parser = argparse.ArgumentParser(description="Saving and loading, here and with torch.distributed.checkpoint.")
    parser.add_argument("--case", default="gpt-124m", choices=sorted(CASES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9, help="at least 2; the first is not counted")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written for a while; by default in /tmp")
    parser.add_argument("--output", type=Path, help="a JSON file; the table goes beside it, as .md")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds: expected at least 2, got {options.rounds}")
    with tempfile.TemporaryDirectory(prefix="zeroshard-bench-", dir=options.folder) as folder:
        arguments = (options.case, options.stage, options.rounds, folder)
        measured = run_ranks(measure, options.ranks, *arguments, timeout_s=TIMEOUT_S)[0]
    about = {"case": CASES[options.case].title, "ranks": options.ranks, "stage": options.stage}
    result = circumstances("benchmarks.checkpoint_speed") | about | measured
    print(to_markdown(result), end="")
    if options.output:
        write_result(options.output, result)
        options.output.with_suffix(".md").write_text(to_markdown(result))


if __name__ == "__main__":
    main()
