"""Islands of `zeroshard train` that are launches of their own, with a mailbox between them."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import zeroshard as zs
from tests.outer.islands import mailbox, secret_in
from zeroshard.checkpoint.diff import diff
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.testing import run_ranks
from zeroshard.train.config import load_config
from zeroshard.train.loop import train
from zeroshard.train.metrics import Reporters

SMALL = (
    "model.depth=1",
    "model.context=32",
    "train.batch=4",
    "train.steps=6",
    "train.eval_every=0",
    "train.eval_bytes=500",
    "run.sample_bytes=0",
    "run.outer=2",
    "checkpoint.every_s=0",
)


def _train(folder: str, name: str, *settings: str) -> float:
    """Train on this rank; return the score."""
    options = (f"run.name={name}", f"run.folder={folder}", *settings)
    summary = train(load_config(overrides=(*SMALL, *options)), Reporters([]))
    return summary.bits_per_byte


def _launch(folder: Path, name: str, ranks: int, *settings: str) -> float:
    """Train in a launch of its own."""
    return run_ranks(_train, ranks, str(folder), name, f"run.ranks={ranks}", *settings, timeout_s=90.0)[0]


@pytest.mark.parametrize("bits", [32, 8])
def test_islands_of_a_mailbox_train_as_those_of_one_launch(tmp_path: Path, bits: int) -> None:
    shared = f"run.outer_bits={bits}"
    together = _launch(tmp_path, "together", 2, "train.batch=8", shared)
    with mailbox(tmp_path) as box, ThreadPoolExecutor(2) as pool:
        told = (shared, f"run.mailbox={box.address}", f"run.secret_file={secret_in(tmp_path)}")
        scores = [pool.submit(_launch, tmp_path, name, 1, *told, f"run.island={name}/2") for name in "12"]
        scores = [score.result() for score in scores]
    assert scores == pytest.approx([together] * 2, rel=1e-6)
    first = zs.latest(tmp_path / "together")
    for name in "12":
        # The optimizers' states are each island's own; a checkpoint of one launch has those of its first island.
        found = {one.name for one in diff(first, zs.latest(tmp_path / name))}
        assert not found & CheckpointReader(first).specs.keys(), found


def test_an_island_that_never_waits_trains_alone(tmp_path: Path) -> None:
    with mailbox(tmp_path) as box:
        told = (f"run.mailbox={box.address}", f"run.secret_file={secret_in(tmp_path)}", "run.staleness=none")
        _launch(tmp_path, "alone", 2, *told, "run.island=2/2")
    steps = [json.loads(line) for line in (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in steps if one["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
