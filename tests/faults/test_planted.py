"""The planted bugs of `tools/planted.py` have a place and a test, so that the tool goes on meaning something."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from tools.planted import BUGS, ROOT, Bug, is_found, plant

# The promise names these kinds: a flush is dropped, the rename comes too early, a rank's error is skipped, a range ends
# one too early. The tool plants all.
FAST = {"a file is not flushed", "the rename comes before the manifest", "a written range is one element short"}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_has_its_place_and_its_test(bug: Bug, tmp_path: Path) -> None:
    target = tmp_path / "zeroshard" / bug.file
    target.parent.mkdir(parents=True)
    shutil.copy(ROOT / "zeroshard" / bug.file, target)
    plant(bug, tmp_path)
    compile(target.read_text(), bug.file, "exec")
    file, _, name = bug.test.partition("::")
    assert f"def {name}" in (ROOT / file).read_text()


@pytest.mark.parametrize("name", sorted(FAST))
def test_a_planted_bug_is_found(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert is_found(next(bug for bug in BUGS if bug.name == name), tmp_path)
    assert capsys.readouterr().out.startswith("found ")


def test_what_is_no_bug_is_not_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bug = next(bug for bug in BUGS if bug.name == "the commit is not flushed")
    assert not is_found(dataclasses.replace(bug, wrong=bug.right), tmp_path)
    assert capsys.readouterr().out.startswith("MISSED")


def test_a_bug_without_a_place_is_told(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "zeroshard" / "checkpoint", tmp_path / "zeroshard" / "checkpoint")
    with pytest.raises(ValueError, match=r"is 0 times in checkpoint/writer\.py, expected 1"):
        plant(Bug("nowhere", "checkpoint/writer.py", "for _ in ()", "", ""), tmp_path)
