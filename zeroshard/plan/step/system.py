"""A program that trains, as a plan plays it: its kernels, and how it differs from zeroshard's engine in a step.

Owns the record. A system names the row of the residency table and the formats that its plans have by default.
`plan/systems.py` has the systems by name, and their sources. Needs no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal, final

from zeroshard.describe.offload import Offload, offload_of
from zeroshard.plan.machine.hardware import Device
from zeroshard.plan.shape.transformer import Kernels

__all__ = ["System", "ZEROSHARD", "device_of"]

PLAIN_KERNELS: Final = Kernels()
LEAST_MATRIX_BYTES: Final = 200_000
"""Of a parameter that is exchanged alone: 1e5 elements in fp16 (DeepSpeed's stage3_param_persistence_threshold)."""


@final
@dataclass(frozen=True, kw_only=True)
class System:
    """How a program makes a step.

    Args:
        name: its name, as in `zeroshard plan --system`.
        stage: ZeRO stage, if the program has only one; None for that of the plan.
        precision: a name in `zeroshard.plan.named.PRECISIONS`; "" for that of the plan.
        offload: what it keeps in memory of the host, as `zs.plan(offload=)`; "" for that of the plan.
        kernels: the kernels of the program.
        products: dtype of matrix products by torch's name, such as "float8"; "" for that of the parameters.
        is_sequence_parallel: whether tensor ranks split tokens outside products.
        no_sync: whether only the last micro-batch exchanges gradients.
        gathers_beside, reduces_beside: whether units are gathered, and gradients reduced, beside computation.
            Otherwise the device waits for each gather, and one exchange follows the last backward.
        sums_everywhere: whether gradients are all-reduced also where a rank needs only a part of the sums.
        copies: whether units are gathered into, and gradients reduced from, flat buffers beside the parameters' own.
        agrees: whether ranks agree on each request in the first pass of a kind, so that nothing is gathered ahead.
        keeps_last: whether what a forward uses last stays gathered for the backward.
        keeps_masters_alone: whether a rank's part of gathered parameters is kept only in the dtype of the masters.
        keeps_gradients: whether the sums of gradients stay from step to step.
        bucket_bytes: memory that holds a second copy of all gradients for their exchange (-1), or buffers of so many
            bytes.
        publishes_flat: whether updated parameters are copied to one buffer, and gathered into another.
        publishes_beside: whether updated parameters arrive beside the next forward, where a transport overlaps.
        has_parameter_states: whether the optimizer has states for each parameter, not for each unit.
        probed_bytes: what the program takes, in pieces of 1 GiB, and gives back before it builds the model.
        workspaces_bytes: of the libraries of matrix products, for the thread of the forward and that of the backward.
        tensor_buffers: number of buffers for gathered hidden states that stay.
        runs_ahead: number of kernels that the host queues ahead of the device: what a collective of the tensor ranks
            used is free only when the device has passed it. 0 if the host waits.
        cut: how layers are divided along a pipe: by bytes, "even", or by "compute" as nanotron's blocks.
        message_s: seconds for which the host waits for the messages of a micro-batch in a pipe.
        blocked_s: seconds for which the host waits for a collective of the tensor ranks: for each of them, and for
            each of them and each of their nodes.
        splits_products: whether products along "tensor" begin before all is gathered for them, and sums leave before
            all are made, so that an exchange hides behind the kernel after or before, but for the part of one rank.
        piece_s: if above 0, each matrix is gathered and reduced alone, and gathered again after its recomputation where
            others follow it; the device waits for each, and the host takes so many seconds for each rank's part.
        chain_bytes: if above 0, what a rank owns of cut gradients is reduced to it alone, in the stream of the kernels:
            through a chain of all ranks, each of which passes on so many bytes at a time where all of a node take part.
        node_factor: factor of the bandwidth between nodes that its exchanges reach.
        host_part, exchange_part: factors of the host's time to queue a kernel, and a collective.
        has_cudnn: whether attention is cuDNN's.
        attention_factor: speed of its fused attention, compared with FlashAttention-2.
    """

    name: str
    stage: int | None = None
    precision: str = ""
    offload: str = ""
    kernels: Kernels = PLAIN_KERNELS
    products: str = ""
    is_sequence_parallel: bool = False
    no_sync: bool = False
    gathers_beside: bool = True
    reduces_beside: bool = True
    sums_everywhere: bool = False
    copies: bool = False
    agrees: bool = False
    keeps_last: bool = False
    keeps_masters_alone: bool = False
    keeps_gradients: bool = False
    bucket_bytes: int = 0
    publishes_flat: bool = False
    publishes_beside: bool = True
    has_parameter_states: bool = False
    probed_bytes: int = 0
    workspaces_bytes: int = 0
    tensor_buffers: int = 0
    runs_ahead: int = 0
    cut: Literal["bytes", "even", "compute"] = "bytes"
    message_s: float = 0.0
    blocked_s: tuple[float, float] = (0.0, 0.0)
    splits_products: bool = False
    piece_s: float = 0.0
    chain_bytes: int = 0
    node_factor: float = 1.0
    host_part: float = 0.5
    exchange_part: float = 0.5
    has_cudnn: bool = False
    attention_factor: float = 1.0

    def exchanges(self, nbytes: int, sizes: Iterable[int]) -> list[int]:
        """Return the bytes of each exchange of some parameters: one of all, or one of each matrix.

        Args:
            sizes: bytes of each parameter; small ones stay whole on each rank, where each is exchanged alone.
        """
        return [one for one in sizes if one >= LEAST_MATRIX_BYTES] if self.piece_s else [nbytes]

    def moved(self) -> Offload | None:
        """Return the offload that it has by itself.

        Raises:
            ValueError: `offload` cannot be read.
        """
        return offload_of(self.offload or None)

    def queue_s(self, device: Device) -> tuple[float, float]:
        """Return the seconds of the host for a kernel, and for a collective."""
        if device.is_cpu:
            return 0.0, 0.0
        return self.host_part * device.queue_s, self.exchange_part * device.exchange_s


ZEROSHARD: Final = System(name="zeroshard", agrees=True, keeps_last=True)
"""This library: the engine's own schedule, which `table/step.py` has."""


@lru_cache(64)
def device_of(device: Device, system: System) -> Device:
    """Return the device as the kernels and exchanges of a program use it."""
    attention_part = device.cudnn_part if system.has_cudnn else device.attention_part * system.attention_factor
    if (attention_part, system.node_factor) == (device.attention_part, 1.0):
        return device
    return replace(device, attention_part=attention_part, node_part=device.node_part * system.node_factor)
