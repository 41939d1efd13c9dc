"""What trainers of other libraries share: methods that run the model, and the folder of zeroshard in their checkpoints.

Owns the name of the folder, and the order in which ranks remove what a killed job left, meet, and save.
"""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import zeroshard as zs

__all__ = ["FOLDER", "newest_in", "options_with", "save_in"]

FOLDER: Final = "zeroshard"
"""The folder of zeroshard in the folder of a trainer's checkpoint."""


def options_with(asked: Mapping[str, Any], *methods: str) -> dict[str, Any]:
    """Return arguments of `zs.shard` whose settings name more methods that run the model."""
    settings = asked.get("settings", zs.Settings())
    names = tuple(dict.fromkeys((*settings.forward_methods, *methods)))
    return {**asked, "settings": dataclasses.replace(settings, forward_methods=names)}


def save_in(zero: zs.Zero, folder: Path, step: int, extra: Mapping[str, Any] | None = None) -> None:
    """Write a trainer's checkpoint in parts, in the place of what a killed job left.

    Collective: as `zero.save`, after a barrier; every rank must call.
    """
    if zero.mesh.rank == 0 and (folder / FOLDER).exists():
        shutil.rmtree(folder / FOLDER)
    zero.agree(True, "the folder of the checkpoint")
    zero.save(folder / FOLDER / f"step-{step}", extra)


def newest_in(folder: Path) -> Path | None:
    """Return the part of a trainer's checkpoint that `save_in` wrote; None without one."""
    return zs.latest(folder / FOLDER)
