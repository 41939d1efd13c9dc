"""A small job as users write them: it trains, saves after each step, and goes on from its newest checkpoint.

Owns the model, the loop, and how a test learns where a rank was when it was killed. All losses so far are in each
checkpoint, so two jobs that ended with equal checkpoints trained alike throughout.
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

WATCHDOG_S = 60.0
PLACE_BYTES = 48
KEEP = 2


@dataclass(frozen=True)
class Kill:
    """Which ranks kill themselves, and when; none by default.

    Args:
        after_s: seconds after they entered the phase, or
        operation: in front of the file operation with this number, where it is not 0.
        phase: "join" is the first.
    """

    ranks: tuple[int, ...] = ()
    after_s: float = 0.0
    operation: int = 0
    phase: str = "join"


class Places:
    """Keeps in a file what this rank does right now, so that it is known after a kill, and kills it in time.

    Args:
        kill: when this rank dies; None where it does not.
    """

    def __init__(self, folder: Path, rank: int, kill: Kill | None) -> None:
        self._file = os.open(folder / f"place-{rank}", os.O_RDWR | os.O_CREAT)
        self._killed = folder / f"killed-{rank}"
        self._kill, self.phase, self.operations = kill, "", 0
        self.entered: dict[str, float] = {}
        for name in files.__all__:
            self.watch(files, name, name)

    def enter(self, phase: str) -> None:
        self.phase = phase
        self._write(phase)
        is_first = phase not in self.entered
        self.entered.setdefault(phase, time.monotonic())
        kill = self._kill
        if is_first and kill is not None and not kill.operation and kill.phase == phase:
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


class Net(nn.Module):
    """Blocks with dropout, so that the generators matter, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
        self.head = nn.Linear(16, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, path: Sequence[int] = range(3)) -> Tensor:
        x = self.embedding(ids)
        for number in path:
            x = x + nn.functional.dropout(self.blocks[number](x), 0.1)
        return self.head(x)


def make(stage: int, tensor: int = 1, **options: Any) -> tuple[Net, torch.optim.Optimizer, zs.Zero]:
    """Return a sharded model with its optimizer; ranks draw different dropout masks, but those along "tensor" do not.

    Args:
        tensor: number of ranks over which torch splits the blocks.
    """
    seed(3)
    model = Net()
    if tensor > 1:
        # The import takes half a second, in each rank.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        sizes = (dist.get_world_size() // tensor, tensor)
        options["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("shard", "tensor"))
        for block in model.blocks:
            parallelize_module(block, options["mesh"]["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=tensor == 1)
    zero = zs.shard(model, optimizer, stage=stage, **settled({"watchdog_s": WATCHDOG_S} | options))
    seed(4, zero.mesh.rank // tensor)
    return model, optimizer, zero


def loss_of(model: nn.Module, step: int, rank: int, path: Sequence[int] = range(3)) -> Tensor:
    """Return the loss of a rank's batch of a step, which takes the blocks of a path."""
    ids = (randn(8, 5, key=(7, step, rank)) * 1000).long() % 13
    return nn.functional.cross_entropy(model(ids, path).flatten(0, 1), ((ids * 5 + 1) % 13).flatten())


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
    tensor: int = 1,
) -> list[float]:
    """Train to the end, or until the kill; return all losses. Runs on a rank, from the start of its process on."""
    root, rank = Path(folder), int(os.environ["RANK"])
    places = Places(root, rank, kill if rank in kill.ranks else None)
    places.watch(start, "await_places", "await_ranks")
    places.watch(dist, "init_process_group", "init_process_group")
    places.enter("join")
    zs.init(watchdog_s=WATCHDOG_S)
    places.enter("shard")
    model, optimizer, zero = make(stage, tensor, offload=offload_of(root, stage, offload))
    place = rank // tensor
    if zero.mesh.world_size > 1:
        places.watch(zero._engine.comm.links, "wait", "wait")
    places.enter("load")
    newest = zs.latest(root / "checkpoints")
    losses: list[float] = [] if newest is None else zero.load(newest).extra["losses"]
    committed: list[str] = []
    for step in range(len(losses), steps):
        places.enter("forward")
        loss = loss_of(model, step, place, path_of(step, place) if has_paths else range(3))
        places.enter("backward")
        loss.backward()
        places.enter("update")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(zs.mean_across_ranks(loss)))
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
    (root / "operations").write_text(str(places.operations))
    return losses


def note(root: Path, rank: int, committed: list[str]) -> None:
    """Write down, outside the checkpoints, which of them are known to be committed."""
    if rank == 0:
        with (root / "committed").open("a") as ledger:
            ledger.writelines(f"{name}\n" for name in committed)
            ledger.flush()
            os.fsync(ledger.fileno())
