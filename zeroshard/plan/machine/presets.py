"""Presets of devices: accelerators by the names that people use for them, in numbers.

Owns the table and the names. `hardware.py` has the formulas. Needs no torch. Each number is a vendor's figure or a
public measurement, but for the two that the note says.

Note: what was settled on published runs
    `Device.node_part`, `queue_s` and `exchange_s`, and the third number of `reached`, are of whole steps, which no
    public measurement isolates. They were settled on the half of published rows of time that `zeroshard scorecard`
    calls "chosen on", and are judged on the other half.

Source: vendors' data sheets (dense peaks; NVIDIA gives those with sparsity, which are twice as high);
ml-engineering (S. Bekman), "Maximum Achievable Matmul FLOPS"; Dao, FlashAttention-2 (arXiv 2307.08691), section 4.1:
335 TFLOPS on an H100, of 989, and 225 on an A100 without a causal mask's half, of 312.
"""

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from zeroshard.plan.machine.hardware import GB, MIB, Device

__all__ = ["DEVICES", "device_named"]


def _preset(
    name: str,
    tflops: tuple[float, float, float],
    mib: int,
    rates: tuple[float, float, float, float],
    reached: tuple[int, float, float, float],
    node_ranks: int = 8,
    host_memory: float = 200,
    narrow: tuple[int, ...] = (),
) -> Device:
    """Return a preset.

    Args:
        tflops: peaks of bfloat16, float16 and float32.
        mib: device memory that a process can use, in MiB.
        rates: bandwidths in GB/s of memory, links, a node's adapters, and to the host.
        reached: number of multiprocessors, the fractions of the peak that products and attention reach, and the
            fraction of both that a step sustains.
        host_memory: GB/s of an update on the host: a server, or a desktop with two channels.
        narrow: how many times as fast as in bfloat16 products are in FP8, and in FP4.
    """
    peaks = dict(zip(("bfloat16", "float16", "float32"), (one * 1e12 for one in tflops), strict=True))
    peaks |= {dtype: times * peaks["bfloat16"] for dtype, times in zip(("float8", "float4"), narrow, strict=False)}
    memory, link, node, host = (one * GB for one in rates)
    multiprocessors, matmul_part, attention_part, sustained_part = reached
    return Device(
        name,
        MappingProxyType(peaks),
        mib * MIB,
        memory,
        link,
        node,
        host,
        node_ranks,
        multiprocessors=multiprocessors,
        matmul_part=matmul_part,
        attention_part=attention_part,
        host_memory_bytes_per_s=host_memory * GB,
        sustained_part=sustained_part,
        cudnn_part=max(attention_part, 0.5),
    )


HOPPER: Final = (2,)
BLACKWELL: Final = (2, 4)
BLACKWELL_300: Final = (2, 6)
DESKTOP: Final = 60
DEVICES: Final[Mapping[str, Device]] = MappingProxyType(
    {
        one.name: one
        for one in (
            _preset("t4", (0.1, 65, 8.1), 15102, (320, 12, 6, 12), (40, 0.6, 0.3, 0.75)),
            _preset("v100-16", (0.1, 125, 15.7), 16144, (900, 150, 50, 16), (80, 0.76, 0.3, 0.75)),
            _preset("v100-32", (0.1, 125, 15.7), 32510, (900, 150, 50, 16), (80, 0.76, 0.3, 0.75)),
            _preset("a10g", (70, 70, 35), 22731, (600, 31, 12.5, 31), (80, 0.8, 0.5, 0.75)),
            _preset("a6000", (154.8, 154.8, 38.7), 48677, (768, 31, 12.5, 31), (84, 0.8, 0.5, 0.75)),
            _preset("a100-40", (312, 312, 19.5), 40536, (1555, 300, 200, 31), (108, 0.87, 0.6, 0.75)),
            _preset("a100-80", (312, 312, 19.5), 81251, (2039, 300, 200, 31), (108, 0.87, 0.6, 0.75)),
            _preset("h100-80", (989, 989, 67), 81079, (3350, 450, 400, 63), (132, 0.8, 335 / 989, 0.75), narrow=HOPPER),
            _preset("h100-pcie", (756, 756, 51), 81079, (2000, 63, 400, 63), (114, 0.7, 335 / 989, 0.75),
                    narrow=HOPPER),
            _preset("h100-nvl", (835, 835, 60), 95830, (3900, 300, 400, 63), (132, 0.75, 335 / 989, 0.75),
                    narrow=HOPPER),
            _preset("h20", (148, 148, 44), 97871, (4000, 450, 400, 63), (78, 0.9, 0.6, 0.95), narrow=HOPPER),
            _preset("h200", (989, 989, 67), 143156, (4800, 450, 400, 63), (132, 0.8, 335 / 989, 0.75), narrow=HOPPER),
            _preset("gh200", (989, 989, 67), 97871, (4000, 450, 100, 450), (132, 0.8, 335 / 989, 0.75), node_ranks=1,
                    narrow=HOPPER),
            _preset("b200", (2250, 2250, 80), 182642, (8000, 900, 400, 63), (148, 0.775, 0.45, 0.75),
                    narrow=BLACKWELL),
            _preset("b300", (2250, 2250, 80), 275040, (8000, 900, 800, 63), (148, 0.775, 0.45, 0.75),
                    narrow=BLACKWELL_300),
            _preset("gb200", (2500, 2500, 80), 189471, (8000, 900, 200, 450), (148, 0.73, 0.45, 0.75), node_ranks=72,
                    narrow=BLACKWELL),
            _preset("gb300", (2500, 2500, 80), 284000, (8000, 900, 400, 450), (148, 0.73, 0.45, 0.75), node_ranks=72,
                    narrow=BLACKWELL_300),
            _preset("mi300x", (1307, 1307, 163), 196592, (5300, 448, 400, 63), (304, 0.51, 0.35, 0.75), narrow=HOPPER),
            _preset("mi325x", (1307, 1307, 163), 262128, (6000, 448, 400, 63), (304, 0.51, 0.35, 0.75), narrow=HOPPER),
            _preset("l4", (121, 121, 30.3), 22574, (300, 31, 12.5, 31), (58, 0.6, 0.4, 0.75), narrow=HOPPER),
            _preset("l40s", (362, 362, 91.6), 45589, (864, 31, 50, 31), (142, 0.7, 0.45, 0.75), narrow=HOPPER),
            _preset("rtx3090", (71, 71, 35.6), 24122, (936, 10, 3, 31), (82, 0.9, 0.6, 0.75), host_memory=DESKTOP),
            _preset("rtx4090", (165, 165, 82.6), 24217, (1008, 10, 3, 31), (128, 0.9, 0.6, 0.75), host_memory=DESKTOP),
            _preset("rtx5090", (210, 210, 104.8), 32109, (1792, 10, 3, 63), (170, 0.9, 0.6, 0.75),
                    host_memory=DESKTOP),
        )
    }
)  # fmt: skip
"""Presets by name."""


USUAL: Final = MappingProxyType(
    {"h100": "h100-80", "a100": "a100-80", "v100": "v100-32", "rtxa6000": "a6000", "a10": "a10g", "h100-94": "h100-nvl"}
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
    near = difflib.get_close_matches(found, [*DEVICES, *USUAL], n=3, cutoff=0.5)
    hint = f" Nearest: {', '.join(near)}." if near else ""
    raise ValueError(f"device must be one of {', '.join(DEVICES)}, or a Device; got {device!r}.{hint}")
