"""The tensors of a sharded model's state, and this rank's elements of each.

Owns the way from the engine's buckets to logical tensors. It must not know files. Read `core/buffer.py` and
`manifest.py` (`Spec`) first.

Note: ranges
    A parameter lies in its bucket in its own order of dimensions, so elements [a, b) of the bucket are elements
    [a - offset, b - offset) of the tensor in that order, or of this rank's part if the mesh splits the tensor
    (`cuts.py`). The optimizer's states are cut as the master values are. What every rank has whole (stage 0, buffers)
    has one writer: of the bucket its shard's owner, of buffers rank 0 (the first rank at a place of a pipe). States of
    a parameter that is updated whole are tensors of any shape, and lie wholly on the rank that updates it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from zeroshard.checkpoint.cuts import Cut, Part, cut_of, layouts_of, ranks_here
from zeroshard.checkpoint.generators import SHARED
from zeroshard.checkpoint.manifest import join_state
from zeroshard.checkpoint.ranges import Spec
from zeroshard.checkpoint.values import check_key, dtype_name
from zeroshard.core.engine import Engine
from zeroshard.core.parameter import ShardedParameter
from zeroshard.core.slot import Slot, slot_of
from zeroshard.optim.packed import Packed, tensor_of, views_of
from zeroshard.table.layout import Layout
from zeroshard.update.optimizer import ShardedOptimizer, check_states, is_cut
from zeroshard.whole.owned import OwnedState, is_stored, own_state
from zeroshard.wire.mesh import Mesh

__all__ = [
    "Item",
    "aliases_of",
    "generator_items",
    "groups_of",
    "held_range",
    "model_items",
    "named_buffers",
    "order_of",
    "own_entries",
    "state_items",
]

Tensor = torch.Tensor


@dataclass(frozen=True)
class Item:
    """One logical tensor, and this rank's part of it.

    Args:
        value: (stop - start of `held`,), this rank's elements; None if it has none. Packed values are unpacked at
            each request for a part.
        held: the elements that `value` is, of the tensor, or of this rank's part of it where `cut` is not None.
        slot: the parameter whose bucket decides who writes what; None where `owner` writes the whole.
        owner: a rank, as all places of a pipe count them.
        cut: the split of the tensor over the mesh's axis "tensor".
        layouts: of the parameter's bucket, on the ranks along "tensor" that write.
        by_others: what `chunks` returns for a tensor that another place of a pipe writes.
    """

    spec: Spec
    value: Tensor | Packed | None
    held: tuple[int, int]
    slot: Slot | None = None
    owner: int = 0
    cut: Cut | None = None
    layouts: Sequence[Layout] = ()
    by_others: tuple[tuple[int, int, int], ...] = ()

    def chunks(self, writers: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
        """Return who writes what: a rank and elements of the tensor, in the order of the elements.

        Args:
            writers: the ranks that write, by their places along "tensor" and along "shard".
        """
        if self.slot is None:
            own = [(self.owner, 0, self.spec.numel)] if self.spec.numel and not self.by_others else []
            return own + list(self.by_others)
        found: list[tuple[int, int, int]] = []
        for shard in sorted({shard for layout in self.layouts for shard in layout.shards_of(self.slot.index)}):
            ranges = self._ranges(self.slot, shard)
            parts = [(0, *ranges[0])] if self.cut is None else self.cut.chunks(ranges)
            found += [(writers[place][shard], first, last) for place, first, last in parts]
        return sorted(found, key=lambda chunk: chunk[1])

    def _ranges(self, slot: Slot, shard: int) -> list[tuple[int, int]]:
        """Return the elements of the parameter in a shard of its bucket, as each rank along "tensor" counts them."""
        cuts = (layout.overlap(slot.index, *layout.shard_range(shard)) for layout in self.layouts)
        offsets = (layout.offsets[slot.index] for layout in self.layouts)
        return [(start - offset, stop - offset) for offset, (start, stop) in zip(offsets, cuts, strict=True)]

    def part(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop), which this rank must hold, flat; of its part where the tensor is split."""
        assert self.value is not None, f"{self.spec.name} is requested from a rank that does not hold it"
        return tensor_of(self.value).detach().reshape(-1)[start - self.held[0] : stop - self.held[0]]

    def range_of(self, shard: int) -> tuple[int, int]:
        """Return the elements of the tensor, or of this rank's part of it, that lie in a shard of its bucket."""
        assert self.slot is not None, f"{self.spec.name} lies in no bucket"
        return self._ranges(self.slot, shard)[self.cut.place if self.cut is not None else 0]

    def exchanged(self, index: int, shard: int) -> Part | None:
        """Return the part of which ranks along "tensor" exchange whole rows; None if the tensor is not split.

        Args:
            index: place of the item among all that are saved.
            shard: place of this rank along "shard".
        """
        if self.slot is None or self.cut is None:
            return None
        return Part(index, self.cut, self._ranges(self.slot, shard), self.spec.dtype, self.part)


def model_items(engine: Engine, model: nn.Module) -> list[Item]:
    """Return parameters (their master values) and persistent buffers."""
    items, splits = list[Item](), _Splits(engine.mesh)
    for slot in engine.slots.values():
        dtype = dtype_name(slot.bucket.dtypes.master, f"Parameter '{slot.name}'")
        spec = Spec("model", slot.name, dtype, tuple(slot.shape), order_of(slot))
        items.append(splits.item(spec, slot.bucket.master(slot.index).detach(), slot))
    for name, buffer in _buffers(model):
        spec = Spec("model", name, dtype_name(buffer.dtype, f"Buffer '{name}'"), tuple(buffer.shape))
        items.append(Item(spec, buffer.detach(), (0, buffer.numel()), owner=ranks_here(engine.mesh)[0]))
    return items


def state_items(
    engine: Engine, optimizers: Sequence[ShardedOptimizer], owned: Sequence[Mapping[str, OwnedState]]
) -> list[Item]:
    """Return the states with a value per element, and all state tensors of parameters that are updated whole.

    Args:
        owned: what `owned_states` returned.
    """
    here, splits = ranks_here(engine.mesh), _Splits(engine.mesh)
    check_states(optimizers, f"{engine.mesh} zero.save()")
    items, first_copy = list[Item](), [here[rank] for rank in engine.mesh.rows("shard")[0].tolist()]
    for (number, one), of_owners in zip(enumerate(optimizers), owned, strict=True):
        one.source.check()
        for master in one.masters:
            slot = slot_of(master)
            if slot.updater is not None:
                own, described = own_state(one, master), of_owners.get(slot.name, {})
                for key in sorted((key for key, value in described.items() if is_stored(value)), key=repr):
                    check_key(key, f"The state of '{slot.name}' in optimizer {number}")
                    name, value = join_state(number, key, slot.name), own.get(key)
                    shape = tuple(described[key].shape)
                    spec = Spec("state", name, dtype_name(described[key].dtype, f"State '{name}'"), shape)
                    held_numel = 0 if value is None else value.numel()
                    items.append(Item(spec, value, (0, held_numel), owner=first_copy[slot.updater]))
                continue
            held = views_of(one.optimizer, one.optimizer.state.get(master, {}))
            state = {key: value for key, value in held.items() if is_cut(key, value, master)}
            for key in sorted(state, key=repr):
                value = state[key]
                check_key(key, f"The state of '{slot.name}' in optimizer {number}")
                name = join_state(number, key, slot.name)
                dtype = dtype_name(value.dtype, f"State '{name}'")
                spec = Spec("state", name, dtype, tuple(slot.shape), order_of(slot))
                items.append(splits.item(spec, value, slot))
    return items


def generator_items(engine: Engine, own: dict[str, Tensor]) -> list[Item]:
    """Return the random generators of all ranks; sizes are equal on all ranks, and each rank has its own values.

    Of those that ranks along "tensor" share, the first of these ranks has the only one.

    Args:
        own: this rank's, by name.
    """
    items = []
    mesh = engine.mesh.across
    first = {*mesh.rows("tensor")[:, 0].tolist()}
    for rank in range(mesh.world_size):
        for name, state in own.items():
            if name in SHARED and rank not in first:
                continue
            spec = Spec("rng", f"rng/{rank}/{name}", "U8", (state.numel(),))
            value = state if rank == mesh.rank else None
            items.append(Item(spec, value, (0, state.numel() if value is not None else 0), owner=rank))
    return items


def groups_of(
    optimizers: Sequence[ShardedOptimizer], owned: Sequence[Mapping[str, OwnedState]] = ()
) -> list[dict[str, Any]]:
    """Return classes, groups, hyper-parameters, steps, and the states without a value per element or of no parameter.

    Args:
        owned: what `owned_states` returned; without it nothing is said of states of parameters that are updated whole.
    """
    described = []
    for one, of_owners in zip(optimizers, owned or [{}] * len(optimizers), strict=True):
        groups, whole = [], dict[str, dict[Any, Any]]()
        for group in one.optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({"options": options, "params": [slot_of(master).name for master in group["params"]]})
        for master in one.masters:
            slot = slot_of(master)
            if slot.name in of_owners:
                whole[slot.name] = {key: v for key, v in of_owners[slot.name].items() if not is_stored(v)}
            elif slot.updater is None and (state := one.optimizer.state.get(master)) is not None:
                held = views_of(one.optimizer, state)
                whole[slot.name] = {key: value for key, value in held.items() if not is_cut(key, value, master)}
        cls = type(one.optimizer).__name__
        others = {key: value for key, value in one.optimizer.state.items() if not isinstance(key, Tensor)}
        described.append({"class": cls, "groups": groups, "others": others, "states": whole, "steps": one.steps})
    return described


def own_entries(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the keys that the optimizer's class adds to a state dict of torch."""
    # A twin without parameters and hooks can be asked on each rank alone: the state dict of shards is refused.
    twin = object.__new__(type(optimizer))
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    vars(twin).update(vars(optimizer), state={}, param_groups=groups)
    vars(twin).update({key: OrderedDict() for key in vars(twin) if key.startswith("_optimizer_state_dict_p")})
    vars(twin).pop("state_dict", None)
    try:
        return sorted({*map(str, twin.state_dict())} - {"state", "param_groups"})
    except Exception:  # code of others, which may need parameters: what it adds is not known
        return ["..."]


def aliases_of(engine: Engine, model: nn.Module) -> dict[str, str]:
    """Return the other names of tied parameters and shared buffers, with the first name of each."""
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # Checkpoints do not contain ignored parameters.
        if isinstance(parameter, ShardedParameter) and (first := slot_of(parameter).name) != name:
            aliases[name] = first
    seen: dict[int, str] = {}
    for name, buffer in named_buffers(model):
        if (first := seen.setdefault(id(buffer), name)) != name:
            aliases[name] = first
    return aliases


def order_of(slot: Slot) -> tuple[int, ...]:
    """Return a parameter's dimensions from the slowest to the fastest; empty where that is row-major."""
    shape, strides = slot.bucket.places.shapes[slot.index], slot.bucket.places.strides[slot.index]
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    # Dimensions of one element may have any stride; their position does not matter.
    moved = [dim for dim in order if shape[dim] > 1]
    return () if moved == sorted(moved) else tuple(order)


@final
class _Splits:
    """How parameters are split over the mesh's axis "tensor"."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._layouts: dict[int, list[Layout]] = {}
        """Those of each bucket, by its number."""

    def item(self, spec: Spec, value: Tensor | Packed | None, slot: Slot) -> Item:
        """Return the item of a parameter, or of a state that is cut as its parameter is."""
        bucket, cut = slot.bucket, cut_of(slot, spec.order, self._mesh)
        if bucket.number not in self._layouts:
            self._layouts[bucket.number] = layouts_of(bucket, self._mesh)
        layouts = self._layouts[bucket.number]
        # The first rank along the axis writes what all have.
        return Item(spec, value, held_range(slot), slot, cut=cut, layouts=layouts[:1] if cut is None else layouts)


def held_range(slot: Slot) -> tuple[int, int]:
    """Return the elements of a parameter, or of this rank's part of it, that this rank updates, as (start, stop).

    Elements are counted in their order in memory.
    """
    bucket = slot.bucket
    start, stop = bucket.master_range(slot.index)
    offset = bucket.layout.offsets[slot.index]
    return (start - offset, stop - offset) if stop > start else (0, 0)


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for name, buffer in named_buffers(model):
        if id(buffer) not in seen:
            seen.add(id(buffer))
            yield name, buffer


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers in a state dict: persistent buffers, by all their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
