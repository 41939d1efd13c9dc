"""Flat tensors: the bucket whose views are the parameters.

Owns the storage of parameters and of their master values. It must not know passes or hooks. Read `table/layout.py`
(positions of elements) and `table/cells.py` (residency) first; `core/grads.py` has the gradients.

Note: the life of a parameter's bytes
    `Bucket.full` holds the whole bucket; the model's parameters are always views of it. Where parameters are kept
    whole, `shards` is a view of `full`, and nothing is copied. Where parameters are sharded, `shards` are separate
    tensors, the first in offload memory, the second on the device, and `full` has no memory between uses. `open()`
    allocates `full` and copies this rank's part on the device into it, `brought()` copies the offloaded part, a gather
    the other ranks' parts, and `close()` releases the memory. The views stay valid throughout, also those that
    autograd saved. `wire/memory.py` decides whether memory is private or shared on the host.
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from zeroshard.core.changes import Changes
from zeroshard.core.dtypes import Dtypes
from zeroshard.core.grads import FlatGradients, Gradients, Places
from zeroshard.core.loose import LooseGradients
from zeroshard.core.undo import Ending
from zeroshard.store.ahead import Waitable
from zeroshard.store.apart import Apart, beside
from zeroshard.store.stored import is_stored
from zeroshard.table.spec import BucketSpec
from zeroshard.table.trace import Ledger
from zeroshard.torch_private import WeakStorage
from zeroshard.wire.buffers import Pool
from zeroshard.wire.comm import Comm, Tag
from zeroshard.wire.memory import OwnMemory
from zeroshard.wire.transports import codec_of

__all__ = ["Bucket"]

Tensor = torch.Tensor


class Bucket(Ending):
    """One flat tensor of a unit, of one dtype and trainability; the unit's parameters are views of it.

    Args:
        spec: the bucket's contents, and the residency of each column.
        parameters: the model's parameters, in registration order, on any device.
        device: the rank's device.
        apart: the memory of offloaded states; None without any.
        home: the memory of parameters that are offloaded between uses; None if no rank has any.
    """

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[Tensor],
        pool: Pool,
        ledger: Ledger,
        device: torch.device,
        apart: Apart | None = None,
        home: Apart | None = None,
    ) -> None:
        self.spec, self.layout, self.number = spec, spec.layout, spec.number
        self.dtypes = dtypes = Dtypes(spec.formats)
        self.dtype, self.device = dtypes.param, device
        self.codec = codec_of(spec.formats.reduce)
        self.places = Places(spec, parameters)
        # Other ranks cannot read a rank's offloaded values in place.
        self._ledger, self._memory, (start, stop) = ledger, pool.memory if home is None else OwnMemory(), spec.shard
        if spec.is_whole:
            self.full = self._memory.zeros(spec.layout.full_numel, self.dtype, self.device)
            self.shards = [self.full[:0], self.full[start:stop]]
        else:
            self.full, here = self._memory.home(spec.layout.full_numel, spec.here, self.dtype, self.device)
            self.shards = [self.full[:0], here]
        self.own = self.full[start:stop]
        self._home = home
        self._away: tuple[Tensor, Tensor] | None = None
        """The destination on the device of offloaded parameters, and the offloaded parameters."""
        if home is not None and spec.apart_parameters:
            self.shards[0] = away = home.zeros(spec.here[0] - start, self.dtype)
            self._away = self.own[: away.numel()], away
        self.updating: Callable[[], None] | None = None
        """Waits for the background update of offloaded masters; None without such an update."""
        self.flat: FlatGradients | None = None
        """The gradients, if they are summed over ranks."""
        if spec.lands_on_sums:
            self.grads: Gradients = LooseGradients(spec, self.places, dtypes.grad, ledger, device)
        else:
            self.grads = self.flat = FlatGradients(spec, self.places, dtypes.grad, ledger, pool, self.device)
        self.views = self.places.views_of(self.full)
        self._updated = [self.full[:0], self.full] if spec.is_whole and spec.updates_all else self.shards
        """The parameters that this rank updates: offloaded, then on the device."""
        self._apart, self._cut = apart if spec.is_trained else home, spec.apart_states[1] - spec.states[0]
        away, here = self._updated
        self._masters = [away[: self._cut], here[max(0, self._cut - away.numel()) :]]
        """The optimizer's values, offloaded and on the device: the parameters, or the masters of the parameters."""
        if self._apart is not None and spec.apart and not spec.shares_apart:
            self._masters[0] = self._apart.zeros(self._cut, dtypes.master)
        if spec.has_masters:
            rest = spec.states[1] - spec.apart_states[1]
            self._masters[1] = torch.zeros(rest, dtype=dtypes.master, device=device)
        self._rooms: dict[tuple[Hashable, torch.dtype], Tensor] = {}
        self.parameters: list[torch.nn.Parameter] = []
        """The model's parameters that are views of the bucket, in order."""
        self.changes = Changes(spec.names, self.parameters, self.full, is_whole=spec.is_whole)
        self.has_states = False
        """Whether an optimizer updates the bucket."""
        self._is_left = False
        """Whether the memory of `full` could not be released."""
        self._lent: list[Any] = []
        """Storages of other tensors on the memory of `full`, which they do not keep."""
        self.updates = 0
        """The number of changes to the parameters; tensors that autograd saved before a change are invalid after it."""
        if not self.spec.is_whole:
            ledger.add("transient", self.full.nbytes)

    def whole_gradient(self, index: int, comm: Comm, tag: Tag) -> Tensor:
        """Return a parameter's whole gradient. Collective: all-gather of the bucket; every rank must call."""
        full = torch.zeros(self.layout.full_numel, dtype=self.dtypes.grad, device=self.device)
        self.grads.put_shard(full)
        if full.numel():
            comm.gather(full, tag, kind="state").wait()
        return self.places.views_of(full)[index].clone()

    def open(self) -> None:
        """Allocate `full` and copy this rank's elements on the device into it."""
        self._memory.open(self.full, self.spec.here[0], self.shards[1])
        self._ledger.add("transient", self.full.nbytes)

    def brought(self, begin: Callable[[], Waitable], unit: str) -> Waitable:
        """Begin the copy of offloaded parameters into `full`, followed by the work that reads `full`."""
        return begin() if self._home is None else self._home.brought(self._away, begin, unit)

    def await_update(self) -> None:
        """Wait for the background update, if there is one, and copy its results to parameters on the device."""
        if self.updating is not None:
            self.updating()  # an interrupted wait is repeated
            self.updating = None
            self.follow_apart(is_on_device=True)

    def close(self) -> int:
        """Release the memory of `full`, and return its bytes; views stay valid, without memory."""
        if not self.is_lent() and not self._memory.close(self.full) and not self._is_left:
            self._is_left = True
            warnings.warn(
                f"numpy shares the memory of the parameters of unit '{self.spec.name}', so this rank cannot release "
                f"{self.full.nbytes:,} bytes. Pass parameter.detach().clone() to numpy.",
                stacklevel=2,
            )
        self._ledger.add("transient", -self.full.nbytes)
        return self.full.nbytes

    def lend(self, entry: Tensor) -> None:
        """Give a view of `full` a storage of its own size on the same memory; its version counter stays.

        Tools that write files look at storages. Without this, each would hold the whole bucket.
        """
        # The new storage keeps the tensor that it is made from: were that `entry`, neither would ever be freed.
        entry.data = torch.from_dlpack(entry.detach())
        self._lent.append(WeakStorage(entry.untyped_storage()))

    def is_lent(self) -> bool:
        """Return whether tensors of `lend` would read released memory; shared memory can always be read."""
        self._lent = [storage for storage in self._lent if not storage.expired()]
        return bool(self._lent) and not self._memory.is_shared

    def rest(self) -> None:
        """Discard the contents of `full` until its next use, if its memory can and no change would be lost."""
        if self._memory.is_shared and not self.changes.has_any():
            self._memory.rest(self.full)

    def keep(self) -> None:
        """Copy changed parameters to the shard, and to the masters that do not round to the new values."""
        values = self.full if self.changes.values is None else self.changes.values
        with torch.no_grad():
            self._keep_shard(values[slice(*self.spec.shard)])
            for part, masters in [*self._rounded(0), *self._rounded(1)]:
                now = part.to(masters.device)
                is_changed = masters.to(self.dtype) != now
                masters.copy_(torch.where(is_changed, now.to(masters.dtype), masters))

    def _keep_shard(self, values: Tensor) -> None:
        if not self.spec.is_whole:
            for part, new in beside(self.shards, values):
                part.copy_(new)

    def _rounded(self, is_here: bool | int) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of parameters and the masters that they are copied from: offloaded, or on the device."""
        is_same = not self.spec.has_masters if is_here else self.spec.shares_apart
        return [] if is_same else beside(self._updated, self._masters[is_here], is_here * self._cut)

    def start_values(self) -> Tensor:
        """Return a buffer (full_numel,) for the initial values, in the masters' dtype; then call `set_start`."""
        return torch.zeros_like(self.full, dtype=self.dtypes.master) if self.spec.has_masters else self.full

    def set_start(self, values: Tensor) -> None:
        """Copy the initial values into the bucket."""
        if self.spec.has_masters:
            self.full.copy_(values)
        self._keep_shard(self.own)
        for is_here, start in enumerate(self.spec.apart_states):
            if self._rounded(is_here):
                masters = self._masters[is_here]
                masters.copy_(values[start : start + masters.numel()])

    def follow_masters(self, *, is_apart_done: bool = False) -> None:
        """Round the masters into the parameters that this rank keeps; call `count_update` once all are whole.

        Args:
            is_apart_done: whether offloaded masters are already rounded (`follow_part`, `follow_here`).
        """
        self.updates += 1
        with torch.no_grad():
            for part, masters in self._rounded(True):
                if not (is_apart_done and is_stored(part)):
                    part.copy_(masters)
        if not (is_apart_done and is_stored(self._masters[0])) and self.updating is None:
            self.follow_apart()

    def follow_apart(self, *, is_on_device: bool | None = None) -> None:
        """Round offloaded masters into parameters: those on the device, offloaded ones, or (None) all."""
        if not self._cut:
            return  # before the context, which costs every step of every bucket 3 microseconds
        with torch.no_grad():
            for part, masters in self._rounded(False):
                if is_on_device is None or is_on_device is (part.device.type != "cpu"):
                    self._bring(part, masters)

    def move_masters(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace masters on the device, if they are separate from parameters, by tensors of the same values."""
        if self.spec.has_masters:
            self._masters[1] = move(self._masters[1])

    def follow_here(self) -> None:
        """Write masters on the device to parameters in a file."""
        with torch.no_grad():
            for part, masters in self._rounded(True):
                if is_stored(part):
                    part.copy_(masters)

    def follow_part(self, start: int, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Round updated offloaded masters, from element `start` on, into parameters.

        Returns:
            Parameters in a file, which the caller must write, and their new values; None without such parameters.
        """
        stored = None
        with torch.no_grad():
            for part, new in beside(self._updated, values, start):
                if not is_stored(part):
                    self._bring(part, new)
                elif not self.spec.shares_apart:
                    stored = part, new
        return stored

    def _bring(self, part: Tensor, masters: Tensor) -> None:
        assert self._apart is not None, "nothing is offloaded"
        self._apart.bring(part, masters)

    def apart_values(self, key: Hashable = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return the offloaded masters, or an offloaded state, which is allocated at its first use."""
        if dtype is None:
            return self._masters[0]
        if (key, dtype) not in self._rooms:
            assert self._apart is not None, "nothing is offloaded"
            self._rooms[key, dtype] = self._apart.zeros(self._masters[0].numel(), dtype)
        return self._rooms[key, dtype]

    def room(self, index: int, key: Hashable, dtype: torch.dtype) -> Tensor:
        """Return uninitialized memory for a state of parameter `index`, in the memory of its masters."""
        start, stop = self.master_range(index)
        if index >= self.spec.apart or start == stop:
            return torch.empty(stop - start, dtype=dtype, device=self.master(index).device)
        return self.apart_values(key, dtype)[start - self.spec.states[0] : stop - self.spec.states[0]]

    def entry(self, index: int) -> Tensor:
        """Return the optimizer's entry of parameter `index`."""
        masters = self.master(index)
        return masters if self._apart is None or index >= self.spec.apart else self._apart.entry(masters)

    def count_update(self) -> None:
        """Count an update of parameters that stay whole in the versions that autograd checks."""
        if self.spec.is_whole:
            self.changes.count_update()

    def master_range(self, index: int) -> tuple[int, int]:
        """Return the elements of parameter `index` that this rank updates, as (start, stop) in the bucket."""
        return self.layout.overlap(index, *self.spec.states)

    def master(self, index: int) -> Tensor:
        """Return the part of parameter `index` that the optimizer updates: a flat view, possibly of 0 elements."""
        start, stop = self.master_range(index)
        is_here = index >= self.spec.apart
        first = self.spec.apart_states[is_here]
        return self._masters[is_here][start - first : stop - first]
