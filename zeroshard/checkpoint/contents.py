"""The contents of a save: tensors, the ranges that each rank writes, and values equal on all ranks.

Owns the plan of a save and the agreement on it before any file is created. Read `inventory.py`, `together.py` first.
"""

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from zeroshard.checkpoint import strict
from zeroshard.checkpoint.adapter import TRAINED, trained_beside
from zeroshard.checkpoint.cuts import RowExchange, writers_of
from zeroshard.checkpoint.described import pack
from zeroshard.checkpoint.generators import read_generators
from zeroshard.checkpoint.inventory import Item, aliases_of, generator_items, groups_of, model_items, state_items
from zeroshard.checkpoint.manifest import EXTRA, spread
from zeroshard.checkpoint.modules import MODULES, states_of_modules
from zeroshard.checkpoint.ranges import Chunks, Spec, arrange
from zeroshard.checkpoint.together import agree_equal
from zeroshard.checkpoint.values import encode
from zeroshard.core.engine import Engine
from zeroshard.core.slot import slot_of
from zeroshard.table.errors import CheckpointError
from zeroshard.update.optimizer import ShardedOptimizer
from zeroshard.whole.owned import OwnedState
from zeroshard.wire.mesh import Mesh

__all__ = ["ADVICE", "COMMITTED", "How", "INTEGERS", "LOOK", "Plan", "agree_on", "make_plan"]

ADVICE: Final = "Nothing was committed, and checkpoints from before are as they were."
LOOK: Final = "Look with `zeroshard checkpoint ls` whether it is there."
COMMITTED: Final = "The new one is committed."
LEAST_KEPT: Final = 2
INTEGERS: Final = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
"""The integers that have the bits of a tensor's elements, by the bytes of an element."""


OWNER: Final = 0o600
"""Permission bits without which ranks cannot write, nor read, their own files."""


@dataclass(frozen=True)
class How:
    """The options of a save, as `Zero.save` documents them; equal on all ranks."""

    step: int | None = None
    keep: int | None = None
    model_only: bool = False
    mode: int | None = None

    def check(self) -> None:
        """Raise ValueError for a value that no save has."""
        if self.keep is not None and self.keep < LEAST_KEPT:
            raise ValueError(
                f"keep must be at least {LEAST_KEPT}, so that one is left while another is damaged; got {self.keep}."
            )
        if self.mode is not None and not (0 <= self.mode <= 0o777 and self.mode & OWNER == OWNER):
            raise ValueError(
                f"mode takes permission bits, with those of the files' owner, such as 0o600; got {self.mode:#o}."
            )


@dataclass(frozen=True)
class Plan:
    """The tensors of a save and their files; equal on all ranks except for the items' values.

    Args:
        extra: the text of `extra.json`.
        keep: the number of expiring checkpoints to keep, including this one; None if this one does not expire.
        mode: permission bits of the files; None for those that the umask leaves.
    """

    path: Path
    step: int
    mesh: Mesh
    items: tuple[Item, ...]
    aliases: Mapping[str, str]
    extra: bytes
    keep: int | None
    mode: int | None = None

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """The tensors, in the manifest's order."""
        return tuple(item.spec for item in self.items)

    @property
    def world_size(self) -> int:
        """Number of ranks that save."""
        return self.mesh.across.world_size

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks' tensors and of `extra.json`."""
        return len(self.extra) + sum(spec.numel * spec.item_bytes for spec in self.specs)

    @cached_property
    def files(self) -> list[str]:
        """The tensor files of all ranks, in the order in which chunks count them."""
        return sorted(name for rank in range(self.world_size) for name in self.files_of(rank))

    def files_of(self, rank: int) -> list[str]:
        """Return the files that a rank writes."""
        files, _ = self._spread
        return [name for kind in ("model", "state") for name in files[kind, rank]]

    @cached_property
    def chunks(self) -> Chunks:
        """The chunks of all ranks, with their files and offsets."""
        places = {name: place for place, name in enumerate(self.files)}
        _, (names, *columns) = self._spread
        return arrange(self.specs, self.files, ([places[name] for name in names], *columns), str(self.path))

    @cached_property
    def _spread(self) -> tuple[dict[tuple[str, int], list[str]], tuple[list[Any], ...]]:
        items, writers = enumerate(self.items), writers_of(self.mesh)
        chunks = (
            (rank, item.spec.name, place, start, stop)
            for place, item in items
            for rank, start, stop in item.chunks(writers)
        )
        return spread(chunks, [spec.kind for spec in self.specs], self.world_size)

    def nbytes_of(self, name: str) -> int:
        """Return the bytes of the values of a file."""
        return int(self.chunks.data_bytes[self.files.index(name)])

    def exchange(self, engine: Engine) -> RowExchange:
        """Return the exchange of rows that must surround the calls of `values`. Every rank must call."""
        mesh = self.mesh
        is_writer = any(mesh.across.rank in ranks for ranks in writers_of(mesh))
        parts = (item.exchanged(at, mesh.shard_rank) for at, item in enumerate(self.items) if is_writer)
        return RowExchange(engine, [part for part in parts if part is not None])

    def values(self, name: str, rows: RowExchange) -> Iterator[torch.Tensor]:
        """Yield the values of the chunks of a file in order, flat and in pieces.

        Args:
            name: one of this rank's files, in the order of `files_of`.
            rows: the exchange of this save.
        """
        chunks, found = self.chunks, self.chunks.of_file(self.files.index(name))
        columns = (column[found].tolist() for column in (chunks.tensor, chunks.start, chunks.stop))
        for tensor, start, stop in zip(*columns, strict=True):
            item = self.items[tensor]
            if item.cut is None:
                yield item.part(start, stop)
            elif item.cut.is_block(start, stop):
                first = item.cut.local(start)
                yield item.part(first, first + stop - start)
            else:
                yield from rows.rows(tensor, stop - start)


def make_plan(
    engine: Engine,
    model: nn.Module,
    optimizers: Sequence[ShardedOptimizer],
    path: Path,
    extra: Mapping[str, Any],
    how: How,
    owned: Sequence[Mapping[str, OwnedState]],
    change: Callable[[list[Item]], list[Item]] | None = None,
) -> Plan:
    """Collect the data to save.

    Args:
        owned: the result of `owned_states`.
        change: replaces the tensors of the model and its optimizers, as islands do.

    Raises:
        CheckpointError, ValueError: something cannot be saved, or an argument is wrong.
    """
    if not path.name or path.name.startswith("."):
        raise ValueError(f"path must be a new folder whose name does not begin with a dot; got '{path}'.")
    how.check()
    trained = optimizers
    if how.model_only:
        optimizers, owned = (), ()
    step = how.step
    if step is None:
        number = re.search(r"step[-_]?(\d{1,18})$", path.name)
        step = int(number[1]) if number else max((one.steps for one in trained), default=0)
    scale = None if how.model_only else engine.loss_scale
    common = {
        "extra": encode(dict(extra), "extra") | states_of_modules(model) | _trained_beside(engine, trained),
        "loss_scale": None if scale is None else [scale.value, scale._good_steps, encode(scale.history, "history")],
    }
    items = model_items(engine, model) + state_items(engine, optimizers, owned)
    items = items if change is None else change(items)
    places = {item.spec.name: place for place, item in enumerate(items) if item.spec.kind == "model"}
    common["optimizers"] = pack(groups_of(optimizers, owned), places)
    if not how.model_only:
        items += generator_items(engine, read_generators(engine.mesh.device))
    text = strict.dumps(common, EXTRA)
    return Plan(path, step, engine.mesh, tuple(items), aliases_of(engine, model), text, how.keep, how.mode)


def _trained_beside(engine: Engine, optimizers: Sequence[ShardedOptimizer]) -> dict[str, Any]:
    """Return what an export of an adapter asks: where there are no states, nothing else says what was trained."""
    slots = [slot_of(master) for one in optimizers for master in one.masters] or engine.slots.values()
    return trained_beside(engine.slots, [slot.name for slot in slots if slot.parameter.requires_grad])


def agree_on(engine: Engine, plan: Plan, what: str, options: str) -> None:
    """Raise unless all ranks save the same data with the same options, and copies are equal.

    Args:
        options: further values that must be equal.
    """
    message = "ranks were given different paths, steps or options, or their optimizers hold different states. " + ADVICE
    common = [plan.step, str(plan.path), plan.keep, plan.mode, options]
    digest = _crc32_of([*common, *sorted(plan.aliases.items()), *plan.specs])
    shown = f"path={str(plan.path)!r}, step={plan.step}, keep={plan.keep}, mode={plan.mode}, {options}"
    where = f"{what}: comparing what is to be saved"
    agree_equal(engine, where, digest, message, common=_crc32_of(common), shown=shown)
    message = (
        "extra, or the optimizers' hyper-parameters or step counters, differ between ranks, but a checkpoint holds "
        "one value, also of what a module returns from get_extra_state(). Give the same values on every rank; gather "
        "values of single ranks first. " + ADVICE
    )
    same = None
    if engine.mesh.pipe is not None:
        # Optimizers and modules of the places of a pipe are compared where they are joined.
        given = {**strict.loads(plan.extra, EXTRA), "optimizers": None}
        for key in (MODULES, TRAINED):
            given["extra"].pop(key, None)
        same = zlib.crc32(strict.dumps(given, EXTRA))
    agree_equal(engine, f"{what}: comparing extra and hyper-parameters", zlib.crc32(plan.extra), message, common=same)
    _agree_on_copies(engine, plan.items, what)


def _agree_on_copies(engine: Engine, items: Sequence[Item], what: str) -> None:
    """Raise if ranks hold different values of the same elements. Collective: an all-gather of 8 or 16 bytes."""
    mesh = engine.mesh
    # Places of a pipe may have values of different kinds, and compare all: every rank takes part.
    every = (("replicate",), ("replicate", "shard")) if mesh.pipe is not None else ()
    by_axes: dict[tuple[str, ...], list[Item]] = {axes: [] for axes in every}
    for item in items:
        if item.slot is not None:
            axes: tuple[str, ...] = ("replicate", "shard") if item.slot.bucket.spec.updates_all else ("replicate",)
            by_axes.setdefault(axes, []).append(item)
    kinds = sorted(axes for axes in by_axes if len(mesh.along(*axes)) > 1)
    if not kinds:
        return
    # One at a time: packed values are several times as large when unpacked.
    digests = [_digest(item.part(*item.held) for item in by_axes[axes]) for axes in kinds]
    rows = engine.comm.across.collect(torch.tensor(digests, device=mesh.device), what).tolist()
    numbers = mesh.across.numbers
    for place, axes in enumerate(kinds):
        for ranks in mesh.across.rows(*axes).tolist():
            differ = [rank for rank in ranks if rows[rank][place] != rows[ranks[0]][place]]
            if differ:
                raise CheckpointError(
                    f"{what}: ranks hold different copies of parameters or states, so they have not made the same "
                    f"steps: rank {numbers[differ[0]]} differs from rank {numbers[ranks[0]]}. {ADVICE}"
                )


def _crc32_of(values: Iterable[object]) -> int:
    """Return a checksum of values, computed one by one, since the text of all values would be long."""
    digest = 0
    for value in values:
        digest = zlib.crc32(repr(value).encode(errors="surrogatepass"), digest)
    return digest


def _digest(values: Iterable[torch.Tensor]) -> int:
    """Return a checksum of bits: of the sums of tensors as integers, computed on the tensors' devices."""
    sums = [value.view(INTEGERS[value.itemsize]).sum(dtype=torch.int64) for value in values]
    return zlib.crc32(repr(torch.stack([one.to(sums[0].device) for one in sums]).tolist()).encode()) if sums else 0
