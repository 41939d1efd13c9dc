"""What a fault becomes: an error, a silently wrong training, or a wait. The same faults, here and in FSDP2 with DCP.

    python -m benchmarks.silence --output benchmarks/results/silence.json

Owns the faults and the judgement; `zeroshard.testing` owns the ranks. A job is the same small model, data and AdamW for
both; what differs is how it is sharded and saved. The judgement is by values, never by messages alone: silent means
that nothing was raised on any rank although the result is not that of the job without the fault.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import random
import re
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import zeroshard as zs
from benchmarks.machine import circumstances, write_result
from zeroshard.testing import RankFailure, run_ranks

__all__ = ["main"]

WORLD = 2
STEPS = 4
WIDTH = 64
PATIENCE_S = 8.0
"""How long a process group waits before it gives up; torch's default for gloo is 1,800 s."""
HEARTBEAT_S = 2.0
SHOWN = 110
"""Characters of an error that the table shows."""


class Net(nn.Module):
    """Two layers and two experts of one shape, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        """Return one number for each row."""
        out: Tensor = self.last(torch.tanh(self.experts[chosen](torch.tanh(self.first(x)))))
        return out


class Job(Protocol):
    """A model and an optimizer, sharded."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def whole(self) -> dict[str, Tensor]:
        """Return the parameters, whole, on every rank."""

    def save(self, path: str) -> None:
        """Write a checkpoint."""

    def load(self, path: str) -> None:
        """Read a checkpoint."""


@final
class Ours:
    """This library, at the stage that shards most."""

    name = "zeroshard"

    def __init__(self, model: nn.Module, rate: float) -> None:
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=rate)
        self.zero = zs.shard(
            model, self.optimizer, stage=3, settings=zs.Settings(watchdog_s=PATIENCE_S, heartbeat_s=HEARTBEAT_S)
        )

    def whole(self) -> dict[str, Tensor]:
        """Return the parameters, whole, on every rank."""
        with self.zero.gathered():
            return {name: value.clone() for name, value in self.model.state_dict().items()}

    def save(self, path: str) -> None:
        """Write a checkpoint."""
        self.zero.save(path)

    def load(self, path: str) -> None:
        """Read a checkpoint."""
        self.zero.load(path)

    @staticmethod
    def second(path: str) -> str:
        """Return where a second checkpoint goes: beside the first, for nothing is ever overwritten."""
        return path.replace("step-1", "step-2")


@final
class Theirs:
    """FSDP2, and DCP for its checkpoints, as their tutorials have it."""

    name = "FSDP2 + DCP"

    def __init__(self, model: nn.Module, rate: float) -> None:
        for layer in (model.first, *model.experts, model.last):
            fully_shard(layer)
        self.model = fully_shard(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def whole(self) -> dict[str, Tensor]:
        """Return the parameters, whole, on every rank."""
        return {name: value.full_tensor().clone() for name, value in self.model.state_dict().items()}

    def save(self, path: str) -> None:
        """Write a checkpoint."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load(self, path: str) -> None:
        """Read a checkpoint."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    @staticmethod
    def second(path: str) -> str:
        """Return where a second checkpoint goes: over the first, which DCP allows."""
        return path


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong on rank 1. None of it: the job as it should be."""

    seed: int = 0
    rate: float = 0.01
    value: float = 1.0
    expert: int = 0
    raises: bool = False
    stops: bool = False
    folder: str = ""


def make(kind: type[Ours] | type[Theirs], fault: Fault) -> Job:
    """Return a job of a kind, with what is wrong from its start."""
    # Their collectives wait as long as the process group says, and ours as long as the watchdog.
    for group in {dist.group.WORLD, *dist.distributed_c10d._world.pg_map}:
        group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=PATIENCE_S))
    is_faulty = dist.get_rank() == 1
    torch.manual_seed(fault.seed if is_faulty else 0)
    return kind(Net(), fault.rate if is_faulty else 0.01)


def train(kind: type[Ours] | type[Theirs], fault: Fault) -> dict[str, Tensor]:
    """Train with a fault; return the parameters. Runs on a rank."""
    job, rank = make(kind, fault), dist.get_rank()
    is_faulty = rank == 1
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(100 * step + rank)
        rows = torch.randn(8, WIDTH, generator=draw)
        loss = job.model(rows, fault.expert if is_faulty else 0).square().mean()
        if is_faulty and step == STEPS - 2:
            if fault.raises or fault.stops:
                Path(fault.folder, "began").write_text(repr(time.time()))
            if fault.raises:
                raise ArithmeticError("planted")
            if fault.stops:
                os.kill(os.getpid(), signal.SIGSTOP)
            loss = loss * fault.value
        loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    return job.whole()


def note_end(kind: type[Ours] | type[Theirs], fault: Fault) -> dict[str, Tensor]:
    """Train, and write down what the end of this rank was, and when. Runs on a rank."""
    rank = dist.get_rank()
    said = os.open(f"{fault.folder}/said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 2)
    try:
        return train(kind, fault)
    except Exception as error:
        os.write(said, f"{type(error).__name__}: {error}".encode())
        raise


# -- judgements -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a fault: "error", "right" (no error was needed), "silent" or "wait", and in what way."""

    verdict: str
    detail: str


def judge_training(kind: type[Ours] | type[Theirs], fault: Fault) -> Outcome:
    """Compare a training with a fault against the same one without."""
    right = run_ranks(train, WORLD, kind, Fault())[0]
    try:
        got = run_ranks(train, WORLD, kind, fault, grace_s=2 * PATIENCE_S)
    except RankFailure as failure:
        return Outcome("error", _errors(failure))
    bad = sum(int((~value.isfinite()).sum()) for value in got[0].values())
    numel = sum(value.numel() for value in got[0].values())
    if bad:
        return Outcome("silent", f"{bad} of {numel} parameter elements are NaN, exit status 0")
    if all(torch.equal(got[0][name], value) for name, value in right.items()):
        return Outcome("right", "trains as without it")
    gap = max(float((got[0][name] - value).abs().max()) for name, value in right.items())
    return Outcome("silent", f"another model, by up to {gap:.2g}, exit status 0")


def judge_experts(kind: type[Ours] | type[Theirs], fault: Fault) -> Outcome:
    """Compare a training in which rank 1 uses another expert against DDP with unused parameters."""
    right = run_ranks(train_in_ddp, WORLD, fault)[0]
    try:
        got = run_ranks(train, WORLD, kind, fault, timeout_s=60.0, grace_s=2 * PATIENCE_S)[0]
    except RankFailure as failure:
        return Outcome("error", _errors(failure))
    gap = max(float((got[name] - value).abs().max()) for name, value in right.items())
    if gap < 1e-5:
        return Outcome("right", "trains as DDP with unused parameters does")
    return Outcome("silent", f"parameters differ from DDP's by up to {gap:.2g}, exit status 0")


def train_in_ddp(fault: Fault) -> dict[str, Tensor]:
    """Train the job with DistributedDataParallel. Runs on a rank."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
        rows = torch.randn(8, WIDTH, generator=draw)
        model(rows, fault.expert if dist.get_rank() == 1 else 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def judge_end(kind: type[Ours] | type[Theirs], fault: Fault) -> Outcome:
    """Measure how long the other rank takes to end after rank 1 failed, and whether it says why."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_ranks(note_end, WORLD, kind, dataclasses.replace(fault, folder=folder), grace_s=2 * PATIENCE_S)
        except RankFailure:
            began, said = float(Path(folder, "began").read_text()), Path(folder, "said-0")
            seconds, text = said.stat().st_mtime - began, said.read_text()
        else:
            return Outcome("silent", "exit status 0")
    is_named = "planted" in text if fault.raises else "rank 1" in text
    named = "names the cause" if is_named else "does not name the cause"
    is_wait = seconds > PATIENCE_S - 1.0
    after = f"{seconds:.1f} s, the whole timeout (by default 1,800 s)" if is_wait else f"{seconds:.1f} s"
    return Outcome("wait" if is_wait else "error", f"the other rank ends after {after}, and {named}")


def _errors(failure: RankFailure) -> str:
    first = next(iter(failure.errors.values()))
    ranks = "all ranks" if len(failure.errors) == WORLD else f"{len(failure.errors)} of {WORLD} ranks"
    text = re.sub(r"^\[rank \d+/\d+\] |\S+/(?=step-)", "", " ".join(first.message.split()))
    return f"{ranks}, {first.type_name}: {text[:SHOWN]}{'…' if len(text) > SHOWN else ''}"


# -- checkpoints ------------------------------------------------------------------------------------------------------


def write(kind: type[Ours] | type[Theirs], path: str) -> dict[str, Tensor]:
    """Write a checkpoint of a new job; return its parameters. Runs on a rank."""
    job = make(kind, Fault())
    job.save(path)
    return job.whole()


def read_damaged(kind: type[Ours] | type[Theirs], path: str, flips: list[tuple[str, int]]) -> list[tuple[str, bool]]:
    """Load a checkpoint with each of the bits flipped in turn; return errors and whether what is in memory is right."""
    warnings.simplefilter("ignore")
    job = make(kind, Fault())
    job.load(path)
    right, found = _everything(job), []
    for name, bit in flips:
        if dist.get_rank() == 0:
            flip(Path(path, name), bit)
        dist.barrier()
        error = ""
        try:
            job.load(path)
        except BaseException as caught:  # DCP's own exception is no Exception
            error = str(caught) or type(caught).__name__
        is_right = all(torch.equal(a, b) for a, b in zip(right, _everything(job), strict=True))
        dist.barrier()
        if dist.get_rank() == 0:
            flip(Path(path, name), bit)
        dist.barrier()
        found.append((error, is_right))
    return found


def _everything(job: Job) -> list[Tensor]:
    """Return this rank's parameters and states, bit by bit."""
    states = [value for state in job.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    tensors = [*job.whole().values(), *(s.to_local() if hasattr(s, "to_local") else s for s in states)]
    return [t.detach().clone().contiguous().reshape(-1).view(torch.uint8) for t in tensors]


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def judge_flips(kind: type[Ours] | type[Theirs], count: int = 200) -> Outcome:
    """Flip bits of a checkpoint's files, one at a time, spread evenly over all bytes, and load."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/step-1"
        run_ranks(write, WORLD, kind, path)
        sizes = {p.relative_to(path).as_posix(): p.stat().st_size for p in sorted(Path(path).rglob("*")) if p.is_file()}
        draw = random.Random(1)
        flips = []
        for _ in range(count):
            place = draw.randrange(8 * sum(sizes.values()))
            for name, nbytes in sizes.items():
                if place < 8 * nbytes:
                    flips.append((name, place))
                    break
                place -= 8 * nbytes
        found = run_ranks(read_damaged, WORLD, kind, path, flips, timeout_s=300.0)
    silent = [not a[0] and not b[0] and not (a[1] and b[1]) for a, b in zip(*found, strict=True)]
    harmless = sum(not a[0] and not b[0] and a[1] and b[1] for a, b in zip(*found, strict=True))
    detail = f"{sum(silent)} of {count} flipped bits loaded as other values, {harmless} had no effect"
    return Outcome("silent" if any(silent) else "error", f"{detail}, the rest were errors")


def save_twice(kind: type[Ours] | type[Theirs], path: str, part: float) -> None:
    """Save a job three times, the last time all of it changed; rank 1 is killed meanwhile. Runs on a rank.

    Args:
        part: when it is killed, as a part of the time that the save before took.
    """
    job = make(kind, Fault())
    job.save(f"{path}0")
    dist.barrier()
    begin_s = time.monotonic()
    job.save(path)
    took_s = time.monotonic() - begin_s
    rank = dist.get_rank()
    with torch.no_grad():
        # The optimizer's entries are this rank's parts of the parameters, in both.
        for entry in job.optimizer.param_groups[0]["params"]:
            entry.fill_(7.0)
    if isinstance(job, Ours):
        job.zero._engine.masters_changed()
    dist.barrier()
    if rank == 1:
        threading.Timer(part * took_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    job.save(kind.second(path))
    time.sleep(2.0)


def read_back(kind: type[Ours] | type[Theirs], path: str) -> dict[str, Tensor]:
    """Load a checkpoint; return the parameters. Runs on a rank."""
    job = make(kind, Fault(seed=5))
    second = kind.second(path)
    job.load(second if Path(second).exists() else path)
    return job.whole()


def judge_killed_saves(kind: type[Ours] | type[Theirs], count: int = 12) -> Outcome:
    """Kill rank 1 while it saves once more, and load what is the newest checkpoint then."""
    old = mixed = lost = new = 0
    draw = random.Random(2)
    for _ in range(count):
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/step-1"
            with contextlib.suppress(RankFailure):
                run_ranks(save_twice, WORLD, kind, path, draw.uniform(0.0, 1.5), grace_s=0.5)
            try:
                values = torch.cat([v.reshape(-1) for v in run_ranks(read_back, WORLD, kind, path)[0].values()])
            except RankFailure:
                lost += 1
                continue
            share = float((values == 7.0).float().mean())
            old, new, mixed = old + (share == 0.0), new + (share == 1.0), mixed + (0.0 < share < 1.0)
    detail = f"of {count}: {old} times the old one, {new} the new one, {mixed} a mixture of both, {lost} unreadable"
    return Outcome("silent" if mixed else "lost" if lost else "right", detail)


def judge_dtype(kind: type[Ours] | type[Theirs]) -> Outcome:
    """Load a checkpoint of fp32 into a model of bf16."""
    with tempfile.TemporaryDirectory() as folder:
        saved = run_ranks(write, WORLD, kind, f"{folder}/step-1")[0]
        try:
            got = run_ranks(read_into_bf16, WORLD, kind, f"{folder}/step-1")[0]
        except RankFailure as failure:
            return Outcome("error", _errors(failure))
    changed = sum(int((got[name].float() != value).sum()) for name, value in saved.items())
    numel = sum(value.numel() for value in saved.values())
    return Outcome("silent" if changed else "right", f"{changed} of {numel} values are rounded, exit status 0")


def read_into_bf16(kind: type[Ours] | type[Theirs], path: str) -> dict[str, Tensor]:
    """Load a checkpoint into a job of another dtype; return its parameters. Runs on a rank."""
    torch.manual_seed(5)
    job = kind(Net().bfloat16(), 0.01)
    job.load(path)
    return job.whole()


FAULTS: tuple[tuple[str, Callable[[type[Ours] | type[Theirs]], Outcome]], ...] = (
    ("one rank's loss is NaN", lambda kind: judge_training(kind, Fault(value=math.nan))),
    ("one rank has another seed", lambda kind: judge_training(kind, Fault(seed=1))),
    ("one rank has another learning rate", lambda kind: judge_training(kind, Fault(rate=0.02))),
    ("ranks use different experts of one shape", lambda kind: judge_experts(kind, Fault(expert=1))),
    ("one rank raises an exception", lambda kind: judge_end(kind, Fault(raises=True))),
    ("one rank is stopped (SIGSTOP)", lambda kind: judge_end(kind, Fault(stops=True))),
    ("one bit of a checkpoint is flipped", judge_flips),
    ("kill -9 during a second save", judge_killed_saves),
    ("a checkpoint of another dtype", judge_dtype),
)


def to_markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table that people read."""
    lines = [f"| fault | {Ours.name} | {Theirs.name} |", "|---|---|---|"]
    for row in rows:
        cells = [f"**{row[name]['verdict']}**: {row[name]['detail']}" for name in (Ours.name, Theirs.name)]
        lines.append(f"| {row['fault']} | {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def start_silent_ranks() -> None:
    """Start the server that ranks are forked from without a terminal: what they raise is judged, not shown."""
    mine = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        run_ranks(os.getpid, 1, process_group=False)
        os.dup2(mine, 2)
    os.close(mine)


def main() -> None:
    """Plant every fault in both, print the table, and write it."""
    parser = argparse.ArgumentParser(description="The same faults here and in FSDP2 with DCP.")
    parser.add_argument("--output", type=Path, help="a JSON file; the table goes beside it, as .md")
    parser.add_argument("--only", default="", help="faults whose name contains this")
    arguments = parser.parse_args()
    start_silent_ranks()
    rows: list[dict[str, Any]] = []
    for name, judge in FAULTS:
        if arguments.only in name:
            row: dict[str, Any] = {"fault": name}
            for kind in (Ours, Theirs):
                row[kind.name] = dataclasses.asdict(judge(kind))
            rows.append(row)
            print(to_markdown([row]).splitlines()[-1], flush=True)
    if arguments.output:
        about = {"ranks": WORLD, "timeout_s": PATIENCE_S, "heartbeat_s": HEARTBEAT_S, "faults": rows}
        write_result(arguments.output, circumstances("benchmarks.silence") | about)
        arguments.output.with_suffix(".md").write_text(to_markdown(rows))


if __name__ == "__main__":
    main()
