"""Parameters that torch split over a tensor axis: their local parts, and the supported placements.

Owns the reading of DTensors that the engine (`parallel/tensor.py`) and predictions share. It must not know processes.
The import of torch's DTensor takes half a second, so this module does not import it before a DTensor exists.
"""

from typing import Any

from torch import Tensor, nn

from zeroshard.torch_private import groups_of, has_split, local_of

__all__ = ["check_buffers", "check_placement", "like_split", "local_numel", "split_parameters"]


def split_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are DTensors, by name."""
    return {name: one for name, one in model.named_parameters() if has_split([type(one)])}


def local_numel(parameter: Tensor) -> int:
    """Return the number of elements of a parameter on this rank."""
    return local_of(parameter).numel()


def like_split(local: Tensor, like: Tensor) -> Tensor:
    """Return a DTensor with the placement of `like`, from the local part of this rank."""
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def check_buffers(model: nn.Module) -> None:
    """Raise if a buffer is a DTensor.

    Raises:
        ValueError: a buffer is a DTensor.
    """
    for name, buffer in model.named_buffers():
        if has_split([type(buffer)]):
            raise ValueError(f"Buffer '{name}' is a DTensor; only parameters can be. Replace it with a plain tensor.")


def check_placement(name: str, parameter: Tensor, ranks: int) -> None:
    """Raise unless a DTensor is split over an axis, with a part on each rank, or replicated.

    Args:
        name: name of the parameter.
        ranks: number of ranks of the axis.

    Raises:
        ValueError: the DTensor has another placement.
    """
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    placement: Any = parameter.placements[0]
    groups = groups_of(placement)
    if not groups:
        if placement.is_replicate():
            return
        raise ValueError(f"Parameter '{name}' has placement {placement}; zeroshard supports shards and replicas.")
    dim, size = placement.dim, parameter.shape[placement.dim]
    step = -(-size // ranks)
    if groups > 1 and size % (groups * ranks):
        fault = f"has {size} indices of dimension {dim} in {groups} groups, which {ranks} ranks do not divide"
    elif size and (without := ranks - -(-size // step)):
        where = f"of the {size} indices of dimension {dim}"
        fault = f"has no part for {without} of {ranks} ranks: torch gives each up to {step} {where}"
    else:
        return
    raise ValueError(
        f"Parameter '{name}' {tuple(parameter.shape)} {fault}. Remove the layer from the parallelize plan, or split "
        "over fewer ranks."
    )
