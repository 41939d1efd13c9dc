"""Tensor parallelism: DTensor parameters of `torch.distributed.tensor.parallel.parallelize_module`.

Owns the checks of DTensors that can be sharded, and the relation of a DTensor and its local tensor. The engine shards
local tensors and knows only these. The import takes half a second in torch, so only `handle.py` imports this module,
for a mesh with an axis "tensor". Read `core/parameter.py` (`Form`) first.

Note: gradients
    When a DTensor's gradient is complete, it is redistributed to its parameter's placements; that communicates only if
    torch left a pending sum. The gradient of a plain parameter is used unchanged: each rank along the axis computes the
    same gradient, and torch sums over the axis at the input of a parallel layer. A plain parameter that is applied to
    only a part of the activations (between sequence-parallel layers) must be a DTensor, as `SequenceParallel` makes it.
"""

import weakref
from typing import Any, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from zeroshard.core.parameter import PlainForm, ReleasedParameter, ShardedParameter, demand
from zeroshard.core.slot import Form
from zeroshard.describe.split import check_buffers, check_placement
from zeroshard.torch_checks import check_dtensor
from zeroshard.torch_private import groups_of, raw_local, set_local
from zeroshard.wire.mesh import Mesh

__all__ = ["forms_of"]

Tensor = torch.Tensor


class ShardedDTensor(ShardedParameter, DTensor):
    """A DTensor parameter whose local values are currently in its unit's bucket."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> DTensor:
        """Return what torch.compile traces in place of a parameter; it has no slot.

        Compiled code asserts that its arguments have the classes that it was traced with.
        """
        traced: DTensor = DTensor.__tensor_unflatten__(inner, context, size, stride)
        traced.__class__ = ShardedDTensor
        return traced

    @property
    def grad(self) -> Tensor | None:
        """See `ShardedParameter`."""
        found: Tensor | None = self._property.__get__(self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._property.__set__(self, value)

    @property
    def _property(self) -> Any:
        return ShardedParameter.grad if "_zeroshard" in self.__dict__ else Tensor.grad


@final
class ReleasedDTensor(ReleasedParameter, ShardedDTensor):
    """A DTensor parameter whose local values are currently distributed over the ranks."""

    @property
    def _local_tensor(self) -> Tensor:  # type: ignore[override]
        # `__torch_function__` handles operations; DTensor's own methods read this property.
        demand(self, "to_local")
        return raw_local(self)


@final
class DTensorForm(Form):
    """A parameter that torch splits or replicates over the tensor axis."""

    def __init__(self, parameter: DTensor, *, is_first: bool) -> None:
        is_alike = all(isinstance(one, Replicate) for one in parameter.placements)
        super().__init__(has_axis=True, is_alike=is_alike, is_first=is_first)
        self.groups = max(1, *map(groups_of, parameter.placements))
        self._mesh, self._placements = parameter.device_mesh, parameter.placements
        self._shape, self._stride = parameter.shape, parameter.stride()
        self._guard: weakref.ref[Tensor] | None = None

    @property
    def classes(self) -> tuple[type[ShardedParameter], type[ShardedParameter]]:
        """The two classes of this module."""
        return ShardedDTensor, ReleasedDTensor

    @property
    def plain(self) -> type[Tensor]:
        """See `Form`."""
        return DTensor

    def part(self, tensor: Tensor) -> Tensor:
        """Return the local tensor in the parameter's placements. Collective: only if a redistribution is pending."""
        if not isinstance(tensor, DTensor):
            if tensor.shape == self._shape and not self.is_alike:
                raise ValueError(
                    f"Expected a DTensor with placements {self._placements}, as the parameter has, but got a plain "
                    f"tensor of shape {tuple(tensor.shape)}. Convert it with "
                    "distribute_tensor(tensor, parameter.device_mesh, parameter.placements)."
                )
            return tensor
        with torch.no_grad():
            return tensor.redistribute(placements=self._placements).to_local()

    def join(self, part: Tensor) -> DTensor:
        """Return the DTensor with the local tensor `part`."""
        return DTensor.from_local(
            part, self._mesh, self._placements, run_check=False, shape=self._shape, stride=self._stride
        )

    def whole(self, part: Tensor) -> Tensor:
        """Return the full tensor. Collective: all-gather along the tensor axis."""
        with torch.no_grad():
            whole: Tensor = self.join(part).full_tensor()
        return whole

    def point(self, parameter: Tensor, part: Tensor) -> None:
        """Make `part` the local tensor."""
        assert isinstance(parameter, DTensor)
        # model.to() and half() swap the inner tensors of a DTensor; torch refuses that if a weak reference exists.
        self._guard = weakref.ref(parameter)
        joined = self.join(part.detach())
        parameter.data = joined  # sets only the dtype
        # The local tensor counts its own changes, as `.data` of a plain parameter does: a gather writes the bucket.
        set_local(parameter, part.data, joined)


def forms_of(model: nn.Module, mesh: Mesh) -> dict[int, Form]:
    """Return the form of each parameter that torch split over the mesh's tensor axis, by identity.

    Raises:
        ValueError: a DTensor has another layout; the message names it.
    """
    check_buffers(model)
    is_first = mesh.tensor_ranks[0] == mesh.rank
    plain = PlainForm(has_axis=True, is_alike=True, is_first=is_first)
    forms: dict[int, Form] = {}
    for name, parameter in model.named_parameters():
        forms[id(parameter)] = plain
        if isinstance(parameter, DTensor):
            _check(name, parameter, mesh)
            check_dtensor(parameter)
            forms[id(parameter)] = DTensorForm(parameter, is_first=is_first)
    return forms


def _check(name: str, parameter: DTensor, mesh: Mesh) -> None:
    """Raise ValueError unless a DTensor is split equally over the mesh's tensor axis."""
    ranks = tuple(parameter.device_mesh.mesh.flatten().tolist())
    own = tuple(mesh.numbers[rank] for rank in mesh.tensor_ranks)
    if ranks != own or len(parameter.placements) != 1:
        raise ValueError(
            f"{mesh} Parameter '{name}' is a DTensor over ranks {ranks}, and the axis 'tensor' of mesh= has "
            f"{own} here. Pass to zs.shard() the mesh whose mesh['tensor'] parallelize_module() used, "
            "and do not call fully_shard(), which zs.shard() replaces."
        )
    check_placement(name, parameter, len(ranks))
