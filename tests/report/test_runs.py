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
CONFIG = "[train]\nclip = 1.0\n[data]\npath = ''\n[zero]\nstage = 3\n[run]\nname = 'a'\nfolder = 'runs'\n"
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
    with RunFiles(folder, CONFIG) as files:
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
    assert data["curves"] == [
        {
            "run": "first",
            "step": [1, 2, 3],
            "loss": [5.5, None, 5.0],
            "learning_rate": [1e-3] * 3,
            "grad_norm": [1.0] * 3,
            "tokens_per_s": [250.0] * 3,
            "memory_bytes": [sum(STATES.values())] * 3,
            "heldout": {"step": [1, 2, 3], "loss": [9.0] * 3},
        }
    ]
    (source,) = data["sources"]
    assert source["model"] == {"name": "GPT of 2 blocks", "parameters_numel": 1234}
    assert (source["kind"], source["name"], source["state"]) == ("run", "first", "complete")
    assert source["options"] == {"ranks": 3, "train.clip": 1.0, "data.path": "", "zero.stage": 3}
    assert [(one["what"], one["value"]) for one in source["results"]] == [
        ("held-out loss", 5.1),
        ("bits per byte of held-out text", 2.0),
        ("training loss, mean of the last steps", 5.0),
        ("speed of all ranks", 250.4),
        ("steps", 3),
        ("tokens", 1000),
        ("time of the steps", 4.0),
        ("state memory of rank 0, peak", sum(STATES.values())),
    ]
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


@pytest.mark.parametrize(("begin_s", "clocks"), [(3.0, [[0.0, 2.0, 4.0], [3.0, 5.0, 7.0]]), (4.0, None)])
def test_runs_of_the_same_time_have_one_clock(tmp_path: Path, begin_s: float, clocks: list[list[float]] | None) -> None:
    """Islands that are launches of their own are runs of the same time; other runs have nothing to compare."""
    for name, first_s in (("a", 1000.0), ("b", 1000.0 + begin_s)):
        folder = tmp_path / name
        folder.mkdir()
        rows = [{"kind": "step", "step": n, "loss": 4.0, "time": first_s + 2.0 * (n - 1)} for n in (1, 2, 3)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = read_runs([tmp_path / "a", tmp_path / "b"])
    check_page(data)
    assert [one.get("clock_s") for one in data["curves"]] == (clocks or [None, None])


def test_a_run_that_goes_on_has_curves_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "under way", [5.5, 5.2], None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # being written
    data = read_runs([folder])
    check_page(data)
    assert (data["curves"][0]["run"], data["curves"][0]["loss"]) == ("under way", [5.5, 5.2])
    assert data.keys() == {"version", "title", "sources", "curves"}
    assert data["sources"][0]["state"] == "unfinished"
    assert [(one["what"], one["value"]) for one in data["sources"][0]["results"]] == [
        ("held-out loss", 9.0),
        ("training loss, last step", 5.2),
        ("steps", 2),
    ]


def test_curves_that_no_record_has_are_left_out(tmp_path: Path) -> None:
    records = [
        {"kind": "step", "step": 1, "loss": 5.0, "a key of a later version": [1]},
        {"kind": "step", "step": 2, "loss": 4.0, "grad_norm": 2.0, "tokens_per_s": "nan"},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    data = read_runs([tmp_path])
    check_page(data)
    assert data["curves"] == [{"run": tmp_path.name, "step": [1, 2], "loss": [5.0, 4.0], "grad_norm": [None, 2.0]}]
    assert data["sources"][0]["options"] == {}


def test_a_run_that_diverged_says_so(tmp_path: Path) -> None:
    ended = dataclasses.replace(summary("a", [rank_bytes(0)]), final_heldout_loss=float("nan"), is_interrupted=True)
    data = read_runs([write_run(tmp_path, [float("nan")], ended)])
    check_page(data)
    assert data["sources"][0]["results"][0] == {"what": "held-out loss", "value": None, "unit": "nats/token"}
    assert data["sources"][0]["state"] == "interrupted"


def test_several_runs_are_told_apart(tmp_path: Path) -> None:
    ranks = [rank_bytes(64), rank_bytes(64)]
    folders = [write_run(tmp_path / name, [5.0], summary(name, ranks)) for name in ("a", "b")]
    folders.append(write_run(tmp_path / "c", [4.0], None))
    data = read_runs(folders)
    check_page(data)
    assert [run["run"] for run in data["curves"]] == ["a", "b", "c"]
    assert [source["name"] for source in data["sources"]] == ["a", "b", "c"]
    assert [(one["source"], one["name"]) for one in data["ranks"]] == [(0, "ranks 0 to 1"), (1, "ranks 0 to 1")]
    assert {one["what"].partition(":")[0] for one in data["comparison"]} == {"a", "b"}


def test_runs_of_one_name_have_the_names_of_their_folders(tmp_path: Path) -> None:
    first = write_run(tmp_path / "x" / "a", [5.0], summary("a", [rank_bytes(64)]))
    second = write_run(tmp_path / "y" / "a", [4.0], None)
    third = write_run(tmp_path / "y" / "b", [3.0], None)
    data = read_runs([first, second, third])
    names = [str(first), str(second), "b"]
    assert [source["name"] for source in data["sources"]] == [run["run"] for run in data["curves"]] == names
    assert {one["what"].partition(": ")[0] for one in data["comparison"]} == {str(first)}
    assert [one["name"] for one in read_runs([first, first])["sources"]] == ["a", "a"]


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
