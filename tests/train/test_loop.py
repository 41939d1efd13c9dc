"""The loop on ranks: what it computes, counts, writes, and how it ends early."""

import dataclasses
import errno
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from zeroshard.testing import RankFailure, run_ranks
from zeroshard.train.config import load_config
from zeroshard.train.loop import train
from zeroshard.train.metrics import RunFiles
from zeroshard.train.run import learning_rate_factor

SMALL = [
    "model.depth=1",
    "model.context=32",
    "train.steps=4",
    "train.eval_every=2",
    "train.eval_bytes=500",
    "run.sample_bytes=8",
    "checkpoint.every_s=0",
    "zero.watchdog_s=20",
]


class _Listener:
    """A reporter that keeps what it was told."""

    def __init__(self):
        self.starts, self.steps, self.evals, self.summaries = [], [], [], []

    def started(self, start):
        self.starts.append(start)

    def stepped(self, record):
        self.steps.append(record)

    def evaluated(self, record):
        self.evals.append(record)

    def saving(self, step):
        pass

    def saved(self, step, path):
        pass

    def finished(self, summary):
        self.summaries.append(summary)


def _run(folder, overrides, stopping_rank=None, stop_after=0):
    """Train, and return the summary, the losses and how much was told. Runs on a rank."""
    listener, asked = _Listener(), []

    def is_stop_wanted():
        asked.append(1)
        return dist.is_initialized() and dist.get_rank() == stopping_rank and len(asked) >= stop_after

    summary = train(load_config(overrides=[*SMALL, f"run.folder={folder}", *overrides]), listener, is_stop_wanted)
    assert len(listener.summaries) == len(listener.starts) <= 1
    return {
        "summary": dataclasses.asdict(summary),
        "losses": [record.loss for record in listener.steps],
        "evals": [record.step for record in listener.evals],
    }


def _run_several(folder, variants):
    """Train once for each list of overrides. Runs on a rank."""
    return [_run(folder, [*overrides, f"run.name={number}"]) for number, overrides in enumerate(variants)]


def _check_bytes(summary):
    """Assert that every predicted byte was there, and was sent, on every rank."""
    assert len(summary["ranks"]) == summary["world_size"]
    for of_rank in summary["ranks"]:
        held = of_rank["resident_bytes"] | {"transient": of_rank["peak_bytes"]["transient"]}
        assert held == of_rank["predicted_bytes"]
        sent = {kind: of_rank["sent_bytes"][kind] for kind in ("gather", "reduce")}
        assert sent == of_rank["predicted_sent_bytes"]
        assert sent["reduce"] > 0


def test_stages_agree_bit_for_bit_and_predictions_hold(tmp_path):
    # Without clipping: the norm's sum has another order where gradients are sharded.
    variants = [["train.clip=0", f"zero.stage={stage}", "run.ranks=2"] for stage in range(4)]
    told, untold = run_ranks(_run_several, 2, str(tmp_path), variants)
    assert [len(run["losses"]) for run in told] == [4] * 4
    assert [len(run["losses"]) for run in untold] == [0] * 4
    for stage, run in enumerate(told):
        assert run["losses"] == told[0]["losses"]
        assert run["summary"]["bits_per_byte"] == told[0]["summary"]["bits_per_byte"]
        assert run["summary"]["sample"] == told[0]["summary"]["sample"]
        assert run["summary"]["stage"] == stage
        assert untold[stage]["summary"]["ranks"] == run["summary"]["ranks"]
        _check_bytes(run["summary"])


def test_a_run_can_be_profiled(tmp_path):
    variants = [["run.ranks=2", "run.profile_steps=2"], ["run.ranks=2", "run.profile_steps=2", "train.steps=2"]]
    told, short = run_ranks(_run_several, 2, str(tmp_path), variants)[0]
    assert told["summary"]["profile"].startswith("[rank 0/2] 2 step(s) in ")
    trace = json.loads((tmp_path / "0" / "profile.json").read_text())
    steps = [(event["pid"], event["name"]) for event in trace["traceEvents"] if event["name"] == "step"]
    assert sorted(steps) == [(0, "step")] * 2 + [(1, "step")] * 2
    assert short["summary"]["profile"] == "no step was profiled: this start made 2, and the first 2 are not profiled"
    assert not (tmp_path / "1" / "profile.json").exists()


@pytest.mark.rotates
def test_data_and_loss_do_not_depend_on_the_rank_count(tmp_path):
    (two, _) = run_ranks(_run, 2, str(tmp_path), ["run.ranks=2"])
    one = _run(tmp_path, ["run.ranks=1", "run.name=one"])
    # Another order of the same sums: fp32's 2**-24 each, some hundreds of times over.
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["summary"]["bits_per_byte"] == pytest.approx(one["summary"]["bits_per_byte"], rel=1e-5)
    assert two["summary"]["data"] == one["summary"]["data"]
    assert two["evals"] == one["evals"] == [2, 4]


@pytest.mark.rotates
def test_a_batch_that_the_ranks_do_not_divide(tmp_path):
    """Five windows on three ranks, then in micro-batches of one and two: the losses are those of one rank."""
    overrides = ["train.batch=5", "run.sample_bytes=0"]
    one = _run(tmp_path, ["run.ranks=1", "run.name=one", *overrides])
    (three, *_) = run_ranks(_run, 3, str(tmp_path), ["run.ranks=3", *overrides])
    (parts, _) = run_ranks(
        _run, 2, str(tmp_path), ["run.ranks=2", "run.name=parts", "train.accumulation=2", *overrides]
    )
    for several in (three, parts):
        # Another order of the same sums, as above.
        assert several["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert several["summary"]["bits_per_byte"] == pytest.approx(one["summary"]["bits_per_byte"], rel=1e-5)


@pytest.mark.rotates
def test_blocks_can_be_compiled(tmp_path, monkeypatch):
    compiled = []
    # torch's default would need a C++ compiler.
    own = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module: compiled.append(module) or own(module, backend="aot_eager")
    )
    plain, fast = _run_several(tmp_path, [["run.ranks=1"], ["run.ranks=1", "compile=true"]])
    assert [type(module).__name__ for module in compiled] == ["Block"]
    assert fast["losses"] == plain["losses"]


@pytest.mark.rotates
def test_accumulation_with_and_without_a_reduction_each_time(tmp_path):
    variants = [
        ["run.ranks=2", "train.batch=8"],
        ["run.ranks=2", "train.batch=8", "train.accumulation=2"],
        ["run.ranks=2", "train.batch=8", "train.accumulation=2", "zero.no_sync=true"],
    ]
    plain, reduced, unreduced = run_ranks(_run_several, 2, str(tmp_path), variants)[0]
    # Another order of the same sums, as above.
    assert reduced["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert unreduced["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    sent = [run["summary"]["ranks"][0]["sent_bytes"]["reduce"] for run in (plain, reduced, unreduced)]
    assert sent == [sent[0], 2 * sent[0], sent[0]]
    for run in (plain, reduced, unreduced):
        for of_rank in run["summary"]["ranks"]:
            assert of_rank["predicted_sent_bytes"].items() <= of_rank["sent_bytes"].items()


@pytest.mark.product
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_fp32(precision, tmp_path):
    full, half = _run_several(tmp_path, [["run.ranks=1", f"train.precision={name}"] for name in ("fp32", precision)])
    # bf16 keeps 8 bits, so a loss of 5 is right to some hundredths. fp16 skips steps until it finds its scale.
    same = 4 if precision == "bf16" else 1
    assert half["losses"][:same] == pytest.approx(full["losses"][:same], rel=0.01)
    assert half["losses"] != full["losses"]
    assert half["losses"][-1] < half["losses"][0] - 0.5
    of_full, of_half = full["summary"]["ranks"][0], half["summary"]["ranks"][0]
    assert 2 * of_half["resident_bytes"]["parameters"] == of_full["resident_bytes"]["parameters"]
    assert of_half["resident_bytes"]["states"] > of_full["resident_bytes"]["states"]


def test_one_rank_that_wants_to_stop_stops_all_after_the_same_step(tmp_path):
    runs = run_ranks(_run, 3, str(tmp_path), ["run.ranks=3", "train.batch=3", "train.steps=50"], 1, 3)
    assert [run["summary"]["steps"] for run in runs] == [3, 3, 3]
    assert all(run["summary"]["is_interrupted"] for run in runs)
    assert json.loads((tmp_path / "default" / "summary.json").read_text())["is_interrupted"] is True
    assert (tmp_path / "default" / "metrics.jsonl").read_text().count('"kind": "step"') == 3


def _run_and_lose(folder, cases):
    """Train with the folder of the run harmed under it; return each error. Runs on a rank."""
    found = []
    for number, (harm, after) in enumerate(cases):
        place, asked = Path(folder, str(number)), []

        def is_stop_wanted(harm=harm, after=after, place=place, asked=asked):
            asked.append(1)
            if len(asked) == after and (not dist.is_initialized() or dist.get_rank() == 0):
                _HARMS[harm](place)
            return False

        overrides = [*SMALL, f"run.folder={folder}", f"run.name={number}", "checkpoint.every_steps=2"]
        try:
            train(load_config(overrides=overrides), _Listener(), is_stop_wanted)
            found.append("")
        except RuntimeError as error:
            found.append(str(error))
    return found


def _replace_folder(place):
    shutil.rmtree(place)
    place.mkdir()
    (place / "metrics.jsonl").touch()


_HARMS = {
    "removed": shutil.rmtree,
    "moved": lambda place: place.rename(f"{place}.moved"),
    "replaced": _replace_folder,
}


@pytest.mark.product
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_folder_is_gone_says_so_on_all_ranks(ranks, tmp_path):
    cases = [("removed", 1), ("moved", 3), ("replaced", 2), ("removed", 4)]
    for rank, texts in enumerate(run_ranks(_run_and_lose, ranks, str(tmp_path), cases, timeout_s=60)):
        for number, text in enumerate(texts):
            assert text.startswith(f"[rank {rank}/{ranks}] {tmp_path / str(number)}: the files of the run cannot be")
            why = "was replaced by another file" if cases[number][0] == "replaced" else "was removed"
            assert f"metrics.jsonl {why}" in text
    # Nothing was saved into a folder that somebody had removed.
    assert not (tmp_path / "0").exists()
    assert not (tmp_path / "3").exists()


def test_a_line_that_cannot_be_written_is_told_as_an_error(tmp_path, monkeypatch):
    def refuse(self, kind, record):
        with self._noted():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunFiles, "_append", refuse)
    with pytest.raises(RuntimeError, match=r"cannot be written: .*metrics.jsonl cannot be written \(No space left"):
        train(load_config(overrides=[*SMALL, f"run.folder={tmp_path}", "run.ranks=1"]), _Listener())


def test_copies_are_compared_every_so_many_steps(tmp_path, monkeypatch):
    compared = []
    monkeypatch.setattr(zs.Zero, "check_copies", lambda zero: compared.append(zero.trace.events[-1].step + 1))
    _run(tmp_path, ["run.ranks=1", "zero.check_every=2"])
    _run(tmp_path, ["run.ranks=1", "zero.check_every=0", "run.name=never"])
    assert compared == [2, 4]


def _train_otherwise(folder, overrides):
    """Train with settings that one rank does not share. Runs on a rank."""
    return _run(folder, overrides if dist.get_rank() == 1 else [])


@pytest.mark.product
@pytest.mark.parametrize(
    ("override", "lines"),
    [
        ("train.learning_rate=0.5", ["train.learning_rate=", "train.learning_rate=0.5"]),
        ("run.seed=9", ["seed=1", "seed=9"]),
        ("run.name=other", ["run.name='default'", "run.name='other'"]),
    ],
)
def test_ranks_with_other_settings_say_which_before_anything_is_written(tmp_path, override, lines):
    with pytest.raises(RankFailure) as failure:
        run_ranks(_train_otherwise, 2, tmp_path, [override])
    for error in failure.value.errors.values():
        assert error.type_name == "RankMismatchError"
        assert all(f"rank {rank}: {line}" in error.message for rank, line in enumerate(lines))
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_run(tmp_path):
    run = _run(tmp_path, ["run.ranks=1", "run.name=mine", "train.warmup_fraction=0.5"])
    folder = tmp_path / "mine"
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lease", "LATEST", "config.toml", "metrics.jsonl", "step-00000004", "summary.json",
    ]  # fmt: skip
    config = load_config(folder / "config.toml")
    assert (config.model.depth, config.train.steps, config.train.batch) == (1, 4, config.gpt.batch)

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["step", "step", "eval", "step", "step", "eval"]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["loss"] for line in steps] == run["losses"]
    assert steps[0]["learning_rate"] == pytest.approx(steps[1]["learning_rate"] / 2)
    for line in steps:
        assert line["grad_norm"] > 0
        assert line["tokens_per_s"] == pytest.approx(config.train.batch * 32 / line["step_s"])
        assert line["resident_bytes"]["parameters"] == 4 * run["summary"]["parameters_numel"]

    summary = json.loads((folder / "summary.json").read_text())
    assert summary == run["summary"]
    assert summary["bits_per_byte"] == lines[-1]["bits_per_byte"]
    assert summary["final_heldout_loss"] == pytest.approx(summary["bits_per_byte"] * math.log(2))
    assert summary["final_train_loss"] == pytest.approx(sum(run["losses"]) / 4)
    assert summary["tokens"] == 4 * config.train.batch * 32
    assert len(summary["sample"].encode()) >= len("The ") + 8
    assert set(summary["versions"]) == {"python", "torch", "zeroshard"}
    assert len(summary["data"]["sha256"]) == 64


@pytest.mark.rotates
def test_two_runs_are_equal_bit_for_bit(tmp_path):
    first, second = _run_several(tmp_path, [["run.ranks=1"]] * 2)
    assert first["losses"] == second["losses"]
    assert first["summary"]["sample"] == second["summary"]["sample"]


def test_learning_rate_rises_in_a_line_and_falls_as_a_cosine():
    shape = {"steps": 110, "warmup_fraction": 10 / 110, "final_fraction": 0.1}
    assert learning_rate_factor(0, **shape) == pytest.approx(0.1)
    assert learning_rate_factor(9, **shape) == learning_rate_factor(10, **shape) == 1.0
    assert learning_rate_factor(60, **shape) == pytest.approx(0.55)
    assert learning_rate_factor(110, **shape) == pytest.approx(0.1)
    assert learning_rate_factor(0, steps=1, warmup_fraction=0.0, final_fraction=0.1) == 1.0
