"""Ranges of storages that saved tensors view, and the same tensors as views of a copy of a range.

Owns the recognition of tensors that are more than numbers in a storage, which are not offloaded. It must not know the
destinations of ranges.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from zeroshard.activations.values import is_plain
from zeroshard.torch_private import local_of, storage_of, version_of

__all__ = ["Key", "Place", "Span", "bytes_of", "is_movable", "key_of", "place_of", "spans_in"]

Tensor = torch.Tensor

Key = tuple[int, int]
"""A storage and its version."""
ALIGNMENT = 512
"""Ranges begin at multiples of this number of bytes, so that copies keep the alignment of tensors: the order of
additions in kernels may depend on the alignment."""


@final
@dataclass(frozen=True, slots=True)
class Place:
    """The description of a tensor as a view into a range.

    Args:
        offset: in bytes.
        wrap: creates the DTensor from its local tensor.
    """

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    wrap: Callable[[Tensor], Tensor] | None

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor."""
        size = self.dtype.itemsize
        flat = memory.as_strided((size,), (1,), 0).view(self.dtype)
        made = flat.as_strided(self.shape, self.stride, (memory.storage_offset() + self.offset) // size)
        return made if self.wrap is None else self.wrap(made)


@final
@dataclass(slots=True)
class Span:
    """The range of a storage that some tensors view.

    Args:
        tensor: one of them.
        low, high: start and end of the range, in bytes.
    """

    tensor: Tensor
    low: int
    high: int

    @property
    def nbytes(self) -> int:
        """The size of the range."""
        return self.high - self.low

    @property
    def device(self) -> torch.device:
        """The device of the storage."""
        return self.tensor.device


def spans_in(tensors: Sequence[Tensor]) -> dict[Key, Span]:
    """Return the ranges of storages that tensors view, in order."""
    spans: dict[Key, Span] = {}
    for tensor in map(local_of, tensors):
        if not is_movable(tensor):
            continue
        low, high = _extent(tensor)
        low -= low % ALIGNMENT
        span = spans.setdefault(key_of(tensor), Span(tensor, low, high))
        span.low, span.high = min(span.low, low), max(span.high, high)
    return spans


def is_movable(tensor: Tensor) -> bool:
    """Return whether a copy of the bytes of its storage copies the tensor."""
    return (
        is_plain(tensor)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
        and _extent(tensor)[1] <= tensor.untyped_storage().nbytes()
    )


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the start and end of a tensor in its storage, in bytes, including gaps between its elements."""
    last = sum(int(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    low = int(tensor.storage_offset()) * tensor.itemsize
    return low, low + (last + 1) * tensor.itemsize


def key_of(tensor: Tensor) -> Key:
    """Return a key of the contents of a tensor's storage, unique while the storage lives."""
    return storage_of(tensor), version_of(tensor)


def bytes_of(tensor: Tensor, low: int, nbytes: int) -> Tensor:
    """Return a range of a tensor's storage."""
    # Not `set_`: the tensors of a trace would keep the storage.
    return tensor.as_strided((1,), (1,), 0).view(torch.uint8).as_strided((nbytes,), (1,), low)


def place_of(tensor: Tensor, low: int) -> Place:
    """Return the description of a tensor or DTensor in a range of its storage that begins at `low`."""
    local = local_of(tensor)
    wrap = None if local is tensor else _wrapping(tensor)
    return Place(local.dtype, local.shape, local.stride(), _extent(local)[0] - low, wrap)


def _wrapping(tensor: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that creates a DTensor like this one from a local tensor."""
    mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()

    def wrap(local: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor  # half a second to import

        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    return wrap
