"""Runs that are cut off and gone on with: the same bits as one that was not, and nothing overwritten."""

import fcntl
import json
import os
import shutil
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from zeroshard.checkpoint.diff import diff
from zeroshard.testing import RankFailure, run_ranks
from zeroshard.train.config import differences, load_config
from zeroshard.train.lease import Lease
from zeroshard.train.loop import train
from zeroshard.train.metrics import RunFiles
from zeroshard.train.models.gpt import GPT, GPTConfig
from zeroshard.train.resume import _reschedule, check_folder, is_complete, keep_export_files
from zeroshard.train.run import learning_rate_factor
from zeroshard.train.settings import Train

SMALL = [
    "model.depth=1",
    "model.context=32",
    "train.batch=12",
    "train.steps=6",
    "train.eval_every=2",
    "train.eval_bytes=500",
    "run.sample_bytes=8",
    "checkpoint.every_s=0",
    "zero.watchdog_s=20",
]


class _Cut(Exception):
    """Stands for whatever ends a rank."""


class _Silent:
    """A reporter that takes everything, and may end its rank after some step or before some checkpoint."""

    def __init__(self, cut_after=0, cut_at_save=0):
        self._cut_after, self._cut_at_save = cut_after, cut_at_save
        self.saved_steps, self.done = [], -1

    def started(self, start):
        self.start, self.done = start, start.done

    def stepped(self, record):
        if record.step == self._cut_after:
            raise _Cut

    def evaluated(self, record):
        pass

    def saving(self, step):
        if step == self._cut_at_save:
            raise _Cut

    def saved(self, step, path):
        self.saved_steps.append(step)

    def finished(self, summary):
        pass


def _run(folder, name, *overrides, stop_after=0, **cuts):
    """Start or go on with a run; return the steps after which it was saved. Runs on a rank or in this process."""
    reporter, asked = _Silent(**cuts), []

    def is_stop_wanted():
        asked.append(1)
        is_asking = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        return is_asking and len(asked) == stop_after

    world = dist.get_world_size() if dist.is_initialized() else 1
    settings = [*SMALL, f"run.folder={folder}", f"run.name={name}", f"run.ranks={world}", *overrides]
    train(load_config(overrides=settings), reporter, is_stop_wanted)
    return reporter.saved_steps


def _whole_and_in_parts(folder, settings):
    """Make one run at once, and one in three starts, the second of which ends after a step with an evaluation."""
    for overrides in settings:
        name = overrides[0].replace("=", "-")
        _run(folder, name, *overrides)
        _run(folder, f"{name}-parts", *overrides, stop_after=1)
        _run(folder, f"{name}-parts", *overrides, stop_after=3)
        _run(folder, f"{name}-parts", *overrides)


def _run_named(folder, name, overrides, cuts):
    """Make a run, or as much of it as `cuts` lets. Runs on a rank."""
    _run(folder, name, *overrides, **cuts)


def _records(folder, *volatile):
    """Return the lines of a run without what a clock decides."""
    clocks = {"step_s", "tokens_per_s", "eval_s", "time", *volatile}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in clocks} for line in lines]


def _assert_same_end(one, other):
    """Require that two runs ended with the same bits: parameters, states, losses, evaluations, sample."""
    assert [found for found in diff(zs.latest(one), zs.latest(other)) if not found.name.endswith("extra.json")] == []
    assert _records(one, "peak_bytes") == _records(other, "peak_bytes")
    first, second = (json.loads((folder / "summary.json").read_text()) for folder in (one, other))
    for key in ("steps", "tokens", "sample", "final_train_loss", "final_heldout_loss", "bits_per_byte"):
        assert first[key] == second[key], key


@pytest.mark.rotates
def test_a_run_in_parts_has_the_bits_of_one_that_was_not(tmp_path):
    settings = [["zero.stage=3"], ["zero.stage=1", "train.precision=bf16"], ["train.precision=fp16"]]
    run_ranks(_whole_and_in_parts, 2, str(tmp_path), settings)
    for first, *_ in settings:
        whole = tmp_path / first.replace("=", "-")
        parts = whole.with_name(f"{whole.name}-parts")
        _assert_same_end(whole, parts)
        summary = json.loads((parts / "summary.json").read_text())
        assert summary["resumed_at"] == [1, 4]
        assert 0 < summary["train_s"] < summary["wall_s"]
        steps = [line["step"] for line in _records(parts) if line["kind"] == "step"]
        assert steps == [1, 2, 3, 4, 5, 6]
        for of_rank in summary["ranks"]:
            sent = {kind: of_rank["sent_bytes"][kind] for kind in ("gather", "reduce")}
            assert sent == of_rank["predicted_sent_bytes"]


def _islands_in_parts(folder):
    """Make a run of two islands at once, and one in two starts, which begins again at an exchange. Runs on a rank."""
    _run(folder, "whole", "run.outer=2", "run.outer_bits=8")
    _run(folder, "parts", "run.outer=2", "run.outer_bits=8", stop_after=4)
    return _run(folder, "parts", "run.outer=2", "run.outer_bits=8")


@pytest.mark.rotates
def test_islands_in_parts_have_the_bits_of_a_run_that_was_not(tmp_path):
    assert run_ranks(_islands_in_parts, 2, str(tmp_path))[0] == [6]
    _assert_same_end(tmp_path / "whole", tmp_path / "parts")
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    for of_rank in summary["ranks"]:
        assert of_rank["sent_bytes"]["gather"] == of_rank["sent_bytes"]["reduce"] == 0
        # Three exchanges of all parameters, at 8 bits and with their scales.
        assert 3.0 < of_rank["sent_bytes"]["replicate"] / summary["parameters_numel"] < 3.1


@pytest.mark.rotates
def test_a_run_goes_on_at_any_rank_count_and_stage_on_the_same_curve(tmp_path):
    _run(tmp_path, "oracle", "train.clip=0")
    run_ranks(_run_named, 4, str(tmp_path), "run", ["zero.stage=3", "train.clip=0"], {"stop_after": 2})
    run_ranks(_run_named, 3, str(tmp_path), "run", ["zero.stage=2", "train.clip=0"], {"stop_after": 2})
    _run(tmp_path, "run", "zero.stage=0", "train.clip=0")
    oracle, moved = (_records(tmp_path / name, "resident_bytes", "peak_bytes") for name in ("oracle", "run"))
    assert [line["step"] for line in moved] == [line["step"] for line in oracle]
    # Another order of the same sums: fp32's 2**-24 each, some hundreds of times over.
    assert [line["loss"] for line in moved] == pytest.approx([line["loss"] for line in oracle], rel=1e-5)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["resumed_at"] == [2, 4]


@pytest.mark.product
@pytest.mark.parametrize("cuts", [{"cut_after": 5}, {"cut_at_save": 4}, {"cut_after": 1}], ids=str)
def test_steps_after_the_last_checkpoint_are_made_again_and_told_once(tmp_path, cuts):
    every = ["checkpoint.every_steps=2"]
    with pytest.raises(RankFailure) as caught:
        run_ranks(_run_named, 2, str(tmp_path), "run", every, cuts)
    assert caught.value.errors[0].type_name == "_Cut"
    lost = _records(tmp_path / "run")
    run_ranks(_run_named, 2, str(tmp_path), "run", every, {})
    run_ranks(_run_named, 2, str(tmp_path), "whole", every, {})
    _assert_same_end(tmp_path / "whole", tmp_path / "run")
    assert len(lost) < len(_records(tmp_path / "run")) == 9


def _saves(folder):
    """Return the steps after which runs with different wishes were saved. Runs on a rank."""
    return [
        _run(folder, "steps", "checkpoint.every_steps=4"),
        _run(folder, "time", "checkpoint.every_s=1e-6"),
        _run(folder, "end"),
        _run(folder, "both", "checkpoint.every_steps=4", "checkpoint.every_s=3600"),
    ]


def test_when_a_run_is_saved(tmp_path):
    told, untold = run_ranks(_saves, 2, str(tmp_path))
    assert told == [[4, 6], [1, 2, 3, 4, 5, 6], [6], [4, 6]]
    assert untold == [[]] * 4


def test_older_checkpoints_go_as_newer_ones_come(tmp_path):
    _run(tmp_path, "run", "checkpoint.every_steps=1", "checkpoint.keep=3")
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == [f"step-0000000{n}" for n in (4, 5, 6)]


def test_a_complete_run_is_known(tmp_path):
    config = load_config(overrides=[*SMALL, f"run.folder={tmp_path}", "run.name=run", "run.ranks=1"])
    assert not is_complete(config)
    _run(tmp_path, "run", stop_after=2)
    assert not is_complete(config)
    _run(tmp_path, "run")
    assert is_complete(config)
    before = _records(tmp_path / "run")
    assert _run(tmp_path, "run") == []
    assert _records(tmp_path / "run") == before
    assert _run(tmp_path, "run", "train.steps=8") == [8]
    assert [line["step"] for line in _records(tmp_path / "run")] == [1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8]


def test_a_run_that_was_stopped_after_its_last_step_is_not_complete(tmp_path):
    config = load_config(overrides=[*SMALL, f"run.folder={tmp_path}", "run.name=run", "run.ranks=1", "train.steps=2"])
    _run(tmp_path, "run", stop_after=2)
    assert not is_complete(config)
    _run(tmp_path, "run", "train.steps=2")
    assert is_complete(config)
    assert [line["kind"] for line in _records(tmp_path / "run")] == ["step", "step", "eval"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["final_heldout_loss"] is not None


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("run.seed=2", "run.seed is 2, and was 1"),
        ("model.depth=2", "model.depth is 2, and was 1"),
        ("train.batch=6", "train.batch is 6, and was 12"),
        ("train.beta1=0.5", "train.beta1 is 0.5, and was 0.9"),
        ("train.precision=bf16", 'train.precision is "bf16", and was "fp32"'),
        ("data.heldout_fraction=0.2", "data.heldout_fraction is 0.2, and was 0.1"),
    ],
)
def test_other_settings_are_refused_and_named(tmp_path, override, text):
    common = [*SMALL, f"run.folder={tmp_path}", "run.ranks=1"]
    _run(tmp_path, "default", stop_after=2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    config = load_config(overrides=[*common, override])
    for start in (lambda: check_folder(config), lambda: train(config, _Silent())):
        with pytest.raises(ValueError, match="is of a run with other settings") as caught:
            start()
        assert text in str(caught.value)
    (tmp_path / "default" / "config.toml").unlink()
    check_folder(config)  # where somebody took the file away, the checkpoint still knows
    with pytest.raises((ValueError, zs.CheckpointError)) as caught:
        train(config, _Silent())
    assert text in str(caught.value) or "step-00000002 is not of this model" in str(caught.value)
    for path, content in before.items():
        assert path.name in ("config.toml", ".lease") or path.read_bytes() == content, path


def test_what_does_not_change_the_training_may_change(tmp_path):
    free = [
        "zero.stage=1", "train.accumulation=2", "zero.no_sync=true", "run.ranks=2", "train.steps=9",
        "checkpoint.every_s=5", "train.eval_every=0", "run.prompt=x", "data.cache=/x", "run.name=n",
        "zero.watchdog_s=9", "train.learning_rate=0.5", "train.warmup_fraction=0.5", "train.clip=0",
    ]  # fmt: skip
    before = load_config(overrides=SMALL)
    assert differences(before, load_config(overrides=[*SMALL, *free])) == []


def test_a_resume_with_another_schedule_follows_it_and_says_so(tmp_path):
    _run(tmp_path, "run", "train.final_fraction=0.5", stop_after=2)
    before = tmp_path / "run" / "step-00000002"
    told = _Silent()
    changed = ["train.learning_rate=1e-9", "train.steps=8", "train.weight_decay=0.05", "train.final_fraction=0.5"]
    config = load_config(overrides=[*SMALL, f"run.folder={tmp_path}", "run.name=run", "run.ranks=1", *changed])
    train(config, told)
    assert {text.split()[0] for text in told.start.changes} == {
        "train.learning_rate", "train.steps", "train.weight_decay"
    }  # fmt: skip
    steps = [line for line in _records(tmp_path / "run") if line["kind"] == "step"]
    for line in steps[2:]:
        factor = learning_rate_factor(line["step"] - 1, steps=8, warmup_fraction=0.05, final_fraction=0.5)
        assert line["learning_rate"] == pytest.approx(1e-9 * factor, rel=1e-12)
    # With such a rate the parameters stay where they were.
    first, last = (_weights(path) for path in (before, zs.latest(tmp_path / "run")))
    assert all(torch.allclose(first[name], last[name], rtol=0, atol=1e-6) for name in first)
    assert steps[2]["loss"] != steps[1]["loss"]


@pytest.mark.parametrize(("before", "now"), [(0.0, 5.0), (5.0, 0.0)])
def test_a_weight_decay_that_was_or_becomes_0_follows_the_settings(before, now, tmp_path):
    _run(tmp_path, "kept", f"train.weight_decay={before}", stop_after=1)
    shutil.copytree(tmp_path / "kept", tmp_path / "changed")
    _run(tmp_path, "kept", f"train.weight_decay={before}", stop_after=1)
    _run(tmp_path, "changed", f"train.weight_decay={now}", stop_after=1)
    # The gradients are the same, so only what decays differs.
    kept, changed = (_weights(zs.latest(tmp_path / name)) for name in ("kept", "changed"))
    matrices = {name for name, weight in kept.items() if not torch.equal(weight, changed[name])}
    assert matrices == {name for name in kept if name.startswith("blocks.") and kept[name].dim() == 2}


def _weights(path):
    """Return the parameters of a checkpoint of a GPT of depth 1."""
    model = GPT(GPTConfig(1, 32))
    zs.shard(model, stage=0).load(path, model_only=True)
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_steps_are_not_taken_back(tmp_path):
    _run(tmp_path, "run", stop_after=4)
    config = load_config(overrides=[*SMALL, f"run.folder={tmp_path}", "run.name=run", "run.ranks=1", "train.steps=3"])
    with pytest.raises(ValueError, match=r"train.steps=3: .* has made 4 steps, .* give --steps 4 or more"):
        check_folder(config)


def test_another_text_is_refused(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one two three " * 400, "utf-8")
    _run(tmp_path, "run", f"data.path={text}", stop_after=2)
    moved = text.rename(tmp_path / "moved.txt")
    _run(tmp_path, "run", f"data.path={moved}", stop_after=1)
    moved.write_text("one two three " * 399 + "four five six ", "utf-8")
    with pytest.raises(ValueError, match="step-00000003 was trained on another text or other tokens: sha256 differs"):
        _run(tmp_path, "run", f"data.path={moved}")


def test_another_column_of_equal_length_is_refused(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "one two three ", "other": "ENO OWT EERHT "}\n' * 300, "utf-8")
    _run(tmp_path, "run", f"data.path={text}", stop_after=2)
    with pytest.raises(ValueError, match="was trained on another text or other tokens: tokens_sha256 differs"):
        _run(tmp_path, "run", f"data.path={text}", "data.column=other")


def test_a_checkpoint_without_a_hash_of_tokens_is_resumed(tmp_path, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr("zeroshard.train.resume._CONTENTS", ("sha256", "tokenizer_sha256"))
        _run(tmp_path, "run", stop_after=2)
    assert _run(tmp_path, "run") == [6]


def test_a_new_run_overwrites_nothing(tmp_path):
    config = load_config(overrides=[*SMALL, f"run.folder={tmp_path}", "run.name=run", "run.ranks=1"])
    check_folder(config, is_fresh=True)
    _run(tmp_path, "run", stop_after=1)
    check_folder(config)
    with pytest.raises(ValueError, match=r"--fresh: .* holds a run, and runs are not overwritten; give another"):
        check_folder(config, is_fresh=True)


def test_a_launcher_that_restarts_its_ranks_resumes_what_it_began(tmp_path):
    config = load_config(overrides=[*SMALL, f"run.folder={tmp_path}", "run.name=run", "run.ranks=1"])
    check_folder(config, is_fresh=True, launcher="one")
    _run(tmp_path, "run", stop_after=1)
    check_folder(config, is_fresh=True, launcher="one")
    check_folder(config, launcher="other")
    for launcher in ("", "other", "other"):
        with pytest.raises(ValueError, match=r"--fresh: .* holds a run, and runs are not overwritten"):
            check_folder(config, is_fresh=True, launcher=launcher)


def test_a_folder_is_for_one_process_at_a_time(tmp_path):
    config = load_config(overrides=[*SMALL, f"run.folder={tmp_path}", "run.name=run", "run.ranks=1"])
    _run(tmp_path, "run", stop_after=1)
    holder = (tmp_path / "run" / ".lease").open("r+")
    fcntl.flock(holder, fcntl.LOCK_EX)
    for start in (lambda: check_folder(config), lambda: train(config, _Silent())):
        with pytest.raises(ValueError, match="is in use by ") as caught:
            start()
        assert f"process {os.getpid()} on {socket.gethostname()}" in str(caught.value)
    holder.close()
    check_folder(config)


def test_a_check_of_another_start_is_waited_for(tmp_path):
    with (tmp_path / ".lease").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        end = threading.Timer(0.3, other.close)
        end.start()
        with Lease(tmp_path):
            end.join()


@pytest.mark.rotates
def test_a_damaged_checkpoint_is_passed_over_and_set_aside(tmp_path):
    _run(tmp_path, "whole", "checkpoint.every_steps=2")
    _run(tmp_path, "run", "checkpoint.every_steps=2", stop_after=4)
    newest = tmp_path / "run" / "step-00000004"
    (file, *_) = newest.glob("params-*")
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    (tmp_path / "run" / ".tmp-step-00000005-dead").mkdir()
    with pytest.warns(UserWarning, match="step-0000000. is") as told:
        _run(tmp_path, "run", "checkpoint.every_steps=2")
    assert any(f"{file.name}" in str(one.message) for one in told)
    assert any("step-00000004 is damaged; moved to" in str(one.message) for one in told)
    _assert_same_end(tmp_path / "whole", tmp_path / "run")
    left = [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]
    assert len(left) == 2 and ".lease" in left
    assert (tmp_path / "run" / next(n for n in left if n != ".lease") / file.name).read_bytes() == damaged


@pytest.mark.parametrize("lost", ["extra.json", "manifest.json"])
def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(tmp_path, lost):
    _run(tmp_path, "run", stop_after=2)
    (tmp_path / "run" / "step-00000002" / lost).unlink()
    with pytest.raises(zs.CheckpointError, match="no checkpoint is complete"):
        _run(tmp_path, "run")


def test_half_a_line_of_metrics_is_left_out(tmp_path):
    _run(tmp_path, "whole")
    _run(tmp_path, "run", stop_after=3)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 4, "lo')
    _run(tmp_path, "run")
    _assert_same_end(tmp_path / "whole", tmp_path / "run")


def test_lines_are_on_the_disk_before_a_checkpoint(tmp_path, monkeypatch):
    order = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor):
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def watched_rename(source, target):
        order.append(Path(target).name)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    _run(tmp_path, "run")
    assert order.index("metrics.jsonl") < order.index("step-00000006")


def test_files_for_exports_stay_whole_on_a_full_disk(tmp_path, monkeypatch):
    source = tmp_path / "tokenizer.json"
    source.write_text("first")
    settings = {"folder": tmp_path, "model": SimpleNamespace(lora=None), "export_files": {source.name: source}}
    run = SimpleNamespace(config=SimpleNamespace(**settings))
    keep_export_files(run)

    def refuse(source, target):
        Path(target).touch()
        os.truncate(target, 0)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", refuse)
    keep_export_files(run)  # files that are whole are not written again
    source.write_text("other")
    with pytest.raises(OSError, match="No space left"):
        keep_export_files(run)
    assert {path.name: path.read_text() for path in (tmp_path / "export").iterdir()} == {"tokenizer.json": "first"}
    monkeypatch.undo()
    keep_export_files(run)
    assert (tmp_path / "export" / "tokenizer.json").read_text() == "other"


def test_both_rates_of_muon_follow_another_rate():
    before, now = Train(learning_rate=0.02), Train(learning_rate=0.005)
    matrix, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    groups = [{"params": [matrix], "use_muon": True}, {"params": [bias], "use_muon": False}]
    optimizer = zs.optim.Muon(groups, lr=0.02, adamw_lr=0.001)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    config = SimpleNamespace(train=now)
    run = SimpleNamespace(config=config, optimizer=optimizer, scheduler=scheduler, changes=("",), factor=lambda _: 0.5)
    _reschedule(run, before, [0.0, 0.0])
    assert scheduler.base_lrs == pytest.approx([0.005, 0.00025])
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.0025, 0.000125])


def test_records_up_to_a_checkpoint_stay(tmp_path):
    lines = [json.dumps({"kind": "step", "step": step}) + "\n" for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    with RunFiles(tmp_path, "", done=2):
        assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:2])
