"""Host time of a training step whose computing is tiny: what a library costs in Python, launches and agreements.

    python -m benchmarks.hosttime --rounds 30              # 48 blocks, 64 emulated ranks; some minutes
    python -m benchmarks.hosttime --only 'zeroshard 3' --profile   # the most expensive functions of one contestant

Owns the measurement of host time by unit. On a GPU the host must queue work faster than the device does it, so this is
what bounds the step of a model whose kernels are short. Read `Contestant` first, then `measure`.

Note: emulated ranks
    One process is rank 0 of `--ranks`, on torch's fake process group, as in `benchmarks/gpu.py`: shards have the size
    that they would have, each collective is issued, and nothing travels. zeroshard runs its code for NCCL. Tensors are
    in host memory and have a handful of elements, so kernels take next to no time; the bare loop has the same kernels,
    and is subtracted.
Note: what is counted
    A launch is a call of an operator on tensors that is neither a view, nor an allocation, nor a collective. An
    agreement is a blocking wait for messages from other ranks. Launches are counted by a dispatch mode, Python
    calls by a profile function, each in steps of their own, since both slow the step down.
"""

import argparse
import cProfile
import fnmatch
import gc
import importlib.util
import pstats
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard as zs
from benchmarks.cases import GPT, TransformerBlock
from benchmarks.gpu import Nobody, fake_ranks
from benchmarks.machine import circumstances, write_result
from benchmarks.report import aligned
from zeroshard.setup.request import Request
from zeroshard.sharding import shard_over
from zeroshard.table.trace import Ledger
from zeroshard.wire.comm import Channel, Vote
from zeroshard.wire.nccl import NcclComm

__all__ = ["CONTESTANTS", "Counted", "PHASES", "Running", "build", "count_agreements", "count_launches", "main"]

PHASES: Final = ("forward", "backward", "clip", "step", "zero_grad")
WARM_UP: Final = 4
"""Rounds that are not counted: passes are agreed in the first steps."""
RESULT: Final = Path(__file__).parent / "results" / "hosttime.json"

HOWS: Final = (("median", "s", statistics.median), ("least", "s", min), ("cpu", "cpu_s", min))
"""How steps are summed up: a name, which times, and what is taken of each phase's."""

READS: Final = frozenset("_local_scalar_dense nonzero equal is_nonzero item".split())
"""Operators whose result the host waits for."""
MESSAGES: Final = frozenset(["c10d::send", "c10d::recv_"])
"""Of votes."""
_ALLOCATIONS: Final = frozenset("empty empty_like empty_strided new_empty new_empty_strided resize_ set_".split())


@final
@dataclass(frozen=True)
class Contestant:
    """Who takes part.

    Args:
        library: "bare", "zeroshard", "FSDP2" or "DeepSpeed".
        stage: what is sharded; FSDP2 at 2 keeps parameters after forward.
        precision: of zeroshard, "fp32" or "fp16".
    """

    library: str
    stage: int = 0
    precision: str = "fp32"

    @property
    def name(self) -> str:
        """For tables."""
        words = [self.library, "" if self.library == "bare" else str(self.stage), self.precision]
        return " ".join(word for word in words if word not in ("", "fp32"))

    @property
    def peer(self) -> str:
        """The contestant of FSDP2 that does the same, or most of it."""
        return f"FSDP2 {3 if self.stage == 3 else 2}"


CONTESTANTS: Final = (
    Contestant("bare"),
    *(Contestant("zeroshard", stage) for stage in range(4)),
    Contestant("FSDP2", 2),
    Contestant("FSDP2", 3),
    *([Contestant("DeepSpeed", 3)] if importlib.util.find_spec("deepspeed") else []),
)


@final
@dataclass(frozen=True)
class Running:
    """A contestant that was built.

    Args:
        clips: whether gradients are clipped before the update.
        engine: DeepSpeed's, whose loop is its own: backward and step are its methods, and it clips inside step.
        comm: zeroshard's collectives.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clips: bool
    engine: Any = None
    comm: NcclComm | None = None

    def step(self, batch: Tensor, note: Callable[[str], None]) -> None:
        """Train once; `note` is told of the end of each phase."""
        loss = (self.engine or self.model)(batch)
        note("forward")
        loss.backward() if self.engine is None else self.engine.backward(loss)
        note("backward")
        if self.clips and self.engine is None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        note("clip")
        (self.engine or self.optimizer).step()
        note("step")
        if self.engine is None:
            self.optimizer.zero_grad()
        note("zero_grad")


def build(contestant: Contestant, blocks: int, *, clips: bool) -> Running:
    """Build a contestant on the process group that there is."""
    torch.manual_seed(0)
    # Each parameter fills whole alignment units: an emulated rank would take padding of rank 0 for its own elements.
    model = GPT(blocks, width=16, vocabulary=64, sequence=8)
    for parameter in model.parameters():
        # The fake process group fills the other ranks' shards with copies of this rank's shard. Such weights are no
        # trained model, and activations may overflow; with zeros all numbers stay finite.
        nn.init.zeros_(parameter)
    if contestant.library == "FSDP2":
        _fully_shard(model, contestant.stage)
    if contestant.library == "DeepSpeed":
        return _deepspeed(model, clips=clips)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    made: list[NcclComm] = []
    if contestant.library == "zeroshard":

        def make(mesh: zs.Mesh, settings: zs.Settings, ledger: Ledger) -> NcclComm:
            made.append(NcclComm(Nobody(mesh), ledger))  # type: ignore[arg-type]
            return made[0]

        asked = Request(
            model, optimizer, stage=contestant.stage, precision=contestant.precision, units=[TransformerBlock]
        )
        shard_over(asked, zs.Mesh(0, dist.get_world_size(), 0, torch.device("cpu")), make)
    return Running(model, optimizer, clips, comm=made[0] if made else None)


def _fully_shard(model: nn.Module, stage: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(module, mesh=mesh, reshard_after_forward=stage > 2)


def _deepspeed(model: nn.Module, *, clips: bool) -> Running:
    import deepspeed

    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0 if clips else 0.0,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        },
    )
    return Running(model, optimizer, clips, engine)


def units_of(blocks: int) -> int:
    """Return the units of a model: its blocks, and all else."""
    return blocks + 1


def make_batch() -> Tensor:
    """Return one sample."""
    return torch.randint(64, (1, 9), generator=torch.Generator().manual_seed(0))


# -- counts ----------------------------------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """Counts calls of operators by phase; `note` ends one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now: Counter[str] = Counter()
        self.by_phase: dict[str, Counter[str]] = {}
        """Of each phase: launches, collectives and reads by the operator's name, with its namespace."""

    def note(self, phase: str) -> None:
        """End a phase."""
        self.by_phase[phase] = self.by_phase.get(phase, Counter()) + self._now
        self._now = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it runs operators on its local tensor, which are seen here
        name = func.overloadpacket.__name__
        if _has_tensors(func) and not (func.namespace == "aten" and (_is_view(func) or name in _ALLOCATIONS)):
            self._now[f"{func.namespace}::{name}"] += 1
        return func(*args, **(kwargs or {}))

    def launches(self, phase: str) -> int:
        """Return how many operators ran on tensors."""
        return sum(count for name, count in self.by_phase[phase].items() if "c10d" not in name)

    def collectives(self, phase: str) -> int:
        """Return how many collectives were issued; messages between hosts are none."""
        found = self.by_phase[phase].items()
        return sum(count for name, count in found if "c10d" in name and name not in MESSAGES)

    def reads(self, phase: str) -> Counter[str]:
        """Return the operators whose result the host waited for."""
        return Counter({n: c for n, c in self.by_phase[phase].items() if n.removeprefix("aten::") in READS})


def _has_tensors(func: Any) -> bool:
    """Tell whether an operator takes or returns tensors; one that compares dtypes does not."""
    return any("Tensor" in str(one.type) for one in (*func._schema.arguments, *func._schema.returns))


def _is_view(func: Any) -> bool:
    """Tell whether an operator returns an alias and writes nothing."""
    aliases = [one.alias_info for one in func._schema.returns if one.alias_info is not None]
    return func.overloadpacket.__name__ in ("detach", "lift_fresh") or (
        bool(aliases) and not any(one.is_write for one in aliases)
    )


def count_launches(running: Running, batch: Tensor) -> Counted:
    """Return what one step launches, by phase."""
    counted = Counted()
    with counted:
        running.step(batch, counted.note)
    return counted


def count_agreements(running: Running, batch: Tensor) -> dict[str, int]:
    """Return how often zeroshard's host waited for votes of all ranks, by phase; those read together are one wait."""
    comm, counts, now, is_waiting = running.comm, dict.fromkeys(PHASES, 0), 0, False
    if comm is None:
        return counts
    plain = comm.post

    def post(values: list[int], what: str, channel: Channel) -> Vote:
        nonlocal is_waiting
        vote, is_waiting = plain(values, what, channel), False

        def hear() -> list[int]:
            nonlocal now, is_waiting
            now, is_waiting = now + (not is_waiting), True
            return vote.read()

        return Vote(hear)

    def note(phase: str) -> None:
        nonlocal now
        counts[phase], now = now, 0

    comm.post = post  # type: ignore[method-assign]
    try:
        running.step(batch, note)
    finally:
        del comm.post
    return counts


def count_calls(running: Running, batch: Tensor) -> int:
    """Return the calls of Python functions in one step."""
    count = 0

    def see(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        running.step(batch, _nothing)
    finally:
        sys.setprofile(None)
    return count


def _nothing(phase: str) -> None:
    return None


# -- times -----------------------------------------------------------------------------------------------------------


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keep Python's collector out of the steps; what lives by now is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def measure(running: dict[str, Running], rounds: int, ranks: int, blocks: int) -> dict[str, dict[str, Any]]:
    """Return for each contestant its seconds by phase and round, counts of one step, and the summary of both.

    All make one step in each round, in an order drawn anew.
    """
    batch = make_batch()
    found: dict[str, dict[str, Any]] = {
        name: {f"{p}_{kind}": [] for p in PHASES for kind in ("s", "cpu_s")} for name in running
    }
    names, draw = list(running), random.Random(0)
    for number in range(WARM_UP + rounds):
        draw.shuffle(names)
        for name in names:
            gc.collect(0)
            with _quiet_collector() if number == WARM_UP else _as_it_is():
                phases = _time(running[name], batch)
            if number >= WARM_UP:
                for key, taken_s in phases.items():
                    found[name][key].append(taken_s)
    for name, one in running.items():
        counted = count_launches(one, batch)
        found[name]["launches"] = {phase: counted.launches(phase) for phase in PHASES}
        found[name]["collectives"] = {phase: counted.collectives(phase) for phase in PHASES}
        found[name]["reads"] = {phase: dict(counted.reads(phase)) for phase in PHASES}
        found[name]["agreements"] = count_agreements(one, batch)
        found[name]["python_calls"] = count_calls(one, batch)
    return found


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def _time(running: Running, batch: Tensor) -> dict[str, float]:
    phases: dict[str, float] = {}
    before_cpu_s, before_s = time.thread_time(), time.perf_counter()

    def note(phase: str) -> None:
        nonlocal before_cpu_s, before_s
        now_cpu_s, now_s = time.thread_time(), time.perf_counter()
        phases[f"{phase}_s"], phases[f"{phase}_cpu_s"] = round(now_s - before_s, 7), round(now_cpu_s - before_cpu_s, 7)
        before_cpu_s, before_s = now_cpu_s, now_s

    running.step(batch, note)
    return phases


def summarize(found: dict[str, dict[str, Any]], blocks: int) -> dict[str, dict[str, float]]:
    """Return for each contestant the microseconds by unit that its step takes beyond the bare loop's, and to FSDP2's.

    Of each phase the median and the least time on the clock, and the least CPU time, which a machine with other work
    changes least.
    """
    rows: dict[str, dict[str, float]] = {name: {} for name in found}
    for how, kind, of in HOWS:
        taken_s = {name: sum(of(one[f"{phase}_{kind}"]) for phase in PHASES) for name, one in found.items()}
        for name in found:
            rows[name][f"{how}_ms"] = 1e3 * taken_s[name]
            rows[name][f"{how}_us_by_unit"] = 1e6 * (taken_s[name] - taken_s["bare"]) / units_of(blocks)
        for contestant in CONTESTANTS:
            row, peer = rows.get(contestant.name), rows.get(contestant.peer)
            if row and peer and contestant.library == "zeroshard":
                row[f"{how}_to_fsdp2"] = row[f"{how}_us_by_unit"] / peer[f"{how}_us_by_unit"]
    return rows


# -- command line ----------------------------------------------------------------------------------------------------


def table(found: dict[str, dict[str, Any]], blocks: int) -> list[str]:
    """Return the table of one measurement, as Markdown."""
    lines = [
        "| | step, ms (least, CPU) | µs by unit (least, CPU) | to FSDP2 (least, CPU) | forward, ..., zero_grad, ms | "
        "launches | collectives | agreements | Python calls |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in summarize(found, blocks).items():
        one = found[name]
        shown = [
            "{:.{digits}f} ({:.{digits}f}, {:.{digits}f})".format(*values, digits=digits)
            for key, digits in (("ms", 1), ("us_by_unit", 0), ("to_fsdp2", 2))
            if (values := [row[f"{how}_{key}"] for how, _, _ in HOWS if f"{how}_{key}" in row])
        ]
        parts = ", ".join(f"{1e3 * min(one[f'{phase}_cpu_s']):.1f}" for phase in PHASES)
        launches, collectives, agreements = (
            "/".join(str(one[kind][phase]) for phase in PHASES[:4])
            for kind in ("launches", "collectives", "agreements")
        )
        shown += [""] * (3 - len(shown))
        lines.append(
            f"| {' | '.join([name, *shown])} | {parts} | {launches} | {collectives} | {agreements} | "
            f"{one['python_calls']:,} |"
        )
    return lines


def main(arguments: Sequence[str]) -> None:
    """Measure, show a table with and one without clipping, and write the result file."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosttime", description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--clip", choices=["with", "without", "both"], default="both")
    parser.add_argument("--only", default="*", help="contestants; patterns, commas between; the bare loop takes part")
    parser.add_argument("--profile", action="store_true", help="show one contestant's most expensive functions instead")
    parser.add_argument("--output", type=Path, help="the result file")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    patterns = ["bare", *asked.only.split(",")]
    chosen = [one for one in CONTESTANTS if any(fnmatch.fnmatch(one.name, pattern) for pattern in patterns)]
    results = []
    for clips in {"with": [True], "without": [False], "both": [True, False]}[asked.clip]:
        with fake_ranks(asked.ranks):
            running = {one.name: build(one, asked.blocks, clips=clips) for one in chosen}
            if asked.profile:
                _profile(running[chosen[-1].name])
                return
            found = measure(running, asked.rounds, asked.ranks, asked.blocks)
        print("\n".join([f"{'with' if clips else 'without'} clipping", *aligned(table(found, asked.blocks)), ""]))
        results.append({"clips": clips, "contestants": found, "summary": summarize(found, asked.blocks)})
    if asked.output:
        sizes = {"blocks": asked.blocks, "ranks": asked.ranks, "rounds": asked.rounds}
        write_result(asked.output, circumstances("benchmarks.hosttime") | sizes | {"results": results})


def _profile(running: Running) -> None:
    batch = make_batch()
    for _ in range(WARM_UP):
        running.step(batch, _nothing)
    with cProfile.Profile() as profile:
        for _ in range(10):
            running.step(batch, _nothing)
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main(sys.argv[1:])
