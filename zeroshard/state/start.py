"""The first call of a program: it joins the ranks, and seeds the generators.

Owns the seeds, and how ranks compare texts before there is a model. Must not read the environment; `core/mesh.py` does.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import numpy as np
import torch
import torch.distributed as dist

from zeroshard.core.comm import gather_across_ranks
from zeroshard.core.errors import RankMismatchError
from zeroshard.core.mesh import Launched, Mesh, current_mesh, find_launch
from zeroshard.state.arrival import Wait, await_ranks, ends_by_signal, open_store

__all__ = ["everybody_at", "init", "texts_across_ranks"]

NUMPY_SEEDS: Final = 2**32


def init(
    seed: int | None = None, *, watchdog_s: float = 600.0, heartbeat_s: float = 30.0, backend: str | None = None
) -> Mesh:
    """Join the ranks that torchrun started; do nothing but choose device and seeds for one process.

    Until all ranks have joined, SIGINT and SIGTERM end the process at once, whatever their handlers are; these are
    there again when this returns.

    Args:
        seed: the same on all ranks. Rank r seeds torch, numpy and random with `seed + r`, so that ranks draw different
            dropout masks; the parameters come from rank 0 in any case. None leaves the generators alone.
        watchdog_s: seconds after which a wait for another rank is an error.
        heartbeat_s: seconds after which the ranks that have come log which have not, as a warning, and wait on.
        backend: "nccl" or "gloo"; by default NCCL where CUDA is available, else gloo.

    Returns: the mesh. End with `torch.distributed.destroy_process_group()` where there are several ranks.

    Raises:
        RuntimeError: a torchrun variable is missing or is no number, or a rank has not come within `watchdog_s`.
        RankMismatchError: on every rank, where seeds differ; no generator was seeded.

    Collective: the rendezvous of the process group, and all-gathers of some bytes; every rank must call.

    ```python
    import zeroshard as zs

    mesh = zs.init(seed=0)
    assert mesh.world_size >= 1
    ```
    """
    with ends_by_signal():
        if (launched := find_launch()) is not None and not dist.is_initialized():
            _join(launched, watchdog_s, heartbeat_s, backend or ("nccl" if torch.cuda.is_available() else "gloo"))
        mesh = current_mesh()
        if mesh.device.type == "cuda":
            torch.cuda.set_device(mesh.device)
        _check_equal(mesh, seed)
    if seed is not None:
        torch.manual_seed(seed + mesh.rank)
        np.random.seed((seed + mesh.rank) % NUMPY_SEEDS)
        random.seed(seed + mesh.rank)
    return mesh


@contextmanager
def everybody_at(place: str, mesh: Mesh, watchdog_s: float, heartbeat_s: float) -> Iterator[None]:
    """Wait until all ranks have come, and have a signal end this process until what is done inside is done.

    Raises:
        RuntimeError: a rank has not come within the limit.

    Collective: requests to the store; every rank must call.
    """
    with ends_by_signal():
        if mesh.world_size > 1:
            store = dist.distributed_c10d._get_default_store()
            await_ranks(store, Wait(mesh.rank, mesh.world_size, place, watchdog_s, heartbeat_s))
        yield


def texts_across_ranks(mesh: Mesh, text: str) -> list[str]:
    """Return every rank's text, by rank. Collective: all-gathers of 8 bytes and of the longest text."""
    data = text.encode()
    longest = int(gather_across_ranks(torch.tensor(len(data), device=mesh.device)).max())
    row = torch.tensor(list(data.ljust(longest, b"\0")), dtype=torch.uint8, device=mesh.device)
    return [bytes(other).rstrip(b"\0").decode() for other in gather_across_ranks(row).tolist()]


def _join(launched: Launched, watchdog_s: float, heartbeat_s: float, backend: str) -> None:
    """Wait for all ranks, and make the default process group."""
    rank, world_size, limit = launched.rank, launched.world_size, timedelta(seconds=watchdog_s)
    wait = Wait(rank, world_size, "zs.init()", watchdog_s, heartbeat_s)
    if launched.has_store:
        store, *_ = next(dist.rendezvous("env://", rank, world_size, timeout=limit))
    else:
        store = open_store(wait, launched.address, launched.port, watchdog_s)
    await_ranks(store, wait)
    dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=world_size)


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
