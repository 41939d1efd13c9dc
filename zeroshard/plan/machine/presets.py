"""Presets of devices: accelerators by the names that people use for them, in numbers.

Owns `presets.json` and the names. `hardware.py` has the formulas. Needs no torch. Each number is a vendor's figure or a
public measurement, but for the two that the note says.

Note: what was settled on published runs
    `Device.node_part`, `queue_s` and `exchange_s`, and `SUSTAINED`, are of whole steps, which no public measurement
    isolates. They were settled on the half of published rows of time that `zeroshard scorecard`
    calls "chosen on", and are judged on the other half.

Source: vendors' data sheets (dense peaks; NVIDIA gives those with sparsity, which are twice as high);
ml-engineering (S. Bekman), "Maximum Achievable Matmul FLOPS"; Dao, FlashAttention-2 (arXiv 2307.08691), section 4.1:
335 TFLOPS on an H100, of 989, and 50 to 73% of an A100's peak.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from zeroshard.plan.machine.hardware import Device
from zeroshard.plan.numbers import nearest

__all__ = ["DEVICES", "device_named"]


SUSTAINED: Final = 0.75
"""Fraction of the speed of isolated products and attention that a step sustains: clocks drop at a device's power."""


def _preset(attention_part: float, peak_flops: Mapping[str, float], **rest: Any) -> Device:
    return Device(
        peak_flops=MappingProxyType(peak_flops),
        attention_part=attention_part,
        cudnn_part=max(attention_part, 0.5),
        sustained_part=SUSTAINED,
        **rest,
    )


DEVICES: Final[Mapping[str, Device]] = MappingProxyType(
    {one["name"]: _preset(**one) for one in json.loads(Path(__file__).with_name("presets.json").read_text())}
)
"""Presets by name."""
USUAL: Final = MappingProxyType(
    {"h100": "h100-80", "a100": "a100-80", "v100": "v100-32", "rtxa6000": "a6000", "a10": "a10g"}
)
"""The preset that a name without a size means, and other names."""


def device_named(device: "str | Device") -> Device:
    """Return a preset by name, or the device itself.

    Names may have a vendor, "GB" and the form of the board, in any case: "H100-80GB-SXM", "NVIDIA A100", "4090".

    Raises:
        ValueError: no preset has this name; the message has the nearest names.
    """
    if isinstance(device, Device):
        return device
    short = re.sub(r"[ _]+", "-", str(device).strip().lower())
    short = re.sub(r"nvidia-?|amd-?|geforce-?|instinct-?|-?sxm\d?|-?hbm\d?e?|-?oam", "", short)
    short = re.sub(r"(?<=\d)gb?\b(?!\d)", "", short) if short not in DEVICES else short
    short = re.sub(r"^(rtx-|(?=[345]0[789]0))", "rtx", short)
    found = USUAL.get(short, short)
    if found in DEVICES:
        return DEVICES[found]
    raise ValueError(
        f"device must be one of {', '.join(DEVICES)}, 'this' or the file of a profile (zeroshard doctor), or a Device; "
        f"got {device!r}.{nearest(found, (*DEVICES, *USUAL))}"
    )
