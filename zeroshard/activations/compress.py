"""Compression of activations: what autograd saved takes fewer bits until the backward pass, without loss or rounded.

Owns which saved tensor gets which encoding, what is learned from earlier steps, and the count of bytes. What nodes need
is in `describe/saved_nodes.py`, the encodings in `compress_codes.py`, with loss in `compress_rounded.py`.

Note: what gets which encoding
    Tensors that alias one stretch of memory are decided together, at the exit of the unit whose forward saved them:

    - of a ReLU's result that nobody else there saved, one bit an element: whether it is above zero. Leaky ReLU and
      hardtanh likewise;
    - of a ReLU's result that other nodes read as well, a mask and the values that are not zero, once for all of them,
      where this is smaller by a fifth; its square and its casts are derived from these values;
    - of a max pool's input nothing, since its gradient follows from the indices, and of each index a byte;
    - booleans as bits; on a CPU also factors with one value besides zero, as dropout there makes them;
    - of a copy of attention's result with dimensions swapped nothing, on a CPU, where equality is checked first;
    - of views that keep much larger memory alive which nobody else uses, their own elements;
    - the rest as it is, or rounded on request: inputs of products, convolutions, norms and point-wise functions whose
      gradient is bounded in their error, and inputs of recomputed modules, from 1,024 elements on. Results of softmax,
      queries and keys of attention, statistics of norms, and what any other node saved stay whole.

    Compiled blocks and functions of the user's read what they saved in ways of their own: left alone, and counted.
    What a unit returns may live on; then a later unit that saves it encodes it anew.
Note: no wait for the device
    How many values are not zero is known on the device alone. There the room for them is fixed from the counts of
    earlier steps at the same place, and the tensor itself stays until the count of this step, on its way to the host,
    is found to have arrived. If the values did not fit, it stays for good. The host looks at each exit of a unit, and
    never waits; a host that is far ahead of its device holds such tensors longer.
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
    Swapped,
    Whole,
    count_nonzero,
    flat_of,
    form_of,
    is_compact,
    nonzero_values,
    pack_bits,
    pattern_of,
    window_of,
)
from zeroshard.activations.compress_rounded import Rounded, RoundedTo, round_to
from zeroshard.describe.saved_nodes import Need, Origin, Rearranged, Use, Uses
from zeroshard.torch_private import storage_of, users_of_storage, version_of
from zeroshard.tree import find

__all__ = ["Compress"]

Tensor = torch.Tensor

_PAYS = 0.8
"""Encodings that depend on the values are used where they leave at most this part of the bytes."""
_ROUNDED_NUMEL = 1024
_SMALL_BYTES = 512
_MARGIN = 1.1
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SIGNS = ("nonzero", "positive", "inside")


@final
@dataclass(slots=True)
class _One:
    """A saved tensor and what is known of it."""

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
        """Whether somebody else has an alias, too, so that keeping fewer bytes may free none."""
        self.nbytes = 0

    def measure(self) -> None:
        """Find out how large it is, and who has it."""
        first: Tensor = self.ones[0].held.value
        self.nbytes = first.untyped_storage().nbytes()
        self.is_shared = users_of_storage(first) > len(self.ones)

    def region(self) -> Tensor | None:
        """Return one of the tensors if they all are views of the same compact stretch."""
        tensors = [one.held.value for one in self.ones if one.need.kind != "shape"]
        first: Tensor = tensors[0]
        key = (first.storage_offset(), first.numel(), first.dtype)
        same = all((one.storage_offset(), one.numel(), one.dtype) == key and is_compact(one) for one in tensors)
        return first if same else None


@final
class _Known:
    """What is known of the tensors of one forward while it is treated.

    Args:
        sources: by identity of a tensor, from which elements it follows, and by which steps.
    """

    def __init__(self, memories: Iterable[_Memory]) -> None:
        # Held here, so that nothing else takes their identity.
        pairs = ((one.held.value, (one, memory)) for memory in memories for one in memory.ones)
        self.originals = {id(tensor): (tensor, *rest) for tensor, rest in pairs}
        origins = (one.use.origin for _, one, _ in self.originals.values() if one.use is not None)
        self.roots = {origin.root for origin in origins if isinstance(origin, Origin) and origin.steps}
        """Tensors whose elements are wanted, since others follow from them."""
        self.sources: dict[int, tuple[Nonzero | Whole, tuple[Any, ...]]] = {}

    def note(self, ones: Sequence[_One], source: Nonzero | Whole, steps: tuple[Any, ...]) -> None:
        """Note what tensors follow from."""
        for one in ones:
            self.sources[id(one.held.value)] = source, steps


@final
class Compress(Link):
    """The link of `Compressed`.

    Args:
        rest: how what no lossless encoding makes smaller is rounded; None leaves it.
    """

    def __init__(self, rest: RoundedTo | None) -> None:
        self._rest = rest
        self._uses = Uses()
        self._capacities: dict[tuple[int, int], int] = {}
        self._awaited: list[tuple[tuple[int, int], Awaited]] = []
        self._bytes: dict[int, Mapping[str, tuple[int, int]]] = {}

    def saved(self) -> dict[str, tuple[int, int]]:
        """Return bytes before and after, by encoding, of what the last forward of each unit saved.

        Each storage counts once in a unit. "kept" stayed as it was, "opaque" is what compiled blocks and functions of
        the user's saved.
        """
        sums: dict[str, tuple[int, int]] = {}
        for counts in self._bytes.values():
            for code, (before, after) in counts.items():
                known = sums.get(code, (0, 0))
                sums[code] = known[0] + before, known[1] + after
        return sums

    def treat(self, held: Sequence[Held], unit: int, outputs: Any) -> None:
        """Encode what gets smaller by it."""
        self._look()
        self._uses.walk(outputs)
        memories: dict[int, _Memory] = defaultdict(_Memory)
        for one in held:
            if type(one.value) in _PLAIN and one.value.layout is torch.strided and one.value.numel():
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
        """See which counts have arrived."""
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
                or self._encode_copy(memory, rest, known)
                or self._encode_nonzero(memory, rest, known, place)
                or self._encode_two_valued(memory, rest)
                or self._encode_views(memory, rest)
                or self._round(memory, rest)
                or "kept"
            )

    def _encode_places(self, memory: _Memory, rest: Sequence[_One]) -> str:
        """Keep a byte of each index of a max pool."""
        need = rest[0].need
        if len(rest) > 1 or need.kind != "window" or memory.is_shared or rest[0].held.value.dtype is not torch.int64:
            return ""
        code = window_of(rest[0].held.value, need.settings[-1][0], need.settings[:-1])
        return _put(self, rest[0], code) if code is not None else ""

    def _encode_signs(self, rest: Sequence[_One], known: _Known | None = None) -> str:
        """Keep one bit an element of what is read by ReLUs and their like alone."""
        if known is not None and any(id(one.held.value) in known.roots for one in rest):
            return ""
        if not all(one.need.kind in _SIGNS and is_compact(one.held.value) for one in rest):
            return ""
        half = (torch.float16, torch.bfloat16)
        if any(one.need.kind == "inside" and one.held.value.dtype in half for one in rest):
            # The limits themselves are rounded there.
            return ""
        for one in rest:
            need, flat = one.need, flat_of(one.held.value)
            if need.kind == "nonzero":
                mask, low, high = flat.bool(), 0.0, 1.0
            elif need.kind == "positive":
                mask, low, high = flat > 0, 0.0, 1.0
            else:
                # Of NaN torch's own kernels make this or that, by the place in memory.
                mask = (flat > need.low) & (flat < need.high)
                low, high = need.low, (need.low + need.high) / 2
            _put(self, one, Bits(pack_bits(mask), flat.dtype, form_of(one.held.value), low, high))
        return "signs"

    def _encode_nonzero(self, memory: _Memory, rest: Sequence[_One], known: _Known, place: Any) -> str:
        """Keep the values that are not zero of a ReLU's result, once; or derive a tensor from what was kept so."""
        origins = [one.use.origin for one in rest if one.use is not None and isinstance(one.use.origin, Origin)]
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
            # It stays as it is; its square need not.
            known.note(rest, Whole(flat_of(region)), ())
        return ""

    def _share(
        self, rest: Sequence[_One], source: Nonzero | Whole, steps: tuple[Any, ...], known: _Known, name: str
    ) -> str:
        known.note(rest, source, steps)
        # The bits tell a ReLU enough, and come back faster, unless there is -0.0 among the values.
        has_signs = isinstance(source, Nonzero) and not steps and _is_read_freely(source.values)
        has_signs = has_signs and not bool(torch.signbit(source.values).any())
        for one in rest:
            form, dtype = form_of(one.held.value), one.held.value.dtype
            if has_signs and one.need.kind == "nonzero" and isinstance(source, Nonzero):
                _put(self, one, Bits(source.packed, dtype, form, 0.0, 1.0))
            else:
                _put(self, one, Derived(source, steps, form))
        return name

    def _encode_copy(self, memory: _Memory, rest: Sequence[_One], known: _Known) -> str:
        """Keep nothing of a copy, where that can be checked without waiting for a device."""
        origin = rest[0].use.origin if rest[0].use is not None else None
        if len(rest) > 1 or not isinstance(origin, Rearranged) or origin.root not in known.originals:
            return ""
        tensor: Tensor = rest[0].held.value
        root, one, source = known.originals[origin.root]
        if memory.is_shared or source.is_shared or not is_compact(tensor) or not _is_read_freely(tensor):
            return ""
        if not torch.equal(flat_of(tensor), root.transpose(*origin.dims).contiguous().view(-1)):
            return ""
        return _put(self, rest[0], Swapped(one.held.value, origin.dims, form_of(tensor)))

    def _compact(self, flat: Tensor, place: tuple[int, int]) -> Nonzero | None:
        mask = pattern_of(flat)
        numel, size = flat.numel(), flat.element_size()
        count = count_nonzero(mask)
        limit = int(_PAYS * numel) - numel // (8 * size)
        if _is_read_freely(flat):
            room = int(count)
            if room > limit:
                return None
            return Nonzero(pack_bits(mask), nonzero_values(flat, mask, room)[: room + 1], numel)
        room = int(_MARGIN * self._capacities[place]) + 64 if place in self._capacities else limit + 1
        pays = room <= limit
        awaited = Awaited(flat if pays else None, _post(count), room)
        self._awaited.append((place, awaited))
        return Nonzero(pack_bits(mask), nonzero_values(flat, mask, room), numel, awaited) if pays else None

    def _encode_two_valued(self, memory: _Memory, rest: Sequence[_One]) -> str:
        """Keep one bit of each boolean, and on a CPU of each factor that needs no gradient and has one value or 0."""
        region = memory.region()
        if memory.is_shared or region is None:
            return ""
        flat, high = flat_of(region), 1.0
        if flat.dtype is not torch.bool:
            is_factor = all(
                one.use is not None and one.use.node == "MulBackward0" and not one.use.has_edge for one in rest
            )
            if not is_factor or not _is_read_freely(flat) or not flat.is_floating_point():
                return ""
            found = _other_value(flat)
            if found is None:
                return ""
            high = found
        packed = pack_bits(pattern_of(flat) if flat.dtype is not torch.bool else flat)
        for one in rest:
            _put(self, one, Bits(packed, flat.dtype, form_of(one.held.value), 0.0, high))
        return "two-valued"

    def _encode_views(self, memory: _Memory, rest: Sequence[_One]) -> str:
        """Keep the elements of views on their own."""
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
        # A tensor from outside the graph that others have as well is a buffer or the batch: it lives on.
        return one.use.need.kind in _SIGNS or (one.use.can_round and (one.use.has_edge or not memory.is_shared))


def _put(link: Compress, one: _One, code: Any) -> str:
    one.held.put(link, code)
    return type(code).__name__.lower()


def _is_read_freely(tensor: Tensor) -> bool:
    """Tell whether the host reads a tensor's values without waiting."""
    return tensor.device.type == "cpu"


def _post(count: Tensor) -> Tensor:
    """Send a count to the host; there it is -1 until it has arrived."""
    posted = torch.full((), -1, dtype=torch.int64, pin_memory=count.device.type == "cuda")
    return posted.copy_(count, non_blocking=True)


def _other_value(flat: Tensor) -> float | None:
    """Return the only value besides +0.0; None if there are others."""
    for part in (flat[:256], flat):
        high = part.max()
        if not bool(((part == high) | (part == 0)).all()) or not bool(high > 0):
            return None
    is_negative_zero = torch.signbit(flat).any()
    return None if bool(is_negative_zero) else float(high)


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
