"""Which program made a published run: systems by source, and what a source does not say of its runs.

Owns the table, and the form of a file of such entries. It must not know how a run is planned (`rows.py`). A source that
is in no table gets a system from its columns, and its rows are reported apart as "system assumed".
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, final

from zeroshard.plan.shape.transformer import Kernels
from zeroshard.plan.step.system import System
from zeroshard.plan.systems import SYSTEMS, system_named

__all__ = ["SOURCES", "Source", "assumed", "read_sources", "version_of"]

POLLED_DEVICES: Final = 512
UNPOLLED_TENSOR: Final = 32
POLLED_S: Final = 0.85
BLOCKED_S: Final = (0.16e-3, 0.05e-3)
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


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
    """

    source: str
    system: str
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    because: str = ""
    unscored: str = ""
    device: Mapping[str, float] = field(default_factory=dict)

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


FP16_2021: Final = MappingProxyType({"kernels": {"attention": "plain"}})
LITGPT: Final = MappingProxyType({"micro_batch": "4"})
SAID: Final = "litgpt's defaults: config_hub/pretrain/tinyllama.yaml, micro_batch_size"
LOOSE: Final = MappingProxyType({"micro_batch": "1"})
TRITON: Final = MappingProxyType({"attention_factor": 1 / 1.4})
"""FlashAttention in Triton, which llm-foundry used: FlashAttention-2 is 1.3 to 1.5 times as fast (Dao, section 4.1)."""
SOURCES: Final = (
    # Its own measurements of collectives on 8 to 512 H100 with Elastic Fabric Adapters grow by 40 us a hop.
    Source("HF Ultra-Scale Playbook", "nanotron", device=MappingProxyType({"node_hop_s": 40e-6})),
    Source("vTrain", "megatron-deepspeed"),
    # bf16 with fp32 sums (bigscience's bf16_optimizer.py).
    Source("bigscience tr11", "megatron-deepspeed", MappingProxyType({"precision": "bf16"})),
    Source("bigscience experiments/gpt2.md (JZ V100-32GB, +-40% noise warned)", "deepspeed-3", FP16_2021),
    Source("bigscience experiments", "megatron-deepspeed"),
    Source("Megatron-LM SC21 Table 2 (ZeRO-3", "deepspeed-3", FP16_2021),
    Source("Megatron-LM SC21", "megatron-deepspeed", NOTHING, LOOSE, "not said; one sequence is the least"),
    Source("MT-NLG", "megatron-deepspeed", NOTHING, LOOSE, "Smith et al. 2022, section 2.4: one sequence"),
    Source("Megatron-LM README", "megatron-lm", NOTHING, LOOSE, "not said; one sequence is the least"),
    Source("Megatron", "megatron-lm"),
    Source("mosaicml/llm-foundry benchmarking README [A100 40GB", "fsdp1",
           MappingProxyType({"precision": "bf16-pure", **TRITON})),
    Source("mosaicml/llm-foundry benchmarking README [H100 80GB FP8", "fsdp1",
           MappingProxyType({"products": "float8", **TRITON})),
    Source("mosaicml", "fsdp1", TRITON),
    Source("foundation-model-stack/fms-fsdp", "fsdp1",
           MappingProxyType({"precision": "bf16-pure", "host_part": 0.1, "kernels": {"fused_gate": True}})),
    Source("DeepSpeed docs", "deepspeed-3", FP16_2021),
    Source("PyTorch FSDP", "fsdp1", MappingProxyType({"precision": "bf16-pure"})),
    # C_B: a constant buffer for reductions, and one for gathers.
    Source("ZeRO paper", "megatron-deepspeed", MappingProxyType({"bucket_bytes": 2 * 5 * 10**8 * 2})),
    Source("litgpt extensions/thunder README DDP", "ddp", NOTHING, LITGPT, SAID),
    Source("litgpt extensions/thunder README single", "ddp", NOTHING, LITGPT, SAID),
    Source("litgpt extensions/thunder README FSDP", "fsdp2", MappingProxyType({"precision": "all-bf16"}), LITGPT, SAID),
    Source("torchtune README llama3.2-3B ladder baseline", "ddp",
           unscored="sequences that are not packed: their length is that of the data, which the row does not have"),
    # Packed, compiled, and with a cross entropy in chunks, as the rows before in the same table.
    Source("torchtune README llama3.2-3B", "ddp",
           MappingProxyType({"host_part": 0.1, "kernels": {"loss": "fused", "fused_gate": True}})),
)  # fmt: skip
"""The systems of known sources; the first entry that fits counts."""


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
