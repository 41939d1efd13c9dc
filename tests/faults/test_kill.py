"""`kill -9` at random: nothing that was committed is lost, and a run that goes on has the bits of one that was not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zeroshard.checkpoint import files

from . import job
from .torture import Counts, Kind, Torture

ROOT = Path(__file__).parents[2]

# A test is a dozen starts and more, and only what they leave counts, not how long they take.
pytestmark = pytest.mark.timeout(300)


@pytest.mark.product
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_job_that_is_killed_ends_as_one_that_was_not(tmp_path: Path, world: int) -> None:
    # Half of the kinds of jobs have ranks on different paths.
    counts = Torture(tmp_path, key=world, worlds=[world]).run(lambda counts: counts.kills >= 4)
    assert counts.problems == []
    assert (counts.lost, counts.mismatched, counts.failed) == (0, 0, 0)
    assert counts.kills >= 4 and counts.jobs > 0


def forgets(folder: str, stage: int, steps: int, kill: job.Kill, *options: Any) -> list[float]:
    """The job with a planted bug: what goes on draws other dropout masks."""
    original = job.make_pipe

    def make(stage: int, *given: Any, **options: Any) -> Any:
        made = original(stage, *given, **options)
        load = made[2].load
        type(made[2]).load = lambda self, path: (load(path), job.seed(5))[0]
        return made

    job.make_pipe = make
    return job.train(folder, stage, steps, kill, *options)


def damages(folder: str, stage: int, steps: int, kill: job.Kill, *options: Any) -> list[float]:
    """The job with a planted bug: the newest checkpoint is damaged after its commit."""
    rename = files.rename

    def planted(source: Path, target: Path) -> None:
        rename(source, target)
        if target.name != "LATEST":
            os.truncate(target / "manifest.json", 20)

    files.rename = planted
    return job.train(folder, stage, steps, kill, *options)


@pytest.mark.parametrize(("planted", "found"), [(forgets, "mismatched"), (damages, "lost")])
def test_planted_bugs_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: object, found: str) -> None:
    def enough(counts: Counts) -> bool:
        return getattr(counts, found) > 0 or counts.kills >= 12

    torture = Torture(tmp_path, key=3, worlds=[2], stages=[3], paths=[False], offloads=[""])
    for asynchronous in (False, True):
        torture._undisturbed(Kind(2, 3, asynchronous, False, ""))
    monkeypatch.setattr("tests.faults.torture.train", planted)
    counts = torture.run(enough)
    assert getattr(counts, found) > 0, counts


@pytest.mark.rotates
def test_the_tool_counts_and_writes(tmp_path: Path) -> None:
    output = tmp_path / "counts.json"
    command = ["-m", "tools.torture", "--kills", "1", "--ranks", "1", "--stages", "2", "--output", str(output)]
    run = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr
    counts = json.loads(output.read_text())
    assert (counts["kills"], counts["lost"], counts["mismatched"], counts["problems"]) == (1, 0, 0, [])
    assert sum(counts["places"].values()) == 1
    assert sum(counts["phases"].values()) == 1
    assert sum(counts["kinds"].values()) == counts["jobs"] == 1
    assert "1 kills, " in run.stdout
    assert "0 checkpoints lost, 0 jobs not bitwise equal, 0 starts failed" in run.stdout
