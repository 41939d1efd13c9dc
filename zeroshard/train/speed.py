"""How much of a device's peak a run uses: the floating-point operations of a token, and the peak of known devices.

Owns that arithmetic, and when a process began. It must not know the loop. Read `utilization` first.
"""

import os
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from zeroshard.plan.machine.profiles import device_for
from zeroshard.train.config import Config

__all__ = ["flops_per_token", "peak_flops", "seconds_of", "utilization"]

_DTYPES: Final = MappingProxyType({"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"})
_STARTED: Final = 19
"""Place of the start time among the values of /proc/PID/stat after the name."""
_SIZED: Final = ("a100", "v100")
"""Devices of which the name of a preset ends with the memory in GB."""


def flops_per_token(config: Config, model: torch.nn.Module) -> float:
    """Return the floating-point operations of a training step for each token: products of matrices alone.

    Recomputation does not count: the figure is of the model, not of what a run does.

    Source: Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1; Chowdhery et al., "PaLM", 2022,
    appendix B, for attention.
    """
    trained = frozen = 0
    for parameter in model.parameters():
        if parameter.ndim > 1:
            trained += parameter.numel() * parameter.requires_grad
            frozen += parameter.numel() * (not parameter.requires_grad)
    # A forward takes 2 operations a weight, and a backward 2 for the input and 2 for the weight, if it is trained.
    own: Any = getattr(model, "config", None)
    layers, width = (config.model.depth, config.gpt.width) if not config.hf_folder else _shape_of(own)
    return 6.0 * trained + 4.0 * frozen + 12.0 * layers * width * config.model.context


def _shape_of(config: Any) -> tuple[int, int]:
    """Return layers and width of a model of transformers; zeros where it does not say."""
    found = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(found, "num_hidden_layers", 0) or 0), int(getattr(found, "hidden_size", 0) or 0)


def peak_flops(config: Config, device: torch.device) -> float | None:
    """Return the operations a second that a rank's device can do in the run's precision; None if it is not known."""
    if device.type != "cuda":
        return None
    about = torch.cuda.get_device_properties(device)
    words = about.name.lower().replace("-", " ").split()
    name = next((word for word in words if word in ("v100", "a100", "h100", "h200", "b200", "l40s", "mi300x")), "")
    if name in _SIZED:
        name += f"-{40 if about.total_memory < 60e9 else 80}" if name == "a100" else "-32"
    try:
        peaks = device_for("h100-80" if name == "h100" else name or "this").peak_flops
    except ValueError:
        return None
    return peaks.get(_DTYPES[config.train.precision], peaks["float32"])


def utilization(tokens_per_s: float, flops: float, peak: float | None, ranks: int) -> float | None:
    """Return the part of the peak of all ranks that a rate of tokens uses (MFU); None without a peak.

    >>> from zeroshard.train.speed import utilization
    >>> utilization(1e4, 6e9, 1e14, 2)
    0.3
    """
    return None if peak is None else tokens_per_s * flops / (peak * ranks)


def seconds_of(process: int | None = None) -> float:
    """Return the seconds since a process began: this one by default."""
    stat = Path(f"/proc/{process or os.getpid()}/stat").read_text()
    ticks = int(stat.rpartition(")")[2].split()[_STARTED])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
