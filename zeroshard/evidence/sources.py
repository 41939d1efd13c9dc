"""Which program made a published run: systems by source, and what a source does not say of its runs.

Owns `sources.json`, and the form of a file of such entries. It must not know how a run is planned (`rows.py`). A source
that is in no table gets a system from its columns, and its rows are reported apart as "system assumed".
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, final

from zeroshard.plan.shape.transformer import Kernels
from zeroshard.plan.step.system import System
from zeroshard.plan.systems import SYSTEMS, system_named

__all__ = ["COLUMNS", "Source", "assumed", "known_sources", "read_sources", "version_of"]

COLUMNS: Final = (
    *("source", "model", "layers", "hidden", "heads", "vocab", "seq", "gpu", "n_gpus", "dp", "tp", "pp", "zero_stage"),
    *("micro_batch", "global_batch", "recompute", "measured_metric", "value", "unit"),
)
"""Columns of a file of published runs; one with params_b has its sizes compared, too."""
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
            ValueError: an option is unknown.
        """
        base, options = system_named(self.system), dict(self.options)
        if "kernels" in options and not isinstance(options["kernels"], Kernels):
            options["kernels"] = dataclasses.replace(base.kernels, **options["kernels"])
        try:
            return dataclasses.replace(base, **options)
        except TypeError as error:
            known = ", ".join(one.name for one in dataclasses.fields(System))
            raise ValueError(f"{self.source}: options are {known}; {error}.") from error


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
        ValueError: the file is not such a list, or names an unknown system or option.
    """
    try:
        found = [Source(**one) for one in json.loads(Path(path).read_text())]
    except (OSError, TypeError, ValueError) as error:
        fields = ", ".join(one.name for one in dataclasses.fields(Source))
        raise ValueError(f"{path} is not a JSON list of mappings with {fields}: {error}") from error
    for one in found:
        one.made()
    return found
