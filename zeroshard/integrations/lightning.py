"""Strategies for Lightning's Fabric and Trainer that shard the model by `zs.shard`.

Owns the moments at which they shard, accumulate, save and load. A checkpoint is a folder, of which each rank writes its
part; the Trainer's own values are in a file of Lightning's beside it.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard as zs
from zeroshard.describe.blocks import members
from zeroshard.integrations.parts import FOLDER, load_in, of_step, options_with, remove_others, save_in

try:
    from lightning.fabric.strategies import DDPStrategy as FabricDDP
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.pytorch import callbacks
    from lightning.pytorch.plugins import AsyncCheckpointIO
    from lightning.pytorch.strategies import DDPStrategy
except ModuleNotFoundError as error:
    raise ImportError(
        f'{__name__} needs {error.name!r}; install it with: pip install "zeroshard[lightning]"'
    ) from error

__all__ = ["FabricStrategy", "ZeroStrategy"]

VALUES: Final = "lightning.ckpt"
"""The file of the Trainer's own values in the folder of a checkpoint."""
EVALUATIONS: Final = ("validation_step", "test_step", "predict_step")
"""Methods of a LightningModule that run the model, besides those of `_training_methods`."""


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse options that torch's DDP does not have either, whose own say nothing of a sharded model."""
    for first in [one for one in options if one not in signature(DistributedDataParallel).parameters]:
        raise TypeError(
            f"{name}({first}=): Lightning's DDPStrategy has no such option. Options of zs.shard() belong in the first "
            f"argument: {name}({{'{first}': {options[first]!r}}})."
        )


def _check_precision(name: str, precision: Any) -> None:
    """Raise if Lightning would cast what `precision=` of `zs.shard` casts."""
    asked = getattr(precision, "precision", "32-true")
    if asked not in ("32-true", "32"):
        raise ValueError(
            f"{name} with precision={asked!r}: leave Lightning's precision out, and write "
            f"{name}({{'precision': 'bf16'}}), which keeps master weights in fp32."
        )


# -- Fabric -----------------------------------------------------------------------------------------------------------


class _SyncControl(_BackwardSyncControl):  # type: ignore[misc]
    """Delays reductions in `fabric.no_backward_sync(model)`."""

    def __init__(self, zeros: Mapping[nn.Module, zs.Zero]) -> None:
        self._zeros = zeros

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return the context of a backward that reduces nothing."""
        return self._zeros[module].no_sync() if enabled else nullcontext()


class FabricStrategy(FabricDDP):  # type: ignore[misc]
    """A strategy of Fabric: `fabric.setup(model, optimizer)` shards both, in place.

    Args:
        zero: the arguments of `zs.shard`, such as `{"stage": 3}`.
        options: those of Fabric's DDPStrategy for the process group.

    `fabric.save(path, state)` writes a folder, in parts, and takes one sharded model, its optimizers, and values as in
    `zero.save(extra=)`; `fabric.load(path, state)` reads such a folder on any number of ranks.

    Raises:
        ValueError: Fabric has a precision, or a state has no sharded model, or several.
    """

    def __init__(self, zero: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        _check_options(type(self).__name__, self._ddp_kwargs)
        self._asked, self._zeros = dict(zero or {}), dict[nn.Module, zs.Zero]()
        self._backward_sync_control = _SyncControl(self._zeros)

    def zero_of(self, module: nn.Module) -> zs.Zero:
        """Return the handle of a model that `fabric.setup` returned."""
        return self._zeros[getattr(module, "module", module)]

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Any], *scheduler: Any) -> Any:
        """Shard a model and its optimizers. Collective: as `zs.shard`.

        Args:
            scheduler: as in the installed release; Lightning 2.5 has no such argument.
        """
        self._shard(module, optimizers)
        return module, optimizers, *scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a model without an optimizer. Collective: as `zs.shard`."""
        self._shard(module, None)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Shard an optimizer of a model that was set up, which has its parameters. Collective: as `zero.attach`."""
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        models = [model for model in self._zeros if any(id(one) in held for one in model.parameters())]
        if len(models) != 1:
            raise ValueError(
                f"FabricStrategy: {type(optimizer).__name__} has parameters of {len(models)} of {len(self._zeros)} "
                "models that were set up; it takes those of one. Set up the model before its optimizer, or both in one "
                "fabric.setup(), and make an optimizer for each model."
            )
        self._zeros[models[0]].attach(optimizer)
        return optimizer

    def _shard(self, module: nn.Module, optimizers: list[Any] | None) -> None:
        _check_precision(type(self).__name__, self.precision)
        self._zeros[module] = zs.shard(module, optimizers, **self._asked)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write a checkpoint of one model. Collective: as `zero.save`; every rank must call."""
        if storage_options is not None or filter is not None:
            raise ValueError("fabric.save() of a sharded model takes no filter= and no storage_options=.")
        values = {name: one for name, one in state.items() if not isinstance(one, nn.Module | torch.optim.Optimizer)}
        values = {name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in values.items()}
        self._zero_in(state).save(path, values)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: Any = None
    ) -> dict[str, Any]:
        """Load a checkpoint into a model, its optimizers and the values of a state. Collective: as `zero.load`.

        Without an optimizer in the state, those of the model stay as they are.
        """
        state = {"model": state} if isinstance(state, nn.Module) else state or {}
        has_optimizers = any(isinstance(one, torch.optim.Optimizer) for one in state.values())
        found = load_in(self._zero_in(state), path, model_only=not has_optimizers)
        own = {name for name, one in state.items() if not isinstance(one, nn.Module | torch.optim.Optimizer)}
        if strict and (missing := own - found.keys()):
            raise KeyError(f"{path} has no {sorted(missing)}; it has {sorted(found)}. Pass strict=False to go on.")
        for name in own & found.keys():
            if hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(found.pop(name))
            else:
                state[name] = found.pop(name)
        return found

    def _zero_in(self, state: Mapping[str, Any]) -> zs.Zero:
        """Return the handle of the model of a state."""
        models = [one for one in state.values() if isinstance(one, nn.Module) and one in self._zeros]
        if len(models) != 1:
            raise ValueError(
                f"A state with {len(models)} sharded models: fabric.save() and load() take one, with its optimizers. "
                "Write one folder for each model."
            )
        return self._zeros[models[0]]


# -- the Trainer ------------------------------------------------------------------------------------------------------


def _check_callbacks(trainer: Any) -> None:
    """Raise if a callback of a training looks for whole parameters, in an optimizer's entries or in a checkpoint."""
    for one in trainer.callbacks if trainer.state.fn == "fit" else ():
        if isinstance(one, getattr(callbacks, "WeightAveraging", ())):  # not in Lightning 2.5
            raise ValueError(
                f"ZeroStrategy with the callback {type(one).__name__}: Lightning's WeightAveraging saves its average "
                "as the parameters of a checkpoint, which are in parts here. Leave the callback out, and write "
                "average = trainer.strategy.zero.ema(0.999) in on_train_start(), average.update() in "
                "on_train_batch_end(). Evaluate in `with average.swapped():`, and save there what must last, by "
                "zero.save(path, model_only=True): a checkpoint does not have the average."
            )
        if isinstance(one, callbacks.BaseFinetuning):
            raise ValueError(
                f"ZeroStrategy with the callback {type(one).__name__}: Lightning's BaseFinetuning looks for parameters "
                "of the model in its optimizers, which hold slices. Leave the callback out, return an optimizer of all "
                "parameters from configure_optimizers(), a group for each learning rate, and freeze and thaw modules "
                "in on_train_epoch_start(): self.backbone.requires_grad_(self.current_epoch >= 10)."
            )


def _training_methods(model: Any) -> tuple[str, ...]:
    """Return the methods that run the model in training: a `training_step` with a backward of its own calls modules."""
    if model.automatic_optimization:
        return ("training_step",)
    children = [members(child, f"{name}.") for name, child in model.named_children()]
    called = [name for one in children for part, name in one.items() if any(True for _ in part.parameters())]
    return tuple(f"{name}.forward" for name in called)


class _InParts(MutableMapping[str, Any]):
    """The parameters in what hooks see of a checkpoint: an error, because they are saved and loaded in parts."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            "checkpoint['state_dict'] in on_save_checkpoint() or on_load_checkpoint(): ZeroStrategy saves and loads "
            "parameters in parts, so a hook cannot read, change or replace them there, on any rank. Read them in "
            "`with self.trainer.strategy.zero.gathered():`, and save what you make of them under a key of your own; "
            "change them after the load, as in on_train_start(), in "
            "`with self.trainer.strategy.zero.gathered(writeback=True):`."
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __reduce__ = copy = _refuse


class ZeroStrategy(DDPStrategy):  # type: ignore[misc]
    """A strategy of Lightning's Trainer: `Trainer(strategy=ZeroStrategy({"stage": 3}))`.

    Args:
        zero: the arguments of `zs.shard`.
        options: those of Lightning's DDPStrategy for the process group.

    `strategy.zero` is the handle, from the start of `fit()`, `validate()` or `test()`. Checkpoints are folders. The
    model stays sharded afterwards, and a second `fit()` has new optimizers. `strategy.zero.detach()` makes model and
    optimizers plain.

    Raises:
        ValueError: the Trainer has a precision, or a callback for fine-tuning or averages.
        RuntimeError: a hook reads or changes `checkpoint["state_dict"]` of a sharded model.
    """

    def __init__(self, zero: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        _check_options(type(self).__name__, self._ddp_kwargs)
        self._asked, self._loaded = dict(zero or {}), Path()
        self._made = dict[nn.Module, tuple[zs.Zero, list[Any], list[Any]]]()  # handle, optimizers and schedulers
        self.zero: zs.Zero | None = None

    def configure_ddp(self) -> None:
        """Wrap nothing: the model is sharded with its optimizers."""

    def setup(self, trainer: Any) -> None:
        """Shard the model, and new optimizers at the start of each `fit()`. Collective: as `zs.shard`."""
        _check_precision(type(self).__name__, self.precision_plugin)
        _check_callbacks(trainer)
        model = self.lightning_module
        made: tuple[zs.Zero | None, list[Any], list[Any]] = self._made.get(model, (None, [], []))
        self.zero, self.optimizers, self.lr_scheduler_configs = made
        if self.zero is None:
            super().setup(trainer)
            self.zero = zs.shard(
                model, self.optimizers or None, **options_with(self._asked, *EVALUATIONS, *_training_methods(model))
            )
        else:
            self.accelerator.setup(trainer)  # the model is where it was
            if trainer.state.fn == "fit":
                self.setup_optimizers(trainer)
                self.zero._replace(made[1], self.optimizers)
        self._made[model] = self.zero, self.optimizers, self.lr_scheduler_configs

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Delay reductions until the last micro-batch of a step."""
        assert self.zero is not None
        with self.zero.no_sync():
            yield

    def teardown(self) -> None:
        """Leave the model sharded, where it is."""
        if self.zero is None:
            super().teardown()
            return
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- files --------------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint is loaded into shards."""
        return True

    def lightning_module_state_dict(self) -> Any:
        """Return what hooks cannot read: `save_checkpoint` writes the parameters, in parts."""
        return _InParts() if self.zero is not None else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return nothing: `save_checkpoint` writes the states, in parts."""
        return {} if self.zero is not None else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint as a folder, whose earlier step is whole until the new one is.

        Collective: as `zero.save`; every rank must call.
        """
        if self.zero is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self._check_hooks(checkpoint)
        folder, step = Path(filepath), checkpoint["global_step"]
        if self.is_global_zero and folder.is_file():
            self.remove_checkpoint(folder)
        save_in(self.zero, folder, step)
        if self.is_global_zero:
            writer = self.checkpoint_io
            while isinstance(writer, AsyncCheckpointIO):  # whose file would end after the earlier step is removed
                writer = writer.checkpoint_io
            # This file says which step the checkpoint has.
            writer.save_checkpoint({**checkpoint, "state_dict": {}}, folder / VALUES, storage_options=storage_options)
            remove_others(folder, step)

    def load_checkpoint(self, checkpoint_path: Any, **options: Any) -> dict[str, Any]:
        """Read the Trainer's values of a checkpoint, with the options of the installed release."""
        self._loaded = Path(checkpoint_path)
        values = self._loaded / VALUES if self._loaded.is_dir() else self._loaded
        found: dict[str, Any] = super().load_checkpoint(values, **options)
        if self.zero is not None and of_step(self._loaded, found["global_step"]) is not None:
            found["state_dict"] = _InParts()
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load parameters, and for a training states, too. Collective: as `zero.load`; every rank must call."""
        if self.zero is not None and (path := of_step(self._loaded, checkpoint["global_step"])) is not None:
            self._check_hooks(checkpoint)
            load_in(self.zero, path, model_only=self.lightning_module.trainer.state.fn != "fit")
        elif self.zero is not None:
            with self.zero.gathered(writeback=True):
                super().load_model_state_dict(checkpoint, strict)
        else:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load states of a checkpoint of a stock strategy; `load_model_state_dict` loads those of a sharded one."""
        if self.zero is None:
            super().load_optimizer_state_dict(checkpoint)
        elif not (self._loaded / FOLDER).exists():
            with self.zero.gathered(states=True, writeback=True):
                super().load_optimizer_state_dict(checkpoint)

    def _check_hooks(self, checkpoint: Mapping[str, Any]) -> None:
        """Raise on every rank if a hook of one has replaced the parameters."""
        assert self.zero is not None
        if not self.zero.agree(isinstance(checkpoint.get("state_dict"), _InParts), "a checkpoint after its hooks"):
            _InParts()._refuse()
