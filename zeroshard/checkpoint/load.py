"""Loading: every rank checks everything before memory changes, then reads its own ranges.

Owns the protocol. Read `reader.py`, `inventory.py` and `together.py` first.

Note: all or nothing
    1. Each rank reads the manifest and extra.json, and compares them with its model and optimizers; all ranks must read
       the same manifest.
    2. Each rank verifies the bytes that it will read, and a share of the other bytes. Up to here, a failure changes
       nothing.
    3. Each rank reads its ranges, one tensor at a time, into the master values and states. If files change meanwhile,
       the error says that memory is partly changed.
    4. Generators, hyper-parameters and the loss scale follow; parameters are updated from their master values.
    A folder of safetensors files from other programs contains only a model, and no checksums: headers and sizes are
    checked.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint import strict
from zeroshard.checkpoint.adapter import TRAINED
from zeroshard.checkpoint.cuts import Cut, cut_of
from zeroshard.checkpoint.described import MAX_STEPS, unpack
from zeroshard.checkpoint.fields import shown
from zeroshard.checkpoint.folders import FolderReader, is_tensor_folder
from zeroshard.checkpoint.generators import check_generators, saved_generators, write_generators
from zeroshard.checkpoint.inventory import Item, aliases_of, groups_of, held_range, model_items, order_of
from zeroshard.checkpoint.manifest import EXTRA, split_state
from zeroshard.checkpoint.modules import MODULES, check_modules, modules_with_state, set_states
from zeroshard.checkpoint.places import Whole, join_model
from zeroshard.checkpoint.ranges import Spec
from zeroshard.checkpoint.reader import CheckpointReader, Source
from zeroshard.checkpoint.together import agree_equal, begin, together
from zeroshard.checkpoint.values import PIECE_NUMEL, bytes_of, decode, dtype_of
from zeroshard.core.engine import Engine
from zeroshard.core.slot import Slot, slot_of
from zeroshard.optim.packed import PackingOptimizer, pack, parts_of
from zeroshard.store.stored import is_stored
from zeroshard.table.errors import CheckpointError
from zeroshard.update.optimizer import ShardedOptimizer
from zeroshard.whole.masters import follow_masters
from zeroshard.whole.owned import like_parameter
from zeroshard.wire.comm import unexpanded
from zeroshard.wire.mesh import Mesh

__all__ = ["Check", "Content", "Loaded", "MIXED", "UNCHANGED", "load", "read_content", "read_part", "to_rows"]

Tensor = torch.Tensor
Specs = Mapping[str, Spec]
Fill = Callable[[str, int, memoryview], None]
Check = Callable[[dict[str, Any]], Callable[[], None]]
Also = Callable[[CheckpointReader | None], AbstractContextManager[Any]]

UNCHANGED = "Nothing in memory was changed."
MIXED = "Memory is partly changed now: load a checkpoint before going on, or end the run."
HOW = frozenset(["capturable", "differentiable", "foreach", "fused"])
"""Options that do not change the result of an update: the running program's values stay."""
OF_SCHEDULERS = frozenset(["base_momentum", "initial_lr", "max_lr", "max_momentum", "min_lr", "swa_lr"])
"""Options that torch's schedulers add to groups, before a load or after it."""


@dataclass(frozen=True)
class Loaded:
    """The data of a checkpoint besides tensors: `step` and `extra`.

    ```python
    import tempfile, torch, zeroshard as zs

    zero = zs.shard(torch.nn.Linear(4, 1))
    with tempfile.TemporaryDirectory() as folder:
        zero.save(f"{folder}/step-12", extra={"epoch": 3})
        loaded = zero.load(f"{folder}/step-12")
    assert (loaded.step, loaded.extra) == (12, {"epoch": 3})
    ```
    """

    step: int
    extra: dict[str, Any]


@dataclass(frozen=True)
class Content:
    """The contents of `extra.json`, and their checkpoint."""

    reader: CheckpointReader
    extra: dict[str, Any]
    optimizers: list[dict[str, Any]]
    loss_scale: list[Any] | None


def load(
    engine: Engine,
    model: nn.Module,
    optimizers: Sequence[ShardedOptimizer],
    path: str | Path,
    *,
    model_only: bool = False,
    cast: bool = False,
    check: Check = lambda extra: lambda: None,
    also: Also = nullcontext,
) -> Loaded:
    """Read a checkpoint into a sharded model. See `Zero.load`.

    Args:
        check: looks at `extra` before anything changes, and takes from it what is not the program's; called at the end
            is what it returns.
        also: surrounds the reading, with the checkpoint; None instead of a checkpoint if only the model is loaded.
    """
    source, what = Path(path), "zero.load()"
    begin(engine, what)
    with together(engine, f"{what}: comparing {source} with the model", UNCHANGED):
        reader = FolderReader(source) if model_only and is_tensor_folder(source) else CheckpointReader(source)
        items, groups = model_items(engine, model), [] if model_only else groups_of(optimizers)
        modules, specs = modules_with_state(model), {item.spec.name: item.spec for item in items}
        whole = Whole(specs, aliases_of(engine, model), groups, modules)
    whole = join_model(engine, whole, what, UNCHANGED)
    with together(engine, f"{what}: comparing {source} with the model", UNCHANGED):
        _check_model(whole, reader, cast)
        there = reader.specs_for(whole.aliases)
        content = read_content(reader) if isinstance(reader, CheckpointReader) else None
        rest, saved = None if model_only else content, None if content is None else content.extra.pop(MODULES, None)
        states = check_modules(saved, whole.modules, source)
        if rest is not None:
            _check_optimizers(optimizers, whole.optimizers, rest)
            _check_states(optimizers, whole, rest)
            check_generators(engine.mesh, rest.reader)
        finish = check({} if content is None else content.extra)
    message = f"ranks read different checkpoints at {source}. Is the folder shared by all hosts? {UNCHANGED}"
    agree_equal(engine, f"{what}: comparing manifests", reader.digest, message)
    with together(engine, f"{what}: verifying {source}", UNCHANGED):
        if content is not None:
            # A rank checks the blocks that it reads, and a share of the blocks that no rank reads.
            trained = () if model_only else optimizers
            for is_state, name, start, stop in _wanted(items, there, trained, content.reader, engine.mesh):
                content.reader.verify_range(name, start, stop, is_state=is_state)
            but = frozenset(["model"] if model_only else ["model", "state"])
            mesh = engine.mesh.across
            content.reader.verify(mesh.rank, mesh.world_size, but=but)
    with also(None if rest is None else rest.reader), together(engine, f"{what}: reading {source}", MIXED):
        _copy_model(items, reader, there)
        set_states(modules, states)
        if rest is not None:
            _copy_states(optimizers, rest, engine.mesh, there if cast else {})
            _restore(engine, rest)
        finish()
    follow_masters(engine)
    return Loaded(0, {}) if content is None else Loaded(content.reader.manifest.step, content.extra)


def read_content(reader: CheckpointReader) -> Content:
    """Return the contents of a checkpoint's `extra.json`, checked as far as possible without a model."""
    where = str(reader.path / EXTRA)
    value = strict.loads(reader.read_extra(), where)
    if not isinstance(value, dict) or set(value) != {"extra", "loss_scale", "optimizers"}:
        raise CheckpointError(f"{where}: expected an object with extra, loss_scale and optimizers.")
    extra, scale = (decode(value[key], where) for key in ("extra", "loss_scale"))
    optimizers = unpack(value["optimizers"], [spec.name for spec in reader.manifest.tensors], where)
    if not isinstance(extra, dict) or not _is_loss_scale(scale):
        raise CheckpointError(f"{where}: extra or the loss scale is invalid.")
    extra.pop(TRAINED, None)
    return Content(reader, extra, optimizers, scale)


# -- parameters and buffers -------------------------------------------------------------------------------------------


def _check_model(whole: Whole, source: Source, cast: bool) -> None:
    """Raise unless the files hold exactly the model's parameters and buffers."""
    here, aliases, there = whole.specs, whole.aliases, source.specs_for(whole.aliases)
    problems = [f"'{name}' is in the model and not in the checkpoint" for name in here if name not in there]
    # If files do not record ties, they may hold a tied parameter under each of its names.
    known = here.keys() | (aliases.keys() if source.aliases is None else set())
    problems += [f"'{name}' is in the checkpoint and not in the model" for name in there if name not in known]
    for name in here.keys() & there.keys():
        mine, theirs = here[name], there[name]
        if mine.shape != theirs.shape:
            problems.append(f"'{name}' has shape {mine.shape} in the model and {theirs.shape} in the checkpoint")
        elif mine.dtype != theirs.dtype and not cast:
            problems.append(
                f"'{name}' is {mine.dtype} in the model and {theirs.dtype} in the checkpoint (cast=True converts)"
            )
    if source.aliases is None:
        problems += [
            f"'{alias}' is tied to '{name}' in the model, and has other values in the files"
            for alias, name in aliases.items()
            if alias in there and name in there and not _is_equal(source, there[alias], there[name])
        ]
    elif dict(aliases) != dict(source.aliases):
        tied = sorted(set(aliases.items()) ^ set(source.aliases.items()))
        problems.append(f"'{tied[0][0]}' is tied to '{tied[0][1]}' in only one of them")
    if problems:
        more = f", and {len(problems) - 5} differences more" if len(problems) > 5 else ""
        raise CheckpointError(f"{source.path} is not of this model: {'; '.join(sorted(problems)[:5])}{more}.")


def _is_equal(source: Source, one: Spec, other: Spec) -> bool:
    """Return whether two tensors in files are equal, bit for bit."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and all(
        source.read(one.name, start, stop) == source.read(other.name, start, stop)
        for start in range(0, one.numel, PIECE_NUMEL)
        for stop in (min(start + PIECE_NUMEL, one.numel),)
    )


def _copy_model(items: Sequence[Item], source: Source, there: Specs) -> None:
    """Read this rank's elements of each parameter, and whole buffers, into place."""
    for item in items:
        assert isinstance(item.value, Tensor), f"{item.spec.name} is not on every rank"
        value = item.value.resolve_conj().resolve_neg().contiguous()
        read_part(there[item.spec.name], item.spec, item.held, item.cut, source.fill, value.reshape(-1))
        if value is not item.value:
            strides = item.value.stride()
            unexpanded(item.value, strides).copy_(unexpanded(value, strides))


def _wanted(
    items: Sequence[Item], there: Specs, optimizers: Sequence[ShardedOptimizer], reader: CheckpointReader, mesh: Mesh
) -> Iterator[tuple[bool, str, int, int]]:
    """Yield the ranges that this rank reads: whether a state, the name, and the elements in the file's order."""
    for item in items:
        found = there[item.spec.name]
        yield False, found.name, *_range_in(found, item.spec.order, item.held, item.cut)
    slots = _slots_of(optimizers)
    for spec in reader.states.values():
        if spec.kind == "state" and optimizers:
            slot = slots.get(_owner_of(reader, spec))
            if slot is None:
                continue  # another place of a pipe reads it
            if _is_cut(slot, spec):
                order = order_of(slot)
                yield True, spec.name, *_range_in(spec, order, held_range(slot), cut_of(slot, order, mesh))
            elif slot.updater is None or slot.has_whole_states:
                yield True, spec.name, 0, spec.numel


def _range_in(there: Spec, order: tuple[int, ...], held: tuple[int, int], cut: Cut | None) -> tuple[int, int]:
    """Return the elements to read, counted as they lie in the file, for those held here in an order of dimensions."""
    if not _is_in_order(there, order, held):
        return 0, there.numel
    if cut is None or held[0] == held[1]:
        return held
    reads = list(cut.reads(*held))
    return reads[0][2], reads[-1][3]


def _is_in_order(there: Spec, order: tuple[int, ...], held: tuple[int, int]) -> bool:
    return there.order == order or held[0] == held[1]


def read_part(there: Spec, here: Spec, held: tuple[int, int], cut: Cut | None, fill: Fill, target: Tensor) -> None:
    """Read elements of a tensor, as they are counted here, into `target`, (stop - start,).

    Where they cannot go there as the file has them, one tensor is in memory besides.
    """
    dtype = dtype_of(there.dtype)
    is_here = target.device.type == "cpu" and not is_stored(target)
    if not _is_in_order(there, here.order, held):
        values = torch.empty(there.numel, dtype=dtype, device="cpu")
        fill(there.name, 0, bytes_of(values))
        rows = to_rows(values, there)
        ordered = rows.permute(here.order) if here.order else rows
        part = ordered.reshape(-1) if cut is None else cut.part(ordered)
        with torch.no_grad():
            target.copy_(part[held[0] : held[1]])
    elif cut is not None:
        for start, stop, first, last in cut.reads(*held):
            values = torch.empty(last - first, dtype=dtype, device="cpu")
            fill(there.name, first, bytes_of(values))
            with torch.no_grad():
                target[start - held[0] : stop - held[0]].copy_(cut.pick(values, first, start, stop))
    elif target.dtype == dtype and is_here and target.is_contiguous():
        fill(there.name, held[0], bytes_of(target))
    else:
        # In pieces: not even one tensor need fit into memory.
        start = held[0]
        for piece in target.split(PIECE_NUMEL):
            values = torch.empty(piece.numel(), dtype=dtype, device="cpu")
            fill(there.name, start, bytes_of(values))
            with torch.no_grad():
                piece.copy_(values)
            start += piece.numel()


def to_rows(values: Tensor, spec: Spec) -> Tensor:
    """Return a tensor of its own shape, from all of its elements as a file has them."""
    if not spec.order:
        return values.reshape(spec.shape)
    stored = values.reshape([spec.shape[dim] for dim in spec.order])
    return stored.permute([spec.order.index(dim) for dim in range(len(spec.shape))])


# -- optimizers -------------------------------------------------------------------------------------------------------


def _check_optimizers(optimizers: Sequence[ShardedOptimizer], here: list[dict[str, Any]], content: Content) -> None:
    """Raise unless optimizers are of the same classes, with the same parameters in the same groups."""
    there, where = content.optimizers, str(content.reader.path / EXTRA)
    mine, theirs = [one["class"] for one in here], [one["class"] for one in there]
    remedy = "Build the same optimizers, or load with model_only=True."
    if mine != theirs:
        if content.reader.aliases is None:
            remedy = f"If an import took one for another, import again with --optimizer CLASS. {remedy}"
        raise CheckpointError(
            f"{where}: the optimizers are {shown(theirs)} in the checkpoint and {mine} here. {remedy}"
        )
    for number, (one, other) in enumerate(zip(here, there, strict=True)):
        # Names say what is what: places of a pipe may have any order.
        groups, others = ([sorted(group["params"]) for group in each["groups"]] for each in (one, other))
        if groups != others:
            place = next((i for i, (a, b) in enumerate(zip(groups, others, strict=False)) if a != b), None)
            which = (
                f"group {place}" if place is not None else f"the number of groups ({len(others)}, here {len(groups)})"
            )
            raise CheckpointError(f"{where}: {which} of optimizer {number} holds other parameters. {remedy}")
        for group, other_group in zip(one["groups"], other["groups"], strict=True):
            # Versions of a class add options; another class of its name lacks some and has others.
            lacks = optimizers[number].optimizer.defaults.keys() - HOW - other_group["options"].keys()
            strange = other_group["options"].keys() - HOW - OF_SCHEDULERS - group["options"].keys()
            if lacks and strange:
                raise CheckpointError(
                    f"{where}: optimizer {number} is another {one['class']} than here: its options have "
                    f"{shown(min(strange, key=str))}, and not '{min(lacks)}'. {remedy}"
                )
            for key in group["options"].keys() & other_group["options"].keys():
                mine_value, value = group["options"][key], other_group["options"][key]
                if not _is_alike(mine_value, value):
                    raise CheckpointError(
                        f"{where}: '{key}' of optimizer {number} is {shown(value)}, here {mine_value!r}."
                    )


def _is_alike(one: Any, other: Any) -> bool:
    """Return whether two values of a hyper-parameter are compatible: two numbers, equal types, or a missing value."""
    numbers = (int, float, Tensor)
    both_are_numbers = isinstance(one, numbers) and isinstance(other, numbers)
    return both_are_numbers or one is None or other is None or type(one) is type(other)


def _is_loss_scale(scale: Any) -> bool:
    return scale is None or (
        isinstance(scale, list)
        and [type(part) for part in scale] == [float, int, list]
        and 0 <= scale[1] < MAX_STEPS
        and all(type(value) is float and 0.0 < value < math.inf for value in [scale[0], *scale[2]])
    )


def _check_states(optimizers: Sequence[ShardedOptimizer], whole: Whole, content: Content) -> None:
    """Raise unless each state belongs to a parameter of its optimizer, and is of its shape where it is to be cut."""
    reader = content.reader
    slots = _slots_of(optimizers)
    known = {f"{n}/{p}" for n, one in enumerate(whole.optimizers) for group in one["groups"] for p in group["params"]}
    listed = {f"{place}/{name}" for place, one in enumerate(content.optimizers) for name in one["states"]}
    if strangers := sorted(listed - known):
        raise CheckpointError(f"{reader.path}: the state of '{strangers[0]}' matches no parameter here.")
    for spec in reader.states.values():
        if spec.kind != "state":
            continue
        name = _owner_of(reader, spec)
        slot = slots.get(name)
        if name not in listed or (slot is not None and _is_cut(slot, spec) and spec.shape != tuple(slot.shape)):
            raise CheckpointError(
                f"{reader.path}: the state '{spec.name}' {spec.shape} matches no parameter of the model."
            )


def _slots_of(optimizers: Sequence[ShardedOptimizer]) -> dict[str, Slot]:
    """Return the parameters by the place of their optimizer and their name, as in "0/weight"."""
    return {f"{place}/{slot_of(m).name}": slot_of(m) for place, one in enumerate(optimizers) for m in one.masters}


def _is_cut(slot: Slot, state: Spec) -> bool:
    """Return whether ranks have slices of a state; a run that updated whole parameters stored counters, too."""
    return slot.updater is None and split_state(state.name)[1] not in slot.counters


def _owner_of(reader: CheckpointReader, state: Spec) -> str:
    """Return the optimizer and the parameter of a state, as in "0/weight" of "0/exp_avg/weight"."""
    try:
        number, _, name = split_state(state.name)
    except ValueError as error:
        raise CheckpointError(f"{reader.path}: {error}.") from error
    return f"{number}/{name}"


def _copy_states(optimizers: Sequence[ShardedOptimizer], content: Content, mesh: Mesh, cast: Specs) -> None:
    """Read this rank's part of every state; where there is a tensor for it already, into that.

    Args:
        cast: the checkpoint's parameters, if dtypes may differ from theirs; else empty.
    """
    keys: dict[tuple[int, str], list[tuple[Any, str]]] = defaultdict(list)
    for spec in content.reader.states.values():
        if spec.kind == "state":
            number, key, name = split_state(spec.name)
            keys[number, name].append((key, spec.name))
    for place, (one, saved) in enumerate(zip(optimizers, content.optimizers, strict=True)):
        one.steps = saved["steps"]
        casts = {} if isinstance(one.optimizer, PackingOptimizer) else cast  # its states have dtypes of their own
        # What the optimizer has made since goes, as in torch's load_state_dict; an older checkpoint may lack defaults.
        held: dict[Any, Any] = one.optimizer.state
        for stale in held.keys() - {*one.masters}:
            del held[stale]
        held.update(_others(one, saved["others"]))
        for group, described in zip(one.optimizer.param_groups, saved["groups"], strict=True):
            for stale in group.keys() - {"params"} - HOW - one.optimizer.defaults.keys() - described["options"].keys():
                del group[stale]
            options = {key: _like(value, group.get(key)) for key, value in described["options"].items()}
            group.update({key: value for key, value in options.items() if key not in HOW})
            for master in group["params"]:
                slot = slot_of(master)
                whole, before = saved["states"].get(slot.name), held.pop(master, {})
                if whole is not None and (slot.updater is None or slot.has_whole_states):
                    state = {key: _place(key, value, group, slot) for key, value in whole.items()}
                    for key in (made := [key for key, value in state.items() if isinstance(value, Tensor)]):
                        state[key] = state[key].to(_dtype_here(slot, key, state[key].dtype, casts))
                    parts = parts_of(one.optimizer, before)
                    for key, name in keys[place, slot.name]:
                        there = None if key in parts else before.get(key)
                        state[key] = _read_state(content.reader, name, master, key, there, mesh, casts)
                    held[master], master.uncut = pack(one.optimizer, state), frozenset(k for k in made if state[k].ndim)


def _read_state(
    reader: CheckpointReader, name: str, master: Tensor, key: Any, before: Any, mesh: Mesh, cast: Specs
) -> Tensor:
    slot, there = slot_of(master), reader.states[name]
    dtype = _dtype_here(slot, key, dtype_of(there.dtype), cast)
    if not _is_cut(slot, there):
        values = torch.empty(there.numel, dtype=dtype_of(there.dtype), device="cpu")
        reader.fill_state(name, 0, bytes_of(values))
        return like_parameter(slot, to_rows(values, there).to(master.device, dtype))
    here = Spec(there.kind, name, there.dtype, there.shape, order := order_of(slot))
    can_stay = isinstance(before, Tensor) and before.shape == master.shape and (before.dtype == dtype or bool(cast))
    state: Tensor = before if can_stay else slot.bucket.room(slot.index, key, dtype)
    read_part(there, here, held_range(slot), cut_of(slot, order, mesh), reader.fill_state, state)
    return state


def _dtype_here(slot: Slot, key: Any, dtype: torch.dtype, cast: Specs) -> torch.dtype:
    """Return the dtype that a state gets. As torch casts states, those in the dtype of their parameter follow it."""
    parameter = None if key in slot.counters else cast.get(slot.name)
    follows = parameter is not None and dtype == dtype_of(parameter.dtype)
    return slot.bucket.master(slot.index).dtype if follows else dtype


def _others(one: ShardedOptimizer, saved: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return states under keys that are no parameters; their tensors go where those of parameters do."""
    if not one.masters:
        return dict(saved)
    group, slot = one.optimizer.param_groups[0], slot_of(one.masters[0])
    return {
        name: {key: _place(key, value, group, slot) for key, value in state.items()}
        if isinstance(state, dict)
        else _place(name, state, group, slot)
        for name, state in saved.items()
    }


def _place(key: str, value: Any, group: Mapping[str, Any], slot: Slot) -> Any:
    """Return a state beside the elements on the device where torch wants it: counters stay on the CPU by default."""
    if not isinstance(value, Tensor) or (key == "step" and not (group.get("fused") or group.get("capturable"))):
        return value
    return value.to(slot.bucket.master(slot.index).device)


def _like(value: Any, before: Any) -> Any:
    """Return a hyper-parameter; a tensor goes where the one before was."""
    return value.to(before.device) if isinstance(value, Tensor) and isinstance(before, Tensor) else value


# -- the rest ---------------------------------------------------------------------------------------------------------


def _restore(engine: Engine, content: Content) -> None:
    scale = engine.loss_scale
    if scale is not None and content.loss_scale is not None:
        scale.value, scale._good_steps, scale.history = content.loss_scale
        scale.noted = []
    write_generators(saved_generators(engine.mesh, content.reader), engine.mesh.device)
