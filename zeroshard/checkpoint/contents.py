"""What a save writes: which tensors, which ranges of them by which rank, and what all ranks have in common.

Owns the plan of a save and the agreement on it, before any file is made. Read `inventory.py` and `together.py` first.
"""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from zeroshard.checkpoint import strict
from zeroshard.checkpoint.generators import read_generators
from zeroshard.checkpoint.inventory import Item, aliases_of, generator_items, groups_of, model_items, state_items
from zeroshard.checkpoint.manifest import EXTRA, Chunk, Spec
from zeroshard.checkpoint.together import agree_equal
from zeroshard.checkpoint.values import encode
from zeroshard.core.engine import Engine
from zeroshard.core.errors import CheckpointError
from zeroshard.core.optimizer import ShardedOptimizer

__all__ = ["ADVICE", "COMMITTED", "KINDS", "LOOK", "Plan", "agree_on", "make_plan"]

ADVICE: Final = "Nothing was committed, and checkpoints from before are as they were."
LOOK: Final = "Look with `zeroshard checkpoint ls` whether it is there."
COMMITTED: Final = "The new one is committed."
KINDS: Final = ("model", "state")
"""Each rank writes a file of each kind."""

LEAST_KEPT: Final = 2
_INTEGERS: Final = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


@dataclass(frozen=True)
class Plan:
    """What is saved where; the same on all ranks but for the items' values.

    Args:
        extra: the text of `extra.json`.
        keep: how many of the checkpoints that expire stay, this one included; None where this one does not expire.
    """

    path: Path
    step: int
    world_size: int
    items: tuple[Item, ...]
    aliases: Mapping[str, str]
    extra: bytes
    keep: int | None

    @property
    def specs(self) -> list[Spec]:
        """The tensors, in the manifest's order."""
        return [item.spec for item in self.items]

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks' tensors and of `extra.json`."""
        return len(self.extra) + sum(spec.numel * spec.item_bytes for spec in self.specs)

    def chunks(self, kind: str, rank: int) -> tuple[Chunk, ...]:
        """Return what a rank writes into its file of a kind, in order."""
        found = []
        for place, item in enumerate(self.items):
            start, stop = item.written_by(rank)
            if (item.spec.kind == "model") == (kind == "model") and stop > start:
                found.append(Chunk(place, start, stop))
        return tuple(found)

    def values(self, kind: str, rank: int) -> Iterator[torch.Tensor]:
        """Yield the values of these chunks, each flat; `rank` must be this one."""
        for chunk in self.chunks(kind, rank):
            yield self.items[chunk.tensor].part(chunk.start, chunk.stop)


def make_plan(
    engine: Engine,
    model: nn.Module,
    optimizers: Sequence[ShardedOptimizer],
    path: Path,
    extra: Mapping[str, Any],
    step: int | None,
    keep: int | None,
) -> Plan:
    """Look at what there is to be saved.

    Raises:
        CheckpointError, ValueError: something can not be saved, or an argument is wrong.
    """
    if not path.name or path.name.startswith("."):
        raise ValueError(f"path must be a new folder whose name does not begin with a dot; got '{path}'.")
    if keep is not None and keep < LEAST_KEPT:
        raise ValueError(
            f"keep must be at least {LEAST_KEPT}, so that one is left while another is damaged; got {keep}."
        )
    if step is None:
        number = re.search(r"step[-_]?(\d{1,18})$", path.name)
        step = int(number[1]) if number else max((one.steps for one in optimizers), default=0)
    scale = engine.loss_scale
    common = {
        "extra": encode(dict(extra), "extra"),
        "loss_scale": None if scale is None else [scale.value, scale._good_steps, encode(scale.history, "history")],
        "optimizers": encode(groups_of(optimizers), "the optimizers"),
    }
    items = model_items(engine, model) + state_items(optimizers)
    items += generator_items(engine, read_generators(engine.mesh.device))
    text = strict.dumps(common, EXTRA)
    return Plan(path, step, engine.mesh.world_size, tuple(items), aliases_of(engine, model), text, keep)


def agree_on(engine: Engine, plan: Plan, what: str, options: str) -> None:
    """Raise unless all ranks save the same, in the same way, and unless what they have in copies is equal.

    Args:
        options: what else must be equal.
    """
    common = [repr(plan.specs), repr(sorted(plan.aliases.items())), plan.step, str(plan.path), str(plan.keep), options]
    message = "ranks were given different paths, steps or options, or their optimizers hold different states. " + ADVICE
    digest = zlib.crc32(strict.dumps(common, what))
    agree_equal(engine, f"{what}: comparing what is to be saved", digest, message)
    message = (
        "extra, or the optimizers' hyper-parameters or step counters, differ between ranks, and a checkpoint holds "
        "one. Give the same on every rank: gather what belongs to a rank first. " + ADVICE
    )
    agree_equal(engine, f"{what}: comparing extra and hyper-parameters", zlib.crc32(plan.extra), message)
    _agree_on_copies(engine, plan.items, what)


def _agree_on_copies(engine: Engine, items: Sequence[Item], what: str) -> None:
    """Raise where ranks hold the same elements with different values. Collective: an all-gather of 16 bytes."""
    if engine.mesh.world_size == 1:
        return
    slots = [(item, item.slot) for item in items if item.slot is not None]
    everywhere = [item.part(*item.held) for item, slot in slots if slot.bucket.states_are_whole]
    of_replicas = [item.part(*item.held) for item, slot in slots if not slot.bucket.states_are_whole]
    digests = [_digest(everywhere), _digest(of_replicas) if engine.mesh.replicas > 1 else 0]
    rows = engine.comm.collect(torch.tensor(digests, device=engine.mesh.device), what).tolist()
    differ = [r for r, row in enumerate(rows) if row != [rows[0][0], rows[r % engine.mesh.shard_size][1]]]
    if differ:
        raise CheckpointError(
            f"{what}: ranks hold copies of parameters or states that differ, so they have not made the same steps: "
            f"rank {differ[0]} differs from rank {differ[0] % engine.mesh.shard_size}. {ADVICE}"
        )


def _digest(values: Sequence[torch.Tensor]) -> int:
    """Return a number that shows a difference of bits: of the sums of their integers, taken where the values are."""
    sums = [value.view(_INTEGERS[value.itemsize]).sum(dtype=torch.int64) for value in values]
    return zlib.crc32(repr(torch.stack(sums).tolist()).encode()) if sums else 0
