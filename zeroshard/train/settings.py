"""The sections of a run's configuration: names, types, defaults, limits and descriptions of all settings.

Owns each setting on its own. It must not know what they do, how settings are written, or which go together:
`config.py` does. Needs pydantic (the extra `zeroshard[cli]`).
"""

from pathlib import Path
from typing import Annotated, Final, Literal, final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from zeroshard.describe.offload import offload_of
from zeroshard.describe.treatments import activations_of
from zeroshard.table.stages import row_of_stage
from zeroshard.train.models.lora import lora_of

__all__ = ["AUTO", "Checkpoint", "Data", "GPT", "HF", "Model", "Run", "Section", "Train", "Zero"]

GPT: Final = "gpt"
HF: Final = "hf:"
AUTO: Final = "auto"
"""The value with which `planned.py` chooses a stage or an offload."""


def _known_stage(stage: int | str) -> int | str:
    if stage != AUTO:
        row_of_stage(stage)  # type: ignore[arg-type]
    return stage


def _known_activations(names: str) -> str:
    activations_of(names)
    return names


def _known_offload(asked: str) -> str:
    if asked != AUTO:
        offload_of(asked or None)
    return asked


def _known_source(source: str) -> str:
    if source != GPT and not (source.startswith(HF) and source != HF):
        raise ValueError(f"must be {GPT!r}, or {HF}DIR with the folder of a transformers model")
    return source


def _known_lora(asked: str) -> str:
    lora_of(asked)
    return asked


def _short_name(dtype: object) -> object:
    """Return the name of a precision, which may be given as a dtype's."""
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(str(dtype), dtype)


def _plain_name(name: str) -> str:
    if not name or name.startswith(".") or Path(name).name != name or not name.isprintable():
        raise ValueError(
            "must be one plain folder name of printable characters without a dot before them, because it becomes a "
            "folder in run.folder, where .cache is that of tokens"
        )
    return name


class Section(BaseModel):
    """A section: frozen, with strict types and no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _fits(cls, value: object) -> object:
        """Refuse an integer that tensors, seeds and checkpoints cannot hold."""
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("must be less than 2**63")
        return value


@final
class Model(Section):
    """The model: a GPT sized by `depth`, or a transformers model."""

    source: Annotated[str, AfterValidator(_known_source)] = Field(
        default=GPT, description="gpt, or hf:DIR for a transformers causal model in a local folder"
    )
    depth: int = Field(
        default=4, ge=1, description="number of blocks of gpt; sets width, heads, batch and learning rate"
    )
    context: int = Field(default=128, ge=2, description="context length in tokens")
    lora: Annotated[str, AfterValidator(_known_lora)] = Field(
        default="",
        description="LoRA on hf:DIR, such as rank=16 or rank=16,alpha=32,dropout=0.05,targets=q_proj+v_proj; "
        "empty to train all parameters",
    )


@final
class Data(Section):
    """The text."""

    path: str = Field(
        default="", description="text, .jsonl, .parquet, or a folder of these; empty for CPython's documentation"
    )
    column: str = Field(default="text", min_length=1, description="column of the text in .jsonl and .parquet")
    tokenizer: str = Field(
        default="",
        description="a file of `zeroshard tokenizer` or a Hugging Face folder; empty for the model's, or bytes",
    )
    cache: str = Field(default="", description="folder for tokens that later runs reuse; empty for run.folder/.cache")
    heldout_fraction: float = Field(
        default=0.1, gt=0, lt=1, description="fraction of the text, at its end, held out for evaluation"
    )


@final
class Train(Section):
    """The loop. `batch` and `learning_rate` are derived from the model if they are 0."""

    steps: int = Field(default=1500, ge=1, description="updates of the parameters")
    batch: int = Field(
        default=0, ge=0, description="windows per step over all ranks, at least one per rank; 0 for the model's default"
    )
    accumulation: int = Field(default=1, ge=1, description="micro-batches per step on each rank")
    optimizer: Literal["adamw", "muon", "adafactor", "adamw8bit", "sgd", "lion"] = Field(
        default="adamw", description="adamw, muon, adafactor, adamw8bit, sgd or lion"
    )
    learning_rate: float = Field(
        default=0.0, ge=0, description="maximum learning rate; 0 for the default of model and optimizer"
    )
    warmup_fraction: float = Field(
        default=0.05, ge=0, le=1, description="fraction of the steps in which the learning rate rises"
    )
    final_fraction: float = Field(
        default=0.1, ge=0, le=1, description="fraction of the learning rate at the last step (cosine)"
    )
    weight_decay: float = Field(default=0.1, ge=0, description="weight decay of matrices, without embeddings")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="first beta of AdamW and Lion, and momentum of SGD")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="second beta of AdamW and Lion")
    precision: Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_short_name)] = Field(
        default="fp32", description="precision of the model's computation"
    )
    compile_blocks: bool = Field(default=False, description="compile each block of the model with torch.compile")
    clip: float = Field(default=1.0, ge=0, description="maximum 2-norm of the gradients; 0 for no clipping")
    eval_every: int = Field(default=250, ge=0, description="steps between evaluations; 0 for only one at the end")
    eval_bytes: int = Field(default=131_072, ge=0, description="maximum number of held-out bytes to score; 0 for all")


@final
class Zero(Section):
    """The arguments of `zeroshard.shard`."""

    stage: Annotated[int | Literal["auto"], AfterValidator(_known_stage)] = Field(
        default=3, description="ZeRO stage; auto for the lowest stage whose plan fits this machine"
    )
    residency: Literal["", "C1", "C2", "C3", "C4", "C5"] = Field(
        default="", description="configuration of the ZeRO paper; replaces zero.stage and zero.activations"
    )
    offload: Annotated[str, AfterValidator(_known_offload)] = Field(
        default="", description="offload: host, /folder, states=0.6,parameters=1,to=/folder, or auto"
    )
    activations: Annotated[str, AfterValidator(_known_activations)] = Field(
        default="keep",
        description="keep, recompute (activation checkpointing), compress, ..., joined by +: docs/activations.md",
    )
    no_sync: bool = Field(default=False, description="reduce gradients once per step, not once per micro-batch")
    check_every: int = Field(default=100, ge=0, description="steps between comparisons of replicated state; 0 for none")
    watchdog_s: float = Field(
        default=600.0, gt=0, description="seconds that a rank waits for other ranks before it raises an error"
    )


@final
class Checkpoint(Section):
    """When a run saves, besides at its end and on a signal: after steps or seconds, whichever comes first."""

    every_steps: int = Field(default=0, ge=0, description="steps between checkpoints; 0 for no limit in steps")
    every_s: float = Field(default=600.0, ge=0, description="seconds between checkpoints; 0 for no limit in time")
    keep: int = Field(default=2, ge=2, description="number of newest checkpoints to keep")


@final
class Run(Section):
    """Files, output and processes of a run."""

    name: Annotated[str, AfterValidator(_plain_name)] = Field(default="default", description="files go to runs/<name>/")
    folder: str = Field(default="runs", description="parent folder of the run; an existing run resumes")
    ranks: int = Field(
        default=0, ge=0, description="processes; 0 for one per GPU, or 2 on a CPU; torchrun's number has priority"
    )
    replicas: int = Field(
        default=1, ge=1, description="copies of the sharded state, each over ranks / replicas neighbouring ranks"
    )
    outer: int = Field(
        default=0,
        ge=0,
        description="steps between exchanges of islands: run.replicas, or all ranks; 0 to sum gradients in each step",
    )
    outer_bits: Literal[32, 8, 4] = Field(default=32, description="bits per element in exchanges of run.outer")
    mailbox: str = Field(
        default="",
        description="host:port of `zeroshard outer --serve`: with run.outer, this launch is one of several islands",
    )
    secret_file: str = Field(default="", description="file with the secret of run.mailbox")
    island: str = Field(default="", description="with run.mailbox, number of this island of all, such as 1/2")
    staleness: Annotated[int, Field(ge=0)] | Literal["none"] = Field(
        default=0, description="exchanges that an island of run.mailbox may lead; none never waits"
    )
    tensor: int = Field(
        default=1, ge=1, description="ranks that split each layer (tensor parallelism) and read the same batches"
    )
    pipe: int = Field(default=1, ge=1, description="places of a pipeline, over which the model is divided by layers")
    schedule: Literal["1f1b", "gpipe", "interleaved", "naive"] = Field(
        default="1f1b", description="order of the micro-batches of run.pipe"
    )
    micro_batches: int = Field(default=0, ge=0, description="per step, with run.pipe; 0 for twice as many as places")
    seed: int = Field(default=1, ge=0, description="seed of parameters, data order and sample")
    profile_steps: int = Field(default=0, ge=0, description="steps to profile, after the first two; 0 for none")
    log_to: str = Field(
        default="", description="also log to tensorboard, wandb or mlflow, or several of these, joined by +"
    )
    log_every: int = Field(default=50, ge=1, description="steps between lines without a terminal")
    prompt: str = Field(default="The ", min_length=1, description="prompt of the sample")
    sample_bytes: int = Field(default=400, ge=0, description="bytes of the sample; 0 for none")
    temperature: float = Field(default=0.7, ge=0, description="temperature of the sample; lower is likelier text")

    @property
    def has_islands(self) -> bool:
        """Whether the ranks of this launch are several islands."""
        return bool(self.outer) and not self.mailbox

    @property
    def place(self) -> tuple[int, int]:
        """The number of this launch among islands, from 0, and how many there are: (0, 1) without a mailbox."""
        number, _, islands = (self.island or "1/1").partition("/")
        return int(number) - 1, int(islands)
