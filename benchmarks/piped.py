"""Pipelines of sharded places beside torch's: a GPT over the axes "pipe" and "shard", 2 x 2 ranks, in one launch.

    python -m benchmarks.piped --rounds 24 --output benchmarks/results/piped.json

The peer is `torch.distributed.pipelining` (1F1B) with FSDP2 as torchtitan sets it for pipelines: each block, the
embeddings and the head are units, which stay whole after their forward, and gradients are reduced once a step. It has
no tied weights, so the script adds up the gradients of the head and the embedding over the places. All contestants have
the same cut, schedule, optimizer, first values and batches. They take turns of a step, in an order that is drawn for
each round; the ratio is that of the medians.

The peak of a rank is that of torch's CPU allocator, from the first parameter on, in a run of its own before the turns.
Memory that ranks share is not the allocator's: the rank's part of it is added, to the peak of the start and to that of
the steps, and zeroshard is there with messages, too. zeroshard's best cell is the fastest one that on no rank has a
higher peak than the peer.
"""

import argparse
import functools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroshard as zs
from benchmarks.cases import CASES, GPT, make_batch, make_model
from benchmarks.machine import circumstances, write_result
from benchmarks.peaks import measure_peak
from benchmarks.report import aligned, ratio_of_medians, show
from zeroshard.table.sizes import MIB
from zeroshard.testing import run_ranks

__all__ = ["CONTESTANTS", "best_of", "compare", "main"]

Step = Callable[[Tensor], Tensor | None]
"""A step on the tokens of a place along "shard", (batch, time + 1); returns the loss, where it is known."""

BASE: Final = "torch"
PLACES: Final = 2
PEAK_STEPS: Final = 2
MARK_BYTES: Final = 98_765
"""A block that nothing else allocates: it parts the start from the steps."""
LOSS_TOLERANCE: Final = 1e-3


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


# -- contestants ------------------------------------------------------------------------------------------------------


def _zeroshard(stage: int, *, shared_memory: bool) -> Callable[[GPT, int, int, DeviceMesh], Step]:
    def build(model: GPT, samples: int, micro_batches: int, mesh: DeviceMesh) -> Step:
        optimizer, cut = _adamw(model.parameters()), [f"blocks.{len(model.blocks) // PLACES}"]
        settings = zs.Settings(shared_memory=shared_memory)
        options: dict[str, Any] = {"micro_batches": micro_batches, "cut": cut, "stage": stage, "settings": settings}
        pipe = zs.pipeline(model, optimizer, mesh=mesh, **options)

        def step(tokens: Tensor) -> Tensor:
            loss = pipe.step(tokens)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    return build


class First(nn.Module):
    """The first half of a GPT."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.tokens, self.positions = model.tokens, model.positions
        self.blocks = model.blocks[: len(model.blocks) // PLACES]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the stream, (batch, time, width); tokens: (batch, time)."""
        x: Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return x


class Last(nn.Module):
    """The second half of a GPT."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = model.blocks[len(model.blocks) // PLACES :], model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, (batch, time, vocabulary)."""
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _torch(model: GPT, samples: int, micro_batches: int, mesh: DeviceMesh) -> Step:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    place, along, time_ = mesh.get_local_rank("pipe"), mesh["pipe"].get_group(), model.positions.num_embeddings
    part: Any = Last(model) if place else First(model)
    units: list[Any] = [*part.blocks, *([[part.norm, part.head]] if place else [part.tokens, part.positions])]
    for unit in units:
        fully_shard(unit, mesh=mesh["shard"], reshard_after_forward=False)
    fully_shard(part, mesh=mesh["shard"], reshard_after_forward=False)
    tied: Any = part.head.weight if place else part.tokens.weight
    optimizer = _adamw(part.parameters())
    tokens_ = torch.zeros(samples, time_, dtype=torch.int64)
    stream = torch.zeros(samples, time_, model.tokens.embedding_dim, requires_grad=True)
    logits = torch.zeros(samples, time_, model.tokens.num_embeddings, requires_grad=True)
    stage = PipelineStage(
        part,
        place,
        PLACES,
        torch.device("cpu"),
        group=along,
        input_args=stream if place else tokens_,
        output_args=logits if place else stream,
    )

    def loss_of(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), targets.flatten()) / micro_batches

    schedule = Schedule1F1B(stage, micro_batches, loss_fn=loss_of, scale_grads=False)

    def step(tokens: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        if place == 0:
            schedule.step(tokens[:, :-1])
        else:
            schedule.step(target=tokens[:, 1:], losses=losses, return_outputs=False)
        dist.all_reduce(tied.grad.to_local(), group=along)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum().detach() if losses else None

    return step


CONTESTANTS: Final[Mapping[str, Callable[[GPT, int, int, DeviceMesh], Step]]] = {
    BASE: _torch,
    **{f"zeroshard {stage}": _zeroshard(stage, shared_memory=True) for stage in (1, 2, 3)},
    **{f"zeroshard {stage}, messages": _zeroshard(stage, shared_memory=False) for stage in (1, 2, 3)},
}


# -- measurement ------------------------------------------------------------------------------------------------------


def compare(
    names: Sequence[str], case: str, samples: int, micro_batches: int, warmup: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Return, by contestant, seconds and losses of each round, and the peak in bytes. Collective."""
    mesh = init_device_mesh("cpu", (PLACES, 2), mesh_dim_names=("pipe", "shard"))
    data = mesh.get_local_rank("shard")

    def build(name: str) -> Step:
        model = make_model(CASES[case])
        assert isinstance(model, GPT)
        return CONTESTANTS[name](model, samples, micro_batches, mesh)

    def batch(number: int) -> Tensor:
        return make_batch(CASES[case], samples * micro_batches, data, number)

    found: dict[str, dict[str, Any]] = {}
    for name in names:
        series: dict[str, list[float | None]] = {"step_s": [], "cpu_s": [], "losses": []}
        found[name] = {"peaks": _peaks(functools.partial(build, name), batch), **series}
    steps = {name: build(name) for name in names}
    for number in range(warmup + rounds):
        for name in random.Random(number).sample([*steps], len(steps)):
            tokens = batch(number)
            dist.barrier()
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            loss = steps[name](tokens)
            took_cpu_s = time.process_time() - begin_cpu_s
            dist.barrier()
            took_s = time.perf_counter() - begin_s
            if number >= warmup:
                found[name]["step_s"].append(took_s)
                found[name]["cpu_s"].append(took_cpu_s)
                found[name]["losses"].append(None if loss is None else loss.item())
    return found


Peak = tuple[int, dict[int, int]]
"""The most bytes of the allocator, and the files in memory that the process has open at the end, with their bytes."""


def _peaks(build: Callable[[], Step], batch: Callable[[int], Tensor]) -> tuple[Peak, Peak]:
    """Return the peaks of a contestant's start, and of its steps."""
    before, files = _files(), list[dict[int, int]]()

    def look() -> None:
        files.append({file: nbytes for file, nbytes in _files().items() if file not in before})

    def run() -> Step:
        step = build()
        look()
        torch.empty(MARK_BYTES, dtype=torch.uint8)
        for number in range(PEAK_STEPS):
            step(batch(number))
        look()
        return step

    blocks = measure_peak(run).blocks
    mark = next(at for at, block in enumerate(blocks) if block.nbytes == MARK_BYTES)
    start, steps = (max(block.live_bytes for block in some) for some in (blocks[:mark], blocks[mark + 2 :]))
    return (start, files[0]), (steps, files[1])


def _files() -> dict[int, int]:
    """Return the bytes of each file in memory that this process has open, its own and those of other ranks."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:"):
                file = os.stat(f"/proc/self/fd/{name}")
                found[file.st_ino] = 512 * file.st_blocks
        except OSError:  # closed since it was listed
            continue
    return found


def _sums(peaks: Sequence[Peak]) -> list[tuple[int, int]]:
    """Return each rank's peak and its part of shared memory: each file is divided by the ranks that have it open."""
    users = Counter(file for _, files in peaks for file in files)
    shared = [sum(nbytes // users[file] for file, nbytes in files.items()) for _, files in peaks]
    return [(nbytes + of_rank, of_rank) for (nbytes, _), of_rank in zip(peaks, shared, strict=True)]


def best_of(result: Mapping[str, Any]) -> str | None:
    """Return the fastest of zeroshard's cells whose peak is not above the peer's on any rank; None if there is none."""
    fits = [name for name, one in result.items() if name != BASE and max(one["peak"]) <= 1.0]
    return min(fits, key=lambda name: result[name]["step"][0], default=None)


def _losses(by_rank: list[dict[str, dict[str, Any]]], name: str) -> list[float]:
    """Return the mean losses of each round: torch's last place has those of its rank, zeroshard's ranks the mean."""
    known = [found[name]["losses"] for found in by_rank if None not in found[name]["losses"]]
    return [sum(losses) / len(losses) for losses in zip(*known, strict=True)]


def main(arguments: list[str] | None = None) -> None:
    """Compare, and print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--warmup", type=int, default=4, help="rounds that are not recorded")
    parser.add_argument("--only", nargs="+", choices=[*CONTESTANTS], default=[*CONTESTANTS], metavar="CONTESTANT")
    parser.add_argument(
        "--case", default="gpt-30m", choices=[name for name in CASES if "gpt" in name or name == "tiny"]
    )
    parser.add_argument("--samples", type=int, default=1, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    names = [BASE, *(name for name in given.only if name != BASE)]
    sizes = given.case, given.samples, given.micro_batches, given.warmup, given.rounds
    by_rank = run_ranks(compare, 2 * PLACES, names, *sizes, timeout_s=900.0 + 120 * (given.warmup + given.rounds))
    base, expected = by_rank[0][BASE], _losses(by_rank, BASE)
    table, result = [" | step | of torch's | CPU of all ranks | peak by rank, MiB | of torch's"], dict[str, Any]()
    for name in names:
        seconds, losses = by_rank[0][name]["step_s"], _losses(by_rank, name)
        off = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
        if off > LOSS_TOLERANCE:
            raise RuntimeError(f"{name}: losses differ from those of {BASE} by up to {off:.1e}")
        starts, steps = (_sums([found[name]["peaks"][at] for found in by_rank]) for at in (0, 1))
        peaks = [max(both)[0] for both in zip(starts, steps, strict=True)]
        base_peaks = result[BASE]["peak_bytes"] if result else peaks
        ratios = [peak / base_peak for peak, base_peak in zip(peaks, base_peaks, strict=True)]
        step = ratio_of_medians(seconds, base["step_s"])
        cpu_s = [sum(of_ranks) for of_ranks in zip(*(found[name]["cpu_s"] for found in by_rank), strict=True)]
        result[name] = {
            "step_s": seconds,
            "cpu_s": cpu_s,
            "losses": losses,
            "loss_deviation": off,
            "step": step,
            "peak_bytes": peaks,
            "start_bytes": [peak for peak, _ in starts],
            "shared_bytes": [shared for _, shared in steps],
            "peak": ratios,
        }
        shown = (
            name,
            f"{1e3 * median(seconds):.0f} ms",
            show(step),
            f"{median(cpu_s):.2f} s",
            " ".join(f"{peak / MIB:.0f}" for peak in peaks),
            " ".join(f"{ratio:.3f}" for ratio in ratios),
        )
        table.append(" | ".join(shown))
    best = best_of(result)
    print(
        f"{CASES[given.case].title}: pipe {PLACES} x shard 2 on CPU, {given.micro_batches} micro-batches of "
        f"{given.samples}, {given.rounds} rounds"
    )
    print("\n".join(aligned(table)))
    print(f"zeroshard's best cell: {best}")
    if given.output is not None:
        setting = {**vars(given), "output": None, "best": best}
        write_result(given.output, {**circumstances("benchmarks.piped"), **setting, "contestants": result})


if __name__ == "__main__":
    main()
