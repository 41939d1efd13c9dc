"""Systems by name: programs that train, as options of a plan, and the sources of these options.

Owns the table. `step/system.py` has the record, and the film plays it; published runs are in `evidence/`. Needs no
torch.

Source: pytorch (torch/distributed/fsdp, torch/nn/parallel/distributed.py); microsoft/DeepSpeed (runtime/zero);
NVIDIA/Megatron-LM (megatron/core: tensor_parallel, pipeline_parallel/schedules.py, distributed); bigscience's
Megatron-DeepSpeed; huggingface/nanotron, branch nouamane/bench2 (trainer.py, helpers.py, optim/gradient_accumulator.py,
optim/zero.py, parallel/pipeline_parallel/p2p.py); mosaicml/llm-foundry.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from zeroshard.plan.machine.hardware import Device
from zeroshard.plan.shape.transformer import Kernels
from zeroshard.plan.step.system import ZEROSHARD, System
from zeroshard.table.sizes import MIB

__all__ = ["SYSTEMS", "precision_of_system", "system_named", "with_loss"]

FUSED: Final = Kernels(loss="sharded", fused_gate=True)
LOSSES: Final = ("logits", "fused", "chunked")
"""Cross-entropies of shapes that a plan can be asked for."""
PLAIN: Final = Kernels(attention="plain", loss="sharded")

_NANOTRON: Final = System(
    # fp32 sums, to which the gradients in bf16 are added when a backward ends. DDP wraps the model without ZeRO only,
    # and its hook reduces the sums; ZeRO-1 all-reduces them after the last backward (optim/gradient_accumulator.py).
    name="nanotron", stage=1, precision="bf16", kernels=Kernels(loss="sharded", program="nanotron"),
    is_sequence_parallel=True, no_sync=True, reduces_beside=False, sums_everywhere=True, keeps_gradients=True,
    bucket_bytes=-1, publishes_flat=True, has_parameter_states=True, probed_bytes=8 << 30, workspaces_bytes=32 * MIB,
    tensor_buffers=2, runs_ahead=1024, cut="compute", message_s=2e-3, host_part=1.0, exchange_part=1.0,
)  # fmt: skip

SYSTEMS: Final[Mapping[str, System]] = MappingProxyType(
    {
        one.name: one
        for one in (
            ZEROSHARD,
            # FULL_SHARD. FSDP2 copies gathered units out of a flat buffer; FSDP1's flat parameter is that buffer. Both
            # keep masters alone, cast them for the gather, and keep the root gathered (torch/distributed/fsdp);
            # torchtitan keeps the head, too (`reshard_after_forward` in its models' parallelize.py).
            System(name="fsdp2", stage=3, precision="bf16", copies=True, keeps_last=True, keeps_masters_alone=True),
            System(name="fsdp1", stage=3, precision="bf16", keeps_last=True, keeps_masters_alone=True),
            System(name="ddp", stage=0, precision="all-bf16", bucket_bytes=-1, no_sync=True),
            System(name="deepspeed-1", stage=1, precision="bf16-grads", no_sync=True, reduces_beside=False,
                   sums_everywhere=True, publishes_beside=False),
            System(name="deepspeed-2", stage=2, precision="bf16-grads", bucket_bytes=2 * 5 * 10**8 * 2,
                   publishes_beside=False),
            # A prefetch bucket of 5e7 elements (`stage3_prefetch_bucket_size`) hides little of a layer of 1e9.
            System(name="deepspeed-3", stage=3, precision="bf16-grads", bucket_bytes=5 * 10**8 * 2,
                   gathers_beside=False),
            # ZeRO-Offload, and ZeRO-Infinity to the host (runtime/zero/stage_1_and_2.py, stage3.py).
            System(name="deepspeed-2-offload", stage=2, precision="bf16-grads", bucket_bytes=2 * 5 * 10**8 * 2,
                   offload="states=1,to=host", publishes_beside=False),
            System(name="deepspeed-3-offload", stage=3, precision="bf16-grads", bucket_bytes=5 * 10**8 * 2,
                   gathers_beside=False,
                   offload="states=1,parameters=1,to=host"),
            System(name="megatron-lm", stage=1, precision="bf16", kernels=FUSED, is_sequence_parallel=True,
                   no_sync=True, keeps_gradients=True, publishes_beside=False, cut="even", host_part=0.1,
                   exchange_part=0.1, has_cudnn=True),
            # Of 2021: without sequence parallelism and fused attention, and gradients in fp16 all-reduced at the end.
            System(name="megatron-deepspeed", stage=0, precision="paper", kernels=PLAIN, no_sync=True,
                   sums_everywhere=True, reduces_beside=False, keeps_gradients=True, cut="even", host_part=1.8,
                   exchange_part=0.1),
            _NANOTRON,
        )
    }
)  # fmt: skip
"""Systems by name."""


def system_named(system: str | System) -> System:
    """Return a system by name, or the system itself.

    Raises:
        ValueError: no system has this name.
    """
    if isinstance(system, System):
        return system
    if system not in SYSTEMS:
        raise ValueError(f"system must be one of {', '.join(SYSTEMS)}; got {system!r}.")
    return SYSTEMS[system]


def with_loss(system: System, loss: object) -> System:
    """Return a system with another cross-entropy.

    Raises:
        ValueError: no kernels have this name, or those of the system are all its own.
    """
    if system.kernels.program:
        raise ValueError(f"loss= with {system.name}: its kernels have their own. Leave loss= out.")
    if loss not in LOSSES:
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}; got {loss!r}.")
    return replace(system, kernels=replace(system.kernels, loss=loss))


def precision_of_system(system: System, device: Device) -> str:
    """Return the precision of a program on a device, by name: in float16 where that is the faster one.

    Raises:
        ValueError: the program is known in bfloat16 only, which the device does not support.
    """
    half = device.half_precision
    if half == "bf16" or not system.precision:
        return system.precision or half
    found = {"bf16": "fp16", "bf16-grads": "paper"}.get(system.precision, system.precision)
    if found.startswith(("bf16", "all-bf16")):
        raise ValueError(f"{system.name} with {found} needs bfloat16, which {device.name} does not support.")
    return found
