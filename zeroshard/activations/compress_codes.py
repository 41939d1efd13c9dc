"""Lossless encodings of saved tensors: bits, nonzero values, places in a window, the own elements of a view.

Owns the encodings, each a frozen record whose tensors a later link may move, and the decoding. They use plain
operations of torch on the tensor's own device. `compress.py` chooses the encoding of a tensor; `compress_rounded.py`
has the rounding.

Note: bits
    Eight booleans form an int64, and one multiplication moves their lowest bits side by side into the highest byte.
    Decoding uses a table of 256 rows of eight elements. Both are five times as fast on a CPU as shifts and sums of
    single bits.
Note: nonzero values
    `values` begins with a zero, followed by the k-th nonzero value at index k. The index of an element is then the
    running count of the mask, times the mask: one scatter compacts, one gather restores, and neither branches on the
    data. `masked_select` and `masked_scatter` take twice as long on a CPU, and the first waits for the device on a GPU.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import torch

from zeroshard.activations.values import Values, values_of
from zeroshard.torch_private import is_dense, without_modes

__all__ = [
    "Awaited",
    "Bits",
    "Blank",
    "Code",
    "Copied",
    "Derived",
    "Form",
    "Nonzero",
    "Whole",
    "Window",
    "count_nonzero",
    "flat_of",
    "form_of",
    "nonzero_values",
    "pack_bits",
    "pattern_of",
    "window_of",
]

Tensor = torch.Tensor

# Moves bit 8k to bit 56 + k, for k from 0 to 7.
_GATHER_BITS = 0x0102040810204080
# Elements per round on a CPU: the data of a round stay in the cache.
_CHUNK = 1 << 17
_INTEGERS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


@final
@dataclass(frozen=True, slots=True)
class Form:
    """The layout of a tensor in memory.

    Args:
        shape, strides: of the tensor.
        offset: of its first element in the encoded memory; None if elements are encoded in their logical order, since
            the tensor has holes in memory or elements in common.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int | None

    def spread(self, flat: Tensor) -> Tensor:
        """Return the tensor from its elements."""
        if self.offset is not None:
            return flat.as_strided(self.shape, self.strides, self.offset)
        made = torch.empty_strided(self.shape, self.strides, dtype=flat.dtype, device=flat.device)
        return made.copy_(flat.view(self.shape))


def form_of(tensor: Tensor) -> Form:
    """Return the layout of a tensor in memory."""
    return Form(tensor.shape, tensor.stride(), 0 if is_dense(tensor) else None)


def flat_of(tensor: Tensor) -> Tensor:
    """Return a tensor's elements, in the order of `Form.spread`; an alias if the tensor is compact."""
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous().view(-1)


class Code(ABC):
    """An encoded tensor."""

    @abstractmethod
    def restore(self) -> Tensor:
        """Return the tensor."""


@final
@dataclass(frozen=True, slots=True)
class Blank(Code):
    """A tensor of which only shape and layout are used.

    Args:
        like: an empty tensor of its dtype and device.
    """

    form: Form
    like: Tensor

    def restore(self) -> Tensor:
        """Return a tensor of zeros."""
        like = self.like
        return torch.empty_strided(self.form.shape, self.form.strides, dtype=like.dtype, device=like.device).zero_()


@final
@dataclass(frozen=True, slots=True)
class Copied(Code):
    """The own elements of a view that would keep much larger memory."""

    values: Tensor
    form: Form

    def restore(self) -> Tensor:
        """Return the tensor."""
        return self.form.spread(self.values)


@final
@dataclass(frozen=True, slots=True)
class Bits(Code):
    """A tensor with one of two values at each place.

    Args:
        packed: uint8, element 8i + k in bit k of byte i.
        low, high: the value for 0 and for 1.
    """

    packed: Tensor
    dtype: torch.dtype
    form: Form
    low: float
    high: float

    def restore(self) -> Tensor:
        """Return the tensor."""
        table = _table(self.dtype, self.packed.device, self.low, self.high)
        rows = table.index_select(0, self.packed.int())
        return self.form.spread(rows.view(-1)[: math.prod(self.form.shape)])


@functools.lru_cache(maxsize=256)
def _table(dtype: torch.dtype, device: torch.device, low: float, high: float) -> Tensor:
    """Return the eight elements of each byte, (256, 8)."""
    # A trace may ask first, and would leave a table without memory.
    with without_modes():
        shifts = torch.arange(8, device=device)
        bits = torch.arange(256, device=device)[:, None].bitwise_right_shift(shifts).bitwise_and(1).bool()
        zero, one = (torch.full((), value, dtype=dtype, device=device) for value in (low, high))
        return torch.where(bits, one, zero)


def pack_bits(mask: Tensor) -> Tensor:
    """Return booleans, (n,) and contiguous, as bits: uint8, (n / 8 rounded up,)."""
    numel, whole = mask.numel(), mask.numel() // 8 * 8
    packed = torch.empty(-(-numel // 8), dtype=torch.uint8, device=mask.device)
    chunk = _CHUNK if mask.device.type == "cpu" else max(whole, 8)
    for begin in range(0, whole, chunk):
        words = mask[begin : min(begin + chunk, whole)].view(torch.int64) * _GATHER_BITS
        packed[begin // 8 : begin // 8 + words.numel()] = words.view(torch.uint8)[7::8]
    if numel > whole:
        rest = mask.new_zeros(8)
        rest[: numel - whole] = mask[whole:]
        packed[-1:] = (rest.view(torch.int64) * _GATHER_BITS).view(torch.uint8)[7:]
    return packed


def pattern_of(flat: Tensor) -> Tensor:
    """Return a mask of elements other than +0.0: -0.0 and NaN are values to keep."""
    return flat.view(_INTEGERS[flat.element_size()]).bool()


def count_nonzero(mask: Tensor) -> Tensor:
    """Return the number of set elements of a mask, int64, 0-d."""
    return torch.count_nonzero(mask)


@final
class Awaited:
    """A tensor that stays until its nonzero values are known to fit in their buffer.

    Args:
        dense: the tensor, flat.
        count: the number of nonzero values, int64 in host memory; -1 until the device writes the count.
        capacity: the number of values that fit.
    """

    __slots__ = ("_count", "capacity", "dense")

    def __init__(self, dense: Tensor | None, count: Tensor, capacity: int) -> None:
        self.dense, self._count, self.capacity = dense, count, capacity

    def look(self) -> int | None:
        """Return the count if it has arrived, without waiting; release the tensor if its values fit."""
        count = int(self._count)
        if count < 0:
            return None
        if count <= self.capacity:
            self.dense = None
        return count


@final
@dataclass(frozen=True, slots=True)
class Whole:
    """Unchanged elements, from which other tensors are derived."""

    values: Tensor

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.values.numel()

    def flat(self, steps: Sequence[Any]) -> Tensor:
        """Return the elements after `steps`."""
        return _take(steps, self.values)


@final
@dataclass(frozen=True, slots=True)
class Nonzero:
    """The elements of a tensor that are not +0.0, and their positions.

    Args:
        packed: bits of `pattern_of`.
        values: zero, then the values in the order of memory.
        numel: of the tensor.
        spare: keeps the tensor until the values are known to fit.
    """

    packed: Tensor
    values: Tensor
    numel: int
    spare: Awaited | None = None

    def flat(self, steps: Sequence[Any]) -> Tensor:
        """Return the elements after `steps`, which map zero to zero."""
        if self.spare is not None:
            self.spare.look()
            if self.spare.dense is not None:
                return _take(steps, self.spare.dense)
        found = _take(steps, self.values)
        # As integers, since copies of floating-point numbers may change the bits of NaN.
        values = found.view(_INTEGERS[found.element_size()])
        made = values.new_empty(self.packed.numel() * 8)
        table = _table(torch.bool, self.packed.device, 0, 1).view(torch.int64)
        reads = values_of(values)
        chunk, known = (max(made.numel(), 8) if reads is Values.DEVICE else _CHUNK), 0
        for begin in range(0, made.numel(), chunk):
            part = self.packed[begin // 8 : (begin + chunk) // 8].int()
            mask = table.view(-1).index_select(0, part).view(torch.bool)
            places, known = _places(mask, known, reads)
            torch.index_select(values, 0, places, out=made[begin : begin + chunk])
        return made[: self.numel].view(found.dtype)


def _take(steps: Sequence[Any], values: Tensor) -> Tensor:
    for step in steps:
        values = values.square() if step == "square" else values.to(step)
    return values


def _places(mask: Tensor, known: int, reads: Values) -> tuple[Tensor, int]:
    """Return each element's index in the values, int32, 0 for zeros, and the count so far."""
    places = torch.cumsum(mask, 0, dtype=torch.int32)
    if reads is Values.HOST:
        count = known + int(places[-1])
        return (places.add_(known) if known else places).mul_(mask), count
    return places.mul_(mask), 0


def nonzero_values(flat: Tensor, mask: Tensor, capacity: int) -> Tensor:
    """Return zero, then the elements at which a mask is set.

    Args:
        flat: the elements, (n,).
        mask: (n,).
        capacity: the number of values that fit; further values are dropped.
    """
    reads = values_of(flat)
    dtype, flat = flat.dtype, flat.view(_INTEGERS[flat.element_size()])
    values = flat.new_empty(capacity + 2)
    chunk, known = (max(flat.numel(), 1) if reads is Values.DEVICE else _CHUNK), 0
    for begin in range(0, flat.numel(), chunk):
        places, known = _places(mask[begin : begin + chunk], known, reads)
        values.scatter_(0, places.clamp_(max=capacity + 1).long(), flat[begin : begin + chunk])
    values[0] = 0
    return values.view(dtype)


@final
@dataclass(frozen=True, slots=True)
class Derived(Code):
    """A tensor derived from kept elements.

    Args:
        source: the elements; tensors on the same memory share them.
        steps: "square" and dtypes, in order.
    """

    source: Nonzero | Whole
    steps: tuple[Any, ...]
    form: Form

    def restore(self) -> Tensor:
        """Return the tensor."""
        return self.form.spread(self.source.flat(self.steps))


@final
@dataclass(frozen=True, slots=True)
class Window(Code):
    """The indices of a 2-d max pool, each as a place in its window.

    Args:
        places: uint8, dense.
        form: of the indices.
        width: of the pool's input.
        kernel, stride, padding, dilation: of the pool, each (height, width).
    """

    places: Tensor
    form: Form
    width: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def restore(self) -> Tensor:
        """Return the indices, int64."""
        high, wide = self.places.shape[-2:]
        device = self.places.device
        tops = torch.arange(high, device=device).mul_(self.stride[0]).sub_(self.padding[0])
        lefts = torch.arange(wide, device=device).mul_(self.stride[1]).sub_(self.padding[1])
        corners = tops[:, None] * self.width + lefts
        steps = torch.arange(self.kernel[0] * self.kernel[1], device=device)
        offsets = (steps // self.kernel[1]) * (self.dilation[0] * self.width) + steps % self.kernel[1] * self.dilation[
            1
        ]
        made = torch.empty_strided(self.form.shape, self.form.strides, dtype=torch.int64, device=device)
        found = offsets.index_select(0, self.places.reshape(-1).int()).view(self.places.shape)
        return torch.add(found, corners, out=made)


def window_of(indices: Tensor, width: int, settings: Sequence[Sequence[int]]) -> Window | None:
    """Return the indices of a 2-d max pool as places in windows; None if a place does not fit in a byte.

    Args:
        indices: int64, (..., height, width) of the pool's output.
        width: of its input.
        settings: kernel size, stride, padding and dilation.
    """
    kernel, stride, padding, dilation = ((int(one[0]), int(one[-1])) for one in settings)
    if kernel[0] * kernel[1] > 256 or not is_dense(indices):
        return None
    high, wide = indices.shape[-2:]
    tops = torch.arange(high, device=indices.device).mul_(stride[0]).sub_(padding[0])
    lefts = torch.arange(wide, device=indices.device).mul_(stride[1]).sub_(padding[1])
    # Division of small integers is several times as fast.
    small = indices.int()
    rows = small // width
    columns = small.sub_(rows * width).sub_(lefts.int()).floor_divide_(dilation[1])
    places = rows.sub_(tops[:, None].int()).floor_divide_(dilation[0]).mul_(kernel[1]).add_(columns).to(torch.uint8)
    return Window(places, form_of(indices), width, kernel, stride, padding, dilation)
