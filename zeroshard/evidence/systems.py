"""Models of other systems' training steps: data about each system, and the memory and time of its runs.

Owns the facts by which published runs are planned: kernels, dtypes, exchanges, and overlap. It must not know the runs
(`scorecard.py`) or this project's engine. Needs no torch. `nanotron.py` models one system tensor by tensor; the others
are in closed form, from the tapes of `transformer.py`.

Note: the knobs
    Some generic parameters describe the slowdown of eager programs compared with the presets of `hardware.py`:
    `SUSTAINED_PART`, `KERNEL_HOST_S`, `EXCHANGE_HOST_S`, `NODE_PART`, `BLOCKED_S`, `MESSAGE_S`, `POLLED_S` and
    `host_part` of systems. `POLLED_DEVICES` and `UNPOLLED_TENSOR` select the version of nanotron of a run, which is not
    published. Their values were chosen on a random half of the published rows of time (`Scorecard.halves`); but the
    effects and their starting values were found on all rows, so the other half is not fully unseen.
    No number was fitted to rows of memory. Facts were derived from groups of them: the tie of `nanotron.blocks_of`;
    that hosts run ahead by a full queue, except in pipelines (`Rank.is_waiting`), which p2p.py explains; and that the
    queue also counts the events of a collective. Memory suggested `UNPOLLED_TENSOR`, and times determined its value.

Source: NVIDIA/Megatron-LM (megatron/core: tensor_parallel, pipeline_parallel/schedules.py, distributed), bigscience's
Megatron-DeepSpeed, microsoft/DeepSpeed (runtime/zero), mosaicml/llm-foundry (FSDP), huggingface/nanotron.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Final, final

from zeroshard.evidence import nanotron
from zeroshard.evidence.nanotron_memory import reserved_bytes
from zeroshard.plan.machine.hardware import Cost, Device, Span
from zeroshard.plan.named import own_units
from zeroshard.plan.shape.shapes import Transformer
from zeroshard.plan.shape.tape import Instruction, Parts, instructions
from zeroshard.plan.shape.transformer import Kernels, Workload, cached_tapes

__all__ = ["Run", "SYSTEMS", "Seconds", "System", "memory_bytes", "step_seconds"]

SUSTAINED_PART: Final = 0.75
"""Fraction of the speed of isolated products: clocks drop at the power of a whole step."""
FLASH2_H100_PART: Final = 335 / 989
"""Dao, FlashAttention-2 (arXiv 2307.08691), section 4.1: 335 TFLOPS on an H100, of 989."""
KERNEL_HOST_S: Final = 31e-6
"""Seconds of the host to queue a kernel from Python."""
EXCHANGE_HOST_S: Final = 250e-6
"""Seconds of the host to queue a collective from Python, including its autograd function."""
NODE_PART: Final = 0.5
"""Fraction of the bandwidth of a node's adapters that collectives reach."""
BLOCKED_S: Final = (0.16e-3, 0.05e-3)
"""Seconds of a collective of the tensor ranks, per rank, and per node, if the host waits for it. Memory shows that
tensors then do not wait (`nanotron_memory.py`), and small micro-batches are bound by it."""
MESSAGE_S: Final = 2e-3
"""Seconds of the messages of a micro-batch between pipeline ranks of nanotron (p2p.py: before each tensor two messages
of sizes, one after the other, and the host waits for each)."""

POLLED_S: Final = 0.85
"""The same if the host sleeps 0.1 s between polls of each of 8 messages, as in a later p2p.py."""
POLLED_DEVICES: Final = 512
"""Minimum number of devices whose runs' times match that later version of nanotron, whose host also waits for
collectives; the version of a run is not published."""

UNPOLLED_TENSOR: Final = 32
"""The largest tensor width: 7 of 12 such runs without a pipeline, in the chosen half, match the earlier version."""


@final
@dataclass(frozen=True, kw_only=True)
class System:
    """The properties of a program that a plan needs.

    Args:
        kernels: the kernels of the program.
        is_sequence_parallel: whether tensor ranks split tokens outside products.
        grad_bytes: bytes of an element of held and exchanged gradients.
        state_bytes: bytes of the master and the states of an element.
        overlaps_data: fraction of the backward that can hide the exchange of gradients.
        has_cudnn: whether attention is cuDNN's instead of FlashAttention-2, which was written for the A100.
        host_part, exchange_part: factors of the host's time of an eager kernel, and of a collective.
    """

    name: str
    kernels: Kernels
    is_sequence_parallel: bool = False
    param_bytes: int = 2
    grad_bytes: int = 4
    state_bytes: int = 12
    overlaps_data: float = 0.0
    has_cudnn: bool = False
    host_part: float = 1.0
    exchange_part: float = 1.0


SYSTEMS: Final[Mapping[str, System]] = MappingProxyType(
    {
        one.name: one
        for one in (
            # fp32 sums; DDP's hook reduces them after the last backward (ZeRO-0), or one all-reduce after it (ZeRO-1).
            System(name="nanotron", kernels=Kernels(loss="sharded"), is_sequence_parallel=True, overlaps_data=0.5),
            # `--accumulate-allreduce-grads-in-fp32` is off: gradients in fp16, all-reduced after the last backward.
            System(name="megatron-deepspeed", kernels=Kernels(attention="plain", loss="sharded"), grad_bytes=2,
                   host_part=1.8, exchange_part=0.1),
            # bf16 with fp32 sums (bigscience's bf16_optimizer.py), without sequence parallelism.
            System(name="bloom", kernels=Kernels(attention="plain", loss="sharded"), host_part=1.8,
                   exchange_part=0.1),
            System(name="megatron", kernels=Kernels(loss="sharded", fused_gate=True), is_sequence_parallel=True,
                   overlaps_data=1.0, has_cudnn=True, host_part=0.1),
            # FULL_SHARD; "PURE" keeps and exchanges bf16, "DEFAULT" reduces and keeps fp32.
            System(name="fsdp-pure", kernels=Kernels(), grad_bytes=2, state_bytes=4, overlaps_data=1.0, host_part=0.5),
            System(name="fsdp", kernels=Kernels(), grad_bytes=4, state_bytes=12, overlaps_data=1.0, host_part=0.5),
            System(name="deepspeed-3", kernels=Kernels(attention="plain"), grad_bytes=2, overlaps_data=1.0,
                   host_part=0.5),
            System(name="ddp", kernels=Kernels(), grad_bytes=2, state_bytes=4, overlaps_data=1.0, host_part=0.5),
        )
    }
)  # fmt: skip
"""Systems by name."""


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a system.

    Args:
        data, tensor, pipe: numbers of ranks.
        batch: sequences per micro-batch.
        micro_batches: number of micro-batches per step.
        treatment: treatment of activations, as in `tape.TREATMENTS`.
        dtype: dtype of products.
        chunks: number of pieces of the model on each pipeline rank.
    """

    system: System
    shape: Transformer
    device: Device
    sequence: int
    batch: int
    micro_batches: int
    data: int = 1
    tensor: int = 1
    pipe: int = 1
    zero: int = 0
    treatment: str = "keep"
    dtype: str = "bfloat16"
    chunks: int = 1

    @property
    def load(self) -> Workload:
        """The workload of one micro-batch."""
        system = self.system
        return Workload(
            batch=self.batch, sequence=self.sequence, tensor=self.tensor, kernels=system.kernels,
            is_sequence_parallel=system.is_sequence_parallel and self.tensor > 1,
        )  # fmt: skip

    @property
    def numel(self) -> int:
        """Number of parameters of one rank."""
        return _numel(self.shape, self.tensor) // self.pipe


@final
@dataclass(frozen=True)
class Seconds:
    """The time of a step, and its parts: compute, waiting, and update."""

    step: float
    compute: float
    exposed: float
    update: float


@lru_cache(maxsize=256)
def _numel(shape: Transformer, tensor: int) -> int:
    return sum(numel for unit in own_units(shape, tensor).values() for _, numel in unit)


@lru_cache(maxsize=64)
def sustained(device: Device, *, has_cudnn: bool = False) -> Device:
    """Return a device with the speed that it sustains over a whole step."""
    attention_part = device.attention_part
    if device.name == "h100-80" and not has_cudnn:
        attention_part = FLASH2_H100_PART
    return replace(
        device,
        matmul_part=device.matmul_part * SUSTAINED_PART,
        attention_part=attention_part * SUSTAINED_PART,
        node_bytes_per_s=device.node_bytes_per_s * NODE_PART / device.link_part,
        launch_s=2e-6,
    )


# -- time -------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8192)
def _units(run: Run) -> dict[str, tuple[float, ...]]:
    """Return the forward and backward seconds of each kind of unit, including exchanges along the tensor axis."""
    device = sustained(run.device, has_cudnn=run.system.has_cudnn)
    span = device.spread(run.tensor)
    found = dict[str, tuple[float, ...]]()
    for name in cached_tapes(run.shape, run.load):
        parts = _parts(run, name)
        found[name] = tuple(_played_s(run, device, span, lines) for lines in (parts.forward, parts.backward))
    return found


@lru_cache(maxsize=4096)
def _parts_of(shape: Transformer, load: Workload, name: str, treatment: str) -> Parts:
    return instructions(cached_tapes(shape, load)[name], treatment)


def _parts(run: Run, name: str) -> Parts:
    return _parts_of(run.shape, run.load, name, run.treatment if name == "block" else "keep")


def _played_s(run: Run, device: Device, span: Span, lines: tuple[Instruction, ...]) -> float:
    """Return the time of instructions on the device or the host, whichever is longer."""
    device_s = host_s = 0.0
    for one in lines:
        if one.kind == "run" and one.cost is not None:
            dtype = run.dtype if one.cost.kind == "matmul" else "bfloat16"
            kernels = 2 if one.what.endswith("backward") else 1
            if one.cost.kind == "matmul" and kernels == 2:
                half = replace(one.cost, flops=one.cost.flops / 2, moved_bytes=one.cost.moved_bytes / 2)
                device_s += 2 * device.kernel_s(half, dtype)
            else:
                device_s += device.kernel_s(one.cost, dtype)
            host_s += kernels * KERNEL_HOST_S * run.system.host_part
        elif one.kind == "exchange" and one.exchange is not None:
            device_s += device.collective_s(one.exchange.kind, one.exchange.nbytes, span)
            host_s += EXCHANGE_HOST_S * run.system.exchange_part
    return max(device_s, host_s)


def step_seconds(run: Run) -> Seconds:
    """Return the time of a step."""
    if run.system.name == "nanotron":
        return _nanotron_seconds(run)
    device, units = sustained(run.device, has_cudnn=run.system.has_cudnn), _units(run)
    layers = run.shape.layers
    stage = math.ceil(layers / run.pipe)
    forward, backward = (stage * units["block"][place] for place in (0, 1))
    if run.zero == 3:
        forward, backward = _gathered_s(run, device, units["block"], stage)
    ends = [units["embedding"][place] + units["head"][place] for place in (0, 1)]
    if run.pipe == 1:
        forward, backward = forward + ends[0], backward + ends[1]
    else:  # the rank with the head is the slowest, unless it has fewer layers
        spare = stage * run.pipe - layers
        forward += max(0.0, units["head"][0] - spare * units["block"][0])
        backward += max(0.0, units["head"][1] - spare * units["block"][1])
    sent_s = 0.0
    if run.pipe > 1:
        whole = run.batch * run.sequence * run.shape.hidden * 2 // (run.tensor if run.load.is_sequence_parallel else 1)
        stride = run.data * run.tensor
        sent_s = 2 * device.collective_s("send", whole, device.spread(run.pipe, stride)) * run.chunks
    # Only layers fill a pipeline; the head runs when the last rank is reached.
    bubble = (run.pipe - 1) / run.chunks * stage * sum(units["block"])
    compute = run.micro_batches * (forward + backward)
    idle = bubble + (run.micro_batches + run.pipe - 1) * sent_s * (run.pipe > 1)
    exposed = idle + (_data_s(run, device, backward) if run.zero < 3 else 0.0)
    update = _update_s(run, device)
    return Seconds(compute + exposed + update, compute, exposed, update)


def _gathered_s(run: Run, device: Device, block: tuple[float, ...], layers: int) -> tuple[float, float]:
    """Return the forward and backward of all layers, overlapped with their gathers and reductions."""
    numel = run.numel * run.pipe / run.shape.layers
    span = device.spread(run.data, run.tensor)
    gather = device.collective_s("gather", numel * 2, span)
    reduce = device.collective_s("reduce", numel * run.system.grad_bytes, span)
    return layers * max(block[0], gather), layers * max(block[1], gather + reduce)


def _data_s(run: Run, device: Device, backward_s: float) -> float:
    """Return the time that the exchange of gradients and parameters adds to a step."""
    if run.data == 1:
        return 0.0
    span = device.spread(run.data, run.tensor)
    took = device.collective_s("all-reduce", run.numel * run.system.grad_bytes, span)
    return max(0.0, took - run.system.overlaps_data * backward_s)


def _update_s(run: Run, device: Device) -> float:
    """Return the memory-bound time of clipping and the update."""
    shards = run.data if run.zero else 1
    moved = run.numel * 2 * run.system.grad_bytes + run.numel / shards * (2 * run.system.state_bytes + 6)
    return device.kernel_s(Cost(0, moved), run.dtype)


def _is_polled(run: Run) -> bool:
    return run.data * run.tensor * run.pipe >= POLLED_DEVICES


def blocks_of(run: Run) -> tuple[tuple[int, int], ...]:
    """Return (blocks, layers) of each pipeline rank of nanotron."""
    h, shape = run.shape.hidden, run.shape
    return nanotron.blocks_of(shape.layers, 4 * h * h + 3 * shape.inner * h, shape.vocabulary * h, run.pipe)


def rank_of(run: Run, *, is_last: bool = False) -> nanotron.Rank:
    """Return the first or the last pipeline rank of a run of nanotron.

    Raises:
        ValueError: a pipeline rank has no block, which the program does not support.
    """
    shape, blocks = run.shape, blocks_of(run)
    h, inner = shape.hidden, shape.inner
    if any(not one for one, _ in blocks):
        raise ValueError(f"{run.pipe} pipeline ranks exceed the {shape.layers} layers and the head; use fewer.")
    return nanotron.Rank(
        layers=blocks[-1 if is_last else 0][1], hidden=h, inner=inner, heads=shape.heads, vocabulary=shape.vocabulary,
        sequence=run.sequence, batch=run.batch, data=run.data, tensor=run.tensor, zero=run.zero,
        micro_batches=run.micro_batches, is_tied=shape.is_tied, has_embedding=run.pipe == 1 or not is_last,
        has_head=run.pipe == 1 or is_last, in_flight=1 if is_last else min(run.pipe, run.micro_batches),
        # In a pipeline the host polls for each message, or reads its sizes (p2p.py: `_send_meta`, `_recv_meta`).
        is_waiting=run.pipe > 1 or (_is_polled(run) and run.tensor < UNPOLLED_TENSOR),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _scripts_s(rank: nanotron.Rank, device: Device, exchange_s: float) -> dict[str, tuple[float, float]]:
    """Return the time of device and host for the passes of a layer and of the head."""
    clock = nanotron.Clock(device, device.spread(rank.tensor))
    found = {}
    for name, write in nanotron.SCRIPTS.items():
        device_s = host_s = 0.0
        for kind, _, took_s in write(rank, clock).lines:
            device_s += took_s * (kind in ("run", "exchange"))
            host_s += KERNEL_HOST_S * (kind == "run") + exchange_s * (kind == "exchange")
        found[name] = (device_s, host_s)
    return found


def _nanotron_seconds(run: Run) -> Seconds:
    device = sustained(run.device, has_cudnn=run.system.has_cudnn)
    first = rank_of(run)
    bare = replace(first, layers=1, data=1, zero=0, micro_batches=1, in_flight=1)
    exchange_s = EXCHANGE_HOST_S
    if first.is_waiting:
        exchange_s += run.tensor * (BLOCKED_S[0] + BLOCKED_S[1] * device.spread(run.tensor).nodes)
    took = _scripts_s(bare, device, exchange_s)
    stages = []
    for place, (_, layers) in enumerate(blocks_of(run)):
        has_head = place == run.pipe - 1
        sums = []
        for block, head in (("forward", "head"), ("backward", "head backward")):
            pair = [layers * took[block][side] + has_head * took[head][side] for side in (0, 1)]
            sums.append(max(pair))
        stages.append((sum(sums), sums[1]))
    micro_s, backward_s = max(stages)
    filled_s = sum(one for one, _ in stages) - micro_s
    numel = sum(numel for _, numel in first.parameters)
    micro_s += device.kernel_s(Cost(0, numel * 10), "bfloat16")  # gradients are added to fp32 sums
    compute = run.micro_batches * micro_s
    exposed = 0.0
    if run.pipe > 1:
        whole = run.batch * run.sequence * run.shape.hidden * 2 // run.tensor
        send_s = device.collective_s("send", whole, device.spread(run.pipe, run.data * run.tensor))
        poll_s = (POLLED_S if _is_polled(run) else MESSAGE_S) + 2 * send_s
        exposed = filled_s + (run.micro_batches + run.pipe - 1) * poll_s
    span = device.spread(run.data, run.tensor)
    is_sharded = run.zero > 0 and run.data > 1
    summed_s = device.collective_s("all-reduce", numel * 4, span)
    exposed += summed_s if is_sharded else max(0.0, summed_s - run.system.overlaps_data * backward_s)
    if is_sharded:
        exposed += device.collective_s("gather", numel * 2, span)
    update = _update_s(replace(run, system=replace(run.system, grad_bytes=4)), device)
    return Seconds(compute + exposed + update, compute, exposed, update)


# -- memory -----------------------------------------------------------------------------------------------------------


def usable_bytes(run: Run) -> int:
    """Return the memory available to the allocator: the device's without the context and a communicator per group."""
    device = run.device
    groups = 1 + (run.data > 1) + (run.tensor > 1) + (run.pipe > 1)
    return device.memory_bytes - device.context_bytes - groups * device.communicator_bytes


def memory_bytes(run: Run, kind: str) -> int:
    """Return the peak of memory.

    Args:
        kind: "reserved", "allocated", or "device" (with context and communicators).

    Raises:
        MemoryError: the device has too little memory.
        ValueError: the program does not support this run.
    """
    if run.system.name == "nanotron":
        found = reserved_bytes(rank_of(run), usable_bytes(run))
        if not found or (run.pipe > 1 and not reserved_bytes(rank_of(run, is_last=True), usable_bytes(run))):
            raise MemoryError("The device has too little memory.")
        return found
    found = _allocated_bytes(run)
    if found > usable_bytes(run):
        raise MemoryError("The device has too little memory.")
    return found + (run.device.memory_bytes - usable_bytes(run)) * (kind == "device")


def _allocated_bytes(run: Run) -> int:
    """Return the peak of states and activations, in closed form, of the first pipeline rank."""
    system, shape = run.system, run.shape
    shards = [run.data if run.zero >= stage else 1 for stage in (3, 2, 1)]
    sizes = system.param_bytes, system.grad_bytes, system.state_bytes
    states = run.numel * sum(size / shard for size, shard in zip(sizes, shards, strict=True))
    block, head = _parts(run, "block"), _parts(run, "head")
    layers = math.ceil(shape.layers / run.pipe)
    kept = min(run.pipe, run.micro_batches) * layers * max(0, block.saved_bytes)
    most = max(block.forward_bytes, block.backward_bytes)
    if run.pipe == 1:
        most = max(most, head.saved_bytes + head.forward_bytes, head.backward_bytes)
    if run.zero == 3:
        most += 2 * (system.param_bytes + system.grad_bytes) * run.numel * run.pipe // shape.layers
    return int(states + kept + most)
