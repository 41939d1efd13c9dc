"""Updates of states on the host that go on after `optimizer.step()` has returned.

Owns the thread, what it updates and who waits for it. It must not know passes. Read `update/pieces.py` (what a piece
is) and `core/buffer.py` (`Bucket.await_update`) first.

Note: an update in the background
    `step()` has fixed everything before it begins: which gradients count, what they were clipped and scaled to, and
    the options of the groups. What has its states on the host, and its parameters gathered for use, is then updated
    unit by unit, in the order of a forward, in a thread of this process; the rest, before `step()` returns. The thread
    has a twin of the optimizer, with copies of the groups' options and entries of its own: a scheduler that changes the
    learning rate, and `zero_grad()`, change nothing of it. Before a unit is gathered, this rank waits for that unit's
    update (`Bucket.await_update`). Whatever reads or changes states, master weights or gradients waits for all of it
    first: through `Engine.learn`, or because it meets `Waiting` in the place of `optimizer.state` or `WaitingSlice` in
    the groups.
Note: an update that fails
    Ranks may fail alone, and between collectives none of them may raise alone. So a rank notes what failed, and all
    ranks tell one another where they meet next outside a pass, at the latest before the next step. One rank alone
    raises where it waits. States of such a step may be torn, so they are not used any more.
Note: forks and the end
    A fork waits for the update first, since a child has no such thread. The interpreter ends after the thread, and with
    the error, if nobody has read it.
"""

import atexit
import functools
import logging
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, final

import torch

from zeroshard import devices
from zeroshard.core.buffer import Bucket
from zeroshard.core.engine import Engine
from zeroshard.core.gradient import METADATA, MasterSlice, name_of, part_of
from zeroshard.core.slot import Slot, slot_of
from zeroshard.torch_private import NoSubclasses, body_of
from zeroshard.tree import find
from zeroshard.update.admission import ELEMENTWISE
from zeroshard.update.optimizer import ShardedOptimizer
from zeroshard.update.pieces import Piece, Resident, keep_change
from zeroshard.watch.process import end_with, is_child_of, wait_before_forks

__all__ = ["Early", "Waiting", "is_worthwhile", "may_be_early", "twin_of"]

Tensor = torch.Tensor


def is_worthwhile(device: torch.device) -> bool:
    """Tell whether there is a device that can compute meanwhile; tests replace this function."""
    return device.type != "cpu"


def may_be_early(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer is known to update each parameter by itself, whenever it is asked."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE


@final
class Early:
    """What begins an update in the background, and ends it: `ShardedOptimizer.source`."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._where = weakref.ref(engine), str(engine.mesh)
        self._is_alone = engine.mesh.world_size == 1
        self._comm, self._device = engine.comm, engine.mesh.device
        self._pool: ThreadPoolExecutor | None = None
        self._run: _Run | None = None
        self._failure = ""
        """Of this rank, or, once all have told one another, of all."""
        self._is_agreed = True

    # -- what the optimizer asks (`Source`) -----------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """See `Source`: an exception before the thread began is the optimizer's own."""
        return False

    def begin(self) -> None:
        """See `Source`: what reads states has waited."""

    def check(self) -> None:
        """See `Source`. Collective: where an update has ended since ranks last agreed, as `_agree`."""
        self._agree()

    def pieces(self, sharded: ShardedOptimizer) -> Iterator[Piece]:
        """Begin the update in the background; yield what is updated now."""
        self._raise()
        optimizer = sharded.optimizer
        groups: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
        # GradScaler changes its numbers in place once step() has returned.
        is_scaled = getattr(optimizer, "grad_scale", None) is not None or hasattr(optimizer, "found_inf")
        late = [[master for master in group if is_scaled or not _is_early(slot_of(master))] for group in groups]
        early = [[master for master in group if not is_scaled and _is_early(slot_of(master))] for group in groups]
        self._run = _Run(optimizer, early) if any(early) else None
        if any(late):
            yield Resident(late)

    def agree(self, sharded: ShardedOptimizer) -> None:
        """See `Source`: let the thread begin, once nothing else is updated."""
        engine, run = self._engine(), self._run
        assert engine is not None, "its optimizer is making a step"
        # On every rank, also where it has nothing to update.
        self._is_agreed, engine.order.check_update = False, self._agree
        if run is not None:
            wait_before_forks(self)
            self._pool = self._pool or ThreadPoolExecutor(1, "zeroshard-update", devices.begin_thread, (self._device,))
            run.begin(self._pool, self._wait_for)
            engine.end_update = self.end
            run.hide(weakref.WeakMethod(self.end))

    # -- the end --------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Wait for all of the update, and put everything in its place."""
        if (run := self._run) is None:
            return
        run.wait()  # one that is interrupted is awaited again
        run.show()
        self._run = None
        if (engine := self._engine()) is not None:
            engine.end_update = None
        self._note(run)
        if self._is_alone:
            self._raise()

    def before_fork(self) -> None:
        """Wait, and let the thread go: a child would have none."""
        if self._run is not None:
            wait(self._run.futures)
        self._pool = None

    def _wait_for(self, run: "_Run", future: "Future[None]") -> None:
        """Wait for the update of one unit."""
        wait([future])
        self._note(run)
        if self._is_alone:
            self._raise()

    def _note(self, run: "_Run") -> None:
        if run.error is not None and not self._failure:
            self._failure = f"{type(run.error).__name__}: {run.error}"
            atexit.unregister(run.end_with_error)

    def _agree(self) -> None:
        """Raise on every rank if one could not make the update. Collective: all-reduce of 8 bytes, once an update."""
        self.end()
        if not self._is_agreed:
            if (engine := self._engine()) is not None:
                # What the last pass left to agree on comes first: a rank that requested something has done it already.
                engine.order.catch_up()
            self._is_agreed, what = True, "whether states on the host were updated"
            if not self._comm.agree([int(not self._failure)], what)[0]:
                texts = self._comm.texts(self._failure, "what failed")
                rank = next(rank for rank, text in enumerate(texts) if text)
                self._failure = f"rank {rank}: {texts[rank]}"  # the same text on all ranks
        self._raise()

    def _raise(self) -> None:
        if self._failure:
            raise RuntimeError(
                f"{self._where} The update of states on the host failed after optimizer.step() had returned "
                f"({self._failure}). States and parameters of that step may be torn, so they are not used any more: "
                "load a checkpoint into a new run."
            )


@final
class _Run:
    """One update in the background.

    Args:
        groups: of each group of the optimizer, the slices that are updated.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Tensor]]) -> None:
        self._optimizer, self._states = optimizer, optimizer.state
        self._process = os.getpid()
        self._twin = twin_of(optimizer)
        self.error: BaseException | None = None
        self.futures: list[Future[None]] = []
        self._masters = [master for group in groups for master in group]
        self._entries: list[tuple[Tensor, Tensor]] = []
        """The slices that have a gradient, and what stands for each in the thread."""
        self._buckets: dict[int, dict[int, Bucket]] = {}
        """By unit and by number."""
        by_unit: dict[int, list[list[Tensor]]] = {}
        for number, group in enumerate(groups):
            for master in group:
                slot = slot_of(master)
                self._buckets.setdefault(slot.unit, {})[slot.bucket.number] = slot.bucket
                of_unit = by_unit.setdefault(slot.unit, [[] for _ in groups])
                if slot.has_grad:
                    of_unit[number].append(self._entry(master, slot))
        self._units = sorted(by_unit.items())

    def _entry(self, master: Tensor, slot: Slot) -> Tensor:
        """Return what stands for a slice in the thread, with its gradient and states of now."""
        entry = torch.nn.Parameter(slot.bucket.master(slot.index))
        grad = part_of(slot).as_subclass(Tensor)
        # Another dtype than the slice's is converted in the thread.
        entry.__dict__["_zeroshard_grad"] = grad
        if (state := self._states.get(master)) is not None:
            self._twin.state[entry] = state
        self._entries.append((master, entry))
        return entry

    def begin(self, pool: ThreadPoolExecutor, wait_for: Any) -> None:
        """Begin, and let each bucket know what to wait for."""
        for unit, entries in self._units:
            future = pool.submit(self._update, unit, entries)
            self.futures.append(future)
            for bucket in self._buckets[unit].values():
                bucket.updating = functools.partial(wait_for, self, future)

    def _update(self, unit: int, entries: list[list[Tensor]]) -> None:
        """Update a unit: in the thread."""
        if self.error is not None:
            return
        try:
            grads: list[tuple[Tensor, Tensor]] = []
            for group, some in zip(self._twin.param_groups, entries, strict=True):
                for entry in some:
                    held = entry.__dict__.pop("_zeroshard_grad")
                    entry.grad = given = held.to(entry.dtype)
                    grads.append((held, given))
                group["params"] = some
            with torch.no_grad():
                body_of(self._twin)()
                for held, given in grads:
                    keep_change(held, given, given)
            for bucket in self._buckets[unit].values():
                bucket.follow_late(is_on_device=False)
        except BaseException as error:  # whatever it is, another thread must learn of it
            self.error = error
            logging.getLogger(__name__).error("an update in the background failed: %r", error)
            atexit.register(self.end_with_error)
        finally:
            for entry in (entry for some in entries for entry in some):
                entry.grad = None

    def hide(self, end: "weakref.WeakMethod[Any]") -> None:
        """Have whoever asks for states or slices wait first."""
        self._optimizer.state = Waiting(self._states, end)  # type: ignore[assignment]
        for master in self._masters:
            master.__class__ = WaitingSlice

    def wait(self) -> None:
        """Wait for all units, and let parameters on the device follow."""
        wait(self.futures)
        for buckets in self._buckets.values():
            for bucket in buckets.values():
                if bucket.updating is not None:
                    bucket.updating = None
                    bucket.follow_late(is_on_device=True)

    def show(self) -> None:
        """Put states and slices back."""
        for master in self._masters:
            master.__class__ = MasterSlice
        for master, entry in self._entries:
            if (state := self._twin.state.get(entry)) is not None:
                self._states[master] = state
        self._optimizer.state = self._states

    def end_with_error(self) -> None:
        """End an interpreter that nobody has told of the error with it."""
        if self.error is not None and not is_child_of(self._process):
            end_with(RuntimeError(f"an update in the background failed: {self.error!r}"))


@final
class WaitingSlice(MasterSlice):
    """A slice that is updated in the background: whoever reads it waits first."""

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if name_of(func) not in METADATA:
            for one in find((args, kwargs), WaitingSlice):
                slot_of(one).living_owner().learn()
        with NoSubclasses():
            return func(*args, **(kwargs or {}))


@final
class Waiting(MutableMapping[Any, Any]):
    """The states of an optimizer while they are updated in the background: whoever asks for them waits first.

    Args:
        states: the optimizer's own.
        end: a weak reference to what waits, and puts these in the place of this.
    """

    def __init__(self, states: MutableMapping[Any, Any], end: "weakref.WeakMethod[Any]") -> None:
        self._states, self._end = states, end

    def _now(self) -> MutableMapping[Any, Any]:
        if (end := self._end()) is not None:
            end()
        return self._states

    def __getitem__(self, key: Any) -> Any:
        return self._now()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._now()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._now()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._now().__reduce_ex__(protocol)


def _is_early(slot: Slot) -> bool:
    """Tell whether a parameter is gathered for use, and has states, and a gradient of its own, on the host."""
    return slot.bucket.spec.can_update_late and slot.updater is None and not slot.bucket.dtypes.is_stochastic


def twin_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer with the same options, which nobody changes, and without entries and states."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    return twin
