"""`zs.init()`, which creates the process group and seeds the random generators.

Owns the seeds, and the comparison of texts and joint errors of ranks before a model exists. It must not read the
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
from torch.distributed.device_mesh import DeviceMesh

from zeroshard import devices
from zeroshard.join.arrival import Wait, ends_by_signal, open_store, tell_meeting
from zeroshard.join.places import await_places
from zeroshard.join.restarts import part_of_this_start
from zeroshard.table.errors import RankMismatchError
from zeroshard.torch_groups import default_store
from zeroshard.watch import descriptors
from zeroshard.watch.cause_file import CauseFile
from zeroshard.watch.process import is_child_of
from zeroshard.wire.comm import gather_across_ranks
from zeroshard.wire.mesh import (
    Launched,
    Mesh,
    backend_of,
    current_mesh,
    find_launch,
    read_error_file,
    read_int,
    read_local_rank,
)

__all__ = ["accepted_by_all", "check_seconds", "everybody_at", "init", "texts_across_ranks", "told_to_others"]

MOST_SECONDS: Final = 1e9
"""Thirty years: the clocks of some libraries overflow with longer waits."""

NUMPY_SEEDS: Final = 2**32
LEAST_SEED: Final = -(2**63)
MOST_SEEDS: Final = 2**64
"""Of torch's generators."""


def init(
    seed: int | None = None, *, watchdog_s: float = 600.0, heartbeat_s: float = 30.0, backend: str | None = None
) -> Mesh:
    """Create the process group of the ranks that torchrun started, choose the device, and seed the generators.

    One process needs no process group. Until all ranks have joined, SIGINT and SIGTERM end the process at once; their
    handlers are restored afterwards.

    Args:
        seed: equal on all ranks. Rank r seeds torch, numpy and random with `seed + r`, so that ranks draw different
            dropout masks; `shard` takes parameters from rank 0 in any case. None does not seed.
        watchdog_s: seconds after which a wait for another rank raises an error.
        heartbeat_s: seconds after which the ranks that have joined log a warning that names the others, and continue to
            wait.
        backend: "nccl" or "gloo"; by default NCCL if CUDA is available, else gloo.

    With NCCL, each rank gets a CUDA device: the device of `torch.cuda.set_device`, else the device with the rank's
    number on its host (LOCAL_RANK). It becomes the current device, and the process group is bound to it.

    Returns: the mesh. With several ranks, call `torch.distributed.destroy_process_group()` at the end.

    Raises:
        RuntimeError: a torchrun variable is missing or is not a number; a rank has not joined within `watchdog_s`; an
            existing process group has fewer ranks than torchrun started, or another backend than requested; or (on
            every rank) a rank has no separate CUDA device.
        ValueError: a limit is not a positive number of seconds, or `seed` is not a 64-bit integer.
        RankMismatchError: on every rank, if seeds differ; no generator was seeded.

    Collective: the rendezvous of the process group, and all-gathers of a few bytes; every rank must call.

    ```python
    import zeroshard as zs

    mesh = zs.init(seed=0)
    assert mesh.world_size >= 1
    ```
    """
    check_seconds(watchdog_s=watchdog_s, heartbeat_s=heartbeat_s)
    CauseFile.install(*read_error_file())
    with ends_by_signal():
        if not dist.is_initialized():
            _refuse_other_launcher()
            if (launched := find_launch()) is not None:
                _join(launched, watchdog_s, heartbeat_s, backend or ("nccl" if devices.count() else "gloo"))
        mesh = current_mesh()
        if backend is not None and dist.is_initialized():
            has, there = backend_of(mesh.device.type), dist.get_backend_config()
            if backend not in (has, there, dist.get_backend()):
                raise RuntimeError(
                    f"zs.init(backend={backend!r}) comes too late: a process group exists, with {there!r}, of which "
                    f"{mesh.device} uses {has!r}. Call zs.init() once, before any other code creates a process group, "
                    "or leave backend= out."
                )
        if mesh.device.type == "cuda":
            devices.use(mesh.device)
        _check_equal(mesh, seed)
    if seed is not None:
        # Equal on all ranks at this point, so all raise.
        if not hasattr(seed, "__index__") or not LEAST_SEED <= seed <= MOST_SEEDS - mesh.world_size:
            raise ValueError(f"{mesh} zs.init(seed=...) takes a 64-bit integer or None; got {seed!r}.")
        torch.manual_seed(seed + mesh.rank)
        np.random.seed((seed + mesh.rank) % NUMPY_SEEDS)
        random.seed(seed + mesh.rank)
    return mesh


@contextmanager
def everybody_at(place: str, mesh: Mesh, watchdog_s: float, heartbeat_s: float) -> Iterator[None]:
    """Wait until all ranks arrive; until the end of the context, signals end this process at once.

    Raises:
        RuntimeError: a rank has not arrived within the limit.

    Collective: requests to the store; every rank must call.
    """
    CauseFile.install(*read_error_file())
    with ends_by_signal():
        if mesh.world_size > 1:
            store = default_store()
            # An invalid limit raises on all ranks, after they have arrived.
            limits = [limit_s if _is_limit(limit_s) else MOST_SECONDS for limit_s in (watchdog_s, heartbeat_s)]
            wait = Wait(mesh.numbers[mesh.rank], mesh.numbers, str(mesh), place, *limits)
            files = descriptors.of_model(mesh.world_size, read_int("LOCAL_WORLD_SIZE", mesh.world_size))
            await_places(store, wait, mesh.device, dist.get_backend_config(), files)
        yield


@contextmanager
def told_to_others(mesh: Mesh) -> Iterator[None]:
    """Tell the ranks that wait for this one in `zs.shard()` that it was refused its `mesh=`, and so comes not."""
    try:
        yield
    except ValueError as error:
        if mesh.world_size > 1:
            tell_meeting(default_store(), mesh.rank, str(error))
        raise


def texts_across_ranks(mesh: Mesh | DeviceMesh, text: str) -> list[str]:
    """Return the texts of all ranks, by rank; a list of one text for one process.

    Args:
        mesh: the result of `zs.init()`, for all ranks, or the ranks that take part, as in `gather_across_ranks`.
        text: any text without trailing zero characters.

    Collective: all-gathers of 8 bytes and of the longest text; every rank of the mesh must call.

    ```python
    import zeroshard as zs
    from zeroshard.join.start import texts_across_ranks

    assert texts_across_ranks(zs.init(), "rank 0") == ["rank 0"]
    ```
    """
    data = text.encode()
    # Texts are in host memory: a backend for the host avoids a wait for the device.
    device = torch.device("cpu")
    if isinstance(mesh, Mesh) and not mesh.ranks and dist.is_initialized() and backend_of("cpu") is None:
        device = mesh.device  # the default process group, which has no backend for the host
    lengths = gather_across_ranks(torch.tensor(len(data), device=device), mesh)
    row = torch.tensor(list(data.ljust(int(lengths.max()), b"\0")), dtype=torch.uint8, device=device)
    rows = gather_across_ranks(row, mesh).tolist() if len(row) else [[]] * len(lengths)
    return [bytes(other).rstrip(b"\0").decode() for other in rows]


def _join(launched: Launched, watchdog_s: float, heartbeat_s: float, backend: str) -> None:
    """Wait for all ranks, and create the default process group."""
    rank, world_size, limit = launched.rank, launched.world_size, timedelta(seconds=watchdog_s)
    wait = Wait(rank, range(world_size), f"[rank {rank}/{world_size}]", "zs.init()", watchdog_s, heartbeat_s)
    if launched.has_store:
        store, *_ = next(dist.rendezvous("env://", rank, world_size, timeout=limit))
        store = part_of_this_start(store, wait)
    else:
        store = open_store(wait, launched.address, launched.port, watchdog_s)
    device = devices.choose("nccl" if "nccl" in backend else None, local_rank=read_local_rank())
    files = descriptors.of_start(world_size, hosts_store=not launched.has_store and rank == 0)
    await_places(store, wait, device, backend, files)
    bound: dict[str, Any] = {}
    if device.type == "cuda":
        # Before the group is created, which may create a context on the current device. With a device, the group
        # creates its communicator at once: an unusable device raises here on all ranks, and splits need no rendezvous.
        devices.use(device)
        bound["device_id"] = device
    dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=world_size, **bound)
    group = dist.group.WORLD
    assert group is not None  # just made
    weakref.finalize(group, _leave, weakref.ref(group), os.getpid())


def _leave(group: "weakref.ref[dist.ProcessGroup]", process: int) -> None:
    """Destroy the process group of `init` at interpreter exit, if it is the only one: see `wire/links.py`."""
    if not is_child_of(process) and dist.is_initialized() and dist.group.WORLD is group():
        dist.destroy_process_group()


@contextmanager
def accepted_by_all(mesh: Mesh, what: str) -> Iterator[None]:
    """Raise on every rank if the body, which checks arguments, raises on any rank.

    Args:
        what: the call whose arguments are checked, for errors.

    Raises:
        RankMismatchError: another rank raised. A rank whose body raises raises that error.

    Collective: an all-gather of 8 bytes, and of a text if a rank raised; every rank must enter.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # any error: the other ranks wait for this rank
        failure = error
    texts = texts_across_ranks(mesh, "" if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if refused := len(texts) - texts.count(""):
        raise RankMismatchError.of_another(
            f"{mesh} {what} was rejected on {refused} of {mesh.world_size} ranks, and therefore on all:\n"
            f"{mesh.lines(texts)}\nGive every rank the same model, optimizer and arguments."
        )


def check_seconds(**limits: float) -> None:
    """Raise unless each limit is a positive number of seconds."""
    for name, limit_s in limits.items():
        if not _is_limit(limit_s):
            raise ValueError(f"{name} must be a number of seconds above 0 and below {MOST_SECONDS:g}; got {limit_s!r}.")


def _is_limit(limit_s: object) -> bool:
    return isinstance(limit_s, int | float) and not isinstance(limit_s, bool) and 0 < limit_s < MOST_SECONDS


def _check_equal(mesh: Mesh, seed: int | None) -> None:
    """Raise on every rank unless all have the same seed."""
    mine = f"seed={seed if hasattr(seed, '__index__') else repr(seed)}"
    texts = texts_across_ranks(mesh, mine)
    if texts.count(mine) < len(texts):
        raise RankMismatchError(
            f"{mesh} zs.init() was given different seeds:\n{mesh.lines(texts)}\n"
            "Give all ranks the same seed: each rank adds its number to it."
        )


def _refuse_other_launcher() -> None:
    """Raise RuntimeError if srun or mpirun started several processes, each of which would train alone."""
    if read_int("WORLD_SIZE", 0):
        return
    for size, rank in (
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
    ):
        if (count := read_int(size, 1)) > 1:
            raise RuntimeError(
                f"{size} is {count}, and WORLD_SIZE is not set: {count} processes were started, and each would train "
                f"apart from the others (this is {rank}={read_int(rank, 0)}). Start one torchrun a node, such as "
                "`srun --ntasks-per-node=1 torchrun --nnodes ... your_script.py`, or set RANK, WORLD_SIZE, LOCAL_RANK, "
                "MASTER_ADDR and MASTER_PORT for each process. WORLD_SIZE=1 is for processes that train alone."
            )
