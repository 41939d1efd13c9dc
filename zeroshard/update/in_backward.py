"""Updates of states on the host while the backward runs, which `optimizer.step()` takes where they are right.

Owns the copies that are updated, the thread, and the check before they are taken. It must not know passes. Read
`update/pieces.py` (what a piece is) and `update/background.py` (the update after a step) first.

Note: an update in the backward
    When the sums of a unit's gradients are on the host, or on their way there, a thread copies the unit's masters and
    states, and updates the copies. Nothing else reads these, so parameters, masters and states are those of the last
    step until `step()`: whatever reads them before needs no wait. `step()` computes the norm and clips; then it
    compares what each update was made from with what it would use itself: gradients, masters, states, and the options
    of the group. Where all of it is the same, the copy and what it was copied from change places (`_Job.take`), and the
    latter is the next step's copy. Where anything differs, the copy is forgotten, and `step()` updates as it does
    without this. So there is nothing to roll back, and the bits are the same in each case. Ranks need not agree on what
    they take: it changes who computes, and not what.
Note: what is compared
    Tensors by identity and by torch's count of changes in place, options by value. Changes through `.data` or numpy are
    not counted, so whoever is handed a state, or a slice of the optimizer, or its gradient, has all updates forgotten
    (`Waiting`, `WatchedSlice`).
Note: which backward is the last
    Passes under `no_sync()` sum nothing, so nothing begins there. Where each micro-batch sums, the number of sums of a
    bucket in the step before says which one is likely to be the last.
Note: failures
    An update that fails in the thread, for example because memory runs out, has changed nothing. It is logged, and
    `step()` makes that update.
"""

import inspect
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple, final

import torch

from zeroshard import devices
from zeroshard.core.buffer import Bucket
from zeroshard.core.engine import Engine
from zeroshard.core.gradient import METADATA, MasterSlice, name_of
from zeroshard.core.slot import Slot, slot_of
from zeroshard.core.states import Scope
from zeroshard.core.unit import Unit
from zeroshard.torch_private import NoSubclasses, body_of, version_of
from zeroshard.tree import find
from zeroshard.update.background import Waiting, twin_of
from zeroshard.update.optimizer import ShardedOptimizer, is_cut
from zeroshard.update.pieces import Piece, Resident
from zeroshard.watch.process import wait_before_forks

__all__ = ["InBackward"]

Tensor = torch.Tensor
Optimizer = torch.optim.Optimizer

_CLIP = "step() clips in this mode: write zs.Offload(update='in-backward', max_norm=...)"
_SCALER = "precision='fp16' has a loss scale of its own that works with it"
REFUSED: Mapping[CodeType, tuple[str, str]] = MappingProxyType(
    {
        inspect.unwrap(function).__code__: (function.__qualname__, remedy)
        for function, remedy in (
            (torch.nn.utils.clip_grad_norm_, f"{_CLIP}, and read the norm with zero.grad_norm()"),
            (torch.nn.utils.clip_grads_with_norm_, _CLIP),
            (torch.nn.utils.clip_grad_value_, f"{_CLIP} for the norm of all gradients"),
            (torch.amp.GradScaler.unscale_, _SCALER),
            (torch.amp.GradScaler.step, _SCALER),
        )
    }
)
"""Functions that change gradients between backward and step, and what is to be done instead."""


@final
class Member(NamedTuple):
    """A slice that is updated ahead: its group, and what stands where."""

    group: int
    master: Tensor
    slot: Slot


@final
class InBackward:
    """What begins updates in the backward, and takes them in `step()`: `ShardedOptimizer.source`.

    Args:
        max_norm: what `step()` clips the 2-norm of all gradients to; None for no clipping.
    """

    def __init__(self, engine: Engine, sharded: ShardedOptimizer, max_norm: float | None) -> None:
        self._engine, self._sharded, self._max_norm = weakref.ref(engine), sharded, max_norm
        self._optimizer, self._device = sharded.optimizer, engine.mesh.device
        self._where, self._is_clipping = str(engine.mesh), False
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: dict[int, _Job] = {}
        """By number of the bucket: the updates that the next step may take."""
        self._begun: dict[int, _Job] = {}
        """Those of the step under way."""
        self._spares: dict[int, _Spare] = {}
        """By number of the bucket."""
        self._members: dict[int, list[Member]] | None = None
        """By number of the bucket: what may be updated ahead; made once a step."""
        self._sums, self._usual_sums = Counter[int](), Counter[int]()
        """By number of the bucket: sums of gradients since the last step, and in the step before."""
        self._states: Any = None
        """The optimizer's own, while it has `Waiting` in their place."""
        self._hidden: list[Tensor] = []
        self._failures: set[str] = set()
        self.counts = Counter[str]()
        """Updates of buckets that were "begun", "taken" and "clipped", and those that were "late"."""
        engine.end_update = self._refuse_callers
        for unit in engine.units:
            unit.after_sum = self._begin_unit
        self._optimizer.register_step_post_hook(self._after_step)

    # -- what the optimizer asks (`Source`) -----------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """See `Source`: what fails in the thread is made by the step."""
        return False

    @property
    def spare_bytes(self) -> int:
        """See `Source`."""
        return sum(spare.nbytes for spare in self._spares.values())

    def describe(self) -> str:
        """Return a line on what came of the updates so far, and what the copies take."""
        counts = self.counts
        others = counts["begun"] - sum(counts[what] for what in ("taken", "clipped", "late"))
        return (
            f"updated in the backward: {counts['taken']:,} of {counts['begun']:,} updates of buckets on this rank; "
            f"step() made {counts['clipped']:,} again for clipping, {counts['late']:,} that had not begun, and "
            f"{others:,} that were skipped, failed or met a change; copies on the host {self.spare_bytes:,} bytes"
        )

    def check(self) -> None:
        """See `Source`: nothing is lost."""

    def begin(self) -> None:
        """See `Source`: take over what was updated ahead; what reads states now may do so."""
        self._refuse_callers()
        if hasattr(self._optimizer, "found_inf") and not hasattr(self._optimizer.found_inf, "_zeroshard"):
            raise self._refusal("GradScaler.step", _SCALER)
        self._forget_begun()  # of a step that raised
        self._begun, self._jobs = self._jobs, {}
        self._show()

    def pieces(self, sharded: ShardedOptimizer) -> Iterator[Piece]:
        """Clip; yield what the step has to update itself, and take the rest."""
        groups = [list(group["params"]) for group in self._optimizer.param_groups]
        self._members = None  # groups may have got others since the backward, and have none during the update
        self._by_bucket()
        jobs, self._begun = self._begun, {}
        if is_clipped := self._clip():
            self.counts["clipped"] += len(jobs)
        places = {id(master): number for number, group in enumerate(groups) for master in group}
        taken = []
        for job in jobs.values():
            if not is_clipped and job.is_right(self._optimizer, places):
                taken.append(job)
            else:
                job.forget()
        ahead = {id(member.master) for job in taken for member in job.members}
        kept = {job.bucket for job in taken}
        rest = [[m for m in group if id(m) not in ahead] for group in groups]
        # What lies in a bucket beside what was updated ahead is updated after that has changed places.
        last = [[m for m in group if slot_of(m).bucket in kept and _is_there(slot_of(m))] for group in rest]
        first = [[m for m in group if not (slot_of(m).bucket in kept and _is_there(slot_of(m)))] for group in rest]
        if any(first):
            yield Resident(first)
        # The thread goes on from the front meanwhile.
        while taken and taken[-1].forget():
            job = taken.pop()
            self.counts["late"] += 1
            yield Resident(job.groups(len(groups)))
        for job in taken:
            if job.take(self._members_of(job.bucket)):
                self.counts["taken"] += 1
            else:
                assert job.error is not None, "it was not taken"
                self._note_failure(f"the update of '{job.bucket.spec.name or '(root)'}'", job.error)
                yield Resident(job.groups(len(groups)))
        if any(last):
            yield Resident(last)

    def agree(self, sharded: ShardedOptimizer) -> None:
        """See `Source`: make room for the copies that the next backward updates, once there are states."""
        if self.counts["begun"]:
            return
        try:
            for number, members in self._by_bucket().items():
                self._spare(number).make(members, self._optimizer)
        except (MemoryError, RuntimeError) as error:  # of this rank alone; what the thread cannot copy the step updates
            self._note_failure("the memory for updates", error)

    # -- a backward -----------------------------------------------------------------------------------------------

    def _begin_unit(self, unit: Unit) -> None:
        """Begin the update of a unit whose gradients have been summed: `Unit.after_sum`."""
        for bucket in unit.buckets:
            number = bucket.number
            self._sums[number] += 1
            if (before := self._jobs.pop(number, None)) is not None:
                before.forget()  # of gradients that have changed
            members = [one for one in self._members_of(bucket) if self._has_all(one)]
            is_last = self._sums[number] >= self._usual_sums[number]
            if not members or not is_last or bucket.grads.scope is not Scope.ALL:
                continue
            self._hide()
            if self._pool is None:
                wait_before_forks(self)
                self._pool = ThreadPoolExecutor(1, "zeroshard-update", devices.begin_thread, (self._device,))
            job = _Job(bucket, members, self._optimizer, self._states, self._spare(number))
            try:
                job.begin(self._pool)
            except RuntimeError as error:  # no thread can be had
                self._note_failure(f"the update of '{unit.name or '(root)'}'", error)
                continue
            self._jobs[number] = job
            self.counts["begun"] += 1

    def _has_all(self, member: Member) -> bool:
        """Tell whether a slice has a gradient of this rank, and its states; the first step makes these."""
        is_known = member.slot.bucket.grads.is_known(member.slot.index)
        states = self._optimizer.state if self._states is None else self._states
        return is_known and (bool(states.get(member.master)) or not any(self._sharded.state_cost or (0,)))

    def _members_of(self, bucket: Bucket) -> Sequence[Member]:
        return self._by_bucket().get(bucket.number, ())

    def _by_bucket(self) -> dict[int, list[Member]]:
        if self._members is None:
            self._members = {}
            for number, group in enumerate(self._optimizer.param_groups):
                for master in group["params"]:
                    if _is_there(slot := slot_of(master)):
                        self._members.setdefault(slot.bucket.number, []).append(Member(number, master, slot))
        return self._members

    def _spare(self, number: int) -> "_Spare":
        return self._spares.setdefault(number, _Spare())

    # -- a step ---------------------------------------------------------------------------------------------------

    def _clip(self) -> bool:
        """Clip all gradients, and tell whether that has changed them. Collective: a norm."""
        engine = self._engine()
        assert engine is not None, "its optimizer is making a step"
        if self._max_norm is None:
            return False
        parameters = [slot.parameter for slot in engine.slots.values()]
        self._is_clipping = True
        try:
            total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            # As torch computes it, which then multiplies by 1 where it is larger.
            if bool(self._max_norm / (total + 1e-6) >= 1.0):
                return False
            torch.nn.utils.clip_grads_with_norm_(parameters, self._max_norm, total)
        finally:
            self._is_clipping = False
        return True

    def _after_step(self, *args: Any) -> None:
        """Forget what a step has not asked for, as one that is skipped."""
        self._forget_begun()
        self._members = None
        self._sums, self._usual_sums = Counter(), self._sums

    def _forget_begun(self) -> None:
        for job in self._begun.values():
            job.forget()
        self._begun = {}

    def _note_failure(self, what: str, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        if text not in self._failures:
            self._failures.add(text)
            logging.getLogger(__name__).warning(
                "%s %s in the backward failed (%s); nothing was changed by it, and optimizer.step() makes the update.",
                self._where,
                what,
                text,
            )

    # -- who asks in between --------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Forget all updates that no step has taken: somebody may change what they were made from."""
        self._refuse_callers()
        for job in self._jobs.values():
            job.forget()
        self._jobs = {}
        self._members = None
        self._sums.clear()
        self._show()

    def _hide(self) -> None:
        """Have whoever asks for states or slices forget the updates."""
        if self._states is not None:
            return
        drop = weakref.WeakMethod(self.drop)
        self._states = self._optimizer.state
        self._optimizer.state = Waiting(self._states, drop)  # type: ignore[assignment]
        self._hidden = [master for group in self._optimizer.param_groups for master in group["params"]]
        for master in self._hidden:
            master.__class__ = WatchedSlice
            master.__dict__["_zeroshard_drop"] = drop

    def _show(self) -> None:
        if self._states is None:
            return
        optimizer: Any = self._optimizer
        if isinstance(optimizer.state, Waiting):  # else somebody has put others there
            optimizer.state = self._states
        self._states = None
        for master in self._hidden:
            master.__class__ = MasterSlice
            del master.__dict__["_zeroshard_drop"]
        self._hidden = []

    def before_fork(self) -> None:
        """Wait, and let the thread go: a child would have none."""
        wait([job.future for job in (*self._jobs.values(), *self._begun.values())])
        self._pool = None

    def _refuse_callers(self) -> None:
        """Raise where a function that changes gradients for a step asks: `Engine.learn` is on its way.

        Raises:
            RuntimeError: one of `REFUSED` is being called.
        """
        if self._is_clipping:
            return
        frame = sys._getframe(1)
        while frame is not None:
            if (known := REFUSED.get(frame.f_code)) is not None:
                raise self._refusal(*known)
            frame = frame.f_back  # type: ignore[assignment]

    def _refusal(self, name: str, remedy: str) -> RuntimeError:
        return RuntimeError(
            f"{self._where} {name}() with Offload(update='in-backward'): states on the host are updated with the "
            f"gradients while the backward runs, so none may be changed for the step afterwards. {remedy}; or write "
            "update='step'."
        )


@final
class _Spare:
    """A second copy of a bucket's masters on the host and of their states: of the last step, until it is updated."""

    def __init__(self) -> None:
        self.masters: Tensor | None = None
        self._states: dict[tuple[int, Any], tuple[Tensor, Tensor]] = {}
        """By identity of the slice, and key: the state, and its copy."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        masters = 0 if self.masters is None else self.masters.nbytes
        return masters + sum(copy.nbytes for _, copy in self._states.values())

    def make(self, members: Sequence[Member], optimizer: Optimizer) -> None:
        """Take the memory of it, for all states that there are; contents come later."""
        if members:
            self.of_masters(members[0].slot.bucket.apart_values())
        for _, master, _ in members:
            for key, value in optimizer.state.get(master, {}).items():
                if is_cut(key, value, master):
                    self.of_state(master, key, value)

    def has(self, master: Tensor, key: Any, copy: Any) -> bool:
        """Tell whether that is the copy of a state."""
        known = self._states.get((id(master), key))
        return known is not None and known[1] is copy

    def of_masters(self, masters: Tensor) -> Tensor:
        """Return memory for a copy of the bucket's masters."""
        if self.masters is None:
            self.masters = torch.empty_like(masters)
        return self.masters

    def of_state(self, master: Tensor, key: Any, value: Tensor) -> Tensor:
        """Return memory for a copy of a state."""
        known = self._states.get((id(master), key))
        # Another state may lie in the memory that this one's copy had: a load puts states where it finds room.
        if known is None or known[0] is not value:
            known = self._states[id(master), key] = value, torch.empty_like(value)
        return known[1]


@final
class _Job:
    """The update of one bucket ahead of the step.

    Args:
        members: what is updated.
        states: the optimizer's.
        spare: what is updated in their place.
    """

    def __init__(
        self,
        bucket: Bucket,
        members: Sequence[Member],
        optimizer: Optimizer,
        states: MutableMapping[Tensor, dict[str, Any]],
        spare: _Spare,
    ) -> None:
        self.bucket, self.members, self._spare = bucket, members, spare
        self.error: BaseException | None = None
        self.future: Future[None]
        self._twin = twin_of(optimizer)
        self._options = [_options_of(group) for group in optimizer.param_groups]
        for group, options in zip(self._twin.param_groups, self._options, strict=True):
            group.update({key: _copy(value) for key, value in options.items()})
        masters = bucket.apart_values()
        self._masters, self._seen = masters, (masters, version_of(masters))
        self._seen_grads = [(one, version_of(one)) for one in bucket.grads.tensors()]
        self._all_states, self._states = states, [states.get(one.master) for one in members]
        self._seen_states = [_seen(state or {}) for state in self._states]
        landing = bucket.grads.landing
        assert landing is not None, "its gradients come to the host"
        with landing.unread() as self._event:
            self._grads = [bucket.grads.part(one.slot.index) for one in members]
        self._results: list[dict[str, Any]] = []

    def begin(self, pool: ThreadPoolExecutor) -> None:
        """Begin it, behind those that were begun before."""
        self.future = pool.submit(self._update)

    @torch.no_grad()
    def _update(self) -> None:
        """Copy and update: in the thread."""
        try:
            if self._event is not None:
                self._event.synchronize()
            copy = self._spare.of_masters(self._masters).copy_(self._masters)
            entries: list[list[Tensor]] = [[] for _ in self._twin.param_groups]
            for (number, master, slot), grad, state in zip(self.members, self._grads, self._states, strict=True):
                start, stop = self.bucket.master_range(slot.index)
                first = self.bucket.spec.apart_states[0]
                entry = torch.nn.Parameter(copy[start - first : stop - first])
                entry.grad = grad.to(entry.dtype)
                if state:
                    self._twin.state[entry] = {
                        key: self._spare.of_state(master, key, value).copy_(value)
                        if is_cut(key, value, master)
                        else _copy(value)
                        for key, value in state.items()
                    }
                entries[number].append(entry)
            for group, some in zip(self._twin.param_groups, entries, strict=True):
                group["params"] = some
            body_of(self._twin)()
            by_number = [iter(some) for some in entries]
            self._results = [self._twin.state.get(next(by_number[one.group]), {}) for one in self.members]
        except BaseException as error:  # whatever it is, the step must learn of it
            self.error = error
        finally:
            self._grads = []
            for group in self._twin.param_groups:
                group["params"] = []

    def forget(self) -> bool:
        """Leave it out, and tell whether it had not begun."""
        if has_not_begun := self.future.cancel():
            self._grads = []
        return has_not_begun

    def groups(self, count: int) -> list[list[Tensor]]:
        """Return the slices by group."""
        groups: list[list[Tensor]] = [[] for _ in range(count)]
        for one in self.members:
            groups[one.group].append(one.master)
        return groups

    def is_right(self, optimizer: Optimizer, places: Mapping[int, int]) -> bool:
        """Tell whether it was made from what the step would use now; has no wait in it.

        Args:
            places: by identity of a slice the number of its group.
        """
        masters, grads = self.bucket.apart_values(), self.bucket.grads.tensors()
        if self._seen[0] is not masters or self._seen[1] != version_of(masters) or len(grads) != len(self._seen_grads):
            return False
        if any(one is not seen or version_of(one) != at for one, (seen, at) in zip(grads, self._seen_grads)):  # noqa: B905
            return False
        for member, before, seen in zip(self.members, self._states, self._seen_states, strict=True):
            state = optimizer.state.get(member.master)
            if places.get(id(member.master)) != member.group or not member.slot.has_grad or state is not before:
                return False
            if not _is_as_seen(state or {}, seen):
                return False
        numbers = {member.group for member in self.members}
        return all(_are_equal(self._options[n], _options_of(optimizer.param_groups[n])) for n in numbers)

    def take(self, beside: Sequence[Member]) -> bool:
        """Wait for it, and have what was updated and what it was copied from change places; False if it failed.

        Args:
            beside: all slices of the bucket in this memory.
        """
        wait([self.future])
        if self.error is not None:
            return False
        assert self._spare.masters is not None, "it was updated"
        self._spare.masters = self.bucket.put_apart(self._spare.masters)
        for _, master, slot in beside:
            master.data = self.bucket.entry(slot.index)
        for (_, master, _), state, made in zip(self.members, self._states, self._results, strict=True):
            if made:
                self._take_states(master, self._all_states.setdefault(master, {}) if state is None else state, made)
        return True

    def _take_states(self, master: Tensor, state: dict[str, Any], made: Mapping[str, Any]) -> None:
        for key, value in made.items():
            before = state.get(key)
            if before is not None and self._spare.has(master, key, value):
                # The optimizer's tensors stay the same objects.
                held = before.data
                before.data, value.data = value.data, held
            elif isinstance(value, Tensor) and isinstance(before, Tensor):
                before.copy_(value)
            else:
                state[key] = value


@final
class WatchedSlice(MasterSlice):
    """A slice that was updated ahead: whoever reads it has that update forgotten, since it may be changed."""

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if name_of(func) not in METADATA:
            for one in find((args, kwargs), WatchedSlice):
                if isinstance(one, WatchedSlice):  # the first one may have shown the others
                    one._drop()
        with NoSubclasses():
            return func(*args, **(kwargs or {}))

    def _drop(self) -> None:
        if (drop := self.__dict__["_zeroshard_drop"]()) is not None:
            drop()

    @property
    def grad(self) -> Tensor | None:
        """See `MasterSlice`."""
        self._drop()
        return _plain_grad.__get__(self)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._drop()
        _plain_grad.__set__(self, value)


_plain_grad: Any = MasterSlice.__dict__["grad"]


def _is_there(slot: Slot) -> bool:
    """Tell whether a parameter has its states, and a gradient of its own, on the host."""
    return slot.index < min(slot.bucket.spec.apart, slot.bucket.spec.apart_gradients)


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group as they are now."""
    return {key: _copy(value) for key, value in group.items() if key != "params"}


def _copy(value: Any) -> Any:
    """Return a value that no change in place reaches."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(map(_copy, value)) if type(value) in (list, tuple) else value


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return type(one) is type(other) and bool(one == other)


def _seen(state: Mapping[str, Any]) -> dict[str, tuple[Any, int]]:
    return {key: (value, version_of(value) if isinstance(value, Tensor) else 0) for key, value in state.items()}


def _is_as_seen(state: Mapping[str, Any], seen: Mapping[str, tuple[Any, int]]) -> bool:
    if state.keys() != seen.keys():
        return False
    pairs = ((state[key], *seen[key]) for key in state)
    return all(
        now is then and version_of(now) == at if isinstance(now, Tensor) else _are_equal(now, then)
        for now, then, at in pairs
    )
