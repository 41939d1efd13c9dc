"""Saving: every rank writes its own ranges, rank 0 proves that they are everything, and one rename commits.

Owns the protocol. Read `manifest.py` (the folder) and `together.py` first.

Note: from tensors to a checkpoint
    1. Ranks agree on path, step and everything that all have in common; rank 0 makes `.tmp-<name>-<attempt>`.
    2. Each rank writes its two files there and waits until they are on the disk.
    3. Sizes and checksums are exchanged; rank 0 writes extra.json and, last, the manifest, which is not written unless
       every element of every tensor is in exactly one file. It flushes file and folder.
    4. The folder is renamed, which makes it a checkpoint, and the folder above is flushed.
    5. LATEST, a hint for people, is replaced.
    A failure at any point is raised on all ranks. A kill leaves a folder whose name begins with a dot, which nothing
    reads; the next save of the same name removes it if its process has ended on this host.
"""

import os
import platform
import re
import secrets
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from zeroshard.checkpoint import files, strict
from zeroshard.checkpoint.generators import read_generators
from zeroshard.checkpoint.inventory import Item, aliases_of, generator_items, groups_of, model_items, state_items
from zeroshard.checkpoint.manifest import (
    EXTRA,
    LATEST,
    MANIFEST,
    Chunk,
    FileEntry,
    Manifest,
    Spec,
    file_name,
    make_header,
    serialize,
)
from zeroshard.checkpoint.together import agree_equal, begin, together
from zeroshard.checkpoint.values import bytes_of, encode
from zeroshard.checkpoint.writer import FileWriter, write_file
from zeroshard.core.engine import Engine
from zeroshard.core.errors import CheckpointError
from zeroshard.core.optimizer import ShardedOptimizer
from zeroshard.core.version import VERSION

__all__ = ["save"]

_INTEGERS: Final = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
ADVICE: Final = "Nothing was committed, and checkpoints from before are as they were."


@dataclass(frozen=True)
class Plan:
    """What is saved where; the same on all ranks but for the items' values."""

    path: Path
    step: int
    items: tuple[Item, ...]
    aliases: Mapping[str, str]
    extra: bytes

    @property
    def specs(self) -> list[Spec]:
        """The tensors, in the manifest's order."""
        return [item.spec for item in self.items]

    def chunks(self, kind: str, rank: int) -> tuple[Chunk, ...]:
        """Return what a rank writes into its file of a kind ("model" or "state")."""
        found = []
        for place, item in enumerate(self.items):
            start, stop = item.written_by(rank)
            if (item.spec.kind == "model") == (kind == "model") and stop > start:
                found.append(Chunk(place, start, stop))
        return tuple(found)


def save(
    engine: Engine,
    model: nn.Module,
    optimizers: Sequence[ShardedOptimizer],
    path: str | Path,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
) -> Path:
    """Write a checkpoint; when this returns it is on the disk. See `Zero.save`."""
    target, what = Path(path), "zero.save()"
    begin(engine, what)
    with together(engine, f"{what}: looking at what is to be saved", ADVICE):
        plan = _plan(engine, model, optimizers, target, dict(extra or {}), step)
    _agree_on(engine, plan, what)
    folder = target.parent / f".tmp-{target.name}-{_agree_on_attempt(engine)}"
    try:
        _write(engine, plan, folder, f"{what} to {target}")
    except CheckpointError:
        if engine.mesh.rank == 0:
            files.remove_tree(folder)
        raise
    return target


def _plan(
    engine: Engine,
    model: nn.Module,
    optimizers: Sequence[ShardedOptimizer],
    target: Path,
    extra: dict[str, Any],
    step: int | None,
) -> Plan:
    if not target.name or target.name.startswith("."):
        raise ValueError(f"path must be a new folder whose name does not begin with a dot; got '{target}'.")
    if step is None:
        number = re.search(r"step[-_]?(\d{1,18})$", target.name)
        step = int(number[1]) if number else engine.order.steps + engine.order.has_stepped
    scale = engine.loss_scale
    common = {
        "extra": encode(extra, "extra"),
        "loss_scale": None if scale is None else [scale.value, scale._good_steps, encode(scale.history, "history")],
        "optimizers": encode(groups_of(optimizers), "the optimizers"),
    }
    items = model_items(engine, model) + state_items(optimizers)
    items += generator_items(engine, read_generators(engine.mesh.device))
    return Plan(target, step, tuple(items), aliases_of(engine, model), strict.dumps(common, EXTRA))


def _agree_on(engine: Engine, plan: Plan, what: str) -> None:
    """Raise unless all ranks save the same, and unless what they have in copies is equal."""
    tensors = strict.dumps([repr(plan.specs), repr(sorted(plan.aliases.items())), plan.step, str(plan.path)], what)
    message = "ranks were given different paths or steps, or their optimizers hold different states. " + ADVICE
    agree_equal(engine, f"{what}: comparing what is to be saved", zlib.crc32(tensors), message)
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


def _agree_on_attempt(engine: Engine) -> str:
    """Return a name of this attempt, the same on all ranks; it says which process of which host is at work."""
    host = zlib.crc32(socket.gethostname().encode())
    return engine.comm.texts(f"{host:08x}-{os.getpid()}-{secrets.token_hex(4)}", "the name of a save")[0]


def _write(engine: Engine, plan: Plan, folder: Path, what: str) -> None:
    mesh = engine.mesh
    with together(engine, f"{what}: making a folder", ADVICE):
        if mesh.rank == 0:
            _prepare(plan, folder, mesh.world_size)
    entries = {}
    with together(engine, f"{what}: writing tensors", ADVICE):
        for kind in ("model", "state"):
            entries[kind] = _write_tensors(plan, folder / file_name(kind, mesh.rank, mesh.world_size), kind, mesh.rank)
    found = _exchange(engine, plan, entries)
    with together(engine, f"{what}: writing the manifest", ADVICE):
        if mesh.rank == 0:
            found[EXTRA] = write_file(folder / EXTRA, plan.extra)
            write_file(folder / MANIFEST, serialize(_manifest(plan, mesh.world_size, found)))
            files.sync_folder(folder)
    with together(engine, f"{what}: committing", "Look with `zeroshard checkpoint ls` whether it is there."):
        if mesh.rank == 0:
            if plan.path.exists():
                raise CheckpointError(f"{plan.path} came into being meanwhile; nothing is overwritten.")
            files.rename(folder, plan.path)
            files.sync_folder(plan.path.parent)
            _point_to(plan.path)


def _prepare(plan: Plan, folder: Path, world_size: int) -> None:
    """Make the temporary folder, where there is room and nothing would be overwritten."""
    if plan.path.exists() or plan.path.is_symlink():
        raise CheckpointError(f"{plan.path} exists, and a checkpoint is never overwritten. Choose another name.")
    for above in [*reversed(plan.path.parent.parents), plan.path.parent]:
        if not above.exists():
            files.make_folder(above)
            files.sync_folder(above.parent)
    _remove_dead(plan.path)
    needed = len(plan.extra) + sum(item.spec.numel * item.spec.item_bytes for item in plan.items)
    if (free := files.free_bytes(plan.path.parent)) < needed:
        raise CheckpointError(f"{plan.path.parent} has {free} free bytes, and the checkpoint needs {needed}.")
    files.make_folder(folder)


def _remove_dead(path: Path) -> None:
    """Remove what attempts at the same checkpoint left behind whose process on this host has ended."""
    host = zlib.crc32(socket.gethostname().encode())
    own = re.compile(rf"\.tmp-{re.escape(path.name)}-{host:08x}-(\d+)-[0-9a-f]{{8}}")
    for name in files.names_in(path.parent):
        match = own.fullmatch(name)
        if match and not _is_alive(int(match[1])):
            files.remove_tree(path.parent / name)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _write_tensors(plan: Plan, path: Path, kind: str, rank: int) -> FileEntry:
    chunks = plan.chunks(kind, rank)
    with FileWriter(path) as writer:
        writer.write(memoryview(make_header(plan.specs, chunks)))
        for chunk in chunks:
            item = plan.items[chunk.tensor]
            value = item.part(chunk.start, chunk.stop) if item.slot is not None else _whole(item)
            writer.write(bytes_of(value))
    return writer.entry(chunks)


def _whole(item: Item) -> torch.Tensor:
    assert item.value is not None, f"{item.spec.name} is written by a rank that does not hold it"
    return item.value.reshape(-1)


def _exchange(engine: Engine, plan: Plan, entries: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    """Return what every rank wrote. Collective: an all-gather of sizes and checksums."""
    numbers = [n for kind in ("model", "state") for n in (entries[kind].nbytes, len(entries[kind].crc32))]
    numbers += [crc32 for kind in ("model", "state") for crc32 in entries[kind].crc32]
    length = -engine.comm.agree([-len(numbers)], "the number of checksums")[0]
    row = torch.tensor(numbers + [0] * (length - len(numbers)), dtype=torch.int64, device=engine.mesh.device)
    found = {}
    for rank, all_numbers in enumerate(engine.comm.collect(row, "the checksums", "state").tolist()):
        sizes, checksums = all_numbers[:4], iter(all_numbers[4:])
        for kind, nbytes, count in (("model", *sizes[:2]), ("state", *sizes[2:])):
            crc32 = tuple(next(checksums) for _ in range(count))
            found[file_name(kind, rank, engine.mesh.world_size)] = FileEntry(nbytes, crc32, plan.chunks(kind, rank))
    return found


def _manifest(plan: Plan, world_size: int, found: Mapping[str, FileEntry]) -> Manifest:
    software = {"python": platform.python_version(), "torch": str(torch.__version__), "zeroshard": VERSION}
    return Manifest(plan.step, world_size, tuple(plan.specs), plan.aliases, found, software)


def _point_to(path: Path) -> None:
    """Replace LATEST, in one step."""
    temporary = path.parent / f".tmp-{LATEST}-{secrets.token_hex(4)}"
    write_file(temporary, f"{path.name}\n".encode())
    files.rename(temporary, path.parent / LATEST)
