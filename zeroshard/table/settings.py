"""What is set beside what is sharded and how: waits, transports, what the caller vouches for.

Owns `Settings`, a field for each option of `shard()` that is not an argument of its own. It must not know what they do.
"""

from dataclasses import dataclass
from typing import Literal, final

__all__ = ["Settings", "WIRE_BYTES"]

WIRE_BYTES = 1 << 24
"""Four times the least that costs no time that could be measured, over loopback; docs/benchmarks.md has the table."""


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of `zs.shard(settings=)`, the same on every rank.

    Args:
        watchdog_s: seconds after which a wait for another rank is an error that names what every rank does.
        heartbeat_s: seconds after which a rank without a sign of life, stopped or out of reach, is named as the cause,
            and the others end.
        shared_memory: False has ranks send messages even where a copy of the state lies on one host, with gloo on the
            CPU: there they read each other's memory by default, which is faster and gives the same bits.
        elementwise: True vouches for optimizers that are not known to update each element by itself; None tries them.
        wire_bytes: of the buffers that one reduction by messages may take, or one conversion for NCCL: a larger unit
            travels in pieces, so that no buffer grows with the model or its largest unit. A piece has 65,536 elements
            at least.
        forward_methods: methods, besides the model's `forward`, that compute with its parameters when they are called
            by themselves: "features" of the model, "encoder.encode" or "head.forward" of modules in it.
        non_finite: what a gradient that is not finite is, without a loss scale: "raise", an error on all ranks before
            anything is changed, or "skip", a step that all ranks leave out, with a line in rank 0's log.
        device_bytes: of its device that a rank may take, where `offload="auto"` decides what lies there; None for all
            that is free, and on a CPU for any amount.

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
    device_bytes: int | None = None
