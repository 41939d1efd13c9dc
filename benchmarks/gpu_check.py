"""Is the engine right on a GPU? One command, every check against a plain loop, one JSON file.

    python -m benchmarks.gpu_check --out gpu.json            # CUDA
    python -m benchmarks.gpu_check --device cpu --out x.json # the script itself, where there is no GPU

Owns the checks and their file; it measures no speed that is worth reporting. **It has not been run on a GPU yet**: it
was written where there is none, and a test runs it with `--device cpu`. Read `CHECKS` first.

Note: several ranks on one GPU
    NCCL refuses two ranks on one device, so the ranks here are processes that share it and exchange tensors through
    the host: `Staged` copies them to the host, has gloo send them, and copies the result back on a stream of its own,
    after a delay of its choosing. That is how NCCL's results arrive, late and on another stream, so an engine that
    reads before it waits, or gives memory back too early, computes something else. With several GPUs the same checks
    also run over NCCL, one rank on each.
Note: what equal means
    The plain loop makes the same sums in the same order, so differences come from kernels alone (atomics, other
    algorithms for other alignments): on a CPU there are none. They are reported, and limited by `TOLERANCE`.
    Deterministic kernels are asked for; where some are not, delays may change what two runs without delays differ by.
"""

import argparse
import copy
import json
import platform
import random
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard as zs
from benchmarks.gpu import Nobody, fake_ranks
from zeroshard.handle import shard_over
from zeroshard.setup.request import Request
from zeroshard.table.trace import Ledger
from zeroshard.testing import run_ranks
from zeroshard.wire.comm import Pending
from zeroshard.wire.mesh import current_mesh
from zeroshard.wire.nccl import NcclComm
from zeroshard.wire.transports import make_comm

__all__ = ["CHECKS", "main"]

STAGES: Final = (0, 1, 2, 3)
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE: Final = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
"""Greatest difference to the plain loop, as a share of the 2-norm of all parameters' change."""
CYCLES_A_SECOND: Final = 1.5e9
"""Of a GPU, roughly: what `torch.cuda._sleep` counts."""
TIMEOUT_S: Final = 300.0
VOCABULARY, WIDTH, LENGTH, DEPTH = 101, 64, 24, 4


@final
@dataclass(frozen=True)
class Job:
    """One training run. `delay_s` is the longest injected delay; `is_nccl` puts each rank on a GPU of its own."""

    device: str
    stage: int = 3
    precision: str = "fp32"
    ranks: int = 1
    steps: int = 4
    delay_s: float = 0.0
    is_nccl: bool = False


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


class Staged:
    """The engine's collectives over gloo, through the host, with results that arrive late. See the note above."""

    def __init__(self, inner: Any, job: Job) -> None:
        self._inner, self._job = inner, job
        self._stream = torch.cuda.Stream() if job.device == "cuda" else None
        self._random = random.Random(inner.mesh.rank)
        self._kept: list[tuple[Any, Tensor]] = []
        """Host memory of copies under way, each with the event at its end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def gather(self, full: Tensor, *rest: Any, **options: Any) -> Pending:
        """Gather on the host."""
        host = self._to_host(full)
        self._inner.gather(host, *rest, **options).wait()
        return self._to_device(full, host)

    def reduce(self, full: Tensor, own: Tensor, *rest: Any, **options: Any) -> Pending:
        """Reduce on the host; only this rank's shard comes back."""
        host = self._to_host(full)
        result = torch.empty_like(own, device="cpu")
        self._inner.reduce(host, result, *rest, **options).wait()
        return self._to_device(own, result)

    def reduce_copies(self, own: Tensor, *rest: Any, **options: Any) -> Pending:
        """Reduce over copies on the host."""
        host = self._to_host(own)
        self._inner.reduce_copies(host, *rest, **options).wait()
        return self._to_device(own, host)

    def broadcast(self, tensor: Tensor, *rest: Any, **options: Any) -> None:
        """Broadcast on the host."""
        host = tensor.detach().cpu()
        self._inner.broadcast(host, *rest, **options)
        tensor.copy_(host)

    def collect(self, tensor: Tensor, *rest: Any, **options: Any) -> Tensor:
        """Collect on the host."""
        rows: Tensor = self._inner.collect(tensor.cpu(), *rest, **options)
        return rows.to(tensor.device)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if self._stream is None:
            return tensor.clone()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            return tensor.cpu()

    def _to_device(self, target: Tensor, host: Tensor) -> Pending:
        delay_s = self._random.uniform(0, self._job.delay_s)
        if self._stream is None:

            def arrive() -> None:
                time.sleep(delay_s)
                target.copy_(host)

            return Pending(arrive)
        pinned = host.pin_memory()
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(delay_s * CYCLES_A_SECOND))
            target.copy_(pinned, non_blocking=True)
            event = self._stream.record_event()

        self._kept[:] = [(kept, memory) for kept, memory in self._kept if not kept.query()] + [(event, pinned)]
        return Pending(lambda: torch.cuda.current_stream().wait_event(event))


def train_engine(job: Job) -> dict[str, Any]:
    """Train this rank through the engine; return losses, whole master weights and bytes."""
    zero, model, optimizer = start(job)
    rank, losses = zero.mesh.rank, []
    for step in range(job.steps):
        with zero.no_sync():
            losses.append(_pass(model, step, 0, rank, job.device))
        losses.append(_pass(model, step, 1, rank, job.device))
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated() if job.device == "cuda" else 0
    memory = zero.memory()
    return {
        "losses": losses,
        "parameters": _masters(zero, model),
        "resident_bytes": memory.resident_bytes,
        "predicted_bytes": memory.predicted_bytes,
        "allocated_peak_bytes": peak,
    }


def start(job: Job, model: nn.Module | None = None) -> tuple[zs.Zero, nn.Module, torch.optim.Optimizer]:
    """Join the ranks, and shard the model (or another one)."""
    if job.is_nccl:
        zs.init(backend="nccl")
    elif job.device == "cuda":
        torch.cuda.set_device(0)

    def make(mesh: zs.Mesh, settings: zs.Settings, ledger: Ledger) -> Any:
        if job.is_nccl:
            return make_comm(mesh, settings, ledger)
        comm = make_comm(replace(mesh, device=torch.device("cpu")), settings, ledger)
        return Staged(comm, job) if job.ranks > 1 else comm

    model = model or build(job.device)
    optimizer = adamw(model)
    # Memory of the host would need no waits, and these are what is checked.
    settings = zs.Settings(watchdog_s=60.0, shared_memory=False)
    asked = Request(model, optimizer, stage=job.stage, precision=job.precision, settings=settings)
    # gloo moves what is on the host, and is handed copies of it here: the model is on the device all the same.
    mesh = current_mesh() if job.is_nccl else replace(current_mesh(), device=torch.device(job.device))
    return shard_over(asked, mesh, make), model, optimizer


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
    return run_ranks(train_engine, job.ranks, job, timeout_s=TIMEOUT_S, process_group=job.ranks > 1 and not job.is_nccl)


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
    limit = TOLERANCE[job.precision]
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
    found = run_ranks(values_from_meta, job.ranks, job, timeout_s=TIMEOUT_S, process_group=job.ranks > 1)
    wrong = [place for place, e in enumerate(expected) if not all(torch.equal(e, one[place]) for one in found)]
    return {"passed": not wrong, "wrong_parameters": wrong}


def values_from_meta(job: Job) -> list[Tensor]:
    """Shard a model that has no values, and return those it gets."""
    with torch.device("meta"):
        model = Model()
    torch.manual_seed(11)
    zero, _, _ = start(job, model)
    with zero.gathered():
        return [p.detach().clone().cpu() for p in model.parameters()]


def _reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def check_state(job: Job) -> dict[str, Any]:
    """Save whole, reload in a plain model, and swap an average in and out."""
    found = run_ranks(state_of, job.ranks, job, timeout_s=TIMEOUT_S, process_group=job.ranks > 1)
    return {"passed": all(all(one.values()) for one in found), "ranks": found}


def state_of(job: Job) -> dict[str, bool]:
    """Return what holds on this rank."""
    zero, model, optimizer = start(job)
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


def check_no_synchronization(job: Job) -> dict[str, Any]:
    """Train as rank 0 of several over NCCL's code, whose collectives do nothing; fail where the host waits for the GPU.

    The first steps record the passes. After these, torch raises at each operation that waits for the device.
    """
    model = build(job.device)
    optimizer = adamw(model)
    tokens = torch.arange(2 * (LENGTH + 1), device=job.device).view(2, -1) % VOCABULARY
    with fake_ranks(job.ranks):
        asked = Request(model, optimizer, stage=job.stage, precision=job.precision)
        mesh = zs.Mesh(0, job.ranks, 0, torch.device(job.device))
        shard_over(asked, mesh, lambda *given: NcclComm(Nobody(given[0]), given[2], given[1].wire_bytes))  # type: ignore[arg-type]
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
    check_no_synchronization,
)


def plan(device: str, ranks: int, gpus: int) -> list[tuple[Callable[[Job], dict[str, Any]], Job]]:
    """Return every check with the job that it runs."""
    both = [(stage, precision) for stage in STAGES for precision in DTYPES]
    planned = [(check_parity, Job(device, stage, precision, n)) for n in (1, ranks) for stage, precision in both]
    planned += [(check_delays, Job(device, stage, "bf16", ranks, delay_s=0.02)) for stage in STAGES]
    # Over gloo the ranks' device is the CPU, where a model without values would be made.
    planned += [(check_meta, Job(device, ranks=n)) for n in (1, ranks) if n == 1 or device == "cpu"]
    planned += [(check_state, Job(device, stage, "fp32", ranks)) for stage in STAGES]
    planned += [(check_no_synchronization, Job(device, stage, "bf16", 8)) for stage in STAGES]
    if gpus > 1:
        planned += [(check_parity, Job(device, s, p, min(gpus, 4), is_nccl=True)) for s, p in both]
    return planned


def main(arguments: Sequence[str]) -> int:
    """Run the checks and write the file; return 1 if one did not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2, help="ranks that share the device")
    parser.add_argument("--only", default="", help="run checks whose name and job contain this text")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no check after so long")
    parser.add_argument("--resume", action="store_true", help="keep the checks of the file that passed")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu tests the script itself")
    torch.set_num_threads(1)
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    results, end_s = [], time.monotonic() + 60 * options.minutes
    if options.resume and options.out.exists():
        results = [one for one in json.loads(options.out.read_text())["checks"] if one["passed"]]
    done, left = {(one["name"], json.dumps(one["job"])) for one in results}, 0
    for check, job in plan(options.device, options.ranks, gpus):
        name = f"{check.__name__} {job}"
        if options.only not in name or (check.__name__, json.dumps(asdict(job))) in done:
            continue
        if time.monotonic() > end_s:
            left += 1
            continue
        results.append({"name": check.__name__, "job": asdict(job), **attempt(check, job)})
        sys.stdout.write(f"{'ok    ' if results[-1]['passed'] else 'FAILED'} {name}\n")
        _write(options.out, results, circumstances(options.device, arguments))
    sys.stdout.write(f"{left} checks are left: the same command with --resume goes on\n" if left else "")
    return int(left > 0 or not results or not all(one["passed"] for one in results))


def _write(path: Path, results: list[dict[str, Any]], about: dict[str, Any]) -> None:
    failed = sum(not one["passed"] for one in results)
    report = {**about, "passed": len(results) - failed, "failed": failed, "checks": results}
    path.write_text(json.dumps(report, indent=1) + "\n")


def attempt(check: Callable[[Job], dict[str, Any]], job: Job) -> dict[str, Any]:
    """Run a check; an exception is a failure with its traceback, not the end of the others."""
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
