"""Which ranks there are, along which axes, and which one this is: the process group, the device.

The only module that reads or sets environment variables. It must not know models or optimizers.
"""

import math
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist

from zeroshard import devices

__all__ = [
    "Axis",
    "Launched",
    "Mesh",
    "backend_of",
    "current_mesh",
    "find_launch",
    "read_local_rank",
    "refuse_blocking_nccl",
    "slice_of",
]

Axis = Literal["shard", "tensor"]
"""Along which the parts of a whole lie."""


SIOCGIFADDR = 0x8915
"""What Linux calls the question for the address of an interface."""
OTHER_NETWORK = "192.0.2.1"
"""An address that no host has: it is reserved for documentation."""


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run, and this rank's place among them.

    ```python
    import zeroshard as zs

    mesh = zs.init()
    assert (mesh.rank, mesh.world_size) == (0, 1)  # no torchrun: one process
    ```
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    axes: tuple[tuple[str, int], ...] = ()
    """Name and size of each axis, the last one over neighbouring ranks; none: all ranks along "shard"."""

    def rows(self, *names: str) -> torch.Tensor:
        """Return (rows, size): in each row, in order, ranks that differ along these axes only; each rank is in one."""
        axes = self.axes or (("shard", self.world_size),)
        last = [place for place, (name, _) in enumerate(axes) if name in names]
        ranks = torch.arange(self.world_size).view([size for _, size in axes])
        return ranks.movedim(last, list(range(-len(last), 0))).reshape(-1, math.prod(axes[place][1] for place in last))

    def along(self, *names: str) -> tuple[int, ...]:
        """Return, in order, the ranks that differ from this one along these axes only, and this one."""
        rows = self.rows(*names)
        return tuple(rows[(rows == self.rank).any(1)][0].tolist())

    def ranks_of(self, axis: Axis) -> tuple[int, ...]:
        """Return what `along` does for one axis, worked out once."""
        return self.shard_ranks if axis == "shard" else self.tensor_ranks

    @cached_property
    def shard_ranks(self) -> tuple[int, ...]:
        """The ranks over which this one's state is sharded."""
        return self.along("shard")

    @cached_property
    def shard_size(self) -> int:
        """How many these are."""
        return len(self.shard_ranks)

    @cached_property
    def shard_rank(self) -> int:
        """This rank's place among them."""
        return self.shard_ranks.index(self.rank)

    @cached_property
    def replica_ranks(self) -> tuple[int, ...]:
        """The ranks that keep the same shard as this one, and it itself."""
        return self.along("replicate")

    @cached_property
    def replicas(self) -> int:
        """Copies of the sharded state."""
        return len(self.replica_ranks)

    @cached_property
    def tensor_ranks(self) -> tuple[int, ...]:
        """The ranks over which torch splits tensors that this one has a part of."""
        return self.along("tensor")

    @cached_property
    def data_ranks(self) -> tuple[int, ...]:
        """The ranks that train the same tensors as this one, on other data."""
        return self.along("replicate", "shard")

    def __str__(self) -> str:
        return f"[rank {self.rank}/{self.world_size}]"


@dataclass(frozen=True)
class Launched:
    """What torchrun, or another launcher, said to this process: its rank, of how many, and where they meet.

    Args:
        has_store: whether the launcher keeps the store at the address; else rank 0 does.
    """

    rank: int
    world_size: int
    address: str
    port: int
    has_store: bool


def find_launch() -> Launched | None:
    """Return what the launcher said, None for one process; ranks of one host connect over loopback from then on.

    Raises:
        RuntimeError: a variable is missing or is no number.
    """
    world_size = _read_int("WORLD_SIZE", 1)
    if world_size == 1:
        return None
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"WORLD_SIZE is {world_size}, but {', '.join(missing)} is not set. Start the ranks with `torchrun "
            f"--nproc-per-node {world_size} your_script.py`, or unset WORLD_SIZE for one process."
        )
    if _read_int("LOCAL_WORLD_SIZE", 0) == world_size:
        # All ranks share this host: loopback always works, a host name may resolve to an address that does not.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif "GLOO_SOCKET_IFNAME" not in os.environ and (name := _interface_to(os.environ["MASTER_ADDR"])):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return Launched(_read_int("RANK", 0), world_size, os.environ["MASTER_ADDR"], _read_int("MASTER_PORT", 0), has_store)


def _interface_to(address: str) -> str:
    """Return the network interface on the way to the master, which is the one that other hosts reach this one by.

    gloo would take the address that this host's name has, which many systems say is 127.0.1.1. On the master's host its
    own name may have that address, too; then it is the interface on the way to other networks. Empty where there is
    none.
    """
    import fcntl  # not on every system

    own = {}
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):  # without an address
            found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            own[socket.inet_ntoa(found[20:24])] = name
    for host in (address, OTHER_NETWORK):
        # Connecting a datagram socket sends nothing: it asks for the route.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
            asking.connect((host, 1))
            source = asking.getsockname()[0]
            if not source.startswith("127."):
                return own.get(source, "")
    return ""


def refuse_blocking_nccl() -> None:
    """Raise where NCCL's waits were told to stop the host.

    Raises:
        RuntimeError: a variable says so.
    """
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if os.environ.get(name, "0").lower() not in ("0", "", "n", "no", "false", "off"):
            raise RuntimeError(
                f"{name}={os.environ[name]} has the host wait for each collective, many times a step, and hides from "
                "the watchdog what it waits for. Unset it: a rank that waits too long is named without it."
            )


def current_mesh(found: torch.device | None = None) -> Mesh:
    """Return the mesh of the default process group, or of this one process where there is none.

    Args:
        found: the device of a model's parameters, where it is one. One process that no launcher started follows it.

    Raises:
        RuntimeError: torchrun started more ranks than have joined, which would train apart from each other.
    """
    is_joined = dist.is_available() and dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_joined else (0, 1)
    # More ranks than the variable says have found each other, so that it is not about them.
    if (started := _read_int("WORLD_SIZE", 1)) > world_size:
        found_group = f"has a process group of {world_size} rank(s)" if is_joined else "has joined no process group"
        raise RuntimeError(
            f"WORLD_SIZE is {started}, but this process {found_group}, so that each would train apart from the others. "
            "Call zs.init() first, in place of torch.distributed.init_process_group(), or unset WORLD_SIZE where this "
            "process is to train alone."
        )
    local_rank, backend = read_local_rank(), backend_of("cuda") if is_joined else "nccl"
    given = getattr(dist.group.WORLD, "bound_device_id", None)
    if is_joined or found is None or found.type in ("cpu", "cuda"):
        found = devices.choose(backend, local_rank=local_rank, given=given, found=found)
    return Mesh(rank, world_size, local_rank or 0, found)


def backend_of(kind: str) -> str | None:
    """Return what the default process group moves tensors of a type of device with; None if it does not."""
    # "undefined" is all that get_backend() says of a group made without a backend; torch has chosen one all the same.
    pairs = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    return pairs.get(kind)


def read_local_rank() -> int | None:
    """Return this rank's number on its host, as the launcher gave it; None if it gave none."""
    return _read_int("LOCAL_RANK", 0) if "LOCAL_RANK" in os.environ else None


def _read_int(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise RuntimeError(
            f"The environment variable {name} must be a number, as torchrun sets it; got {text!r}."
        ) from None


def slice_of(ranks: Sequence[int]) -> slice | list[int]:
    """Return what picks the rows of these ranks, ascending; a slice, which copies nothing, where that can be."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return slice(ranks[0], ranks[-1] + 1, step) if [*range(ranks[0], ranks[-1] + 1, step)] == [*ranks] else [*ranks]
