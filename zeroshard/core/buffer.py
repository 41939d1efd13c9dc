"""Flat tensors: the bucket whose views are the parameters.

Owns the storage of parameters and of their master values. It must not know passes or hooks. Read `table/layout.py`
(positions of elements) and `table/cells.py` (residency) first; `core/grads.py` has the gradients.

Note: the life of a parameter's bytes
    `Bucket.full` holds the whole bucket; the model's parameters are always views of it. Where parameters are kept
    whole, `shard` is a view of `full`, and nothing is copied. Where parameters are sharded, `shard` is a tensor of its
    own, on the device or elsewhere, and `full` has no memory between uses. `open()` allocates `full` and copies a shard
    on the device into it, `brought()` a shard from elsewhere, a gather the other ranks' parts, and `close()` releases
    the memory. The views stay valid throughout, also those that autograd saved. `wire/memory.py` decides whether memory
    is private or shared on the host.
"""

import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from zeroshard.core.changes import Changes
from zeroshard.core.dtypes import Dtypes
from zeroshard.core.grads import FlatGradients, Gradients, Places
from zeroshard.core.loose import LooseGradients
from zeroshard.core.undo import Ending
from zeroshard.store.ahead import Waitable
from zeroshard.store.stores import Stores, moves
from zeroshard.table.spec import BucketSpec
from zeroshard.table.trace import Ledger
from zeroshard.torch_private import WeakStorage, raw_data, version_of
from zeroshard.wire.buffers import Pool
from zeroshard.wire.comm import Comm, Tag
from zeroshard.wire.memory import OwnMemory
from zeroshard.wire.transports import codec_of

__all__ = ["Bucket", "refuse_ahead"]

Tensor = torch.Tensor


class Bucket(Ending):
    """One flat tensor of a unit, of one dtype and trainability; the unit's parameters are views of it.

    Args:
        spec: the bucket's contents, and the residency of each column.
        parameters: the model's parameters, in registration order, on any device.
        device: the rank's device.
        stores: the memories of the model.
    """

    def __init__(
        self,
        spec: BucketSpec,
        parameters: Sequence[Tensor],
        pool: Pool,
        ledger: Ledger,
        device: torch.device,
        stores: Stores,
    ) -> None:
        self.spec, self.layout, self.number = spec, spec.layout, spec.number
        self.dtypes = dtypes = Dtypes(spec.formats)
        self.dtype, self.device = dtypes.param, device
        self.codec = codec_of(spec.formats.reduce)
        self.places = Places(spec, parameters)
        # Other ranks cannot read a rank's offloaded values in place.
        self._memory, (start, stop) = pool.memory if stores.home is None else OwnMemory(), spec.shard
        self._ledger, self._home, self._store = ledger, stores.of(spec.row.parameters), stores.of(spec.row.states)
        if spec.is_whole:
            self.full = self._memory.zeros(spec.layout.full_numel, self.dtype, self.device)
            self.shard = self.full[start:stop]
        else:
            self.full, self._here = self._memory.home(spec.layout.full_numel, spec.here, self.dtype, self.device)
            self.shard = self._home.shard(self._here, stop - start)
        self.own = self.full[start:stop]
        self.updating: Callable[[], None] | None = None
        """Waits for the background update of the masters; None without such an update."""
        self.arriving: Callable[[], None] | None = None
        """Waits for updated parameters that are under way, also of a model that is gone."""
        self.flat: FlatGradients | None = None
        """The gradients, if they are summed over ranks."""
        self.tell = partial(ledger.tell, spec.unit)
        landing = stores.of(spec.row.gradients).landing(self.tell)
        if spec.lands_on_sums:
            self.grads: Gradients = LooseGradients(spec, self.places, dtypes.grad, ledger, landing)
        else:
            self.grads = self.flat = FlatGradients(spec, self.places, dtypes.grad, ledger, landing, pool, self.device)
        self.views = self.places.views_of(self.full)
        self._updated = self.full if spec.is_whole and spec.updates_all else self.shard
        """The parameters that this rank updates."""
        self._masters = self._updated
        """The optimizer's values: the parameters, or the masters of the parameters."""
        if spec.has_masters:
            self._masters = self._store.zeros(spec.states[1] - spec.states[0], dtypes.master)
        self._entries, self._followed = raw_data(self._masters), 0
        """The same memory, whose version counts writes to the optimizer's entries alone, and the last one copied."""
        self._is_never_ahead = spec.is_whole and spec.updates_all and not spec.has_masters
        """Whether entries are the parameters themselves."""
        self._rooms: dict[tuple[Hashable, torch.dtype], Tensor] = {}
        self.parameters: list[torch.nn.Parameter] = []
        """The model's parameters that are views of the bucket, in order."""
        self.changes = Changes(spec.names, self.parameters, self.full, is_whole=spec.is_whole)
        self.has_states, self.trained = False, 0
        """Whether an optimizer updates the bucket, and the number of its steps that had a gradient of it."""
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
        self._memory.open(self.full, self.spec.here[0], self._here)
        self._ledger.add("transient", self.full.nbytes)

    def brought(self, begin: Callable[[], Waitable], unit: str) -> Waitable:
        """Begin the copy of offloaded parameters into `full`, followed by the work that reads `full`."""
        self._tell_move(self.own, self.shard)
        return self._home.brought(self.own, self.shard, begin, unit)

    def await_update(self) -> None:
        """Wait for the background update, if there is one, and copy its results to parameters on the device."""
        if self.updating is not None:
            self.updating()  # an interrupted wait is repeated
            self.updating = None
            self.follow_late(is_on_device=True)

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
            if self.spec.has_masters:
                masters, now = self._masters, self._updated.to(self._masters.device)
                is_changed = masters.to(self.dtype) != now
                masters.copy_(torch.where(is_changed, now.to(masters.dtype), masters))

    def _keep_shard(self, values: Tensor) -> None:
        if not self.spec.is_whole:
            self.shard.copy_(values)

    def start_values(self) -> Tensor:
        """Return a buffer (full_numel,) for the initial values, in the masters' dtype; then call `set_start`."""
        return torch.zeros_like(self.full, dtype=self.dtypes.master) if self.spec.has_masters else self.full

    def set_start(self, values: Tensor) -> None:
        """Copy the initial values into the bucket."""
        if self.spec.has_masters:
            self.full.copy_(values)
            self._masters.copy_(values[slice(*self.spec.states)])
        self._keep_shard(self.own)

    def follow_masters(self, *, is_filed_done: bool = False) -> None:
        """Round the masters into the parameters that this rank keeps; call `count_update` once all are whole.

        Args:
            is_filed_done: whether this was done already where masters or parameters are in a file.
        """
        self.updates += 1
        self._followed = version_of(self._entries)
        is_done = is_filed_done and (self._home.is_filed or self._store.is_filed)
        if self.spec.has_masters and not is_done and self.updating is None:
            self._follow()

    def follow_late(self, *, is_on_device: bool) -> None:
        """Round masters that were updated in the background into the parameters, if those are on the device, or not."""
        if self.spec.has_masters and is_on_device is (self._updated.device.type != "cpu"):
            self._follow()

    def follow_in_file(self) -> None:
        """Round masters in memory into parameters in a file."""
        if self._home.is_filed and not self._store.is_filed:
            self._follow()

    @torch.no_grad()
    def _follow(self) -> None:
        self._tell_move(self._updated, self._masters)
        self._store.bring(self._updated, self._masters)

    def _tell_move(self, target: Tensor, source: Tensor) -> None:
        """Tell of values that change their memory."""
        for kind in moves(target, source):
            self.tell(kind, target.nbytes)

    def follow_part(self, start: int, values: Tensor) -> Tensor | None:
        """Round a piece of updated masters in a file, from element `start` on, into parameters.

        Returns:
            Parameters in the file, which the caller must write; None without such parameters.
        """
        if not self.spec.has_masters:
            return None
        part = self._updated[start : start + values.numel()]
        if self._home.is_filed:
            return part
        self._tell_move(part, values)
        with torch.no_grad():
            self._store.bring(part, values)
        return None

    def move_masters(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace masters on the device, if they are separate from parameters, by tensors of the same values."""
        if self.spec.has_masters and self.spec.row.states.is_on_device:
            self._masters = move(self._masters)
            self._entries.data = self._masters

    def array(self, key: Hashable = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return the offloaded masters, or an offloaded state, which is allocated at its first use."""
        if dtype is None:
            return self._masters
        if (key, dtype) not in self._rooms:
            self._rooms[key, dtype] = self._store.zeros(self._masters.numel(), dtype)
        return self._rooms[key, dtype]

    def room(self, index: int, key: Hashable, dtype: torch.dtype) -> Tensor:
        """Return uninitialized memory for a state of parameter `index`, in the memory of its masters."""
        start, stop = self.master_range(index)
        if self.spec.row.states.is_on_device or start == stop:
            return torch.empty(stop - start, dtype=dtype, device=self._masters.device)
        return self.array(key, dtype)[start - self.spec.states[0] : stop - self.spec.states[0]]

    def entry(self, index: int) -> Tensor:
        """Return the optimizer's entry of parameter `index`."""
        return self._store.entry(self._updated_part(self._entries, index))

    @property
    def is_ahead(self) -> bool:
        """Whether code has written to the optimizer's entries since parameters followed them."""
        return not self._is_never_ahead and version_of(self._entries) != self._followed

    def let_read(self, what: str) -> None:
        """Wait for a background update before code reads the optimizer's entries.

        Raises:
            RuntimeError: their values are in a file.
        """
        self._store.check_entries(f"{what}: the master values of '{self.spec.names[0]}' and its neighbours")
        self.await_update()

    def count_update(self) -> None:
        """Count an update of parameters that stay whole in the versions that autograd checks."""
        if self.spec.is_whole:
            self.changes.count_update()

    def master_range(self, index: int) -> tuple[int, int]:
        """Return the elements of parameter `index` that this rank updates, as (start, stop) in the bucket."""
        return self.layout.overlap(index, *self.spec.states)

    def master(self, index: int) -> Tensor:
        """Return the part of parameter `index` that the optimizer updates: a flat view, possibly of 0 elements."""
        return self._updated_part(self._masters, index)

    def _updated_part(self, masters: Tensor, index: int) -> Tensor:
        start, stop = self.master_range(index)
        return masters[start - self.spec.states[0] : stop - self.spec.states[0]]


def refuse_ahead(buckets: Iterable[Bucket], what: str) -> None:
    """Raise RuntimeError if code has written to the optimizer's entries, which parameters do not follow yet."""
    if names := [bucket.spec.names[0] for bucket in buckets if bucket.is_ahead]:
        raise RuntimeError(
            f"{what} after code has written to the optimizer's entries (near '{names[0]}' first), which parameters "
            "follow at the next forward. Write to them between a step and the forward; enter `with "
            "zero.gathered():`, on every rank, to read parameters before it."
        )
