"""The planted bugs of `tools/planted.py` have a place and a test, so that the tool goes on meaning something."""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest

from tests.rotation import RUNNING
from tools.planted import (
    BUGS,
    CHECKPOINT,
    ENGINE,
    MAILBOX,
    PASSED,
    PLAN,
    ROOMS,
    ROOT,
    STOPPED,
    TWO_A_ROOM,
    Bug,
    look_for,
    plant,
    run_tests,
)

# Of files: a flush is dropped, a range ends one too early. Of the engine: an order, memory, a rank that waits for ever,
# messages that are mixed up, what the plan's events would not tell. No two have the same test. The tool plants all.
FAST = {
    "a file is not flushed",
    "a written range is one element short",
    "hoist is removed",
    "three units are whole besides the root",
    "a rank that is ahead holds up the others",
    "a tag has no number of its pass",
    "a release keeps the memory",
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_has_its_place_and_its_test(bug: Bug, tmp_path: Path) -> None:
    target = tmp_path / "zeroshard" / bug.file
    target.parent.mkdir(parents=True)
    shutil.copy(ROOT / "zeroshard" / bug.file, target)
    plant(bug, tmp_path)
    compile(target.read_text(), bug.file, "exec")
    file, _, name = bug.test.partition("::")
    assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text()


def test_the_tests_with_their_parameters_are_there() -> None:
    tests = {bug.test for bug in BUGS}
    if {test.partition("::")[0] for test in tests} <= {case.partition("::")[0] for case in RUNNING.collected}:
        # A session of all files has collected them, which takes ten seconds of a core.
        ends = {part for case in RUNNING.collected for part in (case, case.partition("[")[0], case.partition("::")[0])}
        assert tests <= ends
    else:
        assert run_tests(ROOT, sorted(tests), 100.0, "--collect-only") == PASSED


def test_the_engine_is_covered() -> None:
    assert (
        len({bug.name for bug in BUGS})
        == len(BUGS)
        == len((*CHECKPOINT, *ENGINE, *MAILBOX, *PLAN, *ROOMS, *TWO_A_ROOM))
    )
    assert {"flush() is removed", "hoist is removed"} <= {bug.name for bug in ENGINE}
    assert len(ENGINE) >= 15 and {bug.file.split("/")[0] for bug in ENGINE} == {
        "activations",
        "core",
        "optim",
        "setup",
        "store",
        "update",
        "table",
        "whole",
        "wire",
    }


@pytest.mark.product
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(FAST))
def test_a_planted_bug_is_found(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = look_for(next(bug for bug in BUGS if bug.name == name), tmp_path)
    assert found["is_found"]
    assert capsys.readouterr().out.startswith("found ")


@pytest.mark.rotates
def test_what_is_no_bug_is_not_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bug = next(bug for bug in BUGS if bug.name == "the commit is not flushed")
    assert not look_for(dataclasses.replace(bug, wrong=bug.right), tmp_path)["is_found"]
    assert capsys.readouterr().out.startswith("MISSED")


def test_a_bug_without_a_place_is_told(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "zeroshard" / "checkpoint", tmp_path / "zeroshard" / "checkpoint")
    with pytest.raises(ValueError, match=r"^nowhere: .* is 0 times in checkpoint/writer\.py, expected 1$"):
        plant(Bug("nowhere", "checkpoint/writer.py", "for _ in ()", "", ""), tmp_path)


def test_a_bug_whose_place_moved_is_told_where_it_is(tmp_path: Path) -> None:
    moved = dataclasses.replace(ENGINE[0], file="core/gone.py")
    text = f"{re.escape(moved.name)}: .* is 0 times in core/gone.py, expected 1; {ENGINE[0].file} has this text"
    with pytest.raises(ValueError, match=text):
        plant(moved, tmp_path)


def test_a_test_that_hangs_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text("import time\n\n\ndef test_hangs():\n    time.sleep(100)\n")
    assert run_tests(tmp_path, ["test_hangs.py"], 5.0) == STOPPED
