"""Which program made a published run: systems by source, and what a source does not say of its runs.

Owns `sources.json`, and the form of a file of such entries. It must not know how a run is planned (`rows.py`). A source
that is in no table gets a system from its columns, and its rows are reported apart as "system assumed".
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Final, Literal, final, get_args, get_origin, get_type_hints

from zeroshard.plan.machine.presets import device_named
from zeroshard.plan.named import PRECISIONS
from zeroshard.plan.shape.transformer import Kernels
from zeroshard.plan.step.system import System
from zeroshard.plan.systems import SYSTEMS, system_named

__all__ = ["COLUMNS", "Source", "assumed", "known_sources", "read_sources", "version_of"]

COLUMNS: Final = (
    *("source", "model", "layers", "hidden", "heads", "vocab", "seq", "gpu", "n_gpus", "dp", "tp", "pp", "zero_stage"),
    *("micro_batch", "global_batch", "recompute", "measured_metric", "value", "unit"),
)
"""Columns of a file of published runs; one with params_b has its sizes compared, too."""
CHOICES: Final[Mapping[str, Sequence[Any]]] = MappingProxyType(
    {
        "stage": (None, 0, 1, 2, 3),
        "precision": ("", *PRECISIONS),
        "products": ("", "float32", "float16", "bfloat16", "float8", "float4"),
    }
)
"""Values of options whose types have more."""
LEAST: Final = MappingProxyType({"bucket_bytes": -1, "attention_factor": 1e-3, "node_factor": 1e-3})
"""The least values of numbers that may be below 0, or not 0."""
POLLED_DEVICES: Final = 512
UNPOLLED_TENSOR: Final = 32
POLLED_S: Final = 0.85
BLOCKED_S: Final = (0.16e-3, 0.05e-3)


@final
@dataclass(frozen=True)
class Source:
    """The program of a source.

    Args:
        source: how the name of the source begins.
        system: a name in `zeroshard.plan.systems.SYSTEMS`.
        options: fields of `System` that differ; "kernels" is a mapping of fields of `Kernels`.
        columns: values of columns that the rows leave empty, with what says so in `because`.
        unscored: why its rows cannot be planned, if they cannot.
        device: fields of `Device` of its machines that differ from those of the preset.
        selective: by model, of how many blocks one is recomputed where rows say "selective"; all are by default.
    """

    source: str
    system: str
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    because: str = ""
    unscored: str = ""
    device: Mapping[str, float] = field(default_factory=dict)
    selective: Mapping[str, int] = field(default_factory=dict)

    def made(self) -> System:
        """Return the system.

        Raises:
            ValueError: an option is unknown, or has a value that its type does not have.
        """
        base, options = system_named(self.system), dict(self.options)
        if isinstance(kernels := options.get("kernels"), Mapping):
            options["kernels"] = dataclasses.replace(
                base.kernels, **_fitting(f"{self.source}: kernels", Kernels, kernels)
            )
        return dataclasses.replace(base, **_fitting(f"{self.source}: options", System, options))


def _fitting(where: str, kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for fields of a dataclass, with lists as tuples.

    Raises:
        ValueError: no field has such a name, or a value is not of its field.
    """
    types = get_type_hints(kind)
    if unknown := ", ".join(given.keys() - types.keys()):
        raise ValueError(f"{where} are {', '.join(types)}; got {unknown}.")
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    for name, value in found.items():
        numbers = [one for one in (value if isinstance(value, tuple) else [value]) if isinstance(one, int | float)]
        if not _is(types[name], value):
            text = types[name].__name__ if isinstance(types[name], type) else str(types[name]).replace("typing.", "")
            raise ValueError(f"{where}: {name} must be of type {text}; got {value!r}.")
        if name in CHOICES and value not in CHOICES[name]:
            raise ValueError(f"{where}: {name} must be one of {', '.join(map(repr, CHOICES[name]))}; got {value!r}.")
        if numbers and min(numbers) < LEAST.get(name, 0):
            raise ValueError(f"{where}: {name} must be at least {LEAST.get(name, 0)}; got {value!r}.")
    return found


def _is(kind: Any, value: Any) -> bool:
    """Return whether a value is of the type of a field."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in parts
    if origin is UnionType:
        return any(_is(one, value) for one in parts)
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_is, parts, value))
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_is(parts[1], one) for one in value.values())
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return kind is Any or (value is None if kind is type(None) else type(value) is kind)


@cache
def known_sources() -> Sequence[Source]:
    """Return the systems of known sources, from `sources.json`; the first entry that fits counts."""
    return read_sources(Path(__file__).with_name("sources.json"))


@lru_cache(maxsize=64)
def version_of(system: System, world_size: int, tensor: int, *, is_piped: bool, is_sharded: bool) -> System:
    """Return the version of a program that made a run, where its source does not publish it.

    Nanotron's p2p.py of later runs sleeps 0.1 s between polls of each of 8 messages, and its hosts wait for
    collectives, as in a pipe they do in any version (p2p.py: `_send_meta`, `_recv_meta`). The times of runs on 512
    devices and more match the later version, but for tensor ranks on several nodes. These two borders and the seconds
    were settled on the half of the rows that is called "chosen on".

    Args:
        is_sharded: whether ZeRO-1 sums gradients, and not DDP, beside the last backward.
    """
    if system.name != "nanotron":
        return system
    found = dataclasses.replace(system, reduces_beside=not is_sharded)
    is_polled = world_size >= POLLED_DEVICES
    if is_piped or (is_polled and tensor < UNPOLLED_TENSOR):
        found = dataclasses.replace(found, runs_ahead=0, blocked_s=BLOCKED_S)
    return dataclasses.replace(found, message_s=POLLED_S if is_polled else found.message_s)


def assumed(row: Mapping[str, str]) -> System:
    """Return the system of an unknown source, from its columns."""
    stage = row["zero_stage"][:1]
    if row["tp"] not in ("", "1") or row["pp"] not in ("", "1"):
        return SYSTEMS["megatron-lm"]
    return SYSTEMS[{"3": "fsdp2", "2": "deepspeed-2", "1": "deepspeed-1"}.get(stage, "ddp")]


def read_sources(path: str | Path) -> Sequence[Source]:
    """Read systems of sources from a JSON file: a list of mappings with the fields of `Source`.

    Raises:
        ValueError: the file is not such a list, names an unknown system, column, field or option, or has a value that
            an option cannot have.
    """
    try:
        found = [Source(**one) for one in json.loads(Path(path).read_text(encoding="utf-8-sig"))]
    except (OSError, TypeError, ValueError) as error:
        fields = ", ".join(one.name for one in dataclasses.fields(Source))
        raise ValueError(f"{path} is not a JSON list of mappings with {fields}: {error}") from error
    for one in found:
        _fitting(f"{one.source}: fields", Source, vars(one))
        if unknown := ", ".join(one.columns.keys() - {*COLUMNS}):
            raise ValueError(f"{one.source}: columns are {', '.join(COLUMNS)}; got {unknown}.")
        system = one.made()
        try:
            dataclasses.replace(device_named("h100-80"), **dict[str, Any](one.device))
            system.moved()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{one.source}: options or device: {error}") from error
    return found
