"""DeepSpeed's JSON, read as arguments of `zs.shard`, of an optimizer and of a schedule of learning rates.

Owns the values. `deepspeed_keys.py` has what becomes of each key; nothing that a configuration asks for is left out
without a sentence. Needs no DeepSpeed.
"""

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, final

import torch

import zeroshard as zs
from zeroshard.integrations.deepspeed_auto import check_trainer, filled
from zeroshard.integrations.deepspeed_keys import KEYS, Way
from zeroshard.integrations.deepspeed_optimizers import optimizer_of, scheduler_of
from zeroshard.table.stages import row_of_stage

__all__ = ["DeepSpeed", "Note", "from_deepspeed", "notes_of", "read"]

DTYPES: Final = MappingProxyType(
    {"fp16": torch.float16, "bf16": torch.bfloat16, "bfp16": torch.bfloat16, "fp32": torch.float32}
)
SECTIONS: Final = frozenset(key.rpartition(".")[0] for key in KEYS if "." in key)


@final
@dataclass(frozen=True)
class Note:
    """What becomes of one key."""

    key: str
    value: Any
    way: Way
    why: str

    def __str__(self) -> str:
        return f"{self.key} = {json.dumps(self.value)}: {self.way}: {self.why}"


@final
@dataclass(frozen=True)
class DeepSpeed:
    """A configuration of DeepSpeed, for a loop of your own.

    Args:
        options: arguments of `zs.shard`.
        micro_batch, accumulation, batch: rows of a forward on a rank, backwards of a step, rows of a step; None where
            the configuration leaves them open.
        max_norm: for `torch.nn.utils.clip_grad_norm_`: 1.0 where it is absent, None where it is 0.
        make_optimizer: of parameters or groups; None without a section "optimizer".
        make_scheduler: of an optimizer; None without a section "scheduler".
        notes: what became of each key.
    """

    options: Mapping[str, Any]
    micro_batch: int | None = None
    accumulation: int = 1
    batch: int | None = None
    max_norm: float | None = None
    make_optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None
    make_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LambdaLR] | None = None
    notes: tuple[Note, ...] = field(default=(), repr=False)


def from_deepspeed(
    source: str | Path | Mapping[str, Any], *, args: Any = None, world_size: int | None = None
) -> DeepSpeed:
    """Read a configuration of DeepSpeed.

    Args:
        source: a JSON file, or its contents as a mapping.
        args: TrainingArguments of Transformers, which give the values of "auto", and must agree with the others: a
            Trainer makes its optimizer and schedule of them.
        world_size: the ranks that divide a batch; by default those of `args`, or of the process group.

    Raises:
        ValueError: keys are unknown, refused, of another type, "auto" without `args`, or contradict each other or the
            arguments; all are listed.

    ```python
    import torch
    from zeroshard.integrations.deepspeed import from_deepspeed
    import zeroshard as zs

    config = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    read = from_deepspeed(config)
    model = torch.nn.Linear(4, 4)
    optimizer = read.make_optimizer(model.parameters())
    zero = zs.shard(model, optimizer, **read.options)
    ```
    """
    config = read(source)
    if args is not None:
        world_size = args.world_size if world_size is None else world_size
        config = filled(config, args, world_size)
    elif world_size is None and torch.distributed.is_initialized():
        world_size = torch.distributed.get_world_size()
    notes = [*notes_of(config)]
    if refused := [str(one) for one in notes if one.way == "refused"]:
        raise ValueError("DeepSpeed's configuration has keys that cannot be used:\n  " + "\n  ".join(refused))
    get = _Values(config)
    batch, micro_batch, accumulation = _batches(get, world_size)
    clipping = get.number("gradient_clipping", float)
    optimizer, scheduler = (get.get(f"{section}.type", str) for section in ("optimizer", "scheduler"))
    given = {section: get.get(f"{section}.params", Mapping, {}) for section in ("optimizer", "scheduler")}
    make_optimizer = None if optimizer is None else optimizer_of(optimizer, given["optimizer"])
    if args is not None:
        check_trainer(make_optimizer, scheduler, given["scheduler"], args)
    return DeepSpeed(
        _options(get, world_size),
        micro_batch,
        accumulation,
        batch,
        clipping or None,
        make_optimizer,
        None if scheduler is None else scheduler_of(scheduler, given["scheduler"]),
        tuple(notes),
    )


def read(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration as a mapping, with the clipping of DeepSpeed 0.19.8 where it has none.

    Raises:
        ValueError: a file is no JSON object, or has a key twice.
    """
    if isinstance(source, Mapping):
        return {**source, "gradient_clipping": source.get("gradient_clipping", 1.0)}

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError(f"{source} has a key twice: {[name for name, _ in pairs]}.")
        return dict(pairs)

    try:
        found = json.loads(Path(source).read_text(), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{source} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{source} is no configuration: it has a {type(found).__name__}, not an object.")
    return read(found)


# -- keys -------------------------------------------------------------------------------------------------------------


def notes_of(config: Mapping[str, Any]) -> Iterator[Note]:
    """Yield what becomes of each key of a configuration; "refused" for unknown ones, and for "auto"."""
    values = dict(_flat(config))
    faults = {**_faults(values, "optimizer", optimizer_of), **_faults(values, "scheduler", scheduler_of)}
    for key, value in values.items():
        unknown = "it takes an object" if key in SECTIONS else f"unknown to DeepSpeed 0.19.8{_nearest(key)}"
        way, why = KEYS.get(key) or ("refused", unknown)
        if key in faults:
            yield Note(key, value, "refused", faults[key])
        elif value == "auto" and way != "without meaning":
            yield Note(key, value, "refused", "write a value, or pass args=TrainingArguments(...), which gives it")
        elif (key in SECTIONS and value is None) or (way == "refused" and key in KEYS and _is_off(key, value)):
            yield Note(key, value, "without meaning", "off, or without effect")
        else:
            yield Note(key, value, way, why)


def _faults(values: Mapping[str, Any], section: str, make: Callable[[str, Any], Any]) -> dict[str, str]:
    """Return why nothing can be made of a section, by the key at fault."""
    name, given = values.get(f"{section}.type"), values.get(f"{section}.params", {})
    if not isinstance(name, str) or not isinstance(given, Mapping):
        return {}
    try:
        make(name, given)
    except ValueError as error:
        key, _, why = str(error).partition(": ")
        return {key if key in values else f"{section}.type": why}
    return {}


def _nearest(key: str) -> str:
    """Return the names that somebody may have meant by an unknown one."""
    name = key.rpartition(".")[-1]
    near = [one for one in KEYS if one.rpartition(".")[-1] == name] or difflib.get_close_matches(
        key, [*KEYS, *SECTIONS], n=2
    )
    return f"; did you mean {' or '.join(near[:2])}?" if near else ""


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys with their values; sections that stand for all of their keys are values."""
    for name, value in config.items():
        key = prefix + ("bf16" if name == "bfloat16" and not prefix else str(name))
        if key in SECTIONS and isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value  # a section without keys is not known by its name


def _is_off(key: str, value: Any) -> bool:
    """Tell whether a refused key asks for nothing: 1 is one rank for a size, and true for the others."""
    if isinstance(value, Mapping):
        sizes = [one for name, one in value.items() if name in ("autotp_size", "tp_size", "stages", "autoep_size")]
        return not value or value.get("enabled") is False or ("enabled" not in value and sizes in ([0], [1]))
    return value in (None, False, 0, "none", "") or (value == 1 and value is not True and key.endswith("_size"))


class _Values:
    """The values of a configuration by their keys, with their types checked."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._values = dict(_flat(config))

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self._values.get(key)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ValueError(f"{key} must be {' or '.join(one.__name__ for one in kinds)}; got {value!r}.")
        return value

    def number(self, key: str, kind: type) -> Any:
        value = self.get(key, (int,) if kind is int else (int, float))
        if value is not None and (value < 0 or (kind is int and value < 1)):
            raise ValueError(f"{key} must be at least {1 if kind is int else 0}; got {value!r}.")
        return value

    def dtype(self, key: str) -> torch.dtype | None:
        name = self.get(key, str)
        if name is not None and name.lower() not in DTYPES:
            raise ValueError(f"{key} must be one of {', '.join(DTYPES)}; got {name!r}.")
        return None if name is None else DTYPES[name.lower()]


# -- batches ----------------------------------------------------------------------------------------------------------


def _batches(get: _Values, ranks: int | None) -> tuple[int | None, int | None, int]:
    """Return batch, micro-batch and accumulation; what is absent follows from the others.

    Source: `_set_batch_related_parameters` and `_batch_assertion` of deepspeed/runtime/config.py.
    """
    batch, micro_batch, accumulation = (
        get.number(name, int)
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if accumulation is None and None in (batch, micro_batch):
        accumulation = 1
    if batch is None:
        return micro_batch * accumulation * ranks if micro_batch and ranks else None, micro_batch, accumulation
    if ranks is None and None in (micro_batch, accumulation):
        raise ValueError(
            f"train_batch_size={batch} is divided over the ranks, whose number is not known: pass world_size= (--ranks "
            "of the command), or write train_micro_batch_size_per_gpu and gradient_accumulation_steps."
        )
    if micro_batch is None:
        micro_batch = max(1, batch // (accumulation * ranks))
    if accumulation is None:
        accumulation = max(1, batch // (micro_batch * ranks))
    rows = micro_batch * accumulation
    if batch % rows if ranks is None else batch != rows * ranks:
        raise ValueError(
            f"train_batch_size={batch} is not train_micro_batch_size_per_gpu={micro_batch} x gradient_accumulation_"
            f"steps={accumulation} x {ranks or 'a number of'} ranks; write values whose product it is."
        )
    return batch, micro_batch, accumulation


# -- zs.shard ---------------------------------------------------------------------------------------------------------


def _options(get: _Values, world_size: int | None) -> dict[str, Any]:
    stage = get.get("zero_optimization.stage", int, 0)
    try:
        row_of_stage(stage)
    except ValueError as error:
        raise ValueError(f"zero_optimization.stage: {error}") from None
    options: dict[str, Any] = {"stage": stage}
    if (precision := _precision(get)) is not None:
        options["precision"] = precision
    if (offload := _offload(get)) is not None:
        options["offload"] = offload
    if (size := get.get("zero_optimization.mics_shard_size", int, -1)) != -1:  # DeepSpeed's default
        if world_size is None or size < 1 or world_size % size:
            raise ValueError(f"zero_optimization.mics_shard_size={size} must divide the ranks; there are {world_size}.")
        options["mesh"] = world_size // size
    if (op := get.get("gradient_allreduce_op", str)) is not None:
        options["reduction"] = op
    divides, offloads = (
        get.get(f"activation_checkpointing.{name}", bool) for name in ("partition_activations", "cpu_checkpointing")
    )
    if divides or offloads:
        options["activations"] = "recompute+offload" if offloads else "recompute"
    leaves = get.get("zero_optimization.leaf_module", Mapping, {})
    if names := [*leaves.get("classes", ()), *leaves.get("names", ())]:
        raise ValueError(f"zero_optimization.leaf_module: pass the modules {names} as units= of zs.shard.")
    return options


def _precision(get: _Values) -> Any:
    fp16, bf16 = (get.get(f"{name}.enabled", bool, False) for name in ("fp16", "bf16"))
    if fp16 and bf16:
        raise ValueError("fp16.enabled and bf16.enabled are both true.")
    low = torch.float16 if fp16 else torch.bfloat16 if bf16 else None
    chosen: dict[str, Any] = {
        "param": get.dtype("data_types.param_dtype") or low,
        "grad": get.dtype("data_types.grad_accum_dtype"),
        "reduce": get.dtype("communication_data_type"),
    }
    scale = get.number("fp16.loss_scale", float)
    if low is None and not any(chosen.values()):
        return None
    if {name for name, value in chosen.items() if value} <= {"param"} and not (fp16 and scale):
        return "fp16" if chosen["param"] is torch.float16 else "bf16" if chosen["param"] is torch.bfloat16 else None
    scales: dict[str, Any] = {"loss_scale": scale or "dynamic"} if fp16 else {}
    return zs.Precision(**chosen, master=torch.float32, **scales)


def _offload(get: _Values) -> zs.Offload | None:
    zero, places = "zero_optimization.", list[Any]()
    for part, old in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_param")):
        device = get.get(f"{zero}{part}.device", str, "cpu" if get.get(zero + old, bool) else "none")
        if device not in ("none", "cpu", "nvme"):
            raise ValueError(f"{zero}{part}.device must be 'none', 'cpu' or 'nvme'; got {device!r}.")
        folder = get.get(f"{zero}{part}.nvme_path", str)
        if device == "nvme" and folder is None:
            raise ValueError(f"{zero}{part}.device is 'nvme', but there is no nvme_path.")
        places.append(None if device == "none" else "host" if device == "cpu" else folder)
    row = row_of_stage(get.get(f"{zero}stage", int, 0))
    states, parameters = places[0], places[1] if row.cuts_parameters else None  # whole ones stay, as in DeepSpeed
    if states is None and parameters is None:
        return None
    if states is None or (parameters not in (None, states, "host")):
        raise ValueError(
            f"offload_optimizer goes to {states}, and offload_param to {parameters}: parameters go where states go, or "
            "to the host. Write zs.Offload(...) yourself."
        )
    fraction = get.number(f"{zero}offload_optimizer.ratio", float)
    apart: dict[str, Any] = {"parameters_to": "host"} if parameters == "host" != states else {}
    return zs.Offload(
        states=1.0 if fraction is None else float(fraction),
        parameters=float(parameters is not None),
        to=states,
        **apart,
    )
