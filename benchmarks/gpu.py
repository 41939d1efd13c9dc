"""zeroshard on one GPU: beside the bare loop, beside FSDP2 at emulated ranks, and beside the bandwidth of a copy.

    python -m benchmarks.gpu --output benchmarks/results/gpu.json   # CUDA; some minutes on one H100
    python -m benchmarks.gpu --device cpu --output gpu.json         # the script itself, with tiny sizes

Owns what is compared on a GPU, and its result file. A test runs it on the CPU. Read `SECTIONS` first, then
`measure_section`.

Note: emulated ranks
    NCCL refuses several ranks on one GPU. Here one process plays rank 0 of many: shards have the size that they would
    have, all copies, casts and launches happen, and nothing travels. Both libraries run on `tools/one_of_many.py`,
    whose collectives move the memory of the device on a stream of their own; zeroshard with its own code for NCCL.
    Step times show what host and GPU have to do besides waiting for messages; losses mean nothing.
Note: memory alone, time together
    Each entrant first makes its steps alone, and the allocator's peaks are read. Then all entrants of a section are
    built, and make steps in turn, so that a GPU that changes its clock changes it for all.
"""

import argparse
import contextlib
import gc
import json
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs
from benchmarks.cases import CASES, Block, make_batch, make_model
from benchmarks.machine import circumstances, write_result
from benchmarks.report import aligned, gpu_table, optimizer_table
from tools.one_of_many import one_of_many
from zeroshard.plan.machine.profiles import device_for
from zeroshard.setup.request import Request
from zeroshard.sharding import shard_over
from zeroshard.table.trace import Ledger
from zeroshard.torch_groups import emulated_group
from zeroshard.wire.nccl import NcclComm
from zeroshard.wire.transports import make_comm

__all__ = ["SECTIONS", "Entrant", "Nobody", "comm_of_many", "fake_ranks", "main", "rank_0_of"]

LOSS_TOLERANCE: Final = 1e-2
"""By how much, of the first entrant's loss, another's may differ at one rank: bf16 has 8 bits. More is marked."""
COMPARED_STEPS: Final = 5
"""Recorded steps in which losses are compared. Later, atomic sums in kernels make even two runs
of one entrant differ."""


@final
@dataclass(frozen=True)
class Entrant:
    """Who takes part, and with what.

    Args:
        library: "bare", "zeroshard" or "FSDP2".
        stage: what is sharded; FSDP2 at 2 keeps parameters after forward.
        has_masters: fp32 parameters and states behind bf16 modules; otherwise all is bf16.
        is_compiled: whether the blocks are compiled.
        activations: what happens to them until backward.
    """

    library: str
    stage: int = 0
    has_masters: bool = False
    is_compiled: bool = False
    activations: str = ""

    @property
    def name(self) -> str:
        """For tables."""
        return self.activations or (self.library if self.library == "bare" else f"{self.library} {self.stage}")


@final
@dataclass(frozen=True)
class Section:
    """Entrants that make steps in turn, as rank 0 of `ranks`; the first one is what the others are compared with.

    Args:
        case: on a GPU, another than that of `Sizes`, with one sample; its entrants do not fit beside one another, and
            make their steps one after the other.
    """

    title: str
    ranks: int
    entrants: tuple[Entrant, ...]
    case: str = ""


def _against_fsdp2(ranks: int, stage: int) -> Section:
    title = f"rank 0 of {ranks}, bf16 with fp32 masters, stage {stage}"
    return Section(title, ranks, tuple(Entrant(name, stage, has_masters=True) for name in ("FSDP2", "zeroshard")))


SECTIONS: Final = (
    Section("one rank, all bf16", 1, (Entrant("bare"), Entrant("zeroshard", 0), Entrant("zeroshard", 3))),
    Section(
        "one rank, all bf16, blocks compiled",
        1,
        (Entrant("bare", is_compiled=True), Entrant("zeroshard", 3, is_compiled=True)),
    ),
    *(_against_fsdp2(ranks, stage) for ranks in (8, 64) for stage in (2, 3)),
    Section(
        "one rank, all bf16, sequence 8,192, activations",
        1,
        tuple(
            Entrant("zeroshard", 0, activations=how)
            for how in (
                "keep",
                "recompute",
                "recompute-sqrt",
                "recompute-rest",
                "recompute+offload",
                "compress",
                "offload",
            )
        ),
        case="gpt-1.3b-8k",
    ),
)


OPTIMIZER: Final = "optimizer step, fp32 masters"


@final
@dataclass(frozen=True)
class Sizes:
    """What is trained on which device: `samples` a micro-batch, steps before the recorded ones, and recorded ones.

    Args:
        copied_bytes: of the tensor whose copy shows the device's bandwidth.
    """

    device: str
    case: str
    samples: int
    warmup: int
    steps: int
    copied_bytes: int


SIZES: Final = {
    "cuda": Sizes("cuda", "gpt-1.3b", samples=4, warmup=5, steps=30, copied_bytes=2**32),
    "cpu": Sizes("cpu", "tiny", samples=1, warmup=1, steps=2, copied_bytes=2**22),
}


# -- entrants --------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Running:
    """An entrant that was built."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, batch: Tensor) -> Tensor:
        """Train once; return the loss, 0-d."""
        loss = self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def backward(self, batch: Tensor) -> Tensor:
        """Compute gradients; return the loss, 0-d."""
        loss: Tensor = self.model(batch)
        loss.backward()
        return loss.detach()


def build(entrant: Entrant, ranks: int, sizes: Sizes) -> Running:
    """Build an entrant as rank 0 of `ranks`; for more than one inside `fake_ranks`."""
    with torch.device(sizes.device):
        model = make_model(CASES[sizes.case])
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if not entrant.has_masters:
        model.to(torch.bfloat16)
    if entrant.is_compiled:
        for block in blocks:
            block.compile()
    if entrant.library == "FSDP2":
        _fully_shard(model, blocks, entrant.stage, sizes.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    if entrant.library == "zeroshard":
        precision = "bf16" if entrant.has_masters else "fp32"  # the latter leaves a bf16 model as it is
        how = entrant.activations or None
        asked = Request(model, optimizer, stage=entrant.stage, activations=how, precision=precision)
        shard_over(asked, rank_0_of(ranks, sizes.device), comm_of_many if ranks > 1 else make_comm)
    return Running(model, optimizer)


def rank_0_of(ranks: int, device: str) -> zs.Mesh:
    """Return the mesh of rank 0 of `ranks` on the first device of a kind."""
    return zs.Mesh(0, ranks, 0, torch.device("cuda", 0) if device == "cuda" else torch.device(device))


def comm_of_many(mesh: zs.Mesh, settings: zs.Settings, ledger: Ledger) -> NcclComm:
    """Return the transport of a rank inside `fake_ranks`."""
    return NcclComm(Nobody(mesh, one_of_many()), ledger)  # type: ignore[arg-type]


def _fully_shard(model: nn.Module, blocks: Sequence[nn.Module], stage: int, device: str) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = DeviceMesh.from_group(one_of_many(), device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=stage > 2)


@contextlib.contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Be rank 0 of a process group in which collectives do nothing; for one rank, have none."""
    with emulated_group(ranks) if ranks > 1 else contextlib.nullcontext():
        yield


class Nobody:
    """The links of a rank with nobody at the other end: all that `wire/links.py` does, but the waits of the host."""

    watchdog = None

    def __init__(self, mesh: zs.Mesh, group: dist.ProcessGroup | None = None) -> None:
        self.mesh = mesh
        self._group = group
        self.groups = defaultdict[str, Any](lambda: dist.group.WORLD)

    def new_group(self, name: str, backend: str, *axes: str) -> None:
        """Use the fake process group, which gives each rank copies of what this one has, or the device's group."""
        if self._group is not None and backend == "nccl":
            self.groups[name] = self._group

    def is_on_device(self, tensor: Tensor) -> bool:
        """Say yes: the fake process group takes all tensors."""
        return True

    def start(self, start: Callable[[], Any], what: str) -> Any:
        """Start a collective."""
        return start()

    def wait(self, works: Sequence[Any], what: str) -> None:
        """Wait for nobody."""

    def wait_on_stream(self, work: Any, what: str, *, is_last: bool = False) -> None:
        """Wait as for any device: for work that is done."""
        work.wait()

    def run(self, start: Callable[[], Any], what: str) -> None:
        """Start a collective."""
        start()


# -- measurements ----------------------------------------------------------------------------------------------------


def measure_section(section: Section, sizes: Sizes) -> dict[str, Any]:
    """Return what each entrant of a section needed, by name: a time and a loss for each step, and peaks of memory.

    At one rank, an entrant whose losses differ trains something else: it `deviates`.
    """
    if section.case and sizes.device == "cuda":
        sizes = replace(sizes, case=section.case, samples=1)
    in_turn = [(one,) for one in section.entrants] if section.case else [section.entrants]
    with fake_ranks(section.ranks):
        found = {}
        for entrant in section.entrants:
            found[entrant.name] = _measure_memory(entrant, section.ranks, sizes)
            _free(sizes.device)
        for entrants in in_turn:
            for name, series in _measure_time(entrants, section.ranks, sizes).items():
                found[name].update(series)
            _free(sizes.device)
    first = section.entrants[0].name
    if section.ranks == 1:
        _compare_losses(found, first)
    return {"section": section.title, "ranks": section.ranks, "first": first, "entrants": found}


def _measure_memory(entrant: Entrant, ranks: int, sizes: Sizes) -> dict[str, int]:
    """Return the allocator's peaks over the steps of one entrant alone; zeros on a CPU, which has no such counters."""
    running = build(entrant, ranks, sizes)
    for number in range(sizes.warmup):
        running.step(_batch(sizes, number))
    if sizes.device == "cpu":
        return {"allocated_bytes": 0, "reserved_bytes": 0}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for number in range(sizes.warmup, sizes.warmup + sizes.steps):
        running.step(_batch(sizes, number))
    torch.cuda.synchronize()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _measure_time(entrants: Sequence[Entrant], ranks: int, sizes: Sizes) -> dict[str, dict[str, list[float]]]:
    """Return each entrant's seconds and loss of every recorded step; they make their steps in turn."""
    running = {entrant.name: build(entrant, ranks, sizes) for entrant in entrants}
    series: dict[str, dict[str, list[float]]] = {name: {"wall_s": [], "loss": []} for name in running}
    for number in range(sizes.warmup + sizes.steps):
        batch = _batch(sizes, number)
        for name, one in running.items():
            wall_s, loss = _time(sizes.device, partial(one.step, batch))
            if number >= sizes.warmup:
                series[name]["wall_s"].append(wall_s)
                series[name]["loss"].append(float(loss))
    return series


def add_plans(result: dict[str, Any]) -> None:
    """Put beside each entrant of zeroshard what a plan for the device says, which needs no device."""
    device = device_for("h200" if "H200" in result["machine"].get("gpu", "") else "h100-80")
    for section in SECTIONS:
        of_title = (one["entrants"] for one in result["sections"] if one["section"] == section.title)
        for found in of_title:
            for entrant in section.entrants:
                if entrant.library == "zeroshard" and entrant.name in found:
                    found[entrant.name]["planned"] = plan_of(entrant, section, SIZES["cuda"], device)


def plan_of(entrant: Entrant, section: Section, sizes: Sizes, device: zs.Device) -> dict[str, float]:
    """Return what the plan says of an entrant; compiled models are planned as eager ones."""
    if section.case:
        sizes = replace(sizes, case=section.case, samples=1)
    with torch.device("meta"):
        model = make_model(CASES[sizes.case])
    if not entrant.has_masters:
        model.to(torch.bfloat16)
    plan = zs.plan(
        model,
        world_size=section.ranks,
        device=device,
        stage=entrant.stage,
        precision="bf16" if entrant.has_masters else "fp32",
        activations=entrant.activations or None,
        fused=True,
        inputs=[make_batch(CASES[sizes.case], sizes.samples, 0, 0)],
    )
    return {
        "allocated_bytes": plan.allocated_bytes,
        "reserved_bytes": plan.reserved_bytes,
        "step_s": plan.step_s,
        "exposed_s": plan.film.exposed_s,
    }


def measure_optimizer(sizes: Sizes) -> dict[str, Any]:
    """Return the seconds of optimizer steps, the bytes that one must move, and the bandwidth of a plain copy.

    The bytes: masters and states are read and written, gradients read; the modules' bf16 parameters are written.
    """
    running = build(Entrant("zeroshard", 3, has_masters=True), 1, sizes)
    times = []
    for number in range(sizes.warmup + sizes.steps):
        running.backward(_batch(sizes, number))
        wall_s, _ = _time(sizes.device, running.optimizer.step)
        times += [wall_s] if number >= sizes.warmup else []
        running.optimizer.zero_grad()
    moved = sum(parameter.nbytes for parameter in running.model.parameters())
    for group in running.optimizer.param_groups:
        for master in group["params"]:
            states = [value for value in running.optimizer.state[master].values() if value.numel() == master.numel()]
            moved += 3 * master.nbytes + 2 * sum(state.nbytes for state in states)
    source = torch.ones(sizes.copied_bytes, dtype=torch.uint8, device=sizes.device)
    target = torch.empty_like(source)
    copies = [_time(sizes.device, partial(target.copy_, source))[0] for _ in range(sizes.warmup + sizes.steps)]
    return {
        "step_s": times,
        "moved_bytes": moved,
        "copy_s": copies[sizes.warmup :],
        "copy_moved_bytes": 2 * sizes.copied_bytes,
    }


def _batch(sizes: Sizes, number: int) -> Tensor:
    return make_batch(CASES[sizes.case], sizes.samples, 0, number).to(sizes.device)


def _time(device: str, work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that some work takes, to its end on the device, and what it returns."""
    _synchronize(device)
    begin_s = time.perf_counter()
    result = work()
    _synchronize(device)
    return round(time.perf_counter() - begin_s, 6), result


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _free(device: str) -> None:
    """Give back the memory of entrants that nothing refers to any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _compare_losses(found: dict[str, Any], first: str) -> None:
    expected = found[first]["loss"]
    for one in found.values():
        pairs = zip(one["loss"][:COMPARED_STEPS], expected[:COMPARED_STEPS], strict=True)
        worst = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
        one["loss_deviation"] = float(f"{worst:.2g}")
        one["deviates"] = not worst <= LOSS_TOLERANCE


# -- command line ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """Run all sections, show their tables, and write the result file."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=list(SIZES), default="cuda")
    parser.add_argument("--only", default="", help="sections whose title contains this text")
    parser.add_argument("--output", type=Path, required=True, help="the result file, written after each section")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no section after so long")
    parser.add_argument("--resume", action="store_true", help="keep the sections of the result file")
    parser.add_argument("--steps", type=int, help="recorded steps")
    parser.add_argument("--plan", action="store_true", help="measure nothing: add plans to the result file")
    options = parser.parse_args(arguments)
    if options.plan:
        result = json.loads(options.output.read_text())
        add_plans(result)
        for section in result["sections"]:
            _show(gpu_table(section), section["section"])
        write_result(options.output, result)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu runs the script itself, with tiny sizes")
    sizes = SIZES[options.device]
    sizes = replace(sizes, steps=options.steps or sizes.steps)
    result: dict[str, Any] = {"sizes": asdict(sizes), **_circumstances(options.device), "sections": []}
    if options.resume and options.output.exists():
        result = {**json.loads(options.output.read_text()), **_circumstances(options.device), "failed": {}}
    done, end_s = {one["section"] for one in result["sections"]}, time.monotonic() + 60 * options.minutes
    for section in [section for section in SECTIONS if options.only in section.title and section.title not in done]:
        if time.monotonic() > end_s:
            print("sections are left: the same command with --resume goes on", flush=True)
            return
        try:
            result["sections"].append(measure_section(section, sizes))
        except Exception as error:
            # The other sections are measured all the same: device time is scarce.
            traceback.print_exc()
            result.setdefault("failed", {})[section.title] = f"{type(error).__name__}: {error}"
            write_result(options.output, result)
            _free(sizes.device)
            continue
        _show(gpu_table(result["sections"][-1]), section.title)
        write_result(options.output, result)
    if "optimizer" not in result and options.only in OPTIMIZER and time.monotonic() <= end_s:
        result["optimizer"] = measure_optimizer(sizes)
        _show(optimizer_table(result["optimizer"]), OPTIMIZER)
        write_result(options.output, result)


def _circumstances(device: str) -> dict[str, Any]:
    found = circumstances("benchmarks.gpu")
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["machine"] |= {"gpu": properties.name, "gpu_bytes": properties.total_memory}
        found["versions"] |= {"cuda": torch.version.cuda}
    return found


def _show(table: Sequence[str], title: str) -> None:
    print("\n".join([title, *aligned(table), ""]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
