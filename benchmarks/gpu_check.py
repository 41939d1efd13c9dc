"""Is the engine right on a GPU? One command, every check against a plain loop, one JSON file.

    python -m benchmarks.gpu_check --out gpu.json            # CUDA
    python -m benchmarks.gpu_check --device cpu --out x.json # the script itself, where there is no GPU

Owns the checks and their file; it measures no speed that is worth reporting. A test
runs the script with `--device cpu`. Read `CHECKS` first.

Note: several ranks on one GPU
    NCCL refuses two ranks on one device, so ranks that share it have the engine's code for NCCL over communicators of
    `tools/shared_gpu.py`, whose results arrive late and on another stream; on a CPU, over `tools/emulated.py`. NCCL
    itself is called by one rank alone, in groups of one (`is_nccl`), and by each rank where there are several GPUs.
Note: what equal means
    The plain loop makes the same sums in the same order, so differences come from kernels alone (atomics, other
    algorithms for other alignments): on a CPU there are none. They are reported, and limited by `TOLERANCE`.
    Deterministic kernels are asked for; where some are not, delays may change what two runs without delays differ by.
"""

import argparse
import copy
import json
import multiprocessing
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard as zs
from benchmarks.gpu import comm_of_many, fake_ranks, rank_0_of
from tools.emulated import Device, EmulatedLinks
from tools.shared_gpu import SharedDevice
from zeroshard.setup.request import Request
from zeroshard.sharding import shard_over
from zeroshard.table.trace import Ledger
from zeroshard.testing import run_ranks
from zeroshard.wire.links import Links
from zeroshard.wire.mesh import current_mesh
from zeroshard.wire.nccl import NcclComm
from zeroshard.wire.transports import make_comm

__all__ = ["CHECKS", "main"]

STAGES: Final = (0, 1, 2, 3)
OFFLOADS: Final[dict[str, zs.Offload | str | None]] = {
    "": None,
    "host": "host",
    "states": zs.Offload(states=1.0, gradients=0.0),
    "parameters": zs.Offload(parameters=1.0),
}
"""By the name in a job."""
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE: Final = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
"""Greatest difference to the plain loop, as a share of the 2-norm of all parameters' change."""
TIMEOUT_S: Final = 300.0
VOCABULARY, WIDTH, LENGTH, DEPTH = 101, 64, 24, 4


@final
@dataclass(frozen=True)
class Job:
    """One training run.

    Args:
        delay_s: the longest injected delay.
        is_nccl: whether NCCL is called: by one rank alone, or by each rank on a GPU of its own.
        replicas: copies of what is sharded.
        activations, offload: as `zs.shard` has them; "" for none.
    """

    device: str
    stage: int = 3
    precision: str = "fp32"
    ranks: int = 1
    steps: int = 4
    delay_s: float = 0.0
    is_nccl: bool = False
    replicas: int = 1
    activations: str = ""
    offload: str = ""
    is_compiled: bool = False

    def __str__(self) -> str:
        plain = Job(self.device)
        named = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "device"}
        return (
            ", ".join(f"{name}={value!r}" for name, value in named.items() if value != getattr(plain, name)) or "plain"
        )


# -- what is trained -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention without biases (that of keys has no gradient but rounding) and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (batch, time, width)."""
        batch, length, _ = x.shape
        query, key, value = self.qkv(self.norm1(x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A GPT with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits; tokens: (batch, time)."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(device: str) -> Model:
    """Return the model with the same values on every call and device."""
    if device == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(7)
    return Model().to(device)


def loss_of(model: nn.Module, step: int, micro: int, rank: int, device: str) -> Tensor:
    """Return the loss of one micro-batch of one rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator).to(device)
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer of every run."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


# -- the plain loop --------------------------------------------------------------------------------------------------


def train_plain(job: Job) -> tuple[list[float], list[Tensor]]:
    """Train all ranks in turn in one process; return rank 0's losses and the master weights.

    By the engine's rules: weights and sums in fp32, modules in the lower precision, two micro-batches a step, ranks
    added in order, the mean at the end; in fp16 a loss scale that halves when a step is skipped.
    """
    model = build(job.device)
    optimizer, shadow = adamw(model), copy.deepcopy(model).to(DTYPES[job.precision])
    scale, losses = 65536.0 if job.precision == "fp16" else 1.0, []
    for step in range(job.steps):
        with torch.no_grad():
            for low, high in zip(shadow.parameters(), model.parameters(), strict=True):
                low.copy_(high)
        for rank in range(job.ranks):
            sums: list[Tensor] = []
            for micro in range(2):
                loss = loss_of(shadow, step, micro, rank, job.device)
                if rank == 0:
                    losses.append(loss.item())
                (loss * scale).backward()
                grads = [p.grad.float() * (1 / scale) for p in shadow.parameters() if p.grad is not None]
                sums = grads if not sums else [a + b for a, b in zip(sums, grads, strict=True)]
                shadow.zero_grad()
            for p, grad in zip(model.parameters(), sums, strict=True):
                p.grad = grad if rank == 0 else p.grad + grad
        for p in model.parameters():
            p.grad *= 1 / job.ranks
        if all(bool(p.grad.isfinite().all()) for p in model.parameters()):
            optimizer.step()
        else:
            scale /= 2
        optimizer.zero_grad()
    return losses, [p.detach().cpu() for p in model.parameters()]


# -- the engine ------------------------------------------------------------------------------------------------------


@contextmanager
def joined(job: Job, model: nn.Module | None = None) -> Iterator[tuple[zs.Zero, nn.Module, torch.optim.Optimizer]]:
    """Join the ranks and shard the model (or another one); at the end raise what an emulated device found."""
    gpus = torch.cuda.device_count() if job.device == "cuda" else 0
    if job.is_nccl and job.ranks > 1:
        zs.init(backend="nccl")
    elif job.is_nccl:
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = current_mesh()
    if not job.is_nccl or not gpus:
        if gpus:
            torch.cuda.set_device(0)
        # gloo moves what is on the host: the mesh's device is the model's all the same.
        mesh = replace(mesh, device=torch.device("cuda", 0) if gpus else torch.device("cpu"))
    if job.replicas > 1:
        mesh = replace(mesh, axes=(("replicate", job.replicas), ("shard", job.ranks // job.replicas)))
    device = SharedDevice(mesh.device, mesh.rank, job.delay_s) if gpus else Device(mesh.rank, 0.3 * (not job.delay_s))

    def make(mesh: zs.Mesh, settings: zs.Settings, ledger: Ledger) -> Any:
        if job.ranks == 1 and not job.is_nccl:
            return make_comm(mesh, settings, ledger)
        limits = mesh, settings.watchdog_s, settings.heartbeat_s
        links = Links(*limits) if job.is_nccl and gpus else EmulatedLinks(*limits, device)
        return NcclComm(links, ledger)

    model = model or build(job.device)
    if job.is_compiled:
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile()
    optimizer = adamw(model)
    asked = Request(
        model,
        optimizer,
        stage=job.stage,
        precision=job.precision,
        activations=job.activations or None,
        offload=OFFLOADS[job.offload],
        settings=zs.Settings(watchdog_s=60.0),
    )
    yield shard_over(asked, mesh, make), model, optimizer
    if isinstance(device, Device):
        device.check()
    else:
        torch.cuda.synchronize()
    if job.is_nccl:
        dist.destroy_process_group()


def train_engine(job: Job) -> dict[str, Any]:
    """Train this rank through the engine; return losses, whole master weights and bytes."""
    with joined(job) as (zero, model, optimizer):
        rank, losses = zero.mesh.rank, []
        for step in range(job.steps):
            with zero.no_sync():
                losses.append(_pass(model, step, 0, rank, job.device))
            losses.append(_pass(model, step, 1, rank, job.device))
            optimizer.step()
            optimizer.zero_grad()
        zero.agree(True)  # waits for what the last step has published
        memory = zero.memory()
        return {
            "losses": losses,
            "parameters": _masters(zero, model),
            "resident_bytes": memory.resident_bytes,
            "predicted_bytes": memory.predicted_bytes,
            "allocated_peak_bytes": torch.cuda.max_memory_allocated() if job.device == "cuda" else 0,
        }


def _pass(model: nn.Module, step: int, micro: int, rank: int, device: str) -> float:
    loss = loss_of(model, step, micro, rank, device)
    loss.backward()
    return loss.item()


def _masters(zero: zs.Zero, model: nn.Module) -> list[tuple[int, Tensor]]:
    """Return this rank's part of each parameter's master weights, and the element it begins with."""
    parts: dict[str, tuple[int, Tensor]] = {}
    for unit in zero.units:
        for slot in unit.slots:
            begin = slot.bucket.master_range(slot.index)[0] - slot.bucket.layout.offsets[slot.index]
            parts[slot.name] = (begin, slot.bucket.master(slot.index).detach().cpu())
    return [parts[name] for name, _ in model.named_parameters()]


def join(ranks: Sequence[dict[str, Any]]) -> list[Tensor]:
    """Put the ranks' parts of the master weights together."""
    whole = []
    for place, plain in enumerate(build("cpu").parameters()):
        flat = torch.full((plain.numel(),), float("nan"))
        for one in ranks:
            begin, part = one["parameters"][place]
            if part.numel():
                flat[begin : begin + part.numel()] = part
        whole.append(flat.view(plain.shape))
    return whole


def run(job: Job) -> list[dict[str, Any]]:
    """Run a job on its ranks, each a process, and return what each reports."""
    return run_ranks(train_engine, job.ranks, job, timeout_s=TIMEOUT_S, process_group=_has_group(job))


def _has_group(job: Job) -> bool:
    return job.ranks > 1 and not job.is_nccl


def difference(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Return the 2-norm of the difference, as a share of how far training moved the parameters."""
    begun = [p.detach() for p in build("cpu").parameters()]
    apart = sum(float((a - e).double().square().sum()) for a, e in zip(actual, expected, strict=True))
    moved = sum(float((e - b).double().square().sum()) for e, b in zip(expected, begun, strict=True))
    return float((apart / moved) ** 0.5)


# -- checks: each returns numbers, with "passed" among them ----------------------------------------------------------


def check_parity(job: Job) -> dict[str, Any]:
    """Compare losses and master weights with the plain loop."""
    losses, expected = train_plain(job)
    ranks = run(job)
    apart = difference(expected, join(ranks))
    worst = max(abs(a - b) / abs(b) for a, b in zip(ranks[0]["losses"], losses, strict=True))
    keys = ("resident_bytes", "predicted_bytes", "allocated_peak_bytes")
    # Compiled kernels fuse what rounds.
    limit = 100 * TOLERANCE["fp32"] if job.is_compiled else TOLERANCE[job.precision]
    return {
        "passed": apart <= limit and worst <= limit,
        "difference": apart,
        "loss_difference": worst,
        "limit": limit,
        "ranks": [{key: one[key] for key in keys} for one in ranks],
    }


def check_delays(job: Job) -> dict[str, Any]:
    """Compare a run whose collectives arrive late with two that arrive at once."""
    late, *prompt = [join(run(one)) for one in (job, *2 * [Job(**{**asdict(job), "delay_s": 0.0})])]
    spread, apart = difference(prompt[0], prompt[1]), difference(prompt[0], late)
    return {"passed": apart <= 3 * spread, "difference": apart, "without_delays": spread}


def check_meta(job: Job) -> dict[str, Any]:
    """Compare the values of a model on the meta device with those that one process gives it."""
    torch.manual_seed(11)
    plain = build(job.device)
    torch.manual_seed(11)
    plain.apply(_reset)
    expected = [p.detach().cpu() for p in plain.parameters()]
    found = run_ranks(values_from_meta, job.ranks, job, timeout_s=TIMEOUT_S, process_group=_has_group(job))
    wrong = [place for place, e in enumerate(expected) if not all(torch.equal(e, one[place]) for one in found)]
    return {"passed": not wrong, "wrong_parameters": wrong}


def values_from_meta(job: Job) -> list[Tensor]:
    """Shard a model that has no values, and return those it gets."""
    with torch.device("meta"):
        model = Model()
    torch.manual_seed(11)
    with joined(job, model) as (zero, _, _), zero.gathered():
        return [p.detach().clone().cpu() for p in model.parameters()]


def _reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def check_state(job: Job) -> dict[str, Any]:
    """Save whole, reload in a plain model, and swap an average in and out."""
    found = run_ranks(state_of, job.ranks, job, timeout_s=TIMEOUT_S, process_group=_has_group(job))
    return {"passed": all(all(one.values()) for one in found), "ranks": found}


def state_of(job: Job) -> dict[str, bool]:
    """Return what holds on this rank."""
    with joined(job) as (zero, model, optimizer):
        average = zero.ema(0.5)
        _pass(model, 0, 0, zero.mesh.rank, job.device)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        clipped = float(zero.grad_norm())
        optimizer.step()
        average.update()
        plain = build(job.device).to(DTYPES[job.precision])
        tokens = torch.arange(LENGTH, device=job.device)[None]
        with zero.gathered(), torch.no_grad():
            plain.load_state_dict(model.state_dict())
            is_equal = torch.equal(model(tokens).float(), plain(tokens).float())
        with average.swapped(), zero.gathered():
            is_swapped = any(not torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        with zero.gathered():
            is_back = all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
        return {"clips": clipped <= 1.0 + 1e-5, "reloads": is_equal, "averages": is_swapped, "swaps back": is_back}


def check_checkpoint(job: Job) -> dict[str, Any]:
    """Save, train on, load and train on again: the same bits twice."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(saved_and_loaded, job.ranks, job, folder, timeout_s=TIMEOUT_S, process_group=_has_group(job))
    return {"passed": all(all(one.values()) for one in found), "ranks": found}


def saved_and_loaded(job: Job, folder: str) -> dict[str, bool]:
    """Return what holds on this rank."""
    with joined(job) as (zero, model, optimizer):

        def train() -> list[Tensor]:
            for step in range(2, 4):
                _pass(model, step, 0, zero.mesh.rank, job.device)
                optimizer.step()
                optimizer.zero_grad()
            return [part.clone() for _, part in _masters(zero, model)]

        train()
        zero.save(Path(folder) / "two", step=2)
        expected = train()
        zero.load(Path(folder) / "two")
        return {"resumes": all(torch.equal(a, b) for a, b in zip(expected, train(), strict=True))}


def check_no_synchronization(job: Job) -> dict[str, Any]:
    """Train as rank 0 of several over NCCL's code, whose collectives do nothing; fail where the host waits for the GPU.

    The first steps record the passes. After these, torch raises at each operation that waits for the device.
    """
    model = build(job.device)
    optimizer = adamw(model)
    tokens = torch.arange(2 * (LENGTH + 1), device=job.device).view(2, -1) % VOCABULARY
    with fake_ranks(job.ranks):
        asked = Request(model, optimizer, stage=job.stage, precision=job.precision)
        shard_over(asked, rank_0_of(job.ranks, job.device), comm_of_many)
        try:
            for step in range(job.steps):
                if step == job.steps // 2 and job.device == "cuda":
                    torch.cuda.set_sync_debug_mode("error")
                F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            if job.device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return {"passed": True, "is_watched": job.device == "cuda"}


CHECKS: Final[tuple[Callable[[Job], dict[str, Any]], ...]] = (
    check_parity,
    check_delays,
    check_meta,
    check_state,
    check_checkpoint,
    check_no_synchronization,
)


def plan(device: str, ranks: int, gpus: int) -> list[tuple[Callable[[Job], dict[str, Any]], Job]]:
    """Return every check with the job that it runs, the most informative ones first."""
    both = [(stage, precision) for stage in STAGES for precision in DTYPES]
    planned = [(check_parity, Job(device, stage, "bf16", is_nccl=True)) for stage in STAGES]
    planned += [(check_parity, Job(device, stage, precision, n)) for n in (1, ranks) for stage, precision in both]
    planned += [(check_no_synchronization, Job(device, stage, "bf16", 8)) for stage in STAGES]
    planned += [(check_parity, Job(device, 3, offload=how)) for how in OFFLOADS if how]
    planned += [(check_parity, Job(device, 3, "bf16", ranks, offload=how)) for how in OFFLOADS if how]
    kept = ("recompute", "recompute-sqrt", "offload", "recompute+offload", "compress")
    planned += [(check_parity, Job(device, 3, "bf16", ranks, activations=how)) for how in kept]
    planned += [(check_parity, Job(device, 3, "fp32", n, is_compiled=True)) for n in (1, ranks)]
    planned += [(check_parity, Job(device, stage, "bf16", 4, replicas=2)) for stage in (2, 3)]
    planned += [(check_checkpoint, Job(device, stage, "bf16", n)) for n in (1, ranks) for stage in (0, 3)]
    planned += [(check_delays, Job(device, stage, "bf16", ranks, delay_s=0.02)) for stage in STAGES]
    planned += [(check_meta, Job(device, ranks=n)) for n in (1, ranks)]
    planned += [(check_state, Job(device, stage, "fp32", ranks)) for stage in STAGES]
    if gpus > 1:
        planned += [(check_parity, Job(device, s, p, min(gpus, 4), is_nccl=True)) for s, p in both]
    return planned


def main(arguments: Sequence[str]) -> int:
    """Run the checks and write the file; return 1 if one did not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2, help="ranks that share the device")
    parser.add_argument("--only", nargs="+", default=[""], help="run checks whose name and job contain one of these")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no check after so long")
    parser.add_argument("--jobs", type=int, default=1, help="checks at a time")
    parser.add_argument("--resume", action="store_true", help="keep the checks of the file that passed")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu tests the script itself")
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    results, end_s = [], time.time() + 60 * options.minutes
    if options.resume and options.out.exists():
        results = [one for one in json.loads(options.out.read_text())["checks"] if one["passed"]]
    done, left = {(one["name"], json.dumps(one["job"])) for one in results}, 0
    asked = [
        (check, job)
        for check, job in plan(options.device, options.ranks, gpus)
        if any(text in f"{check.__name__} {job!r}" for text in options.only)
        and (check.__name__, json.dumps(asdict(job))) not in done
    ]
    for (check, job), found in zip(asked, _all_of(asked, options.jobs, end_s), strict=True):
        if found is None:
            left += 1
            continue
        results.append({"name": check.__name__, "job": asdict(job), **found})
        _write(options.out, results, circumstances(options.device, arguments))
        error = found.get("error", "").strip().splitlines()[-1:]
        sys.stdout.write(
            f"{'ok    ' if found['passed'] else 'FAILED'} {check.__name__} {job} {' '.join(error)[:300]}\n"
        )
        sys.stdout.flush()
    sys.stdout.write(f"{left} checks are left: the same command with --resume goes on\n" if left else "")
    return int(left > 0 or not results or not all(one["passed"] for one in results))


def _all_of(
    asked: Sequence[tuple[Callable[[Job], dict[str, Any]], Job]], jobs: int, end_s: float
) -> Iterator[dict[str, Any] | None]:
    """Yield what each check found, in order, some at a time; None for those without time."""
    if jobs == 1:
        yield from (attempt(check, job, end_s) for check, job in asked)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from (one.result() for one in [pool.submit(attempt, *one, end_s) for one in asked])


def _write(path: Path, results: list[dict[str, Any]], about: dict[str, Any]) -> None:
    failed = sum(not one["passed"] for one in results)
    report = {**about, "passed": len(results) - failed, "failed": failed, "checks": results}
    path.write_text(json.dumps(report, indent=1) + "\n")


def attempt(check: Callable[[Job], dict[str, Any]], job: Job, end_s: float) -> dict[str, Any] | None:
    """Run a check, before `end_s`; an exception is a failure with its traceback, not the end of the others."""
    if time.time() > end_s:
        return None
    torch.set_num_threads(1)
    begin_s = time.perf_counter()
    try:
        found = check(job)
    except Exception:
        found = {"passed": False, "error": traceback.format_exc()}
    return {**found, "wall_s": round(time.perf_counter() - begin_s, 3)}


def circumstances(device: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what else the results depend on."""
    root = Path(__file__).parent.parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    gpu = torch.cuda.get_device_properties(0) if device == "cuda" else None
    return {
        "machine": {
            "device": gpu.name if gpu is not None else platform.processor() or platform.machine(),
            "device_bytes": gpu.total_memory if gpu is not None else 0,
            "devices": torch.cuda.device_count() if gpu is not None else 0,
            "kernel": platform.release(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "zeroshard": zs.__version__,
        },
        "commit": git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain", "zeroshard") else ""),
        "command": shlex.join(["python", "-m", "benchmarks.gpu_check", *arguments]),
        "date": datetime.now(UTC).date().isoformat(),
    }


if __name__ == "__main__":
    # Ranks import their targets by the module's real name.
    from benchmarks.gpu_check import main as named_main

    raise SystemExit(named_main(sys.argv[1:]))
