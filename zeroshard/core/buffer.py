"""Flat tensors: the bucket whose views are the parameters, and its gradients.

Owns the storage of parameters and of gradients on their way, and the flags that say which gradients are there. It must
not know passes or hooks. Read `table/layout.py` (where elements lie) and `table/cells.py` (what is kept) first.

Note: the life of a parameter's bytes
    `Bucket.full` holds the whole bucket; the model's parameters are views of it for good. Where parameters are kept
    whole, `shard` is a view of `full`, and nothing ever moves. Where they are sharded, `shard` is a tensor of its own
    and `full` has no memory between uses: `open()` gives it memory with the own shard in it, a gather fills the rest,
    `close()` takes the memory back. The views stay valid throughout, also those that autograd saved. Whether memory is
    this process's alone or shared on the host is for `wire/memory.py`.

Note: the life of a gradient
    Autograd accumulates into its own slot; a hook moves the tensor into `GradientBuffer.local` (whole bucket) and
    empties the slot; one that fills the bucket, as an embedding's, becomes `local` itself. A reduction turns `local`
    into this rank's shard of the sum, which is added to `held`. Where whole gradients are kept, `local` is `held`
    itself until something reduced lies there, so nothing is copied. Under `no_sync` `local` simply stays, and
    the next backward adds to it. With the last gradient that `zero_grad` forgets, the memory of `held` goes back to
    torch's allocator, for the activations of the next forward.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from zeroshard.core.changes import Changes
from zeroshard.core.precision import Dtypes
from zeroshard.core.states import Own, Scope, Sum
from zeroshard.table.spec import BucketSpec
from zeroshard.table.trace import Ledger
from zeroshard.torch_private import users_of_storage
from zeroshard.wire.memory import MEMORIES
from zeroshard.wire.pool import Pool
from zeroshard.wire.transports import codec_of

__all__ = ["Bucket", "GradientBuffer", "Local", "flatten"]

Tensor = torch.Tensor


@dataclass(frozen=True)
class Local:
    """A rank's own gradients handed over for a reduction, with the states that they had then."""

    full: Tensor
    apart: Tensor | None
    """Where this rank's shard of the sum goes, if neither `full` nor what is held may be written yet."""
    views: list[Tensor]
    own: list[Own]
    sums: list[Sum]

    @property
    def is_first(self) -> bool:
        """Whether no sum lies in what is held."""
        return all(one is Sum.STALE for one in self.sums)


class GradientBuffer:
    """The gradients of one bucket, from autograd's slots to what the optimizer reads."""

    def __init__(self, bucket: "Bucket", pool: Pool, ledger: Ledger) -> None:
        self.spec, self._layout, self._pool, self._ledger = bucket.spec, bucket.layout, pool, ledger
        self.dtype, self._device = bucket.dtypes.grad, bucket.device
        self._shapes, self._strides = bucket.shapes, bucket.strides
        self._is_kept = self.spec.holds_whole_gradients and pool.memory.is_shared
        """Whether other ranks read what is held where it lies; such memory cannot come and go."""
        count = len(self._shapes)
        self.own, self.sums = [Own.NONE] * count, [Sum.STALE] * count
        """Of each parameter: the state of this rank's gradient, and of what is held."""
        self.scope = Scope.ALL
        """Over which ranks what is held was summed: over all, or within this rank's copy of the state."""
        self.held: Tensor | None = None
        self.local: Tensor | None = None
        self._views: list[Tensor] = []
        self._under_way = 0
        """Reductions whose sum is not there yet."""

    @property
    def has_local(self) -> bool:
        """Whether this rank holds gradients that were not reduced yet."""
        return Own.LOCAL in self.own

    @property
    def has_any(self) -> bool:
        """Whether a gradient is held that some rank used."""
        return Sum.USED in self.sums

    def has_grad(self, index: int) -> bool:
        """Tell whether there is a gradient: of some rank, or of this one while ranks have yet to agree."""
        return self.sums[index] is Sum.USED or self.own[index] is not Own.NONE

    def take_used(self, flags: Iterator[bool]) -> None:
        """Take what ranks agreed on: of each parameter the next flag says whether some rank had a gradient."""
        for index, (own, one) in enumerate(zip(self.own, self.sums, strict=True)):
            is_used = next(flags)
            if own is not Own.LOCAL:  # else it was frozen before its sum was made
                self.own[index], self.sums[index] = Own.NONE, Sum.USED if is_used else one

    def hold(self) -> Tensor:
        """Return the buffer that gradients are held in, made at its first use, with any content."""
        if self.held is None:
            numel = self.spec.gradients[1] - self.spec.gradients[0]
            if self._is_kept:
                self.held = self._pool.memory.zeros(numel, self.dtype, self._device)
            else:
                self.held = torch.empty(numel, dtype=self.dtype, device=self._device)
            self._ledger.add("gradients", self.nbytes[0])
        return self.held

    def _let_go(self) -> None:
        """Give the memory of what is held back; it is needed again when gradients are, and activations are gone."""
        if self.held is not None and not self._is_kept and self.local is not self.held and not self._under_way:
            self._ledger.add("gradients", -self.nbytes[0])
            self.held, self._views = None, []

    def land(self, index: int, grad: Tensor, scale: float = 1.0) -> None:
        """Move one gradient of this rank, of any strides, into `local`; add it to what lies there unreduced.

        Args:
            scale: what the gradient is multiplied by, in the dtype of what is held.
        """
        if self.local is None:
            if self.spec.adopts and scale == 1.0 and _is_alone(grad, self._strides[index]):
                # Autograd gave it up, and nothing else shares its memory.
                self.local, self._views = grad.as_strided((grad.numel(),), (1,)), [grad]
                self._pool.adopt(self.local)
                self.own[index] = Own.LOCAL
                return
            self._begin_local()
        view = self._views[index]
        if self.own[index] is Own.LOCAL or self._is_on_sum(index):
            view.add_(grad if scale == 1.0 else grad.to(self.dtype), alpha=scale)
        else:
            view.copy_(grad)
            if scale != 1.0:
                view.mul_(scale)
        self.own[index] = Own.LOCAL

    def _is_on_sum(self, index: int) -> bool:
        """Tell whether what `local` has of a parameter is a sum, to which this rank's gradient is added."""
        return self.spec.lands_on_sums and self.sums[index] is not Sum.STALE

    def _begin_local(self) -> None:
        is_first = all(one is Sum.STALE for one in self.sums)
        if self.spec.lands_on_sums or (self.spec.holds_whole_gradients and is_first):
            self.local = self.hold()
        else:
            self.local = self._pool.take(self._layout.full_numel, self.dtype, self._device)
        self._views = self.views_of(self.local)

    def views_of(self, full: Tensor) -> list[Tensor]:
        """Return the parameters' views of a whole-bucket tensor, with the parameters' shapes and strides."""
        layout = zip(self._shapes, self._strides, self._layout.offsets, strict=True)
        return [full.as_strided(shape, stride, offset) for shape, stride, offset in layout]

    def take_local(self, copies: int = 1) -> "Local":
        """Hand over this rank's gradients for a reduction, complete: zeros where this rank has no gradient.

        What lands from now on lands anew, so that a late gradient never touches a message under way.

        Args:
            copies: of the state; one of several may not be ready when this one has its sum.
        """
        if self.local is None:
            self._begin_local()
        assert self.local is not None
        for index, own in enumerate(self.own):
            if own is not Own.LOCAL and not self._is_on_sum(index):
                self._views[index].zero_()
        local = Local(self.local, None, self._views, self.own, self.sums)
        if copies > 1 and (not local.is_first or self.local is self.held):
            local = replace(local, apart=self._pool.take(self._layout.shard_numel, self.dtype, self._device))
        self.local = None
        self._under_way += 1
        self.own = [Own.SENT if own is Own.LOCAL else own for own in self.own]
        self.sums = [Sum.UNUSED if one is Sum.STALE else one for one in self.sums]
        return local

    def take_back(self, local: "Local") -> None:
        """Take back what was not reduced, because another rank was not ready; nothing landed meanwhile."""
        assert self.local is None, "a gradient landed in a unit that was complete"
        self._under_way -= 1
        self.local, self._views, self.own, self.sums = local.full, local.views, local.own, local.sums
        if local.apart is not None:
            self._pool.give(local.apart)

    def is_finite(self, own: Tensor) -> bool:
        """Tell whether this rank's shard of the sums holds finite numbers only; padding may hold anything."""
        parts = (self._layout.overlap(index, *self.spec.shard) for index in range(len(self.own)))
        first = self.spec.shard[0]
        return all(bool(own[start - first : stop - first].isfinite().all()) for start, stop in parts)

    def own_shard(self) -> Tensor:
        """Return this rank's shard of what is held."""
        start, stop = self.spec.shard
        return self.hold()[start - self.spec.gradients[0] : stop - self.spec.gradients[0]]

    def place_of_sum(self, local: "Local") -> Tensor:
        """Return where this rank's shard of the sum goes: straight to what is held where no sum lies there yet."""
        if local.apart is not None:
            return local.apart
        return self.own_shard() if local.is_first else local.full[slice(*self.spec.shard)]

    def add_reduced(self, local: "Local", own: Tensor) -> Tensor:
        """Add this rank's shard of the sum to what is held, where it does not lie there already; return `held`.

        Invariant: what is left over from before `zero_grad` is overwritten, not added to.
        """
        held = self.hold()
        self._under_way -= 1
        is_in_place = local.full.data_ptr() == held.data_ptr()
        if not local.is_first and not is_in_place:
            for index, one in enumerate(local.sums):
                if one is Sum.STALE:
                    self.slice(index, held).zero_()
            self.own_shard().add_(own)
        elif local.apart is not None:
            self.own_shard().copy_(own)
        if not is_in_place:
            self._pool.give(local.full)
        if local.apart is not None:
            self._pool.give(local.apart)
        return held

    def slice(self, index: int, held: Tensor) -> Tensor:
        """Return what the optimizer reads of parameter `index` from `held`: (numel of it that this rank updates,)."""
        start, stop = self._layout.overlap(index, *self.spec.states)
        return held[start - self.spec.gradients[0] : stop - self.spec.gradients[0]]

    def own_part(self, index: int) -> Tensor:
        """Return what the optimizer reads of parameter `index` from `held`: the elements that this rank updates."""
        start, stop = self._layout.overlap(index, *self.spec.shard)
        return self.hold()[start - self.spec.gradients[0] : stop - self.spec.gradients[0]]

    def local_view(self, index: int) -> Tensor:
        """Return the unreduced gradient of parameter `index`, which must be local."""
        return self._views[index]

    def set_reduced(self, index: int, value: Tensor) -> None:
        """Make `value`, equal on all ranks, the reduced gradient of parameter `index`."""
        flat = flatten(value.to(self.dtype), self._shapes[index], self._strides[index])
        part = self.slice(index, self.hold())
        start, stop = self._layout.overlap(index, *self.spec.states)
        offset = self._layout.offsets[index]
        part.copy_(flat[start - offset : stop - offset] if stop > start else flat[:0])
        self.sums[index] = Sum.USED

    def clear(self, index: int) -> None:
        """Forget the gradient of one parameter, reduced or not."""
        self.own[index], self.sums[index] = Own.NONE, Sum.STALE
        if self.local is not None and not self.has_local:
            if self.local is not self.held:
                self._pool.give(self.local)
            self.local = None
        if not self.has_any:
            self.sums, self.scope = [Sum.STALE] * len(self.sums), Scope.ALL
            self._let_go()

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes held as (of parameters, padding)."""
        if self.held is None:
            return 0, 0
        return self.spec.bytes_of(self.spec.gradients, self.spec.formats.grad)


class Bucket:
    """One flat tensor of a unit, of one dtype and trainability; the unit's parameters are views of it.

    Args:
        spec: what it holds, and where each column of it lives.
        parameters: as they are in the model, in registration order.
    """

    def __init__(
        self, spec: BucketSpec, parameters: Sequence[Tensor], dtypes: Dtypes, pool: Pool, ledger: Ledger
    ) -> None:
        self.spec, self.layout, self.number = spec, spec.layout, spec.number
        self.dtypes, self.dtype, self.device = dtypes, dtypes.param, parameters[0].device
        self.codec = codec_of(spec.formats.reduce)
        self.shapes = [tuple(p.shape) for p in parameters]
        self.strides = [_dense_strides(p) for p in parameters]
        self._ledger, self._memory, (start, stop) = ledger, pool.memory, spec.shard
        if spec.is_whole:
            self.full = self._memory.zeros(spec.layout.full_numel, self.dtype, self.device)
            self.shard = self.full[start:stop]
        else:
            self.full, self.shard = self._memory.home(spec.layout.full_numel, spec.shard, self.dtype, self.device)
        self.own = self.full[start:stop]
        self.grads = GradientBuffer(self, pool, ledger)
        self.views = self.grads.views_of(self.full)
        self._rounded = self.full if spec.updates_all else self.shard
        self.masters = self._rounded
        """What the optimizer updates; the parameters themselves unless these are copied from it."""
        if spec.has_masters:
            self.masters = MEMORIES[spec.row.states.memory]().zeros(self._rounded.numel(), dtypes.master, self.device)
        self.parameters: list[torch.nn.Parameter] = []
        """The model's parameters that are views of it, in order."""
        self.changes = Changes(spec.names, self.parameters, self.full, is_whole=spec.is_whole)
        self.has_states = False
        """Whether an optimizer updates it."""
        self._is_left = False
        """Whether the memory of `full` could not be taken back."""
        self.updates = 0
        """How often the parameters changed; a tensor that autograd saved before a change must not be used after it."""
        if not self.spec.is_whole:
            ledger.add("transient", self.full.nbytes)

    def open(self) -> None:
        """Give `full` its memory and put the own shard in its place."""
        with torch.no_grad():
            self._memory.open(self.full, self.spec.shard[0], self.shard)
        self._ledger.add("transient", self.full.nbytes)

    def close(self) -> None:
        """Take the memory of `full` back; views stay, and are empty."""
        if not self._memory.close(self.full) and not self._is_left:
            self._is_left = True
            warnings.warn(
                f"numpy shares the memory of the parameters of unit '{self.spec.name}', so {self.full.nbytes:,} bytes "
                "stay on this rank from now on, also while they are released. Give numpy parameter.detach().clone().",
                stacklevel=2,
            )
        self._ledger.add("transient", -self.full.nbytes)

    def rest(self) -> None:
        """Let `full` cost nothing for as long as it is not read, where its memory can do so."""
        self._memory.rest(self.full)

    def keep(self) -> None:
        """Follow a change to the whole parameters: in the shard, and in the masters that do not round to it."""
        values = self.full if self.changes.values is None else self.changes.values
        with torch.no_grad():
            if not self.spec.is_whole:
                self.shard.copy_(values[slice(*self.spec.shard)])
            if self.spec.has_masters:
                is_changed = self.masters.to(self.dtype) != self._rounded
                self.masters.copy_(torch.where(is_changed, self._rounded.to(self.masters.dtype), self.masters))

    def start_values(self) -> Tensor:
        """Return (full_numel,) to write the first values to, in the masters' dtype; then call `set_start`."""
        return torch.zeros_like(self.full, dtype=self.dtypes.master) if self.spec.has_masters else self.full

    def set_start(self, values: Tensor) -> None:
        """Take the first values over."""
        if self.spec.has_masters:
            self.full.copy_(values)
            self.masters.copy_(values[slice(*self.spec.states)])
        if not self.spec.is_whole:
            self.shard.copy_(self.own)

    def follow_masters(self) -> None:
        """Round the masters into the parameters that this rank keeps."""
        if self.spec.has_masters:
            with torch.no_grad():
                self._rounded.copy_(self.masters)

    def master_range(self, index: int) -> tuple[int, int]:
        """Return the elements of parameter `index` that this rank updates, as (start, stop) in the bucket."""
        return self.layout.overlap(index, *self.spec.states)

    def master(self, index: int) -> Tensor:
        """Return what the optimizer updates of parameter `index`: a flat view, possibly of 0 elements."""
        start, stop = self.master_range(index)
        return self.masters[start - self.spec.states[0] : stop - self.spec.states[0]]

    @property
    def is_published(self) -> bool:
        """Whether updated parameters must be gathered after a step."""
        return self.has_states and self.spec.is_published


def flatten(value: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Return the elements of `value` in the order in which a tensor of these dense strides has them in memory."""
    dense = torch.empty_strided(tuple(shape), tuple(strides), dtype=value.dtype, device=value.device)
    dense.copy_(value)
    return dense.as_strided((dense.numel(),), (1,))


def _is_alone(grad: Tensor, strides: tuple[int, ...]) -> bool:
    """Tell whether `grad` is a plain tensor of these strides whose memory no other tensor shares."""
    if type(grad) is not Tensor or grad.stride() != strides or grad.untyped_storage().nbytes() != grad.nbytes:
        return False
    return users_of_storage(grad) == 1


def _dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides that a dense copy of `parameter` has: its own order of dimensions where that is dense."""
    return tuple(torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride())
