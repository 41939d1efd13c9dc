"""The ranks of a run, the axes of the mesh, and the process group and device of this rank.

The only module below `train/` that reads or sets environment variables. It must not know models or optimizers.
"""

import math
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
    "read_error_file",
    "read_int",
    "read_local_rank",
    "refuse_blocking_nccl",
    "slice_of",
]

Axis = Literal["shard", "tensor"]
"""The axis along which a tensor is split."""


SIOCGIFADDR = 0x8915
"""SIOCGIFADDR of Linux: get the address of a network interface."""
OTHER_NETWORK = "192.0.2.1"
"""An address that is reserved for documentation, which no host has."""


@dataclass(frozen=True)
class Mesh:
    """The ranks that train one model, and the position of this rank among them.

    These are all ranks of the process group, or those of a DeviceMesh that was passed to `zs.shard(mesh=)`. `rank`
    counts from 0 among them.

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
    """Name and size of each axis, the last over neighbouring ranks; empty for all ranks along "shard"."""
    ranks: tuple[int, ...] = ()
    """The ranks of the process group that the mesh has, in its order; empty for all of them."""
    launched: int = 0
    """The number of ranks of the process group; 0 if it is `world_size`."""
    pipe: "Mesh | None" = None
    """The mesh with the axis "pipe" of which this is one place; None without such an axis."""
    island: int | None = None
    """Which island these ranks are, if several train by themselves and exchange what they learned (`outer/`)."""

    @property
    def across(self) -> "Mesh":
        """All ranks that make the same steps: those of all places of a pipe, or these ranks."""
        return self.pipe or self

    def at_place(self) -> "Mesh":
        """Return the ranks at this rank's place along the axis "pipe", which make the same passes."""
        if "pipe" not in dict(self.axes):
            return self
        axes = tuple(axis for axis in self.axes if axis[0] != "pipe")
        here = self.along(*dict(axes))
        numbers = tuple(self.numbers[rank] for rank in here)
        return replace(self, rank=here.index(self.rank), world_size=len(here), axes=axes, ranks=numbers, pipe=self)

    def places(self) -> torch.Tensor:
        """Return (places, size): the ranks of `across` at each place along the axis "pipe", in order."""
        return self.across.rows(*dict(self.axes))

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The number of each rank of the mesh in the process group, by which errors name it."""
        return self.ranks or tuple(range(self.world_size))

    @property
    def is_part(self) -> bool:
        """Whether the process group has ranks that are not in the mesh."""
        return self.launched > self.world_size

    def lines(self, texts: Sequence[str]) -> str:
        """Return the texts of all ranks that are not empty, a line each, for an error."""
        return "\n".join(f"  rank {number}: {text}" for number, text in zip(self.numbers, texts, strict=True) if text)

    def rows(self, *names: str) -> torch.Tensor:
        """Return (rows, size): each row has, in order, the ranks that differ only along these axes."""
        axes = self.axes or (("shard", self.world_size),)
        last = [place for place, (name, _) in enumerate(axes) if name in names]
        ranks = torch.arange(self.world_size, device="cpu").view([size for _, size in axes])
        return ranks.movedim(last, list(range(-len(last), 0))).reshape(-1, math.prod(axes[place][1] for place in last))

    def along(self, *names: str) -> tuple[int, ...]:
        """Return, in order, this rank and the ranks that differ from it only along these axes."""
        rows = self.rows(*names)
        return tuple(rows[(rows == self.rank).any(1)][0].tolist())

    def ranks_of(self, axis: Axis) -> tuple[int, ...]:
        """Return `along(axis)`, cached."""
        return self.shard_ranks if axis == "shard" else self.tensor_ranks

    @cached_property
    def shard_ranks(self) -> tuple[int, ...]:
        """The ranks over which the state of this rank is sharded."""
        return self.along("shard")

    @cached_property
    def shard_size(self) -> int:
        """The number of ranks in `shard_ranks`."""
        return len(self.shard_ranks)

    @cached_property
    def shard_rank(self) -> int:
        """The index of this rank in `shard_ranks`."""
        return self.shard_ranks.index(self.rank)

    @cached_property
    def replica_ranks(self) -> tuple[int, ...]:
        """The ranks that keep the same shard as this rank, including this rank."""
        return self.along("replicate")

    @cached_property
    def replicas(self) -> int:
        """The number of replicas of the sharded state."""
        return len(self.replica_ranks)

    @cached_property
    def tensor_ranks(self) -> tuple[int, ...]:
        """The ranks over which torch splits the DTensors of this rank."""
        return self.along("tensor")

    @cached_property
    def data_ranks(self) -> tuple[int, ...]:
        """The ranks that train the same tensors as this rank, on different data."""
        return self.along("replicate", "shard")

    def __str__(self) -> str:
        at, rest = list[str](), self.across.rank
        for name, size in reversed(self.across.axes):
            rest, index = divmod(rest, size)
            at[:0] = [f"{name} {index}"] * (size > 1)
        at[:0] = [f"island {self.island}"] * (self.island is not None)
        place = f": {', '.join(at)}" * (len(at) > 1 or (self.across.is_part and len(at) == 1))
        return f"[rank {self.numbers[self.rank]}/{self.launched or self.world_size}{place}]"


@dataclass(frozen=True)
class Launched:
    """The settings of torchrun or another launcher: rank, world size, and the address of the store.

    Args:
        has_store: whether the launcher hosts the store at the address; otherwise rank 0 does.
    """

    rank: int
    world_size: int
    address: str
    port: int
    has_store: bool


def find_launch() -> Launched | None:
    """Return the launcher's settings, None for one process; also set what communicators read from the environment.

    Ranks of one host connect over loopback. NCCL 2.26 and later runs the collectives of several communicators, such as
    gathers beside reductions, in the order in which the host issued them, which is the same on all ranks: without that,
    two devices may run two of them in opposite orders, and hang.

    Raises:
        RuntimeError: a variable is missing or is not a number.
    """
    world_size = read_int("WORLD_SIZE", 1)
    if world_size == 1:
        return None
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"WORLD_SIZE is {world_size}, but {', '.join(missing)} is not set. Start the ranks with `torchrun "
            f"--nproc-per-node {world_size} your_script.py`, or unset WORLD_SIZE for one process."
        )
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if read_int("LOCAL_WORLD_SIZE", 0) == world_size:
        # All ranks share this host: loopback always works; the host name may resolve to an unreachable address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif "GLOO_SOCKET_IFNAME" not in os.environ and (name := _interface_to(os.environ["MASTER_ADDR"])):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return Launched(read_int("RANK", 0), world_size, os.environ["MASTER_ADDR"], read_int("MASTER_PORT", 0), has_store)


def _interface_to(address: str) -> str:
    """Return the network interface on the route to the master, by which other hosts reach this host; "" without any.

    gloo would use the address of this host's name, which is 127.0.1.1 on many systems. On the master's host, the name
    of the master may also resolve to that address; then the result is the interface on the route to other networks.
    """
    import fcntl  # not on every system

    own = {}
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):  # without an address
            found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            own[socket.inet_ntoa(found[20:24])] = name
    for host in (address, OTHER_NETWORK):
        # Connecting a datagram socket sends nothing; it only resolves the route.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
            asking.connect((host, 1))
            source = asking.getsockname()[0]
            if not source.startswith("127."):
                return own.get(source, "")
    return ""


def refuse_blocking_nccl() -> None:
    """Raise if an environment variable makes NCCL's waits block the host.

    Raises:
        RuntimeError: such a variable is set.
    """
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if os.environ.get(name, "0").lower() not in ("0", "", "n", "no", "false", "off"):
            raise RuntimeError(
                f"{name}={os.environ[name]} makes the host wait for each collective, many times a step, and hides "
                "these waits from the watchdog. Unset it; the watchdog detects ranks that wait too long."
            )


def current_mesh(found: torch.device | None = None) -> Mesh:
    """Return the mesh of the default process group, or of this process alone without a group.

    Args:
        found: the device of the model's parameters, if they share one; used by a process without a launcher.

    Raises:
        RuntimeError: torchrun started more ranks than the process group has, and each would train alone.
    """
    is_joined = dist.is_available() and dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_joined else (0, 1)
    # The group has more ranks than the variable says, so the variable is not about this group.
    if (started := read_int("WORLD_SIZE", 1)) > world_size:
        found_group = f"has a process group of {world_size} rank(s)" if is_joined else "has joined no process group"
        raise RuntimeError(
            f"WORLD_SIZE is {started}, but this process {found_group}, so each rank would train alone. Call zs.init() "
            "first, instead of torch.distributed.init_process_group(), or unset WORLD_SIZE to train with this process "
            "alone."
        )
    local_rank, backend = read_local_rank(), backend_of("cuda") if is_joined else "nccl"
    given = getattr(dist.group.WORLD, "bound_device_id", None)
    if is_joined or found is None or found.type in ("cpu", "cuda"):
        found = devices.choose(backend, local_rank=local_rank, given=given, found=found)
    return Mesh(rank, world_size, local_rank or 0, found)


def backend_of(kind: str) -> str | None:
    """Return the backend of the default process group for a device type; None without any."""
    # For a group created without a backend, get_backend() returns "undefined", although torch has chosen one.
    pairs = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    return pairs.get(kind)


def read_local_rank() -> int | None:
    """Return the number of this rank on its host, from LOCAL_RANK; None if the launcher did not set it."""
    return read_int("LOCAL_RANK", 0) if "LOCAL_RANK" in os.environ else None


def read_error_file() -> tuple[str, bool, bool]:
    """Return the file that torchrun prints as the cause of a failure, "" without; whether all frames of an error are
    wanted; and whether this start of the ranks is the last, which a failure ends.
    """
    left = read_int("TORCHELASTIC_MAX_RESTARTS", 0) - read_int("TORCHELASTIC_RESTART_COUNT", 0)
    return os.environ.get("TORCHELASTIC_ERROR_FILE", ""), os.environ.get("ZEROSHARD_TRACEBACK") == "full", left <= 0


def read_int(name: str, default: int) -> int:
    """Return the number in an environment variable, or a default if it is not set; other text is an error."""
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
    """Return an index for the rows of these ranks, ascending: a slice if possible, which copies nothing."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return slice(ranks[0], ranks[-1] + 1, step) if [*range(ranks[0], ranks[-1] + 1, step)] == [*ranks] else [*ranks]
