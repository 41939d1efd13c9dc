"""The choice of a transport for a mesh, and the registry of codecs by name.

Owns the choice: the only module that knows all of them. Read `wire/comm.py` and `wire/codec.py` first.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist

from zeroshard.table.groups import PART
from zeroshard.table.settings import Settings
from zeroshard.table.trace import Ledger
from zeroshard.table.wires import Messages
from zeroshard.wire.codec import Codec, Rounded, Scaled
from zeroshard.wire.comm import Comm, SoloComm
from zeroshard.wire.gloo import GlooComm
from zeroshard.wire.host import HostComm
from zeroshard.wire.links import Links
from zeroshard.wire.memory import HostMemory
from zeroshard.wire.mesh import Mesh, backend_of
from zeroshard.wire.nccl import NcclComm

__all__ = ["codec_of", "make_comm"]

CODECS: Mapping[str, Callable[[str], Codec]] = MappingProxyType({"scaled8": Scaled, "scaled4": Scaled})
"""The codecs besides dtypes; `table/spec.py` has the sizes of each."""


def codec_of(name: str) -> Codec:
    """Return the codec named by `Formats.reduce`."""
    return CODECS.get(name, Rounded)(name)


def make_comm(mesh: Mesh, settings: Settings, ledger: Ledger) -> Comm:
    """Return the communicator for tensors on the mesh's device.

    Collective: creates process groups; every rank must call.

    Raises:
        ValueError: the process group does not support such tensors.
    """
    if mesh.world_size == 1:
        return SoloComm(mesh, ledger)
    kind = mesh.device.type
    # gloo reads and writes host memory, and always exists for small numbers.
    backend = backend_of(kind) if kind != "cpu" or backend_of(kind) == "fake" else "gloo"
    if backend is None or (kind, backend) not in (("cpu", "gloo"), ("cuda", "nccl")):
        raise ValueError(
            f"{mesh} The model trains on {mesh.device}, for which the process group has the backend {backend!r} "
            f"({dist.get_backend_config()}). zs.shard() needs NCCL for CUDA devices and gloo for CPUs: create the "
            "process group with zs.init()."
        )
    links = Links(mesh, settings.watchdog_s, settings.heartbeat_s)
    if backend == "nccl":
        return NcclComm(links, ledger)
    if len(mesh.tensor_ranks) > 1:
        links.new_group(PART, backend, "replicate", "shard")
    messages = GlooComm(links, ledger, Messages(settings.wire_bytes))
    is_wanted = settings.shared_memory and mesh.shard_size > 1
    memory = _share_host(messages, is_wanted) if mesh.device.type == "cpu" else None
    if memory is None:
        return messages
    comm = HostComm(links, ledger, memory, settings.wire_bytes)
    comm.sent_bytes.update(messages.sent_bytes)
    return comm


def _share_host(comm: Comm, is_wanted: bool) -> HostMemory | None:
    """Return shared memory of the ranks of each replica; None if a replica spans hosts, or a rank does not want it."""
    memory, what = HostMemory(comm.mesh.shard_rank), "the comparison of hosts"
    cards = comm.collect(torch.tensor(memory.card, device="cpu"), what)[list(comm.mesh.shard_ranks)].tolist()
    return memory if comm.agree([int(is_wanted and memory.join(cards))], what)[0] else None
