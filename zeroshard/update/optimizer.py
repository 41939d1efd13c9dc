"""The user's optimizer on shards: the same object, with this rank's slices in its groups.

Owns the exchange of entries, the agreement before an update and what follows it. It must not know passes or hooks on
modules. Read `core/slices.py` first; `optim/admission.py` says which optimizers may be cut at all.

Note: why slices of parameters, and not one flat tensor
    A parameter that nobody used must be skipped (torch decays and counts a step for zeros), and groups tell parameters
    apart by name or shape. Each group so keeps its length and order, and an entry may have 0 elements; torch's fused,
    foreach and loop updates all accept that.
"""

import warnings
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, final

import torch
from torch.utils.hooks import RemovableHandle

from zeroshard.core.dtypes import round_at_random
from zeroshard.core.engine import Engine
from zeroshard.core.guard import Answer
from zeroshard.core.slices import MasterSlice, States, make_master, point_at
from zeroshard.core.slot import Slot, free, slot_of
from zeroshard.core.states import Presence
from zeroshard.core.unit import Unit
from zeroshard.optim.keeps import TRIED_NUMEL, Kept, kept_by
from zeroshard.optim.packed import Packed, pack, unpack, views_of
from zeroshard.optim.pieces import update_in_pieces
from zeroshard.torch_private import keep_first, keep_last
from zeroshard.tree import find
from zeroshard.update.closures import Arguments, call_closure
from zeroshard.update.sources import Source
from zeroshard.watch.stacks import Call
from zeroshard.wire.comm import Pending

__all__ = ["ShardedOptimizer", "check_states", "cut_state", "is_cut", "keep_state"]

Tensor = torch.Tensor
ODD = (
    "Ranks cannot join their slices of it. Keep each tensor of the parameter's shape in optimizer.state under a key of "
    "its own; zero.save(path, model_only=True) and gathered() need no states."
)


@final
class ShardedOptimizer:
    """One optimizer of a sharded model.

    Args:
        index: place among the model's optimizers; the same on every rank.
        source: where the pieces of its updates come from.
        kept: what it keeps, for predictions.
        admit: raises unless it can update some groups, which hold the model's parameters.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        index: int,
        source: Source,
        kept: Kept,
        admit: Callable[[Sequence[dict[str, Any]]], None],
    ) -> None:
        self._engine, self.optimizer, self._index = engine, optimizer, index
        self.source, self.kept, self._admit = source, kept, admit
        self.steps = 0
        """Steps so far, skipped ones included."""
        self.applied = 0
        """The number of backward passes whose gradients were applied or belong to an earlier step."""
        self._fresh: list[Tensor] = []
        self._slices: dict[Slot, MasterSlice] = {}
        """The slice of each parameter that was ever in a group, in an order that is equal on all ranks."""
        self._replaced: set[MasterSlice] = set()
        """Slices to whose `.data` anybody has assigned since the last step."""
        free([slot_of(parameter) for group in optimizer.param_groups for parameter in group["params"]], optimizer)
        source.plan(optimizer.param_groups)
        for group in optimizer.param_groups:
            self._cut(group)
        self.close_states()
        odd = _odd_state(kept.states, torch.Size([TRIED_NUMEL]), kept.counters)
        if odd and any(slot_of(master).updater is None for master in self.masters):
            warnings.warn(
                f"{engine.mesh} {type(optimizer).__name__} can be trained, but zero.save(), zero.detach() and "
                f"gathered(states=True) will refuse its state {odd}. {ODD}",
                stacklevel=2,
            )
        self._put_back: Callable[[], None] | None = None
        """What puts entries back that an update in pieces has taken out of their groups."""
        self._call: Call | None = None
        """The running call of `step`. A class may call the step of the class that it extends, whose hooks run, too."""
        self._inner_steps = 0
        """Steps of extended classes that are running: all was done before."""
        undo = engine.undo
        undo.add(self._end_states)
        self._last_hook = undo.keep(optimizer.register_step_pre_hook(self._before_step))
        keep_first(undo.keep(optimizer.register_step_post_hook(self._after_step)))
        undo.keep(optimizer.register_state_dict_pre_hook(self._before_save))
        undo.keep(optimizer.register_load_state_dict_pre_hook(self._before_load))
        self._add_plain, self._add_hook = optimizer.add_param_group, optimizer.register_step_pre_hook
        undo.put(vars(optimizer), "register_step_pre_hook", self._register)
        undo.put(vars(optimizer), "add_param_group", self._add_group)
        # Dynamo would guard the entries and gradients that the hooks exchange. Schedulers take a method, and mark it.
        eager = torch.compiler.disable(step := optimizer.step)
        method: Any = wraps(step)(lambda _, *args, **named: self._make_step(eager, *args, **named))
        undo.put(vars(optimizer), "step", method.__get__(optimizer))

    @property
    def masters(self) -> list[Tensor]:
        """This rank's slices, in the order of groups and entries."""
        return [entry for group in self.optimizer.param_groups for entry in group["params"]]

    @property
    def entries(self) -> list[Tensor]:
        """The slices that may have states: `masters`, and those whose group was removed, which torch's states outlast.

        What an optimizer that updates whole parameters had of one that another has taken since cannot be joined.
        """
        masters, own = self.masters, self.optimizer
        here, is_by_slices = {slot_of(master) for master in masters}, self.kept.mark is None
        left = [(slot, master) for slot, master in self._slices.items() if slot not in here]
        return masters + [m for s, m in left if s.optimizer() is own or (s.updater is None and is_by_slices)]

    def open_states(self) -> None:
        """Let the parameters be keys of the optimizer's state."""
        if isinstance(states := self.optimizer.state, States):
            states.is_open = True

    def close_states(self) -> None:
        """Let slices alone be keys of the optimizer's state, which torch, or user code, may have replaced."""
        if not isinstance(states := self.optimizer.state, States):
            before, states = states, States(getattr(states, "default_factory", dict))
            self.optimizer.state = states
            states.update(before)
        states.is_open = False

    def _end_states(self) -> None:
        """Give the optimizer a state of torch's class again."""
        self.optimizer.state = defaultdict(getattr(self.optimizer.state, "default_factory", dict), self.optimizer.state)

    def _cut(self, group: dict[str, Any]) -> None:
        """Put slices in the place of the model's parameters, and cut the state that they have already."""
        masters, state = [], self.optimizer.state
        for parameter in group["params"]:
            slot = slot_of(parameter)
            slot.bucket.has_states = True
            slot.counters = self.kept.counters
            left, master = self._slices.get(slot), make_master(slot, self._replaced)
            masters.append(master)
            self._slices[slot] = master
            if parameter in state:
                keep_state(self.optimizer, master, state[parameter])
                del state[parameter]
            elif left is not None and left in state:
                state[master], master.uncut = state.pop(left), left.uncut  # as torch keeps it
            slot.optimizer = weakref.ref(self.optimizer)
        group["params"] = masters

    def _add_group(self, group: dict[str, Any]) -> None:
        if self._engine.gathered is not None and self._engine.gathered.states:
            raise RuntimeError(
                f"{self._engine.mesh} add_param_group() inside gathered(states=True), where groups have whole "
                "parameters: leave gathered() first, and add the group on every rank."
            )
        params = group["params"]
        if not isinstance(params, set):
            group["params"] = params = [params] if isinstance(params, Tensor) else list(params)
        entries = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
        groups, count, kept = self.optimizer.param_groups, len(self.optimizer.param_groups), self.kept
        restore: Callable[[], None] = lambda: None  # noqa: E731
        try:
            if not isinstance(params, set) and all(isinstance(one, Tensor) for one in entries):  # else torch refuses
                self._check_added(group, entries)
                restore = free([slot_of(entry) for entry in entries], self.optimizer)
            self._add_plain(group)
            self.source.plan(groups[count:])
            self.kept = kept_by(self.optimizer, kept)
            self._cut(groups[-1])
        except BaseException:
            self.kept, groups[count:] = kept, []
            restore()
            raise

    def _check_added(self, group: dict[str, Any], entries: Sequence[Tensor]) -> None:
        for parameter in entries:
            if "_zeroshard" not in getattr(parameter, "__dict__", {}):
                raise ValueError(
                    f"add_param_group: a parameter of shape {tuple(parameter.shape)} is not in the sharded model, so "
                    "it would not be reduced. Add it to the model before zs.shard(), or give it to an optimizer of "
                    "its own."
                )
        self._admit([self.optimizer.defaults | group | {"params": entries}])

    def _register(self, hook: Any) -> RemovableHandle:
        """Register a hook of user code in front of ours, which may make the update."""
        handle = self._add_hook(hook)
        keep_last(self._last_hook)
        return handle

    def _make_step(self, step: Callable[..., Any], *args: Any, **named: Any) -> Any:
        try:
            return step(*args, **named)
        finally:
            self.put_back()  # after one that failed

    # -- a step -----------------------------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        if self._call is not None and self._call.is_running():
            self._inner_steps += 1
            return None
        self._call = None
        self.put_back()  # after a step that failed
        if self._engine.gathered is not None:
            raise RuntimeError(f"{self._engine.mesh} optimizer.step() under gathered(): leave the context first.")
        if self._engine.has_moved_states:
            raise RuntimeError(
                f"{self._engine.mesh} optimizer.step() while the states are away (zero.offload_states()): call "
                "zero.reload_states() on every rank first."
            )
        arguments = call_closure(self._engine.mesh, args, kwargs, self.put_back)
        self._update(optimizer)
        self._call, self._inner_steps = Call(__name__), 0
        return arguments

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        """Agree on the update, and make it where the optimizer's own step does not."""
        self._engine.leave_passes("optimizer.step()")
        self.close_states()
        self._engine.check_reduced("optimizer.step()")
        engine, guard, scale = self._engine, self._engine.guard, self._engine.loss_scale
        masters = self.masters
        # All ranks must stand at one place, so a schedule that differs between them is found here, without a wait.
        all_rates = [group.get("lr") for group in optimizer.param_groups]
        rates = [float(r) for r in all_rates if isinstance(r, int | float) or (isinstance(r, Tensor) and r.is_cpu)]
        place = f"step {self.steps} of optimizer {self._index} ({type(optimizer).__name__}, lr {rates})"
        detail = self.source.choice
        is_voted = engine.order.settle(place, detail, is_fine=lambda: guard.is_fine(optimizer, masters, scale))
        is_left = any(not unit.spec.is_whole and unit.presence is not Presence.RELEASED for unit in engine.units)
        assert not is_left, "a unit was left gathered"
        name = guard.ask(optimizer, masters, scale) if is_voted else ""
        if (is_stopped := not is_voted or bool(name)) and (scale is None or guard.is_fatal(scale)):
            name = name or guard.blame(masters)
            if guard.is_fatal(scale):
                raise guard.error(name, scale)
            guard.note_skipped(name, self.steps)
        engine.begin_update(is_skipped=is_stopped)
        self._return()
        self._widen()
        self._fresh = [] if is_stopped else guard.arm(optimizer, masters)
        if not is_stopped:
            self._put_back = update_in_pieces(optimizer, self.source.update())

    def put_back(self) -> None:
        """Put the entries back that an update in pieces has taken out of their groups; the step's body has ended."""
        self._engine.is_updating = False
        self._put_back = self._put_back() if self._put_back is not None else None

    def _widen(self) -> None:
        """Let masters that are rounded at random be updated in fp32; those of a step that failed begin anew."""
        for master, slot in self._stochastic():
            is_wide, master.data = master.dtype == torch.float32, slot.bucket.master(slot.index).float()
            is_here = slot.bucket.spec.row.states.is_on_device
            self._engine.ledger.add("transient", master.nbytes * (is_here and not is_wide))

    def _round(self) -> None:
        """Put masters that were updated in fp32 back into their buckets, rounded."""
        for master, slot in self._stochastic():
            place = slot.bucket.master_range(slot.index)[0] - slot.bucket.layout.offsets[slot.index]
            seed = zlib.crc32(f"{slot.name} {self.steps}".encode())
            narrow = slot.bucket.master(slot.index).copy_(round_at_random(master.detach(), place, seed))
            self._engine.ledger.add("transient", -master.nbytes * slot.bucket.spec.row.states.is_on_device)
            point_at(master, narrow)

    def _return(self) -> None:
        """Copy values that the step has assigned to `.data` of slices into their buckets, of which slices are views."""
        for master, slot in [(master, slot_of(master)) for master in self._replaced]:
            is_wide = slot.bucket.dtypes.is_stochastic and master.dtype == torch.float32  # of a step that failed
            if not is_wide and master.data_ptr() != (kept := slot.bucket.master(slot.index)).data_ptr():
                kept.copy_(master.detach())
                point_at(master, slot.bucket.entry(slot.index))
        self._replaced.clear()

    def _stochastic(self) -> list[tuple[Tensor, Slot]]:
        return [(master, slot) for master in self.masters if (slot := slot_of(master)).bucket.dtypes.is_stochastic]

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inner_steps:
            self._inner_steps -= 1
            return
        self._call = None
        self.put_back()
        self.steps += 1
        self._round()
        self._return()
        engine = self._engine
        has_overflowed = engine.end_update()
        answer = engine.guard.finish(optimizer)
        if answer is None:
            self._follow_scale(has_overflowed)
        if has_overflowed:
            engine.order.publish([], lambda unit: [])
            return
        touched = [slot_of(master) for master in self.masters]
        buckets = sorted({slot.bucket for slot in touched}, key=lambda bucket: bucket.number)
        is_told = engine.order.history.trace.is_detailed
        for bucket in (one for one in buckets if one.grads.has_any):
            bucket.trained += 1
            if is_told:
                bucket.tell("update", bucket.array().nbytes)
        for bucket in buckets:
            bucket.follow_masters(is_filed_done=self.source.disk is not None)
        numbers = sorted({slot.unit for slot in touched if slot.bucket.spec.is_published})
        number = engine.order.next_number()

        def start(unit: Unit) -> list[Pending]:
            what = f"the updated parameters of {unit} after step {self.steps}"
            return unit.publish(engine.comm, number, what, "gather")

        engine.order.publish(numbers, start)
        for bucket in buckets:
            bucket.count_update()
        self.applied = engine.backwards
        engine.note_update(touched, None if answer is None else lambda: self._learn(answer))

    def _learn(self, answer: Answer) -> None:
        """Read whether the last update was skipped on the device, and make up for what followed it."""
        engine, name = self._engine, answer.read()
        if name:
            for master in self._fresh:
                # torch had made its states, which the kernels have left empty.
                self.optimizer.state.pop(master, None)
            self.applied = -1
            if engine.guard.is_fatal(engine.loss_scale):
                self.steps -= 1
                raise engine.guard.error(name, engine.loss_scale)
            if engine.loss_scale is None:
                engine.guard.note_skipped(name, self.steps - 1)
        self._follow_scale(bool(name))

    def _follow_scale(self, has_overflowed: bool) -> None:
        """Adapt the loss scale after a step, or after a skipped one, whose gradients may be kept."""
        if (scale := self._engine.loss_scale) is None:
            return
        scale.step(has_overflowed=has_overflowed, backwards=self._engine.backwards, optimizer=self._index)
        for grads in (b.grads for unit in self._engine.units for b in unit.buckets) if has_overflowed else ():
            grads.is_suspect = grads.has_any

    # -- whole states -----------------------------------------------------------------------------------------------

    def _before_save(self, optimizer: torch.optim.Optimizer) -> None:
        self._engine.learn()
        if self._engine.gathered is None or not self._engine.gathered.states:
            raise RuntimeError(
                f"{self._engine.mesh} optimizer.state_dict() here would hold this rank's slices only. Use `with "
                "zero.gathered(states=True):` around it, on every rank, or zero.save(path) for a checkpoint."
            )

    def _before_load(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        gathered = self._engine.gathered
        if gathered is None or not (gathered.states and gathered.writeback):
            raise RuntimeError(
                f"{self._engine.mesh} optimizer.load_state_dict() here would not reach the shards. Use `with "
                "zero.gathered(states=True, writeback=True):` around it, on every rank, or zero.load(path)."
            )


def is_cut(key: Any, value: Any, master: Tensor, part: Tensor | None = None) -> bool:
    """Tell whether a state is one number for each element of a slice, or of the part of it that is updated.

    Its shape does not tell on a rank whose slice has as many elements as a state that all elements share.
    """
    is_alike = isinstance(value, Tensor | Packed) and value.shape == (master if part is None else part).shape
    return is_alike and key not in slot_of(master).counters and key not in getattr(master, "uncut", ())


def check_states(optimizers: Sequence[ShardedOptimizer], what: str) -> None:
    """Raise TypeError if ranks cannot join the slices of a state.

    That is a state with a value for each element that is not a tensor of the slice's shape, such as a list of tensors;
    or a tensor that is, by its shape, a slice of another rank, and for all elements on this rank.
    """
    for one in optimizers:
        for master in (master for master in one.entries if slot_of(master).updater is None):
            slot, state = slot_of(master), views_of(one.optimizer, one.optimizer.state.get(master, {}))
            _check_state(one.optimizer, slot, state, master.shape, what)
            known = slot.counters | getattr(master, "uncut", frozenset())
            shapes = {(n,) for n in slot.bucket.layout.numels_by_rank(slot.index)} - {(*master.shape,)}
            for key in state.keys() - known if state and not slot.bucket.spec.updates_all else ():
                if isinstance(value := state[key], Tensor) and (*value.shape,) in shapes:
                    raise TypeError(
                        f"{what}: {type(one.optimizer).__name__} keeps, of '{slot.name}', the state {key!r}, a tensor "
                        f"{(*value.shape,)} beside a slice of {master.numel()} elements, and another rank has a slice "
                        "of this shape. Keep what all elements share in a tensor without dimensions, or give it under "
                        "gathered(states=True, writeback=True)."
                    )


def _check_state(
    optimizer: torch.optim.Optimizer, slot: Slot, state: Mapping[Any, Any], shape: torch.Size, what: str
) -> None:
    if odd := _odd_state(state, shape, slot.counters):
        raise TypeError(f"{what}: {type(optimizer).__name__} keeps, of '{slot.name}', the state {odd}. {ODD}")


def _odd_state(state: Mapping[Any, Any], shape: torch.Size, counters: frozenset[Any]) -> str:
    """Return the key and the type of the first state with elements that is not a tensor of `shape`; "" without one."""
    for key, value in state.items():
        is_odd = key not in counters and getattr(value, "shape", None) != shape
        if is_odd and any(one.numel() > 1 for one in find(value, Tensor)):
            is_tensor = isinstance(value, Tensor)
            return f"{key!r}, a tensor {tuple(value.shape)}" if is_tensor else f"{key!r}, a {type(value).__name__}"
    return ""


def keep_state(optimizer: torch.optim.Optimizer, master: Tensor, state: dict[str, Any]) -> None:
    """Keep what this rank has of a parameter's whole state: its slice, or all, or nothing where another updates it."""
    slot = slot_of(master)
    if slot.updater is None:
        _check_state(optimizer, slot, whole := unpack(optimizer, state), slot.shape, "A state from before")
        optimizer.state[master] = pack(optimizer, cut_state(slot, whole))
        if isinstance(master, MasterSlice):
            tensors = {key: value for key, value in whole.items() if isinstance(value, Tensor)}
            master.uncut = frozenset(key for key, value in tensors.items() if not _is_of_elements_of(slot, key, value))
    elif slot.has_whole_states:
        # A counter stays where torch wants it.
        kept = {k: v.to(slot.bucket.device, copy=True) if _is_of_elements(v) else v for k, v in state.items()}
        optimizer.state[master] = kept


def _is_of_elements(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _is_of_elements_of(slot: Slot, key: Any, part: Tensor) -> bool:
    """Tell whether a whole state, or this rank's part of it along "tensor", has a value for each element."""
    return key not in slot.counters and tuple(slot.form.part(part).shape) == slot.bucket.places.shapes[slot.index]


def cut_state(slot: Slot, state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a parameter's whole state that belongs to this rank's slice."""
    bucket, index, device = slot.bucket, slot.index, slot.bucket.master(slot.index).device
    start, stop = bucket.master_range(index)
    offset = bucket.layout.offsets[index]
    first, last = (start - offset, stop - offset) if stop > start else (0, 0)
    cut = {}
    for key, value in state.items():
        value = slot.form.part(value) if isinstance(value, Tensor) else value
        if isinstance(value, Tensor) and key not in slot.counters and tuple(value.shape) == bucket.places.shapes[index]:
            # The slice alone is moved to where it is kept: whole states may not fit there.
            room = bucket.room(index, key, value.dtype)
            value = room.copy_(bucket.places.flat(index, value)[first:last])
        elif isinstance(value, Tensor) and not bucket.spec.row.states.is_on_device:
            value = value.to(device)  # whatever kernels count with
        cut[key] = value
    return cut
