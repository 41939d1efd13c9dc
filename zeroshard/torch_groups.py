"""What torch does not publish about process groups, each name wrapped by a name of this module.

Owns the private names of `torch.distributed`; `torch_private.py` has all others. It must not know parameters, passes or
transports. `torch_checks.py` tests the expected behavior of each.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

__all__ = ["all_groups", "default_store", "emulated_group", "named_group", "own_client_of", "premultiplied_sum"]


def all_groups() -> list[dist.ProcessGroup]:
    """Return the process groups of this process, those of user code included."""
    return [*dist.distributed_c10d._world.pg_map]


def default_store() -> dist.Store:
    """Return the store of the default process group, which works even if the group hangs."""
    return dist.distributed_c10d._get_default_store()


@contextmanager
def emulated_group(ranks: int) -> Iterator[None]:
    """Create a default process group with this process as rank 0; its collectives communicate nothing."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend)

    class Present(dist.Store):
        """A store in which all ranks are present."""

        def add(self, key: str, amount: int) -> int:
            return 0

    store = Present()  # torch keeps only the C++ part alive
    dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def named_group(
    ranks: Sequence[int], what: str, backend: str, limit: timedelta, *, is_part: bool, is_kept: bool = False
) -> dist.ProcessGroup:
    """Return a process group of ranks, in this order; the other ranks of the default process group need not call.

    `new_group(use_local_synchronization=True)` derives the name from the number of groups in the process, which may
    differ between ranks, and sorts the ranks. Here the store counts the groups of these ranks.

    Args:
        what: the purpose of the group, equal on these ranks.
        is_part: whether other ranks do not call now. A communicator of NCCL then cannot be split from the default one,
            a collective of all ranks.
        is_kept: whether a later call returns the same group, for the same ranks in any order.

    Collective: every one of these ranks must call.
    """
    c10d: Any = dist.distributed_c10d
    tag = f"zeroshard {what}" if is_kept else ""
    if is_kept and (found := c10d._find_pg_by_ranks_and_tag(tag, [*ranks])) is not None:
        return cast("dist.ProcessGroup", found)
    default: Any = dist.group.WORLD
    own, store = dist.get_rank(), default_store()
    name = f"zeroshard {what} of {hashlib.sha1(str(ranks).encode(), usedforsecurity=False).hexdigest()}"
    name = f"{name} {store.add(f'{name}/{own}', 1)}"
    device = default.bound_device_id
    default.bound_device_id = made_on = None if is_part else device
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks), ranks.index(own), [*ranks], backend, store, name, timeout=limit, pg_tag=tag, device_id=made_on
        )
    finally:
        default.bound_device_id = device
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return cast("dist.ProcessGroup", group)


def own_client_of(store: dist.Store) -> dist.Store:
    """Return a client of the same store with its own connection; the same client if torch cannot clone it."""
    clone = getattr(store, "clone", None)
    return store if clone is None else clone()


def premultiplied_sum(factor: float) -> Any:
    """Return the NCCL reduction that multiplies each rank's elements by a factor and sums them."""
    return dist._make_nccl_premul_sum(factor)
