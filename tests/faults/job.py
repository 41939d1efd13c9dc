"""A small job as users write them: it trains, saves after each step, and goes on from its newest checkpoint.

Owns the model, the loop, and how a test learns where a rank was when it was killed. All losses so far are in each
checkpoint, so two jobs that ended with equal checkpoints trained alike throughout. A job is trained by `zs.shard`, or
by `zs.pipeline` where its layout has several places.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs
from tests.oracle import randn, seed
from tools.settled import settled
from zeroshard.checkpoint import files
from zeroshard.join import start
from zeroshard.table.pipeline import Action

from .actions import watch_actions

WATCHDOG_S = 60.0
PLACE_BYTES = 48
KEEP = 2
MICRO_BATCHES = 4
MOVING_EVERY = 10
PARTS = 4
"""Parts of the batch of a job that continues in other layouts: at most as many ranks divide it."""


@dataclass(frozen=True)
class Kill:
    """Which ranks kill themselves, and when; none by default.

    Args:
        after_s: seconds after they entered the phase, or
        operation: in front of the file operation with this number, where it is not 0, or
        action: in front of the action of a pipeline with this number, where it is not 0.
        phase: "join" is the first.
    """

    ranks: tuple[int, ...] = ()
    after_s: float = 0.0
    operation: int = 0
    action: int = 0
    phase: str = "join"


@dataclass(frozen=True)
class Layout:
    """How ranks divide a model, and a batch, beside the axis "shard".

    Args:
        tensor: number of ranks over which torch splits the blocks.
        pipe: number of places of a pipe; one for `zs.shard`.
        schedule: of the pipe.
        moves: whether the job continues in other layouts: the batch is then the same in each, dropout is off, and it
            saves after every tenth step.
    """

    tensor: int = 1
    pipe: int = 1
    schedule: str = ""
    moves: bool = False

    def __str__(self) -> str:
        pipe = f"-pipe-{self.pipe}-{self.schedule}" if self.pipe > 1 else ""
        return f"-tensor-{self.tensor}" * (self.tensor > 1) + pipe + "-moves" * self.moves


class Places:
    """Keeps in a file what this rank does right now, so that it is known after a kill, and kills it in time.

    Args:
        kill: when this rank dies; None where it does not.
    """

    def __init__(self, folder: Path, rank: int, kill: Kill | None) -> None:
        self._file = os.open(folder / f"place-{rank}", os.O_RDWR | os.O_CREAT)
        self._killed = folder / f"killed-{rank}"
        self._kill, self.phase, self.operations, self.actions = kill, "", 0, 0
        self.entered: dict[str, float] = {}
        for name in files.__all__:
            self.watch(files, name, name)

    def enter(self, phase: str) -> None:
        self.phase = phase
        self._write(phase)
        is_first = phase not in self.entered
        self.entered.setdefault(phase, time.monotonic())
        kill = self._kill
        if is_first and kill is not None and not (kill.operation or kill.action) and kill.phase == phase:
            timer = threading.Timer(kill.after_s, self.die)
            timer.daemon = True
            timer.start()

    def watch(self, owner: Any, name: str, what: str) -> None:
        """Write `what` beside the phase while a function runs."""
        original: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            is_main = threading.current_thread() is threading.main_thread()
            self._write(f"{self.phase if is_main else 'background save'}: {what}")
            if owner is files:
                self.operations += 1
                if self._kill is not None and self.operations == self._kill.operation:
                    self.die()
            try:
                return original(*args, **kwargs)
            finally:
                self._write(self.phase)

        setattr(owner, name, watched)

    def act(self, action: Action) -> None:
        """Write the kind of a pipeline's action, which begins, beside the phase."""
        self._write(f"{self.phase}: {action.kind.name.lower().replace('_', ' ')}")
        self.actions += 1
        if self._kill is not None and self.actions == self._kill.action:
            self.die()

    def die(self) -> None:
        """Note the time, and end this process as the kernel does when memory runs out."""
        self._killed.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def _write(self, text: str) -> None:
        os.pwrite(self._file, text.encode().ljust(PLACE_BYTES)[:PLACE_BYTES], 0)


def place_of(folder: Path, rank: int) -> str:
    """Return what a rank did last."""
    path = folder / f"place-{rank}"
    return path.read_text().strip() if path.exists() else "before the start"


class Block(nn.Sequential):
    """A residual block with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(super().forward(x), self.dropout)


class Net(nn.Module):
    """Blocks with dropout, so that the generators matter, and a tied weight."""

    def __init__(self, depth: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 16)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))
        self.head = nn.Linear(16, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, path: Sequence[int] | None = None) -> Tensor:
        x = self.embedding(ids)
        for number in range(len(self.blocks)) if path is None else path:
            x = self.blocks[number](x)
        return self.head(x)


def make(stage: int, layout: Layout = Layout(), **options: Any) -> tuple[Net, torch.optim.Optimizer, zs.Zero]:
    """Return a sharded model with its optimizer; ranks with one batch draw the same dropout masks, others do not."""
    model, optimizer, pipe = make_pipe(stage, layout, **options)
    return model, optimizer, pipe.zero if isinstance(pipe, zs.Pipeline) else pipe


def make_pipe(stage: int, layout: Layout, **options: Any) -> tuple[Net, torch.optim.Optimizer, zs.Pipeline | zs.Zero]:
    """Return, as `make`, the pipeline of a layout with several places; the handle of `zs.shard` without."""
    seed(3)
    tensor, pipe = layout.tensor, layout.pipe
    # A pipe of four places, or of two that have two chunks each, needs four blocks.
    model = Net(**({"dropout": 0.0} if layout.moves else {}), **({"depth": 4} if pipe > 1 or layout.moves else {}))
    if tensor > 1 or pipe > 1:
        # The import takes half a second, in each rank.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        axes = {"pipe": pipe, "shard": dist.get_world_size() // (tensor * pipe), "tensor": tensor}
        axes = {name: size for name, size in axes.items() if size > 1 or name == "shard"}
        options["mesh"] = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        for block in model.blocks if tensor > 1 else ():
            parallelize_module(block, options["mesh"]["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    # In 100 steps the higher rate would bring losses to 1e-6, of which rounding is a part.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if layout.moves else 1e-2, fused=tensor == 1)
    options = {"stage": stage, **settled({"watchdog_s": WATCHDOG_S} | options)}
    handle: zs.Pipeline | zs.Zero
    if pipe > 1:
        options |= {"micro_batches": MICRO_BATCHES, "schedule": layout.schedule, "loss": cross_entropy}
        handle = zs.pipeline(model, optimizer, **options)
    else:
        handle = zs.shard(model, optimizer, **options)
    seed(4, data_rank(handle.zero if isinstance(handle, zs.Pipeline) else handle, layout))
    return model, optimizer, handle


def data_rank(zero: zs.Zero, layout: Layout) -> int:
    """Return the number of this rank among those that have other batches."""
    return zero.mesh.rank // layout.tensor


def ids_of(step: int, rank: int) -> Tensor:
    """Return a rank's batch of a step."""
    return (randn(8, 5, key=(7, step, rank)) * 1000).long() % 13


def cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the loss of a model that learns a permutation of ids."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), ((ids * 5 + 1) % 13).flatten())


def loss_of(model: nn.Module, step: int, rank: int, path: Sequence[int] | None = None) -> Tensor:
    """Return the loss of a rank's batch of a step, which takes the blocks of a path."""
    ids = ids_of(step, rank)
    return cross_entropy(model(ids, path), ids)


def path_of(step: int, rank: int) -> list[int]:
    """Return the blocks that a rank uses in a step of a job with branches, as experts are: others each time."""
    return [block for block in range(3) if step % 4 and (step * (block + 1) + rank + block) % 2]


def offload_of(root: Path, stage: int, to: str) -> zs.Offload | None:
    """Return what lies elsewhere: states and, at stage 3, parameters; to "host", "files" or, for nothing, ""."""
    if not to:
        return None
    return zs.Offload(parameters=float(stage == 3), to="host" if to == "host" else root)


def train(
    folder: str,
    stage: int,
    steps: int,
    kill: Kill,
    asynchronous: bool = False,
    has_paths: bool = False,
    offload: str = "",
    layout: Layout = Layout(),
) -> list[float]:
    """Train to the end, or until the kill; return all losses. Runs on a rank, from the start of its process on."""
    root, rank = Path(folder), int(os.environ["RANK"])
    places = Places(root, rank, kill if rank in kill.ranks else None)
    places.watch(start, "await_places", "await_ranks")
    places.watch(dist, "init_process_group", "init_process_group")
    places.enter("join")
    zs.init(watchdog_s=WATCHDOG_S)
    places.enter("shard")
    model, optimizer, handle = make_pipe(stage, layout, offload=offload_of(root, stage, offload))
    zero = handle.zero if isinstance(handle, zs.Pipeline) else handle
    place, ranks = data_rank(zero, layout), zero.mesh.world_size // layout.tensor
    # The parts of each step's batch that are this rank's: one, or its share of those of all layouts.
    count = PARTS if layout.moves else ranks
    parts = range(place * count // ranks, (place + 1) * count // ranks)
    if isinstance(handle, zs.Pipeline):
        watch_actions(places.act)
    elif zero.mesh.world_size > 1:
        places.watch(zero._engine.comm.links, "wait", "wait")
    places.enter("load")
    newest = zs.latest(root / "checkpoints")
    losses: list[float] = [] if newest is None else zero.load(newest).extra["losses"]
    committed: list[str] = []
    for step in range(len(losses), steps):
        ids = torch.cat([ids_of(step, part) for part in parts])
        if isinstance(handle, zs.Pipeline):
            places.enter("step")
            mean = handle.step(ids, ids)
        else:
            places.enter("forward")
            loss = cross_entropy(model(ids, path_of(step, place) if has_paths else None), ids)
            places.enter("backward")
            loss.backward()
            mean = zs.mean_across_ranks(loss)
        places.enter("update")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(mean))
        if layout.moves and (step + 1) % MOVING_EVERY:
            continue
        places.enter("save")
        # Only once a save has returned is the one before, which may have gone on in the background, known to be there.
        path = zero.save(
            root / "checkpoints" / f"step-{step + 1:04d}",
            extra={"losses": losses},
            asynchronous=asynchronous,
            keep=KEEP,
        )
        committed.append(path.name)
        note(root, rank, committed[-2:-1] if asynchronous else committed[-1:])
    places.enter("wait")
    zero.wait()
    note(root, rank, committed[-1:])
    places.enter("end")
    (root / f"entered-{rank}").write_text(json.dumps(places.entered))
    (root / f"counts-{rank}").write_text(json.dumps([places.operations, places.actions]))
    return losses


def note(root: Path, rank: int, committed: list[str]) -> None:
    """Write down, outside the checkpoints, which of them are known to be committed."""
    if rank == 0:
        with (root / "committed").open("a") as ledger:
            ledger.writelines(f"{name}\n" for name in committed)
            ledger.flush()
            os.fsync(ledger.fileno())
