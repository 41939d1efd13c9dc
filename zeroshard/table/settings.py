"""Timeouts, transports and assurances of the caller.

Owns `Settings`, with a field for each option of `shard()` that is not an argument. It must not know what the options
do.
"""

from dataclasses import dataclass
from typing import Literal, final

__all__ = ["HOT_NUMEL", "Settings", "WIRE_BYTES"]

HOT_NUMEL = 1 << 14
"""In host memory, gradients of at least this many elements are summed on arrival, in the cache, to check that they are
finite; those of fewer are copied together, and summed before the update."""

WIRE_BYTES = 1 << 24
"""Four times the smallest size without a measurable cost over loopback; docs/benchmarks.md has the table."""


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of `zs.shard(settings=)`, the same on every rank.

    Args:
        watchdog_s: seconds after which a wait for another rank raises an error that lists the operation of every rank.
        heartbeat_s: seconds without a heartbeat after which a rank (stopped or unreachable) is named as the cause, and
            the other ranks end.
        shared_memory: whether ranks of one host read each other's memory, for gloo on the CPU when a replica of the
            state fits one host. It is faster than messages and gives the same bits.
        elementwise: True asserts that optimizers of unknown classes update each element independently; None tests them.
        wire_bytes: bytes of the buffers of one reduction by messages. Larger units are sent in pieces of at least
            65,536 elements, which bounds the buffers for a model of any size.
        forward_methods: methods, besides the model's `forward`, that compute with its parameters when called directly:
            "features" of the model, "encoder.encode" or "head.forward" of its modules.
        non_finite: the response to a gradient that is not finite, without a loss scale: "raise" raises an error on all
            ranks before anything changes, "skip" skips the step on all ranks and logs a line on rank 0.
        buffers: what ranks do with the buffers that a forward with gradients changed, such as the statistics of batch
            norms: "rank 0" takes those of the first rank, as DistributedDataParallel does, "mean" their mean over the
            ranks (integers and bools are rank 0's), "own" leaves each rank its own.
        compare_inputs: whether ranks along an axis "tensor" compare the model's inputs, which must be equal there, at
            the first forward of each shape; False for a model whose inputs are meant to differ.
        device_bytes: bytes of device memory that `stage="auto"` and `offload="auto"` may use on each rank; None for all
            free memory, and on a CPU for a rank's part of host memory (`stage`) or any amount (`offload`).

    ```python
    import torch, zeroshard as zs

    model = torch.nn.Linear(4, 2)
    zs.shard(model, settings=zs.Settings(watchdog_s=60.0))
    ```
    """

    watchdog_s: float = 600.0
    heartbeat_s: float = 30.0
    shared_memory: bool = True
    elementwise: bool | None = None
    wire_bytes: int = WIRE_BYTES
    forward_methods: tuple[str, ...] = ()
    non_finite: Literal["raise", "skip"] = "raise"
    buffers: Literal["rank 0", "own", "mean"] = "rank 0"
    compare_inputs: bool = True
    device_bytes: int | None = None
