"""The error that torchrun prints last: the cause, the user's frames, and no other."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import zeroshard as zs
from tests.contract.source import REPOSITORY
from zeroshard.watch.cause_file import CauseFile
from zeroshard.watch.last_words import ErrorHook

SCRIPT = """
import torch, zeroshard as zs

mesh = zs.init()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
zero = zs.shard(model, optimizer)

def train():
    for step in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if mesh.rank == 1 and step == 1:
            raise KeyError("a column of rank 1")

train()
"""


def told(monkeypatch: pytest.MonkeyPatch, path: Path, error: Exception, **options: bool) -> tuple[dict, list[object]]:
    """Return what the file of an error holds, and what the previous hook was called with."""
    seen: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: seen.append(args[1]))
    CauseFile.install(str(path), **{"shows_all": False, "is_last": True, **options})
    hook = sys.excepthook
    CauseFile.install(str(path), shows_all=False, is_last=True)
    assert sys.excepthook is hook
    hook(type(error), error, error.__traceback__)
    return json.loads(path.read_text())["message"], seen


def refused() -> Exception:
    """Return an error of the package with its traceback."""
    try:
        zs.shard(torch.nn.Linear(2, 2), stage=7)  # type: ignore[arg-type]
    except ValueError as error:
        return error
    raise AssertionError


def test_the_cause_is_first_and_frames_of_the_package_are_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    message, seen = told(monkeypatch, tmp_path / "error.json", refused())
    lines = message["extraInfo"]["py_callstack"].splitlines()
    assert lines[0].startswith("ValueError: stage must be one of")
    assert [line for line in lines if "File " in line] == [line for line in lines if f'"{__file__}"' in line]
    assert "frames of libraries are not shown" in lines[-1]
    assert seen == [], "torchrun prints it"


def test_all_frames_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    message, _ = told(monkeypatch, tmp_path / "error.json", refused(), shows_all=True)
    assert "zeroshard/sharding.py" in message["extraInfo"]["py_callstack"]


def test_it_is_printed_where_ranks_start_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = refused()
    assert told(monkeypatch, tmp_path / "error.json", error, is_last=False)[1] == [error]


def test_a_consequence_is_one_line_and_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    message, _ = told(monkeypatch, tmp_path / "error.json", zs.RankMismatchError.of_another("first\nsecond"))
    assert message["extraInfo"]["py_callstack"] == "RankMismatchError: first"
    assert int(message["extraInfo"]["timestamp"]) > time.time() + 1


def test_a_forked_child_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *args: None)
    hook = CauseFile(str(tmp_path / "error.json"), shows_all=False, is_last=True)
    hook._process = os.getppid()
    hook(ValueError, ValueError("of a child"), None)
    assert list(tmp_path.iterdir()) == []


def test_a_hook_stays_inside_that_of_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error is told to the other ranks before it is written: a later `zs.init()` changes no order."""
    monkeypatch.setattr(sys, "excepthook", lambda *args: None)
    CauseFile.install(str(tmp_path / "error.json"), shows_all=False, is_last=True)
    monkeypatch.setattr(sys, "excepthook", model := ErrorHook())
    CauseFile.install(str(tmp_path / "error.json"), shows_all=False, is_last=True)
    assert sys.excepthook is model


@pytest.mark.rotates
def test_torchrun_ends_with_the_cause(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert run.returncode == 1
    last = run.stderr.rstrip().splitlines()[-8:]
    assert "  traceback : KeyError: 'a column of rank 1'" in last
    assert '    raise KeyError("a column of rank 1")' in "\n".join(last)
    assert run.stderr.count("Traceback (most recent call last)") == 1, "torchrun's own"
