"""Saving and resuming a run: the time of saves, the contents besides tensors, and the checks of a resume.

Owns the names of a run's checkpoints and the contents of their `extra`. It must not know the loop (`loop.py`) or the
format (`zeroshard/checkpoint`). Read `resume` first, then `Saver`.

Note: exactly
    The batch of a step is a function of seed and step, so the number of steps is the position in the data. The
    checkpoint has parameters, states, the loss scale and each rank's random generators; `extra` has the rest.
    Therefore a resumed run equals an uninterrupted run bit for bit, on the same number of ranks at the same stage.
    Otherwise its sums have another order.
"""

import filecmp
import json
import os
import re
import shutil
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, final

import torch

import zeroshard as zs
from zeroshard.table.errors import printable
from zeroshard.train.account import describe_data
from zeroshard.train.config import Config, changes, differences, load_config
from zeroshard.train.corpus import Corpus
from zeroshard.train.inputs import read_input
from zeroshard.train.lease import Lease
from zeroshard.train.metrics import EvalRecord, Reporters, RunFiles
from zeroshard.train.run import Run, check_files
from zeroshard.train.settings import Train
from zeroshard.train.tokenizer import Tokenizer

__all__ = ["Saver", "check_contents", "check_folder", "check_settings", "is_complete", "keep_export_files", "resume"]

_FILE: Final = "config.toml"
_LAUNCHER: Final = ".launcher"
"""The launcher that began the run with `--fresh`."""
_EXPORT: Final = "export"
"""The folder whose files `zeroshard checkpoint export` copies (docs/checkpoints.md)."""
_EXTRA: Final = frozenset(["config", "data", "scheduler", "tally"])
_MOST_SUMMARY_BYTES: Final = 1 << 26
_NAME: Final = re.compile(r"step-(\d{8,})")
_CONTENTS: Final = ("sha256", "tokenizer_sha256", "train_tokens", "heldout_tokens", "tokens_sha256")
"""What describes the text and its tokens; older checkpoints lack the last."""


def check_folder(config: Config, *, is_fresh: bool = False, launcher: str = "") -> None:
    """Check, before ranks start, that this start may write to the folder of its run.

    Args:
        is_fresh: whether the run must be new, or one that this launcher has begun as a new one.
        launcher: as `name_launcher` returns it. A launcher that restarts its ranks repeats the command, `--fresh`
            included.

    Raises:
        ValueError: another process writes to the folder; the folder holds a run although `is_fresh`; or its run has
            other settings.
    """
    begins = is_fresh and bool(launcher)
    if not config.folder.exists() and not begins:
        return
    with Lease(config.folder):
        begun_by = config.folder / _LAUNCHER
        is_own = begins and begun_by.is_file() and begun_by.read_text("utf-8") == launcher
        if is_fresh and (config.folder / _FILE).exists() and not is_own:
            raise ValueError(
                f"--fresh: {config.folder} holds a run, and runs are not overwritten; give another --name, or remove it"
            )
        check_settings(config)
        if begins:
            begun_by.write_text(launcher, "utf-8")


def check_settings(config: Config) -> None:
    """Raise ValueError if the folder of the run holds a run with other settings."""
    file = config.folder / _FILE
    if file.exists():
        _compare(load_config(file), config, file)
    saved = zs.list_checkpoints(config.folder) if config.folder.exists() else []
    made = max((one.step for one in saved if not one.problem), default=0)
    if made > config.train.steps:
        raise ValueError(
            f"train.steps={config.train.steps}: {config.folder} has made {made} steps, and steps are not taken back; "
            f"give --steps {made} or more to go on, or another --name to start a new run"
        )


def keep_export_files(run: Run) -> None:
    """Copy configuration and tokenizer of a Hugging Face model into the folder of the run, for exports.

    The run then needs its model's folder no longer, which somebody may change or remove. Of adapters, their
    configuration is kept, too. Files that are there are whole at any time, also if the disk is full.
    """
    config = run.config
    folder = config.folder / _EXPORT
    if config.model.lora:
        adapters: Any = run.model.peft_config
        with tempfile.TemporaryDirectory() as made:
            adapters["default"].save_pretrained(made)
            for path in Path(made).iterdir():
                _copy_whole(path, folder / path.name)
    for name, path in config.export_files.items():
        _copy_whole(path, folder / name)


def _copy_whole(source: Path, target: Path) -> None:
    """Copy a file, unless its bytes are there; what was there stays as it was if this fails."""
    if target.exists() and filecmp.cmp(source, target, shallow=False):
        return
    target.parent.mkdir(exist_ok=True)
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        shutil.copyfile(source, unfinished)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def is_complete(config: Config) -> bool:
    """Return whether an earlier start has done all steps and what comes after them: evaluation, sample and summary."""
    made = _read_summary(config.folder)
    # A start that a signal ended has made no last evaluation, whichever step it was stopped after.
    if made.get("is_interrupted", True) or made["steps"] < config.train.steps:
        return False
    return any(one.step >= config.train.steps for one in zs.list_checkpoints(config.folder) if not one.problem)


def check_contents(config: Config, corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Raise ValueError if the run is complete, on another text or other tokens. Otherwise `resume` compares them."""
    if is_complete(config):
        _compare_contents(_read_summary(config.folder).get("data", {}), _contents(corpus, tokenizer), config.folder)


def _read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary of the last start; empty if it has written none."""
    try:
        return dict(json.loads(read_input(folder / "summary.json", "run.name", _MOST_SUMMARY_BYTES)))
    except (ValueError, TypeError, RecursionError):
        return {}


def resume(run: Run) -> None:
    """Resume from the newest valid checkpoint in the folder of the run, if there is one.

    Raises:
        CheckpointError: there are checkpoints, but all are damaged.
        ValueError: the checkpoint is from a run with other settings or another text.

    Collective: an all-gather of 8 bytes, and a load; every rank must call.
    """
    step = torch.tensor(_find(run.config.folder) if run.mesh.rank == 0 else 0, device=run.mesh.device)
    first = int(zs.gather_across_ranks(step)[0])
    if first < 0:
        return
    path = _path(run.config.folder, first)
    # Groups are decayed or not, which a checkpoint with a decay of 0 does not say.
    decays = [group["weight_decay"] for group in run.optimizer.param_groups]
    extra = run.zero.load(path).extra
    if not extra.keys() >= _EXTRA:
        raise ValueError(f"run.name: {path} was not saved by `zeroshard train`; move it out of {run.config.folder}")
    before = Config.model_validate(extra["config"])
    _compare(before, run.config, path)
    _compare_contents(extra["data"], _contents(run.corpus, run.tokenizer), path)
    run.scheduler.load_state_dict(extra["scheduler"])
    run.changes = tuple(changes(before, run.config))
    _reschedule(run, before.train, decays)
    tally, saved = run.tally, extra["tally"]
    tally.steps, tally.train_s, tally.earlier_s = first, saved["train_s"], saved["wall_s"]
    tally.losses = deque(saved["losses"], tally.losses.maxlen)
    tally.resumed_at = [*saved["resumed_at"], first]
    tally.last_eval = EvalRecord(**saved["last_eval"]) if saved["last_eval"] else None


def _reschedule(run: Run, before: Train, decays: Sequence[float]) -> None:
    """Give the optimizer the learning rate and its schedule of the settings, if they differ, and their weight decay.

    Args:
        decays: the weight decay of each parameter group, as the optimizer was made.
    """
    now = run.config.train
    scale = now.learning_rate / before.learning_rate
    if now.learning_rate != before.learning_rate:
        run.scheduler.base_lrs = [rate * scale for rate in run.scheduler.base_lrs]
    for group, base, decay in zip(run.optimizer.param_groups, run.scheduler.base_lrs, decays, strict=True):
        group["weight_decay"] = decay
        if now.learning_rate != before.learning_rate:
            group["initial_lr"] = base
        if run.changes:
            group["lr"] = base * run.factor(run.scheduler.last_epoch)


def _find(folder: Path) -> int:
    """Return the step of the newest valid checkpoint, or -1, and move damaged and unfinished checkpoints away.

    The remains of a killed save, or a damaged checkpoint, would block a later save of the same name. The lease makes
    the cleanup safe.
    """
    for unfinished in folder.glob(".tmp-*"):
        shutil.rmtree(unfinished) if unfinished.is_dir() and not unfinished.is_symlink() else unfinished.unlink()
    newest = zs.latest(folder)
    if newest is None:
        return -1
    found = _NAME.fullmatch(newest.name)
    if found is None:
        raise ValueError(f"run.name: {newest} is not a checkpoint of a run; move it out of {folder}")
    for damaged in folder.glob("step-*"):
        if (name := _NAME.fullmatch(damaged.name)) and int(name[1]) > int(found[1]):
            aside = damaged.with_name(f".damaged-{damaged.name}-{time.time_ns()}")
            os.rename(damaged, aside)
            warnings.warn(printable(f"{damaged} is damaged; moved to {aside}"), stacklevel=2)
    return int(found[1])


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _compare(before: Config, now: Config, where: Path) -> None:
    """Raise ValueError if the settings describe another training than those in `where`."""
    if found := differences(before, now):
        listed = "\n".join(f"  {one}" for one in found)
        raise ValueError(
            f"run.name: {where} is of a run with other settings:\n{listed}\nRestore these settings to resume the run, "
            "or give another --name to start a new run"
        )


def _contents(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, str | int]:
    described = describe_data(corpus, tokenizer)
    return {key: described[key] for key in _CONTENTS}


def _compare_contents(before: Mapping[str, Any], now: Mapping[str, str | int], where: Path) -> None:
    """Raise ValueError if the text and its tokens are others than those in `where`."""
    for key, value in now.items():
        if value != before.get(key, value):
            raise ValueError(f"data.path: {where} was trained on another text or other tokens: {key} differs")


@final
class Saver:
    """Saves a run when a checkpoint is due, at most once after each step.

    Args:
        run: the run to save.
        tell: notified before and after each save.
        files: the files of the run, on rank 0.
    """

    def __init__(self, run: Run, tell: Reporters, files: RunFiles | None) -> None:
        self._run, self._tell, self._files = run, tell, files
        self._last_step, self._last_s = run.tally.steps, time.monotonic()

    def is_due(self, step: int) -> bool:
        """Return whether this rank's clock, or the number of steps, calls for a checkpoint after `step` steps.

        A failed write of the run's files also makes a checkpoint due, because ranks check such failures before a save.
        """
        wanted = self._run.config.checkpoint
        is_late = bool(wanted.every_s) and time.monotonic() - self._last_s >= wanted.every_s
        is_lost = self._files is not None and bool(self._files.problem)
        return is_late or is_lost or (bool(wanted.every_steps) and step % wanted.every_steps == 0)

    def save(self) -> None:
        """Save the run.

        Raises:
            RuntimeError: on every rank, if the files of the run cannot be written: a resume from this checkpoint would
                lack the records before it.

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
    """Return the checkpoint's data besides tensors, equal on all ranks. Collective: a mean of one number."""
    tally = run.tally
    wall_s = torch.tensor(tally.earlier_s + time.perf_counter() - run.start_s, dtype=torch.float64)
    return {
        "config": run.config.model_dump(),
        "data": _contents(run.corpus, run.tokenizer),
        "scheduler": run.scheduler.state_dict(),
        "tally": {
            "train_s": tally.train_s,
            "wall_s": float(zs.mean_across_ranks(wall_s.to(run.mesh.device))),
            "losses": list(tally.losses),
            "resumed_at": tally.resumed_at,
            "last_eval": asdict(tally.last_eval) if tally.last_eval else None,
        },
    }
