"""Compression of saved tensors in traces: the sizes of encodings, and of temporary memory.

Owns a reimplementation of `activations/compress.py` for tensors without values. It must not know units. Read `kept.py`
first.

Note: what depends on values
    A trace cannot know the fraction of zeros in a ReLU's results. Such a tensor counts as uncompressed, which is an
    upper bound (`has_bounds`).
"""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from zeroshard.describe.saved_nodes import Need, Use, Uses
from zeroshard.plan.trace.kept import Held, Link
from zeroshard.torch_private import storage_of, users_of_storage, version_of

__all__ = ["Compresses"]

_PAYS: Final = 0.8
_ROUNDED_NUMEL: Final = 1024
_SMALL_BYTES: Final = 512
_BLOCK: Final = 128
_BLOCKS_AT_ONCE: Final = 1024
_CHUNK: Final = 1 << 17
_SIGNS: Final = ("nonzero", "positive", "inside")
_PLAIN: Final = Need("values")


@dataclass(frozen=True, slots=True)
class _Form:
    """The memory layout of a tensor, as in `activations/compress_codes.py`."""

    shape: torch.Size
    strides: tuple[int, ...]
    is_compact: bool

    def spread(self, flat: Tensor) -> Tensor:
        if self.is_compact:
            return flat.as_strided(self.shape, self.strides, 0)
        made = torch.empty_strided(self.shape, self.strides, dtype=flat.dtype)
        return made.copy_(flat.view(self.shape))


class _Code(ABC):
    @abstractmethod
    def restore(self) -> Tensor:
        """Return the tensor."""


@final
@dataclass(frozen=True, slots=True)
class _Blank(_Code):
    form: _Form
    like: Tensor

    def restore(self) -> Tensor:
        return torch.empty_strided(self.form.shape, self.form.strides, dtype=self.like.dtype)


@final
@dataclass(frozen=True, slots=True)
class _Bits(_Code):
    packed: Tensor
    dtype: torch.dtype
    form: _Form

    def restore(self) -> Tensor:
        places = self.packed.int()
        rows = torch.empty(8 * places.numel(), dtype=self.dtype)
        del places
        return self.form.spread(rows[: math.prod(self.form.shape)])


@final
@dataclass(frozen=True, slots=True)
class _Nonzero:
    packed: Tensor
    values: Tensor
    count: int

    def numel(self) -> int:
        return self.count


@final
@dataclass(frozen=True, slots=True)
class _Derived(_Code):
    source: _Nonzero | Tensor
    steps: tuple[Any, ...]
    form: _Form

    def restore(self) -> Tensor:
        values = self.source if isinstance(self.source, Tensor) else self.source.values
        for step in self.steps:
            values = values.square() if step == "square" else values.to(step)
        if not isinstance(self.source, Tensor):
            # A separate variable keeps the source of the copy alive until the copy.
            made = values.new_empty(8 * self.source.packed.numel())
            for begin in range(0, made.numel(), _CHUNK):
                numel = min(_CHUNK, made.numel() - begin)
                mask, places = torch.empty(numel, dtype=torch.bool), torch.empty(numel, dtype=torch.int32)
            del mask, places
            values = made[: self.source.count]
        return self.form.spread(values)


@final
@dataclass(frozen=True, slots=True)
class _Copied(_Code):
    values: Tensor
    form: _Form

    def restore(self) -> Tensor:
        return self.form.spread(self.values)


@final
@dataclass(frozen=True, slots=True)
class _Rounded(_Code):
    codes: Tensor
    scales: Tensor | None
    dtype: torch.dtype
    form: _Form

    def restore(self) -> Tensor:
        if self.scales is None:
            return self.form.spread(self.codes.to(self.dtype))
        made = torch.empty(self.codes.shape, dtype=self.dtype)
        table = torch.empty(256)
        for begin in range(0, len(made), _BLOCKS_AT_ONCE):
            codes = self.codes[begin : begin + _BLOCKS_AT_ONCE].view(torch.uint8)
            values = table.index_select(0, codes.reshape(-1).int()).view(codes.shape)
            made[begin : begin + _BLOCKS_AT_ONCE] = values.mul_(self.scales[begin : begin + _BLOCKS_AT_ONCE])
        return self.form.spread(made.view(-1)[: math.prod(self.form.shape)])


@final
@dataclass(slots=True)
class _One:
    held: Held
    use: Use | None

    @property
    def need(self) -> Need:
        return self.use.need if self.use is not None else _PLAIN


@final
class _Memory:
    def __init__(self) -> None:
        self.ones: list[_One] = []
        self.nbytes, self.is_shared = 0, False

    def measure(self) -> None:
        first: Tensor = self.ones[0].held.value
        self.nbytes = first.untyped_storage().nbytes()
        self.is_shared = users_of_storage(first) > len(self.ones)

    def region(self) -> Tensor | None:
        tensors = [one.held.value for one in self.ones if one.need.kind != "shape"]
        first: Tensor = tensors[0]
        key = (first.storage_offset(), first.numel(), first.dtype)
        same = all((one.storage_offset(), one.numel(), one.dtype) == key and _is_compact(one) for one in tensors)
        return first if same else None


@final
class Compresses(Link):
    """Encodes tensors that become smaller, whatever their values.

    Args:
        rest: format to round tensors that no lossless encoding makes smaller; None leaves them unchanged.
        zeros: fraction of zeros in a ReLU's results; None if unknown.
    """

    def __init__(self, rest: str | None, zeros: float | None = None) -> None:
        self._rest, self._uses, self._zeros = rest, Uses(), zeros
        self.has_bounds = False
        """Whether a tensor counts as uncompressed although the result depends on values."""

    def treat(self, held: Sequence[Held], unit: int, outputs: Any) -> None:
        """See `Link`."""
        self._uses.walk(outputs)
        memories: dict[int, _Memory] = defaultdict(_Memory)
        for one in held:
            if isinstance(one.value, Tensor) and one.value.numel():
                memories[storage_of(one.value)].ones.append(_One(one, self._uses.of(one.value)))
        self._uses.forget_dead()
        for memory in memories.values():
            memory.measure()
        ones = [one for memory in memories.values() for one in memory.ones]
        originals = [one.held.value for one in ones]  # no other tensor gets their identities
        origins = [one.use.origin for one in ones if one.use is not None]
        roots = {origin.root for origin in origins if origin is not None and origin.steps}
        sources: dict[int, tuple[_Nonzero | Tensor, tuple[Any, ...]]] = {}
        with torch.no_grad():
            for memory in memories.values():
                self._encode(memory, roots, sources)
        del originals

    def restore(self, value: Any) -> Any:
        """See `Link`."""
        return value.restore()

    def _encode(self, memory: _Memory, roots: set[Any], sources: dict[int, Any]) -> None:
        if any(one.need.kind == "opaque" for one in memory.ones):
            return
        for one in memory.ones:
            if one.need.kind == "shape" and one.use is not None and one.use.has_edge:
                one.held.put(self, _Blank(_form(one.held.value), one.held.value.new_empty(0)))
        rest = [one for one in memory.ones if not one.held.steps]
        if not rest or memory.nbytes < _SMALL_BYTES:
            return
        _ = (
            self._places(memory, rest)
            or (not any(id(one.held.value) in roots for one in rest) and self._signs(rest))
            or self._nonzero(memory, rest, sources)
            or self._booleans(memory, rest)
            or self._views(memory, rest)
            or self._round(memory, rest)
        )

    def _places(self, memory: _Memory, rest: Sequence[_One]) -> bool:
        need, tensor = rest[0].need, rest[0].held.value
        if len(rest) > 1 or need.kind != "window" or memory.is_shared or tensor.dtype is not torch.int64:
            return False
        places = torch.empty_like(tensor, dtype=torch.uint8)
        rest[0].held.put(self, _Window(places, _form(tensor)))
        return True

    def _signs(self, rest: Sequence[_One]) -> bool:
        if not all(one.need.kind in _SIGNS and _is_compact(one.held.value) for one in rest):
            return False
        half = (torch.float16, torch.bfloat16)
        if any(one.need.kind == "inside" and one.held.value.dtype in half for one in rest):
            return False
        for one in rest:
            tensor = one.held.value
            mask = torch.empty(tensor.numel(), dtype=torch.bool)
            one.held.put(self, _Bits(_packed(mask), tensor.dtype, _form(tensor)))
        return True

    def _nonzero(self, memory: _Memory, rest: Sequence[_One], sources: dict[int, Any]) -> bool:
        origins = [one.use.origin for one in rest if one.use is not None and one.use.origin is not None]
        region = memory.region() if origins else None
        if region is None or not region.is_floating_point() or any(one.need.kind in _SIGNS[1:] for one in rest):
            return False
        for origin in origins:
            if origin.steps and origin.root in sources and version_of(region) == 0:
                source, steps = sources[origin.root]
                if source.numel() == region.numel():
                    for one in rest:
                        sources[id(one.held.value)] = source, (*steps, *origin.steps)
                        one.held.put(self, _Derived(source, (*steps, *origin.steps), _form(one.held.value)))
                    return True
        if any("square" in origin.steps for origin in origins):
            return False
        self.has_bounds |= self._zeros is None
        if (code := self._compact(_flat(region))) is not None:
            for one in rest:
                sources[id(one.held.value)] = code, ()
                one.held.put(self, _Derived(code, (), _form(one.held.value)))
            return True
        if not memory.is_shared and self._rest is None:
            for one in rest:
                sources[id(one.held.value)] = _flat(region), ()
        return False

    def _compact(self, flat: Tensor) -> "_Nonzero | None":
        if self._zeros is None:
            return None
        room = round((1 - self._zeros) * flat.numel())
        if room > int(_PAYS * flat.numel()) - flat.numel() // (8 * flat.element_size()):
            return None
        mask = torch.empty(flat.numel(), dtype=torch.bool)
        packed = _packed(mask)
        values = torch.empty(room + 2, dtype=flat.dtype)
        for begin in range(0, flat.numel(), _CHUNK):
            numel = min(_CHUNK, flat.numel() - begin)
            places = torch.empty(numel, dtype=torch.int32)
            wide = places.long()
            del wide
        del mask, places
        return _Nonzero(packed, values, flat.numel())

    def _booleans(self, memory: _Memory, rest: Sequence[_One]) -> bool:
        region = memory.region()
        if memory.is_shared or region is None or region.dtype is not torch.bool:
            return False
        packed = _packed(region)
        for one in rest:
            one.held.put(self, _Bits(packed, torch.bool, _form(one.held.value)))
        return True

    def _views(self, memory: _Memory, rest: Sequence[_One]) -> bool:
        if memory.is_shared or sum(one.held.value.nbytes for one in rest) > _PAYS * memory.nbytes:
            return False
        for one in rest:
            flat, form = _flat(one.held.value), _form(one.held.value)
            if self._can_round(one, memory):
                one.held.put(self, self._rounded(flat, form))
            else:
                one.held.put(self, _Copied(flat.clone() if form.is_compact else flat, form))
        return True

    def _round(self, memory: _Memory, rest: Sequence[_One]) -> bool:
        region = memory.region() if self._rest is not None else None
        if region is None or not all(self._can_round(one, memory) for one in rest):
            return False
        signs = [one for one in rest if one.need.kind in _SIGNS]
        if signs and not self._signs(signs):
            return False
        code = self._rounded(_flat(region), _form(region))
        for one in rest:
            if one not in signs:
                one.held.put(self, _Rounded(code.codes, code.scales, code.dtype, _form(one.held.value)))
        return True

    def _rounded(self, flat: Tensor, form: _Form) -> _Rounded:
        if self._rest == "bf16":
            return _Rounded(flat.to(torch.bfloat16), None, flat.dtype, form)
        count = -(-flat.numel() // _BLOCK)
        codes, scales = torch.empty((count, _BLOCK), dtype=torch.int8), torch.empty((count, 1))
        for begin in range(0, count, _BLOCKS_AT_ONCE):
            part = flat[begin * _BLOCK : (begin + _BLOCKS_AT_ONCE) * _BLOCK].float()
            if part.numel() % _BLOCK:
                part = torch.nn.functional.pad(part, (0, -part.numel() % _BLOCK))
            _round(part.view(-1, _BLOCK), codes[begin : begin + _BLOCKS_AT_ONCE])
        return _Rounded(codes, scales, flat.dtype, form)

    def _can_round(self, one: _One, memory: _Memory) -> bool:
        tensor: Tensor = one.held.value
        size = 2 if self._rest == "bf16" else 1
        if self._rest is None or not tensor.is_floating_point() or tensor.element_size() <= size:
            return False
        if tensor.numel() < _ROUNDED_NUMEL:
            return False
        if one.use is None:
            return one.held.is_input
        return one.use.need.kind in _SIGNS or (one.use.can_round and (one.use.has_edge or not memory.is_shared))


@final
@dataclass(frozen=True, slots=True)
class _Window(_Code):
    places: Tensor
    form: _Form

    def restore(self) -> Tensor:
        return torch.empty_strided(self.form.shape, self.form.strides, dtype=torch.int64)


def _round(part: Tensor, codes: Tensor) -> None:
    finite = torch.nan_to_num(part)
    scaled = part / finite.abs_().amax(dim=1, keepdim=True)
    codes.copy_(scaled.nan_to_num_().round_())


def _packed(mask: Tensor) -> Tensor:
    packed = torch.empty(-(-mask.numel() // 8), dtype=torch.uint8)
    for begin in range(0, mask.numel() // 8 * 8, _CHUNK):
        torch.empty(min(_CHUNK, mask.numel() - begin), dtype=torch.uint8)  # products of words with a constant
    return packed


def _is_compact(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _form(tensor: Tensor) -> _Form:
    return _Form(tensor.shape, tensor.stride(), _is_compact(tensor))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)) if _is_compact(tensor) else tensor.contiguous().view(-1)
