"""The first call of a program: it joins the ranks, and seeds the generators.

Owns the seeds, and how ranks compare texts, and refuse together, before there is a model. Must not read the
environment; `wire/mesh.py` does.
"""

import os
import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from zeroshard import devices
from zeroshard.state.arrival import Wait, ends_by_signal, open_store
from zeroshard.state.places import await_places
from zeroshard.table.errors import RankMismatchError
from zeroshard.torch_private import default_store
from zeroshard.watch.process import is_child_of
from zeroshard.wire.comm import gather_across_ranks
from zeroshard.wire.mesh import Launched, Mesh, backend_of, current_mesh, find_launch, read_local_rank

__all__ = ["accepted_by_all", "check_seconds", "everybody_at", "init", "texts_across_ranks"]

MOST_SECONDS: Final = 1e9
"""Thirty years: longer waits do not fit into every clock of the libraries below."""

NUMPY_SEEDS: Final = 2**32
LEAST_SEED: Final = -(2**63)
MOST_SEEDS: Final = 2**64
"""Of torch's generators."""


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

    With NCCL each rank gets a CUDA device: the one that the program chose (`torch.cuda.set_device`), else that of its
    number on its host (LOCAL_RANK). It is the current one from then on, and the process group is bound to it.

    Returns: the mesh. End with `torch.distributed.destroy_process_group()` where there are several ranks.

    Raises:
        RuntimeError: a torchrun variable is missing or is no number; a rank has not come within `watchdog_s`; the
            process group has fewer ranks than torchrun started, or another backend than the one that is asked for; on
            every rank, where one has no CUDA device of its own.
        ValueError: a limit that is no positive number of seconds; a seed that is no whole number of 64 bits.
        RankMismatchError: on every rank, where seeds differ; no generator was seeded.

    Collective: the rendezvous of the process group, and all-gathers of some bytes; every rank must call.

    ```python
    import zeroshard as zs

    mesh = zs.init(seed=0)
    assert mesh.world_size >= 1
    ```
    """
    check_seconds(watchdog_s=watchdog_s, heartbeat_s=heartbeat_s)
    with ends_by_signal():
        if not dist.is_initialized() and (launched := find_launch()) is not None:
            _join(launched, watchdog_s, heartbeat_s, backend or ("nccl" if devices.count() else "gloo"))
        mesh = current_mesh()
        if backend is not None and dist.is_initialized():
            has, there = backend_of(mesh.device.type), dist.get_backend_config()
            if backend not in (has, there, dist.get_backend()):
                raise RuntimeError(
                    f"zs.init(backend={backend!r}) comes too late: the process group is there, with {there!r}, of "
                    f"which {mesh.device} uses {has!r}. Call zs.init() once, before anything else joins the ranks, or "
                    "leave backend= out."
                )
        if mesh.device.type == "cuda":
            devices.use(mesh.device)
        _check_equal(mesh, seed)
    if seed is not None:
        # The same on all ranks by now, so that all raise.
        if not hasattr(seed, "__index__") or not LEAST_SEED <= seed <= MOST_SEEDS - mesh.world_size:
            raise ValueError(f"{mesh} zs.init(seed=...) takes a whole number of 64 bits, or None; got {seed!r}.")
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
            store = default_store()
            # A limit that is no number of seconds is refused on all ranks, once they are here.
            limits = [limit_s if _is_limit(limit_s) else MOST_SECONDS for limit_s in (watchdog_s, heartbeat_s)]
            wait = Wait(mesh.rank, mesh.world_size, place, *limits)
            await_places(store, wait, mesh.device, dist.get_backend_config())
        yield


def texts_across_ranks(mesh: Mesh, text: str) -> list[str]:
    """Return every rank's text, by rank; one text for one process.

    Args:
        mesh: as `zs.init()` returns it.
        text: of any length, without zero characters at its end.
    Collective: all-gathers of 8 bytes and of the longest text on the default process group; every rank must call.

    ```python
    import zeroshard as zs

    assert zs.texts_across_ranks(zs.init(), "rank 0") == ["rank 0"]
    ```
    """
    data = text.encode()
    # Texts are the host's: where the group has a backend for it, the device need not be idle for them.
    is_hosts = dist.is_initialized() and backend_of("cpu") is not None
    device = torch.device("cpu") if is_hosts else mesh.device
    longest = int(gather_across_ranks(torch.tensor(len(data), device=device)).max())
    if not longest:
        return [""] * mesh.world_size
    row = torch.tensor(list(data.ljust(longest, b"\0")), dtype=torch.uint8, device=device)
    return [bytes(other).rstrip(b"\0").decode() for other in gather_across_ranks(row).tolist()]


def _join(launched: Launched, watchdog_s: float, heartbeat_s: float, backend: str) -> None:
    """Wait for all ranks, and make the default process group."""
    rank, world_size, limit = launched.rank, launched.world_size, timedelta(seconds=watchdog_s)
    wait = Wait(rank, world_size, "zs.init()", watchdog_s, heartbeat_s)
    if launched.has_store:
        store, *_ = next(dist.rendezvous("env://", rank, world_size, timeout=limit))
    else:
        store = open_store(wait, launched.address, launched.port, watchdog_s)
    device = devices.choose("nccl" if "nccl" in backend else None, local_rank=read_local_rank())
    await_places(store, wait, device, backend)
    bound: dict[str, Any] = {}
    if device.type == "cuda":
        # Before the group is made, which may put a context on the current device. The group has its communicator from
        # the start then: a device that will not do shows here, on all ranks, and splits of it need no rendezvous.
        devices.use(device)
        bound["device_id"] = device
    dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=world_size, **bound)
    group = dist.group.WORLD
    assert group is not None  # just made
    weakref.finalize(group, _leave, weakref.ref(group), os.getpid())


def _leave(group: "weakref.ref[dist.ProcessGroup]", process: int) -> None:
    """End, with the interpreter, the process group that `init` made, if there is no other: see `wire/links.py`."""
    if not is_child_of(process) and dist.is_initialized() and dist.group.WORLD is group():
        dist.destroy_process_group()


@contextmanager
def accepted_by_all(mesh: Mesh, what: str) -> Iterator[None]:
    """Raise on every rank if the body, in which a rank checks what it was given, raises on any.

    Args:
        what: who was given it, for messages.

    Raises:
        RankMismatchError: another rank raised; one that raised raises its own error.

    Collective: an all-gather of 8 bytes, and of a text where a rank raised; every rank must enter.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the other ranks wait for this one
        failure = error
    texts = texts_across_ranks(mesh, "" if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if refused := [f"  rank {rank}: {text}" for rank, text in enumerate(texts) if text]:
        raise RankMismatchError(
            f"{mesh} {what} was refused on {len(refused)} of {mesh.world_size} ranks, and so on all:\n"
            + "\n".join(refused)
            + "\nGive every rank the same model, optimizer and arguments."
        )


def check_seconds(**limits: float) -> None:
    """Raise unless each of some named limits is a positive number of seconds."""
    for name, limit_s in limits.items():
        if not _is_limit(limit_s):
            raise ValueError(f"{name} must be a number of seconds above 0 and below {MOST_SECONDS:g}; got {limit_s!r}.")


def _is_limit(limit_s: object) -> bool:
    return isinstance(limit_s, int | float) and not isinstance(limit_s, bool) and 0 < limit_s < MOST_SECONDS


def _check_equal(mesh: Mesh, seed: int | None) -> None:
    """Raise on every rank unless all were given this seed."""
    mine = f"seed={seed if hasattr(seed, '__index__') else repr(seed)}"
    texts = texts_across_ranks(mesh, mine)
    if texts.count(mine) < len(texts):
        given = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
        raise RankMismatchError(
            f"{mesh} zs.init() was given different seeds:\n{given}\n"
            "Give all ranks the same one: each adds its own number to it."
        )
