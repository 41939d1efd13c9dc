"""What trainers of other libraries share: methods that run the model, and the folder of zeroshard in their checkpoints.

Owns the name of the folder, the order in which ranks remove what a killed job left, meet, and save, and that a load
leaves random generators to the trainer.
"""

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint.generators import read_generators, write_generators
from zeroshard.checkpoint.whole_model import state_on_first_rank

__all__ = [
    "FOLDER",
    "answering",
    "load_in",
    "newest_in",
    "of_step",
    "options_with",
    "remove_others",
    "save_in",
    "whole_on_first_rank",
]

FOLDER: Final = "zeroshard"
"""The folder of zeroshard in the folder of a trainer's checkpoint."""


def options_with(asked: Mapping[str, Any], *methods: str) -> dict[str, Any]:
    """Return arguments of `zs.shard` whose settings name more methods that run the model."""
    settings = asked.get("settings", zs.Settings())
    names = tuple(dict.fromkeys((*settings.forward_methods, *methods)))
    return {**asked, "settings": dataclasses.replace(settings, forward_methods=names)}


def save_in(zero: zs.Zero, folder: Path, step: int | None = None, extra: Mapping[str, Any] | None = None) -> None:
    """Write a trainer's checkpoint in parts, in the place of what a killed job left; other steps stay.

    Args:
        step: the trainer's count of steps; by default the optimizer's, and the name has none.

    Collective: as `zero.save`, after a barrier; every rank must call.
    """
    path = _part(folder, step)
    if zero.mesh.rank == 0 and path.exists():
        shutil.rmtree(path)
    zero.agree(True, "the folder of the checkpoint")
    zero.save(path, extra)


def load_in(zero: zs.Zero, path: Path, *, model_only: bool = False) -> dict[str, Any]:
    """Load a checkpoint, and return its `extra`; random generators stay as they are, as with stock classes.

    Samplers may draw the order of an epoch from generators that must have one state on all ranks until then. A trainer
    that saves generators restores those of each rank afterwards.

    Collective: as `zero.load`; every rank must call.
    """
    generators = read_generators(zero.mesh.device)
    loaded = zero.load(path, model_only=model_only)
    write_generators(generators, zero.mesh.device)
    return dict(loaded.extra)


def remove_others(folder: Path, step: int) -> None:
    """Remove the steps but one that a folder has, when the trainer's own file is that of this step."""
    for path in (folder / FOLDER).glob("step-*"):
        if path != _part(folder, step):
            shutil.rmtree(path)


def of_step(folder: Path, step: int) -> Path | None:
    """Return the part of this step; without it, as `newest_in`."""
    path = _part(folder, step)
    return path if path.exists() else newest_in(folder)


def _part(folder: Path, step: int | None) -> Path:
    return folder / FOLDER / ("state" if step is None else f"step-{step}")


def newest_in(folder: Path) -> Path | None:
    """Return the part of a trainer's checkpoint that `save_in` wrote; None without one."""
    return zs.latest(folder / FOLDER)


def whole_on_first_rank(zero: zs.Zero, model: nn.Module, what: str) -> dict[str, torch.Tensor]:
    """Return the model's state dict, with master weights, in host memory of rank 0, and {} on other ranks.

    Args:
        what: the caller, for messages.

    Collective: gathers all parameters, a unit at a time; with an axis "tensor", all at once. Every rank must call.
    """
    if len(zero.mesh.tensor_ranks) == 1:
        return state_on_first_rank(zero._engine, model, what)
    with zero.gathered(whole=True):
        return _copied(model.state_dict()) if zero.mesh.rank == 0 else {}


@contextmanager
def answering(model: nn.Module, whole: Mapping[str, Any]) -> Iterator[None]:
    """Have modules of a model answer `state_dict()` from the model's whole values, which PEFT asks for names."""

    def part(start: str, *args: Any, prefix: str = "", **options: Any) -> dict[str, Any]:
        return {prefix + key.removeprefix(start): value for key, value in whole.items() if key.startswith(start)}

    modules = {name: vars(module) for name, module in model.named_modules() if name}
    for name, attributes in modules.items():
        attributes["state_dict"] = partial(part, f"{name}.")
    try:
        yield
    finally:
        for attributes in modules.values():
            del attributes["state_dict"]


def _copied(state: Any) -> Any:
    """Return a state with tensors of its own in host memory; those that share memory share it again."""
    copies = dict[Any, Any]()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            key = (value.data_ptr(), value.shape, value.stride()) if value.numel() else name
            if key not in copies:
                copies[key] = value.detach().to("cpu", copy=True)
            state[name] = copies[key]
    return state
