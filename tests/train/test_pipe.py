"""`zeroshard train --pipe`: the losses of one rank, and settings that do not go together."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rotation import third
from zeroshard.testing import run_ranks
from zeroshard.train.config import load_config
from zeroshard.train.loop import train
from zeroshard.train.metrics import Reporters

TIMEOUT_S = 300
STEPS = 6


def run(folder: str, text: str, name: str, settings: list[str]) -> int:
    """Train; return the seed from which this rank draws, such as for dropout."""
    fixed = [
        f"run.folder={folder}",
        f"data.path={text}",
        f"run.name={name}",
        f"train.steps={STEPS}",
        "model.depth=4",
        "model.context=32",
        "train.batch=8",
        "train.eval_bytes=1000",
        "train.warmup_fraction=0.5",
        "run.sample_bytes=6",
        "zero.watchdog_s=60",
    ]
    train(load_config(overrides=[*fixed, *settings]), Reporters([]))
    return torch.initial_seed()


def told(folder: Path, name: str) -> tuple[list[float], float, dict[str, Any]]:
    """Return losses, the loss of the evaluation, and the summary of a run."""
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    losses = [one["loss"] for one in records if one["kind"] == "step"]
    summary = json.loads((folder / name / "summary.json").read_text())
    return losses, summary["final_heldout_loss"], summary


def test_a_pipeline_trains_as_one_rank_does(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{number} times {number} is {number * number}." for number in range(600)))
    cases = {
        "two": (2, ["run.ranks=2", "run.pipe=2"]),
        "four": (4, ["run.ranks=4", "run.pipe=2", "run.schedule=gpipe", "zero.stage=2", "train.compile_blocks=false"]),
        "interleaved": (2, ["run.ranks=2", "run.pipe=2", "run.schedule=interleaved", "zero.activations=recompute"]),
    }
    run_ranks(run, 1, str(tmp_path), str(text), "one", ["run.ranks=1"], timeout_s=TIMEOUT_S)
    losses, score, _ = told(tmp_path, "one")
    assert len(losses) == STEPS
    for name in third(cases):
        ranks, settings = cases[name]
        seeds = run_ranks(run, ranks, str(tmp_path), str(text), name, settings, timeout_s=TIMEOUT_S)
        assert len(set(seeds)) == ranks, name
        actual, actual_score, summary = told(tmp_path, name)
        assert actual == pytest.approx(losses, rel=1e-5), name
        assert actual_score == pytest.approx(score, rel=1e-5), name
        assert summary["sample"].startswith("The "), name
        assert (summary["pipe"], summary["micro_batches"]) == (2, 4), name
        assert len(summary["idle"]) == ranks, name
        assert all(0 < part < 1 for part in summary["idle"]), name
        plan = summary["plan"]
        for column in ("states", "gradients", "padding"):
            assert plan["predicted"]["resident_bytes"][column] == plan["measured"]["resident_bytes"][column], name


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["run.ranks=4", "run.pipe=3"], "run.pipe=3 does not divide run.ranks=4"),
        (["run.ranks=4", "run.pipe=2", "run.tensor=2"], "run.pipe=2 with run.tensor=2"),
        (["run.ranks=2", "run.pipe=2", "train.accumulation=2"], "a pipeline cuts a batch into run.micro_batches"),
        (["run.ranks=4", "run.pipe=2", "train.batch=12"], "set train.batch to a multiple of 8"),
        (["run.ranks=2", "run.pipe=2", "run.schedule=2f2b"], "run.schedule"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        load_config(overrides=settings)
