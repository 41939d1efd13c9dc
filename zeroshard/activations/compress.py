"""Compression of saved tensors between forward and backward, lossless or rounded.

Owns the choice of encodings, sizes learned from earlier steps, and the count of bytes. `describe/saved_nodes.py` has
the needs of graph nodes, `compress_codes.py` the lossless encodings, `compress_rounded.py` the lossy ones.

Note: choice of encodings
    Tensors that share memory are encoded together, at the exit of the unit whose forward saved them:

    - a ReLU's result that no other node of the unit saved: one bit per element, whether the element is above zero.
      Leaky ReLU and hardtanh likewise;
    - a ReLU's result that other nodes also read: a mask and the nonzero values, stored once, if this is smaller by a
      fifth; the square and casts of the result are derived from these values;
    - a max pool: nothing of its input, since the gradient follows from the indices, and one byte per index;
    - booleans: one bit per element;
    - views that keep much larger, otherwise unused memory alive: their own elements;
    - other tensors: unchanged, or rounded on request. Rounding applies to inputs of products, convolutions, norms and
      point-wise functions whose gradient error is bounded, and to inputs of recomputed modules, from 1,024 elements
      on. Results of softmax, queries and keys of attention, statistics of norms, and tensors of other nodes stay whole.

    Compiled blocks and user functions read their saved tensors in unknown ways: their tensors are counted and not
    encoded. The output of a unit may stay alive; a later unit that saves the output encodes it again.
Note: no wait for the device
    Only the device knows the number of nonzero values. Their capacity is therefore fixed from the counts of earlier
    steps at the same place, and the tensor stays until this step's count arrives on the host. If the values do not
    fit, the tensor stays until backward. The host checks counts at each exit of a unit and never waits; a host that is
    far ahead of its device holds such tensors longer.
Note: no values
    In a trace, the fraction of zeros in a ReLU's results is given, or such a tensor counts as unchanged, which is an
    upper bound (`has_bounds`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from zeroshard.activations.chain import Held, Link
from zeroshard.activations.compress_codes import (
    Awaited,
    Bits,
    Blank,
    Copied,
    Derived,
    Nonzero,
    Whole,
    count_nonzero,
    flat_of,
    form_of,
    nonzero_values,
    pack_bits,
    pattern_of,
    window_of,
)
from zeroshard.activations.compress_rounded import Rounded, RoundedTo, round_to
from zeroshard.activations.values import Values, is_plain, values_of
from zeroshard.describe.saved_nodes import Need, Use, Uses
from zeroshard.torch_private import is_dense, storage_of, users_of_storage, version_of
from zeroshard.tree import find

__all__ = ["Compress"]

Tensor = torch.Tensor

_PAYS = 0.8
"""The largest size, as a fraction of the original, at which an encoding that depends on values is used."""
_ROUNDED_NUMEL = 1024
_SMALL_BYTES = 512
_MARGIN = 1.1
_SIGNS = ("nonzero", "positive", "inside")


@final
@dataclass(slots=True)
class _One:
    """A saved tensor and its uses."""

    held: Held
    use: Use | None

    @property
    def need(self) -> Need:
        return self.use.need if self.use is not None else Need("values")


@final
class _Memory:
    """The saved tensors that alias one storage."""

    def __init__(self) -> None:
        self.ones: list[_One] = []
        self.code = "kept"
        self.is_shared = False
        """Whether other code has an alias, so that an encoding may free no memory."""
        self.nbytes = 0

    def measure(self) -> None:
        """Determine the size of the storage, and whether other code has an alias."""
        first: Tensor = self.ones[0].held.value
        self.nbytes = first.untyped_storage().nbytes()
        self.is_shared = users_of_storage(first) > len(self.ones)

    def region(self) -> Tensor | None:
        """Return one of the tensors if all are views of the same compact memory."""
        tensors = [one.held.value for one in self.ones if one.need.kind != "shape"]
        first: Tensor = tensors[0]
        key = (first.storage_offset(), first.numel(), first.dtype)
        same = all((one.storage_offset(), one.numel(), one.dtype) == key and is_dense(one) for one in tensors)
        return first if same else None


@final
class _Known:
    """Facts about the tensors of a forward during their treatment.

    Args:
        sources: by identity of a tensor, the elements that it is derived from, and the steps.
    """

    def __init__(self, memories: Iterable[_Memory]) -> None:
        # These references keep other objects from getting the same identity.
        self._originals = [one.held.value for memory in memories for one in memory.ones]
        origins = [one.use.origin for memory in memories for one in memory.ones if one.use is not None]
        self.roots = {origin.root for origin in origins if origin is not None and origin.steps}
        """Tensors whose elements are needed to derive others."""
        self.sources: dict[int, tuple[Nonzero | Whole, tuple[Any, ...]]] = {}

    def note(self, ones: Sequence[_One], source: Nonzero | Whole, steps: tuple[Any, ...]) -> None:
        """Record the source of tensors."""
        for one in ones:
            self.sources[id(one.held.value)] = source, steps


@final
class Compress(Link):
    """The link of `Compressed`.

    Args:
        rest: the rounding of tensors without a smaller lossless encoding; None for no rounding.
        zeros: the fraction of zeros in a ReLU's results, where values cannot be read; None if unknown.
    """

    def __init__(self, rest: RoundedTo | None, zeros: float | None = None) -> None:
        self._rest, self._zeros = rest, zeros
        self.has_bounds = False
        """Whether a tensor stayed unchanged because its values are unknown."""
        self._uses = Uses()
        self._capacities: dict[tuple[int, int], int] = {}
        self._awaited: list[tuple[tuple[int, int], Awaited]] = []
        self._bytes: dict[int, Mapping[str, tuple[int, int]]] = {}

    def saved(self) -> dict[str, tuple[int, int]]:
        """Return bytes before and after, by encoding, of tensors that the last forward of each unit saved.

        Each storage counts once in a unit. "kept" counts unchanged tensors, "opaque" those of compiled blocks and user
        functions.
        """
        sums: dict[str, tuple[int, int]] = {}
        for counts in self._bytes.values():
            for code, (before, after) in counts.items():
                known = sums.get(code, (0, 0))
                sums[code] = known[0] + before, known[1] + after
        return sums

    def treat(self, held: Sequence[Held], unit: int, outputs: Any) -> None:
        """Encode tensors whose encoding is smaller."""
        self._look()
        self._uses.walk(outputs)
        memories: dict[int, _Memory] = defaultdict(_Memory)
        for one in held:
            if is_plain(one.value) and one.value.layout is torch.strided and one.value.numel():
                memories[storage_of(one.value)].ones.append(_One(one, self._uses.of(one.value)))
        self._uses.forget_dead()
        for memory in memories.values():
            memory.measure()
        known = _Known(memories.values())
        with torch.no_grad():
            for index, memory in enumerate(memories.values()):
                self._encode(memory, known, (unit, index))
        self._bytes[unit] = _count(memories.values())

    def restore(self, value: Any) -> Any:
        """Return the tensor."""
        return value.restore()

    def _look(self) -> None:
        """Process counts that have arrived."""
        waiting = []
        for place, one in self._awaited:
            count = one.look()
            if count is None:
                waiting.append((place, one))
            else:
                self._capacities[place] = count
        self._awaited = waiting

    def _encode(self, memory: _Memory, known: _Known, place: tuple[int, int]) -> None:
        ones = memory.ones
        if any(one.need.kind == "opaque" for one in ones):
            memory.code = "opaque"
            return
        for one in ones:
            if one.need.kind == "shape" and one.use is not None and one.use.has_edge:
                _put(self, one, Blank(form_of(one.held.value), one.held.value.new_empty(0)))
        rest = [one for one in ones if not one.held.steps]
        if not rest:
            memory.code = "shape"
        elif memory.nbytes >= _SMALL_BYTES:
            memory.code = (
                self._encode_places(memory, rest)
                or self._encode_signs(rest, known)
                or self._encode_nonzero(memory, rest, known, place)
                or self._encode_booleans(memory, rest)
                or self._encode_views(memory, rest)
                or self._round(memory, rest)
                or "kept"
            )

    def _encode_places(self, memory: _Memory, rest: Sequence[_One]) -> str:
        """Keep one byte per index of a max pool."""
        need = rest[0].need
        if len(rest) > 1 or need.kind != "window" or memory.is_shared or rest[0].held.value.dtype is not torch.int64:
            return ""
        code = window_of(rest[0].held.value, need.settings[-1][0], need.settings[:-1])
        return _put(self, rest[0], code) if code is not None else ""

    def _encode_signs(self, rest: Sequence[_One], known: _Known | None = None) -> str:
        """Keep one bit per element of tensors that only ReLUs and similar nodes read."""
        if known is not None and any(id(one.held.value) in known.roots for one in rest):
            return ""
        if not all(one.need.kind in _SIGNS and is_dense(one.held.value) for one in rest):
            return ""
        half = (torch.float16, torch.bfloat16)
        if any(one.need.kind == "inside" and one.held.value.dtype in half for one in rest):
            # The limits are rounded in this dtype.
            return ""
        for one in rest:
            need, flat = one.need, flat_of(one.held.value)
            if need.kind == "nonzero":
                mask, low, high = flat.bool(), 0.0, 1.0
            elif need.kind == "positive":
                mask, low, high = flat > 0, 0.0, 1.0
            else:
                # The result of torch's own kernels for NaN depends on the position in memory.
                mask = (flat > need.low) & (flat < need.high)
                low, high = need.low, (need.low + need.high) / 2
            _put(self, one, Bits(pack_bits(mask), flat.dtype, form_of(one.held.value), low, high))
        return "signs"

    def _encode_nonzero(self, memory: _Memory, rest: Sequence[_One], known: _Known, place: Any) -> str:
        """Keep the nonzero values of a ReLU's result once, or derive a tensor from kept values."""
        origins = [one.use.origin for one in rest if one.use is not None and one.use.origin is not None]
        region = memory.region() if origins else None
        if region is None or not region.is_floating_point() or any(one.need.kind in _SIGNS[1:] for one in rest):
            return ""
        for origin in origins:
            if origin.steps and origin.root in known.sources and version_of(region) == 0:
                source, steps = known.sources[origin.root]
                if source.numel == region.numel():
                    return self._share(rest, source, (*steps, *origin.steps), known, "derived")
        if any("square" in origin.steps for origin in origins):
            return ""
        if (compacted := self._compact(flat_of(region), place)) is not None:
            return self._share(rest, compacted, (), known, "nonzero")
        if not memory.is_shared and self._rest is None:
            # The result stays unchanged; its square can be derived.
            known.note(rest, Whole(flat_of(region)), ())
        return ""

    def _share(
        self, rest: Sequence[_One], source: Nonzero | Whole, steps: tuple[Any, ...], known: _Known, name: str
    ) -> str:
        known.note(rest, source, steps)
        for one in rest:
            _put(self, one, Derived(source, steps, form_of(one.held.value)))
        return name

    def _compact(self, flat: Tensor, place: tuple[int, int]) -> Nonzero | None:
        reads = values_of(flat)
        if reads is Values.NEVER and self._zeros is None:
            self.has_bounds = True
            return None
        mask = pattern_of(flat)
        numel, size = flat.numel(), flat.element_size()
        count = count_nonzero(mask)
        limit = int(_PAYS * numel) - numel // (8 * size)
        if reads is not Values.DEVICE:
            room = int(count) if reads is Values.HOST else round((1 - (self._zeros or 0)) * numel)
            if room > limit:
                return None
            return Nonzero(pack_bits(mask), nonzero_values(flat, mask, room)[: room + 1], numel)
        room = int(_MARGIN * self._capacities[place]) + 64 if place in self._capacities else limit + 1
        pays = room <= limit
        awaited = Awaited(flat if pays else None, _post(count), room)
        self._awaited.append((place, awaited))
        return Nonzero(pack_bits(mask), nonzero_values(flat, mask, room), numel, awaited) if pays else None

    def _encode_booleans(self, memory: _Memory, rest: Sequence[_One]) -> str:
        """Keep one bit per element of booleans."""
        region = memory.region()
        if memory.is_shared or region is None or region.dtype is not torch.bool:
            return ""
        packed = pack_bits(flat_of(region))
        for one in rest:
            _put(self, one, Bits(packed, torch.bool, form_of(one.held.value), 0.0, 1.0))
        return "booleans"

    def _encode_views(self, memory: _Memory, rest: Sequence[_One]) -> str:
        """Keep only the elements of views."""
        sizes = [one.held.value.numel() * one.held.value.element_size() for one in rest]
        if memory.is_shared or sum(sizes) > _PAYS * memory.nbytes:
            return ""
        for one in rest:
            flat, form = flat_of(one.held.value), form_of(one.held.value)
            if self._can_round(one, memory):
                _put(self, one, Rounded(round_to(self._rest, flat), form))  # type: ignore[arg-type]
            else:
                _put(self, one, Copied(flat.clone() if form.offset is not None else flat, form))
        return "views"

    def _round(self, memory: _Memory, rest: Sequence[_One]) -> str:
        region = memory.region() if self._rest is not None else None
        if region is None or not all(self._can_round(one, memory) for one in rest):
            return ""
        assert self._rest is not None
        # A small value that becomes zero must not close a ReLU.
        signs = [one for one in rest if one.need.kind in _SIGNS]
        if signs and not self._encode_signs(signs):
            return ""
        made = round_to(self._rest, flat_of(region))
        for one in rest:
            if one not in signs:
                _put(self, one, Rounded(made, form_of(one.held.value)))
        return self._rest

    def _can_round(self, one: _One, memory: _Memory) -> bool:
        tensor: Tensor = one.held.value
        size = 2 if self._rest == "bf16" else 1
        if self._rest is None or not tensor.is_floating_point() or tensor.element_size() <= size:
            return False
        if tensor.numel() < _ROUNDED_NUMEL:
            return False
        if one.use is None:
            return one.held.is_input
        # A tensor from outside the graph with other references is a buffer or the batch, which stays alive.
        return one.use.need.kind in _SIGNS or (one.use.can_round and (one.use.has_edge or not memory.is_shared))


def _put(link: Compress, one: _One, code: Any) -> str:
    one.held.put(link, code)
    return type(code).__name__.lower()


def _post(count: Tensor) -> Tensor:
    """Send a count to the host; the host reads -1 until the count arrives."""
    posted = torch.full((), -1, dtype=torch.int64, pin_memory=count.device.type == "cuda", device="cpu")
    return posted.copy_(count, non_blocking=True)


def _count(memories: Iterable[_Memory]) -> dict[str, tuple[int, int]]:
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    seen: set[int] = set()
    for memory in memories:
        before[memory.code] += memory.nbytes
        for one in memory.ones:
            for tensor in find(one.held.value, Tensor):
                if storage_of(tensor) not in seen:
                    seen.add(storage_of(tensor))
                    after[memory.code] += tensor.untyped_storage().nbytes()
    return {code: (before[code], after[code]) for code in before}
