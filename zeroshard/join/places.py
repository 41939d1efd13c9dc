"""What each rank needs of its host: an agreement before any communication between ranks.

Owns the rejection of devices that are missing, or that two ranks of a host would share, and of limits of open files
that are too low. Ranks agree through the store, which needs no device, so that all ranks raise; NCCL and gloo would
fail on some ranks and leave others waiting. Read `choose` (`devices.py`), `watch/descriptors.py` and `join/arrival.py`
first.
"""

import torch
from torch.distributed import Store

from zeroshard import devices
from zeroshard.join.arrival import Wait, await_ranks, explained, tell_meeting
from zeroshard.watch import descriptors
from zeroshard.wire.mesh import read_local_rank

__all__ = ["await_places"]


def await_places(store: Store, wait: Wait, device: torch.device, backend: str, files: int) -> None:
    """Return when every rank has reached `wait.place`, each with its own device.

    Args:
        device: this rank's device.
        backend: the rank's backend, which must be equal on all ranks.
        files: the file descriptors that this rank is about to open.

    Raises:
        RuntimeError: on every rank, if a rank's device is not usable, or it may not open so many files; as
            `await_ranks`.

    Collective: as `await_ranks`, and two to four requests to the store; every rank must call.
    """
    if "fake" in backend:
        # torch's group for emulation has no other ranks, and its store has no keys of theirs.
        await_ranks(store, wait)
        return
    who = wait.who
    with explained(wait):
        tell_meeting(store, wait.rank, "")
        key = f"zeroshard/devices at {wait.meeting}"
        # A rank may reach a place again, for instance after an error; keys of earlier attempts are obsolete.
        key = f"{key}/{store.add(f'{key}/{wait.rank}', 1)}"
        mine = _refusal(store, key, wait.rank, device, backend) or descriptors.refusal(files, len(wait.ranks))
        if mine:
            store.compare_set(f"{key}/refusal", "", f"rank {wait.rank}: {mine}")
    await_ranks(store, wait)
    if mine:
        raise RuntimeError(f"{who} {wait.place} {mine}")
    with explained(wait):
        theirs = store.get(f"{key}/refusal").decode() if store.check([f"{key}/refusal"]) else ""
    if theirs:
        raise RuntimeError(f"{who} {wait.place} was rejected on another rank, and therefore on all. {theirs}")


def _refusal(store: Store, key: str, rank: int, device: torch.device, backend: str) -> str:
    """Return the reason that this rank cannot use its device; "" if it can."""
    first = store.compare_set(f"{key}/backend", "", backend).decode()
    if first != backend:
        return (
            f"has the backend {backend!r} here and {first!r} on another rank. Hosts with and without CUDA devices "
            "(CUDA_VISIBLE_DEVICES may hide them) can train together only with zs.init(backend='gloo') on all ranks."
        )
    if device.type != "cuda":
        if "nccl" in backend:
            return f"has the backend {backend!r}, and this process sees no CUDA device. Use zs.init(backend='gloo')."
        return ""
    launched = "is not set" if (local_rank := read_local_rank()) is None else f"is {local_rank}"
    count = devices.count()
    remedy = (
        "Each rank of a host needs its own CUDA device: start at most one rank per device with torchrun, or set "
        "LOCAL_RANK to the rank's number on its host (SLURM_LOCALID under Slurm), or call torch.cuda.set_device() "
        "before zs.init()."
    )
    if device.index is not None and device.index >= count:
        return f"has no {device}: LOCAL_RANK {launched}, and this process sees {count} CUDA device(s). {remedy}"
    if "nccl" not in backend or not (name := devices.identity(device)):
        return ""
    owner = int(store.compare_set(f"{key}/{name}", "", str(rank)))
    if owner == rank:
        return ""
    return (
        f"has {device}, which is also the device of rank {owner}: LOCAL_RANK {launched}, and this process sees {count} "
        f"CUDA device(s). {remedy}"
    )
