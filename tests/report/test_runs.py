"""Folders that `zeroshard train` writes, as data of the page."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from zeroshard.report.check import check_page
from zeroshard.report.page import make_page
from zeroshard.report.runs import read_runs
from zeroshard.train.metrics import EvalRecord, RankBytes, RunFiles, StepRecord, Summary

STATES = {"parameters": 1000, "gradients": 2000, "states": 6000, "padding": 64, "transient": 512}
SENT = {"gather": 3000, "reduce": 1500}


def rank_bytes(padding: int, **changes: Any) -> RankBytes:
    held = STATES | {"padding": padding}
    found = RankBytes(held, held | {"transient": 0}, held, SENT, SENT | {"agree": 8}, {})
    return dataclasses.replace(found, **changes)


def summary(name: str, ranks: list[RankBytes]) -> Summary:
    return Summary(
        name=name,
        model="GPT of 2 blocks",
        is_interrupted=False,
        steps=3,
        resumed_at=[],
        depth=2,
        parameters_numel=1234,
        world_size=len(ranks),
        stage=3,
        row="stage 3",
        final_train_loss=5.0,
        final_heldout_loss=5.1,
        bits_per_byte=2.0,
        tokens=1000,
        tokens_per_s=250.4,
        train_s=4.0,
        wall_s=5.0,
        ranks=ranks,
        data={},
        sample="",
        versions={},
    )


def write_run(folder: Path, losses: list[float], ended: Summary | None) -> Path:
    with RunFiles(folder, "") as files:
        for step, loss in enumerate(losses, 1):
            files.stepped(StepRecord(step, loss, 1e-3, 1.0, 0.5, 250.0, STATES, STATES))
            files.evaluated(EvalRecord(step, 9.0, 2.0, 100, 0.1))
        if ended is not None:
            files.finished(ended)
        assert files.problem == ""
    return folder


def test_a_run_has_losses_ranks_and_a_comparison(tmp_path: Path) -> None:
    ranks = [rank_bytes(64), rank_bytes(64), rank_bytes(96, sent_bytes=SENT | {"gather": 2990})]
    data = read_runs([write_run(tmp_path / "a", [5.5, float("nan"), 5.0], summary("first", ranks))])
    check_page(data)
    make_page(data)
    assert data["title"] == "first"
    assert data["losses"] == [{"run": "first", "step": [1, 2, 3], "loss": [5.5, None, 5.0]}]
    assert data["model"] == {"name": "GPT of 2 blocks", "parameters_numel": 1234}
    assert data["options"] == {"row": "stage 3", "ranks": 3, "steps": 3, "tokens/s": 250}
    assert [(one["name"], one["count"], one["resident_bytes"]["padding"]) for one in data["ranks"]] == [
        ("ranks 0 to 1", 2, 64),
        ("rank 2", 1, 96),
    ]
    rows = {one["what"]: (one["predicted"], one["measured"]) for one in data["comparison"]}
    assert rows["parameters, ranks 0 to 2"] == (1000, 1000)
    assert rows["padding, rank 2"] == (96, 96)
    assert rows["transient, at most, ranks 0 to 2"] == (512, 512)
    assert rows["sent to gather, ranks 0 to 1"] == (3000, 3000)
    assert rows["sent to gather, rank 2"] == (3000, 2990)
    assert not any("agree" in what for what in rows)


def test_a_run_that_goes_on_has_losses_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "under way", [5.5, 5.2], None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # being written
    data = read_runs([folder])
    check_page(data)
    assert data["losses"] == [{"run": "under way", "step": [1, 2], "loss": [5.5, 5.2]}]
    assert data.keys() == {"version", "kind", "title", "losses"}


def test_several_runs_are_told_apart(tmp_path: Path) -> None:
    ranks = [rank_bytes(64), rank_bytes(64)]
    folders = [write_run(tmp_path / name, [5.0], summary(name, ranks)) for name in ("a", "b")]
    folders.append(write_run(tmp_path / "c", [4.0], None))
    data = read_runs(folders)
    check_page(data)
    assert [run["run"] for run in data["losses"]] == ["a", "b", "c"]
    assert [one["name"] for one in data["ranks"]] == ["a: ranks 0 to 1", "b: ranks 0 to 1"]
    assert {one["what"].partition(":")[0] for one in data["comparison"]} == {"a", "b"}
    assert "model" not in data


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folders is empty"):
        read_runs([])
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path} has no run: metrics.jsonl is missing")):
        read_runs([tmp_path])
    (tmp_path / "metrics.jsonl").write_text("no\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1, is not JSON"):
        read_runs([tmp_path])
    (tmp_path / "metrics.jsonl").write_text("")
    for text, message in (("{", "is not JSON"), (json.dumps({"name": "a"}), "has no bytes by rank")):
        (tmp_path / "summary.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_runs([tmp_path])
