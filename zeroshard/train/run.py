"""The objects of one run on one rank, and the counters of its steps.

Owns their construction, in the order of the README: model, optimizer, `zs.shard`, scheduler. It must not know the loop
(`loop.py`). Read `Run` first.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, final

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroshard as zs
from zeroshard.join.start import texts_across_ranks
from zeroshard.table.errors import printable
from zeroshard.train.config import Config
from zeroshard.train.corpus import Corpus, open_corpus, prepare_corpus
from zeroshard.train.metrics import EvalRecord, RunFiles
from zeroshard.train.models.gpt import GPT
from zeroshard.train.models.hf import check_causal, check_folder, check_hf, load_hf
from zeroshard.train.models.language import LanguageModel, make_gpt
from zeroshard.train.models.piped import mean_loss, piped
from zeroshard.train.models.shape import check_gpt
from zeroshard.train.models.split_hf import plan_of
from zeroshard.train.optimizers import make_optimizer
from zeroshard.train.speed import flops_per_token, peak_flops
from zeroshard.train.text import DEFAULT_NAME, open_source
from zeroshard.train.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Run",
    "Tally",
    "check_equal",
    "check_files",
    "check_paths",
    "learning_rate_factor",
    "make_model",
    "outer_of",
    "prepare",
]

_FINAL_STEPS: Final = 50


def prepare(config: Config) -> tuple[Tokenizer, Corpus]:
    """Check the inputs of a run, and tokenize its text, before ranks start: they would have to wait.

    Returns:
        The tokenizer of the run, and its text.

    Raises:
        ValueError: the text, the tokenizer or the model is missing or unsuitable.
        ImportError: an extra is missing.
    """
    check_paths(config)
    tokenizer = load_tokenizer(config.tokenizer)
    if config.hf_folder:
        check_hf(config.hf_folder, context=config.model.context, vocabulary=tokenizer.vocabulary)
    if config.run.tensor > 1:
        module = make_model(config, tokenizer).module
        check_gpt(module.config, config.run.tensor) if isinstance(module, GPT) else plan_of(module, config.run.tensor)
    return tokenizer, _open(config, _prepare_corpus(config, tokenizer))


def check_paths(config: Config) -> None:
    """Raise ValueError if the model's folder, the tokenizer or the text does not exist, or a secret cannot be read."""
    if config.hf_folder:
        check_folder(config.hf_folder)
    if config.data.tokenizer and not Path(config.data.tokenizer).exists():
        load_tokenizer(config.data.tokenizer)
    open_source(config.data.path, config.data.column)
    if outer := outer_of(config):
        try:
            outer.check()
        except ValueError as error:
            raise ValueError(f"run.mailbox: {error}") from None
        if config.run.mailbox and not Path(config.run.secret_file).is_file():
            raise ValueError(f"run.secret_file: there is no file {config.run.secret_file!r}")


def check_equal(config: Config, mesh: zs.Mesh) -> None:
    """Raise RankMismatchError on every rank if settings differ between ranks. Collective: all-gathers."""
    mine = [
        f"{section}.{key}={value!r}" for section, values in config.model_dump().items() for key, value in values.items()
    ]
    texts = [text.splitlines() for text in texts_across_ranks(mesh, "\n".join(mine))]
    for lines in zip_longest(*texts, fillvalue="(nothing)"):
        if len(set(lines)) > 1:
            shown = "\n".join(f"  rank {rank}: {line}" for rank, line in enumerate(lines))
            raise zs.RankMismatchError(f"{mesh} Ranks were given different settings; the first difference is:\n{shown}")


def check_files(run: "Run", files: RunFiles | None) -> None:
    """Raise RuntimeError on every rank if the files of the run cannot be written.

    Args:
        files: the files of the run, on rank 0.

    Collective: all-gathers of some bytes; every rank must call.
    """
    problem = texts_across_ranks(run.mesh, printable(files.problem) if files else "")[0]
    if problem:
        raise RuntimeError(
            f"{run.mesh} {run.config.folder}: the files of the run cannot be written: {problem}. Do not change the "
            "folder while a run writes to it; the same command resumes from the newest checkpoint."
        )


@final
class Run:
    """One run on one rank: the objects of the loop, and the counters.

    `reader` counts the parts of a batch, of which there are `readers`: ranks along the axes "tensor" and "pipe" read
    the same one. `pipe` is the handle of a pipeline, or None.
    """

    def __init__(self, config: Config, mesh: zs.Mesh, start_s: float) -> None:
        self.changes: tuple[str, ...] = ()
        self.config, self.mesh, self.start_s = config, mesh, start_s
        self.tokenizer = load_tokenizer(config.tokenizer)
        self.corpus = _share_corpus(config, self.tokenizer, mesh)
        self.axes = _lay_out(config, mesh)
        self.language = make_model(config, self.tokenizer, self.axes)
        self.model = self.language.module
        self.parameters_numel = sum(p.numel() for p in self.model.parameters())
        self.flops, self.peak_flops = flops_per_token(config, self.model), peak_flops(config, mesh.device)
        self.optimizer = make_optimizer(config.train, self.language)
        options = _row(config) | {
            "offload": config.zero.offload or None,
            "precision": config.train.precision,
            "weights": self.language.weights,
            "settings": zs.Settings(watchdog_s=config.zero.watchdog_s),
        }
        self.pipe: zs.Pipeline | None = None
        if config.run.pipe > 1:
            assert self.axes is not None, "it has the axis"
            self.pipe = zs.pipeline(
                self.model,
                self.optimizer,
                mesh=self.axes,
                micro_batches=config.run.micro_batches,
                schedule=config.run.schedule,
                loss=mean_loss,
                **options,
            )
            self.zero, self.language = self.pipe.zero, piped(self.language, self.pipe)
        else:
            outer = outer_of(config)
            name = "replicas" if outer is None else "mesh"
            copies = {name: config.run.replicas} if config.run.replicas > 1 else {"mesh": self.axes}
            self.zero = zs.shard(self.model, self.optimizer, **copies, outer=outer, **options)
        # Islands read other parts of a batch, and are not on each other's meshes.
        domain = mesh if config.run.has_islands else self.zero.mesh
        readers = domain.data_ranks
        self.reader, self.readers = readers.index(domain.rank), len(readers)
        if self.axes is not None:
            # `zs.init` has given ranks along "tensor" other seeds; places of a pipe must not drop out alike.
            place = self.axes.get_local_rank("pipe") if self.pipe is not None else 0
            torch.manual_seed(config.run.seed + self.reader + place * self.readers)
        if config.train.compile_blocks:
            _compile_blocks(self.model)
        self.profile = self.zero.profile()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor)
        self.tally = Tally()
        if config.hf_folder:
            check_causal(self.language, config.hf_folder, mesh.device, is_half=config.train.precision != "fp32")
            self.tally.follows_pass = True

    def meets(self, step: int) -> bool:
        """Return whether all ranks may wait for each other after a step: islands do so when they exchange."""
        run = self.config.run
        return not run.has_islands or step % run.outer == 0 or step == self.config.train.steps

    def factor(self, step: int) -> float:
        """Return the factor of the maximum learning rate at a step, counted from 0."""
        train = self.config.train
        return learning_rate_factor(
            step,
            steps=train.steps,
            warmup_fraction=train.warmup_fraction,
            final_fraction=train.final_fraction,
        )


def outer_of(config: Config) -> zs.Outer | None:
    """Return how the islands of a run exchange; None without islands."""
    run = config.run
    if not run.outer:
        return None
    place, islands = run.place
    alone: dict[str, Any] = {}
    if run.mailbox:
        alone = {"address": run.mailbox, "secret_file": run.secret_file, "island": str(place + 1), "islands": islands}
        alone["staleness"] = None if run.staleness == "none" else run.staleness
    return zs.Outer(every=run.outer, bits=run.outer_bits, **alone)


def _compile_blocks(model: torch.nn.Module) -> None:
    """Compile each block of a model on its first call; equal blocks share their code."""
    if isinstance(model, torch.nn.ModuleList):
        for block in model:
            block.compile()
        return
    for child in model.children():
        _compile_blocks(child)


def _row(config: Config) -> dict[str, Any]:
    """Return the arguments of `zs.shard` that place the training state."""
    if config.zero.residency:
        return {"residency": config.zero.residency}
    return {"stage": config.zero.stage, "activations": config.zero.activations}


@final
@dataclass
class Tally:
    """The counters of a run's steps on this rank. Bytes count from this start.

    Args:
        steps: number of steps done, including earlier starts.
        losses: losses of the last (up to 50) steps.
        idle: the part of each of the last (up to 50) steps of this start in which this rank waited for other places.
        train_s: seconds of training steps.
        earlier_s: seconds of earlier starts, up to the checkpoint of the resume.
        resumed_at: number of steps done at each resume.
        predicted_step_bytes: None until the first step that does not follow another pass, whose bytes would be
            included.
        follows_pass: whether another pass, such as an evaluation, ran after the last step.
    """

    steps: int = 0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_FINAL_STEPS))
    idle: deque[float] = field(default_factory=lambda: deque(maxlen=_FINAL_STEPS))
    train_s: float = 0.0
    earlier_s: float = 0.0
    resumed_at: list[int] = field(default_factory=list)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    predicted_step_bytes: Counter[str] | None = None
    follows_pass: bool = False
    memory: zs.Memory | None = None
    last_eval: EvalRecord | None = None

    @property
    def steps_of_start(self) -> int:
        """Number of steps of this start."""
        return self.steps - (self.resumed_at[-1] if self.resumed_at else 0)


def learning_rate_factor(step: int, *, steps: int, warmup_fraction: float, final_fraction: float) -> float:
    """Return the factor of the maximum learning rate at a step: a linear rise, then a cosine decay.

    Args:
        step: index of the step, from 0.
        steps: number of steps of the run.
        warmup_fraction: fraction of the steps in which the learning rate rises.
        final_fraction: factor at the end.
    """
    warmup = max(1, round(steps * warmup_fraction))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def _lay_out(config: Config, mesh: zs.Mesh) -> DeviceMesh | None:
    """Return the axes "shard" and "tensor", the second over neighbouring ranks, or "pipe" and "shard"; None without."""
    if config.run.pipe > 1:
        places = (config.run.pipe, mesh.world_size // config.run.pipe)
        return init_device_mesh(mesh.device.type, places, mesh_dim_names=("pipe", "shard"))
    if config.run.tensor == 1:
        return None
    sizes = (mesh.world_size // config.run.tensor, config.run.tensor)
    return init_device_mesh(mesh.device.type, sizes, mesh_dim_names=("shard", "tensor"))


def make_model(
    config: Config, tokenizer: Tokenizer, axes: DeviceMesh | None = None, *, reads: bool = True
) -> LanguageModel:
    """Return the model for the tokenizer's vocabulary, without values: `zs.shard` initializes it unit by unit.

    Args:
        axes: the mesh over whose axis "tensor" the model is split; None for a whole model.
        reads: as in `load_hf`.
    """
    if config.hf_folder:
        language = load_hf(
            config.hf_folder,
            context=config.model.context,
            vocabulary=tokenizer.vocabulary,
            lora=config.model.lora,
            reads=reads,
        )
    else:
        with torch.device("meta"):
            language = make_gpt(replace(config.gpt, vocabulary=tokenizer.vocabulary))
    if axes is None or "tensor" not in (axes.mesh_dim_names or ()):
        return language
    from zeroshard.train.models.split import split_language  # imports torch's DTensor, which is slow

    return split_language(language, axes["tensor"])


def _share_corpus(config: Config, tokenizer: Tokenizer, mesh: zs.Mesh) -> Corpus:
    """Build the corpus on rank 0, and open it on all ranks.

    Collective: an all-gather of 32 bytes; every rank must call.
    """
    key = _prepare_corpus(config, tokenizer) if mesh.rank == 0 else "00" * 32
    keys = zs.gather_across_ranks(torch.tensor(list(bytes.fromhex(key)), dtype=torch.uint8, device=mesh.device))
    return _open(config, bytes(keys[0].tolist()).hex())


def _prepare_corpus(config: Config, tokenizer: Tokenizer) -> str:
    return prepare_corpus(
        open_source(config.data.path, config.data.column),
        tokenizer,
        heldout_fraction=config.data.heldout_fraction,
        folder=config.cache,
    )


def _open(config: Config, key: str) -> Corpus:
    corpus = open_corpus(config.cache, key, config.data.path or DEFAULT_NAME)
    corpus.check_length(config.model.context)
    return corpus
