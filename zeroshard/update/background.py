"""Updates of states on the host that go on after `optimizer.step()` has returned.

Owns the thread, what it updates and who waits for it. It must not know passes. Read `optim/pieces.py` (what a piece
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
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch

from zeroshard import devices
from zeroshard.core.buffer import Bucket
from zeroshard.core.engine import Engine
from zeroshard.core.gradient import METADATA, name_of
from zeroshard.core.slices import MasterSlice, plain_part
from zeroshard.core.slot import Slot, slot_of
from zeroshard.optim.pieces import Piece, Resident, update_in_pieces
from zeroshard.torch_private import NoSubclasses
from zeroshard.tree import find
from zeroshard.update.sources import Lent, Source
from zeroshard.watch.process import end_with, is_child_of, wait_before_forks

__all__ = ["Background", "Waiting", "is_worthwhile"]

Tensor = torch.Tensor


def is_worthwhile(device: torch.device) -> bool:
    """Return whether there is a device that can compute meanwhile; tests replace this function."""
    return device.type != "cpu"


@final
class Background(Source):
    """Updates in a thread of what has its states and gradients on the host, and at once of the rest."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        self._engine, self._optimizer, self._device = engine, optimizer, engine.mesh.device
        self._pool: ThreadPoolExecutor | None = None
        self._run: Run | None = None
        """The update that has not ended."""
        self._failure = ""
        """Of this rank, or, once all have told one another, of all."""
        self._is_agreed = True
        """Whether ranks know of one another how the last update ended."""

    @contextmanager
    def update(self) -> Iterator[Iterable[Piece]]:
        """See `Source`. The thread begins when everything else is updated."""
        self._raise()
        optimizer = self._optimizer
        # GradScaler changes its numbers in place once step() has returned.
        is_scaled = getattr(optimizer, "grad_scale", None) is not None or hasattr(optimizer, "found_inf")
        groups: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
        now = [[master for master in group if is_scaled or not _may_wait(slot_of(master))] for group in groups]
        later = [[master for master in group if not is_scaled and _may_wait(slot_of(master))] for group in groups]
        run = Run(optimizer, later) if any(later) else None
        yield [Resident(now)] if any(now) else []
        # On every rank, also where the thread has nothing to update.
        self._is_agreed = False
        self._engine.continue_update(self.end, self.check)
        if run is not None:
            wait_before_forks(self)
            self._pool = self._pool or ThreadPoolExecutor(1, "zeroshard-update", devices.begin_thread, (self._device,))
            self._run = run
            run.begin(self._pool, self._wait_for)
            run.hide(weakref.WeakMethod(self.end))

    def end(self) -> None:
        """Wait for all of the update, and put everything in its place."""
        if (run := self._run) is not None:
            run.wait()  # one that is interrupted is awaited again
            run.show()
            self._run = None
            self._note(run)

    def check(self) -> None:
        """See `Source`. Collective: all-reduce of 8 bytes, once an update; every rank must call."""
        self.end()
        if not self._is_agreed:
            # What the last pass left to agree on comes first: a rank that requested something has done it already.
            self._engine.order.catch_up()
            self._is_agreed, comm, what = True, self._engine.comm, "whether states on the host were updated"
            if not comm.agree([int(not self._failure)], what)[0]:
                texts = comm.texts(self._failure, "what failed")
                rank = next(rank for rank, text in enumerate(texts) if text)
                self._failure = f"rank {comm.mesh.numbers[rank]}: {texts[rank]}"  # the same text on all ranks
        self._raise()

    def before_fork(self) -> None:
        """Wait, and let the thread go: a child would have none."""
        if self._run is not None:
            wait(self._run.futures)
        self._pool = None

    def _wait_for(self, run: "Run", future: "Future[None]") -> None:
        """Wait for the update of one unit."""
        wait([future])
        self._note(run)

    def _note(self, run: "Run") -> None:
        """Note what failed; a rank alone raises here."""
        if run.error is not None and not self._failure:
            self._failure = f"{type(run.error).__name__}: {run.error}"
            atexit.unregister(run.end_with_error)
        if self._engine.mesh.world_size == 1:
            self._raise()

    def _raise(self) -> None:
        if self._failure:
            raise RuntimeError(
                f"{self._engine.mesh} The update of states on the host failed after optimizer.step() had returned "
                f"({self._failure}). States and parameters of that step may be torn, so they are not used any more: "
                "load a checkpoint into a new run."
            )


def _may_wait(slot: Slot) -> bool:
    """Return whether a parameter is gathered for use, and has states, and a gradient of its own, on the host."""
    return slot.bucket.spec.can_update_late and slot.updater is None and not slot.bucket.dtypes.is_stochastic


@final
class UnitPiece(Piece):
    """What the thread updates of one unit.

    Args:
        unit: its number.
        count: the number of groups.
    """

    def __init__(self, unit: int, count: int) -> None:
        self.unit = unit
        self.lent: list[list[Lent]] = [[] for _ in range(count)]
        """The entries of each group."""
        self.buckets: dict[int, Bucket] = {}
        """By number."""

    def entries(self) -> Sequence[list[Tensor]]:
        """See `Piece`: gradients of another dtype are converted in the thread."""
        return [[one.begin() for one in group] for group in self.lent]

    def finish(self) -> None:
        """Round masters into parameters on the host; the program rounds into those on the device."""
        for one in (one for group in self.lent for one in group):
            one.end()
            one.entry.grad = None
        for bucket in self.buckets.values():
            bucket.follow_late(is_on_device=False)


@final
class Run:
    """One update in the background.

    Args:
        groups: of each group of the optimizer, the slices that are updated.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Tensor]]) -> None:
        self._optimizer, self._states = optimizer, optimizer.state
        self._twin, self._process = twin_of(optimizer), os.getpid()
        self.error: BaseException | None = None
        self.futures: list[Future[None]] = []
        self._masters = [master for group in groups for master in group]
        pieces: dict[int, UnitPiece] = {}
        for number, group in enumerate(groups):
            for master in group:
                slot = slot_of(master)
                piece = pieces.setdefault(slot.unit, UnitPiece(slot.unit, len(groups)))
                piece.buckets[slot.bucket.number] = slot.bucket
                if slot.has_grad:
                    piece.lent[number].append(self._lend(master, slot))
        self.pieces = [piece for _, piece in sorted(pieces.items())]
        """In the order of units."""

    def _lend(self, master: Tensor, slot: Slot) -> Lent:
        """Return what stands for a slice in the thread, with its gradient and states of now."""
        one = Lent(master, slot.bucket.master(slot.index), plain_part(slot))
        if (state := self._states.get(master)) is not None:
            self._twin.state[one.entry] = state
        return one

    def begin(self, pool: ThreadPoolExecutor, wait_for: "Callable[[Run, Future[None]], None]") -> None:
        """Begin, and let each bucket know what to wait for."""
        for piece in self.pieces:
            future = pool.submit(self._update, piece)
            self.futures.append(future)
            for bucket in piece.buckets.values():
                bucket.updating = functools.partial(wait_for, self, future)

    def _update(self, piece: UnitPiece) -> None:
        """Update a unit: in the thread."""
        if self.error is not None:
            return
        try:
            with torch.no_grad():
                update_in_pieces(self._twin, nullcontext([piece]))
        except BaseException as error:  # whatever it is, another thread must learn of it
            self.error = error
            logging.getLogger(__name__).error("an update in the background failed: %r", error)
            atexit.register(self.end_with_error)

    def hide(self, end: "weakref.WeakMethod[Any]") -> None:
        """Have whoever asks for states or slices wait first."""
        self._optimizer.state = Waiting(self._states, end)  # type: ignore[assignment]
        for master in self._masters:
            master.__class__ = WaitingSlice

    def wait(self) -> None:
        """Wait for all units, and let parameters on the device follow."""
        wait(self.futures)
        for piece in self.pieces:
            for bucket in piece.buckets.values():
                if bucket.updating is not None:
                    bucket.updating = None
                    bucket.follow_late(is_on_device=True)

    def show(self) -> None:
        """Put states and slices back."""
        for master in self._masters:
            master.__class__ = MasterSlice
        for one in (one for piece in self.pieces for group in piece.lent for one in group):
            if (state := self._twin.state.get(one.entry)) is not None:
                self._states[one.master] = state
        self._optimizer.state = self._states

    def end_with_error(self) -> None:
        """End an interpreter that nobody has told of the error with it."""
        if self.error is not None and not is_child_of(self._process):
            end_with(RuntimeError(f"an update in the background failed: {self.error!r}"))


@final
class WaitingSlice(MasterSlice):
    """A slice that is updated in the background: whoever reads it waits first."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if name_of(func) not in METADATA:
            for one in find((args, kwargs), WaitingSlice):
                slot_of(one).living_owner().learn()
        with NoSubclasses():
            return func(*args, **(kwargs or {}))


@final
class Waiting(UserDict[Any, Any]):
    """The states of an optimizer while they are updated in the background: whoever asks for them waits first.

    Args:
        states: the optimizer's own.
        end: a weak reference to what waits, and puts these in the place of this.
    """

    def __init__(self, states: MutableMapping[Any, Any], end: "weakref.WeakMethod[Any]") -> None:
        self._states, self._end = states, end

    @property
    def data(self) -> Any:  # type: ignore[override]
        """The states, once they are updated."""
        if (end := self._end()) is not None:
            end()
        return self._states

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]  # of a parameter without states, makes them

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.data.__reduce_ex__(protocol)


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
