"""The Trainer of Transformers, and trainers that are built on it, with the model sharded by `zs.shard`.

Owns the moments at which a Trainer shards, saves and loads. Saving keeps the Trainer's own files; master weights,
optimizer states and the scheduler are in a checkpoint of zeroshard beside them, in parts, so that no rank holds the
states of the others.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch

import zeroshard as zs
from zeroshard.integrations.accelerate import keep_as_is
from zeroshard.integrations.parts import (
    FOLDER,
    answering,
    load_in,
    newest_in,
    options_with,
    save_in,
    whole_on_first_rank,
)

try:
    import transformers
    from accelerate import Accelerator  # noqa: F401 - transformers.Trainer needs the library
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ModuleNotFoundError as error:
    raise ImportError(
        f'{__name__} needs {error.name!r}; install it with: pip install "zeroshard[transformers]"'
    ) from error

__all__ = ["Seq2SeqTrainer", "Trainer", "ZeroMixin", "newest", "on_meta"]

STATE: Final = "trainer_state.json"
"""The file that a Trainer writes last into a checkpoint."""
REFUSED: Final = MappingProxyType(
    {
        "auto_find_batch_size": "it would shard the model again after an error of one rank: set the batch size",
        "bf16_full_eval": "evaluation has the precision of training: write zero=dict(precision='bf16')",
        "deepspeed": "it shards, too: write zero=zs.from_deepspeed('ds.json', args=args).options in its place",
        "fp16_full_eval": "evaluation has the precision of training: write zero=dict(precision='fp16')",
        "fsdp": "it shards, too: leave it out",
        "parallelism_config": "write zero=dict(mesh=...) with a DeviceMesh",
    }
)
"""Fields of TrainingArguments that are refused, and the remedies."""
FROM: Final = "_zeroshard_folder"
"""Attribute of a model of `on_meta`: where its values are."""
DTYPES: Final = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16})
"""Dtypes of parameters, by the fields of TrainingArguments."""
KEPT: Final = ("stage", "mesh", "precision", "settings")
"""Arguments of `zs.shard` for a model that is not trained."""


class ZeroMixin(transformers.Trainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """Shards the model of a Trainer once the optimizer is made; put it before a class that derives from Trainer.

    Args:
        zero: the arguments of `zs.shard`, such as `{"stage": 3}`. `bf16=True` and `fp16=True` of TrainingArguments are
            its `precision=`, with master weights in fp32 and without autocast; a `zs.Precision` beside them has their
            dtype as `param`.

    Attribute `zero` is the handle; None until `train()` makes the optimizer. `reference` is that of `ref_model`.

    Raises:
        ValueError: an argument cannot be combined with sharding; nothing was changed.

    Collective: saving, loading and evaluation; every rank runs the same calls, as with the stock classes.
    """

    zero: zs.Zero | None = None
    reference: zs.Zero | None = None
    _whole: dict[str, torch.Tensor] | None = None

    def __init__(self, *args: Any, zero: Mapping[str, Any] | None = None, **options: Any) -> None:
        if not isinstance(zero, Mapping | None):
            raise TypeError(f"zero= takes the arguments of zs.shard, such as zero={{'stage': 3}}; got {zero!r}.")
        self._asked, self._sharded = dict(zero or {}), None
        self._refuse_arguments((*args, *options.values()), options.get("optimizers"))
        super().__init__(*args, **options)
        self._refuse_models()
        if (reference := getattr(self, "ref_model", None)) is not None:
            self._shard_reference(reference)

    # -- before training ----------------------------------------------------------------------------------------------

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        asked: dict[str, Any] = super()._build_accelerator_args(**options)
        precision = asked["mixed_precision"]
        if precision not in (None, "no") and not _is_of(self._asked.setdefault("precision", precision), precision):
            raise ValueError(
                f"TrainingArguments({precision}=True) beside zero=dict(precision={self._asked['precision']!r}): write "
                f"one dtype in both, as zs.Precision(param={DTYPES[precision]}"
                f"{', loss_scale=...' * (precision == 'fp16')}), or leave one of them out."
            )
        return asked | {"mixed_precision": "no"}

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        if not any(one.is_meta for one in model.parameters()):
            super()._move_model_to_device(model, device)

    def _refuse_arguments(self, given: Sequence[object], optimizers: Any) -> None:
        """Raise if an argument cannot be combined with sharding."""
        name = type(self).__name__
        for arguments in (one for one in given if isinstance(one, transformers.TrainingArguments)):
            for field, remedy in REFUSED.items():
                if getattr(arguments, field, None):
                    raise ValueError(f"{name}(zero=) with TrainingArguments({field}=...): {remedy}.")
            if arguments.n_gpu > 1:
                raise ValueError(f"{name}(zero=) in one process with {arguments.n_gpu} GPUs: start it with torchrun.")
        if optimizers is not None and optimizers[0] is not None:
            raise ValueError(
                f"{name}(zero=) with optimizers=: the model may change until training begins, so the optimizer is made "
                "then. Name it with TrainingArguments(optim=) or optimizer_cls_and_kwargs=, or override "
                "create_optimizer()."
            )

    def _refuse_models(self) -> None:
        """Raise if a model was placed on devices by Transformers."""
        ways = {"hf_device_map": "device_map=", "is_distributed_loading_by_transformers": "distributed_config="}
        for attribute, argument in ways.items():
            if any(getattr(one, attribute, None) for one in (self.model, getattr(self, "ref_model", None))):
                raise ValueError(
                    f"{type(self).__name__}(zero=): the model was loaded with {argument}; load it without."
                )

    def _wrap_model(self, model: torch.nn.Module, training: bool = True, *rest: Any) -> torch.nn.Module:
        """Shard the model where the stock class wraps it: its optimizer is made, by any `create_optimizer()`."""
        if training:
            self._shard()
        wrapped: torch.nn.Module = super()._wrap_model(model, training, *rest)
        return wrapped

    def _shard(self) -> None:
        """Shard the model and its optimizer over all ranks. Collective: as `zs.shard`."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it in the first `train()`
        if self.zero is None or self._sharded is not self.model:
            if isinstance(optimizer, transformers.Adafactor):  # its norms cover the whole tensor, as torch's
                zs.optim.whole_matrix(optimizer)
            self._sharded = self.model  # `model_init` makes another one for each `train()`
            self.zero = zs.shard(self.model, optimizer, **self._options())
            keep_as_is(self.model)
            if self.args.torch_compile:  # Accelerate compiles only what it prepares
                self.model.compile(backend=self.args.torch_compile_backend, mode=self.args.torch_compile_mode)
        elif not any(one is optimizer for one in self.zero.optimizers):
            raise ValueError(
                f"{type(self).__name__}.train(): this model is sharded with an earlier optimizer, and "
                "create_optimizer() made another one. Have it return self.optimizer unless that is None, or make "
                "another trainer."
            )

    def _options(self) -> dict[str, Any]:
        """Return the arguments of `zs.shard`: values of `on_meta` come from its folder, and ranks may generate texts of
        different lengths.
        """
        folder = getattr(self.model, FROM, None)
        asked = self._asked if folder is None else {"weights": folder} | self._asked
        return options_with(asked, *["generate"] * hasattr(self.model, "generate"))

    def _shard_reference(self, model: torch.nn.Module) -> None:
        """Shard a model that is only evaluated, such as the reference of DPO. Collective: as `zs.shard`."""
        kept = {name: value for name, value in self._options().items() if name in KEPT}
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self.reference = zs.shard(model, **kept)
        keep_as_is(model)
        for one in self.callback_handler.callbacks:
            if hasattr(one, "sync_target_model"):  # of TRL's sync_ref_model=True: it mixes whole models
                one.sync_target_model = partial(self._mix, one.sync_target_model)

    def _mix(self, mix: Callable[..., None], *models: Any) -> None:
        """Change the reference towards the model. Collective: as `gathered(writeback=True)`; every rank must call."""
        assert self.zero is not None and self.reference is not None
        with self.zero.gathered(), self.reference.gathered(writeback=True):
            mix(*models)

    # -- saving -------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for `from_pretrained`, on rank 0, which has it whole in host memory.

        Collective: gathers all parameters, a unit at a time; every rank must call.
        """
        if self.zero is not None:
            self._whole = whole_on_first_rank(self.zero, self.model, "Trainer.save_model()")
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._whole = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with nullcontext() if self._whole is None else answering(self.model, self._whole):
            super()._save(output_dir, self._whole if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.zero is not None
        save_in(self.zero, Path(output_dir), self.state.global_step, {"scheduler": self.lr_scheduler.state_dict()})

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        assert self.zero is not None
        self.zero.agree(True, "the files of all ranks")  # before rank 0 writes the last file

    # -- loading ------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train as the stock class; `resume_from_checkpoint=True` takes the newest complete checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(newest(Path(str(self.args.output_dir))))
        return super().train(resume_from_checkpoint, *args, **options)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if Path(resume_from_checkpoint, FOLDER).exists():
            return  # `_load_optimizer_and_scheduler` loads the model, too
        if self.zero is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        with self.zero.gathered(writeback=True):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.zero is not None
        if (path := newest_in(Path(checkpoint))) is None:
            raise ValueError(
                f"{checkpoint} has no folder '{FOLDER}': a stock Trainer wrote it, or save_only_model=True. Start from "
                "its weights with from_pretrained(), without resume_from_checkpoint."
            )
        self.lr_scheduler.load_state_dict(load_in(self.zero, path)["scheduler"])

    def _load_best_model(self) -> None:
        if self.zero is None:
            super()._load_best_model()
        elif (path := newest_in(Path(str(self.state.best_model_checkpoint)))) is not None:
            self.zero.load(path, model_only=True)
        else:  # save_only_model=True
            with self.zero.gathered(writeback=True):
                super()._load_best_model()


def _is_of(asked: Any, precision: str) -> bool:
    """Tell whether a precision of `zs.shard` is that of arguments, "bf16" or "fp16", which has a loss scale."""
    if not isinstance(asked, zs.Precision):
        return bool(asked == precision)
    return asked.param is DTYPES[precision] and (precision == "bf16" or asked.loss_scale is not None)


def newest(folder: Path) -> Path:
    """Return the newest checkpoint of a Trainer that is complete.

    Raises:
        ValueError: there is none.
    """
    found = [one for one in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if one.name.rpartition("-")[2].isdecimal()]
    for path in sorted(found, key=lambda one: -int(one.name.rpartition("-")[2])):
        try:
            json.loads((path / STATE).read_text())
        except (OSError, ValueError):
            continue
        return path
    raise ValueError(f"{folder} has no complete checkpoint; train without resume_from_checkpoint to start.")


class Trainer(ZeroMixin, transformers.Trainer):  # type: ignore[misc]
    """The stock Trainer, sharded: `Trainer(model, args, train_dataset=..., zero=dict(stage=3))`."""


class Seq2SeqTrainer(ZeroMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """The stock Seq2SeqTrainer, sharded; ranks may generate texts of different lengths."""


def on_meta(folder: str | Path, kind: Any = transformers.AutoModelForCausalLM) -> torch.nn.Module:
    """Return the model of a local folder without memory; a sharded trainer reads its values into the shards.

    Args:
        folder: with `config.json` and safetensors.
        kind: the class, such as AutoModelForCausalLM.

    Raises:
        ValueError: there is no `config.json`.
    """
    if not Path(folder, "config.json").exists():
        raise ValueError(f"on_meta({str(folder)!r}): the local folder has no config.json, or does not exist.")
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: torch.nn.Module = kind.from_config(config)
    setattr(model, FROM, Path(folder))
    return model
