"""An exponential moving average of the master weights, on this rank's slices of them.

Owns the averaged slices and their exchange with the masters. It communicates only in `swapped()` and `restore()`,
through the engine. Read `core/buffer.py` (`Bucket.master`) first.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import final

import torch

from zeroshard.core.buffer import Bucket
from zeroshard.core.changes import refuse_torn
from zeroshard.core.engine import Engine
from zeroshard.store.stored import is_stored
from zeroshard.table.trace import Memory
from zeroshard.torch_private import foreach_lerp_
from zeroshard.whole.masters import check_trained, follow_masters, left_out, trained_since

__all__ = ["Average", "count_averages"]

PIECE_NUMEL = 1 << 20
"""Number of elements of offloaded masters that are read at a time."""


@final
class Average:
    """An exponential moving average of a sharded model's trainable parameters; `zero.ema(decay)` creates it.

    It starts with the current parameters, has the dtype of the master weights, and is sharded like the optimizer
    states.

    Args:
        decay: the weight of the previous average, in [0, 1); the parameters have the weight 1 - decay.

    ```python
    import torch, zeroshard as zs

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zs.shard(model, optimizer)
    average = zero.ema(0.5)
    before = model.weight.detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    average.update()
    after = model.weight.detach().clone()
    with average.swapped():
        assert torch.equal(model.weight, torch.lerp(before, after, 0.5))
    assert torch.equal(model.weight, after)
    ```
    """

    def __init__(self, engine: Engine, decay: float) -> None:
        engine.leave_passes("ema()")
        # Shards with different decays would not form an average.
        engine.order.barrier(place := f"ema(decay={decay!r})")
        engine.order.votes.span(place)
        if not isinstance(decay, int | float) or not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must be in [0, 1), such as 0.999; got {decay!r}.")
        self._engine, self.decay, self._left = engine, decay, left_out(engine)
        self._buckets: list[Bucket] = [bucket for unit in engine.units for bucket in unit.reducible()]
        self._averages = [master.detach().clone() for master in self._masters]
        self._updates, self.is_swapped = 0, False
        """Whether the parameters are the average."""

    @property
    def _masters(self) -> list[torch.Tensor]:
        """The current slices of the masters, which may have moved."""
        return [m for b in self._buckets for m in map(b.master, range(len(b.parameters))) if m.numel()]

    @property
    def nbytes(self) -> int:
        """Bytes of the average on this rank."""
        return sum(average.nbytes for average in self._averages)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the parameters: average = decay * average + (1 - decay) * parameters.

        Call it after `optimizer.step()`. Collective: none.

        Raises:
            RuntimeError: called inside `swapped()`, where the parameters are the average, or a parameter was
                trained since that was frozen at `zero.ema()`, or an exception under `gathered()` left it changed.
        """
        if self.is_swapped:
            raise RuntimeError(f"{self._engine.mesh} update() inside swapped(): leave the context first.")
        refuse_torn([bucket.changes for bucket in self._buckets], f"{self._engine.mesh} update() of an average")
        self._engine.learn()
        check_trained(self._engine, self._left, "zero.ema()")
        pairs = list(zip(self._averages, self._masters, strict=True))
        if here := [pair for pair in pairs if not is_stored(pair[1])]:
            averages, masters = zip(*here, strict=True)
            foreach_lerp_(averages, masters, 1.0 - self.decay)
        for average, master in pairs:
            if is_stored(master):
                for part, values in zip(average.split(PIECE_NUMEL), master.split(PIECE_NUMEL), strict=True):
                    part.lerp_(values.clone(), 1.0 - self.decay)
        self._updates += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Replace the parameters by the average inside the context.

        After an exception inside, the exit does not communicate, because ranks may fail alone: at stages 1 and 2, call
        `restore()` on every rank before you continue.

        Raises:
            RuntimeError: called inside another `swapped()`, `gathered()` or a pass, or a parameter was trained that was
                frozen at `zero.ema()`, or parameters were changed inside; the changes are lost.

        Collective: at stages 1 and 2, an all-gather of parameters on entry and on exit; every rank must enter.
        """
        if self.is_swapped:
            raise RuntimeError(f"{self._engine.mesh} swapped() inside swapped(): parameters are already the average.")
        if self._engine.gathered is not None:
            raise RuntimeError(f"{self._engine.mesh} swapped() inside gathered(): enter gathered() inside it instead.")
        self._engine.leave_passes("swapped()")
        late = trained_since(self._left, "zero.ema()")  # at one place of a pipe, perhaps, which the others wait for
        self._engine.order.settle(f"swapped() after {self._updates} update(s) of an average. {late}")
        check_trained(self._engine, self._left, "zero.ema()")
        self._exchange()
        follow_masters(self._engine)
        updates = [bucket.updates for bucket in self._buckets]
        has_finished = False
        try:
            yield
            has_finished = True
        finally:
            has_changed = updates != [bucket.updates for bucket in self._buckets]
            has_changed |= any(bucket.changes.has_any() for bucket in self._buckets)
            self._exchange()
            if has_finished:
                follow_masters(self._engine)
            else:
                for bucket in self._buckets:
                    bucket.follow_masters()
        if has_changed:
            raise RuntimeError(
                f"{self._engine.mesh} Parameters were changed inside swapped() (optimizer.step() or "
                "gathered(writeback=True)), where they are the average; the change went into the average. Train "
                "outside the context."
            )

    def restore(self) -> None:
        """Restore the parameters after an exception left `swapped()`.

        Collective: as on exit from `swapped()`; every rank must call.
        """
        follow_masters(self._engine)

    @torch.no_grad()
    def _exchange(self) -> None:
        # Slice by slice, to avoid a second copy of all slices.
        for master, average in zip(self._masters, self._averages, strict=True):
            held = master.clone()
            master.copy_(average)
            average.copy_(held)
        self.is_swapped = not self.is_swapped


def count_averages(memory: Memory, averages: Iterable[Average]) -> Memory:
    """Return `memory` with the bytes of averages added to the states."""
    nbytes = sum(average.nbytes for average in averages)
    columns = memory.resident_bytes, memory.peak_bytes, memory.predicted_bytes
    return Memory(*({**one, "states": one["states"] + nbytes} for one in columns))
