"""File descriptors: how many a rank opens, and the limit of its process.

Owns these numbers, which a test compares with the descriptors of real ranks, and the limit: what a rank needs is known
before it connects to the others, so that all ranks raise one error in place of a failed connection on some of them.
NCCL's connections and those of the user's code are not counted; `SPARE` is for them.
"""

import os
from pathlib import Path
from typing import Final

__all__ = ["of_model", "of_start", "refusal"]

OF_GROUP: Final = 3
"""Of a gloo group, beside a connection for each of its ranks: an event queue and a pipe."""
STORE: Final = 1
SPARE: Final = 128
"""For NCCL, data loaders, and files that are open for a moment."""
OPENED: Final = Path("/proc/self/fd")


def of_start(ranks: int, *, hosts_store: bool) -> int:
    """Return the descriptors that `zs.init()` opens: the default group, and the connections of the store.

    Args:
        hosts_store: whether this process is the store's server, to which every rank connects.
    """
    return ranks + OF_GROUP + STORE + hosts_store * (ranks + 1)


def of_model(ranks: int, local: int, boarded: int | None = None, *, groups: int = 2) -> int:
    """Return the descriptors that `zs.shard()` opens.

    Args:
        ranks: those of the mesh.
        local: those of this host, of which each process is watched, and each log of what it does is read.
        boarded: those that share memory with this rank, 0 where ranks send messages; by default at most `local`.
        groups: 2 for the first model over these ranks, 1 for others: votes have a group for each model, and texts one
            for all.
    """
    local = min(local, ranks)
    boarded = local if boarded is None else boarded
    watched = (local + 1) + (local - 1)
    shared = (2 * boarded + 3) + (boarded - 1) if boarded else 0
    return groups * (ranks + OF_GROUP) + STORE + watched + shared


def refusal(needed: int, ranks: int) -> str:
    """Raise this process's limit of open files if it is too low for `needed` more; return why not, or nothing."""
    try:
        import resource  # not on every system
    except ModuleNotFoundError:
        return ""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir(OPENED)) if OPENED.exists() else SPARE
    if soft == resource.RLIM_INFINITY or (least := opened + needed + SPARE) <= soft:
        return ""
    if hard == resource.RLIM_INFINITY or least <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (least if hard == resource.RLIM_INFINITY else hard, hard))
        return ""
    return (
        f"may open {hard} files and needs {least} for {ranks} ranks ({opened} are open). Run `ulimit -n {least}` "
        "before the launcher, or set LimitNOFILE= of its service."
    )
