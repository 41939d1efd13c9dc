"""Devices and networks in numbers: the cost of a kernel and of a collective.

Owns the formulas that convert work into seconds; `presets.py` has the presets. It must not know models or schedules.

Note: what bounds a kernel
    The time of a kernel is the maximum of its arithmetic, its memory traffic and its launch. Matrix products reach a
    measured fraction of the vendor's peak (`Device.matmul_part`), and less if tiles of 128 x 256 do not fill the
    result, or the last wave of tiles does not fill the device.
Note: what bounds a collective
    A ring sends (N - 1) / N of the bytes through the slowest link, and adds a latency for each of its N - 1 hops.
    Within a node, the links are those between devices; between nodes, its ranks share the node's adapters.

Note: what a retry of the caching allocator costs
    The driver frees memory only when the device is idle, so the host loses its lead: the device is idle until all calls
    to the driver are done and the next kernel is launched. The driver clears freed memory before it allocates it again.

Source: vendors' data sheets; ml-engineering (S. Bekman), "Maximum Achievable Matmul FLOPS"; the Ultra-Scale Playbook's
measurements of collectives on 8 to 512 H100.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any, Final, final

from zeroshard.table.sizes import MIB

__all__ = ["Cost", "Device", "GB", "Span"]

GB: Final = 10**9
DRIVER_CALL_S: Final = 50e-6
"""Seconds of one cudaMalloc or cudaFree on an idle device, without the part that grows with the size.

54,628 calls of cudaMalloc on a Quadro RTX 5000 took 59 microseconds each, frees outside a collection 46
(github.com/JuliaGPU/CuArrays.jl/pull/414, September 2019; 5.8 MB each). That includes what grows with the size, so a
price of both is high rather than low.
"""
CLEARED_S_PER_BYTE: Final = 0.35 / 16e9
"""Rate of cudaMalloc, for memory that the process freed before.

16 GB took 300 to 400 ms on an A10 after a cudaFree, and 10 to 20 ms without one
(github.com/ggml-org/llama.cpp/pull/5429). Another project measured 31 ms for a gibibyte
(github.com/vortex-data/vortex/pull/7831).
"""
CHUNK_BYTES: Final = 4 * MIB // 8
"""What a rank of one ring passes on at a time: an eighth of its buffer (NCCL 2.8, src/init.cc, collectives.h)."""
TILE: Final = (128, 256)
"""Rows and columns of a result that one multiprocessor computes at a time."""


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """The work of one kernel.

    Args:
        flops: floating-point operations; a multiplication and an addition count as two.
        moved_bytes: bytes read from and written to memory.
        kind: "matmul", "attention" or "memory", which determines the reachable fraction of the peak.
        rows, columns: shape of the result of a matrix product; 0 if unknown.
        dtype: dtype of the operands, by torch's name; "" for that of the run.
    """

    flops: float = 0
    moved_bytes: float = 0
    kind: str = "memory"
    rows: int = 0
    columns: int = 0
    dtype: str = ""


@final
@dataclass(frozen=True, slots=True)
class Span:
    """The placement of the ranks of a collective.

    Args:
        ranks: number of ranks that take part.
        per_node: number of these ranks on one node.
        sharing: number of ranks of a node that use its adapters at the same time, in separate collectives.
    """

    ranks: int
    per_node: int
    sharing: int = 1

    @property
    def nodes(self) -> int:
        """Number of nodes of the ranks."""
        return -(-self.ranks // max(1, self.per_node))


ZEROS: Final = ("hop_s", "launch_s", "half_bytes", "context_bytes", "communicator_bytes", "queue_s", "exchange_s")
"""Numbers of a device that may be 0."""
RANGES: Final = MappingProxyType({"_part": (1e-6, 1), "_per_s": (1, math.inf), "]": (1, math.inf), "_s": (0, 1e6)})
"""Least and most of the numbers of a device by the ends of their names, "]" of peaks; with smaller rates or longer
latencies a step has no end."""


@final
@dataclass(frozen=True, eq=False)
class Device:
    """One accelerator of a node, or one process on a CPU.

    Args:
        peak_flops: peak of dense matrix products by dtype, in operations per second.
        matmul_part: fraction of the peak that large products reach.
        attention_part: fraction of the peak that fused attention reaches.
        memory_bytes: device memory that a process can use; of a CPU, memory of a node, which its ranks share.
        memory_bytes_per_s: bandwidth of the device's memory, as specified by the vendor.
        memory_part: fraction of that bandwidth that kernels reach.
        link_bytes_per_s: bandwidth to the other devices of the node, in one direction.
        node_bytes_per_s: bandwidth of all network adapters of a node, in one direction.
        host_bytes_per_s: bandwidth to host memory, in one direction.
        node_ranks: number of devices of a node.
        host_bytes: host memory of a node.
        multiprocessors: number of multiprocessors that share the tiles of a product.
        launch_s: minimum time of a kernel.
        hop_s, node_hop_s: latency of one hop of a ring, within a node and between nodes.
        half_bytes: bytes of a rank's part of a collective that reach half of the bandwidth.
        context_bytes: device memory of a process outside the allocator.
        communicator_bytes: device memory of each process group outside the allocator.
        host_memory_bytes_per_s: bytes per second that the processors of a node read and write together, in an update on
            the host.
        disk_bytes_per_s: bandwidth of a node's disk for offloaded states, in each direction with both in use.
        sustained_part: fraction of the speed of isolated products and attention that a whole step sustains.
        cudnn_part: as `attention_part`, of kernels written for the device, as in cuDNN.
        node_part: fraction of the bandwidth of a node's adapters that collectives of a step reach.
        queue_s, exchange_s: seconds of the host to queue one module's kernels, and a collective, from Python; on a CPU
            there is no queue.

    ```python
    import dataclasses, zeroshard as zs
    from zeroshard.plan.machine.presets import DEVICES

    mine: zs.Device = dataclasses.replace(DEVICES["h100-80"], node_bytes_per_s=100e9)  # fewer adapters
    print(zs.plan("gpt2-xl", world_size=64, device=mine))
    ```
    """

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    node_bytes_per_s: float
    host_bytes_per_s: float
    node_ranks: int = 8
    host_bytes: int = 2048 * GB
    multiprocessors: int = 132
    matmul_part: float = 0.8
    attention_part: float = 0.5
    memory_part: float = 0.85
    link_part: float = 0.8
    launch_s: float = 2e-6
    hop_s: float = 5e-6
    node_hop_s: float = 9.6e-6
    half_bytes: float = 0.25 * MIB
    context_bytes: int = 600 * MIB
    communicator_bytes: int = 400 * MIB
    host_memory_bytes_per_s: float = 200 * GB
    disk_bytes_per_s: float = 3 * GB
    sustained_part: float = 1.0
    cudnn_part: float = 0.5
    node_part: float = 0.5
    queue_s: float = 31e-6
    exchange_s: float = 250e-6

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"Device.name must be a text, got {self.name!r}.")
        if not isinstance(self.peak_flops, Mapping) or "float32" not in self.peak_flops:
            raise ValueError(
                f"Device.peak_flops must map dtypes to numbers, float32 among them; got {self.peak_flops!r}."
            )
        values = {f"peak_flops[{name!r}]": value for name, value in self.peak_flops.items()}
        values |= {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("name", "peak_flops")}
        for name, value in values.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (value == 0 and not name.endswith(ZEROS)):
                raise ValueError(f"Device.{name} must be a number above 0, got {value!r}.")
            least, most = next((limits for end, limits in RANGES.items() if name.endswith(end)), (0, math.inf))
            if not least <= value <= most:
                asked = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
                raise ValueError(f"Device.{name} must be {asked}, got {value!r}.")
        for name in (one.name for one in fields(self) if one.type is int):
            if (value := getattr(self, name)) != int(value):
                raise ValueError(f"Device.{name} must be a whole number, got {value!r}.")
            object.__setattr__(self, name, int(value))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the device with its table of peaks, which may be read-only."""
        return partial(Device, **vars(self) | {"peak_flops": dict(self.peak_flops)}), ()

    @property
    def is_cpu(self) -> bool:
        """Whether the device is a CPU, whose kernels differ from those of an accelerator."""
        return self.multiprocessors == 1

    @property
    def half_precision(self) -> str:
        """Its half precision: bfloat16 if that is as fast as float16."""
        return "bf16" if self.peak_flops.get("bfloat16", 0) >= self.peak_flops.get("float16", 0) else "fp16"

    def kernel_s(self, cost: Cost, dtype: str) -> float:
        """Return the seconds of one kernel.

        Args:
            dtype: dtype of the operands of kernels that name none; a dtype without a peak counts as float32.
        """
        peak = self.peak_flops.get(cost.dtype or dtype, self.peak_flops["float32"])
        part = {"matmul": self.matmul_part, "attention": self.attention_part}.get(cost.kind, 1.0)
        part *= self.sustained_part if cost.kind in ("matmul", "attention") else 1.0
        arithmetic_s = cost.flops / (peak * part * self._filled(cost))
        return max(arithmetic_s, cost.moved_bytes / (self.memory_bytes_per_s * self.memory_part), self.launch_s)

    def _filled(self, cost: Cost) -> float:
        """Return the used fraction of a product's tiles and waves of tiles."""
        if not cost.rows or not cost.columns or self.multiprocessors <= 1:
            return 1.0
        down, across = -(-cost.rows // TILE[0]), -(-cost.columns // TILE[1])
        used = cost.rows * cost.columns / (down * TILE[0] * across * TILE[1])
        waves = down * across / self.multiprocessors
        # With few tiles, libraries split the sum, which keeps at least half of the device busy.
        return used * max(waves / math.ceil(waves), 0.5)

    def spread(self, ranks: int, stride: int = 1) -> Span:
        """Return the placement of a group of ranks.

        Args:
            ranks: number of ranks in the group.
            stride: distance of neighbours of the group, in the order of all ranks.
        """
        per_node = max(1, min(ranks, self.node_ranks // stride))
        return Span(ranks, per_node, min(stride, self.node_ranks))

    def collective_s(self, kind: str, nbytes: float, span: Span, chain_bytes: int = 0) -> float:
        """Return the seconds of one collective.

        Args:
            kind: "gather", "reduce" (a reduce-scatter), "all-reduce", "chain" (a reduction to one rank), "send" or
                "all-to-all".
            nbytes: bytes of the full tensor, as after a gather or before a reduction. For "send" and "all-to-all", the
                maximum that one rank sends or receives.
            chain_bytes: that each rank of a chain passes on at a time, if all of a node are in it.
        """
        if span.ranks <= 1 or nbytes <= 0:
            return 0.0
        link, hop_s = self.link_bytes_per_s * self.link_part, self.hop_s
        if span.nodes > 1:
            # The ring passes each node's adapters once for each of the node's ranks in it.
            link = min(link, self.node_bytes_per_s * self.node_part / span.sharing)
            hop_s = self.node_hop_s
        if kind == "send":
            return hop_s + nbytes / link
        hops = span.ranks - 1
        if kind == "chain":
            # Its last rank has the first bytes when they have passed all others.
            beside, part = span.nodes - 1, max(CHUNK_BYTES, chain_bytes * span.per_node // self.node_ranks)
            inside_s = self.hop_s + min(part, nbytes) / (self.link_bytes_per_s * self.link_part)
            return nbytes / link + beside * (hop_s + min(part, nbytes) / link) + (hops - beside) * inside_s
        if kind == "all-to-all":
            # Each node's adapters carry what its ranks send to other nodes, all at the same time.
            outside = nbytes * (span.ranks - span.per_node) / hops * span.per_node / link
            inside = nbytes * (span.per_node - 1) / hops / (self.link_bytes_per_s * self.link_part)
            return hop_s + max(inside, outside)
        moved_s = nbytes * hops / span.ranks / link * (1 + self.half_bytes * span.ranks / nbytes)
        # An all-reduce is a reduce-scatter and an all-gather; trees need a third of their hops.
        return 2 * moved_s + 2 / 3 * hops * hop_s if kind == "all-reduce" else moved_s + hops * hop_s

    def retry_s(self, driver_calls: int, taken_bytes: float) -> float:
        """Return the seconds that the device waits for one retry of the caching allocator.

        Args:
            driver_calls: number of segments that were freed or allocated.
            taken_bytes: bytes that were allocated after the free.
        """
        return self.launch_s + driver_calls * DRIVER_CALL_S + taken_bytes * CLEARED_S_PER_BYTE

    def copy_s(self, nbytes: float) -> float:
        """Return the seconds of a copy to or from the host."""
        return nbytes / (self.host_bytes_per_s * self.link_part) if nbytes else 0.0

    def host_s(self, moved_bytes: float, sharing: int = 1) -> float:
        """Return the seconds of work on the host.

        Args:
            moved_bytes: bytes that are read and written.
            sharing: number of ranks of the node that do the same at the same time; on a CPU, the measured rate already
                includes sharing.
        """
        if self.is_cpu:
            return moved_bytes / (self.memory_bytes_per_s * self.memory_part)
        return moved_bytes * sharing / self.host_memory_bytes_per_s

    def disk_s(self, nbytes: float, sharing: int = 1) -> float:
        """Return the seconds to read or write `nbytes` on each of `sharing` ranks of a node."""
        return nbytes * sharing / self.disk_bytes_per_s
