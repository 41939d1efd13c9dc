"""A small job as users write them: it trains, saves after each step, and goes on from its newest checkpoint.

Owns the model, the loop, and how a test learns where a rank was when it was killed. All losses so far are in each
checkpoint, so two jobs that ended with equal checkpoints trained alike throughout.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard as zs
from tests.engine.oracle import randn, seed
from zeroshard.checkpoint import files

WATCHDOG_S = 20.0
PLACE_BYTES = 48
KEEP = 2


@dataclass(frozen=True)
class Kill:
    """Which ranks kill themselves, and when; none by default.

    Args:
        after_s: seconds after they began, or
        operation: in front of the file operation with this number, where it is not 0.
    """

    ranks: tuple[int, ...] = ()
    after_s: float = 0.0
    operation: int = 0


class Places:
    """Keeps in a file what this rank does right now, so that it is known after a kill.

    Args:
        operation: the number of the file operation to die in front of; 0 for none.
    """

    def __init__(self, folder: Path, rank: int, operation: int) -> None:
        self._file = os.open(folder / f"place-{rank}", os.O_RDWR | os.O_CREAT)
        self.phase = ""
        self.operations, self._last = 0, operation
        for name in files.__all__:
            self.watch(files, name, name)

    def enter(self, phase: str) -> None:
        self.phase = phase
        self._write(phase)

    def watch(self, owner: Any, name: str, what: str) -> None:
        """Write `what` beside the phase while a function runs."""
        original: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            is_main = threading.current_thread() is threading.main_thread()
            self._write(f"{self.phase if is_main else 'background save'}: {what}")
            if owner is files:
                self.operations += 1
                if self.operations == self._last:
                    die()
            try:
                return original(*args, **kwargs)
            finally:
                self._write(self.phase)

        setattr(owner, name, watched)

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


def make(stage: int, **options: Any) -> tuple[Net, torch.optim.Optimizer, zs.Zero]:
    """Return a sharded model with its optimizer; ranks draw different dropout masks."""
    seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    zero = zs.shard(model, optimizer, stage=stage, **{"watchdog_s": WATCHDOG_S} | options)
    seed(4, zero.mesh.rank)
    return model, optimizer, zero


def loss_of(model: nn.Module, step: int, rank: int, path: Sequence[int] = range(3)) -> Tensor:
    """Return the loss of a rank's batch of a step, which takes the blocks of a path."""
    ids = (randn(8, 5, key=(7, step, rank)) * 1000).long() % 13
    return nn.functional.cross_entropy(model(ids, path).flatten(0, 1), ((ids * 5 + 1) % 13).flatten())


def path_of(step: int, rank: int) -> list[int]:
    """Return the blocks that a rank uses in a step of a job with branches, as experts are: others each time."""
    return [block for block in range(3) if step % 4 and (step * (block + 1) + rank + block) % 2]


def train(
    folder: str, stage: int, steps: int, kill: Kill, asynchronous: bool = False, has_paths: bool = False
) -> list[float]:
    """Train to the end, or until the kill; return all losses. Runs on a rank, from the start of its process on."""
    begin_s, rank = time.monotonic(), int(os.environ["RANK"])
    is_mine = rank in kill.ranks
    if is_mine and not kill.operation:
        timer = threading.Timer(kill.after_s, die)
        timer.daemon = True
        timer.start()
    root = Path(folder)
    places = Places(root, rank, kill.operation if is_mine else 0)
    places.enter("join")
    zs.init(watchdog_s=WATCHDOG_S)
    places.enter("shard")
    model, optimizer, zero = make(stage)
    if zero.mesh.world_size > 1:
        places.watch(zero._engine.comm, "_wait", "wait")
    places.enter("load")
    newest = zs.latest(root / "checkpoints")
    losses: list[float] = [] if newest is None else zero.load(newest).extra["losses"]
    committed: list[str] = []
    (root / f"start-{rank}").write_text(str(time.monotonic() - begin_s))
    for step in range(len(losses), steps):
        places.enter("forward")
        loss = loss_of(model, step, rank, path_of(step, rank) if has_paths else range(3))
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
    (root / "operations").write_text(str(places.operations))
    return losses


def die() -> None:
    """End this process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def note(root: Path, rank: int, committed: list[str]) -> None:
    """Write down, outside the checkpoints, which of them are known to be committed."""
    if rank == 0:
        with (root / "committed").open("a") as ledger:
            ledger.writelines(f"{name}\n" for name in committed)
            ledger.flush()
            os.fsync(ledger.fileno())
