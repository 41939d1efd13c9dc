"""The parameter objects of a sharded model: the user's objects, with a class that prevents wrong reads.

Owns the two classes of a sharded parameter. It must not know passes: it requests the unit from its slot's owner. Read
`core/slot.py`, `core/buffer.py` (where the bytes are) and `core/gradient.py` (what
`.grad` is) first.

Note: two classes
    While gathered, a parameter is a `ShardedParameter`: `__torch_function__` is disabled, so operations run as on any
    parameter; only `grad` and `data` are Python properties. While the storage is empty, it is a `ReleasedParameter`:
    every operation that would read values first gathers them (inside a pass) or raises. Changing the class of an object
    keeps its identity, so references in optimizers, hooks and user code stay valid. Reading a tensor without storage
    crashes the process on a CPU, so no operation may reach it in that state. A parameter that stays whole is of the
    second class, too, while its updated values arrive: a read waits for them.
"""

import copy
from typing import Any, final

import torch

from zeroshard.callers import remedy_for
from zeroshard.core import gradient
from zeroshard.core.slot import Form, Slot, slot_of
from zeroshard.torch_private import DisabledFunction, NoSubclasses, raw_data
from zeroshard.tree import find

__all__ = ["PlainForm", "ReleasedParameter", "ShardedParameter", "demand"]

Tensor = torch.Tensor

METADATA = (
    gradient.METADATA
    | {
        "_has_compatible_shallow_copy_type",
        "_parse_to",
        "_version",
        "backward",
        "is_shared",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
    }
    | frozenset(
        """
    empty_like full_like new_empty new_empty_strided new_full new_ones new_tensor new_zeros ones_like rand_like
    randint_like randn_like zeros_like
    """.split()
    )
)
"""Attributes and functions that read no values, which a released parameter supports."""


@final
class PlainForm(Form):
    """A plain parameter, stored unchanged in the bucket."""

    @property
    def classes(self) -> tuple[type["ShardedParameter"], type["ShardedParameter"]]:
        """The two classes of this module."""
        return ShardedParameter, ReleasedParameter

    @property
    def plain(self) -> type[Tensor]:
        """See `Form`."""
        return torch.nn.Parameter

    def part(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def join(self, part: Tensor) -> Tensor:
        """Return the part itself."""
        return part

    def whole(self, part: Tensor) -> Tensor:
        """Return the part itself."""
        return part

    def point(self, parameter: Tensor, part: Tensor) -> None:
        """Make the parameter a view of the storage of `part`."""
        parameter.data = part


class ShardedParameter(torch.nn.Parameter):
    """A parameter whose values are currently in its unit's bucket."""

    __torch_function__ = DisabledFunction  # type: ignore[assignment]

    @property
    def grad(self) -> Tensor | None:
        """The gradient: a tensor if every rank keeps it in full, else a `LogicalGradient` of the same shape."""
        return gradient.read(self.__dict__["_zeroshard"])

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        gradient.assign(self.__dict__["_zeroshard"], value)

    @grad.deleter
    def grad(self) -> None:
        gradient.assign(slot_of(self), None)

    @property
    def data(self) -> Tensor:
        """The values, without autograd."""
        slot = slot_of(self)
        return slot.bucket.changes.data_of(slot.index, raw_data(self))

    @data.setter
    def data(self, value: Tensor) -> None:
        is_like = (value.shape, value.dtype, value.device) == (self.shape, self.dtype, self.device)
        if value is self or (is_like and self.device.type == "cpu" and torch.equal(value, raw_data(self))):
            return  # model.to() assigns the same tensor if nothing changes; to("cpu:0") assigns a copy
        slot = slot_of(self)
        raise RuntimeError(
            f"{_place_of(slot)} The data of the sharded parameter '{slot.name}' cannot be replaced (got "
            f"{tuple(value.shape)}, {value.dtype}, {value.device}): it is a view of its unit's bucket. model.to(), "
            "half(), resize_token_embeddings() and assignments to p.data replace it. Convert, move and resize the "
            "model before zs.shard(), and build the optimizer after that; to change values, use `with "
            "zero.gathered(writeback=True):` and an in-place operation such as p.copy_(...) under torch.no_grad()."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        copied = torch.nn.Parameter(_plain_copy(self), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = torch.nn.Parameter(_plain_copy(self), self.requires_grad)
        return plain.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        slot = slot_of(self)
        return f"ShardedParameter('{slot.name}', shape={tuple(self.shape)}, dtype={self.dtype})"


class ReleasedParameter(ShardedParameter):
    """A parameter whose values are spread over the ranks right now."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name, kwargs = gradient.name_of(func), kwargs or {}
        if name not in METADATA or name == "new_tensor":
            with NoSubclasses():
                if name in gradient.CONVERSIONS and gradient.is_nothing_to_do(func, args, kwargs):
                    return args[0]
            # `new_tensor` reads the other tensor alone, `to` its own: of the other it asks dtype and device.
            read = {"new_tensor": args[1:], "to": args[:1]}.get(name, (args, kwargs))
            for parameter in find(read, ReleasedParameter):
                demand(parameter, name)
        with NoSubclasses():
            return func(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        """The values, gathered on demand inside a pass; raises outside."""
        demand(self, "data")
        return self.data  # now of the other class

    @data.setter
    def data(self, value: Tensor) -> None:
        ShardedParameter.data.fset(self, value)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        demand(self, "deepcopy")
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        demand(self, "pickle")
        return self.__reduce_ex__(protocol)


def demand(parameter: Tensor, what: str) -> None:
    """Gather the parameter's unit in an open pass, or raise."""
    slot = slot_of(parameter)
    owner = slot.owner()
    if owner is None and slot.bucket.arriving is not None:
        slot.bucket.arriving()
    elif owner is None or not owner.demand(slot.unit):
        raise RuntimeError(
            f"{_place_of(slot)} Parameter '{slot.name}' {tuple(parameter.shape)} is sharded and released here, so "
            f"`{what}` cannot read its values. {remedy_for(parameter, slot.name, what)}"
        )


def _place_of(slot: Slot) -> str:
    """Return the rank as errors name it."""
    owner = slot.owner()
    return str(owner.mesh) if owner is not None else "[its engine is gone]"


def _plain_copy(parameter: Tensor) -> Tensor:
    with torch.no_grad():
        return raw_data(parameter).clone()
