"""Gradients: from autograd's slots to the tensors that the optimizer reads.

Owns the memory of gradients and their states (`core/states.py`). It must not know passes, hooks or the user's view of a
gradient (`core/gradient.py`).

Note: the life of a gradient
    Autograd accumulates into its own slot; a hook moves the tensor out of the slot (`land`). On one rank that tensor is
    the gradient, in the memory that autograd gave it (`core/loose.py`). On several ranks the tensor is copied into
    `FlatGradients.local` (whole bucket); a gradient that fills the bucket, as an embedding's, becomes `local` itself.
    Where gradients are complete before they are copied, as on a device, and sent in bf16, `local` is the message. A
    reduction turns `local` into this rank's shard of the sum, which is added to `held`. Where whole gradients are kept,
    `local` is `held` itself until `held` has a sum, so nothing is copied. Under `no_sync`, `local` stays, and the next
    backward adds to it. When `zero_grad` clears the last gradient, the memory of `held` returns to torch's allocator,
    for the activations of the next forward.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch

from zeroshard.core.states import Own, Scope, Sum
from zeroshard.store.landing import Landing
from zeroshard.table.spec import BucketSpec, Range
from zeroshard.table.trace import Ledger
from zeroshard.torch_private import foreach_copy_, foreach_mul_, owns_memory
from zeroshard.wire.buffers import Pool

__all__ = ["FlatGradients", "Gradients", "Local", "Places"]

Tensor = torch.Tensor

# Python looks up an enum's member at each use, which is slow in models of a thousand small parameters.
NONE, LOCAL, SENT = Own
STALE, UNUSED, USED = Sum


@final
class Places:
    """Shapes, strides and offsets of a bucket's parameters in a flat tensor of the whole bucket."""

    def __init__(self, spec: BucketSpec, parameters: Sequence[Tensor]) -> None:
        self.layout = spec.layout
        self.shapes = [tuple(p.shape) for p in parameters]
        # The parameter's own order of dimensions, if its memory is dense.
        like = [torch.empty_like(p, device="meta", memory_format=torch.preserve_format) for p in parameters]
        self.strides = [tuple(one.stride()) for one in like]
        self.forms = [*zip(self.shapes, self.strides, self.layout.offsets, strict=True)]
        """Of each parameter: shape, strides and offset."""

    def views_of(self, full: Tensor) -> list[Tensor]:
        """Return the parameters' views of a whole-bucket tensor, with the parameters' shapes and strides."""
        return [full.as_strided(*form) for form in self.forms]

    def dense(self, index: int, value: Tensor) -> Tensor:
        """Return a copy of a value of parameter `index` with the parameter's strides."""
        made = torch.empty_strided(self.shapes[index], self.strides[index], dtype=value.dtype, device=value.device)
        return made.copy_(value)

    def flat(self, index: int, value: Tensor) -> Tensor:
        """Return a flat copy of a value of parameter `index`, with the elements in the bucket's order."""
        return self.dense(index, value).as_strided((value.numel(),), (1,))

    def is_alone(self, index: int, grad: Tensor) -> bool:
        """Return whether `grad` is a plain tensor with the parameter's strides and memory of its own."""
        if type(grad) is not Tensor or grad.stride() != self.strides[index]:
            return False
        return owns_memory(grad)


class Gradients(ABC):
    """The gradients of one bucket."""

    def __init__(self, spec: BucketSpec, places: Places, dtype: torch.dtype, ledger: Ledger, landing: Landing) -> None:
        self.spec, self.dtype, self.landing = spec, dtype, landing
        self._places, self._ledger = places, ledger
        count = len(places.shapes)
        self.own, self.sums = [NONE] * count, [STALE] * count
        """For each parameter: the state of this rank's gradient, and of the held gradient."""
        self.scope = Scope.ALL
        """The ranks that held gradients were summed over: all ranks, or those of this rank's replica."""
        self.is_suspect = False
        """Whether held gradients may not be finite, although later sums are: kept after a skipped step, or assigned.
        The checks for a loss scale then look at what is held."""

    @property
    def has_local(self) -> bool:
        """Whether this rank holds gradients that are not reduced yet."""
        return LOCAL in self.own

    @property
    def has_any(self) -> bool:
        """Whether this rank holds a gradient that some rank used."""
        return USED in self.sums

    def has_grad(self, index: int) -> bool:
        """Return whether some rank has a gradient, or this rank has one that ranks have not agreed on yet."""
        return self.sums[index] is USED or self.own[index] is not NONE

    def is_known(self, index: int) -> bool:
        """Return whether the held value is the gradient, independent of agreements that are still pending."""
        return self.sums[index] is USED or self.own[index] is SENT

    def take_used(self, flags: Iterator[bool]) -> None:
        """Apply the agreement of ranks: one flag for each parameter, true if some rank had a gradient."""
        for index, (own, held, is_used) in enumerate(zip(self.own, self.sums, flags, strict=False)):
            # A gradient whose sum is still to come, on this rank or on another, has no values in held memory yet.
            if own is not LOCAL:
                self.own[index], self.sums[index] = NONE, USED if is_used and held is not STALE else held

    def hand_over(self) -> None:
        """Mark all local gradients as part of the sum; a parameter without a gradient has an empty sum."""
        self.own = [SENT if own is LOCAL else own for own in self.own]
        self.sums = [UNUSED if one is STALE else one for one in self.sums]

    @abstractmethod
    def land(self, index: int, grad: Tensor, scale: float = 1.0) -> None:
        """Add a gradient of this rank, of any strides, to this rank's gradients that are not reduced yet.

        Args:
            scale: the factor of the gradient, applied in the dtype of held gradients.
        """

    @abstractmethod
    def view(self, index: int) -> Tensor:
        """Return the whole gradient of parameter `index`, in the parameter's shape, if this rank holds all of it."""

    @abstractmethod
    def part(self, index: int) -> Tensor:
        """Return the gradient that the optimizer reads: (elements of parameter `index` that this rank updates,)."""

    @abstractmethod
    def own_part(self, index: int) -> Tensor:
        """Return this rank's part of a gradient: (elements of parameter `index` in this rank's shard,)."""

    @abstractmethod
    def parts(self, index: int) -> list[Tensor]:
        """Return this rank's tensors of a gradient: its part of the sum, and the gradient that is not reduced yet."""

    def parts_of_all(self, indices: Sequence[int]) -> list[Tensor]:
        """Return tensors that hold the `parts` of these parameters, and no other parameter's gradient."""
        return [part for index in indices for part in self.parts(index)]

    @abstractmethod
    def put_shard(self, full: Tensor) -> None:
        """Write this rank's shard of held gradients to its place in (full_numel,)."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return the tensors that hold gradients; user code may change them in place."""

    @abstractmethod
    def probes(self) -> list[Tensor]:
        """Return tensors whose sum is finite only if all gradients that this rank updates with are finite."""

    @abstractmethod
    def set_reduced(self, index: int, value: Tensor) -> None:
        """Make `value`, equal on all ranks, the reduced gradient of parameter `index`."""

    @abstractmethod
    def clear(self, index: int) -> None:
        """Clear the gradient of a parameter, reduced or not."""

    @property
    @abstractmethod
    def nbytes(self) -> tuple[int, int]:
        """Bytes held as (of parameters, padding), in the memory of `landing`."""


@dataclass
class Local:
    """A rank's own gradients for a reduction, with their states at the start of the reduction."""

    full: Tensor | None
    """None once the sum is elsewhere and the buffer was returned."""
    place: Tensor
    """The destination of this rank's shard of the sum: a part of held gradients, of `full`, or `spare`."""
    spare: Tensor | None
    """Memory of its own, if neither `full` nor held gradients may be written yet."""
    views: list[Tensor]
    own: list[Own]
    sums: list[Sum]
    is_first: bool
    """Whether held gradients contain no sum yet."""


@final
class FlatGradients(Gradients):
    """Gradients of several ranks, in flat tensors of the bucket; each rank holds its part of the sums."""

    def __init__(
        self,
        spec: BucketSpec,
        places: Places,
        dtype: torch.dtype,
        ledger: Ledger,
        landing: Landing,
        pool: Pool,
        device: torch.device,
    ) -> None:
        super().__init__(spec, places, dtype, ledger, landing)
        self.lands_together = False
        """Whether gradients stay in autograd's memory until `copy_arrived`."""
        self.message = dtype
        """The dtype in which gradients wait that are complete and will be sent."""
        self._arrived: dict[int, Tensor] = {}
        """Gradients to copy, by parameter."""
        self._scale = 1.0
        """The factor of the gradients to copy."""
        self._layout, self._pool, self._device = spec.layout, pool, device
        self._is_kept = spec.holds_whole_gradients and pool.memory.is_shared
        """Whether other ranks read held gradients in place; such memory cannot be released."""
        self.held: Tensor | None = None
        self.local: Tensor | None = None
        self._views: list[Tensor] = []
        self._cuts: dict[Range, Sequence[Tensor]] = {}
        """The parameters' parts of ranges of held gradients."""
        self._parts_in = {place: spec.layout.parts(*place) for place in (spec.shard, spec.states)}
        self._under_way = 0
        """Reductions that are not complete."""

    @property
    def is_first(self) -> bool:
        """Whether held gradients contain no sum yet."""
        return self.sums.count(STALE) == len(self.sums)

    def hold(self) -> Tensor:
        """Return the buffer of held gradients, allocated uninitialized at its first use."""
        if self.held is None:
            numel = self.spec.gradients[1] - self.spec.gradients[0]
            if self._is_kept:
                self.held = self._pool.memory.zeros(numel, self.dtype, self._device)
            else:
                self.held = self.landing.empty(numel, self.dtype)
            self.landing.count(self._ledger, self.nbytes[0])
        return self.held

    def _let_go(self) -> None:
        """Release the memory of held gradients; the next use comes in backward, when activations are released."""
        if self.held is not None and not self._is_kept and self.local is not self.held and not self._under_way:
            self.landing.count(self._ledger, -self.nbytes[0])
            self.held = None

    def land(self, index: int, grad: Tensor, scale: float = 1.0) -> None:
        """See `Gradients`; the gradient moves into `local`."""
        if self.local is None:
            if self.spec.adopts and scale == 1.0 and self._places.is_alone(index, grad):
                # Autograd no longer needs the tensor, and no other tensor shares its memory.
                self.local, self._views = grad.as_strided((grad.numel(),), (1,)), [grad]
                self._pool.adopt(self.local)
                self.own[index] = LOCAL
                return
            if not self.lands_together:
                self._begin_local()
        if self.lands_together and self.own[index] is not LOCAL:
            self._arrived[index], self._scale, self.own[index] = grad, scale, LOCAL
            return
        self.copy_arrived()
        if self.own[index] is LOCAL and self.local is not None and self.local.dtype is not self.dtype:
            self._widen()
        view = self._views[index]
        if self.own[index] is LOCAL:
            view.add_(grad if scale == 1.0 else grad.to(self.dtype), alpha=scale)
        else:
            view.copy_(grad)
            if scale != 1.0:
                view.mul_(scale)
        self.own[index] = LOCAL

    def copy_arrived(self, *, is_sent: bool = False) -> None:
        """Copy all waiting gradients into `local`, in one launch.

        Args:
            is_sent: whether the gradients are complete, and their sum follows.
        """
        if not self._arrived:
            return
        if self.local is None:
            self._begin_local(self.message if is_sent and self._scale == 1.0 else self.dtype)
        views, arrived = [self._views[index] for index in self._arrived], [*self._arrived.values()]
        self._arrived, nbytes = {}, sum(one.nbytes for one in arrived)
        self._ledger.add("transient", nbytes)
        foreach_copy_(views, arrived)
        if self._scale != 1.0:
            foreach_mul_(views, self._scale)
        self._ledger.add("transient", -nbytes)

    def _widen(self) -> None:
        """Convert `local`, to which a gradient is added, from the dtype of messages."""
        assert self.local is not None
        narrow, self.local = self.local, self._pool.take(self._layout.full_numel, self.dtype, self._device)
        self._views = self._places.views_of(self.local.copy_(narrow))
        self._pool.give(narrow)

    def _begin_local(self, dtype: torch.dtype | None = None) -> None:
        if self.spec.lands_on_held and self.is_first:
            self.local = self.hold()
        else:
            self.local = self._pool.take(self._layout.full_numel, dtype or self.dtype, self._device)
        self._views = self._places.views_of(self.local)

    def take_local(self, copies: int = 1) -> "Local":
        """Return this rank's gradients for a reduction: zeros where this rank has no gradient.

        Later gradients go to a new buffer, so that a late gradient never changes a message in flight.

        Args:
            copies: replicas of the state; with several, another replica may not be ready when this one has its sum.
        """
        self.copy_arrived()
        if self.local is None:
            self._begin_local()
        assert self.local is not None
        for index, own in enumerate(self.own):
            if own is not LOCAL:
                self._views[index].zero_()
        # Sums go straight to held gradients, if those contain no sum yet and the device can write them.
        part, spare = self.local[slice(*self.spec.shard)], None
        place = self.landing.place_of_sum(self.own_shard, part) if self.is_first else part
        if part.dtype is not self.dtype or (copies > 1 and place.data_ptr() == part.data_ptr()):
            place = spare = self._pool.take(self._layout.shard_numel, self.dtype, self._device)
        local = Local(self.local, place, spare, self._views, self.own, self.sums, self.is_first)
        self.local, self._views = None, []  # views would keep a gradient that autograd allocated
        self._under_way += 1
        self.hand_over()
        return local

    def take_back(self, local: "Local") -> None:
        """Restore gradients that were not reduced because another rank was not ready; no gradient landed meanwhile."""
        assert self.local is None and local.full is not None, "a gradient landed in a complete unit"
        self._under_way -= 1
        self.local, self._views, self.own, self.sums = local.full, local.views, local.own, local.sums
        if local.spare is not None:
            self._pool.give(local.spare)

    def parts_of(self, own: Tensor) -> Iterator[Tensor]:
        """Yield the parameters' parts of (stop - start,), this rank's shard of a sum; padding has undefined values.

        Only a loss scale reads the parts, so they are created on demand. If held gradients are suspect, the parts are
        those of the total, before user code can hide an infinity by clipping.
        """
        yield from self._split(self.own_shard() if self.is_suspect else own, self.spec.shard)

    def own_shard(self) -> Tensor:
        """Return this rank's shard of held gradients, on the device: a copy if they are elsewhere."""
        return self._cut_of(self.spec.shard).to(self._device)

    def keep_shard(self, own: Tensor) -> None:
        """Write (stop - start,) to this rank's shard of held gradients, if `own_shard` returned a copy."""
        if own.data_ptr() != (held := self._cut_of(self.spec.shard)).data_ptr():
            self.landing.put(held, own)

    def add_reduced(self, local: "Local", own: Tensor) -> Tensor:
        """Add this rank's shard of the sum to held gradients, unless it is already there; return `held`.

        Invariant: values from before `zero_grad` are overwritten, not added to.
        """
        held = self.hold()
        self._under_way -= 1
        is_in_place = local.full is not None and local.full.data_ptr() == held.data_ptr()
        target = self._cut_of(self.spec.shard, waits=False)
        if not local.is_first and not is_in_place:
            for index, one in enumerate(local.sums):
                if one is STALE:
                    self.part(index).zero_()
            self.landing.add(target, own)
        elif own.data_ptr() != target.data_ptr():
            self.landing.put(target, own)
        self.drop_full(local)
        if local.spare is not None:
            self._pool.give(local.spare)
        return held

    def drop_full(self, local: "Local | None") -> None:
        """Return the buffer of what was reduced, unless held gradients are in it."""
        if local is not None and local.full is not None and local.full.data_ptr() != self.hold().data_ptr():
            self._pool.give(local.full)
            local.full, local.views = None, []

    def _cut_of(self, place: Range, *, waits: bool = True) -> Tensor:
        """Return held elements (start, stop) of the bucket."""
        held, first = self.hold(), self.spec.gradients[0]
        if waits:
            self.landing.wait()
        return held[place[0] - first : place[1] - first]

    def _split(self, cut: Tensor, place: Range) -> Sequence[Tensor]:
        """Return the parameters' parts of elements (start, stop) of the bucket."""
        nothing = cut[:0]  # with many ranks, most parameters have no element in a range
        return [cut[start:stop] if stop > start else nothing for start, stop in self._parts_in[place]]

    def _parts(self, place: Range) -> Sequence[Tensor]:
        """Return the parameters' parts of a range of held gradients, created once a step."""
        if (made := self._cuts.get(place)) is None:
            made = self._cuts[place] = self._split(self._cut_of(place), place)
        self.landing.wait()
        return made

    def view(self, index: int) -> Tensor:
        """See `Gradients`."""
        return self.hold().as_strided(*self._places.forms[index]).detach()

    def part(self, index: int) -> Tensor:
        """See `Gradients`."""
        return self._parts(self.spec.states)[index]

    def own_part(self, index: int) -> Tensor:
        """See `Gradients`."""
        return self._parts(self.spec.shard)[index]

    def parts_of_all(self, indices: Sequence[int]) -> list[Tensor]:
        """See `Gradients`."""
        # Gradients that ranks have not agreed on are not among these parameters, and must not change.
        is_all = len(indices) == len(self.sums) and all(map(self.is_known, indices))
        if self.has_local or not is_all:
            return super().parts_of_all(indices)
        return [self._cut_of(self.spec.states)]

    def parts(self, index: int) -> list[Tensor]:
        """See `Gradients`."""
        is_local, is_used = self.own[index] is LOCAL, self.is_known(index)
        self.copy_arrived()
        parts = [self.part(index)] if is_used and (self.local is not self.held or not is_local) else []
        return [*parts, self._views[index]] if is_local else parts

    def put_shard(self, full: Tensor) -> None:
        """See `Gradients`."""
        full[slice(*self.spec.shard)] = self.own_shard()  # on any device

    def tensors(self) -> list[Tensor]:
        """See `Gradients`."""
        return [] if self.held is None else [self.held]

    def probes(self) -> list[Tensor]:
        """See `Gradients`."""
        if self.held is None:
            return []
        return [self.held if self.spec.updates_all else self._cut_of(self.spec.shard)]

    def set_reduced(self, index: int, value: Tensor) -> None:
        """See `Gradients`."""
        flat, offset = self._places.flat(index, value.to(self.dtype)), self._layout.offsets[index]
        start, stop = self._layout.overlap(index, *self.spec.states)
        self.part(index).copy_(flat[start - offset : stop - offset] if stop > start else flat[:0])
        self.sums[index], self.is_suspect = USED, True

    def clear(self, index: int) -> None:
        """See `Gradients`."""
        was_local, self.own[index], self.sums[index] = self.own[index] is LOCAL, NONE, STALE
        self._arrived.pop(index, None)
        if was_local and self.local is not None and not self.has_local:
            if self.local is not self.held:
                self._pool.give(self.local)
            self.local, self._views = None, []
        if not self.has_any:
            self.sums, self.scope, self.is_suspect = [STALE] * len(self.sums), Scope.ALL, False
            self._cuts.clear()
            self._let_go()

    @property
    def nbytes(self) -> tuple[int, int]:
        """See `Gradients`."""
        return (0, 0) if self.held is None else self.spec.held_gradient_bytes
