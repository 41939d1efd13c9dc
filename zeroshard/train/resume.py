"""Saving a run and going on with it: when, what beside tensors, and whether a start may follow an earlier one.

Owns the names of a run's checkpoints and what their `extra` holds. Must not know the loop (`loop.py`) nor the format
(`zeroshard/checkpoint`). Read `resume` first, then `Saver`.

Note: exactly
    The batch of a step is a function of seed and step, so the data's position is the number of steps. Parameters,
    states, the loss scale and each rank's random generators are in the checkpoint, the rest is here. So a run that was
    cut off and gone on with has the same bits as one that was not, on the same number of ranks at the same stage; on
    others its sums have another order.
"""

import os
import re
import shutil
import time
import warnings
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, final

import torch

import zeroshard as zs
from zeroshard.train.account import describe_data
from zeroshard.train.config import Config, differences, load_config
from zeroshard.train.lease import Lease
from zeroshard.train.metrics import EvalRecord, Reporters, RunFiles
from zeroshard.train.run import Run, check_files

__all__ = ["Saver", "check_folder", "check_settings", "is_complete", "resume"]

_FILE: Final = "config.toml"
_EXTRA: Final = frozenset(["config", "data", "scheduler", "tally"])
_NAME: Final = re.compile(r"step-(\d{8,})")
_CONTENTS: Final = ("sha256", "tokenizer_sha256", "train_tokens", "heldout_tokens")


def check_folder(config: Config, *, is_fresh: bool = False) -> None:
    """Raise where a start must not write to the folder of its run, before there are ranks.

    Args:
        is_fresh: whether the run must be a new one.

    Raises:
        ValueError: another process writes there; there is a run already, and a new one is wanted; or it is a run with
            other settings.
    """
    if not config.folder.exists():
        return
    with Lease(config.folder):
        if is_fresh and (config.folder / _FILE).exists():
            raise ValueError(
                f"--fresh: {config.folder} holds a run, and nothing is overwritten; give another --name, or remove it"
            )
        check_settings(config)


def check_settings(config: Config) -> None:
    """Raise ValueError where the folder of the run holds one with other settings."""
    file = config.folder / _FILE
    if file.exists():
        _compare(load_config(file), config, file)


def is_complete(config: Config) -> bool:
    """Tell whether an earlier start has made all steps and summed them up."""
    if not (config.folder / "summary.json").exists():
        return False
    return any(one.step >= config.train.steps for one in zs.list_checkpoints(config.folder) if not one.problem)


def resume(run: Run) -> None:
    """Go on from the newest whole checkpoint in the folder of the run, where there is one.

    Raises:
        CheckpointError: there are checkpoints, and none is whole.
        ValueError: it is of a run with other settings or another text.

    Collective: an all-gather of 8 bytes, and a load; every rank must call.
    """
    step = torch.tensor(_find(run.config.folder) if run.mesh.rank == 0 else 0, device=run.mesh.device)
    first = int(zs.gather_across_ranks(step)[0])
    if first < 0:
        return
    path = _path(run.config.folder, first)
    extra = run.zero.load(path).extra
    if not extra.keys() >= _EXTRA:
        raise ValueError(f"run.name: {path} was not saved by `zeroshard train`; move it out of {run.config.folder}")
    _compare(Config.model_validate(extra["config"]), run.config, path)
    for key, value in _contents(run).items():
        if value != extra["data"][key]:
            raise ValueError(f"data.path: {path} was trained on another text or other tokens: {key} differs")
    run.scheduler.load_state_dict(extra["scheduler"])
    tally, saved = run.tally, extra["tally"]
    tally.steps, tally.train_s, tally.earlier_s = first, saved["train_s"], saved["wall_s"]
    tally.losses = deque(saved["losses"], tally.losses.maxlen)
    tally.resumed_at = [*saved["resumed_at"], first]
    tally.last_eval = EvalRecord(**saved["last_eval"]) if saved["last_eval"] else None


def _find(folder: Path) -> int:
    """Return the step of the newest whole checkpoint, -1 where there is none, and clear away what is not whole.

    What a killed save has left, or what was damaged after it, would stand in the way of the next save of its name. The
    lease is what makes it safe to touch.
    """
    for unfinished in folder.glob(".tmp-*"):
        shutil.rmtree(unfinished) if unfinished.is_dir() and not unfinished.is_symlink() else unfinished.unlink()
    newest = zs.latest(folder)
    if newest is None:
        return -1
    found = _NAME.fullmatch(newest.name)
    if found is None:
        raise ValueError(f"run.name: {newest} is no checkpoint of a run; move it out of {folder}")
    for damaged in folder.glob("step-*"):
        if (name := _NAME.fullmatch(damaged.name)) and int(name[1]) > int(found[1]):
            aside = damaged.with_name(f".damaged-{damaged.name}-{time.time_ns()}")
            os.rename(damaged, aside)
            warnings.warn(zs.printable(f"{damaged} is damaged; it is {aside} now"), stacklevel=2)
    return int(found[1])


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _compare(before: Config, now: Config, where: Path) -> None:
    """Raise where the settings are of another training than those in `where`."""
    if found := differences(before, now):
        listed = "\n".join(f"  {one}" for one in found)
        raise ValueError(
            f"run.name: {where} is of a run with other settings:\n{listed}\nGive these as they were to go on with it, "
            "or another --name to start anew"
        )


def _contents(run: Run) -> dict[str, str | int]:
    described = describe_data(run)
    return {key: described[key] for key in _CONTENTS}


@final
class Saver:
    """Saves a run when it is due, and at most once after each step.

    Args:
        run: which to save.
        tell: told before and after.
        files: those of the run, on rank 0.
    """

    def __init__(self, run: Run, tell: Reporters, files: RunFiles | None) -> None:
        self._run, self._tell, self._files = run, tell, files
        self._last_step, self._last_s = run.tally.steps, time.monotonic()

    def is_due(self, step: int) -> bool:
        """Tell whether this rank's clock, or the number of steps, calls for a checkpoint after `step` steps.

        Files that cannot be written do, too, since all ranks hear of these before they save.
        """
        wanted = self._run.config.checkpoint
        is_late = bool(wanted.every_s) and time.monotonic() - self._last_s >= wanted.every_s
        is_lost = self._files is not None and bool(self._files.problem)
        return is_late or is_lost or (bool(wanted.every_steps) and step % wanted.every_steps == 0)

    def save(self) -> None:
        """Save the run as it is now.

        Raises:
            RuntimeError: on every rank, where the files of the run cannot be written: a checkpoint without the lines
                before it would be gone on from without them.

        Collective: a mean of one number, all-gathers of some bytes, and a save; every rank must call.
        """
        run, step = self._run, self._run.tally.steps
        if step == self._last_step:
            return
        self._tell.saving(step)
        check_files(run, self._files)
        path = run.zero.save(_path(run.config.folder, step), _extra(run), step=step, keep=run.config.checkpoint.keep)
        self._last_step, self._last_s = step, time.monotonic()
        self._tell.saved(step, path)


def _extra(run: Run) -> dict[str, Any]:
    """Return what a checkpoint holds beside tensors, equal on all ranks. Collective: a mean of one number."""
    tally = run.tally
    wall_s = torch.tensor(tally.earlier_s + time.perf_counter() - run.start_s, dtype=torch.float64)
    return {
        "config": run.config.model_dump(),
        "data": _contents(run),
        "scheduler": run.scheduler.state_dict(),
        "tally": {
            "train_s": tally.train_s,
            "wall_s": float(zs.mean_across_ranks(wall_s.to(run.mesh.device))),
            "losses": list(tally.losses),
            "resumed_at": tally.resumed_at,
            "last_eval": asdict(tally.last_eval) if tally.last_eval else None,
        },
    }
