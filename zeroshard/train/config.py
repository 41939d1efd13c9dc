"""The configuration of a run: what can be set, in TOML or as `section.key=value`, and what follows from the model.

Owns the names, types, defaults and limits of all settings. Must not know what they do; that stands with each one's use.
Read `Config` first, then `load_config`. Needs pydantic (the extra `zeroshard[cli]`).
"""

import difflib
import json
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self, final, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

import zeroshard as zs
from zeroshard.train.inputs import read_input
from zeroshard.train.models.shape import GPTConfig

__all__ = [
    "ALIASES",
    "AUTO",
    "Checkpoint",
    "Config",
    "Data",
    "LEARNING_RATE_FACTORS",
    "Model",
    "Run",
    "Train",
    "Zero",
    "choices_of",
    "default_of",
    "differences",
    "load_config",
    "to_toml",
]

_GPT: Final = "gpt"
_HF: Final = "hf:"
_HF_BATCH: Final = 8
_HF_LEARNING_RATE: Final = 3e-4
LEARNING_RATE_FACTORS: Final = MappingProxyType(
    {"adamw": 1.0, "muon": 4.0, "adafactor": 10.0, "adamw8bit": 1.0, "sgd": 25.0, "lion": 0.4}
)
"""What the model's learning rate, which is AdamW's, is multiplied with; `benchmarks/optimizers.py` compares others."""
_FREE: Final = frozenset(
    """
    data.path data.column data.tokenizer data.cache train.steps train.accumulation train.eval_every train.eval_bytes
    """.split()
)
_FREE_SECTIONS: Final = frozenset(["checkpoint", "run", "zero"])
_SEED: Final = "run.seed"
_MAX_TOML_BYTES: Final = 1 << 16
AUTO: Final = "auto"
"""A stage that `planned.py` chooses."""
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
"""Names that other programs have for settings; a setting's own name does without its section, too."""
_CPU_RANKS: Final = 2
_TOKENIZERS: Final = ("tokenizer*", "vocab.*", "*.model", "spiece.*")
_SHOWN: Final = 200
"""Characters of a wrong value in a message."""


def _known_stage(stage: int | str) -> int | str:
    if stage != AUTO:
        zs.row_of_stage(stage)  # type: ignore[arg-type]
    return stage


def _known_activations(names: str) -> str:
    zs.activations_of(names)
    return names


def _known_offload(asked: str) -> str:
    if asked != AUTO:
        zs.offload_of(asked or None)
    return asked


def _known_source(source: str) -> str:
    if source != _GPT and not (source.startswith(_HF) and source != _HF):
        raise ValueError(f"must be {_GPT!r}, or {_HF}DIR with the folder of a transformers model")
    return source


def _holds_tokenizer(folder: str) -> bool:
    """Tell whether a model's folder holds the files of a tokenizer, too."""
    return bool(folder) and any(found for pattern in _TOKENIZERS for found in Path(folder).glob(pattern))


def _count_devices() -> int:
    """Return how many GPUs this process sees."""
    import torch  # takes its time, which `--help` does not have

    return torch.cuda.device_count()


def _plain_name(name: str) -> str:
    if name in ("", "..") or Path(name).name != name or not name.isprintable():
        raise ValueError("must be one plain folder name of printable characters, as it becomes a folder of run.folder")
    return name


class _Section(BaseModel):
    """One section: frozen, strict about types, and without room for unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


@final
class Model(_Section):
    """The model: one dial, or somebody else's."""

    source: Annotated[str, AfterValidator(_known_source)] = Field(
        default=_GPT, description="gpt, or hf:DIR for a transformers causal model in a local folder"
    )
    depth: int = Field(default=4, ge=1, description="blocks of gpt; width, heads, batch and learning rate follow")
    context: int = Field(default=128, ge=2, description="tokens that the model reads at once")


@final
class Data(_Section):
    """The text."""

    path: str = Field(
        default="", description="text, .jsonl, .parquet, or a folder of them; empty for CPython's documentation"
    )
    column: str = Field(default="text", min_length=1, description="what holds the text in .jsonl and .parquet")
    tokenizer: str = Field(
        default="", description="a file of `zeroshard tokenizer`, a Hugging Face folder; empty for the model's or bytes"
    )
    cache: str = Field(default="", description="a folder for tokens that later runs use; empty for run.folder/.cache")
    heldout_fraction: float = Field(
        default=0.1, gt=0, lt=1, description="share of the text, at its end, kept for evaluation"
    )


@final
class Train(_Section):
    """The loop. `batch` and `learning_rate` follow from the model where they are 0."""

    steps: int = Field(default=1500, ge=1, description="updates of the parameters")
    batch: int = Field(
        default=0, ge=0, description="windows of a step, over all ranks, at least one a rank; 0 follows the model"
    )
    accumulation: int = Field(default=1, ge=1, description="micro-batches of a step, on each rank")
    optimizer: Literal["adamw", "muon", "adafactor", "adamw8bit", "sgd", "lion"] = Field(
        default="adamw", description="adamw, muon, adafactor, adamw8bit, sgd or lion"
    )
    learning_rate: float = Field(default=0.0, ge=0, description="at its highest; 0 follows model and optimizer")
    warmup_fraction: float = Field(default=0.05, ge=0, le=1, description="share of the steps in which it rises")
    final_fraction: float = Field(default=0.1, ge=0, le=1, description="what the cosine leaves of it at the last step")
    weight_decay: float = Field(default=0.1, ge=0, description="of matrices, embeddings aside")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's and Lion's first, and the momentum of SGD")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW's and Lion's second")
    precision: Literal["fp32", "bf16", "fp16"] = Field(default="fp32", description="dtype that the model computes in")
    compile_blocks: bool = Field(default=False, description="compile each block of the model with torch.compile")
    clip: float = Field(default=1.0, ge=0, description="largest 2-norm of the gradients; 0 does not clip")
    eval_every: int = Field(default=250, ge=0, description="steps between evaluations; 0 for one at the end")
    eval_bytes: int = Field(default=131_072, ge=0, description="held-out bytes scored at most; 0 for all")


@final
class Zero(_Section):
    """What is handed to `zeroshard.shard`."""

    stage: Annotated[int | Literal["auto"], AfterValidator(_known_stage)] = Field(
        default=3, description="the row of the residency table; auto: the least whose plan fits this machine"
    )
    residency: Literal["", "C1", "C2", "C3", "C4", "C5"] = Field(
        default="", description="a row of the ZeRO paper by name, instead of zero.stage and zero.activations"
    )
    offload: Annotated[str, AfterValidator(_known_offload)] = Field(
        default="",
        description="offloaded state: host, /folder, states=0.6,parameters=1,to=/folder, update=in-backward, or auto",
    )
    activations: Annotated[str, AfterValidator(_known_activations)] = Field(
        default="keep",
        description="keep, recompute (activation checkpointing), compress, ..., joined by +: docs/activations.md",
    )
    no_sync: bool = Field(default=False, description="reduce once a step, not at each micro-batch")
    check_every: int = Field(
        default=100, ge=0, description="steps between comparisons of what ranks hold copies of; 0 for none"
    )
    watchdog_s: float = Field(
        default=600.0, gt=0, description="seconds that a rank waits for the others before it raises"
    )


@final
class Checkpoint(_Section):
    """When a run saves, beside its end and a signal. Both may be set: whichever comes first."""

    every_steps: int = Field(default=0, ge=0, description="steps between checkpoints; 0 for none by steps")
    every_s: float = Field(default=600.0, ge=0, description="seconds between checkpoints; 0 for none by time")
    keep: int = Field(default=2, ge=2, description="checkpoints that stay, the newest ones")


@final
class Run(_Section):
    """Where, how often, and on how many ranks."""

    name: Annotated[str, AfterValidator(_plain_name)] = Field(default="default", description="files go to runs/<name>/")
    folder: str = Field(default="runs", description="where that folder is; a run that is there resumes")
    ranks: int = Field(
        default=0, ge=0, description="processes; 0 for one a GPU, or 2 on a CPU; torchrun's own number wins"
    )
    seed: int = Field(default=1, ge=0, description="seed of parameters, data order and sample")
    profile_steps: int = Field(default=0, ge=0, description="steps to profile, after the first two; 0 for none")
    log_every: int = Field(
        default=50, ge=1, description="steps between lines where there is no terminal for a progress bar"
    )
    prompt: str = Field(default="The ", min_length=1, description="how the sample begins")
    sample_bytes: int = Field(default=400, ge=0, description="bytes of the sample; 0 for none")
    temperature: float = Field(default=0.7, ge=0, description="temperature of the sample; lower is likelier text")


@final
class Config(_Section):
    """A whole run. `resolved` fills in what follows from the model."""

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
        return "" if self.model.source == _GPT else self.model.source.removeprefix(_HF)

    @property
    def tokenizer(self) -> str:
        """The tokenizer's file or folder; empty for bytes, as where a model's folder holds no tokenizer."""
        return self.data.tokenizer or (self.hf_folder if _holds_tokenizer(self.hf_folder) else "")

    @property
    def cache(self) -> Path:
        """The folder of the tokens."""
        return Path(self.data.cache) if self.data.cache else Path(self.run.folder, ".cache")

    def resolved(self) -> Self:
        """Return the configuration with every value that follows from the model or the machine written out."""
        batch, learning_rate = self.gpt.batch, self.gpt.learning_rate
        if self.hf_folder:
            batch, learning_rate = _HF_BATCH, _HF_LEARNING_RATE
        learning_rate *= LEARNING_RATE_FACTORS[self.train.optimizer]
        derived = {"batch": self.train.batch or batch, "learning_rate": self.train.learning_rate or learning_rate}
        run = self.run.model_copy(update={"ranks": self.run.ranks or _count_devices() or _CPU_RANKS})
        return self.model_copy(update={"train": self.train.model_copy(update=derived), "run": run})

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        resolved = self.resolved()
        batch, ranks, accumulation = resolved.train.batch, resolved.run.ranks, self.train.accumulation
        if batch < ranks * accumulation:
            raise ValueError(
                f"train.batch={batch} windows are not one for each of run.ranks={ranks} times "
                f"train.accumulation={accumulation} micro-batches; set train.batch to {ranks * accumulation} or more"
            )
        return self


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply overrides, and check everything.

    Args:
        path: a TOML file with the sections of `Config`; None for the defaults.
        overrides: each `section.key=value`, `key=value`, or with a name of `ALIASES`; the last one of a setting wins.
            Values are read as TOML; text needs no quotes.

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
    of steps. Files of the text and its tokens may move: what is in them is compared when a checkpoint is loaded.
    """
    earlier, found = before.model_dump(), []
    for section, values in now.model_dump().items():
        for key, value in values.items():
            name = f"{section}.{key}"
            is_free = name in _FREE or (section in _FREE_SECTIONS and name != _SEED)
            if not is_free and value != (old := earlier[section][key]):
                found.append(f"{name} is {_toml_value(value)}, and was {_toml_value(old)}")
    return found


def _read_toml(path: Path) -> dict[str, Any]:
    content = read_input(path, "--config", _MAX_TOML_BYTES)
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"--config: {str(path)!r} is not TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"--config: {str(path)!r} nests values too deeply; no setting needs that") from None


def _check_names(settings: dict[str, Any]) -> None:
    """Raise for a section or key that does not exist, naming the likeliest one that does."""
    for section, values in settings.items():
        if not isinstance(values, dict):
            raise ValueError(
                f"{section}={_shown(values)} stands in no section; write [train], then steps = 100 below it"
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
    """Say that a name is unknown, and which one was meant."""
    close = names if is_exact else difflib.get_close_matches(name, names, n=1)
    if close:
        return f"unknown {kind} {name!r}; did you mean {close[0]!r}?"
    return f"unknown {kind} {name!r}; there are: {', '.join(names)}"


def _apply(settings: dict[str, Any], override: str) -> None:
    """Set one `section.key=value`, or `key=value`."""
    name, equals, text = override.partition("=")
    if not (equals and name.strip()):
        raise ValueError(f"an override reads key=value, for example train.steps=100 or steps=100; got {override!r}")
    section, _, key = _full_name(name.strip()).partition(".")
    _check_known(section, [key])
    settings.setdefault(section, {})[key] = _typed(section, key, text.strip())


def _full_name(name: str) -> str:
    """Return `section.key` of a setting that is named by its key alone, or as other programs name it."""
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
    """Return the values that `section.key` can have, where there are few; else nothing."""
    annotation = _field_of(name).annotation
    return tuple(str(one) for one in get_args(annotation)) if get_origin(annotation) is Literal else ()


def default_of(name: str) -> Any:
    """Return the value that `section.key` has where nothing sets it."""
    return _field_of(name).default


def _field_of(name: str) -> Any:
    section, _, key = name.partition(".")
    return type(Config.model_fields[section].default).model_fields[key]


def _typed(section: str, key: str, text: str) -> Any:
    """Read the text of an override: as it stands where text is wanted, else as TOML."""
    wants_text = isinstance(default_of(f"{section}.{key}"), str)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return text if wants_text and not isinstance(value, str) else value


def _explain(error: ValidationError) -> list[str]:
    """Return one line for each setting that is wrong: which, what was got, and what it should be."""
    lines = []
    for problem in error.errors():
        message = problem["msg"].removeprefix("Value error, ")
        name = ".".join(str(part) for part in problem["loc"])
        lines.append(f"{name}={_shown(problem['input'])}: {message}" if name else message)
    return lines


def _shown(value: Any) -> str:
    """Return a wrong value as it is shown: of a long one the beginning."""
    try:
        text = repr(value)
    except RecursionError:
        return "(values in values, too deep to be shown)"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _toml_value(value: str | float | bool) -> str:
    """Write one value. JSON's text, numbers and booleans are TOML's, but for the delete character."""
    return json.dumps(value).replace("\x7f", "\\u007f")
