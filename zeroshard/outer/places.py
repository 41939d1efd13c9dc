"""The ranks of islands: which ranks train by themselves, and which exchange with each other.

Owns the split of a mesh along its axis "replicate", and what islands compare when they are made. It must not know
engines.
"""

import dataclasses
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final, final

import torch

from zeroshard.describe.axes import axes_of
from zeroshard.wire.mesh import Mesh

__all__ = ["Split", "split"]

AXIS: Final = "replicate"


@final
@dataclass(frozen=True)
class Island:
    """The ranks of one island, with the attributes of a DeviceMesh that `describe/axes.py` reads.

    Args:
        mesh: the ranks, with a dimension for each axis.
    """

    mesh: torch.Tensor
    mesh_dim_names: tuple[str, ...]


@final
@dataclass(frozen=True)
class Split:
    """The split of a mesh into islands, as one rank sees it.

    Args:
        asked: what this island's `mesh=` would be.
        own: the ranks of this island, before their axes are known.
        across: this rank and its counterparts on the other islands, in the order of islands.
        launch: all ranks, with their axes.
    """

    asked: Island
    own: Mesh
    across: Mesh
    launch: Mesh


def split(asked: Any, domain: Mesh) -> Split:
    """Split the ranks of `mesh=` into islands, the places along the axis "replicate".

    Args:
        asked: the argument `mesh=`.
        domain: its ranks.

    Raises:
        TypeError, ValueError: the mesh has no islands, or axes that islands cannot have.
    """
    if hasattr(asked, "mesh_dim_names"):
        names, ranks = tuple(asked.mesh_dim_names or ()), asked.mesh.cpu()
        if names and "pipe" in names:
            raise ValueError(
                "outer= does not support an axis 'pipe': islands have the axes 'shard' and 'tensor'. Leave out one."
            )
        axes = tuple(zip(names, tuple(ranks.shape), strict=True)) if AXIS in names else ()
    else:
        # Islands of one rank are useful: they shard nothing, and exchange rarely.
        count = 1 if asked is None else asked
        is_number = isinstance(count, Integral) and not isinstance(count, bool)
        has_islands = is_number and count > 1 and not domain.world_size % count
        axes = ((AXIS, int(count)), ("shard", domain.world_size // int(count))) if has_islands else ()
        if not axes and asked is not None:
            axes_of(asked, domain.world_size)  # raises for what is no number
        names, ranks = (AXIS, "shard"), torch.arange(domain.world_size, device="cpu")
        ranks = ranks.view([size for _, size in axes]) if axes else ranks
    if dict(axes).get(AXIS, 1) < 2:
        raise ValueError(
            f"{domain} outer= needs islands: an axis 'replicate' of at least 2 places in mesh=, such as "
            f"mesh=2 or init_device_mesh(device, (2, n), mesh_dim_names=('replicate', 'shard')); got {asked!r}."
        )
    rows = ranks.movedim(names.index(AXIS), 0)
    island, place = (int(index) for index in (rows.flatten(1) == domain.numbers[domain.rank]).nonzero()[0])
    own = Island(rows[island], tuple(name for name in names if name != AXIS))
    if not own.mesh_dim_names:
        own = Island(rows[island].view(1), ("shard",))
    numbers, counterparts = tuple(own.mesh.flatten().tolist()), tuple(rows.flatten(1)[:, place].tolist())
    return Split(
        own,
        dataclasses.replace(domain, rank=place, world_size=len(numbers), ranks=numbers, island=island),
        dataclasses.replace(domain, rank=island, world_size=len(rows), ranks=counterparts, island=island),
        dataclasses.replace(domain, axes=axes),
    )
