"""Rows of published runs as plans: a shape, and the options of the plan.

Owns the reading of a row, and the reasons why a row is not planned. It must not know how a plan is made
(`plan/planning.py`) or what its numbers are compared with (`scorecard.py`). Needs no torch.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, final

from zeroshard.evidence.sources import Source, assumed, known_sources, version_of
from zeroshard.plan.job import Options, check_options, check_shape
from zeroshard.plan.machine.hardware import Device
from zeroshard.plan.machine.presets import device_named
from zeroshard.plan.named import own_units
from zeroshard.plan.shape.shapes import Transformer, gpt
from zeroshard.plan.step.system import System
from zeroshard.table.activations import Activations, Recomputed
from zeroshard.table.stages import CONFIGURATIONS, row_of_stage

__all__ = ["NotPlannedError", "Run", "number_of", "run_of"]

_INNER: Final = MappingProxyType({2048: 8192, 3072: 8192, 4096: 14336, 8192: 28672})
"""Widths of the playbook's MLPs, by hidden width (nanotron, scaling_benchmarks.py: `model_configs`)."""
_LLAMA_INNER: Final = MappingProxyType({8192: 28672, 16384: 53248, 3072: 8192, 2048: 5632, 4096: 14336})
_LLAMA2: Final = MappingProxyType({32: (11008, 32), 40: (13824, 40), 48: (22016, 8), 80: (28672, 8)})
"""Llama 2 (and Code Llama 34B), by number of layers: widths of the MLP, and heads of keys and values."""
DEVICES_NAMED: Final = (
    *(("A100-40", "a100-40"), ("A100", "a100-80"), ("H100", "h100-80"), ("V100", "v100-32"), ("GB200", "gb200")),
    *(("B200", "b200"), ("GB300", "gb300"), ("B300", "b300"), ("RTX4090", "rtx4090"), ("A10G", "a10g")),
    ("A6000", "a6000"),
)
KEPT: Final = ("none", "", "baseline", "+chunkedce")
RECOMPUTED: Final = ("full", "selective", "+ac")
NUMBER: Final = re.compile(r"(\d+|\d{1,3}(,\d{3})+)(\.\d*)?(e[+-]?\d+)?|\.\d+", re.IGNORECASE)
GPTS: Final = re.compile(r"gpt(?!.?oss)|mingpt|mpt|mt-nlg|opt-|bloom")
"""Names of models with the shape of a GPT: an MLP of four times the width, without a gate."""
SIZE_PART: Final = 0.15
"""How far a shape may be from the size that its row gives; of those scored the ZeRO paper's 1.38B is furthest: 12%."""


class NotPlannedError(Exception):
    """A row is not planned; the message gives the reason."""


@final
@dataclass(frozen=True)
class Run:
    """A published run as a plan.

    Args:
        is_assumed: whether no table has the system of its source.
        refused: why the plan refuses such a run, without its numbers; "" if it does not.
    """

    shape: Transformer
    options: Options
    is_assumed: bool = False
    refused: str = ""


def number_of(row: Mapping[str, str], key: str) -> float:
    """Return the number in a cell, with or without commas between thousands.

    Raises:
        NotPlannedError: the cell has something else, such as "4k", "nan" or "-3".
    """
    found = float(row[key].replace(",", "")) if NUMBER.fullmatch(row[key]) else math.inf
    if math.isinf(found):
        raise NotPlannedError(f"{key} {row[key]!r} is not a number such as 4096, 4,096 or 0.5")
    return found


def _whole(row: Mapping[str, str], key: str, default: int | None = None) -> int:
    if not row[key]:
        if default is None:
            raise NotPlannedError(f"the row has no {key}")
        return default
    found = number_of(row, key)
    if not found or found % 1:
        raise NotPlannedError(f"{key} {row[key]!r} is not a whole number above 0")
    return int(found)


@lru_cache(maxsize=32)
def _device(name: str, changed: tuple[tuple[str, Any], ...]) -> Device:
    for start, preset in DEVICES_NAMED:
        if name.startswith(start):
            return dataclasses.replace(device_named(preset), **dict(changed)) if changed else device_named(preset)
    raise NotPlannedError(f"no preset for the device {name or '(none)'}")


def _system(row: Mapping[str, str], sources: Sequence[Source]) -> tuple[Source, System, bool]:
    """Return what is known of the source of a row, its system, and whether the system is assumed."""
    for one in (*sources, *known_sources()):
        if row["source"].startswith(one.source):
            return one, one.made(), False
    return Source("", ""), assumed(row), True


def _axes(row: Mapping[str, str]) -> tuple[int, int, int]:
    """Return the ranks of a row along its axes: data, tensor and pipe."""
    tensor, pipe = _whole(row, "tp", 1), _whole(row, "pp", 1)
    # Megatron-Bridge's sources name the ranks that share a sequence (CP2); the plan has one rank for them.
    contexts = re.search(r"\bCP(\d+)\b", row["source"])
    others = tensor * pipe * (int(contexts[1]) if contexts else 1)
    data = _whole(row, "dp", max(1, _whole(row, "n_gpus", 1) // others))
    if (devices := _whole(row, "n_gpus", data * others)) != data * others:
        raise NotPlannedError(f"n_gpus is {devices}, but dp, tp and pp make {data * others} of them")
    return data, tensor, pipe


@lru_cache(maxsize=512)
def _shape(name: str, system: str, layers: int, hidden: int, heads: int, vocabulary: int, sequence: int) -> Transformer:
    low = name.lower()
    if not low.startswith(("llama", "tinyllama")):
        if not GPTS.match(low):
            raise NotPlannedError(
                f"no shape is known for the model {name!r}: names begin with gpt, llama, mpt and such"
            )
        shape = gpt(name, layers, hidden, heads, vocabulary, sequence)
        return dataclasses.replace(shape, dropout=0.1 if system.startswith(("megatron-d", "deepspeed", "ddp")) else 0.0)
    if system == "nanotron":
        inner = _INNER[hidden]
        # scaling_benchmarks.py: embedding and head are tied below 4B parameters; no grouped queries.
        return Transformer(
            name=name, layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, inner=inner,
            sequence=sequence, is_tied=inner < 10_000,
        )  # fmt: skip
    sizes = _LLAMA2 if low.startswith("llama2") else {}
    inner, kv_heads = sizes.get(layers, (_LLAMA_INNER.get(hidden, 0), 4 if low.startswith("tiny") else 8))
    if not inner:
        raise NotPlannedError(f"no width of the MLP is known for {name}")
    return Transformer(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, vocabulary=vocabulary,
        inner=inner, sequence=sequence, is_tied=hidden == 3072,
    )  # fmt: skip


def _activations(recompute: str, known: Source, shape: Transformer) -> Activations:
    """Return what a row says of activations: kept, recomputed, or recomputed in one of some blocks."""
    if (treated := CONFIGURATIONS.get(recompute.partition(" ")[0])) is not None:
        return treated.activations
    low = recompute.lower()
    if low not in (*KEPT, *RECOMPUTED):
        raise NotPlannedError(f"recompute {recompute!r} is none of none, full, selective, and C1 to C5")
    if low == "selective" and (each := known.selective.get(shape.name, 1)) > 1:
        blocks = [name for name in own_units(shape) if name.rpartition(".")[2].isdecimal()]
        return Activations((), tuple((name, (Recomputed(),)) for name in blocks[each // 2 :: each]))
    return Activations((Recomputed(),) * (low in RECOMPUTED))


def run_of(row: Mapping[str, str], sources: Sequence[Source] = ()) -> Run:
    """Return the run of a row.

    Args:
        sources: before those of `sources.json`.

    Raises:
        NotPlannedError: the row says too little; the message has the reason.
    """
    source, name = row["source"], row["model"]
    if any(what in f"{row['recompute']} {source}".lower() for what in ("lora", "opt-in-bwd")):
        raise NotPlannedError("adapters, quantized weights, or updates inside the backward")
    known, system, is_assumed = _system(row, sources)
    if known.unscored:
        raise NotPlannedError(known.unscored)
    row = {**row, **{key: row[key] or value for key, value in known.columns.items()}}
    layers, hidden, sequence = _whole(row, "layers"), _whole(row, "hidden"), _whole(row, "seq")
    batch = _whole(row, "micro_batch")
    (data, tensor, pipe), usual = _axes(row), max(1, hidden // 128)
    # Megatron pads GPT-2's 50,257 tokens; if the number of heads is unknown, heads are 128 wide.
    heads, vocabulary = _whole(row, "heads", usual), _whole(row, "vocab", 51200)
    heads = heads if hidden % heads == 0 else usual
    if not row["heads"] and hidden % usual == 0 and usual % tensor:  # ran with as many as tensor ranks divide
        divisors = [n for n in range(tensor, hidden + 1, tensor) if hidden % n == 0]
        heads = min(divisors, key=lambda n: abs(n - usual), default=usual)
    micro_batches = max(1, _whole(row, "global_batch", batch * data) // (batch * data))
    shape, device = (
        _shape(name, system.name, layers, hidden, heads, vocabulary, sequence),
        _device(row["gpu"], tuple(known.device.items())),
    )
    if row.get("params_b") and abs(shape.numel() / 1e9 - (size := number_of(row, "params_b"))) > SIZE_PART * size:
        has = f"{shape.numel() / 1e9:.3g}"
        raise NotPlannedError(
            f"params_b of {name} is {row['params_b']}, but the shape of its columns has {has} billion"
        )
    products = next((to for key, to in (("FP8", "float8"), ("NVFP4", "float4")) if key in source), system.products)
    is_looped, chunks = pipe > 1 and micro_batches >= pipe, re.search(r" VP(\d+) ", source)
    precision = "paper" if device.name == "v100-32" else system.precision or "bf16"
    if not re.fullmatch(r"|[0-3](\.0)?|3-hsdp", row["zero_stage"]):
        raise NotPlannedError(f"zero_stage {row['zero_stage']!r} is none of 0, 1, 2, 3 and 3-hsdp")
    asked = int(row["zero_stage"][0]) if row["zero_stage"] else system.stage or 0
    offload = system.moved()
    residency = row_of_stage(asked if data > 1 or offload else 0)  # one rank, too, copies units that are offloaded
    options = Options(
        world_size=data * tensor * pipe,
        device=device,
        batch=batch,
        sequence=sequence,
        row=dataclasses.replace(
            residency,
            activations=_activations(row["recompute"], known, shape),
        ),
        offload=offload,
        precision=precision,
        replicas=max(1, data // device.node_ranks) if row["zero_stage"].endswith("hsdp") else 1,
        tensor=tensor,
        is_sequence_parallel=system.is_sequence_parallel and tensor > 1,
        micro_batches=micro_batches,
        no_sync=system.no_sync,
        pipe=pipe,
        schedule="1f1b" if is_looped or pipe == 1 else "gpipe",
        fused=True,
        system=version_of(
            dataclasses.replace(system, products=products),
            data * tensor * pipe,
            tensor,
            is_piped=pipe > 1,
            is_sharded=residency.is_cut,
        ),
    )
    if chunks and is_looped and micro_batches % pipe == 0 and shape.layers >= int(chunks[1]) * pipe:
        options = dataclasses.replace(options, schedule="interleaved", chunks=int(chunks[1]))
    try:
        check_options(options)
        check_shape(shape, options)
    except ValueError as error:
        return Run(shape, options, is_assumed, f"the plan refuses such runs: {_kind_of(str(error))}")
    return Run(shape, options, is_assumed)


def _kind_of(message: str) -> str:
    """Return a message without its numbers and names, so that equal reasons are counted together."""
    return re.sub(r"^[^ ]*\d[^ ]* ", "", re.sub(r"\d[\d,.]*", "n", message.split(" of ")[0]))[:60]
