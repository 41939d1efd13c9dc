"""The entries of optimizers, this rank's slices of master values, and the states that are kept by them.

Owns what an optimizer sees as a parameter. It must not know updates. Read `core/gradient.py` ("two views of one
gradient") first.

Note: assignments to `.data`
    A slice is a view of its bucket. An optimizer may compute new values and assign them (`p.data = p.data - update`),
    and slices are then tensors of their own. Only slices that were assigned to are looked at, after the step
    (`ShardedOptimizer`), so other optimizers pay nothing. Outside a step the values are copied into the bucket.
"""

from collections import defaultdict
from collections.abc import Callable, MutableMapping
from functools import wraps
from typing import Any, NoReturn, Self, final

import torch

from zeroshard.core.gradient import assign, master_gradient, part_of
from zeroshard.core.slot import Slot, slot_of
from zeroshard.optim.attributes import OWN
from zeroshard.torch_private import DisabledFunction, version_of

__all__ = ["MasterSlice", "States", "make_master", "plain_part", "point_at"]

Tensor = torch.Tensor


class MasterSlice(torch.nn.Parameter):
    """The optimizer's replacement of a parameter: this rank's part of its master values, flat, possibly empty."""

    __torch_function__ = DisabledFunction  # type: ignore[assignment]

    uncut: frozenset[Any] = frozenset()
    """Keys of tensors in its state that were given once for all elements; one may have the shape of a slice."""

    def __getattr__(self, name: str) -> Any:
        """Return what code has set on the parameter, such as a factor of its learning rate."""
        slot: Slot | None = self.__dict__.get("_zeroshard")
        if slot is not None and name not in OWN and name in (given := slot.parameter.__dict__):
            return given[name]
        return object.__getattribute__(self, name)  # raises, and what a property has raised

    @property
    def data(self) -> Tensor:
        """This rank's master values. Others that a step assigns return to the bucket after it."""
        slot_of(self).bucket.let_read("entry.data")
        return self.detach()  # which shares the version, so that writes outside a step are noticed

    @data.setter
    def data(self, value: Tensor) -> None:
        slot = slot_of(self)
        if (owner := slot.owner()) is None or owner.is_updating:
            self.__dict__["_replaced"].add(self)
            point_at(self, value)
            return
        if value.shape != self.shape:
            raise RuntimeError(
                f"{owner.mesh} The data of the optimizer's slice of '{slot.name}' must have shape {tuple(self.shape)} "
                f"here; got {tuple(value.shape)}."
            )
        self.data.copy_(value)

    def set_(self, *_: Any) -> NoReturn:
        """Raise: the slice would leave its bucket."""
        raise RuntimeError(
            f"set_() of the optimizer's slice of '{slot_of(self).name}' would take it out of its bucket: write "
            "`entry.data = values`, or change it in place."
        )

    @property
    def grad(self) -> Tensor | None:
        """This rank's elements of the reduced gradient; None if no rank used the parameter."""
        # Optimizers read this four times a step, so its speed matters.
        slot: Slot = self.__dict__["_zeroshard"]
        grads, index = slot.bucket.grads, slot.index
        if (owner := slot.owner()) is not None and owner.unread is not None:
            owner.read_answer(is_needed=False)
        if not (grads.is_known(index) or slot.has_grad) or (owner is not None and owner.is_skipping):
            return None
        part = part_of(slot)
        if (shown := slot.grad_view) is not None and slot.is_whole and slot.is_moved(shown, part):
            slot.keep_shown()
            part = part_of(slot)
        if grads.dtype is self.dtype and not slot.crosses:
            return part
        # Optimizers need one dtype: gradients in another dtype are converted for the update, once per step.
        if slot.wide is None or slot.wide[0] != version_of(part):
            slot.wide = version_of(part), master_gradient(part.to(self.device, self.dtype), slot)
            slot.bucket.tell("copy out", part.numel() * self.itemsize * slot.crosses)
        return slot.wide[1]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        slot = slot_of(self)
        if value is not None and value is not slot.master_grad:
            raise RuntimeError(
                f"The gradient of the optimizer's slice of '{slot.name}' cannot be replaced; assign a tensor of the "
                "parameter's shape to the parameter's own .grad, or change the slice's gradient in place."
            )
        if value is None:
            assign(slot, None)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained: code that freezes a model by an optimizer's groups finds only slices."""
        return slot_of(self).parameter.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        slot_of(self).parameter.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train the parameter, or freeze it."""
        self.requires_grad = requires_grad
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        memo[id(self)] = copied = torch.nn.Parameter(self.detach().as_subclass(Tensor).clone(), self.requires_grad)
        return copied


def make_master(slot: Slot, replaced: set[MasterSlice]) -> MasterSlice:
    """Return the optimizer's entry for a parameter: a view of this rank's part of its master values.

    Args:
        replaced: what it is added to when code assigns to its `.data`.
    """
    entry = slot.bucket.entry(slot.index)
    master = torch.nn.Parameter(entry, requires_grad=entry.is_floating_point() or entry.is_complex())
    master.__class__ = MasterSlice
    master.__dict__.update(_zeroshard=slot, _replaced=replaced)
    assert isinstance(master, MasterSlice)
    return master


def plain_part(slot: Slot) -> Tensor:
    """Return this rank's elements of an existing gradient as a plain tensor, without the slot.

    A plain view of what the optimizer sees would keep it, and so the model, in a cycle that Python cannot free.
    """
    slot.bucket.grads.landing.wait()
    return slot.bucket.grads.part(slot.index).detach()


def point_at(master: Tensor, values: Tensor) -> None:
    """Have an entry show other memory, such as its bucket's."""
    Tensor.data.__set__(master, values)  # type: ignore[attr-defined]


def _checked(method: Callable[..., Any]) -> Any:
    """Return a method of dict that refuses keys that are no keys of `States`."""

    @wraps(method)
    def checked(self: "States", key: Any, *rest: Any) -> Any:
        self.check(key)
        return method(self, key, *rest)

    return checked


@final
class States(defaultdict[Any, Any]):
    """The states of a sharded optimizer, by slice. The optimizer's parameters are refused as keys while it is closed.

    Where a slice has states, `[]` runs no code of this class, so steps cost what they do in torch.
    """

    is_open = False
    """Whether parameters are keys, as in `gathered(states=True)`."""

    __missing__, __contains__ = _checked(defaultdict.__missing__), _checked(dict.__contains__)
    __setitem__, __delitem__ = _checked(dict.__setitem__), _checked(dict.__delitem__)
    get, pop, setdefault = _checked(dict.get), _checked(dict.pop), _checked(dict.setdefault)
    update = MutableMapping.update

    def __ior__(self, other: Any) -> Self:  # type: ignore[misc]
        self.update(other)
        return self

    def check(self, key: Any) -> None:
        """Raise RuntimeError if the key is a parameter of the optimizer, unless parameters are keys now."""
        slot: Slot | None = key.__dict__.get("_zeroshard") if isinstance(key, Tensor) else None
        if self.is_open or slot is None or slot.parameter is not key:
            return
        if (optimizer := slot.optimizer()) is not None and optimizer.state is self:
            raise RuntimeError(
                f"{slot.living_owner().mesh} optimizer.state has this rank's slices, and not '{slot.name}': what is "
                "read or written under a parameter would not be what updates use. Use `with zero.gathered(states=True, "
                "writeback=True):` around it, on every rank; there the parameters are the keys, with whole states."
            )
