"""Full parameters and optimizer states, for code that reads or changes them.

Owns the entry and exit of `zero.gathered()`, and the exchange of state slices for full states. Read
`core/unit.py` (gather and release) first.
"""

import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn

from zeroshard.core.changes import Changes, refuse_torn
from zeroshard.core.engine import Engine
from zeroshard.core.slot import Slot, slot_of
from zeroshard.join.start import accepted_by_all
from zeroshard.optim.packed import Packed, tensor_of, views_of
from zeroshard.setup.takeover import spread
from zeroshard.table.errors import RankMismatchError
from zeroshard.torch_private import version_of
from zeroshard.tree import find, map_tensors
from zeroshard.update.optimizer import ShardedOptimizer, check_states, is_cut, keep_state
from zeroshard.whole.owned import OwnedState, gather_owned, owned_states
from zeroshard.wire.comm import Tag

__all__ = ["WholeStates", "gather_states", "gathered", "parameters_of"]

Tensor = torch.Tensor


@contextmanager
def gathered(
    engine: Engine, model: nn.Module, optimizers: Sequence[ShardedOptimizer], *, writeback: bool, states: bool
) -> Iterator[None]:
    """Gather all parameters; on exit with `writeback`, broadcast the values of rank 0 of this place.

    Collective: gathers of all units (and all states) on entry; with `writeback`, broadcasts on exit.
    """
    if engine.gathered is not None:
        raise RuntimeError(f"{engine.mesh} gathered() inside gathered(): the parameters are already gathered.")
    engine.follow_entries()
    engine.leave_passes("gathered()")
    parameters = parameters_of(engine)
    # What is allocated in inference mode has no version, by which changes are found, and cannot be changed later.
    with torch.inference_mode(mode=False), torch.no_grad():
        expanded = _gather(engine, optimizers, parameters, writeback=writeback, states=states)
    before = _versions(parameters, expanded)
    seen = [(b.changes, b.changes.versions()) for unit in engine.units for b in unit.buckets if b.spec.is_whole]
    has_finished = keeps = False
    try:
        with engine.let_read(writeback=writeback, states=states):
            yield
        has_finished = True
    finally:
        told = ""
        try:
            if writeback and has_finished:
                _spread(engine, model, expanded)
                keeps = True
                engine.check_tied("gathered(writeback=True)")
            elif has_finished:
                # A rank that has left may change its shards, which other ranks may still read in place.
                after = _versions(parameters, expanded)
                told = _changes(engine, [name for name in before | after if after.get(name) != before.get(name)])
        finally:
            has_failed = not keeps and (writeback or not has_finished)
            for one in expanded:
                one.contract(writeback=keeps, has_failed=has_failed)
            for unit in engine.units:
                for bucket in unit.buckets:
                    if keeps or not bucket.spec.is_whole:
                        bucket.changes.accept()
                if not unit.spec.is_whole:
                    unit.release()
            if has_failed:
                _refuse_torn(engine, model, [changes for changes, versions in seen if changes.tear(versions)])
            _tell_kept(engine)
        if told:
            raise RuntimeError(
                f"{engine.mesh} Values were changed in place under gathered() without writeback=True:\n{told}\nChanges "
                "of sharded parameters are lost, and replicated parameters may now differ between ranks. Use `with "
                "zero.gathered(writeback=True):` on every rank, which keeps the values of rank 0."
            )


def _gather(
    engine: Engine,
    optimizers: Sequence[ShardedOptimizer],
    parameters: dict[str, nn.Parameter],
    *,
    writeback: bool,
    states: bool,
) -> list["WholeStates"]:
    """Gather all parameters, and return the gathered states of each optimizer."""
    engine.order.let_go()
    # With writeback, different changes of ranks are replaced by those of rank 0; otherwise they are an error here.
    enter = engine.order.barrier if writeback else engine.order.settle
    enter(f"gathered(writeback={writeback}, states={states})")
    engine.order.buffers.settle()
    if states:
        with accepted_by_all(engine.mesh, "gathered(states=True)"):
            check_states(optimizers, f"{engine.mesh} gathered(states=True)")
    number = engine.order.next_number()
    for unit in engine.units:
        if not unit.spec.is_whole:
            unit.start_gather(engine.comm, number, "gathered()", kind="state")
            unit.wait()
    return [WholeStates(engine, optimizer, parameters) for optimizer in optimizers if states]


def _refuse_torn(engine: Engine, model: nn.Module, torn: Sequence[Changes]) -> None:
    """Refuse evaluation with torn parameters, which no rank tells others of.

    In a training forward and its backward other ranks may wait for this one; the step raises on every rank.
    """
    check = engine.check_forward

    def refuse(name: str, inputs: Any) -> None:
        if not any(changes.torn for changes in torn):
            engine.check_forward = check
        elif not (torch.is_grad_enabled() and model.training):
            refuse_torn(torn, f"{engine.mesh} A forward")
        check(name, inputs)

    if torn:
        engine.check_forward = refuse


def _tell_kept(engine: Engine) -> None:
    """Warn if tensors of a `state_dict` outlast the context: the memory that they read stays."""
    buckets = [bucket for unit in engine.units if not unit.spec.is_whole for bucket in unit.buckets]
    if kept := sum(bucket.full.nbytes for bucket in buckets if bucket.is_lent()):
        warnings.warn(
            f"{engine.mesh} A state_dict() is kept beyond gathered(), so {kept:,} bytes of parameters stay on this "
            "rank, and later passes overwrite them. Delete the dictionary inside the context, or keep clones.",
            stacklevel=4,
        )


def parameters_of(engine: Engine) -> dict[str, nn.Parameter]:
    """Return the model's parameters by name."""
    return {slot.name: p for unit in engine.units for slot, p in zip(unit.slots, unit.parameters, strict=True)}


def _versions(parameters: Mapping[str, nn.Parameter], expanded: Sequence["WholeStates"]) -> dict[str, tuple[int, int]]:
    """Return the identity and the version of the tensor of each name."""
    named = [*parameters.items(), *(held for one in expanded for held in one.held())]
    return {name: (id(tensor), version_of(tensor)) for name, tensor in named}


def _changes(engine: Engine, changed: Sequence[str]) -> str:
    """Return a line for each rank with changes, equal on all ranks; "" without changes.

    Collective: an all-reduce of 32 bytes; with changes, an all-gather of 4 KiB.
    """
    if not engine.order.barrier("the end of gathered()", bool(changed))[1]:
        return ""
    mine = f"{len(changed)} parameter(s) or state(s), '{changed[0]}' first" if changed else ""
    return engine.mesh.lines(engine.comm.texts(mine, "what was changed under gathered()"))


def _spread(engine: Engine, model: nn.Module, expanded: Sequence["WholeStates"]) -> None:
    """Broadcast parameters, buffers and states of rank 0, and keep this rank's part."""
    buffers = [(name, buffer.data, False) for name, buffer in model.named_buffers()]
    named = [state for one in expanded for state in one.tensors()]
    # Shapes of whole states: parts of a dimension that the tensor axis does not divide differ between ranks.
    states = sorted((name, tuple(value.shape)) for one in expanded for name, value in one.held())
    shapes = repr([*states, *((name, tuple(buffer.shape)) for name, buffer, _ in buffers)])
    least, greatest = engine.order.barrier("the end of gathered(writeback=True)", zlib.crc32(shapes.encode()))
    if least != greatest:
        raise RankMismatchError(
            f"{engine.mesh} Buffers or optimizer states differ in names or shapes between ranks at the end of "
            "gathered(writeback=True). Load the same state on every rank inside the context."
        )
    with torch.no_grad():
        for unit in engine.units:
            for bucket in unit.buckets:
                spread(bucket, bucket.full, engine.comm, f"the parameters of {unit}", "state")
                bucket.keep()
                bucket.updates += 1
        for name, tensor, is_part in [*buffers, *named]:
            engine.comm.broadcast(tensor, name, "state", is_part=is_part)


@final
class WholeStates:
    """An optimizer that temporarily has the model's parameters and full states instead of slices.

    Args:
        parameters: the parameters of the model, by name.

    Collective: all-gather of each state.
    """

    def __init__(self, engine: Engine, sharded: ShardedOptimizer, parameters: dict[str, nn.Parameter]) -> None:
        self._engine, self._sharded, self._optimizer = engine, sharded, sharded.optimizer
        (owned,) = owned_states(engine, [sharded])
        entries = sharded.entries
        whole = gather_states(engine, sharded, entries, owned)
        sharded.open_states()
        # States whose key is not a parameter stay in place.
        state = self._optimizer.state
        self._set_aside = {master: state.pop(master) for master in entries if master in state}
        self._masters = {parameters[slot_of(master).name]: master for master in entries}
        """The slice of each parameter; user code may remove groups, and move parameters between them."""
        self._groups = [(group, dict(group), _tensors(group)) for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["params"] = [parameters[slot_of(master).name] for master in group["params"]]
        state.update((parameters[name], one) for name, one in whole.items())
        self._given: dict[str, Any] = {}
        self._hooks = (
            self._optimizer.register_load_state_dict_pre_hook(self._note_given),
            self._optimizer.register_load_state_dict_post_hook(self._widen_loaded),
        )

    def contract(self, *, writeback: bool, has_failed: bool) -> None:
        """Restore the slices, with their previous states, or with `writeback` with slices of the full states.

        Args:
            has_failed: whether groups and their options are restored, too.
        """
        for hook in self._hooks:
            hook.remove()
        state = self._optimizer.state
        for parameter, master in self._masters.items():
            changed = state.pop(parameter, None)
            if writeback and changed is not None:
                keep_state(self._optimizer, master, changed)
            elif not writeback and master in self._set_aside:
                state[master] = self._set_aside[master]
        for group in self._optimizer.param_groups:
            group["params"] = [self._masters.get(parameter, parameter) for parameter in group["params"]]
        if has_failed:
            self._optimizer.param_groups[:] = [group for group, _, _ in self._groups]
            for group, options, tensors in self._groups:
                group.clear()
                group.update(options)
                for tensor, value in tensors:
                    tensor.copy_(value)
        self._sharded.close_states()

    def _note_given(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        self._given = state_dict

    def _widen_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the dtype of master weights in loaded states, which torch rounds to the dtype of parameters."""
        given, self._given = self._given, {}
        numbers = [number for group in given["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            dtype = slot_of(parameter).bucket.dtypes.master
            loaded = optimizer.state.get(parameter, {})
            for key, value in given["state"].get(number, {}).items():
                if key != "step" and isinstance(value, Tensor) and parameter.dtype != dtype:
                    loaded[key] = value.to(dtype=dtype, device=parameter.device, copy=True)

    def held(self) -> list[tuple[str, Tensor]]:
        """Return the current full states, with names for messages."""
        states = ((slot_of(p).name, state) for p in self._masters if (state := self._optimizer.state.get(p)))
        return [(f"{n}/{key}", v) for n, state in states for key, v in state.items() if isinstance(v, Tensor)]

    def tensors(self) -> list[tuple[str, Tensor, bool]]:
        """Return (name, tensor, whether ranks along the tensor axis have different parts) of the full states.

        The order is equal on every rank.
        """
        found = []
        for parameter in self._masters:
            state = self._optimizer.state.get(parameter, {})
            for key in sorted(state, key=repr):
                if isinstance(value := state[key], Tensor):
                    slot = slot_of(parameter)
                    found.append((f"{slot.name}/{key}", slot.form.part(value), not slot.form.is_alike))
        return found


def _tensors(group: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors among the options of a group, such as a learning rate, each with a copy."""
    options = [value for key, value in group.items() if key != "params"]
    return [(one.detach(), one.detach().clone()) for one in find(options, Tensor)]


def gather_states(
    engine: Engine, sharded: ShardedOptimizer, masters: Sequence[Tensor], owned: Mapping[str, OwnedState]
) -> dict[str, dict[str, Any]]:
    """Return copies of the full states of some parameters, by name.

    Args:
        masters: the optimizer's entries for the parameters.
        owned: the result of `owned_states` for those that one rank updates whole.

    Collective: all-gather of each state; every rank must call.
    """
    by_bucket: dict[int, dict[Tensor, dict[str, Any]]] = {}
    whole = {slot.name: copied for slot, copied in gather_owned(engine, sharded, owned)}
    for master in masters:
        slot = slot_of(master)
        if slot.updater is None and (held := sharded.optimizer.state.get(master)) is not None:
            state = views_of(sharded.optimizer, held)
            by_bucket.setdefault(slot.bucket.number, {})[master] = state
            uncut = {key: value for key, value in state.items() if not is_cut(key, value, master)}
            whole[slot.name] = map_tensors(uncut, Tensor.clone)
    for states in by_bucket.values():
        keys = {key for master, state in states.items() for key in state if is_cut(key, state[key], master)}
        for key in sorted(keys, key=repr):
            values = {master: state[key] for master, state in states.items() if key in state}
            for slot, value in _gather_one(engine, key, values):
                whole[slot.name][key] = value
    return whole


def _gather_one(engine: Engine, key: str, values: Mapping[Tensor, Tensor | Packed]) -> list[tuple[Slot, Tensor]]:
    masters = [*values]
    bucket = slot_of(masters[0]).bucket
    full = torch.zeros(bucket.layout.full_numel, dtype=values[masters[0]].dtype, device=bucket.device)
    for master, value in values.items():
        start, stop = bucket.master_range(slot_of(master).index)
        full[start:stop] = tensor_of(value)
    if not bucket.spec.updates_all and full.numel():
        tag = Tag(engine.order.next_number(), bucket.number, f"the state '{key}' of {bucket.spec.name}")
        engine.comm.gather(full, tag, kind="state").wait()
    views = bucket.places.views_of(full)
    parts = [(slot_of(m), views[slot_of(m).index].clone(memory_format=torch.preserve_format)) for m in masters]
    return [(slot, slot.form.join(part)) for slot, part in parts]
