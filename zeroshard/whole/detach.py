"""`zero.detach()`: a sharded model and its optimizers become plain ones again, the same objects.

Owns the checks, the return of values unit by unit, and the end of the engine. Hooks and replaced attributes are taken
back by `core/undo.py`. Read `whole/gathered.py` (how states become full) first.

Note: what a parameter gets
    A parameter gets its master weight, which `optimizer.step()` would have continued from, in memory of its own. A
    dtype that was wider before `zs.shard` is restored: frozen parameters, which have no master weights, are otherwise
    narrower than the others. `dtype=` overrides both. States follow the parameter, as in `load_state_dict`.
Note: memory
    Each unit is gathered in full, and its buckets are freed before the next unit. So a device holds at most what is
    plain already, what is still sharded, and one unit twice. Whether that fits is tried before anything changes.
"""

import gc
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from zeroshard.core.buffer import Bucket
from zeroshard.core.engine import Engine
from zeroshard.core.slices import MasterSlice, point_at
from zeroshard.core.slot import Slot, let_go, slot_of
from zeroshard.core.undo import Undo
from zeroshard.core.unit import Unit
from zeroshard.join.start import accepted_by_all
from zeroshard.optim.packed import views_of
from zeroshard.table.bytes import kept_bytes, on_device
from zeroshard.torch_private import set_slot
from zeroshard.update.optimizer import ShardedOptimizer, check_states, is_cut
from zeroshard.whole.gathered import gather_states
from zeroshard.whole.owned import OwnedState, is_stored, owned_states
from zeroshard.wire.comm import Tag

__all__ = ["PLACES", "detach", "gather_masters", "release"]

Tensor = torch.Tensor
PLACES = ("all", "rank 0")


def detach(
    engine: Engine,
    optimizers: Sequence[ShardedOptimizer],
    before: Mapping[str, torch.dtype],
    *,
    to: str,
    dtype: torch.dtype | None,
    room_bytes: int | None,
) -> None:
    """Return plain parameters and optimizers, and end the engine.

    Args:
        before: the dtype of each parameter before `zs.shard`, by name.
        to: "all", or "rank 0": the other ranks then have parameters of 0 elements, and no states.
        dtype: the dtype of floating-point parameters; None for that of the master weights.
        room_bytes: the bytes that a rank may use on its device; None for no limit.

    Raises:
        ValueError: an argument is not supported; equal on all ranks.
        RuntimeError: called inside a pass or `gathered()`, or gradients were not applied; nothing was changed.
        MemoryError: this rank has too little memory; nothing was changed.
        RankMismatchError: another rank has too little memory, or gradients that were not applied; nothing was changed.

    Collective: all-gathers of all parameters and states; every rank must call.
    """
    engine.leave_passes("zero.detach()")
    if engine.gathered is not None:
        raise RuntimeError(f"{engine.mesh} zero.detach() under gathered(): leave the context first.")
    # Arguments are equal on all ranks behind it, so each check below fails on all of them.
    engine.order.settle(f"detach(to={to!r}, dtype={dtype})")
    _check_arguments(engine, to, dtype)
    engine.check_reduced("zero.detach()")
    engine.catch_up()
    keeps = to == "all" or engine.mesh.rank == 0
    owned = owned_states(engine, optimizers)
    work = _Detached(engine, optimizers, before, owned, dtype, keeps=keeps)
    with accepted_by_all(engine.mesh, "zero.detach()"):
        _check_gradients(engine, optimizers)
        check_states(optimizers, f"{engine.mesh} zero.detach()")
        work.check_room(room_bytes)
    for slot in engine.slots.values():
        slot.bucket.grads.clear(slot.index)
    for one in optimizers:
        one.open_states()
    for unit in engine.units:
        work.give_back(unit)
    engine.order.barrier("the end of detach()")
    engine.undo.run()
    work.finish()
    engine.comm.close()
    engine.end()
    gc.collect()  # what references itself, such as units and slots, holds memory and descriptors


def release(engine: Engine, one: ShardedOptimizer, undo: Undo) -> None:
    """Make an optimizer plain, without states, as one of the sharded model's parameters that was never attached.

    Args:
        undo: what was registered or replaced on it.

    Raises:
        RuntimeError: called inside `gathered()`; nothing was changed.
    """
    if engine.gathered is not None:
        raise RuntimeError(f"{engine.mesh} new optimizers under gathered(): leave the context first.")
    one.put_back()
    let_go(slot_of(master) for master in one.masters)
    one.optimizer.state.clear()
    undo.run()
    for group in one.optimizer.param_groups:
        group["params"] = [slot_of(master).parameter for master in group["params"]]


def _check_arguments(engine: Engine, to: str, dtype: torch.dtype | None) -> None:
    if to not in PLACES:
        raise ValueError(f"zero.detach(to=) must be 'all' or 'rank 0'; got {to!r}.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"zero.detach(dtype=) must be a floating-point dtype of torch, or None; got {dtype!r}.")
    if to != "all" and len(engine.mesh.tensor_ranks) > 1:
        raise ValueError(
            "zero.detach(to='rank 0') with an axis 'tensor': rank 0 has only its part of split parameters. Use "
            "to='all', which returns DTensors, or zero.save(path)."
        )


def _check_gradients(engine: Engine, optimizers: Sequence[ShardedOptimizer]) -> None:
    """Raise if gradients of the last backward, or that user code has assigned, were not applied by an optimizer."""
    applied = {slot_of(master).name: one.applied for one in optimizers for master in one.masters}
    fresh = [s for s in engine.slots.values() if s in engine.assigned or applied.get(s.name, -1) < engine.backwards]
    left = [slot.name for slot in fresh if slot.has_grad]
    if left:
        raise RuntimeError(
            f"{engine.mesh} zero.detach() with gradients that no step has applied: of {len(left)} parameter(s), "
            f"'{left[0]}' first. Call optimizer.step() to apply them, or model.zero_grad(set_to_none=True) to drop "
            "them. Nothing was changed."
        )


@final
class _Detached:
    """The return of values to parameters and optimizers.

    Args:
        owned: for each optimizer, the states of parameters that one rank updates whole.
        keeps: whether this rank keeps values.
    """

    def __init__(
        self,
        engine: Engine,
        optimizers: Sequence[ShardedOptimizer],
        before: Mapping[str, torch.dtype],
        owned: Sequence[Mapping[str, OwnedState]],
        dtype: torch.dtype | None,
        *,
        keeps: bool,
    ) -> None:
        self._engine, self._optimizers, self._owned, self._keeps = engine, optimizers, owned, keeps
        self._dtypes = {slot.name: _dtype_of(slot, before[slot.name], dtype) for slot in engine.slots.values()}
        self._places = {one: [slot_of(master).parameter for master in one.masters] for one in optimizers}

    def check_room(self, room_bytes: int | None) -> None:
        """Raise if the device has too little memory; needs no communication."""
        engine, device = self._engine, self._engine.mesh.device
        buckets = [bucket for unit in engine.units for bucket in unit.buckets]
        sizes: dict[int, int] = {unit.number: 0 for unit in engine.units}
        for slot in engine.slots.values():
            sizes[slot.unit] += _numel(slot) * self._dtypes[slot.name].itemsize
        held = on_device(kept_bytes(bucket.spec for bucket in buckets)) * (not engine.comm.pool.memory.is_shared)
        for one, owned in zip(self._optimizers, self._owned, strict=True):
            for master in one.entries:
                nbytes, held_bytes = _states_of(one, master, owned)
                sizes[slot_of(master).unit] += nbytes
                held += held_bytes
        total = sum(sizes.values()) * self._keeps
        # One unit exists in full while its values are given to the parameters.
        need = max(0, total - held) + 2 * max(sizes.values(), default=0)
        if room_bytes is not None and total > room_bytes:
            raise MemoryError(_too_little(f"{total:,} bytes are needed on {device}, and {room_bytes:,} may be used"))
        try:
            torch.empty(need, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise MemoryError(_too_little(f"{need:,} bytes more are needed on {device}: {error}")) from None

    def give_back(self, unit: Unit) -> None:
        """Give full values and states to the parameters of a unit, and free its buckets. Collective: all-gathers."""
        engine, names = self._engine, {slot.name for slot in unit.slots}
        for one, owned in zip(self._optimizers, self._owned, strict=True):
            masters = [master for master in one.entries if slot_of(master).name in names]
            mine = {name: state for name, state in owned.items() if name in names}
            whole = gather_states(engine, one, masters, mine)
            for master in masters:
                slot, state = slot_of(master), one.optimizer.state
                state.pop(master, None)
                if self._keeps and slot.name in whole:
                    # Packed states stay unpacked: packing them whole would round them again.
                    state[slot.parameter] = _like(whole[slot.name], slot, self._dtypes[slot.name])
                # Its entry stays in the group until all units are plain, without memory.
                point_at(master, master.new_empty(0))
        for bucket in unit.buckets:
            views = bucket.places.views_of(gather_masters(engine, bucket))
            for slot, values in zip([slot_of(p) for p in bucket.parameters], views, strict=True):
                self._give(slot, values)
        for bucket in unit.buckets:
            bucket.end()

    def _give(self, slot: Slot, values: Tensor) -> None:
        parameter, dtype = slot.parameter, self._dtypes[slot.name]
        made = torch.empty_like(values, dtype=dtype) if self._keeps else values.new_empty(0, dtype=dtype)
        set_slot(parameter, None)
        parameter.__class__ = slot.form.plain
        del parameter.__dict__["_zeroshard"]
        slot.form.point(parameter, made.copy_(values) if self._keeps else made)

    def finish(self) -> None:
        """Put the parameters into the groups of the optimizers, and drop states of slices that ranks cannot join."""
        for one, parameters in self._places.items():
            for left in [key for key in one.optimizer.state if isinstance(key, MasterSlice)]:
                del one.optimizer.state[left]
            remaining = iter(parameters)
            for group in one.optimizer.param_groups:
                group["params"] = [next(remaining) for _ in group["params"]]
                reads_steps = bool(group.get("fused") or group.get("capturable"))
                for state in (one.optimizer.state.get(p, {}) for p in group["params"]):
                    if isinstance(step := state.get("step"), Tensor) and not reads_steps:
                        state["step"] = step.cpu()


def gather_masters(engine: Engine, bucket: Bucket) -> Tensor:
    """Return (full_numel,): the master weights of a bucket. Collective: an all-gather."""
    full = torch.zeros(bucket.layout.full_numel, dtype=bucket.dtypes.master, device=bucket.device)
    with torch.no_grad():
        for index in range(len(bucket.parameters)):
            start, stop = bucket.master_range(index)
            full[start:stop].copy_(bucket.master(index))
    if not bucket.spec.updates_all and full.numel():
        tag = Tag(engine.order.next_number(), bucket.number, f"the parameters of {bucket.spec.name} in detach()")
        engine.comm.gather(full, tag, kind="state").wait()
    return full


def _dtype_of(slot: Slot, before: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    master: torch.dtype = slot.bucket.dtypes.master
    if not (master.is_floating_point and before.is_floating_point):
        return master
    return torch.promote_types(master, before) if asked is None else asked


def _like(state: Mapping[str, Any], slot: Slot, dtype: torch.dtype) -> dict[str, Any]:
    """Return a state with the parameter's dtype where it has the dtype of states, as `load_state_dict` casts."""
    usual = getattr(torch, slot.bucket.spec.formats.state)
    is_usual = {key: is_stored(value) and value.dtype == usual for key, value in state.items()}
    return {key: value.to(dtype) if is_usual[key] else value for key, value in state.items()}


def _states_of(one: ShardedOptimizer, master: Tensor, owned: Mapping[str, OwnedState]) -> tuple[int, int]:
    """Return the bytes of a parameter's states in full, and those that this rank has on the device now."""
    slot, state = slot_of(master), one.optimizer.state.get(master, {})
    tensors = [value for value in state.values() if isinstance(value, Tensor) and value.device == slot.bucket.device]
    held = sum(value.nbytes for value in tensors if type(value) is Tensor)
    if slot.updater is not None:
        return sum(value.nbytes for value in owned.get(slot.name, {}).values() if is_stored(value)), held
    cut = [value for key, value in views_of(one.optimizer, state).items() if is_cut(key, value, master)]
    return sum(_numel(slot) * value.dtype.itemsize for value in cut), held


def _numel(slot: Slot) -> int:
    return torch.Size(slot.bucket.places.shapes[slot.index]).numel()


def _too_little(reason: str) -> str:
    return (
        f"zero.detach(): too little memory for the plain model and its states: {reason}. Nothing was changed. Use "
        "to='rank 0', a narrower dtype=, or zero.save(path)."
    )
