"""The argument `mesh=`, and the axes of the ranks that follow from it.

Owns the names of axes and their checks. Imports no torch, because plans of shapes read the same argument: a DeviceMesh
is known by its attributes. `wire/mesh.py` has the ranks along the axes.
"""

from numbers import Integral
from typing import Any

__all__ = ["axes_of", "check_count", "ranks_of"]

AXES = ("replicate", "shard", "tensor", "pipe")
"""The names of axes of a mesh."""
NUMBERED = ("tensor", "pipe")
"""Axes of which code asks for the place of a rank: DTensor for its part, a program for its place of a pipe."""

Axes = tuple[tuple[str, int], ...]
"""Name and size of each axis, the last over neighbouring ranks."""


def axes_of(asked: Any, world_size: int, tensor: int = 1) -> Axes:
    """Return the axes of the ranks of a run.

    Args:
        asked: a DeviceMesh, a number of replicas of the sharded state, or None for one replica.
        tensor: number of ranks of tensor parallelism, beside a number of replicas.

    Raises:
        TypeError: `asked` is neither a DeviceMesh nor a number.
        ValueError: the axes do not match the ranks, or leave no ranks to shard over.
    """
    axes = _axes_of_mesh(asked, world_size, tensor) if hasattr(asked, "mesh_dim_names") else None
    if axes is None:
        if asked is not None and (isinstance(asked, bool) or not isinstance(asked, Integral)):
            raise TypeError(f"mesh must be a DeviceMesh or a number of replicas; got {asked!r}.")
        replicas = 1 if asked is None else check_count("mesh", asked)
        if world_size % (replicas * tensor):
            divided = f"tensor={tensor} ranks times " * (tensor > 1) + f"{replicas} replicas"
            raise ValueError(f"{divided} must divide the {world_size} rank(s).")
        axes = (("replicate", replicas), ("shard", world_size // (replicas * tensor)))
        axes += (("tensor", tensor),) if tensor > 1 else ()
    if world_size > dict(axes).get("pipe", 1) and dict(axes).get("shard", 1) == dict(axes).get("tensor", 1) == 1:
        sizes = ", ".join(f"{name} {size}" for name, size in axes)
        raise ValueError(
            f"The axes ({sizes}) of {world_size} ranks leave one rank per replica, so nothing would be sharded. "
            "Leave out replicas= or call the axis 'shard': over it stage=0 replicates, as plain data parallelism does."
        )
    return axes


def ranks_of(asked: Any, launched: int) -> tuple[int, ...]:
    """Return the ranks of the process group that the argument `mesh=` has, in its order.

    Args:
        launched: the number of ranks of the process group.

    Raises:
        ValueError: a DeviceMesh has a rank twice, or a rank that the process group has not; or torch would number the
            places along an axis otherwise.
    """
    if not hasattr(asked, "mesh_dim_names"):
        return tuple(range(launched))
    ranks = tuple(asked.mesh.flatten().tolist())
    for rank in ranks:
        if ranks.count(rank) > 1 or not 0 <= rank < launched:
            why = "twice" if 0 <= rank < launched else f"and the process group has the ranks 0 to {launched - 1}"
            raise ValueError(f"mesh= has rank {rank}, {why}: its ranks are {ranks}. Give each rank of the model once.")
    for axis in [one for one in NUMBERED if one in (asked.mesh_dim_names or ())]:
        along = asked.mesh.movedim(asked.mesh_dim_names.index(axis), -1)
        for row in along.reshape(-1, along.shape[-1]).tolist():
            if row != sorted(row):
                raise ValueError(
                    f"mesh= has ranks {row} along '{axis}', where torch's process groups number places by ascending "
                    "ranks: parts of parameters, or places of a pipe, would be those of other ranks. Sort the ranks "
                    f"along '{axis}'."
                )
    return ranks


def check_count(name: str, value: Any) -> int:
    """Return a count of at least 1 as an integer of Python.

    Args:
        name: the argument that has the count.

    Raises:
        TypeError: the value is not an integer.
        ValueError: the value is below 1.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")
    return int(value)


def _axes_of_mesh(device_mesh: Any, world_size: int, tensor: int) -> Axes:
    names, sizes = device_mesh.mesh_dim_names or (), tuple(device_mesh.mesh.shape)
    if not names or not set(names) <= set(AXES):
        raise ValueError(
            f"mesh= takes axes named {', '.join(AXES)}; got {names or 'no names'}. Create it with "
            "init_device_mesh(device, sizes, mesh_dim_names=('shard', 'tensor'))."
        )
    if (count := device_mesh.mesh.numel()) != world_size:
        raise ValueError(
            f"mesh= must have as many ranks as the run, {world_size}; got axes {names} of sizes {sizes}, {count} ranks."
        )
    axes = tuple(zip(names, sizes, strict=True))
    if tensor not in (1, split_over := dict(axes).get("tensor", 1)):
        raise ValueError(f"tensor={tensor}, but mesh= has {split_over} rank(s) along 'tensor'. Leave tensor= out.")
    return axes
