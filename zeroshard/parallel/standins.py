"""Split parameters on the meta device: plain, whole ones stand in for them while initializers run.

Owns the exchange of the two in modules. It must not know units or initializers. An initializer of a whole tensor then
draws the numbers of a model that is not split, and a rank keeps its part of them.
"""

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import nn

from zeroshard.describe.split import like_split
from zeroshard.torch_private import groups_of, has_split, parts_of_groups
from zeroshard.values.materialize import Share

__all__ = ["StandIns"]


@final
class StandIns:
    """The plain parameters in a model's modules, each in the place of a DTensor on the meta device.

    Args:
        share: gives all ranks the values of rank 0.
    """

    def __init__(self, model: nn.Module, share: Share) -> None:
        self._share = share
        self._places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        """By identity of a split parameter: the parameter itself, and what stands in for it."""
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta and has_split([type(parameter)]):
                    self._places.setdefault(id(parameter), []).append((module._parameters, key))
                    if id(parameter) not in self._made:
                        self._made[id(parameter)] = parameter, _plain(parameter)
        for identity, places in self._places.items():
            for own, key in places:
                own[key] = self._made[identity][1]

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what stands in for a parameter, or the parameter itself."""
        return self._made.get(id(parameter), (parameter, parameter))[1]

    def split(self, parameters: Iterable[tuple[str, nn.Parameter]] | None = None) -> None:
        """Give parameters, by name, their parts of the whole values of rank 0, and put them back.

        Args:
            parameters: by default all that are left.

        Collective: a broadcast for each split parameter; every rank must use the same parameters.
        """
        if parameters is None:
            parameters = [("an ignored parameter", parameter) for parameter, _ in self._made.values()]
        for name, parameter in parameters:
            if (found := self._made.pop(id(parameter), None)) is not None:
                whole = found[1].detach()
                del found
                for own, key in self._places.pop(id(parameter)):
                    own[key] = parameter
                self._share(whole, f"the first values of '{name}'")
                _set_part(parameter, whole)
                del whole

    def end(self) -> None:
        """Put all parameters back, without values."""
        for identity, places in self._places.items():
            for own, key in places:
                own[key] = self._made[identity][0]


def _plain(parameter: nn.Parameter) -> nn.Parameter:
    """Return a plain parameter on the meta device of the whole shape, with the attributes of a DTensor."""
    whole = torch.empty_strided(tuple(parameter.shape), parameter.stride(), dtype=parameter.dtype, device="meta")
    made = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def _set_part(parameter: nn.Parameter, whole: torch.Tensor) -> None:
    """Make a DTensor on the meta device, in place, one with this rank's part of `whole`."""
    from torch.distributed.tensor import DTensor  # half a second to import

    assert isinstance(parameter, DTensor)
    mesh, (placement,) = parameter.device_mesh, parameter.placements
    if groups := groups_of(placement):
        dim, ranks, rank = placement.dim % whole.ndim, mesh.size(), mesh.get_local_rank()  # type: ignore[attr-defined]
        parts = whole.chunk(ranks, dim) if groups == 1 else parts_of_groups(whole, dim, groups, ranks)
        # Of whole rows a view, which needs no memory beside the whole.
        whole = parts[rank].contiguous()
    made = nn.Parameter(like_split(whole, parameter), requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, made)
