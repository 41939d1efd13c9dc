"""The planner's accuracy on published runs: predictions and measurements, row by row, and statistics of the errors.

Owns the statistics, and the numbers of a plan that rows are compared with. It has no model of a step: memory is that of
`zs.plan`'s film and allocator, time that of the film of `zs.search`. `rows.py` makes plans of rows. Needs no torch, and
reads one file.

Note: what is not planned, and said to be so
    `Scorecard.skipped` has the number of rows by reason: the row does not give layers, batch or length; adapters and
    quantized weights (LoRA, QLoRA); the largest model that fits; a layout that the plan refuses; a cell or a unit that
    cannot be read; columns that contradict each other.
"""

import csv
import gc
import json
import math
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Final, final

from zeroshard.evidence.rows import NotPlannedError, Run, number_of, run_of
from zeroshard.evidence.sources import COLUMNS, Source
from zeroshard.plan.margins import kind_of
from zeroshard.plan.planning import plan_alone
from zeroshard.plan.result import Plan
from zeroshard.plan.trying import candidate_of
from zeroshard.table.sizes import GIB
from zeroshard.table.stages import name_of_row

__all__ = ["Label", "Record", "Scorecard", "Sums", "render", "scorecard"]

GB: Final = 10**9
SEED: Final = 14
MEMORY_DATA: Final = "memory, data parallel alone"
MEMORY_TENSOR: Final = "memory, with tensor parallelism"
MEMORY_OTHER: Final = "memory, other layouts"
TIME: Final = "time"
NEIGHBOURS: Final = 64
"""Number of runs that are kept: rows of one run are neighbours, and a plan with its film takes megabytes."""
LARGE: Final = 512
"""Number of rows from which on a file is planned on all processors."""


@final
@dataclass(frozen=True)
class Record:
    """A measured number, and its prediction.

    Args:
        group: group of the scorecard.
        label: model and layout.
        is_held_out: whether the row is in the half on which the parameters of time were not chosen.
        kind: of the run, as in `zeroshard.plan.margins`.
        system: name of the system; `is_assumed` if no table has that of the source.
    """

    source: str
    group: str
    label: str
    metric: str
    unit: str
    predicted: float
    measured: float
    is_held_out: bool
    system: str = ""
    kind: str = ""
    is_assumed: bool = False

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
    def systems(self) -> Mapping[str, Sums]:
        """Statistics by system and group; systems that no table names apart."""
        return _sums_by(self.records, lambda one: f"{one.system}{', assumed' * one.is_assumed}: {one.group}")

    @cached_property
    def halves(self) -> Mapping[str, Sums]:
        """Statistics of time, for the half on which the parameters were chosen and for the other half."""
        timed = [one for one in self.records if one.group == TIME]
        return _sums_by(timed, lambda one: "held out" if one.is_held_out else "chosen on")

    @cached_property
    def margins(self) -> Mapping[str, Mapping[str, Any]]:
        """Errors of memory by kind of run, each source or model judged by the others: `zeroshard.plan.margins`."""
        found: dict[str, list[Record]] = defaultdict(list)
        for one in self.records:
            if one.group != TIME and not one.is_assumed:
                found[one.kind].append(one)
        margins = dict[str, Mapping[str, Any]]()
        for kind, records in sorted(found.items()):
            left_out = "source" if len({one.source for one in records}) > 1 else "model"
            names = [one.source if left_out == "source" else one.label.split(",")[0] for one in records]
            rests = [[abs(r.error) for r, n in zip(records, names, strict=True) if n != name] for name in {*names}]
            every = _sums([abs(one.error) for one in records])
            median_error, p90 = every.median, max((_sums(one).p90 for one in rests if one), default=every.p90)
            margins[kind] = {
                "median": median_error, "nine_tenths": p90, "runs": len(records), "left_out": left_out
            }  # fmt: skip
        return MappingProxyType(margins)

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
            "margins": {key: dict(one) for key, one in self.margins.items()},
            "systems": {key: asdict(one) for key, one in self.systems.items()},
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


# -- the numbers of a plan --------------------------------------------------------------------------------------------


def token_flops(run: Run, source: str) -> float:
    """Return the operations per token, as counted by a source."""
    shape, s, is_kept = run.shape, run.options.sequence, not run.options.row.activations.chain
    layers, h, vocabulary = shape.layers, shape.hidden, shape.vocabulary
    if source.startswith("Megatron-Bridge"):  # causal attention; the embedding is not a product
        return 6 * (shape.numel() - vocabulary * h) + 6 * layers * h * s
    if source.startswith("bigscience tr11"):
        return 8 * shape.numel()
    if source.startswith(("HF", "mosaicml", "foundation")):
        # The playbook counts the parameters of all pipeline ranks: a tied embedding twice if there are several.
        again = vocabulary * h if shape.is_tied and run.options.pipe > 1 and source.startswith("HF") else 0
        return 6 * (shape.numel() + again) + 12 * layers * h * s
    factor = 72 if source.startswith("Megatron-LM README") or is_kept else 96
    return factor * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))


@lru_cache(maxsize=NEIGHBOURS)
def step_s(run: Run) -> float:
    """Return the seconds of a step, as a search simulates it: a film with the operations of each unit combined."""
    return candidate_of(run.shape, run.options).step_s


def _timed(run: Run, row: Mapping[str, str]) -> float:
    options, took_s = run.options, step_s(run)
    devices = options.world_size
    rate = options.tokens_per_step / took_s / devices
    metric, flops = row["measured_metric"], token_flops(run, row["source"])
    found = {
        "iteration_time": took_s * 1e3,
        "tokens_per_s_per_gpu": rate,
        "tokens_per_s": rate,
        "tokens_per_s_total": rate * devices,
        "mfu": 100 * rate * flops / options.device.peak_flops["bfloat16"],
        "model_tflops_per_gpu": rate * flops / 1e12,
        "hw_tflops_per_gpu": rate * flops / 1e12,
        "days_for_300B_tokens": 300e9 / (rate * devices) / 86400,
    }
    return found[metric]


_MEMORY: Final = MappingProxyType(
    {
        "gpu_mem_peak_rank0": "reserved",
        "gpu_mem_peak": "allocated",
        "gpu_mem_active_peak": "allocated",
        "gpu_mem_cached_peak": "allocated",
        "gpu_mem_nvidia_smi": "device",
    }
)
RAN: Final = MappingProxyType({"ok": True, "crash_or_oom": False, "oom": False, "crash": False})
_RATES: Final = ("tok/s", "tokens/s", "tok/s/gpu", "tokens/s/gpu")
_FLOPS: Final = ("TFLOP/s", "TFLOPS", "TFLOP/s/gpu", "TFLOPS/gpu")
UNITS: Final = MappingProxyType(
    dict.fromkeys(_MEMORY, ("GiB", "GB", "MiB", "MB"))
    | dict.fromkeys(("tokens_per_s_per_gpu", "tokens_per_s"), _RATES)
    | dict.fromkeys(("model_tflops_per_gpu", "hw_tflops_per_gpu"), _FLOPS)
    | {
        "tokens_per_s_total": _RATES[:2],
        "iteration_time": ("ms", "s"),
        "mfu": ("%",),
        "days_for_300B_tokens": ("days",),
    }
)
"""Units of each metric."""
SIZES: Final = MappingProxyType({"GiB": GIB, "GB": GB, "MiB": GIB / 1024, "MB": GB / 1000, "s": 1e3})
"""Sizes of units in those that predictions have; 1 for others."""


@lru_cache(maxsize=NEIGHBOURS)
def place_of(run: Run, place: int) -> Plan:
    """Return the plan of a place of the pipe."""
    return plan_alone(run.shape, run.options, place)


def _bytes(run: Run, kind: str) -> float:
    """Return the peak of memory: what the run would take, if the plan says that the device has too little."""
    plan = place_of(run, 0)
    return {"reserved": plan.reserved_bytes, "allocated": plan.peak_bytes}.get(kind, plan.total_bytes)


def _fits(run: Run) -> bool:
    return all(place_of(run, place).runs for place in {0, run.options.pipe - 1})


def _group(row: Mapping[str, str], run: Run) -> str:
    if row["measured_metric"] not in _MEMORY:
        return TIME
    if run.options.system.name == "nanotron" and run.options.pipe == 1:
        return MEMORY_DATA if run.options.tensor == 1 else MEMORY_TENSOR
    return MEMORY_OTHER


def _label(row: Mapping[str, str], run: Run) -> str:
    one = run.options
    parts = f"{one.world_size} devices, dp {one.shard_ranks * one.replicas}, tp {one.tensor}, pp {one.pipe}"
    return f"{row['model']}, {parts}, {name_of_row(one.row)}, batch {one.batch} x {one.micro_batches}"


def scorecard(path: str | Path, sources: Sequence[Source] = ()) -> Scorecard:
    """Plan each row of a file of published runs.

    Args:
        path: a CSV with the columns source, model, layers, hidden, heads, vocab, seq, gpu, n_gpus, dp, tp, pp,
            zero_stage, micro_batch, global_batch, recompute, measured_metric, value, unit. Cells may be empty: dp is
            then that of n_gpus. Where there is a column params_b, sizes are compared with it.
        sources: systems of sources, before those that the package knows.

    Returns:
        One record for each planned number, and one label for each run that crashed or whose memory was measured.

    Raises:
        ValueError: the file cannot be read, has no rows, or has other columns.
    """
    rows = _read(path)
    records, labels, skipped = list[Record](), list[Label](), Counter[str]()
    for one in _all_planned(rows, sources):
        if isinstance(one, str):
            skipped[one] += 1
        else:
            records += [part for part in one if isinstance(part, Record)]
            labels += [part for part in one if isinstance(part, Label)]
    return Scorecard(tuple(records), tuple(labels), MappingProxyType(dict(skipped)), _ranks(records))


def _all_planned(rows: list[dict[str, str]], sources: Sequence[Source]) -> Iterable[tuple[Record | Label, ...] | str]:
    """Plan all rows; of a large file, on all processors. Neighbours are of one run, so they stay together."""
    plan = partial(_planned, sources=sources)
    if len(rows) < LARGE:
        return map(plan, rows)
    # Films are millions of small tuples without cycles: looking for cycles takes a fifth of the time.
    with ProcessPoolExecutor(os.cpu_count(), get_context("forkserver"), gc.disable) as pool:
        return [*pool.map(plan, rows, chunksize=LARGE // 8)]


def _read(path: str | Path) -> list[dict[str, str]]:
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            read = csv.DictReader(file, restkey="", restval="")
            rows = [{key.strip(): value.strip() for key, value in one.items() if key} for one in read]
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"{path} is not a readable file of published runs: {error}") from error
    if not rows:
        raise ValueError(f"{path} has no rows of published runs.")
    if missing := [one for one in COLUMNS if one not in rows[0]]:
        raise ValueError(f"{path} has no column {', '.join(missing)}; cells may be empty where a run does not say.")
    return rows


def _planned(row: Mapping[str, str], sources: Sequence[Source] = ()) -> tuple[Record | Label, ...] | str:
    """Return what a row is compared with, or why it is not planned."""
    try:
        return _compared(row, run_of(row, sources))
    except NotPlannedError as error:
        return str(error)


def _compared(row: Mapping[str, str], run: Run) -> tuple[Record | Label, ...]:
    metric, label, system = row["measured_metric"], _label(row, run), run.options.system.name
    if metric == "status":
        if (ran := RAN.get(row["value"].lower())) is None:
            raise NotPlannedError(f"status {row['value']!r} is none of {', '.join(RAN)}")
        return (Label(row["source"], label, ran=ran, fits=not run.refused and _fits(run)),)
    if run.refused:
        raise NotPlannedError(run.refused)
    if not (measured := number_of(row, "value")):
        raise NotPlannedError("a number that was rounded to 0")
    if metric not in UNITS:
        raise NotPlannedError(f"the metric {metric} is not planned")
    if row["unit"] not in UNITS[metric]:
        raise NotPlannedError(f"the unit {row['unit']!r} of {metric} is none of {', '.join(UNITS[metric])}")
    found = _bytes(run, _MEMORY[metric]) if metric in _MEMORY else _timed(run, row)
    predicted = found / SIZES.get(row["unit"], 1.0)
    # A row alone determines whether it is held out, so samples and the whole file agree.
    key = "".join(row[name] for name in ("source", "model", "seq", "n_gpus", "tp", "pp", "zero_stage", "micro_batch"))
    is_held_out = random.Random(f"{SEED}{key}").random() < 0.5
    place = row["source"], _group(row, run), label, metric, row["unit"]
    record = Record(*place, predicted, measured, is_held_out, system, kind_of(run.options), run.is_assumed)
    return (record,) if record.group == TIME else (record, Label(row["source"], label, ran=True, fits=_fits(run)))


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
    for title, sums in (
        ("", card.groups),
        ("Time, by half", card.halves),
        ("By system", card.systems),
        ("By source", card.sources),
    ):
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
