"""NCCL's communicators, which `wire/nccl.py` makes and plans count. Owns which there are."""

from collections.abc import Mapping

__all__ = ["ALL", "BACK", "COPIES", "FORTH", "GATHERS", "PART", "PARTS", "REDUCES", "communicators"]

ALL, GATHERS, REDUCES, COPIES, PARTS, PART = "all", "gathers", "reductions", "copies", "parts", "part"
FORTH, BACK = "activations", "gradients of activations"
"""The communicators of NCCL by name; `PART` is of the ranks that train the same tensors, if these are not all."""


def communicators(axes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Return NCCL's communicators by name, each with the axes along which its ranks lie: none for all ranks.

    Args:
        axes: sizes by name. With "pipe", these are the communicators between places, beside those of each place.
    """
    if axes.get("pipe", 1) > 1:
        return {ALL: (), FORTH: (), BACK: ()}
    made: dict[str, tuple[str, ...]] = {ALL: (), GATHERS: ("shard",), REDUCES: ("shard",)}
    if axes.get("replicate", 1) > 1:
        made[COPIES] = ("replicate",)
    return made | {PARTS: ("tensor",), PART: ("replicate", "shard")} if axes.get("tensor", 1) > 1 else made
