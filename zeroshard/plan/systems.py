"""Systems by name: programs that train, as options of a plan, and the sources of these options.

Owns the table. `step/system.py` has the record, and the film plays it; published runs are in `evidence/`. Needs no
torch.

Source: pytorch (torch/distributed/fsdp, torch/nn/parallel/distributed.py); microsoft/DeepSpeed (runtime/zero);
NVIDIA/Megatron-LM (megatron/core: tensor_parallel, pipeline_parallel/schedules.py, distributed); bigscience's
Megatron-DeepSpeed; huggingface/nanotron, branch nouamane/bench2 (trainer.py, helpers.py, optim/gradient_accumulator.py,
optim/zero.py, parallel/pipeline_parallel/p2p.py); mosaicml/llm-foundry.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from zeroshard.plan.machine.hardware import Device
from zeroshard.plan.shape.transformer import Kernels
from zeroshard.plan.step.system import ZEROSHARD, System

__all__ = ["SYSTEMS", "precision_of_system", "system_named", "with_loss"]

LOSSES: Final = ("logits", "fused", "chunked")
"""Cross-entropies of shapes that a plan can be asked for."""


def _system(kernels: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> System:
    return System(kernels=Kernels(**kernels), **options)


SYSTEMS: Final[Mapping[str, System]] = MappingProxyType(
    {ZEROSHARD.name: ZEROSHARD}
    | {
        one["system"]["name"]: _system(**one["system"])
        for one in json.loads(Path(__file__).with_name("systems.json").read_text())
    }
)
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
