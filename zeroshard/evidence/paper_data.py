"""The ZeRO paper's published data: its tables, its figures, and their configurations.

Owns published numbers, each with its table or figure. It must not know the predictions (`paper_runs.py`, `paper.py`).
The figures are bar and line charts without labels: their values were read off the charts to about 2%, and are marked
(`is_read_off`).
Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, as arXiv
1910.02054v3; its appendix for the configurations. For the single-device baseline: Shoeybi et al., "Megatron-LM:
Training Multi-Billion Parameter Language Models Using Model Parallelism", arXiv 1909.08053.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, final

__all__ = [
    "FIGURE_1",
    "FIGURE_2",
    "FIGURE_3",
    "FIGURE_4",
    "FIGURE_6",
    "FIGURE_7",
    "FIGURE_8",
    "Largest",
    "MEGATRON",
    "Pair",
    "Run",
    "SLIPS",
    "TABLE_1",
    "TABLE_2",
    "TABLE_2_MEASURED",
]


@final
@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured configuration.

    Args:
        row: "baseline", or a configuration of table 3, "C1" to "C5".
        layers, hidden, heads: sizes of the GPT-2 model, with sequences of 1,024 tokens.
        devices: number of devices.
        tensor: number of ranks of model parallelism (MP).
        batch: sequences per model replica.
        published: teraFLOPS per device, or GB of cached memory; 0 if the run was out of memory.
        is_read_off: whether `published` was read off a chart.
    """

    label: str
    row: str
    layers: int
    hidden: int
    heads: int
    devices: int
    tensor: int
    batch: int
    published: float
    is_read_off: bool = True


@final
@dataclass(frozen=True)
class Pair:
    """A size of figure 2: ZeRO and the baseline."""

    zero: Run
    baseline: Run


@final
@dataclass(frozen=True)
class Largest:
    """A bar of figure 6: the largest model of a configuration.

    Args:
        published: parameters, in billions.
        hidden, heads: sizes of its layers; the prediction finds their number.
    """

    row: str
    hidden: int
    heads: int
    published: float


FIGURE_1: Final[Mapping[str, str]] = MappingProxyType(
    {"baseline": "120", "P_os": "31.4", "P_os+g": "16.6", "P_os+g+p": "1.9"}
)
"""GB of model states per device, as printed: 7.5 billion parameters, 64 ranks, K = 12."""

TABLE_1: Final[Mapping[tuple[float, int], tuple[str, str, str]]] = MappingProxyType(
    {
        (7.5, 1): ("120", "120", "120"),
        (7.5, 4): ("52.5", "41.3", "30"),
        (7.5, 16): ("35.6", "21.6", "7.5"),
        (7.5, 64): ("31.4", "16.6", "1.88"),
        (7.5, 256): ("30.4", "15.4", "0.47"),
        (7.5, 1024): ("30.1", "15.1", "0.12"),
        (128, 1): ("2048", "2048", "2048"),
        (128, 4): ("896", "704", "512"),
        (128, 16): ("608", "368", "128"),
        (128, 64): ("536", "284", "32"),
        (128, 256): ("518", "263", "8"),
        (128, 1024): ("513", "257", "2"),
        (1000, 1): ("16000", "16000", "16000"),
        (1000, 4): ("7000", "5500", "4000"),
        (1000, 16): ("4750", "2875", "1000"),
        (1000, 64): ("4187", "2218", "250"),
        (1000, 256): ("4046", "2054", "62.5"),
        (1000, 1024): ("4011", "2013", "15.6"),
    }
)
"""GB of model states by (billions of parameters, data-parallel ranks), for P_os, P_os+g and P_os+g+p, as printed."""

TABLE_2: Final[Mapping[int, tuple[str, str, str, str]]] = MappingProxyType(
    {
        1: ("2", "7.6", "14.4", "128"),
        2: ("4", "15.2", "28.8", "256"),
        4: ("8", "30.4", "57.6", "512"),
        8: ("16", "60.8", "115.2", "1024"),
        16: ("32", "121.6", "230.4", "2048"),
    }
)
"""Billions of parameters in 32 GB with 64 data-parallel ranks, by model parallelism: baseline, P_os, P_os+g, P_os+g+p.

The paper prints 512, 1024 and 2048 billion as 0.5T, 1T and 2T.
"""

TABLE_2_MEASURED: Final[Mapping[int, tuple[float, float]]] = MappingProxyType(
    {1: (1.3, 6.2), 2: (2.5, 12.5), 4: (5, 25), 8: (10, 50), 16: (20, 100)}
)
"""Billions of parameters that ran, by model parallelism: baseline, P_os."""


def _pair(
    label: str, layers: int, hidden: int, zero: tuple[int, int, int, float], base: tuple[int, int, int, int, float]
) -> Pair:
    """Return a row of table 5: (MP, heads, batch, teraFLOPS) of ZeRO; for the baseline, devices come first."""
    tensor, heads, batch, published = zero
    row = "C5" if label == "170B" else "C4" if tensor > 1 else "C3"
    ours = Run(label=label, row=row, layers=layers, hidden=hidden, heads=heads, devices=400, tensor=tensor, batch=batch,
               published=published)  # fmt: skip
    devices, tensor, heads, batch, published = base
    theirs = Run(label=label, row="baseline", layers=layers, hidden=hidden, heads=heads, devices=devices, tensor=tensor,
                 batch=batch, published=published)  # fmt: skip
    return Pair(ours, theirs)


FIGURE_2: Final = tuple(
    _pair(*row)
    for row in (
        ("1.5B", 48, 1600, (1, 16, 24, 30.3), (400, 2, 16, 16, 26.4)),
        ("8B", 72, 3072, (4, 24, 64, 36.9), (400, 8, 24, 8, 23.1)),
        ("40B", 88, 6144, (4, 32, 12, 35.9), (384, 32, 64, 4, 4.9)),
        ("60B", 132, 6144, (16, 32, 64, 36.5), (384, 64, 64, 4, 6.3)),
        ("80B", 100, 8192, (16, 64, 32, 37.6), (384, 128, 128, 4, 5.2)),
        ("100B", 125, 8192, (16, 64, 32, 38.7), (384, 128, 128, 2, 3.8)),
        ("120B", 150, 8192, (16, 64, 24, 28.1), (384, 128, 128, 2, 3.8)),
        ("140B", 175, 8192, (16, 64, 16, 26.9), (384, 128, 128, 2, 3.8)),
        ("170B", 212, 8192, (16, 64, 12, 20.9), (256, 256, 256, 2, 2.2)),
    )
)
"""Throughput by model size against Megatron-LM; table 5."""

FIGURE_3: Final = tuple(
    Run(label=f"{devices} devices", row="C4", layers=75, hidden=8192, heads=32, devices=devices, tensor=16, batch=batch,
        published=published)
    for devices, batch, published in ((64, 16, 25.7), (128, 48, 37.6), (256, 48, 39.1), (400, 64, 36.6))
)  # fmt: skip
"""60 billion parameters on increasing numbers of devices; table 6."""

FIGURE_4: Final = tuple(
    Run(label=label, row=row, layers=layers, hidden=hidden, heads=heads, devices=128, tensor=1, batch=batch,
        published=published)
    for label, row, layers, hidden, heads, batch, published in (
        ("DDP 1.16B", "baseline", 24, 1920, 16, 8, 39.3),
        ("DDP 1.38B", "baseline", 40, 1536, 16, 1, 18.1),
        ("1.5B", "C3", 34, 1920, 16, 24, 40.3),
        ("2.5B", "C3", 54, 1920, 16, 24, 41.9),
        ("4B", "C3", 64, 2304, 24, 16, 43.5),
        ("6B", "C3", 52, 3072, 24, 12, 47.0),
        ("8B", "C3", 72, 3072, 24, 8, 47.0),
        ("10B", "C3", 50, 4096, 32, 6, 41.1),
        ("11B", "C3", 54, 4096, 32, 4, 35.7),
        ("12B", "C3", 58, 4096, 32, 4, 32.9),
        ("13B", "C3", 62, 4096, 32, 2, 21.2),
    )
)  # fmt: skip
"""Data parallelism on 128 devices; table 10. Without model parallelism, P_a has nothing to split."""

FIGURE_6: Final = (
    Largest("C1", 8192, 32, 40),
    Largest("C2", 6144, 32, 60),
    Largest("C3", 8192, 32, 50),
    Largest("C4", 8192, 64, 140),
    Largest("C5", 8192, 64, 150),
)
"""The largest model by configuration: 400 devices, MP 16, batch 16; table 7."""

FIGURE_7: Final = tuple(
    Run(label=label, row=row, layers=layers, hidden=8192, heads=heads, devices=400, tensor=16, batch=batch,
        published=published)
    for label, row, layers, heads, batch, published in (
        ("40B", "C1", 50, 32, 16, 29.7),
        ("40B", "C2", 50, 32, 16, 24.1),
        ("40B", "C3", 50, 32, 16, 25.5),
        ("40B", "C4", 50, 32, 16, 19.8),
        ("40B", "C5", 50, 32, 16, 19.8),
        ("100B", "C4", 125, 64, 32, 29.6),
        ("100B", "C5", 125, 64, 32, 26.6),
    )
)  # fmt: skip
"""Maximum of the memory that the allocator cached, in GB; table 8."""

FIGURE_8: Final = tuple(
    Run(label=label, row=row, layers=layers, hidden=8192, heads=64, devices=devices, tensor=16, batch=batch,
        published=published, is_read_off=published > 0)
    for label, layers, devices, row, batch, published in (
        ("60B", 75, 128, "C1", 2, 11.8),
        ("60B", 75, 128, "C2", 4, 12.2),
        ("60B", 75, 128, "C3", 8, 16.9),
        ("60B", 75, 128, "C4", 32, 35.1),
        ("60B", 75, 128, "C5", 32, 31.9),
        ("170B", 212, 400, "C1", 12, 0.0),
        ("170B", 212, 400, "C2", 12, 0.0),
        ("170B", 212, 400, "C3", 12, 0.0),
        ("170B", 212, 400, "C4", 12, 0.0),
        ("170B", 212, 400, "C5", 12, 20.9),
    )
)  # fmt: skip
"""Throughput by configuration; table 9. At 170 billion parameters only C5 ran; the batch of the others is C5's."""

MEGATRON: Final = Run(label="Megatron-LM 1.2B", row="baseline", layers=40, hidden=1536, heads=16, devices=1, tensor=1,
                      batch=8, published=39, is_read_off=False)  # fmt: skip
"""Not from the ZeRO paper: the single-device baseline of its program, 30% of a peak of 130 teraFLOPS."""

SLIPS: Final = (
    "Table 4 gives a hidden size of 4096 for 40B to 60B, table 5 gives 6144; only 6144 results in 40B and 60B.",
    "Captions in the appendix are shifted: its tables for figures 4, 5, 6 and 7 belong to figures 6, 7, 8 and 4. "
    "The model of 60B is 132 layers of 6144 in one table and 75 of 8192 in another, with 32 or 64 heads.",
    "Section 3.2 has 60 GB of checkpoints for 100B at a batch of 32. Section 6.1 has 33 GB, which P_a reduces to 2 GB, "
    "also at 32. The formula gives 67.1 GB and 4.2 GB at 32, and 33.6 GB and 2.1 GB at 16.",
    "The caption of table 2 calls P_os ZeRO-OS.",
    "The largest model without model parallelism is 13B; the formula of table 1 allows 15.2B on 128 ranks.",
    "Figure 4 labels the baseline's largest model 1.38B; its 40 layers of 1536 in table 10 make 1.2 billion.",
    "The text says that figure 4 averages more than 40 teraFLOPS; its nine ZeRO sizes average 39.0, "
    "and 13B reaches 21.",
    "Figure 3 is called super-linear throughout; from 256 to 400 devices it is sub-linear.",
)
"""Contradictions in the paper."""
