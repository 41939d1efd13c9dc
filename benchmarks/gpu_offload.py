"""Full training on one device with offload: zeroshard beside DeepSpeed ZeRO-Offload and FSDP2's CPUOffloadPolicy.

    python -m benchmarks.gpu_offload --output benchmarks/results/gpu_offload.json   # CUDA, and much host memory
    python -m benchmarks.gpu_offload --device cpu --output gpu_offload.json         # the script itself, tiny

Owns who takes part, at which sizes, and the result file. A test runs it on the CPU. Read `ENTRANTS` first, then
`main`.

Note: one process each
    An entrant trains each size in a process of its own, from the largest size on, until it holds one: memory that does
    not suffice ends that process, and is noted. Then all entrants train the largest size that each of them holds, in
    turn, in the same session. Peaks of the device are those of torch's allocator, and of the host the process's own.
Note: what is the same
    The model, its values in bf16 beside fp32 masters, AdamW, sequences, samples, recomputation of each block, clipping
    at a norm of 1, and the tokens of a step.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from benchmarks.machine import circumstances, write_result
from zeroshard.describe.offload import OffloadLike
from zeroshard.plan.machine.profiles import device_for, host_device
from zeroshard.train.models.gpt import GPT, GPTConfig

__all__ = ["ENTRANTS", "Sizes", "main"]

GOAL: Final = 1.3
"""How many times the tokens a second of the faster of the others are asked for."""
Step = Callable[[Tensor, Tensor, bool], Tensor]
"""A forward and backward of a micro-batch, and with the last one the update; returns the loss."""


@final
@dataclass(frozen=True)
class Sizes:
    """What is trained on which device.

    Args:
        depths: of the model, largest first; a block is 64 times as wide as the model is deep.
        micro_batches: of a step.
    """

    device: str
    depths: tuple[int, ...]
    context: int
    vocabulary: int
    samples: int
    micro_batches: int
    warmup: int
    steps: int

    def config(self, depth: int) -> GPTConfig:
        """Return the model's shape."""
        return GPTConfig(depth, self.context, self.vocabulary)


SIZES: Final = {
    # 12 * depth * (64 * depth)^2 parameters and the table: about 13, 8, 4 and 2 billion.
    "cuda": Sizes("cuda", (64, 55, 44, 34), 2048, 32768, 4, 4, warmup=2, steps=5),
    "cpu": Sizes("cpu", (2, 1), 32, 256, 2, 2, warmup=1, steps=2),
}


def _recompute(model: GPT) -> None:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int) -> Step:
    def step(tokens: Tensor, targets: Tensor, is_last: bool) -> Tensor:
        loss = model(tokens, targets)
        (loss / micro_batches).backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def _zeroshard(sizes: Sizes, depth: int, offload: OffloadLike) -> Step:
    torch.manual_seed(0)
    model = GPT(sizes.config(depth))
    optimizer = _adamw(model)
    zs.shard(model, optimizer, stage=3, precision="bf16", activations="recompute", offload=offload)
    return _loop(model, optimizer, sizes.micro_batches)


def _fsdp2(sizes: Sizes, depth: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model, mesh = GPT(sizes.config(depth)), init_device_mesh(sizes.device, (1,))
    _recompute(model)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        # Pinned memory is a device's.
        "offload_policy": CPUOffloadPolicy(pin_memory=sizes.device == "cuda"),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return _loop(model, _adamw(model), sizes.micro_batches)


def _deepspeed(sizes: Sizes, depth: int) -> Step:
    import deepspeed

    os.environ.setdefault("LOCAL_RANK", "0")
    torch.manual_seed(0)
    model = GPT(sizes.config(depth))
    _recompute(model)
    settings = {
        "train_micro_batch_size_per_gpu": sizes.samples,
        "gradient_accumulation_steps": sizes.micro_batches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def step(tokens: Tensor, targets: Tensor, is_last: bool) -> Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()  # which updates at the last micro-batch
        found: Tensor = loss.detach()
        return found

    return step


OFFLOADS: Final[dict[str, OffloadLike]] = {
    "states": zs.Offload(states=1.0, gradients=0.0),
    "states and gradients": "host",
    "states and parameters": zs.Offload(parameters=1.0),
}
ENTRANTS: Final[dict[str, Callable[[Sizes, int], Step]]] = {
    **{f"zeroshard, {place}": partial(_zeroshard, offload=offload) for place, offload in OFFLOADS.items()},
    "DeepSpeed ZeRO-Offload": _deepspeed,
    "FSDP2 CPUOffloadPolicy": _fsdp2,
}


def train(entrant: str, sizes: Sizes, depth: int) -> dict[str, Any]:
    """Train in this process; return speed, losses and peaks."""
    device = torch.device(sizes.device)
    zs.init()
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if sizes.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
    advance = ENTRANTS[entrant](sizes, depth)
    shape, times, losses = (sizes.samples, sizes.context), list[float](), list[float]()
    draw = torch.Generator().manual_seed(1)
    for number in range(sizes.warmup + sizes.steps):
        begin_s = time.perf_counter()
        for place in range(sizes.micro_batches):
            tokens, targets = (torch.randint(sizes.vocabulary, shape, generator=draw).to(device) for _ in range(2))
            loss = advance(tokens, targets, place == sizes.micro_batches - 1)
        losses.append(float(loss))  # which waits for the device
        if number >= sizes.warmup:
            times.append(time.perf_counter() - begin_s)
    step_s = statistics.median(times)
    is_cuda = sizes.device == "cuda"
    return {
        "step_s": times,
        "losses": losses,
        "tokens_per_s": sizes.samples * sizes.context * sizes.micro_batches / step_s,
        "device_peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else None,
        "device_reserved_bytes": torch.cuda.max_memory_reserved() if is_cuda else None,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def plan_of(sizes: Sizes, depth: int, offload: OffloadLike, device: zs.Device) -> dict[str, Any]:
    """Return what the plan says of zeroshard's run."""
    with torch.device("meta"):
        model = GPT(sizes.config(depth))
    tokens = torch.zeros((sizes.samples, sizes.context), dtype=torch.int64)
    plan = zs.plan(
        model,
        world_size=1,
        device=device,
        stage=3,
        precision="bf16",
        activations="recompute",
        offload=offload,
        micro_batches=sizes.micro_batches,
        fused=True,
        inputs=[tokens, tokens],
    )
    return {
        "device_peak_bytes": plan.allocated_bytes,
        "device_reserved_bytes": plan.reserved_bytes,
        "offloaded_peak_bytes": plan.film.host_peak_bytes,
        "step_s": plan.step_s,
    }


def run_apart(entrant: str, sizes: Sizes, depth: int, minutes: float) -> dict[str, Any]:
    """Train in a process of its own; return what it found, or why it ended."""
    command = [sys.executable, "-m", "benchmarks.gpu_offload", "--device", sizes.device, "--entrant", entrant]
    try:
        done = subprocess.run(
            [*command, "--depth", str(depth)], capture_output=True, text=True, timeout=60 * minutes, check=False
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"took more than {minutes:g} minutes"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"problem": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def compare(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return zeroshard's speed beside the faster of the others, at the largest size that one of them holds."""
    others = [row for row in rows if not row["entrant"].startswith("zeroshard") and "tokens_per_s" in row]
    if not others:
        return {"problem": "none of the others trained any size"}
    largest = max(row["depth"] for row in others)
    rival = max((row for row in others if row["depth"] == largest), key=lambda row: row["tokens_per_s"])
    own = [row for row in rows if row["entrant"].startswith("zeroshard") and row["depth"] == largest]
    best = max((row.get("tokens_per_s", 0.0) for row in own), default=0.0)
    ratio = best / rival["tokens_per_s"]
    return {"depth": largest, "beside": rival["entrant"], "ratio": ratio, "goal": GOAL, "is_reached": ratio >= GOAL}


def measure(sizes: Sizes, entrants: Sequence[str], output: Path, minutes: float) -> dict[str, Any]:
    """Find the largest size of each entrant, then train each of these sizes with all; write the file as it goes on."""
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {**circumstances("benchmarks.gpu_offload"), "sizes": asdict(sizes), "rows": rows}

    def add(entrant: str, depth: int) -> bool:
        if any((row["entrant"], row["depth"]) == (entrant, depth) for row in rows):
            return False
        row = {"entrant": entrant, "depth": depth, **run_apart(entrant, sizes, depth, minutes)}
        rows.append(row)
        speed = f"{row['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in row else row["problem"]
        print(f"{entrant:36} depth {depth:3}: {speed}", flush=True)
        result["compared"] = compare(rows)
        write_result(output, result)
        return "tokens_per_s" in row

    for entrant in entrants:
        next((depth for depth in sizes.depths if add(entrant, depth)), None)
    for depth in sorted({row["depth"] for row in rows if "tokens_per_s" in row}, reverse=True):
        for entrant in entrants:
            add(entrant, depth)
    return result


def main(arguments: Sequence[str]) -> None:
    """Compare all entrants, or train with one of them."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_offload", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=list(SIZES), default="cuda")
    parser.add_argument("--entrant", choices=list(ENTRANTS), action="append", help="one of them; all by default")
    parser.add_argument("--depth", type=int, help="train here, with the entrant, and print what was found")
    parser.add_argument("--depths", type=int, nargs="+", help="sizes, largest first")
    parser.add_argument("--output", type=Path, help="the result file")
    parser.add_argument("--minutes", type=float, default=30.0, help="for one entrant and size")
    parser.add_argument("--plan", action="store_true", help="measure nothing: add plans to the result file")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available() and not options.plan:
        parser.error("no CUDA device here; --device cpu runs the script itself, with tiny sizes")
    sizes, entrants = SIZES[options.device], options.entrant or list(ENTRANTS)
    sizes = replace(sizes, depths=tuple(options.depths or sizes.depths))
    if options.depth is not None:
        print(json.dumps(train(entrants[0], sizes, options.depth)))
        return
    if options.output is None:
        parser.error("--output is the result file")
    if options.plan:
        result = json.loads(options.output.read_text())
        device = device_for("h100-80") if options.device == "cuda" else host_device()
        for row in result["rows"]:
            if (place := row["entrant"].removeprefix("zeroshard, ")) in OFFLOADS:
                row["planned"] = plan_of(sizes, row["depth"], OFFLOADS[place], device)
        write_result(options.output, result)
        return
    result = measure(sizes, entrants, options.output, options.minutes)
    print(json.dumps(result["compared"]))


if __name__ == "__main__":
    main(sys.argv[1:])
