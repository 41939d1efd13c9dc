"""Runs whose layers are split over ranks: losses of a run without, checkpoints, plans, and what cannot be split."""

import json
import re
from pathlib import Path

import pytest
import transformers

from zeroshard.testing import run_ranks
from zeroshard.train.config import SettingsError, load_config
from zeroshard.train.models import split_hf

from . import test_hf
from .test_cli import _main
from .test_loop import SMALL, _run_several
from .test_resume import _assert_same_end, _records, _run_named

GPT = ["model.depth=2", "train.clip=0.5"]


def _several(folder, ranks, *variants):
    """Train once for each list of settings, and return what rank 0 was told."""
    return run_ranks(_run_several, ranks, str(folder), [[f"run.ranks={ranks}", *one] for one in variants])[0]


def test_training_equals_that_of_whole_layers(tmp_path):
    """Also with odd shares of a batch, micro-batches, recomputation and offload; and predictions hold."""
    variants = [
        ["zero.stage=3", "zero.activations=recompute", "train.batch=5", "run.sample_bytes=5"],
        ["zero.stage=0", "train.accumulation=2", "zero.check_every=1"],
        ["zero.stage=2", "zero.offload=host", "train.precision=bf16", "train.optimizer=adamw8bit"],
    ]
    variants = [[*GPT, *one] for one in variants]
    split = _several(tmp_path / "split", 4, *[["run.tensor=2", *one] for one in variants])
    whole = _several(tmp_path / "whole", 1, *variants)
    # Sums have another order: fp32's 2**-24 each, some hundreds of times over. In bf16, 2**-8 each.
    for settings, one, other, rel in zip(variants, split, whole, (1e-5, 1e-5, 2e-2), strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=rel)
        assert one["summary"]["bits_per_byte"] == pytest.approx(other["summary"]["bits_per_byte"], rel=rel)
        for key in ("tokens", "data", "parameters_numel", *(["sample"] if rel < 1e-4 else [])):
            assert one["summary"][key] == other["summary"][key], key
        assert (one["summary"]["world_size"], one["summary"]["tensor"]) == (4, 2)
        columns = ("parameters", "gradients", "states", "padding")
        for of_rank in one["summary"]["ranks"]:
            held, predicted = ([of_rank[f"{kind}_bytes"][key] for key in columns] for kind in ("resident", "predicted"))
            assert held == predicted
        if "offload" not in str(settings):
            plan = one["summary"]["plan"]
            assert plan["predicted"]["resident_bytes"] == plan["measured"]["resident_bytes"]


@pytest.mark.rotates
def test_sixty_steps_follow_those_of_whole_layers(tmp_path):
    settings = [*GPT, "train.steps=60", "train.eval_every=0", "run.sample_bytes=0"]
    (split,) = _several(tmp_path / "split", 4, ["run.tensor=2", *settings])
    (whole,) = _several(tmp_path / "whole", 2, settings)
    assert len(split["losses"]) == 60
    assert split["losses"] == pytest.approx(whole["losses"], rel=1e-4)


def test_a_killed_run_resumes_with_its_bits_and_without_the_axis_on_its_curve(tmp_path):
    settings = ["model.depth=2", "checkpoint.every_steps=2"]
    split = ["run.tensor=2", *settings]
    run_ranks(_run_named, 2, str(tmp_path), "whole", split, {})
    for name in ("parts", "moved"):
        with pytest.raises(Exception, match="_Cut"):
            run_ranks(_run_named, 2, str(tmp_path), name, split, {"cut_after": 3})
    run_ranks(_run_named, 2, str(tmp_path), "parts", split, {})
    _assert_same_end(tmp_path / "whole", tmp_path / "parts")
    run_ranks(_run_named, 3, str(tmp_path), "moved", ["run.tensor=1", *settings], {})
    whole, moved = (
        [line["loss"] for line in _records(tmp_path / name) if line["kind"] == "step"] for name in ("whole", "moved")
    )
    assert moved == pytest.approx(whole, rel=1e-4)
    assert json.loads((tmp_path / "moved" / "summary.json").read_text())["resumed_at"] == [2]


QWEN = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}


def _save(folder, kind="llama", **changes):
    """Write the folder of a model; "qwen3" has norms of heads, whose gradients are sums over ranks."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        if kind == "qwen3":
            llama = test_hf._config
            shape = llama().to_dict() | QWEN
            keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
            shape = {key: shape[key] for key in (*keys, *QWEN)}
            patch.setattr(test_hf, "_config", lambda kind, **more: transformers.Qwen3Config(**shape | more))
        return test_hf._save(folder, kind, **changes)


@pytest.mark.product
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"num_key_value_heads": 2, "has_weights": True}),
        ("qwen3", {}),
        ("mixtral", {"num_key_value_heads": 2}),
    ],
    ids=["llama", "qwen3", "mixtral"],
)
def test_models_of_transformers_are_split_by_their_own_plans(kind, changes, tmp_path):
    folder = _save(tmp_path / kind, kind, **changes)
    for ranks, name, activations in ((1, "whole", "keep"), (2, "split", "recompute+partition")):
        settings = [f"run.ranks={ranks}", f"run.tensor={ranks}", f"zero.activations={activations}", f"run.name={name}"]
        run_ranks(test_hf._train, ranks, folder, settings)
    whole, split = (_records(Path(folder, "runs", name)) for name in ("whole", "split"))
    for key in ("loss", "grad_norm"):
        expected = [line[key] for line in whole if key in line]
        assert [line[key] for line in split if key in line] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["--tensor", "3", "--ranks", "4"],
            r"run\.tensor=3 does not divide run\.ranks=4; set run\.ranks to",
        ),
        (["tensor=0"], r"run\.tensor=0: .*greater than or equal to 1"),
        (["tensor=2", "--compile"], r"train\.compile_blocks=true with run\.tensor=2: .*leave out one"),
        (["tensor=2", "--optimizer", "muon"], r"train\.optimizer=muon needs whole matrices, and run\.tensor=2 .*adamw"),
        (["tensor=2", "ranks=4", "batch=1"], r"train\.batch=1 is below run\.ranks=4 / run\.tensor=2 .* to 2 or more"),
        (["tensor=2", "activations=recompute+partition"], r"zero\.activations=recompute\+partition with run\.tensor=2"),
        (["tensor=2", "residency=C4"], r"zero\.residency=C4 with run\.tensor=2: .*set zero\.activations without"),
        (["tensor=2", "--depth", "3"], r"run\.tensor=2 does not divide the number of heads, 3 \(model\.depth=3\)"),
        (["tensor=2", "--depth", "2", "context=33"], r"does not divide the number of tokens of model\.context, 33"),
    ],
)
def test_what_cannot_be_split_is_refused_before_ranks_start(settings, words, monkeypatch, capsys, tmp_path):
    status, _, told = _main(monkeypatch, capsys, "train", f"run.folder={tmp_path}", *settings)
    assert status == 2
    assert re.search(words, told), told
    assert not list(tmp_path.glob("*/step-*"))


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("gpt2", {}, r"run\.tensor=2: GPT2LMHeadModel has no base_model_tp_plan.*set run\.tensor=1"),
        (
            "mixtral",
            {"num_key_value_heads": 2, "intermediate_size": 41},
            r"does not divide each of 2 equal groups of the 82 rows of '\S*experts",
        ),
        ("llama", {}, r"run\.tensor=2 does not divide num_key_value_heads=1 of LlamaForCausalLM"),
        ("llama", {"attention_dropout": 0.1}, r"attention_dropout of LlamaForCausalLM is 0\.1.*config\.json"),
        ("llama", {"num_key_value_heads": 2, "intermediate_size": 41}, r"does not divide the 41 rows of '\S*gate_proj"),
    ],
    ids=["no plan", "groups", "heads", "dropout", "size"],
)
def test_models_of_transformers_that_cannot_be_split_are_refused(kind, changes, words, monkeypatch, capsys, tmp_path):
    folder = _save(tmp_path / kind, kind, **changes)
    settings = [f"run.folder={tmp_path}", "model.context=16", "--model", f"hf:{folder}", "--tensor", "2"]
    status, _, told = _main(monkeypatch, capsys, "train", *settings)
    assert status == 2
    assert re.search(words, told), told


def test_styles_that_are_not_supported_are_refused(monkeypatch, tmp_path):
    folder = _save(tmp_path / "llama", num_key_value_heads=2)
    plan = transformers.LlamaConfig.base_model_tp_plan | {"layers.*.mlp": "sequence_parallel"}
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_tp_plan", plan)
    words = r"the plan of LlamaForCausalLM has the style 'sequence_parallel' at 'model\.layers\.\*\.mlp', and"
    with pytest.raises(ValueError, match=words):
        test_hf._prepare(folder, "run.tensor=2")


def test_other_versions_of_transformers_are_refused(monkeypatch, tmp_path):
    folder = _save(tmp_path / "llama", num_key_value_heads=2)
    monkeypatch.setattr(split_hf, "_BEYOND", split_hf._FIRST)
    version = re.escape(transformers.__version__)
    with pytest.raises(ValueError, match=rf"models of transformers 5\.23 and 5\.24, and {version} .*pip install"):
        test_hf._prepare(folder, "run.tensor=2")


def _refusals(folder):
    """Return what a rank says of a model that cannot be split. Runs on a rank."""
    with pytest.raises(SettingsError) as error:
        _run_several(folder, [["model.depth=1", "run.ranks=2", "run.tensor=2"]])
    return str(error.value)


def test_all_ranks_refuse_alike(tmp_path):
    first, second = run_ranks(_refusals, 2, str(tmp_path))
    text = "run.tensor=2 does not divide the number of heads, 1 (model.depth=1); give a multiple of 2, or another"
    assert first == second == f"{text} run.tensor"


def test_plans_before_a_run_know_the_axis(monkeypatch, capsys, tmp_path):
    settings = [*SMALL[1:], "model.depth=2", "--ranks", "4", "--stage", "auto", f"run.folder={tmp_path}", "--dry-run"]
    plans = []
    for tensor in ("1", "2"):
        status, told, _ = _main(monkeypatch, capsys, "train", "--tensor", tensor, *settings)
        assert status == 0
        plans.append(re.search(r"# plan of a rank: parameters ([\d.]+) KiB, gradients ([\d.]+) KiB", told))
    assert load_config(overrides=["tensor=2"]).run.tensor == 2
    whole, split = ([float(one) for one in plan.groups()] for plan in plans)
    assert split == pytest.approx([one / 2 for one in whole], abs=3)
