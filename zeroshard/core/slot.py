"""The slot of a parameter: its bucket, and its connection to the engine.

Owns the slot that each sharded parameter and each optimizer slice references. It must not know engines: the protocol
`Owner` defines their interface. Read `core/buffer.py` first.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol, final

import torch

from zeroshard.core.buffer import Bucket
from zeroshard.core.dtypes import LossScale
from zeroshard.wire.comm import Comm
from zeroshard.wire.mesh import Mesh

__all__ = ["Form", "NormsOfPlaces", "Owner", "Slot", "free", "keep_shown", "let_go", "slot_of"]

Tensor = torch.Tensor

NormsOfPlaces = Callable[[list[Tensor], Sequence["Slot"], float, bool], list[Tensor]]
"""Returns norms whose total is that of all places of a pipe, from the norms of gradients of one place, their order, and
whether code asked for several at once; without a pipe, the same norms. Collective: with a pipe."""


class Owner(Protocol):
    """The interface of the engine for parameters and gradients."""

    mesh: Mesh
    comm: Comm
    loss_scale: LossScale | None
    is_skipping: bool
    is_updating: bool
    unread: Callable[[], None] | None
    copy: slice | list[int]
    """The ranks whose parts form the full gradients."""
    norms_of_places: "NormsOfPlaces"
    assigned: set["Slot"]
    """Parameters whose gradients user code has assigned since their optimizer's last step; without one, ever."""

    def learn(self) -> None:
        """Read whether the last update was skipped, if the host does not know yet."""

    def read_answer(self, *, is_needed: bool) -> None:
        """The same, at once if it is needed now, or if the loss scale follows from it."""

    def demand(self, number: int) -> bool:
        """Gather a unit for code outside its modules; return False without an open pass."""

    def leave_passes(self, what: str) -> None:
        """Raise inside a pass; complete a pass that an exception interrupted."""

    def check_outside_backward(self, what: str) -> None:
        """Raise inside a backward."""

    def check_reduced(self, what: str) -> None:
        """Raise if gradients wait for a reduction."""

    def catch_up(self) -> None:
        """Read the final votes of past passes."""

    def answer(self, place: str) -> None:
        """Post a vote before this rank computes a result from reduced gradients."""

    def change_gradients(self, what: str, *, is_forgotten: bool = False) -> None:
        """Prepare for a change of gradients by user code; raise inside a backward."""

    def norms(self, p: float, dtype: torch.dtype | None = None) -> Tensor:
        """Return (parameters,) fp64: the p-norm of the full gradient of each parameter, in order. Collective."""

    def full_gradient(self, slot: "Slot") -> Tensor:
        """Return the full gradient of a parameter. Collective."""


class Form(ABC):
    """The kind of tensor that a parameter is in the model; its bucket holds plain tensors.

    Args:
        has_axis: whether tensors of the model are split over another axis of the mesh, so that no rank has full
            gradients.
        is_alike: whether the parameter is equal on the ranks along that axis; norms count it on the first rank.
        is_first: whether this rank is the first.
        groups: number of groups of the split dimension, each of which all ranks along that axis have a block of.
    """

    groups = 1

    def __init__(self, *, has_axis: bool = False, is_alike: bool = False, is_first: bool = True) -> None:
        self.has_axis, self.is_alike, self.is_counted = has_axis, is_alike, is_first or not is_alike

    @property
    @abstractmethod
    def classes(self) -> tuple[type[torch.nn.Parameter], type[torch.nn.Parameter]]:
        """The classes of the parameter while gathered, and while released."""

    @property
    @abstractmethod
    def plain(self) -> type[Tensor]:
        """The class of the parameter in a model that is not sharded."""

    @abstractmethod
    def part(self, tensor: Tensor) -> Tensor:
        """Return the plain tensor in this rank's bucket for a tensor of this form."""

    @abstractmethod
    def join(self, part: Tensor) -> Tensor:
        """Return the tensor of this form for `part` of the bucket."""

    @abstractmethod
    def whole(self, part: Tensor) -> Tensor:
        """Return the full tensor, plain. Collective: all-gather over the other axis, if any."""

    @abstractmethod
    def point(self, parameter: Tensor, part: Tensor) -> None:
        """Set the values of the parameter to `part`, with its dtype."""


@final
class Slot:
    """The bucket of a parameter, and its index there. Referenced by the parameter object."""

    __slots__ = tuple(
        "bucket counters crosses form grad_view index is_own is_whole master_grad name optimizer owner place shape "
        "spare stride unit updater wide".split()
    )

    def __init__(self, name: str, unit: int, bucket: Bucket, index: int, form: Form, parameter: Tensor) -> None:
        self.name, self.unit, self.bucket, self.index, self.form = name, unit, bucket, index, form
        # For a released parameter, these would call Python code.
        self.shape, self.stride, spec = parameter.shape, parameter.stride(), bucket.spec
        self.is_whole = spec.lands_on_held and spec.updates_all and not form.has_axis
        """Whether this rank holds and updates with the full reduced gradient."""
        start, stop = bucket.layout.overlap(index, *spec.shard)
        self.is_own = form.is_counted and stop > start
        """Whether norms count its elements on this rank."""
        self.crosses = spec.moves_gradients and bucket.device.type != "cpu"
        """Whether its gradient is held in another memory than its states."""
        self.place = 0
        """Index among the parameters of the model."""
        self.owner: Callable[[], Owner | None] = _no_owner
        """A weak reference to the engine: parameters must not keep it alive."""
        self.optimizer: Callable[[], torch.optim.Optimizer | None] = _no_owner
        """A weak reference to the optimizer that has taken the parameter; its group may have been removed since."""
        self.counters: frozenset[Any] = frozenset()
        """Keys of states that its optimizer has once for all elements."""
        self.updater: int | None = None
        """The rank within a replica that updates the whole parameter; None if each rank updates its slice."""
        self.grad_view: Tensor | None = None
        self.spare: Tensor | None = None
        """An unreferenced logical gradient, reused in the next step."""
        self.master_grad: Tensor | None = None
        self.wide: tuple[int, Tensor] | None = None
        """The master's gradient in the dtype of the update, and the version of the held gradient it was made from."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"'{self.name}' is sharded, so its optimizer cannot be pickled. Call zero.save(path).")

    def is_moved(self, shown: Tensor, used: Tensor) -> bool:
        """Return whether code has assigned to `.data` of a whole gradient, so that it is not what an update uses."""
        is_plain = type(shown) is torch.Tensor  # else it was read before its reduction
        strides = self.bucket.places.strides[self.index]
        return is_plain and (shown.data_ptr() != used.data_ptr() or shown.stride() != strides)

    def keep_shown(self) -> None:
        """Hold what code has assigned to `.data` of a whole gradient, which was a view of what is held."""
        shown, grads, places, index = self.grad_view, self.bucket.grads, self.bucket.places, self.index
        if not self.is_whole or type(shown) is not torch.Tensor or not grads.is_known(index):
            return
        known = [one for one in (grads.part(index), self.master_grad) if one is not None]
        if shown.dtype is grads.dtype and not any(self.is_moved(shown, one) for one in known):
            return
        if (given := tuple(shown.shape)) != (shape := places.shapes[index]):
            raise RuntimeError(f"The data of the gradient of '{self.name}' must have shape {shape}; got {given}.")
        value = places.dense(index, shown.detach().to(grads.dtype))
        if (held := grads.view(index)) is not shown:
            value = held.copy_(value)
        shown.data, grads.is_suspect, self.master_grad, self.wide = value, True, None, None

    def living_owner(self) -> "Owner":
        """Return the owner.

        Raises:
            RuntimeError: the model was deleted.
        """
        owner = self.owner()
        if owner is None:
            raise RuntimeError(f"The model of '{self.name}' was deleted, and its gradients with it.")
        return owner

    @property
    def has_whole_states(self) -> bool:
        """Whether this rank updates the whole parameter."""
        return self.updater is not None and (self.bucket.spec.updates_all or self.updater == self.bucket.spec.rank)

    @property
    def parameter(self) -> Tensor:
        """The parameter itself."""
        return self.bucket.parameters[self.index]

    @property
    def has_grad(self) -> bool:
        """Whether any rank has a gradient. Collective: if this rank has none, and ranks have not agreed yet."""
        grads = self.bucket.grads
        if not grads.is_known(self.index) and (owner := self.owner()) is not None:
            owner.catch_up()
        return grads.has_grad(self.index)


def _no_owner() -> None:
    return None


def slot_of(parameter: Tensor) -> Slot:
    """Return the slot of a sharded parameter or of its master slice."""
    slot: Slot = parameter.__dict__["_zeroshard"]
    return slot


def keep_shown(slots: Iterable[Slot]) -> None:
    """Hold what code has assigned to `.data` of gradients of these parameters."""
    for slot in slots:
        if slot.grad_view is not None:
            slot.keep_shown()


def let_go(slots: Iterable[Slot]) -> None:
    """Have parameters no optimizer has taken."""
    for slot in slots:
        slot.optimizer, slot.updater = _no_owner, None


def free(slots: Sequence[Slot], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Take parameters from groups that were removed, for a group of `optimizer`; the result undoes it.

    Raises:
        ValueError: an optimizer has a parameter in a group, or one was given twice; nothing has changed.
    """
    held: dict[torch.optim.Optimizer, set[Slot]] = {}
    before: dict[Slot, tuple[Callable[[], torch.optim.Optimizer | None], int | None]] = {}
    for slot in slots:
        if (owner := slot.optimizer()) is not None and owner not in held:
            held[owner] = {slot_of(entry) for group in owner.param_groups for entry in group["params"]}
        if slot in before or (owner is not None and slot in held[owner]):
            raise ValueError(
                f"Parameter '{slot.name}' is in more than one group or optimizer, or twice in one group; each may "
                "update it once."
            )
        before[slot] = slot.optimizer, slot.updater
    for slot in slots:
        owner, slot.optimizer = slot.optimizer(), _no_owner
        if owner is not None and owner is not optimizer:
            slot.updater = None

    def undo() -> None:
        for slot, (taken_by, updater) in before.items():
            slot.optimizer, slot.updater = taken_by, updater

    return undo
