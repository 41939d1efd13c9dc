"""Values of other places of a pipe, as the code between parts has them: tensors of the right shape without contents.

Owns what is computed from such a value, which is such a value, and the refusal to tell its contents. It must not know
chunks or messages. `parallel/chunked.py` makes these tensors, and refuses them where a part or the output needs one.

Note: tensors that are written to
    A tensor that such a value is written to has no contents either. Its class is changed until the end of the forward,
    and so is that of the tensor that it is a view of.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from zeroshard.torch_private import NoSubclasses, base_of, is_fake
from zeroshard.tree import find, map_tensors

__all__ = ["Absence", "Remote", "SHAPE_OF_SECOND", "VALUE_FREE", "remote", "writes"]

VALUE_FREE: Final = frozenset(
    {
        torch.zeros_like,
        torch.ones_like,
        torch.empty_like,
        torch.full_like,
        torch.rand_like,
        torch.randn_like,
        *(getattr(Tensor, name) for name in ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")),
    }
)
"""Functions whose results depend on the shape and the dtype of their first argument alone."""
SHAPE_OF_SECOND: Final = frozenset(getattr(Tensor, name) for name in ("view_as", "expand_as", "reshape_as", "type_as"))
TELLS: Final = frozenset(
    """
    item tolist numpy __array__ __bool__ __float__ __int__ __index__ __complex__ __contains__ __dlpack__
    equal allclose is_nonzero
    """.split()
)
"""Functions whose results are contents, and no tensors."""


@final
@dataclass
class Absence:
    """What the values without contents of one model have in common.

    Args:
        place: names this rank in errors.
    """

    place: str = ""
    written: list[Tensor] = field(default_factory=list)
    """Tensors whose class was changed, because such a value was written to them."""

    @contextmanager
    def during(self) -> Iterator[None]:
        """Return a context of one forward, after which tensors that were written to are plain ones again."""
        try:
            yield
        finally:
            for one in self.written:
                one.__class__ = Tensor
            self.written.clear()


class Remote(Tensor):
    """A value of another place; `origin` is the module that it comes from, `absence` what it has in common."""

    origin: str
    absence: Absence

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute a value that depends on one of another place."""
        kwargs = kwargs or {}
        given = find((args, kwargs), Remote)
        name = getattr(func, "__name__", "")
        if name in TELLS:
            raise RuntimeError(
                f"{given[0].absence.place} The code between the modules of a pipe reads a value of "
                f"'{given[0].origin}' ({name}), which is at another place of the pipe. Move this code into a module, "
                "or cut elsewhere."
            )
        with NoSubclasses():
            result = func(*args, **kwargs)
        if func in VALUE_FREE or (func in SHAPE_OF_SECOND and not isinstance(args[0], Remote)):
            return result
        if writes(name, kwargs):
            for one in find(kwargs.get("out", args[:1]), Tensor):
                _empty(one, given[0])
        return map_tensors(result, lambda one: one if isinstance(one, Remote) else _like(one, given[0]))


def writes(name: str, kwargs: Any) -> bool:
    """Return whether a function of this name writes to its first argument, or to one named `out`."""
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in ("__setitem__", "__set__") or name.startswith("__i") or "out" in kwargs


def remote(tensor: Tensor, origin: str, absence: Absence) -> Tensor:
    """Return a tensor as a value of another place, of which it has the shape; a fake one of a trace as it is."""
    if is_fake(tensor):
        return tensor
    found = tensor.as_subclass(Remote)
    found.origin, found.absence = origin, absence
    return found


def _like(tensor: Tensor, other: Remote) -> Tensor:
    return remote(tensor, other.origin, other.absence)


def _empty(tensor: Tensor, other: Remote) -> None:
    """Have a tensor, and what it is a view of, count as a value of another place until the forward ends."""
    for one in (tensor, base_of(tensor)):
        if one is not None and not isinstance(one, Remote | nn.Parameter):
            one.__class__ = Remote
            one.origin, one.absence = other.origin, other.absence  # type: ignore[attr-defined]
            other.absence.written.append(one)
