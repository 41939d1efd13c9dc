"""The first call of a program: it joins the ranks, and seeds the generators.

Owns the seeds, and how ranks compare texts before there is a model. Must not read the environment; `core/mesh.py` does.
"""

import random
from typing import Final

import numpy as np
import torch

from zeroshard.core.comm import gather_across_ranks
from zeroshard.core.errors import RankMismatchError
from zeroshard.core.mesh import Mesh, join

__all__ = ["init", "texts_across_ranks"]

NUMPY_SEEDS: Final = 2**32


def init(seed: int | None = None, *, watchdog_s: float = 600.0, backend: str | None = None) -> Mesh:
    """Join the ranks that torchrun started; do nothing but choose device and seeds for one process.

    Args:
        seed: the same on all ranks. Rank r seeds torch, numpy and random with `seed + r`, so that ranks draw different
            dropout masks; the parameters come from rank 0 in any case. None leaves the generators alone.
        watchdog_s: seconds after which a wait for another rank is an error.
        backend: "nccl" or "gloo"; by default NCCL where CUDA is available, else gloo.

    Returns: the mesh. End with `torch.distributed.destroy_process_group()` where there are several ranks.

    Raises:
        RuntimeError: a torchrun variable is missing or is no number.
        RankMismatchError: on every rank, where seeds differ; no generator was seeded.

    Collective: the rendezvous of the process group, and all-gathers of some bytes; every rank must call.

    ```python
    import zeroshard as zs

    mesh = zs.init(seed=0)
    assert mesh.world_size >= 1
    ```
    """
    mesh = join(watchdog_s, backend)
    _check_equal(mesh, seed)
    if seed is not None:
        torch.manual_seed(seed + mesh.rank)
        np.random.seed((seed + mesh.rank) % NUMPY_SEEDS)
        random.seed(seed + mesh.rank)
    return mesh


def texts_across_ranks(mesh: Mesh, text: str) -> list[str]:
    """Return every rank's text, by rank. Collective: all-gathers of 8 bytes and of the longest text."""
    data = text.encode()
    longest = int(gather_across_ranks(torch.tensor(len(data), device=mesh.device)).max())
    row = torch.tensor(list(data.ljust(longest, b"\0")), dtype=torch.uint8, device=mesh.device)
    return [bytes(other).rstrip(b"\0").decode() for other in gather_across_ranks(row).tolist()]


def _check_equal(mesh: Mesh, seed: int | None) -> None:
    """Raise on every rank unless all were given this seed."""
    mine = f"seed={seed}"
    texts = texts_across_ranks(mesh, mine)
    if texts.count(mine) < len(texts):
        given = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
        raise RankMismatchError(
            f"{mesh} zs.init() was given different seeds:\n{given}\n"
            "Give all ranks the same one: each adds its own number to it."
        )
