"""A tensor whose elements lie in a file: it is read where it is used, and written where it is changed.

Owns the class, for code that reads or changes states outside updates: checkpoints, averages, whole states. Updates read
and write arrays in pieces themselves (`update/streamed.py`). Read `disk.py` first.

Note: what stays in the file
    A part of it (`t[a:b]`, `split`) and an alias (`detach`, `reshape(-1)`) are such tensors, too, so code that goes
    over parts holds one part at a time. `copy_` writes, as do other functions in place. Every other function is given
    a copy in memory.
"""

from collections.abc import Callable
from typing import Any, final

import torch

from zeroshard.store.disk import BLOCK_BYTES, Array
from zeroshard.torch_private import NoSubclasses, without_storage
from zeroshard.tree import map_tensors

__all__ = ["StoredTensor", "is_aligned", "is_stored"]

Tensor = torch.Tensor

METADATA = frozenset(
    """
    __hash__ __len__ _version device dim dtype element_size get_device grad_fn is_contiguous is_cpu is_cuda is_leaf
    is_floating_point is_complex is_meta is_sparse itemsize layout nbytes ndim nelement numel requires_grad shape size
    stride names is_quantized is_nested is_pinned
    """.split()
)
ALIASES = frozenset("detach contiguous flatten ravel cpu data".split())
"""What returns the tensor itself, as all of them are flat, without gradients and of the host."""


@final
class StoredTensor(torch.Tensor):
    """Elements [start, stop) of an array in a file, flat."""

    array: Array
    start: int
    """The first element in the array."""

    @staticmethod
    def __new__(cls, array: Array, start: int, stop: int) -> "StoredTensor":
        """Make a tensor of some elements."""
        shape = torch.Size([stop - start])
        made = without_storage(cls, shape, (1,), array.dtype, torch.device("cpu"))
        assert isinstance(made, StoredTensor)
        made.array, made.start = array, start
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs, first = _name_of(func), kwargs or {}, args[0] if args else None
        if isinstance(first, cls):
            with NoSubclasses():
                if name in METADATA:
                    return func(*args, **kwargs)
            if name in ALIASES or (name in ("reshape", "view") and args[1:] in ((-1,), ((-1,),))):
                return first
            if name == "__getitem__" and isinstance(args[1], slice) and args[1].step in (None, 1):
                start, stop, _ = args[1].indices(first.shape[0])
                return first._part(start, max(start, stop))
            if name == "split" and isinstance(args[1], int):
                numel = first.shape[0]
                return tuple(first._part(at, min(at + args[1], numel)) for at in range(0, numel, args[1])) or (first,)
            if name == "copy_":
                values = args[1]
                first.array.write(first.start, values if values.shape == first.shape else values.expand(first.shape))
                return first
        read = map_tensors((args, kwargs), _loaded)
        with NoSubclasses():
            result = func(*read[0], **read[1])
        is_in_place = name == "__setitem__" or (name[-1] == "_" != name[-2] and name[:2] != "__")
        for one, value in _pairs(first, read[0][0]) if is_in_place else ():
            one.array.write(one.start, value)
        return first if is_in_place and isinstance(first, cls) else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} on states in a file: clone() them into memory first.")

    def _part(self, start: int, stop: int) -> "StoredTensor":
        return StoredTensor(self.array, self.start + start, self.start + stop)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredTensor({self.shape[0]:,} elements, {self.dtype}, under {self.array.disk.folder})"


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor in a file starts at the start of a block."""
    assert isinstance(tensor, StoredTensor), "a tensor in a file"
    return tensor.start * tensor.itemsize % BLOCK_BYTES == 0


def is_stored(tensor: Tensor) -> bool:
    """Tell whether a tensor lies in a file."""
    return isinstance(tensor, StoredTensor)


def _pairs(given: Any, read: Any) -> list[tuple[StoredTensor, Tensor]]:
    several = zip(given, read, strict=True) if isinstance(given, list | tuple) else [(given, read)]
    return [(one, value) for one, value in several if isinstance(one, StoredTensor)]


def _loaded(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, StoredTensor):
        return tensor
    with NoSubclasses():
        stop = tensor.start + tensor.shape[0]
    return tensor.array.read(tensor.start, stop)


def _name_of(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]
