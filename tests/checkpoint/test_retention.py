"""Retention removes what it may: older checkpoints that were saved to expire, and nothing else."""

import os
from pathlib import Path

import pytest
import torch

import zeroshard as zs
from zeroshard.checkpoint.verify import verify

from . import small


def names(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != "LATEST")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newest_are_kept(tmp_path: Path, asynchronous: bool) -> None:
    trainer = small.Small()
    kept = []
    for step in (1, 2, 3, 10, 20):
        trainer.zero.save(tmp_path / f"step-{step}", keep=3, asynchronous=asynchronous)
        trainer.zero.wait()
        kept.append(names(tmp_path))
    assert kept[2] == ["step-1", "step-2", "step-3"]
    assert kept[3] == ["step-10", "step-2", "step-3"]
    assert kept[4] == ["step-10", "step-20", "step-3"]
    for name in names(tmp_path):
        verify(tmp_path / name)


def test_nothing_else_is_touched(tmp_path: Path) -> None:
    trainer = small.Small()
    for step in (1, 2, 3, 4, 50):
        trainer.zero.save(tmp_path / f"step-{step}", keep=9)
    trainer.zero.save(tmp_path / "best-5")  # does not expire
    (tmp_path / "step-2" / "notes.txt").write_text("mine")  # holds something else
    (tmp_path / "step-3" / "manifest.json").write_text("damaged")
    (tmp_path / "linked").symlink_to(trainer.zero.save(tmp_path.parent / f"{tmp_path.name}-else-1", keep=9))
    (tmp_path / "step-6").mkdir()
    (tmp_path / "runs.txt").touch()
    before = set(names(tmp_path))
    # Training went on from an earlier step: step 50 is of another branch, and is not older.
    trainer.zero.save(tmp_path / "step-7", keep=2)
    trainer.zero.save(tmp_path / "step-8", keep=2)
    assert set(names(tmp_path)) == before - {"step-1", "step-4"} | {"step-7", "step-8"}
    assert (tmp_path / "step-2" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "linked" / "manifest.json").exists()


def test_checkpoints_to_resume_from_are_counted_apart(tmp_path: Path) -> None:
    trainer = small.Small()
    for step in (1, 2, 3):
        trainer.zero.save(tmp_path / f"step-{step}", keep=2)
        trainer.zero.save(tmp_path / f"best-{step}", step=step + 9, keep=2, model_only=True)
    assert names(tmp_path) == ["best-2", "best-3", "step-2", "step-3"]


def test_models_of_one_job_are_counted_apart(tmp_path: Path) -> None:
    """A generator and its critic, ended between their saves; then another model under the first one's names."""
    first, second, other = small.Small().zero, small.Small().zero, zs.shard(torch.nn.Linear(2, 1))
    for step in (10, 20, 30):
        first.save(tmp_path / f"generator-{step}", keep=2)
        if step < 30:
            second.save(tmp_path / f"critic-{step}", keep=2)
    expected = ["critic-10", "critic-20", "generator-20", "generator-30"]
    assert names(tmp_path) == expected
    for step in (40, 50, 60):
        other.save(tmp_path / f"generator-{step}", keep=2)
    assert names(tmp_path) == [*expected, "generator-50", "generator-60"]


def test_widths_of_a_sweep_are_counted_apart(tmp_path: Path) -> None:
    """Names that differ in numbers alone are of one model only where its shapes are alike, in whatever dtype."""
    for width, first, dtype in ((64, 1, torch.float32), (128, 1, torch.float32), (64, 3, torch.float64)):
        zero = zs.shard(torch.nn.Linear(width, 1, dtype=dtype))
        for step in (first, first + 1):
            zero.save(tmp_path / f"width-{width}-step-{step}", keep=2)
    assert names(tmp_path) == [f"width-{at}" for at in ("128-step-1", "128-step-2", "64-step-3", "64-step-4")]


def test_names_of_one_model_may_have_numbers_of_any_form(tmp_path: Path) -> None:
    trainer = small.Small()
    found = [f"step={step}-loss={loss}" for step, loss in enumerate(["0.5", "-0.7", "5e-05", "nan", "-inf", "1E+3"])]
    for step, name in enumerate(found):
        trainer.zero.save(tmp_path / name, step=step, keep=2)
    assert names(tmp_path) == sorted(found[-2:])


def test_the_newest_is_one_to_resume_from(tmp_path: Path) -> None:
    trainer = small.Small()
    best = trainer.zero.save(tmp_path / "best", step=9, model_only=True)
    assert zs.latest(tmp_path) == best
    whole = trainer.zero.save(tmp_path / "step-2")
    assert zs.latest(tmp_path) == whole


def test_one_of_the_same_step_outlives_the_other(tmp_path: Path) -> None:
    trainer = small.Small()
    for name in ("run-3", "run-2", "run-1"):
        trainer.zero.save(tmp_path / name, step=4, keep=2)
        assert name in names(tmp_path)
    assert len(names(tmp_path)) == 2


def test_what_a_killed_retention_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".old-step-1-0123abcd"
    left.mkdir()
    (left / "manifest.json").touch()
    other = tmp_path / ".old-things"
    other.mkdir()
    small.Small().zero.save(tmp_path / "step-2", keep=2)
    assert (left.exists(), other.exists()) == (False, True)
