"""Gradients: from autograd's slots to what the optimizer reads.

Owns the memory of gradients and their states (`core/states.py`). It must not know passes, hooks or what a user is shown
of a gradient (`core/gradient.py`).

Note: the life of a gradient
    Autograd accumulates into its own slot; a hook moves the tensor out of it (`land`) and empties the slot. On one rank
    that tensor is the gradient, in the memory that autograd gave it (`core/loose.py`). On several it moves into
    `FlatGradients.local` (whole bucket); one that fills the bucket, as an embedding's, becomes `local` itself. A
    reduction turns `local` into this rank's shard of the sum, which is added to `held`. Where whole gradients are kept,
    `local` is `held` itself until something reduced lies there, so nothing is copied. Under `no_sync` `local` simply
    stays, and the next backward adds to it. With the last gradient that `zero_grad` forgets, the memory of `held` goes
    back to torch's allocator, for the activations of the next forward.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from zeroshard.core.states import Own, Scope, Sum
from zeroshard.store.apart import Landing
from zeroshard.table.spec import BucketSpec, Range
from zeroshard.table.trace import Ledger
from zeroshard.torch_private import foreach_copy_, foreach_mul_, users_of_storage
from zeroshard.wire.pool import Pool

__all__ = ["FlatGradients", "Gradients", "Local", "Places"]

Tensor = torch.Tensor

# Python looks a member up in its class at each use, which shows in models of a thousand small parameters.
NONE, LOCAL, SENT = Own
STALE, UNUSED, USED = Sum


@final
class Places:
    """Where the parameters of a bucket lie in a flat tensor of all of it: shapes, strides and offsets."""

    def __init__(self, spec: BucketSpec, parameters: Sequence[Tensor]) -> None:
        self.layout = spec.layout
        self.shapes = [tuple(p.shape) for p in parameters]
        # The order of dimensions that a parameter has of its own, where that is dense.
        like = [torch.empty_like(p, device="meta", memory_format=torch.preserve_format) for p in parameters]
        self.strides = [tuple(one.stride()) for one in like]

    def views_of(self, full: Tensor) -> list[Tensor]:
        """Return the parameters' views of a whole-bucket tensor, with the parameters' shapes and strides."""
        return [self.view_of(full, index) for index in range(len(self.shapes))]

    def view_of(self, full: Tensor, index: int) -> Tensor:
        """Return one of `views_of`."""
        return full.as_strided(self.shapes[index], self.strides[index], self.layout.offsets[index])

    def dense(self, index: int, value: Tensor) -> Tensor:
        """Return a copy of a value of parameter `index` with the strides that the parameter has."""
        made = torch.empty_strided(self.shapes[index], self.strides[index], dtype=value.dtype, device=value.device)
        return made.copy_(value)

    def flat(self, index: int, value: Tensor) -> Tensor:
        """Return a copy of the elements of a value of parameter `index`, in the order in which the bucket has them."""
        return self.dense(index, value).as_strided((value.numel(),), (1,))

    def is_alone(self, index: int, grad: Tensor) -> bool:
        """Tell whether `grad` is a plain tensor with the parameter's strides whose memory no other tensor shares."""
        if type(grad) is not Tensor or grad.stride() != self.strides[index]:
            return False
        return grad.untyped_storage().nbytes() == grad.nbytes and users_of_storage(grad) == 1


class Gradients(ABC):
    """The gradients of one bucket."""

    def __init__(
        self, spec: BucketSpec, places: Places, dtype: torch.dtype, ledger: Ledger, device: torch.device
    ) -> None:
        self.spec, self.dtype = spec, dtype
        self._places, self._ledger = places, ledger
        count = len(places.shapes)
        self.own, self.sums = [NONE] * count, [STALE] * count
        """Of each parameter: the state of this rank's gradient, and of what is held."""
        self.scope = Scope.ALL
        """Over which ranks what is held was summed: over all, or within this rank's copy of the state."""
        self.landing = Landing(device) if spec.apart_gradients else None
        """What leaves gradients on the host, where some lie there; else None."""
        self._apart_bytes = 0

    @property
    def apart_bytes(self) -> int:
        """Bytes of the gradients that lie on the host."""
        return self._apart_bytes

    def _count_apart(self, nbytes: int) -> None:
        self._apart_bytes += nbytes

    @property
    def has_local(self) -> bool:
        """Whether this rank holds gradients that were not reduced yet."""
        return LOCAL in self.own

    @property
    def has_any(self) -> bool:
        """Whether a gradient is held that some rank used."""
        return USED in self.sums

    def has_grad(self, index: int) -> bool:
        """Tell whether there is a gradient: of some rank, or of this one while ranks have yet to agree."""
        return self.sums[index] is USED or self.own[index] is not NONE

    def is_known(self, index: int) -> bool:
        """Tell whether what is held is the gradient, whatever ranks have yet to agree on."""
        return self.sums[index] is USED or self.own[index] is SENT

    def take_used(self, flags: Iterator[bool]) -> None:
        """Take what ranks agreed on: of each parameter the next flag says whether some rank had a gradient."""
        for index, (own, is_used) in enumerate(zip(self.own, flags, strict=False)):
            if own is not LOCAL:  # else it was frozen before its sum was made
                self.own[index], self.sums[index] = NONE, USED if is_used else self.sums[index]

    def hand_over(self) -> None:
        """Take all that landed for a part of the sum; a parameter without a gradient has a sum of nothing."""
        self.own = [SENT if own is LOCAL else own for own in self.own]
        self.sums = [UNUSED if one is STALE else one for one in self.sums]

    @abstractmethod
    def land(self, index: int, grad: Tensor, scale: float = 1.0) -> None:
        """Take one gradient of this rank, of any strides; add it to gradients of this rank that were not reduced yet.

        Args:
            scale: what the gradient is multiplied by, in the dtype of what is held.
        """

    @abstractmethod
    def view(self, index: int) -> Tensor:
        """Return the whole gradient of parameter `index`, with its shape, where this rank holds it."""

    @abstractmethod
    def part(self, index: int) -> Tensor:
        """Return what the optimizer reads of parameter `index`: (numel of it that this rank updates,)."""

    @abstractmethod
    def own_part(self, index: int) -> Tensor:
        """Return what this rank owns of the gradient of parameter `index`: (numel of it in this rank's shard,)."""

    @abstractmethod
    def parts(self, index: int) -> list[Tensor]:
        """Return all that lies here of a gradient: its part of the sum, and what was not reduced yet."""

    def parts_of_all(self, indices: Sequence[int]) -> list[Tensor]:
        """Return tensors that hold the `parts` of these parameters, and nothing that is read of any other."""
        return [part for index in indices for part in self.parts(index)]

    @abstractmethod
    def put_shard(self, full: Tensor) -> None:
        """Write this rank's shard of what is held to its place in (full_numel,)."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return the tensors that hold gradients; user code may change them in place."""

    @abstractmethod
    def probes(self) -> list[Tensor]:
        """Return tensors whose sum is a finite number only if all that this rank updates with is finite."""

    @abstractmethod
    def set_reduced(self, index: int, value: Tensor) -> None:
        """Make `value`, equal on all ranks, the reduced gradient of parameter `index`."""

    @abstractmethod
    def clear(self, index: int) -> None:
        """Forget the gradient of one parameter, reduced or not."""

    @property
    @abstractmethod
    def nbytes(self) -> tuple[int, int]:
        """Bytes held as (of parameters, padding)."""


@dataclass(frozen=True)
class Local:
    """A rank's own gradients handed over for a reduction, with the states that they had then."""

    full: Tensor
    apart: Tensor | None
    """Where this rank's shard of the sum goes, if neither `full` nor what is held may be written yet."""
    views: list[Tensor]
    own: list[Own]
    sums: list[Sum]
    is_first: bool
    """Whether no sum lies in what is held."""


@final
class FlatGradients(Gradients):
    """Those of several ranks: in flat tensors of the bucket, of which each rank holds its part of the sums."""

    def __init__(
        self, spec: BucketSpec, places: Places, dtype: torch.dtype, ledger: Ledger, pool: Pool, device: torch.device
    ) -> None:
        super().__init__(spec, places, dtype, ledger, device)
        self.lands_together = False
        """Whether gradients wait where autograd left them until `copy_arrived`."""
        self._arrived: dict[int, Tensor] = {}
        """Gradients that wait to be copied, by parameter."""
        self._scale = 1.0
        """What those that wait are multiplied by."""
        self._layout, self._pool, self._device = spec.layout, pool, device
        self._is_kept = spec.holds_whole_gradients and pool.memory.is_shared
        """Whether other ranks read what is held where it lies; such memory cannot come and go."""
        self.held: Tensor | None = None
        self._away: Tensor | None = None
        """The first `_cut` elements of what is held, where these lie on the host."""
        self._cut = spec.apart_states[1] - spec.states[0] if spec.apart_gradients else 0
        self.local: Tensor | None = None
        self._views: list[Tensor] = []
        self._cuts: dict[Range, Sequence[Tensor]] = {}
        """The parameters' parts of ranges of what is held."""
        self._parts_in = {place: spec.layout.parts(*place) for place in (spec.shard, spec.states)}
        self._under_way = 0
        """Reductions whose sum is not there yet."""

    @property
    def is_first(self) -> bool:
        """Whether no sum lies in what is held."""
        return self.sums.count(STALE) == len(self.sums)

    def hold(self) -> Tensor:
        """Return the buffer that gradients are held in on the device, made at its first use, with any content."""
        if self.held is None:
            numel = self.spec.gradients[1] - self.spec.gradients[0] - self._cut
            if self.landing is not None:
                self._away = self.landing.empty(self._cut, self.dtype)
                self._count_apart(self.spec.apart_gradient_bytes)
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
            self._count_apart(-self._apart_bytes)
            self.held, self._away, self._views = None, None, []

    def land(self, index: int, grad: Tensor, scale: float = 1.0) -> None:
        """See `Gradients`; it moves into `local`."""
        if self.local is None:
            if self.spec.adopts and scale == 1.0 and self._places.is_alone(index, grad):
                # Autograd gave it up, and nothing else shares its memory.
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
        view = self._views[index]
        if self.own[index] is LOCAL:
            view.add_(grad if scale == 1.0 else grad.to(self.dtype), alpha=scale)
        else:
            view.copy_(grad)
            if scale != 1.0:
                view.mul_(scale)
        self.own[index] = LOCAL

    def copy_arrived(self) -> None:
        """Copy the gradients that wait into `local`, in one launch."""
        if not self._arrived:
            return
        if self.local is None:
            self._begin_local()
        views, arrived = [self._views[index] for index in self._arrived], [*self._arrived.values()]
        self._arrived, nbytes = {}, sum(one.nbytes for one in arrived)
        self._ledger.add("transient", nbytes)
        foreach_copy_(views, arrived)
        if self._scale != 1.0:
            foreach_mul_(views, self._scale)
        self._ledger.add("transient", -nbytes)

    def _begin_local(self) -> None:
        if self.spec.holds_whole_gradients and self.is_first:
            self.local = self.hold()
        else:
            self.local = self._pool.take(self._layout.full_numel, self.dtype, self._device)
        self._views = self._places.views_of(self.local)

    def take_local(self, copies: int = 1) -> "Local":
        """Hand over this rank's gradients for a reduction, complete: zeros where this rank has no gradient.

        What lands from now on lands anew, so that a late gradient never touches a message under way.

        Args:
            copies: of the state; one of several may not be ready when this one has its sum.
        """
        self.copy_arrived()
        if self.local is None:
            self._begin_local()
        assert self.local is not None
        for index, own in enumerate(self.own):
            if own is not LOCAL:
                self._views[index].zero_()
        local = Local(self.local, None, self._views, self.own, self.sums, self.is_first)
        if copies > 1 and (not local.is_first or self.local is self.held or self._cut):
            local = replace(local, apart=self._pool.take(self._layout.shard_numel, self.dtype, self._device))
        self.local = None
        self._under_way += 1
        self.hand_over()
        return local

    def take_back(self, local: "Local") -> None:
        """Take back what was not reduced, because another rank was not ready; nothing landed meanwhile."""
        assert self.local is None, "a gradient landed in a unit that was complete"
        self._under_way -= 1
        self.local, self._views, self.own, self.sums = local.full, local.views, local.own, local.sums
        if local.apart is not None:
            self._pool.give(local.apart)

    def parts_of(self, own: Tensor) -> Iterator[Tensor]:
        """Yield the parameters' parts of (stop - start,), this rank's shard; padding may hold anything.

        They are made where somebody asks, which only a loss scale does.
        """
        yield from self._split(own, self.spec.shard)

    def own_shard(self) -> Tensor:
        """Return this rank's shard of what is held; a copy, where some of it is on the host."""
        cuts = self._cuts_of(self.spec.shard)
        return cuts[0] if len(cuts) == 1 else torch.cat([cut.to(self._device) for cut in cuts])

    def keep_shard(self, own: Tensor) -> None:
        """Take (stop - start,) for this rank's shard of what is held, where it is a copy."""
        if self.landing is not None and self._away is not None:
            self.landing.put(self._away, own[: self._cut])
            self.hold().copy_(own[self._cut :])

    def place_of_sum(self, local: "Local") -> Tensor:
        """Return where this rank's shard of the sum goes: straight to what is held where no sum lies there yet."""
        if local.apart is not None:
            return local.apart
        is_straight = local.is_first and not self._cut
        return self.own_shard() if is_straight else local.full[slice(*self.spec.shard)]

    def add_reduced(self, local: "Local", own: Tensor) -> Tensor:
        """Add this rank's shard of the sum to what is held, where it does not lie there already; return `held`.

        Invariant: what is left over from before `zero_grad` is overwritten, not added to.
        """
        held = self.hold()
        self._under_way -= 1
        is_in_place = local.full.data_ptr() == held.data_ptr()
        if not local.is_first and not is_in_place:
            for index, one in enumerate(local.sums):
                if one is STALE:
                    self.part(index).zero_()
        if self.landing is not None and self._away is not None:
            first, rest = own.split([self._cut, own.numel() - self._cut])
            (self.landing.put if local.is_first else self.landing.add)(self._away, first)
            (held.copy_ if local.is_first else held.add_)(rest)
        elif not local.is_first and not is_in_place:
            self.own_shard().add_(own)
        elif local.apart is not None:
            self.own_shard().copy_(own)
        if not is_in_place:
            self._pool.give(local.full)
        if local.apart is not None:
            self._pool.give(local.apart)
        return held

    def _cuts_of(self, place: Range) -> list[Tensor]:
        """Return elements of the bucket, as (start, stop), from what is held: on the host, if any are, and here."""
        held, first = self.hold(), self.spec.gradients[0]
        if self.landing is None or self._away is None:
            return [held[place[0] - first : place[1] - first]]
        self.landing.wait()
        return [self._away, held]  # gradients are sharded then, and this is all of the shard

    def _split(self, cut: Tensor, place: Range) -> Sequence[Tensor]:
        """Return the parameters' parts of elements of the bucket, as (start, stop)."""
        nothing = cut[:0]  # where there are many ranks, what most parameters have in a range
        return [cut[start:stop] if stop > start else nothing for start, stop in self._parts_in[place]]

    def _parts(self, place: Range) -> Sequence[Tensor]:
        """Return the parameters' parts of a range of what is held, made once a step."""
        if (made := self._cuts.get(place)) is None:
            if self._away is None:
                made = self._split(self._cuts_of(place)[0], place)
            else:
                # The first parameters are there and the rest is here, where elements are counted from the cut.
                here, apart, parts = self.hold(), self.spec.apart_gradients, self._parts_in[place]
                made = [self._away[start:stop] for start, stop in parts[:apart]]
                made += [here[max(0, start - self._cut) : max(0, stop - self._cut)] for start, stop in parts[apart:]]
            self._cuts[place] = made
        if self.landing is not None:
            self.landing.wait()
        return made

    def view(self, index: int) -> Tensor:
        """See `Gradients`."""
        return self._places.view_of(self.hold(), index)

    def part(self, index: int) -> Tensor:
        """See `Gradients`."""
        return self._parts(self.spec.states)[index]

    def own_part(self, index: int) -> Tensor:
        """See `Gradients`."""
        return self._parts(self.spec.shard)[index]

    def parts_of_all(self, indices: Sequence[int]) -> list[Tensor]:
        """See `Gradients`."""
        # What ranks have yet to agree on is none of these, and must be left alone.
        is_all = len(indices) == len(self.sums) and all(map(self.is_known, indices))
        if self.has_local or not is_all:
            return super().parts_of_all(indices)
        return self._cuts_of(self.spec.states)

    def parts(self, index: int) -> list[Tensor]:
        """See `Gradients`."""
        is_local, is_used = self.own[index] is LOCAL, self.is_known(index)
        self.copy_arrived()
        parts = [self.part(index)] if is_used and (self.local is not self.held or not is_local) else []
        return [*parts, self._views[index]] if is_local else parts

    def put_shard(self, full: Tensor) -> None:
        """See `Gradients`."""
        full[slice(*self.spec.shard)] = self.own_shard()  # of any device

    def tensors(self) -> list[Tensor]:
        """See `Gradients`."""
        return [one for one in (self._away, self.held) if one is not None]

    def probes(self) -> list[Tensor]:
        """See `Gradients`."""
        if self.held is None:
            return []
        return [self.held] if self.spec.updates_all else self._cuts_of(self.spec.shard)

    def set_reduced(self, index: int, value: Tensor) -> None:
        """See `Gradients`."""
        flat, offset = self._places.flat(index, value.to(self.dtype)), self._layout.offsets[index]
        start, stop = self._layout.overlap(index, *self.spec.states)
        self.part(index).copy_(flat[start - offset : stop - offset] if stop > start else flat[:0])
        self.sums[index] = USED

    def clear(self, index: int) -> None:
        """See `Gradients`."""
        was_local, self.own[index], self.sums[index] = self.own[index] is LOCAL, NONE, STALE
        self._arrived.pop(index, None)
        if was_local and self.local is not None and not self.has_local:
            if self.local is not self.held:
                self._pool.give(self.local)
            self.local = None
        if not self.has_any:
            self.sums, self.scope = [STALE] * len(self.sums), Scope.ALL
            self._cuts.clear()
            self._let_go()

    @property
    def nbytes(self) -> tuple[int, int]:
        """See `Gradients`."""
        return (0, 0) if self.held is None else self.spec.gradient_bytes
