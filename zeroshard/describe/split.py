"""Parameters that torch split over a tensor axis: what a rank has of them, and what cannot be sharded.

Owns the reading of DTensors that the engine (`parallel/tensor.py`) and predictions have in common. Must not know
processes. Torch's DTensor takes half a second to import, so nothing here imports it before there is one.
"""

from torch import Tensor, nn

from zeroshard.torch_private import has_split, local_of

__all__ = ["check_buffers", "check_placement", "like_split", "local_numel", "split_parameters"]


def split_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are DTensors, by name."""
    return {name: one for name, one in model.named_parameters() if has_split([type(one)])}


def local_numel(parameter: Tensor) -> int:
    """Return the elements of a parameter that this rank has."""
    return local_of(parameter).numel()


def like_split(local: Tensor, like: Tensor) -> Tensor:
    """Return the DTensor that lies as `like` does, and of which `local` is this rank's part."""
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def check_buffers(model: nn.Module) -> None:
    """Raise where a buffer is a DTensor.

    Raises:
        ValueError: one is.
    """
    for name, buffer in model.named_buffers():
        if has_split([type(buffer)]):
            raise ValueError(f"Buffer '{name}' is a DTensor; only parameters can be. Replace it by a plain tensor.")


def check_placement(name: str, parameter: Tensor, ranks: int) -> None:
    """Raise unless a DTensor lies in equal parts over an axis, or whole on each of its ranks.

    Args:
        name: of the parameter.
        ranks: of the axis.

    Raises:
        ValueError: it lies otherwise.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    assert isinstance(parameter, DTensor)
    (placement,) = parameter.placements
    if type(placement) not in (Shard, Replicate):
        raise ValueError(f"Parameter '{name}' has placement {placement}; DTensors can be Shard or Replicate.")
    if isinstance(placement, Shard) and parameter.shape[placement.dim] % ranks:
        raise ValueError(
            f"Parameter '{name}' {tuple(parameter.shape)} does not fall into {ranks} equal parts along dimension "
            f"{placement.dim}, so ranks would have buckets of different sizes. Pad that dimension to a multiple of "
            f"{ranks}, or leave the layer out of the plan."
        )
