"""Accelerate's `Accelerator`, with checkpoints of sharded models in parts.

Owns the moments at which an Accelerator saves, loads and gathers a sharded model. `zs.shard` lets an Accelerator take a
sharded model as it is (`accelerate_private.py`): the stock class of 1.14 and later trains it, too, and raises where it
would save or load slices.

Note: the files of `save_state`
    Accelerate's own files hold what is not sharded: schedulers, samplers, random generators, registered objects, other
    models. The folder `zeroshard` holds the model and its optimizers. It is emptied first and written last, so that a
    complete one is beside the other files of the same save.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

import zeroshard as zs
from zeroshard import accelerate_private
from zeroshard.accelerate_private import NO_SYNC
from zeroshard.core.states import Scope
from zeroshard.integrations.parts import FOLDER, newest_in, save_in, whole_on_first_rank

try:
    import accelerate
    from accelerate.utils import SAFE_WEIGHTS_NAME
except ModuleNotFoundError as error:
    raise ImportError(f"{__name__} needs {error.name!r}; install it with: pip install accelerate") from error

__all__ = ["Accelerator", "keep_as_is", "zero_of"]


def keep_as_is(model: nn.Module) -> None:
    """Let `Accelerator.prepare` return a model as it is in one process, too, where `zs.shard` sets no mark."""
    setattr(model, accelerate_private.PREPARED, True)


def zero_of(model: object) -> zs.Zero | None:
    """Return the handle of a sharded model; None for anything else."""
    zero = getattr(getattr(model, NO_SYNC, None), "__self__", None)
    return zero if isinstance(zero, zs.Zero) else None


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """The stock Accelerator, which saves, loads and gathers models that `zs.shard` has sharded.

    Shard before `prepare`: `zs.shard(model, optimizer, stage=3)`. Every rank must call the methods below, as with FSDP
    of Accelerate.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def prepare_model(self, model: Any, *args: Any, **options: Any) -> Any:
        """Return a marked model as it is, with releases before 1.14, too."""
        if not getattr(model, accelerate_private.PREPARED, False):
            return super().prepare_model(model, *args, **options)
        if not any(one is model for one in self._models):
            self._models.append(model)
        return model

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: Any) -> Iterator[None]:
        """Sum the gradients of a backward inside `no_sync()`, as of a model of DistributedDataParallel."""
        if (zero := zero_of(model)) is None:
            with accelerate.Accelerator.trigger_sync_in_backward(model):
                yield
            return
        with zero._engine.reducing_over(Scope.ALL, at_most=False):
            yield

    def get_state_dict(self, model: nn.Module, *args: Any, **options: Any) -> Any:
        """Return a model's values: of a sharded one on rank 0, in host memory, and nothing on the other ranks.

        Collective: gathers all parameters, a unit at a time; every rank must call.
        """
        if (zero := zero_of(model)) is None:
            return super().get_state_dict(model, *args, **options)
        return whole_on_first_rank(zero, model, "Accelerator.get_state_dict()")

    def save_state(self, output_dir: str | None = None, *args: Any, **options: Any) -> Any:
        """Write a checkpoint of what was prepared; each rank writes its part of sharded models and their optimizers.

        Collective: as `zero.save`; every rank must call.
        """
        folders = list[Path]()
        with self._set_apart("Accelerator.save_state()") as zeros:
            hook = self.register_save_state_pre_hook(partial(_begin, zeros, folders))
            try:
                written = super().save_state(output_dir, *args, **options)
            finally:
                hook.remove()
        for zero, folder in zip(zeros, folders, strict=True):
            save_in(zero, folder)
        return written

    def load_state(self, input_dir: str | None = None, *args: Any, **options: Any) -> None:
        """Load a checkpoint that this class wrote on any number of ranks, or one of a stock Accelerator.

        Collective: as `zero.load`; every rank must call, and has whole values in memory for a stock checkpoint.

        Raises:
            ValueError: the checkpoint was not completed, or has no sharded model.
        """
        folder = None if input_dir is None else Path(input_dir).expanduser()
        if folder is not None and not (folder / FOLDER).exists():
            with self._whole(folder):
                super().load_state(input_dir, *args, **options)
            return
        with self._set_apart("Accelerator.load_state()") as zeros:
            hook = self.register_load_state_pre_hook(partial(_load, zeros))
            try:
                super().load_state(input_dir, *args, **options)
            finally:
                hook.remove()

    @contextmanager
    def _set_apart(self, what: str) -> Iterator[list[zs.Zero]]:
        """Hide sharded models and their optimizers from Accelerate, and yield their handles.

        Collective: `zero.agree` for each, which names the ranks that do not call.
        """
        models, optimizers = self._models, self._optimizers
        zeros = [zero for one in models if (zero := zero_of(one)) is not None]
        for zero in zeros:
            zero.agree(True, what)
        sharded = [optimizer for zero in zeros for optimizer in zero.optimizers]
        self._models = [one for one in models if zero_of(one) is None]
        self._optimizers = [one for one in optimizers if not any(one.optimizer is other for other in sharded)]
        try:
            yield zeros
        finally:
            self._models, self._optimizers = models, optimizers

    @contextmanager
    def _whole(self, folder: Path) -> Iterator[None]:
        """Make sharded models and their states whole, under the names that a stock checkpoint has."""
        models, file = self._models, folder / SAFE_WEIGHTS_NAME
        with ExitStack() as stack:
            for zero in [zero for one in models if (zero := zero_of(one)) is not None]:
                stack.enter_context(zero.gathered(states=True, writeback=True))
            if file.exists() and _is_of_ddp(file):
                self._models = [nn.ModuleDict({"module": one}) if zero_of(one) else one for one in models]
            try:
                yield
            finally:
                self._models = models


def _begin(zeros: Sequence[zs.Zero], folders: list[Path], models: object, weights: object, folder: str) -> None:
    """Empty the folders of an earlier save. Collective: `zero.wait` and `zero.agree`."""
    for place, zero in enumerate(zeros):
        zero.wait()  # raises where zero.save() would
        folders.append(_place(folder, place))
        if zero.mesh.rank == 0:
            shutil.rmtree(folders[-1] / FOLDER, ignore_errors=True)
            (folders[-1] / FOLDER).mkdir(parents=True)
        zero.agree(True, "Accelerator.save_state(): the folder is empty")


def _load(zeros: Sequence[zs.Zero], models: object, folder: str) -> None:
    """Load what `save_in` wrote. Collective: as `zero.load`."""
    for place, zero in enumerate(zeros):
        if (path := newest_in(_place(folder, place))) is None:
            raise ValueError(
                f"{_place(folder, place) / FOLDER} has no complete checkpoint: its save did not end, or another class "
                "wrote it. Load an earlier one; for one of a stock Accelerator, pass its folder to load_state()."
            )
        zero.load(path)


def _is_of_ddp(file: Path) -> bool:
    """Tell whether the tensors of a file have the names of a model that DistributedDataParallel wraps."""
    with safe_open(file, "pt") as tensors:
        names: list[str] = tensors.keys()
    return all(name.startswith("module.") for name in names)


def _place(folder: str, place: int) -> Path:
    """Return the folder in a checkpoint for a sharded model, by its place among them."""
    return Path(folder, f"model_{place}") if place else Path(folder)
