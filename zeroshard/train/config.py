"""The configuration of a run: settings in TOML or as `section.key=value`, and defaults derived from the model.

Owns the names, types, defaults and limits of all settings. It must not know what they do.
Read `Config` first, then `load_config`. Needs pydantic (the extra `zeroshard[cli]`).
"""

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, Self, final, get_args, get_origin

from pydantic import ValidationError, model_validator

from zeroshard.train.inputs import read_input
from zeroshard.train.models.lora import check_lora
from zeroshard.train.models.shape import GPTConfig
from zeroshard.train.ranks import check_islands, check_pipe, check_ranks, check_replicas, check_split
from zeroshard.train.settings import AUTO, GPT, HF, Checkpoint, Data, Model, Run, Section, Train, Zero
from zeroshard.train.trackers import check_names

__all__ = [
    "ALIASES",
    "AUTO",
    "Checkpoint",
    "Config",
    "Data",
    "LEARNING_RATE_FACTORS",
    "Model",
    "Run",
    "SettingsError",
    "Train",
    "Zero",
    "changes",
    "choices_of",
    "default_of",
    "differences",
    "full_name",
    "load_config",
    "to_toml",
]

_HF_BATCH: Final = 8
_HF_LEARNING_RATE: Final = 3e-4
LEARNING_RATE_FACTORS: Final = MappingProxyType(
    {"adamw": 1.0, "muon": 4.0, "adafactor": 10.0, "adamw8bit": 1.0, "sgd": 25.0, "lion": 0.4}
)
"""Factors of the model's learning rate, which is for AdamW; `benchmarks/optimizers.py` compares other factors."""
_FREE: Final = frozenset(
    """
    data.path data.column data.tokenizer data.cache train.steps train.accumulation train.eval_every train.eval_bytes
    """.split()
)
SCHEDULE: Final = frozenset(
    """
    train.steps train.learning_rate train.warmup_fraction train.final_fraction train.weight_decay train.clip
    """.split()
)
"""Settings that a resume may change, from its first step on, which is then another training."""
_FREE_SECTIONS: Final = frozenset(["checkpoint", "run", "zero"])
_SEED: Final = "run.seed"
_MAX_TOML_BYTES: Final = 1 << 16
ALIASES: Final = MappingProxyType(
    {
        "batch_size": "train.batch",
        "compile": "train.compile_blocks",
        "gradient_accumulation_steps": "train.accumulation",
        "lr": "train.learning_rate",
        "max_steps": "train.steps",
        "seq_len": "model.context",
    }
)
"""Names of settings in other programs. A setting may also be given without its section."""
_CPU_RANKS: Final = 2
_TOKENIZERS: Final = ("tokenizer*", "vocab.*", "*.model", "spiece.*")
_MODEL_FILES: Final = ("config.json", "generation_config.json")
_TOKENIZER_FILES: Final = (*_TOKENIZERS, "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template*")
_SHOWN: Final = 200
"""Maximum number of characters of a wrong value in a message."""


class SettingsError(ValueError):
    """Settings that a run cannot start with, as its ranks find when they make its model and read its checkpoints."""


def _holds_tokenizer(folder: str) -> bool:
    """Return whether a model's folder also contains a tokenizer."""
    return bool(folder) and any(found for pattern in _TOKENIZERS for found in Path(folder).glob(pattern))


def _count_devices() -> int:
    """Return how many GPUs this process sees."""
    import torch  # slow to import, which `--help` avoids

    return torch.cuda.device_count()


@final
class Config(Section):
    """The configuration of a run. `resolved` fills in derived values."""

    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    zero: Zero = Zero()
    checkpoint: Checkpoint = Checkpoint()
    run: Run = Run()

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.run.folder, self.run.name)

    @property
    def gpt(self) -> GPTConfig:
        """The shape of a GPT over bytes."""
        return GPTConfig(self.model.depth, self.model.context)

    @property
    def hf_folder(self) -> str:
        """The folder of a transformers model; empty for a GPT."""
        return "" if self.model.source == GPT else self.model.source.removeprefix(HF)

    @property
    def tokenizer(self) -> str:
        """The tokenizer's file or folder; empty for bytes, the default if a model's folder has no tokenizer."""
        return self.data.tokenizer or (self.hf_folder if _holds_tokenizer(self.hf_folder) else "")

    @property
    def export_files(self) -> Mapping[str, Path]:
        """By name, the files besides tensors of the model's folder in Hugging Face's layout; none for a GPT."""
        if not self.hf_folder:
            return {}
        found = [Path(self.hf_folder) / name for name in _MODEL_FILES]
        tokens = Path(self.tokenizer) if self.tokenizer else None
        if tokens is not None and tokens.is_file():
            return {path.name: path for path in found if path.is_file()} | {"tokenizer.json": tokens}
        found += [path for pattern in _TOKENIZER_FILES if tokens for path in sorted(tokens.glob(pattern))]
        return {path.name: path for path in found if path.is_file()}

    @property
    def cache(self) -> Path:
        """The folder of the tokens."""
        return Path(self.data.cache) if self.data.cache else Path(self.run.folder, ".cache")

    def resolved(self) -> Self:
        """Return the configuration with all values filled in that derive from the model or the machine."""
        batch, learning_rate = self.gpt.batch, self.gpt.learning_rate
        if self.hf_folder:
            batch, learning_rate = _HF_BATCH, _HF_LEARNING_RATE
        learning_rate *= LEARNING_RATE_FACTORS[self.train.optimizer]
        derived = {"batch": self.train.batch or batch, "learning_rate": self.train.learning_rate or learning_rate}
        micro_batches = self.run.micro_batches or (2 * self.run.pipe if self.run.pipe > 1 else 0)
        ranks = self.run.ranks or _count_devices() or _CPU_RANKS
        run = self.run.model_copy(update={"ranks": ranks, "micro_batches": micro_batches})
        if run.has_islands and run.replicas == 1:
            run = run.model_copy(update={"replicas": ranks})
        return self.model_copy(update={"train": self.train.model_copy(update=derived), "run": run})

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        resolved, tensor, accumulation = self.resolved(), self.run.tensor, self.train.accumulation
        check_ranks(resolved.train.batch, ranks=resolved.run.ranks, tensor=tensor, accumulation=accumulation)
        if tensor > 1:
            treatments = "" if self.hf_folder else self.zero.residency or self.zero.activations
            check_split(tensor, self.train.optimizer, treatments, compiles=self.train.compile_blocks)
        check_pipe(resolved.train.batch, resolved.run, accumulation=accumulation)
        check_islands(resolved.run)
        check_replicas(resolved.train.batch, resolved.run)
        check_lora(self.model.lora, self.hf_folder, self.train.optimizer, resolved.run)
        check_names(self.run.log_to)
        return self


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply overrides, and check everything.

    Args:
        path: a TOML file with the sections of `Config`; None for the defaults.
        overrides: each `section.key=value`, `key=value`, or with a name of `ALIASES`; the last value of a setting
            applies. Values are parsed as TOML; text needs no quotes.

    Returns:
        The configuration, resolved.

    Raises:
        ValueError: the file is missing or no TOML, a name is unknown (a likely one is suggested), or a value is of the
            wrong type or out of its limits.

    >>> from zeroshard.train.config import load_config
    >>> load_config(overrides=["model.depth=2", "lr=0.001"]).train.learning_rate
    0.001
    """
    settings = {} if path is None else _read_toml(path)
    if isinstance(zero := settings.get("zero"), dict):
        zero.pop("cut", None)  # in files of earlier runs; it changed no result
    _check_names(settings)
    for override in overrides:
        _apply(settings, override)
    try:
        return Config.model_validate(settings).resolved()
    except ValidationError as error:
        raise ValueError("\n".join(_explain(error))) from None


def to_toml(config: Config) -> str:
    """Write a configuration as TOML that `load_config` reads back as the same one, each setting with what it is."""
    sections = []
    for name, section in config:
        lines = [f"{key} = {_toml_value(value)}" for key, value in section]
        notes = [field.description for field in type(section).model_fields.values()]
        width = max(len(line) for line in lines)
        sections.append(
            "".join([f"[{name}]\n", *(f"{a:<{width}}  # {b}\n" for a, b in zip(lines, notes, strict=True))])
        )
    return "\n".join(sections)


def differences(before: Config, now: Config) -> list[str]:
    """Return the settings in which `now` is another training than `before`, each with both values.

    Where and how a run is made, saved, evaluated and shown may change from one start to the next, and so may the number
    of steps, the learning rate and its schedule (`SCHEDULE`). Files of the text and its tokens may move: what is in
    them is compared when a checkpoint is loaded.
    """
    earlier, found = before.model_dump(), []
    for section, values in now.model_dump().items():
        for key, value in values.items():
            name = f"{section}.{key}"
            is_free = name in _FREE | SCHEDULE or (section in _FREE_SECTIONS and name != _SEED)
            if not is_free and value != (old := earlier[section][key]):
                found.append(f"{name} is {_toml_value(value)}, and was {_toml_value(old)}")
    return found


def changes(before: Config, now: Config) -> list[str]:
    """Return the settings of the schedule that a resume changes, each with both values."""
    names = sorted(SCHEDULE)
    values = [
        [getattr(getattr(one, name.split(".")[0]), name.split(".")[1]) for name in names] for one in (now, before)
    ]
    found = zip(names, *values, strict=True)
    return [f"{name} is {_toml_value(new)}, and was {_toml_value(old)}" for name, new, old in found if new != old]


def _read_toml(path: Path) -> dict[str, Any]:
    content = read_input(path, "--config", _MAX_TOML_BYTES)
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"--config: {str(path)!r} is not TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"--config: {str(path)!r} nests values too deeply; no setting needs that") from None


def _check_names(settings: dict[str, Any]) -> None:
    """Raise for an unknown section or key, with the most similar known name."""
    for section, values in settings.items():
        if not isinstance(values, dict):
            raise ValueError(
                f"{section}={_shown(values)} is outside a section; write [train], then steps = 100 below it"
            )
        for key in [key for key in values if ALIASES.get(key, "").startswith(f"{section}.")]:
            values[ALIASES[key].partition(".")[2]] = values.pop(key)
        _check_known(section, values)


def _check_known(section: str, keys: Iterable[str]) -> None:
    known = _known_names()
    if section not in known:
        raise ValueError(_unknown("section", section, list(known)))
    for key in keys:
        if key not in known[section]:
            names = [f"{s}.{k}" for s, ks in known.items() for k in ks]
            namesakes = [name for name in names if name.endswith(f".{key}")]
            raise ValueError(_unknown("key", f"{section}.{key}", namesakes or names, is_exact=bool(namesakes)))


def _known_names() -> dict[str, list[str]]:
    """Return the keys of each section."""
    return {section: list(type(field.default).model_fields) for section, field in Config.model_fields.items()}


def _unknown(kind: str, name: str, names: list[str], *, is_exact: bool = False) -> str:
    """Return a message about an unknown name, with the most similar known name."""
    close = names if is_exact else difflib.get_close_matches(name, names, n=1)
    if close:
        return f"unknown {kind} {name!r}; did you mean {close[0]!r}?"
    return f"unknown {kind} {name!r}; there are: {', '.join(names)}"


def _apply(settings: dict[str, Any], override: str) -> None:
    """Set one `section.key=value`, or `key=value`."""
    name, equals, text = override.partition("=")
    if override.startswith(HF):
        raise ValueError(f"a model is an option: write --model {override}")
    if not (equals and name.strip()):
        raise ValueError(f"an override reads key=value, for example train.steps=100 or steps=100; got {override!r}")
    section, _, key = full_name(name.strip()).partition(".")
    _check_known(section, [key])
    settings.setdefault(section, {})[key] = _typed(section, key, text.strip())


def full_name(name: str) -> str:
    """Return `section.key` of a setting given by its key or by an alias."""
    names = [f"{section}.{key}" for section, keys in _known_names().items() for key in keys]
    section, dot, key = name.partition(".")
    if dot:
        alias = ALIASES.get(key, "")
        return alias if alias.startswith(f"{section}.") else name
    namesakes = [full for full in names if full.endswith(f".{name}")]
    if name in ALIASES or len(namesakes) == 1:
        return ALIASES.get(name) or namesakes[0]
    short = {full.partition(".")[2]: full for full in names} | ALIASES
    raise ValueError(_unknown("setting", name, list(short)))


def choices_of(name: str) -> tuple[str, ...]:
    """Return the possible values of `section.key` if there are few; otherwise ()."""
    annotation = _field_of(name).annotation
    return tuple(str(one) for one in get_args(annotation)) if get_origin(annotation) is Literal else ()


def default_of(name: str) -> Any:
    """Return the default of `section.key`."""
    return _field_of(name).default


def _field_of(name: str) -> Any:
    section, _, key = name.partition(".")
    return type(Config.model_fields[section].default).model_fields[key]


def _typed(section: str, key: str, text: str) -> Any:
    """Parse the text of an override: literally for text settings, otherwise as TOML."""
    wants_text = isinstance(default_of(f"{section}.{key}"), str)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return text if wants_text and not isinstance(value, str) else value


def _explain(error: ValidationError) -> list[str]:
    """Return one line for each wrong setting: its name, the value, and what is expected."""
    lines = []
    # Of a setting of several types, each is a problem of its own, whose place ends with the type.
    for place, problems in groupby(error.errors(), lambda one: one["loc"][:2]):
        problem, *others = problems
        message = problem["msg"].removeprefix("Value error, ")
        message += "".join(f"; or: {one['msg']}" for one in others)
        name = ".".join(map(str, place))
        section, _, key = name.rpartition(".")
        if section and message.startswith((f"{key}=", f"{key} must")) and _shown(problem["input"]) in message:
            lines.append(f"{section}.{message}")
        else:
            lines.append(f"{name}={_shown(problem['input'])}: {message}" if name else message)
    return lines


def _shown(value: Any) -> str:
    """Return the text of a wrong value, truncated if it is long."""
    try:
        text = repr(value)
    except RecursionError:
        return "(nested too deeply to show)"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _toml_value(value: str | float | bool) -> str:
    """Write one value. JSON strings, numbers and booleans are valid TOML, except for the delete character."""
    return json.dumps(value).replace("\x7f", "\\u007f")
