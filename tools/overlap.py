"""How much computation lies between issue and wait of collectives and copies, in a steady step on an emulated device.

    python -m tools.overlap     # a table: what is exposed, by stage, replicas, wire, accumulation, treatment, offload

Owns the measurement. Read `tools/emulated.py` first: the engine and its transport are the product's, so a wait that is
moved is seen here. Computation is the products that torch dispatches, in forwards of a block; its backward is two.
"""

import argparse
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import zeroshard as zs
from tools.emulated import Device, Work, gpu
from tools.emulated_copies import Bus, late_bus
from zeroshard.testing import run_ranks

__all__ = ["CASES", "Case", "Wait", "exposed", "measure"]

BLOCKS, WIDTH, ROWS, STEPS = 5, 16, 8, 6
BLOCK_FLOPS: Final = 2 * ROWS * 2 * 4 * WIDTH * WIDTH
"""Of a block's forward."""
WHAT: Final = re.compile(
    r"the (?P<what>gather|reduction|updated parameters) of (?:unit '(?P<unit>[^']*)'|the root unit)"
    r"(?: in (?P<phase>forward|backward))?"
)


@final
@dataclass(frozen=True)
class Case:
    """A configuration of a run.

    Args:
        replicas: number of copies of the state; 1 for none.
        reduce: the dtype of gradients in messages.
        offload: whether states and gradients are on the host.
    """

    stage: int
    replicas: int = 1
    reduce: str = "float32"
    micro_batches: int = 1
    activations: str | None = None
    offload: bool = False

    def __str__(self) -> str:
        parts = [f"stage {self.stage}", f"{self.replicas} copies" * (self.replicas > 1), self.reduce]
        parts += ["2 micro-batches" * (self.micro_batches > 1), self.activations or ""]
        parts += ["offload" * self.offload]
        return ", ".join(filter(None, parts))


CASES: Final = tuple(
    Case(*options)
    for options in itertools.product((1, 2, 3), (1, 2), ("float32", "bfloat16"), (1, 2), (None, "recompute"))
) + tuple(
    Case(stage, copies, micro_batches=micro_batches, offload=True)
    for stage, copies, micro_batches in itertools.product((2, 3), (1, 2), (1, 2))
)


@final
@dataclass(frozen=True)
class Wait:
    """A collective of a unit.

    Args:
        kind: such as "gather in forward", "all-reduce in backward" or "copy out".
        hidden: computation between its issue and its wait, in forwards of a block.
    """

    kind: str
    unit: str
    hidden: float

    @property
    def is_exposed(self) -> bool:
        """Whether less than half a forward of a block lies beside it."""
        return self.hidden < 0.5


class Block(nn.Module):
    """A block of products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, width)."""
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Blocks between the layers of the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, width)."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Clock(TorchDispatchMode):
    """The products that torch has dispatched so far, in forwards of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.now += (
            flop_registry.get(func._overloadpacket, _no_flops)(*args, **(kwargs or {}), out_val=made) / BLOCK_FLOPS
        )
        return made


def _no_flops(*_: Any, **__: Any) -> int:
    return 0


@contextmanager
def watched(clock: Clock, waits: list[Wait]) -> Iterator[None]:
    """Note each wait for a collective of a unit."""
    begun: dict[int, float] = {}
    plain_issue, plain_wait = Device.issue, Device.wait

    def issue(device: Device, stream: str, work: Work) -> Work:
        begun[id(work)] = clock.now
        return plain_issue(device, stream, work)

    def wait(device: Device, work: Work) -> None:
        if (found := WHAT.match(work.what)) is not None:
            what = "publish" if found["what"] == "updated parameters" else work.name.partition(" ")[0]
            kind = f"{what} in {found['phase']}" if found["phase"] else what
            waits.append(Wait(kind, found["unit"] or "root", clock.now - begun[id(work)]))
        plain_wait(device, work)

    with patch.object(Device, "issue", issue), patch.object(Device, "wait", wait):
        yield


def measure(case: Case) -> list[Wait]:
    """Return what a rank waits for in a steady step, from one forward's beginning to the next one's.

    Collective: every rank must call.
    """
    clock, waits = Clock(), list[Wait]()
    bus = Bus(
        eagerness=0.0,
        waited=lambda copy: waits.append(Wait(f"copy {copy.lane}", copy.name or "root", clock.now - copy.begun)),
        now=lambda: clock.now,
    )
    with gpu(case.stage) as device, watched(clock, waits), late_bus(bus) if case.offload else nullcontext():
        device.eagerness = 0.0
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        zero = zs.shard(
            model,
            optimizer,
            stage=case.stage,
            mesh=case.replicas if case.replicas > 1 else None,
            units=[Block],
            activations=case.activations,
            offload="host" if case.offload else None,
            precision=zs.Precision(reduce=getattr(torch, case.reduce)),
        )
        with clock:
            for _ in range(STEPS):
                waits.clear()
                for _ in range(case.micro_batches):
                    model(torch.randn(ROWS, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found = [*waits]
        zero._engine.await_published()
    return found


def exposed(case: Case) -> list[str]:
    """Return what is exposed in a steady step, with the count where that is more than one."""
    ranks = run_ranks(measure, 2 * case.replicas, case, timeout_s=120)
    found = [f"{one.kind}: {one.unit}" for one in ranks[0] if one.is_exposed]
    return [f"{one} ({count} times)" if (count := found.count(one)) > 1 else one for one in dict.fromkeys(found)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    argparse.ArgumentParser(description="Say which collectives have no computation beside them.").parse_args(arguments)
    print("| configuration | exposed in a steady step |\n|---|---|")
    for case in CASES:
        print(f"| {case} | {'; '.join(exposed(case))} |", flush=True)


if __name__ == "__main__":
    main()
