"""The planner's accuracy on published runs: predictions and measurements, row by row, and statistics of the errors.

Owns the reading of published rows, their conversion into plans, and the statistics. It must not know how plans are made
(`systems.py`). Needs no torch, and reads one file.

Note: what is not planned, and said to be so
    Rows without layers or width; adapters and quantized weights (LoRA, QLoRA); mixtures of experts and hybrids of other
    projects; the largest model that fits. `Scorecard.skipped` has them, with reasons.
"""

import csv
import json
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Final, final

from zeroshard.evidence.systems import SYSTEMS, Run, System, memory_bytes, step_seconds
from zeroshard.plan.machine.hardware import DEVICES, Device
from zeroshard.plan.shape.shapes import Transformer, gpt

__all__ = ["Label", "Record", "Scorecard", "Sums", "render", "scorecard"]

GIB: Final = 2**30
GB: Final = 10**9
SEED: Final = 14
MEMORY_DATA: Final = "memory, data parallel alone"
MEMORY_TENSOR: Final = "memory, with tensor parallelism"
MEMORY_OTHER: Final = "memory, other layouts"
TIME: Final = "time"


@final
@dataclass(frozen=True)
class Record:
    """A measured number, and its prediction.

    Args:
        group: group of the scorecard.
        label: model and layout.
        is_held_out: whether the row is in the half on which the parameters of time were not chosen.
    """

    source: str
    group: str
    label: str
    metric: str
    unit: str
    predicted: float
    measured: float
    is_held_out: bool

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


@final
@dataclass(frozen=True)
class Label:
    """Whether a run succeeded, and whether the plan predicts that."""

    source: str
    label: str
    ran: bool
    fits: bool


@final
@dataclass(frozen=True)
class Sums:
    """Statistics of absolute errors: number, median, 90th percentile, and the fractions within 10% and 15%."""

    count: int
    median: float
    p90: float
    within_10: float
    within_15: float


@final
@dataclass(frozen=True)
class Scorecard:
    """All records of a file.

    Args:
        skipped: number of skipped rows by reason.
        ranks: Kendall's tau of the configurations, by model and number of devices.
    """

    records: Sequence[Record]
    labels: Sequence[Label]
    skipped: Mapping[str, int]
    ranks: Mapping[str, float]

    @cached_property
    def groups(self) -> Mapping[str, Sums]:
        """Statistics by group."""
        return _sums_by(self.records, lambda one: one.group)

    @cached_property
    def sources(self) -> Mapping[str, Sums]:
        """Statistics by source and kind: memory or time."""
        return _sums_by(self.records, lambda one: f"{one.source[:52]}: {one.group.split(',')[0]}")

    @cached_property
    def halves(self) -> Mapping[str, Sums]:
        """Statistics of time, for the half on which the parameters were chosen and for the other half."""
        timed = [one for one in self.records if one.group == TIME]
        return _sums_by(timed, lambda one: "held out" if one.is_held_out else "chosen on")

    @property
    def balanced_accuracy(self) -> float:
        """The mean of the fractions of crashed and of successful runs that the plan predicts."""
        told = [[one.fits == one.ran for one in self.labels if one.ran == ran] for ran in (False, True)]
        return sum(sum(one) / len(one) for one in told if one) / max(1, sum(map(bool, told)))

    @property
    def wrong_no(self) -> float:
        """The fraction of successful runs for which the plan says no."""
        ran = [one for one in self.labels if one.ran]
        return sum(not one.fits for one in ran) / len(ran) if ran else 0.0

    @property
    def misses(self) -> Sequence[Label]:
        """Labels that the plan predicts wrong."""
        return [one for one in self.labels if one.ran != one.fits]

    def to_json(self) -> str:
        """Return everything as JSON."""
        content = {
            "groups": {key: asdict(one) for key, one in self.groups.items()},
            "sources": {key: asdict(one) for key, one in self.sources.items()},
            "halves": {key: asdict(one) for key, one in self.halves.items()},
            "labels": {
                "count": len(self.labels), "balanced_accuracy": self.balanced_accuracy, "wrong_no": self.wrong_no,
                "misses": [asdict(one) for one in self.misses],
            },
            "ranks": dict(self.ranks),
            "skipped": dict(self.skipped),
            "records": [{**asdict(one), "error": one.error} for one in self.records],
        }  # fmt: skip
        return json.dumps(content, indent=1)


def _sums_by(records: Iterable[Record], key: Callable[[Record], str]) -> Mapping[str, Sums]:
    found: dict[str, list[float]] = defaultdict(list)
    for one in records:
        found[key(one)].append(abs(one.error))
    return MappingProxyType({name: _sums(errors) for name, errors in sorted(found.items())})


def _sums(errors: list[float]) -> Sums:
    errors.sort()
    n = len(errors)
    place = min(n - 1, math.ceil(0.9 * n) - 1)
    within = [sum(one <= limit for one in errors) / n for limit in (0.10, 0.15)]
    return Sums(n, median(errors), errors[max(0, place)], *within)


# -- the plan of a row ------------------------------------------------------------------------------------------------

_SYSTEM_OF: Final = (
    ("HF Ultra-Scale Playbook", "nanotron"),
    ("vTrain", "megatron-deepspeed"),
    ("bigscience tr11", "bloom"),
    ("bigscience experiments/gpt2.md (JZ V100-32GB, +-40% noise warned)", "deepspeed-3"),
    ("bigscience experiments", "megatron-deepspeed"),
    ("Megatron-LM SC21 Table 2 (ZeRO-3", "deepspeed-3"),
    ("Megatron-LM SC21", "megatron-deepspeed"),
    ("MT-NLG", "megatron-deepspeed"),
    ("Megatron", "megatron"),
    ("mosaicml/llm-foundry benchmarking README [A100 40GB", "fsdp-pure"),
    ("mosaicml", "fsdp"),
    ("DeepSpeed docs", "deepspeed-3"),
    ("PyTorch FSDP", "fsdp-pure"),
    ("ZeRO paper", "megatron-deepspeed"),
    ("litgpt extensions/thunder README DDP", "ddp"),
    ("litgpt extensions/thunder README single", "ddp"),
    ("litgpt extensions/thunder README FSDP", "fsdp-pure"),
    ("torchtune README llama3.2-3B", "ddp"),
)
"""Systems by prefix of the source."""
_INNER: Final = MappingProxyType({2048: 8192, 3072: 8192, 4096: 14336, 8192: 28672})
"""Widths of the playbook's MLPs, by hidden width (nanotron, scaling_benchmarks.py: `model_configs`)."""
_LLAMA_INNER: Final = MappingProxyType({8192: 28672, 16384: 53248, 3072: 8192, 2048: 5632})


class _NotPlannedError(Exception):
    """A row is not planned; the message gives the reason."""


def _whole(row: Mapping[str, str], key: str, default: int | None = None) -> int:
    if row[key]:
        return int(float(row[key]))
    if default is None:
        raise _NotPlannedError(f"the row has no {key}")
    return default


@lru_cache(maxsize=32)
def _device(name: str) -> Device:
    known = ("A100-40", "a100-40"), ("A100", "a100-80"), ("H100", "h100-80"), ("V100", "v100-32"), ("GB200", "gb200")
    for start, preset in (*known, ("B200", "b200"), ("GB300", "gb200"), ("B300", "b200"), ("RTX4090", "rtx4090")):
        if name.startswith(start):
            device = DEVICES[preset]
            break
    else:
        raise _NotPlannedError(f"no preset for the device {name or '(none)'}")
    wide = device.peak_flops["bfloat16"]
    # NVIDIA's data sheets: FP8 has twice the rate of bfloat16, NVFP4 four times, on the 300s six times.
    narrow = {"float8": 2 * wide, "float4": 6 * wide if "300" in name else 4 * wide}
    return replace(device, peak_flops=MappingProxyType({**device.peak_flops, **narrow}))


def _system(source: str) -> System:
    for start, name in _SYSTEM_OF:
        if source.startswith(start):
            return SYSTEMS[name]
    raise _NotPlannedError("adapters, quantized weights, or too little said about the run")


@lru_cache(maxsize=512)
def _shape(name: str, system: str, layers: int, hidden: int, heads: int, vocabulary: int, sequence: int) -> Transformer:
    is_llama = name.lower().startswith(("llama", "tinyllama"))
    if not is_llama:
        shape = gpt(name, layers, hidden, heads, vocabulary, sequence)
        return replace(shape, dropout=0.0 if system in ("fsdp", "fsdp-pure", "megatron") else 0.1)
    if system == "nanotron":
        inner = _INNER[hidden]
        # scaling_benchmarks.py: embedding and head are tied below 4B parameters; no grouped queries.
        return Transformer(
            name=name, layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, inner=inner,
            sequence=sequence, is_tied=inner < 10_000,
        )  # fmt: skip
    kv_heads = 4 if name.lower().startswith("tiny") else 8
    return Transformer(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, vocabulary=vocabulary,
        inner=_LLAMA_INNER[hidden], sequence=sequence, is_tied=hidden == 3072,
    )  # fmt: skip


def _run(row: Mapping[str, str]) -> Run:
    source, name = row["source"], row["model"]
    system = _system(source)
    layers, hidden, sequence = _whole(row, "layers"), _whole(row, "hidden"), _whole(row, "seq")
    if "LoRA" in row["recompute"] or "LoRA" in source:
        raise _NotPlannedError("adapters, quantized weights, or too little said about the run")
    # Megatron pads GPT-2's 50,257 tokens; if the number of heads is unknown, heads are 128 wide.
    heads, vocabulary = _whole(row, "heads", max(1, hidden // 128)), _whole(row, "vocab", 51200)
    heads = heads if hidden % heads == 0 else max(1, hidden // 128)
    data, tensor, pipe = (_whole(row, key, 1) for key in ("dp", "tp", "pp"))
    batch = _whole(row, "micro_batch", 1)
    micro_batches = max(1, _whole(row, "global_batch", batch * data) // (batch * data))
    shape = _shape(name, system.name, layers, hidden, heads, vocabulary, sequence)
    dtype = next((to for key, to in (("FP8", "float8"), ("NVFP4", "float4")) if key in source), "bfloat16")
    chunks = re.search(r" VP(\d+) ", source)
    device = _device(row["gpu"])
    if device.name == "v100-32":
        dtype = "float16"
    treatment = "recompute" if row["recompute"] not in ("none", "", "baseline") else "keep"
    return Run(
        system=system, shape=shape, device=device, sequence=sequence, batch=batch, micro_batches=micro_batches,
        data=data, tensor=tensor, pipe=pipe, zero=_whole(row, "zero_stage", 0), treatment=treatment, dtype=dtype,
        chunks=int(chunks[1]) if chunks and pipe > 1 else 1,
    )  # fmt: skip


# -- metrics ----------------------------------------------------------------------------------------------------------


def token_flops(run: Run, source: str) -> float:
    """Return the operations per token, as counted by a source."""
    shape, s = run.shape, run.sequence
    layers, h, vocabulary = shape.layers, shape.hidden, shape.vocabulary
    if source.startswith("Megatron-Bridge"):  # causal attention; the embedding is not a product
        return 6 * (shape.numel() - vocabulary * h) + 6 * layers * h * s
    if source.startswith("bigscience tr11"):
        return 8 * shape.numel()
    if source.startswith(("HF", "mosaicml")):
        # The playbook counts the parameters of all pipeline ranks: a tied embedding twice if there are several.
        again = vocabulary * h if shape.is_tied and run.pipe > 1 and source.startswith("HF") else 0
        return 6 * (shape.numel() + again) + 12 * layers * h * s
    factor = 72 if source.startswith("Megatron-LM README") or run.treatment == "keep" else 96
    return factor * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))


def _timed(run: Run, row: Mapping[str, str]) -> float:
    step_s = step_seconds(run).step
    tokens = run.batch * run.micro_batches * run.data * run.sequence
    devices = run.data * run.tensor * run.pipe
    rate = tokens / step_s / devices
    metric, flops = row["measured_metric"], token_flops(run, row["source"])
    if metric == "iteration_time":
        return step_s * 1e3
    if metric in ("tokens_per_s_per_gpu", "tokens_per_s"):
        return rate
    if metric == "tokens_per_s_total":
        return rate * devices
    if metric == "mfu":
        return 100 * rate * flops / run.device.peak_flops["bfloat16"]
    if metric in ("model_tflops_per_gpu", "hw_tflops_per_gpu"):
        return rate * flops / 1e12
    if metric == "days_for_300B_tokens":
        return 300e9 / (rate * devices) / 86400
    raise _NotPlannedError(f"the metric {metric} is not planned")


_MEMORY: Final = MappingProxyType(
    {
        "gpu_mem_peak_rank0": "reserved",
        "gpu_mem_peak": "allocated",
        "gpu_mem_active_peak": "allocated",
        "gpu_mem_cached_peak": "allocated",
        "gpu_mem_nvidia_smi": "device",
    }
)


def _group(row: Mapping[str, str], run: Run) -> str:
    if row["measured_metric"] not in _MEMORY:
        return TIME
    if run.system.name == "nanotron" and run.pipe == 1:
        return MEMORY_DATA if run.tensor == 1 else MEMORY_TENSOR
    return MEMORY_OTHER


def _label(row: Mapping[str, str], run: Run) -> str:
    parts = f"{run.data * run.tensor * run.pipe} devices, dp {run.data}, tp {run.tensor}, pp {run.pipe}"
    return f"{row['model']}, {parts}, ZeRO-{run.zero}, batch {run.batch} x {run.micro_batches}"


def _fits(run: Run) -> bool:
    try:
        memory_bytes(run, "reserved")
    except (MemoryError, ValueError):
        return False
    return True


def scorecard(path: str | Path) -> Scorecard:
    """Plan each row of a file of published runs.

    Args:
        path: a CSV with the columns source, model, layers, hidden, heads, vocab, seq, gpu, n_gpus, dp, tp, pp,
            zero_stage, micro_batch, global_batch, recompute, measured_metric, value, unit.

    Returns:
        One record for each planned number, and one label for each run that crashed or whose memory was measured.

    Raises:
        ValueError: the file cannot be read, has no rows, or has other columns.
    """
    rows = _read(path)
    # A row alone determines whether it is held out, so samples and the whole file agree.
    records, labels, skipped = list[Record](), list[Label](), Counter[str]()
    for row in rows:
        try:
            one = _planned(row)
        except _NotPlannedError as error:
            skipped[str(error)] += 1
            continue
        if isinstance(one, Record):
            records.append(one)
            if one.group != TIME:
                labels.append(Label(one.source, one.label, ran=True, fits=_fits(_run(row))))
        else:
            labels.append(one)
    return Scorecard(tuple(records), tuple(labels), MappingProxyType(dict(skipped)), _ranks(records))


def _read(path: str | Path) -> list[dict[str, str]]:
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise ValueError(f"{path} is not a readable file of published runs: {error}") from error
    if not rows or "measured_metric" not in rows[0]:
        raise ValueError(f"{path} has no rows of published runs, or no column measured_metric.")
    return rows


def _planned(row: Mapping[str, str]) -> Record | Label:
    run = _run(row)
    metric = row["measured_metric"]
    if metric == "status":
        return Label(row["source"], _label(row, run), ran=row["value"] == "ok", fits=_fits(run))
    measured = float(row["value"])
    if not measured:
        raise _NotPlannedError("a number that was rounded to 0")
    if metric in _MEMORY:
        try:
            nbytes: float = memory_bytes(run, _MEMORY[metric])
        except (MemoryError, ValueError):
            nbytes = run.device.memory_bytes
        predicted = nbytes / (GIB if row["unit"] == "GiB" else GB)
    else:
        try:
            predicted = _timed(run, row)
        except ValueError as error:
            raise _NotPlannedError("a layout that the plan says does not run") from error
    key = "".join(row[name] for name in ("source", "model", "seq", "n_gpus", "tp", "pp", "zero_stage", "micro_batch"))
    is_held_out = random.Random(f"{SEED}{key}").random() < 0.5
    return Record(
        row["source"], _group(row, run), _label(row, run), metric, row["unit"], predicted, measured, is_held_out
    )


def _ranks(records: Iterable[Record]) -> Mapping[str, float]:
    """Return Kendall's tau between planned and measured rates, by model and number of devices."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in records:
        if one.metric == "tokens_per_s_per_gpu" and one.source.startswith("HF"):
            found[",".join(one.label.split(",")[:2])].append((one.predicted, one.measured))
    taus = {}
    for key, pairs in found.items():
        signs = [
            math.copysign(1, a[0] - b[0]) * math.copysign(1, a[1] - b[1])
            for a, b in combinations(pairs, 2)
            if a[0] != b[0] and a[1] != b[1]
        ]
        if len(pairs) >= 5 and signs:
            taus[key] = sum(signs) / len(signs)
    return MappingProxyType(taus)


# -- text -------------------------------------------------------------------------------------------------------------


def render(card: Scorecard, *, others: int = 20) -> str:
    """Return a scorecard as plain text.

    Args:
        others: number of listed rows of other layouts, and of wrong labels; the largest errors first.
    """
    lines = ["Predicted against published runs (absolute relative errors)", ""]
    for title, sums in (("", card.groups), ("Time, by half", card.halves), ("By source", card.sources)):
        lines += [title] * bool(title)
        lines.append(f"{'':62}{'rows':>6}{'median':>8}{'p90':>8}{'<=10%':>7}{'<=15%':>7}")
        lines += [
            f"{name:62}{one.count:6}{one.median:8.1%}{one.p90:8.1%}{one.within_10:7.0%}{one.within_15:7.0%}"
            for name, one in sums.items()
        ]
        lines.append("")
    if card.labels:
        crashed = sum(not one.ran for one in card.labels)
        lines += [
            f"Labels: {crashed} crashed, {len(card.labels) - crashed} ran; balanced accuracy "
            f"{card.balanced_accuracy:.3f}; 'no' for {card.wrong_no:.1%} of those that ran; {len(card.misses)} misses",
            *(f"  {'ran' if one.ran else 'crashed'}: {one.label}" for one in card.misses[:others]),
            "",
        ]
    if card.ranks:
        taus = sorted(card.ranks.values())
        lines += [f"Kendall's tau of configurations: median {median(taus):.2f} over {len(taus)} models and sizes", ""]
    other = sorted((one for one in card.records if one.group == MEMORY_OTHER), key=lambda one: -abs(one.error))
    lines += [f"Other layouts, the {min(others, len(other))} largest of {len(other)} errors:"] * bool(other)
    lines += [
        f"  {one.label}: {one.predicted:.1f} {one.unit}, measured {one.measured:.1f} ({one.error:+.0%})"
        for one in other[:others]
    ]
    lines += ["", "Not planned:"] * bool(card.skipped)
    lines += [f"  {count:5} rows: {reason}" for reason, count in sorted(card.skipped.items(), key=lambda one: -one[1])]
    return "\n".join(lines)
