"""Checkpoints of islands: one folder of a run, from which each island resumes where it was.

Owns the tensors that islands have besides the engine's state, their folders, and what is read of them. Read
`outer/islands.py`, `save.py` and `load.py` first.

Note: the folder
    A checkpoint of islands is the first island's, with the others' in its folder `islands`, named by number from 1. The
    values of its parameters are the anchors, which all islands have; what an island has itself is beside them, as
    tensors of the kind "outer": its parameters ("local"), what rounding lost ("lost"), the mean of an exchange that
    has begun ("mean"), anchors where parameters have a narrower dtype ("anchor"), states of the outer optimizer, and
    counters. So a run without islands, or with other ones, reads the folder as any checkpoint, and starts from the
    anchors. The other islands' folders are written first, under a hidden name; the first island's part has the
    checksums of their manifests, and its commit has the folders.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from zeroshard.checkpoint import files
from zeroshard.checkpoint.contents import ADVICE
from zeroshard.checkpoint.cuts import cut_of, ranks_here
from zeroshard.checkpoint.folders import is_tensor_folder
from zeroshard.checkpoint.generators import read_generators, write_generators
from zeroshard.checkpoint.inventory import Item, held_range, order_of
from zeroshard.checkpoint.load import MIXED, UNCHANGED, Check, Loaded, load, read_part
from zeroshard.checkpoint.manifest import ISLANDS, LATEST, PARTS
from zeroshard.checkpoint.ranges import Spec
from zeroshard.checkpoint.reader import CheckpointReader, read_manifest
from zeroshard.checkpoint.together import begin, describe, together
from zeroshard.checkpoint.values import bytes_of, dtype_name
from zeroshard.checkpoint.verify import part_of
from zeroshard.core.engine import Engine
from zeroshard.core.slot import Slot
from zeroshard.outer.exchange import Arrived
from zeroshard.outer.fragments import Fragment, Part
from zeroshard.outer.islands import Islands
from zeroshard.table.errors import CheckpointError, printable
from zeroshard.update.optimizer import ShardedOptimizer
from zeroshard.wire.comm import Tag

__all__ = ["adopt", "island_items", "load_islands", "save_parts"]

Tensor = torch.Tensor
Save = Callable[[Path], Path]

COUNTERS: Final = "outer/counters"
OPTIMIZER: Final = "outer/optimizer"
"""The bytes of the name of the outer optimizer's class; checkpoints of older versions lack it."""
NONE: Final = -1


# -- what is written --------------------------------------------------------------------------------------------------


def island_items(engine: Engine, islands: Islands, path: Path, items: list[Item]) -> list[Item]:
    """Return the items of a checkpoint with the anchors as parameters, and what this island has besides.

    Args:
        path: where this island's part is saved; those of the other islands are there before the first one's.
        items: those of the model and its optimizers.

    Collective: all-gathers within the island where every rank updates all elements; every rank must call.
    """
    by_slot, found = {id(item.slot): item for item in items if item.spec.kind == "model"}, list[Item]()
    anchors: dict[int, Tensor] = {}
    for fragment in islands.fragments:
        for key, flat in _tensors_of(islands, fragment).items():
            for slot, value in _values(engine, fragment, flat):
                like = by_slot[id(slot)]
                if key == "anchor":
                    anchors[id(slot)] = value.to(slot.bucket.dtypes.master)
                    if value.dtype == slot.bucket.dtypes.master:
                        continue
                found.append(_like(like, key, value))
        for part in fragment.parts:
            found += [
                _like(by_slot[id(slot)], "local", slot.bucket.master(slot.index).detach())
                for slot, _, _ in part.slices()
            ]
    own, whole = ranks_here(engine.mesh)[0], {COUNTERS: _counters(islands)}
    if not islands.comm.mesh.rank:
        whole[PARTS] = [0] * (islands.comm.mesh.world_size - 1)
        if engine.mesh.rank == 0:
            whole[PARTS] = [read_manifest(_hidden(path) / str(n + 1))[1] for n, _ in enumerate(whole[PARTS])]
    if islands.optimizer is not None:
        whole[OPTIMIZER] = list(type(islands.optimizer).__name__.encode())
    for key, integers in whole.items():
        values = torch.tensor(integers, dtype=torch.int64, device="cpu")
        found.append(Item(Spec("outer", key, "I64", (len(values),)), values, (0, len(values)), owner=own))
    for key, numbers in _numbers_of(islands).items():
        spec = Spec("outer", f"outer/number {key}", "F64", (len(numbers),))
        found.append(Item(spec, numbers, (0, len(numbers)), owner=own))
    changed = [
        dataclasses.replace(item, value=anchors[id(item.slot)])
        if item.spec.kind == "model" and id(item.slot) in anchors
        else item
        for item in items
    ]
    return changed + found


def _like(item: Item, key: str, value: Tensor) -> Item:
    name = f"outer/{key}/{item.spec.name}"
    spec = dataclasses.replace(item.spec, kind="outer", name=name, dtype=dtype_name(value.dtype, name))
    return dataclasses.replace(item, spec=spec, value=value)


def _tensors_of(islands: Islands, fragment: Fragment) -> dict[str, Tensor]:
    """Return what this rank has of a fragment, with a number for each of its elements, by key."""
    found = {"anchor": fragment.anchor.data}
    if fragment.lost is not None:
        found["lost"] = fragment.lost
    if islands.under_way is not None and islands.under_way.fragment is fragment:
        found["mean"] = islands.under_way.mean()
    for key, value in sorted(_state_of(islands, fragment).items()):
        if isinstance(value, Tensor) and value.shape == fragment.anchor.shape:
            found[f"state {key}"] = value
    return found


def _state_of(islands: Islands, fragment: Fragment) -> dict[str, Any]:
    """Return the outer optimizer's states of a fragment, without making them."""
    held: Mapping[Any, dict[str, Any]] = islands.optimizer.state if islands.optimizer is not None else {}
    return held.get(fragment.anchor, {})


def _numbers_of(islands: Islands) -> dict[str, Tensor]:
    """Return the outer optimizer's states that are one number for a fragment, by key; NaN where there is none."""
    found: dict[str, Tensor] = {}
    for fragment in islands.fragments:
        for key, value in _state_of(islands, fragment).items():
            if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1 and not value.ndim):
                none = torch.full((len(islands.fragments),), math.nan, dtype=torch.float64, device="cpu")
                found.setdefault(key, none)[fragment.number] = float(value)
    return found


def _values(engine: Engine, fragment: Fragment, flat: Tensor) -> Iterator[tuple[Slot, Tensor]]:
    """Yield each parameter with the values that belong to the elements that this rank updates of it."""
    for part in fragment.parts:
        values, first = part.of(flat), part.bucket.spec.states[0]
        if part.bucket.spec.updates_all:
            values = _whole(engine, part, values)
        for slot, _, _ in part.slices():
            start, stop = part.bucket.master_range(slot.index)
            yield slot, values[start - first : max(start, stop) - first]


def _whole(engine: Engine, part: Part, values: Tensor) -> Tensor:
    """Return a whole bucket of values, of which each rank has its shard. Collective: all-gather."""
    full = torch.zeros(part.bucket.layout.full_numel, dtype=values.dtype, device=engine.mesh.device)
    full[slice(*part.bucket.spec.shard)] = values
    if engine.mesh.shard_size > 1:
        tag = Tag(engine.order.next_number(), part.bucket.number, "the anchors of a checkpoint")
        engine.comm.gather(full, tag, "state").wait()
    return full


def _kind(islands: Islands) -> list[int]:
    """Return the numbers that must be equal for an island to resume where it was."""
    options = islands.options
    return [islands.comm.mesh.world_size, options.every, options.fragments, options.delay, options.bits]


def _counters(islands: Islands) -> list[int]:
    begun = (NONE, 0) if islands.under_way is None else (islands.under_way.fragment.number, islands.under_way.step)
    at = [fragment.exchanged_at for fragment in islands.fragments]
    return [*_kind(islands), islands.steps, islands.exchanges, *begun, *at]


# -- folders ----------------------------------------------------------------------------------------------------------


def _hidden(path: Path) -> Path:
    return path.parent / f".{ISLANDS}-{path.name}"


def save_parts(engine: Engine, islands: Islands, path: Path, save: Save) -> Path:
    """Save each island's part of a checkpoint, the first island's last, which commits all.

    Args:
        save: saves this island's part to a path.

    Raises:
        CheckpointError: on all islands, if one failed; nothing was committed.

    Collective: as a save on each island, and agreements over islands; every rank of all islands must call.
    """
    island, hidden, what = islands.comm.mesh.rank, _hidden(path), f"zero.save() to {path}"
    begin(engine, "zero.save()")
    with for_all_islands(islands, f"{what}: making folders"), together(engine, f"{what}: making folders", ADVICE):
        if path.exists():
            raise CheckpointError(f"{path} exists, and zeroshard overwrites nothing. Choose another name.")
        if island == 0 == engine.mesh.rank and hidden.exists():
            files.remove_tree(hidden)  # of an attempt that failed
    with for_all_islands(islands, f"{what}: the parts of the other islands"):
        if island:
            save(hidden / str(island))
    with for_all_islands(islands, f"{what}: the part of the first island"):
        if not island:
            save(path)
    return path


def adopt(path: Path, folder: Path) -> None:
    """Put the parts of the other islands into the folder of a checkpoint that is not committed yet."""
    if (hidden := _hidden(path)).is_dir():
        if (hidden / LATEST).exists():
            files.remove(hidden / LATEST)
        files.rename(hidden, folder / ISLANDS)
        files.sync_folder(folder / ISLANDS)


@contextmanager
def for_all_islands(islands: Islands, what: str) -> Iterator[None]:
    """Make a failure of one island one of all.

    Args:
        what: equal on all islands.

    Raises:
        CheckpointError: on all ranks of all islands; where the body did not fail, it says which island's did.

    Collective: agreements over islands; every rank of all islands must enter.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # any error: the other islands wait for this one
        failure = error
    comm = islands.comm
    if not comm.agree([int(failure is None)], what)[0]:
        texts = comm.texts(describe(failure), what)
        raise failure or CheckpointError(f"{what} failed on another island:\n{comm.mesh.lines(texts)}")


# -- what is read -----------------------------------------------------------------------------------------------------


def _read_islands(engine: Engine, islands: Islands, reader: CheckpointReader | None) -> None:
    """Read what this island has besides the engine's state, whose parameters were read and are the anchors.

    A checkpoint without islands, or of other ones, begins a new interval.

    Args:
        reader: of this island's part; None to read nothing.
    """
    for fragment in islands.fragments:
        fragment.take_anchors()
        fragment.exchanged_at = 0
    islands.restart(0, 0, None)
    if islands.optimizer is not None:
        islands.optimizer.state.clear()
    if reader is None or COUNTERS not in reader.states:
        return
    counters, has_states = _read_numbers(reader, COUNTERS, torch.int64), _has_states(reader, islands)
    for fragment in islands.fragments:
        _read_flat(reader, fragment, "anchor", fragment.anchor.data, engine)
        if has_states:
            _read_state(reader, islands, fragment, engine)
    kind = _kind(islands)
    if counters[: len(kind)] != kind or len(counters) != len(kind) + 4 + len(islands.fragments):
        return
    steps, exchanges, turn, begun, *at = counters[len(kind) :]
    arrived = None
    for fragment, last in zip(islands.fragments, at, strict=True):
        fragment.exchanged_at = last
        if fragment.lost is not None:
            _read_flat(reader, fragment, "lost", fragment.lost, engine)
        if fragment.number == turn:
            mean = torch.zeros_like(fragment.anchor.data)
            _read_flat(reader, fragment, "mean", mean, engine)
            arrived = Arrived(fragment, begun, f"exchange {exchanges} between islands, of {fragment}", mean)
        for slot in (slot for part in fragment.parts for slot, _, _ in part.slices()):
            order = order_of(slot)
            name = f"outer/local/{slot.name}"
            if (there := reader.states.get(name)) is None:
                raise CheckpointError(f"{reader.path}: has no '{name}', the island's own values.")
            here = dataclasses.replace(there, order=order)
            cut = cut_of(slot, order, engine.mesh)
            read_part(there, here, held_range(slot), cut, reader.fill_state, slot.bucket.master(slot.index))
    islands.restart(steps, exchanges, arrived)


def _read_numbers(reader: CheckpointReader, name: str, dtype: torch.dtype) -> list[Any]:
    spec = reader.states[name]
    values = torch.zeros(spec.numel, dtype=dtype, device="cpu")
    if spec.dtype != dtype_name(dtype, name):
        raise CheckpointError(f"{reader.path}: '{name}' is {spec.dtype}.")
    reader.fill_state(name, 0, bytes_of(values))
    return list(values.tolist())


def _has_states(reader: CheckpointReader, islands: Islands) -> bool:
    """Return whether a checkpoint has states of the outer optimizer; warn if they are another one's."""
    if islands.optimizer is None:
        return False
    if OPTIMIZER not in reader.states:
        return True
    here, there = type(islands.optimizer).__name__, bytes(_read_numbers(reader, OPTIMIZER, torch.int64)).decode()
    if here != there:
        warnings.warn(
            printable(f"{reader.path}: its outer optimizer is {there}, here {here}, which begins without states."),
            stacklevel=2,
        )
    return here == there


def _read_state(reader: CheckpointReader, islands: Islands, fragment: Fragment, engine: Engine) -> None:
    """Read the outer optimizer's states of a fragment."""
    assert islands.optimizer is not None
    state: dict[str, Any] = {}
    keys = {name.split("/", 2)[1].removeprefix("state ") for name in reader.states if name.startswith("outer/state ")}
    for key in sorted(keys):
        state[key] = torch.zeros_like(fragment.anchor.data)
        if not _read_flat(reader, fragment, f"state {key}", state[key], engine):
            del state[key]
    for name in reader.states:
        if name.startswith("outer/number "):
            numbers = _read_numbers(reader, name, torch.float64)
            # Of other fragments, the first one's.
            number = numbers[fragment.number if len(numbers) == len(islands.fragments) else 0]
            if not math.isnan(number):
                state[name.removeprefix("outer/number ")] = torch.tensor(number, dtype=torch.float32, device="cpu")
    islands.optimizer.state[fragment.anchor] = state


def _read_flat(reader: CheckpointReader, fragment: Fragment, key: str, flat: Tensor, engine: Engine) -> bool:
    """Read this rank's elements of a tensor of a fragment into place; return whether the checkpoint has it."""
    has_any = False
    for part in fragment.parts:
        for slot, start, stop in part.slices():
            if (there := reader.states.get(f"outer/{key}/{slot.name}")) is None:
                continue
            if there.shape != tuple(slot.shape):
                raise CheckpointError(
                    f"{reader.path}: '{there.name}' has shape {there.shape}, here {tuple(slot.shape)}."
                )
            has_any, order = True, order_of(slot)
            first = slot.bucket.layout.overlap(slot.index, *slot.bucket.spec.shard)[0]
            held_first = first - slot.bucket.layout.offsets[slot.index] if stop > start else 0
            held, cut = (held_first, held_first + stop - start), cut_of(slot, order, engine.mesh)
            read_part(there, dataclasses.replace(there, order=order), held, cut, reader.fill_state, flat[start:stop])
    return has_any


def load_islands(
    engine: Engine,
    model: nn.Module,
    optimizers: Sequence[ShardedOptimizer],
    path: str | Path,
    *,
    islands: Islands,
    model_only: bool,
    cast: bool,
    check: Check,
) -> Loaded:
    """Load a checkpoint on all islands. See `Zero.load`. Collective: every rank of all islands must call."""
    source, what = Path(path), f"zero.load() of {path}"
    begin(engine, "zero.load()")
    with ExitStack() as phase:
        phase.enter_context(for_all_islands(islands, f"{what}: checking"))
        islands.settle()
        with together(engine, f"{what}: comparing the parts of islands", UNCHANGED):
            folder, generators = _folder_of(islands, source, model_only=model_only)
        also = partial(_reading, engine, islands, what, phase)
        loaded = load(engine, model, optimizers, folder, model_only=model_only, cast=cast, check=check, also=also)
        if generators is not None:
            write_generators(generators, islands.device)
    return loaded


@contextmanager
def _reading(
    engine: Engine, islands: Islands, what: str, phase: ExitStack, reader: CheckpointReader | None
) -> Iterator[None]:
    """Let no island's memory change before all have checked their parts; at the end read what islands have besides.

    Args:
        phase: has `for_all_islands` of the checks, and of the reading afterwards.
        reader: see `_read_islands`.
    """
    phase.close()
    phase.enter_context(for_all_islands(islands, f"{what}: reading"))
    yield
    with together(engine, f"{what}: reading what islands have", MIXED):
        _read_islands(engine, islands, reader)


def _folder_of(islands: Islands, path: Path, *, model_only: bool) -> tuple[Path, dict[str, Tensor] | None]:
    """Return the folder that this island loads, and its generators if they are to stay.

    They stay on all islands but the first, where the checkpoint has none for them.

    Raises:
        CheckpointError: the folder has no valid checkpoint, or this island's part is not of that.
    """
    island, kind = islands.comm.mesh.rank, _kind(islands)
    if model_only and is_tensor_folder(path):
        return path, None
    reader = CheckpointReader(path)
    if COUNTERS in reader.states and _read_numbers(reader, COUNTERS, torch.int64)[: len(kind)] == kind:
        return part_of(reader, island).path if island else path, None
    return path, read_generators(islands.device) if island else None
