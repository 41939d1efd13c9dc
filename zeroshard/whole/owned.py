"""States of parameters that one rank updates whole: their description and their transfer to other ranks.

Owns the description of such states, which every rank needs for saving and gathering, and the gather itself. It must
not know files. Read `update/exchange.py` first.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import torch

from zeroshard.core.engine import Engine
from zeroshard.core.slot import Slot, slot_of
from zeroshard.table.owners import plan_rounds
from zeroshard.tree import map_tensors
from zeroshard.update.optimizer import ShardedOptimizer
from zeroshard.wire.comm import Tag

__all__ = ["OwnedState", "gather_owned", "is_stored", "like_parameter", "own_state", "owned_states"]

Tensor = torch.Tensor
OwnedState = Mapping[Any, Any]
"""A state of a parameter, by key; a tensor with dimensions is described by a meta tensor of its shape and dtype."""
PLAIN = (bool, int, float, str, NoneType)


def is_stored(value: Any) -> bool:
    """Return whether a state is a tensor with dimensions; a tensor without dimensions is a counter."""
    return isinstance(value, Tensor) and value.ndim > 0


def own_state(one: ShardedOptimizer, master: Tensor) -> dict[Any, Any]:
    """Return the state of a parameter that this rank updates whole; empty on other ranks."""
    return one.optimizer.state.get(master, {}) if slot_of(master).has_whole_states else {}


def owned_states(engine: Engine, optimizers: Sequence[ShardedOptimizer]) -> list[dict[str, OwnedState]]:
    """Return the states, on any rank, of parameters that are updated whole, by optimizer and parameter.

    Collective: if parameters have owners, an all-gather of some hundred bytes per owned parameter; every rank must
    call.
    """
    found: list[dict[str, OwnedState]] = []
    for one in optimizers:
        whole = [master for master in one.entries if slot_of(master).updater is not None]
        is_here = all(slot_of(master).bucket.spec.updates_all for master in whole)
        read: list[Any] = [mine := _described(one, whole, takes_all=is_here)]
        if not is_here:
            read = [json.loads(row) for row in _texts(engine, json.dumps(mine), "the states of whole parameters")]
        if wrong := [text for text in read if isinstance(text, str)]:
            raise TypeError(f"{engine.mesh} {wrong[0]}")
        states = {name: {key: _undescribed(*rest) for key, *rest in pairs} for row in read for name, pairs in row}
        # In the order of parameters, which is equal on all ranks.
        found.append({name: states[name] for m in whole if (name := slot_of(m).name) in states})
    return found


def _described(one: ShardedOptimizer, masters: Sequence[Tensor], *, takes_all: bool) -> list[Any] | str:
    """Return the name and states of each parameter: keys, dtypes, shapes, and values of 0-d tensors.

    Returns a text instead if a state cannot be described: the error that all ranks raise.

    Args:
        takes_all: whether states of other types stand for themselves, since each rank has all.
    """
    found = []
    for master in masters:
        pairs: list[tuple[Any, str, list[int] | None, Any]] = []
        for key, value in own_state(one, master).items():
            if isinstance(value, Tensor):
                dtype, shape = str(value.dtype).removeprefix("torch."), [*value.shape]
                pairs.append((key, dtype, shape, None if is_stored(value) else value.item()))
            elif takes_all or isinstance(value, PLAIN):
                pairs.append((key, "", None, value))
            else:
                return (
                    f"The state {key!r} of '{slot_of(master).name}' is a {type(value).__name__}, but its owner can "
                    "send only tensors, numbers and strings to other ranks. Use one of these types for the state."
                )
        if pairs:
            found.append((slot_of(master).name, pairs))
    return found


def _undescribed(dtype: str, shape: list[int] | None, value: Any) -> Any:
    if shape is None:
        return value
    kind = getattr(torch, dtype)
    return torch.empty(shape, dtype=kind, device="meta") if shape else torch.tensor(value, dtype=kind, device="cpu")


def _texts(engine: Engine, text: str, what: str) -> list[str]:
    """Return the text of each rank of this replica, of any length."""
    data = text.encode()
    most = -engine.comm.agree([-len(data)], what)[0]
    row = torch.zeros(most, dtype=torch.uint8, device="cpu")
    row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = engine.comm.collect(row, what, "state")
    return [bytes(rows[rank].tolist()).rstrip(b"\0").decode() for rank in engine.mesh.shard_ranks]


def gather_owned(
    engine: Engine, one: ShardedOptimizer, states: Mapping[str, OwnedState]
) -> Iterator[tuple[Slot, dict[Any, Any]]]:
    """Yield each parameter with a whole state, and a copy of the state.

    Args:
        states: the result of `owned_states` for the optimizer.
    Collective: all-gathers of the states, grouped by similar size; every rank must call.
    """
    masters = {name: master for master in one.entries if (name := slot_of(master).name) in states}
    made = {name: map_tensors(dict(state), Tensor.clone) for name, state in states.items()}
    by_dtype: dict[torch.dtype, list[tuple[str, Any]]] = {}
    for name, state in states.items():
        for key, value in state.items():
            if is_stored(value) and slot_of(masters[name]).bucket.spec.updates_all:
                made[name][key] = own_state(one, masters[name])[key].detach().clone()
            elif is_stored(value):
                by_dtype.setdefault(value.dtype, []).append((name, key))
    for names in by_dtype.values():
        _gather(engine, one, masters, made, names)
    for name, state in made.items():
        yield slot_of(masters[name]), state


def _gather(
    engine: Engine,
    one: ShardedOptimizer,
    masters: Mapping[str, Tensor],
    made: dict[str, dict[Any, Any]],
    names: Sequence[tuple[str, Any]],
) -> None:
    """Replace descriptions, all of one dtype, by the tensors that they describe."""
    size, rank, device = engine.mesh.shard_size, engine.mesh.shard_rank, engine.mesh.device
    owners = [slot_of(masters[name]).updater or 0 for name, _ in names]
    described = [made[name][key] for name, key in names]
    # The owner has all parts.
    parts = [
        [value.numel() * (place == owner) for place in range(size)]
        for value, owner in zip(described, owners, strict=True)
    ]
    for turn in plan_rounds(owners, parts):
        numels = [sum(described[place].numel() for place in bundle) for bundle in turn.bundles]
        row_numel, at = max(numels), [0] * size
        full = torch.zeros(size * row_numel, dtype=described[0].dtype, device=device)
        rows = full.view(size, row_numel)
        if mine := [own_state(one, masters[names[place][0]])[names[place][1]] for place in turn.bundles[rank]]:
            rows[rank, : numels[rank]] = torch.cat([value.detach().reshape(-1) for value in mine])
        if row_numel:
            tag = Tag(engine.order.next_number(), 0, "the states of whole parameters")
            engine.comm.gather(full, tag, kind="state").wait()
        for owner, bundle in enumerate(turn.bundles):
            for place in bundle:
                (name, key), shape = names[place], described[place].shape
                values = rows[owner, at[owner] : at[owner] + shape.numel()].view(shape)
                made[name][key] = like_parameter(slot_of(masters[name]), values)
                at[owner] += shape.numel()


def like_parameter(slot: Slot, values: Tensor) -> Tensor:
    """Return a copy of a state, with the parameter's strides if it has the parameter's shape."""
    is_alike = tuple(values.shape) == slot.bucket.places.shapes[slot.index]
    return slot.bucket.places.dense(slot.index, values) if is_alike else values.clone()
