"""What a report says of files that it cannot read: it names the file, and it neither waits nor shows a traceback."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zeroshard.report.plans import read_sources

from .test_runs import rank_bytes, summary, write_run

SECONDS = 60
"""More than the start of a command takes; a pipe that is waited for takes forever."""


def whole_run(folder: Path) -> Path:
    return write_run(folder / "run", [5.0, 4.0], summary("run", [rank_bytes(0), rank_bytes(0)]))


def change(folder: Path, path: tuple[str | int, ...], value: Any) -> None:
    file = folder / "summary.json"
    stored = json.loads(file.read_text())
    inner = stored
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    file.write_text(json.dumps(stored))


def test_a_whole_run_is_read(tmp_path: Path) -> None:
    assert read_sources([whole_run(tmp_path)])["curves"][0]["loss"] == [5.0, 4.0]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a number for a record": lambda run: (run / "metrics.jsonl").write_text("7\n"),
    "a record without a kind": lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n'),
    "a record without a loss": lambda run: (run / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n'),
    "a loss that is a list": lambda run: (run / "metrics.jsonl").write_text(
        '{"kind": "step", "step": 1, "loss": [1]}\n'
    ),
    "a loss that is a word": lambda run: (run / "metrics.jsonl").write_text(
        '{"kind": "step", "step": 1, "loss": "low"}\n'
    ),
    "a step that is a word": lambda run: (run / "metrics.jsonl").write_text(
        '{"kind": "step", "step": "one", "loss": 1}\n'
    ),
    "a deep record": lambda run: (run / "metrics.jsonl").write_text("[" * 100_000 + "\n"),
    "bytes for records": lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\xfe\n"),
    "a norm that is a word": lambda run: (run / "metrics.jsonl").write_text(
        '{"kind": "step", "step": 1, "loss": 1, "grad_norm": "high"}\n'
    ),
    "a peak that is a number": lambda run: (run / "metrics.jsonl").write_text(
        '{"kind": "step", "step": 1, "loss": 1, "peak_bytes": 7}\n'
    ),
    "an evaluation without a loss": lambda run: (run / "metrics.jsonl").write_text('{"kind": "eval", "step": 1}\n'),
    "settings that are no TOML": lambda run: (run / "config.toml").write_text("[train\n"),
    "settings without a section": lambda run: (run / "config.toml").write_text("steps = 3\n"),
    "bytes for settings": lambda run: (run / "config.toml").write_bytes(b"\xff\xfe"),
    "bytes for a summary": lambda run: (run / "summary.json").write_bytes(b"\xff\xfe"),
    "a deep summary": lambda run: (run / "summary.json").write_text('{"a":' * 100_000),
    "a summary without ranks": lambda run: change(run, ("ranks",), None),
    "a summary with no rank": lambda run: change(run, ("ranks",), []),
    "ranks that are numbers": lambda run: change(run, ("ranks",), [1, 2]),
    "a rank without bytes": lambda run: change(run, ("ranks", 1, "resident_bytes"), None),
    "bytes that are a list": lambda run: change(run, ("ranks", 0, "predicted_bytes"), [1]),
    "no model": lambda run: change(run, ("model",), None),
    "a rate that is a word": lambda run: change(run, ("tokens_per_s",), "fast"),
    "a rate that is not finite": lambda run: change(run, ("tokens_per_s",), "inf"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_run_is_an_error_with_its_name(damage: Callable[[Path], object], tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    damage(run)
    with pytest.raises(ValueError, match=str(run)):
        read_sources([run])


@pytest.mark.parametrize(
    "text", ["", "{", "\x00", '{"film": 1}', '{"frontier": 1}', '{"records": 1}', "[" * 100_000, "NaN", '{"film": {}}']
)
def test_a_damaged_plan_is_an_error_with_its_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=str(file)):
        read_sources([file])


def make_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def make_run_of_pipes(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        run = whole_run(folder)
        (run / name).unlink()
        os.mkfifo(run / name)
        return run

    return make


@pytest.mark.parametrize(
    "make",
    [
        make_pipe,
        lambda _: Path("/dev/zero"),
        make_run_of_pipes("metrics.jsonl"),
        make_run_of_pipes("summary.json"),
        make_run_of_pipes("config.toml"),
    ],
    ids=["pipe", "device", "metrics", "summary", "config"],
)
def test_a_pipe_or_a_device_is_an_error_at_once(make: Callable[[Path], Path], tmp_path: Path) -> None:
    source = make(tmp_path)
    command = [sys.executable, "-m", "zeroshard", "report", str(source), "--out", str(tmp_path / "page.html")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == 2
    assert "is not a regular file" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "page.html").exists()
