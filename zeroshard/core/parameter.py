"""The parameter objects of a sharded model: the user's own, of a class that never lets a wrong value be read.

Owns the two classes a sharded parameter changes between and what each answers. It must not know passes: it asks its
`Slot`'s engine for the unit. Read `core/buffer.py` (where the bytes are) and `core/gradient.py` (what `.grad` is)
first.

Note: two classes
    While its values are there a parameter is a `ShardedParameter`: `__torch_function__` is disabled, so operations run
    as on any parameter; only `grad` and `data` are Python properties. While the storage is empty it is a
    `ReleasedParameter`, where every operation that would read values first has them gathered (inside a pass) or raises.
    Changing the class of an object keeps its identity, so optimizers, hooks and user code that hold it stay right.
    Reading a tensor without storage crashes the process on CPU, so nothing may reach it in that state.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch

from zeroshard.core import gradient

if TYPE_CHECKING:
    from zeroshard.core.buffer import Bucket
    from zeroshard.core.engine import Engine

__all__ = ["Form", "PlainForm", "ReleasedParameter", "ShardedParameter", "Slot", "demand", "slot_of"]

Tensor = torch.Tensor

METADATA = gradient.METADATA | {
    "_version",
    "backward",
    "is_shared",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
}
"""Tensor attributes and methods that read no values, so that a released parameter answers them."""


class Form(ABC):
    """What kind of tensor a parameter is to the model; its bucket holds plain ones.

    Args:
        has_axis: whether the mesh has another axis over which tensors of the model are split, so that no rank knows
            whole gradients.
        is_alike: whether the ranks along that axis have this one alike; norms count it on the first of them.
        is_first: whether this rank is that.
    """

    def __init__(self, *, has_axis: bool = False, is_alike: bool = False, is_first: bool = True) -> None:
        self.has_axis, self.is_alike, self.is_counted = has_axis, is_alike, is_first or not is_alike

    @property
    @abstractmethod
    def classes(self) -> tuple[type["ShardedParameter"], type["ShardedParameter"]]:
        """Of the parameter while its values are there, and while they are released."""

    @abstractmethod
    def part(self, tensor: Tensor) -> Tensor:
        """Return, plain, what this rank's bucket holds of a tensor of this form; of a plain one all."""

    @abstractmethod
    def join(self, part: Tensor) -> Tensor:
        """Return the tensor of this form of which the bucket holds `part`."""

    @abstractmethod
    def whole(self, part: Tensor) -> Tensor:
        """Return the whole of it, plain. Collective: all-gather over the other axis, if there is one."""

    @abstractmethod
    def point(self, parameter: Tensor, part: Tensor) -> None:
        """Have the parameter's values be `part` from now on, and be of its dtype."""


@final
class PlainForm(Form):
    """A plain parameter: the bucket holds it as it is."""

    @property
    def classes(self) -> tuple[type["ShardedParameter"], type["ShardedParameter"]]:
        """Both of this module."""
        return ShardedParameter, ReleasedParameter

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
        """Make the parameter a view of what `part` is one of."""
        parameter.data = part


@final
class Slot:
    """Where one parameter lives: its bucket and its place there. Held by the parameter object itself."""

    __slots__ = ("bucket", "engine", "form", "grad_view", "has_master", "index", "master_grad", "name", "unit")

    def __init__(self, name: str, unit: int, bucket: "Bucket", index: int, form: Form) -> None:
        self.name, self.unit, self.bucket, self.index, self.form = name, unit, bucket, index, form
        self.engine: Callable[[], Engine | None] = _no_engine
        """A weak reference: parameters must not keep alive what holds them."""
        self.has_master = False
        self.grad_view: Tensor | None = None
        self.master_grad: Tensor | None = None

    @property
    def parameter(self) -> Tensor:
        """The parameter itself."""
        return self.bucket.parameters[self.index]

    @property
    def has_grad(self) -> bool:
        """Whether there is a gradient: some rank used the parameter, or this one did and ranks have not agreed yet."""
        grads = self.bucket.grads
        return grads.used[self.index] or grads.staged[self.index] or grads.landed[self.index]


def _no_engine() -> None:
    return None


def slot_of(parameter: Tensor) -> Slot:
    """Return the slot of a sharded parameter or of its master slice."""
    slot: Slot = parameter.__dict__["_zeroshard"]
    return slot


class ShardedParameter(torch.nn.Parameter):
    """A parameter whose values are in its unit's bucket right now."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def grad(self) -> Tensor | None:
        """The gradient: a tensor where every rank keeps it whole, else a `LogicalGradient` of the same shape."""
        return gradient.read(slot_of(self))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        gradient.assign(slot_of(self), value)

    @grad.deleter
    def grad(self) -> None:
        gradient.assign(slot_of(self), None)

    @property
    def data(self) -> Tensor:
        """The values, without autograd."""
        slot = slot_of(self)
        return slot.bucket.changes.data_of(slot.index, _raw_data(self))

    @data.setter
    def data(self, value: Tensor) -> None:
        name = slot_of(self).name
        raise RuntimeError(
            f"The data of the sharded parameter '{name}' cannot be replaced (got {tuple(value.shape)}, {value.dtype}, "
            f"{value.device}): its bytes are a view of its unit's bucket. This is what model.to(), half(), "
            "resize_token_embeddings() and assigning p.data do. Convert, move and resize the model before zs.shard(), "
            "and build the optimizer after that; to change values: `with zero.gathered(writeback=True):` and an "
            "in-place operation such as p.copy_(...) under torch.no_grad()."
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
    def __torch_function__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if gradient.name_of(func) not in METADATA:
            for parameter in _released_in((args, kwargs)):
                demand(parameter, gradient.name_of(func))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @property
    def data(self) -> Tensor:
        """The values, gathered on demand inside a pass; outside it raises."""
        demand(self, "data")
        return super().data

    @data.setter
    def data(self, value: Tensor) -> None:
        ShardedParameter.data.fset(self, value)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        demand(self, "deepcopy")
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        demand(self, "pickle")
        return super().__reduce_ex__(protocol)


def demand(parameter: Tensor, what: str) -> None:
    """Have the parameter's unit gathered for an open pass, or raise."""
    slot = slot_of(parameter)
    engine = slot.engine()
    if engine is None or not engine.demand(slot.unit):
        where = engine.mesh if engine is not None else "[its engine is gone]"
        raise RuntimeError(
            f"{where} Parameter '{slot.name}' {tuple(parameter.shape)} is sharded and its values are released here, so "
            f"`{what}` cannot read them. Use `with zero.gathered():` around the code that reads parameters "
            "(`writeback=True` to change them); every rank must enter it. Move, convert, resize or initialize the "
            "model before zs.shard()."
        )


def _released_in(value: Any) -> list[Tensor]:
    if isinstance(value, ReleasedParameter):
        return [value]
    if isinstance(value, (tuple, list)):
        return [p for item in value for p in _released_in(item)]
    if isinstance(value, dict):
        return [p for item in value.values() for p in _released_in(item)]
    return []


def _raw_data(parameter: Tensor) -> Tensor:
    data: Tensor = torch.Tensor.data.__get__(parameter)  # type: ignore[attr-defined]
    return data


def _plain_copy(parameter: Tensor) -> Tensor:
    with torch.no_grad():
        return _raw_data(parameter).clone()
