"""Where one parameter lives, and what it needs of the engine that moves it.

Owns the slot that each sharded parameter and each slice of an optimizer holds. It must not know engines: what they
answer to parameters and gradients is the protocol `Owner`. Read `core/buffer.py` first.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, final

import torch

from zeroshard.core.buffer import Bucket
from zeroshard.core.precision import LossScale
from zeroshard.wire.comm import Comm
from zeroshard.wire.mesh import Mesh

__all__ = ["Form", "Owner", "Slot", "slot_of"]

Tensor = torch.Tensor


class Owner(Protocol):
    """What parameters and gradients ask of their model's engine."""

    mesh: Mesh
    comm: Comm
    loss_scale: LossScale | None
    is_skipping: bool
    unread: Callable[[], None] | None
    copy: slice | list[int]
    """The ranks whose parts make up whole gradients."""

    def learn(self) -> None:
        """Read whether the last update was skipped, where the host does not know."""

    def demand(self, number: int) -> bool:
        """Make a unit whole for code outside its modules; False where no pass is open."""

    def leave_passes(self, what: str) -> None:
        """Raise inside a pass; complete one that an exception left open."""

    def check_outside_backward(self, what: str) -> None:
        """Raise inside a backward."""

    def check_reduced(self, what: str) -> None:
        """Raise if gradients wait for a reduction."""

    def catch_up(self) -> None:
        """Read what ranks told at the end of the last pass."""

    def answer(self, place: str) -> None:
        """Tell the others that this rank answers from gradients that all ranks have summed."""

    def change_gradients(self, what: str, *, is_forgotten: bool = False) -> None:
        """Prepare for a change of gradients by user code; raise inside a backward."""

    def norms(self, p: float, dtype: torch.dtype | None = None) -> Tensor:
        """Return (parameters,) fp64: the p-norm of every parameter's whole gradient, by place. Collective."""

    def full_gradient(self, slot: "Slot") -> Tensor:
        """Return a parameter's whole gradient. Collective."""


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
    def classes(self) -> tuple[type[torch.nn.Parameter], type[torch.nn.Parameter]]:
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
class Slot:
    """Where one parameter lives: its bucket and its place there. Held by the parameter object itself."""

    __slots__ = tuple(
        "bucket crosses form grad_view has_master index is_own is_whole master_grad name owner place shape spare "
        "stride unit updater wide".split()
    )

    def __init__(self, name: str, unit: int, bucket: Bucket, index: int, form: Form, parameter: Tensor) -> None:
        self.name, self.unit, self.bucket, self.index, self.form = name, unit, bucket, index, form
        # Asked of a released parameter these would be calls of Python.
        self.shape, self.stride = parameter.shape, parameter.stride()
        spec, is_apart = bucket.spec, index < bucket.spec.apart_gradients
        self.is_whole = spec.holds_whole_gradients and spec.updates_all and not (form.has_axis or is_apart)
        """Whether what this rank holds of its reduced gradient, and updates with, is all of it."""
        start, stop = bucket.layout.overlap(index, *spec.shard)
        self.is_own = form.is_counted and stop > start
        """Whether norms count elements of it on this rank."""
        self.crosses = index < spec.apart and not is_apart and bucket.device.type != "cpu"
        """Whether its gradient is held in another memory than its states."""
        self.place = 0
        """Among the parameters of the model."""
        self.owner: Callable[[], Owner | None] = _no_owner
        """A weak reference: parameters must not keep alive what holds them."""
        self.has_master = False
        self.updater: int | None = None
        """The place, among the ranks of a copy, of the one that updates all of it; None where each updates its own."""
        self.grad_view: Tensor | None = None
        self.spare: Tensor | None = None
        """A logical gradient that nobody else holds, for the next step."""
        self.master_grad: Tensor | None = None
        self.wide: tuple[int, Tensor] | None = None
        """The master's gradient in the dtype of the update, and the version of what is held that it was made of."""

    def living_owner(self) -> "Owner":
        """Return the owner.

        Raises:
            RuntimeError: the model is gone.
        """
        owner = self.owner()
        if owner is None:
            raise RuntimeError(f"The model of '{self.name}' was deleted; its gradients are gone.")
        return owner

    @property
    def has_whole_states(self) -> bool:
        """Whether the parameter is updated whole, and by this rank."""
        return self.updater is not None and (self.bucket.spec.updates_all or self.updater == self.bucket.spec.rank)

    @property
    def parameter(self) -> Tensor:
        """The parameter itself."""
        return self.bucket.parameters[self.index]

    @property
    def has_grad(self) -> bool:
        """Whether some rank has a gradient. Collective: where this rank has none, and ranks have yet to agree."""
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
