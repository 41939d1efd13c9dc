"""Models of transformers: loaded from a folder, called as they would call themselves, trained, refused by name."""

import dataclasses
import json
import math
import shutil
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import zeroshard as zs
from zeroshard.checkpoint.folders import export
from zeroshard.testing import run_ranks
from zeroshard.train.config import load_config
from zeroshard.train.loop import train
from zeroshard.train.models.hf import load_hf
from zeroshard.train.run import prepare
from zeroshard.train.text import open_source
from zeroshard.train.tokenizer import train_tokenizer

VOCABULARY = 300
SMALL = [
    "model.context=16",
    "train.steps=3",
    "train.batch=4",
    "train.eval_bytes=300",
    "run.sample_bytes=8",
    "zero.watchdog_s=20",
]


def _config(kind="llama", **changes):
    common = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        shape = {"n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 2}
        return transformers.GPT2Config(**common | shape | changes)
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "hrm_text":
        cycles = {"num_layers_per_stack": 1, "num_key_value_heads": 2, "max_position_embeddings": 32}
        return transformers.HrmTextConfig(**common | shape | cycles | changes)
    if kind == "bert":
        return transformers.BertConfig(**common | shape | {"max_position_embeddings": 32} | changes)
    shape |= {"num_key_value_heads": 1, "max_position_embeddings": 32}
    if kind == "mixtral":
        shape |= {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True}
        return transformers.MixtralConfig(**common | shape | {"router_aux_loss_coef": 0.5} | changes)
    return transformers.LlamaConfig(**common | shape | {"dtype": "bfloat16"} | changes)


def _save(folder, kind="llama", *, has_weights=False, **changes):
    """Write a model's folder, with a tokenizer; return its path."""
    config = _config(kind, **changes)
    if has_weights:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    text = next(open_source().documents()).decode()
    train_tokenizer([text[:20_000]], VOCABULARY, folder / "learned.json")
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "learned.json"), eos_token="<|endoftext|>"
    ).save_pretrained(folder)
    return str(folder)


def _load(folder):
    """Load a model as a run does, and give it its values."""
    language = load_hf(folder, context=16, vocabulary=VOCABULARY)
    zs.shard(language.module, stage=0, weights=language.weights)
    return language


def _train(folder, overrides):
    """Train without a terminal. Runs on a rank."""
    settings = [*SMALL, f"run.folder={folder}/runs", f"model.source=hf:{folder}", *overrides]
    return dataclasses.asdict(train(load_config(overrides=settings), _Nobody()))


class _Nobody:
    """A reporter that listens to nothing."""

    def started(self, *told):
        pass

    stepped = evaluated = saving = saved = finished = started


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral"])
def test_loss_is_the_models_own(kind, tmp_path):
    torch.manual_seed(0)
    language = _load(_save(tmp_path, kind))
    language.module.eval()
    window = torch.randint(0, VOCABULARY, (2, 17))
    targets = window[:, 1:].clone()
    targets[:, -1] = -1  # its own loss has no target for the last place
    expected = language.module(input_ids=window[:, :-1], labels=window[:, :-1]).loss
    torch.testing.assert_close(language.compute_loss(window[:, :-1], targets), expected)
    assert language.compute_logits(window).shape == (2, 17, VOCABULARY)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral", "hrm_text"])
def test_weights_are_loaded_in_fp32_unit_by_unit(kind, tmp_path):
    """Of a Mixtral the files have experts one by one, which the model stacks; of an HRM the projections fused."""
    folder = _save(tmp_path, kind, has_weights=True)
    _check_loaded(folder, transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def test_weights_of_a_base_model_are_found_without_its_prefix(tmp_path):
    folder = _save(tmp_path, "gpt2")
    transformers.GPT2Model(_config("gpt2")).save_pretrained(folder)
    _check_loaded(folder, transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def _check_loaded(folder, expected):
    language = load_hf(folder, context=16, vocabulary=VOCABULARY)
    assert all(p.is_meta for p in language.module.parameters())
    zs.shard(language.module, stage=0, weights=language.weights)
    saved, loaded = expected.state_dict(), language.module.state_dict()
    assert loaded.keys() == saved.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, saved[name].float()), name
    assert "weights from" in language.description
    assert language.module.training


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (
            "llama",
            lambda state: state.pop("lm_head.weight"),
            r"has no 'lm_head\.weight' \(300, 24\).*Nothing is initialized at random beside weights from files",
        ),
        (
            "mixtral",
            lambda state: state.pop("model.layers.1.block_sparse_moe.experts.1.w2.weight"),
            r"'model\.layers\.1\.mlp\.experts\.down_proj' has shape \(1, 24, 40\) in .* \(from 1 tensor\(s\), "
            r"'model\.layers\.1\.block_sparse_moe\.experts\.0\.w2\.weight' first\) and \(2, 24, 40\) in the model",
        ),
        (
            "mixtral",
            lambda state: state.pop("model.layers.1.block_sparse_moe.experts.1.w3.weight"),
            r"'model\.layers\.1\.mlp\.experts\.gate_up_proj' from 3 tensor\(s\), .*The files are incomplete",
        ),
        (
            "llama",
            lambda state: state.update({"model.score.weight": torch.zeros(2)}),
            r"holds 1 tensor\(s\) that the model has not, 'model\.score\.weight' first",
        ),
    ],
)
def test_weights_that_give_too_little_or_too_much_are_refused_by_name(kind, change, words, tmp_path):
    folder = _save(tmp_path, kind, has_weights=True)
    state = load_file(tmp_path / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=words):
        _load(folder)


def test_what_transformers_drops_is_dropped(tmp_path):
    folder = _save(tmp_path, "llama", has_weights=True)
    state = load_file(tmp_path / "model.safetensors")
    # Files of older versions hold this buffer in every layer.
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    _load(folder)


def test_without_weights_the_seed_decides(tmp_path):
    folder = _save(tmp_path)
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(_load(folder).module.lm_head.weight)
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    assert states[0].dtype == torch.float32


def test_neither_embeddings_nor_heads_tied_to_them_decay(tmp_path):
    language = load_hf(_save(tmp_path, "gpt2"), context=16, vocabulary=VOCABULARY)
    names = {id(p): name for name, p in language.module.named_parameters()}
    decayed = {names[id(p)] for p in language.decayed()}
    assert {name.split(".")[-2] for name in decayed} == {"c_attn", "c_proj", "c_fc"}
    assert all(name.endswith(".weight") for name in decayed)
    assert len(decayed) + len(list(language.undecayed())) == len(names)


@pytest.mark.rotates
def test_two_ranks_train_as_one_does(tmp_path):
    folder = _save(tmp_path)
    (two, other) = run_ranks(_train, 2, folder, ["run.ranks=2"])
    one = _train(folder, ["run.ranks=1", "run.name=one"])
    assert two["bits_per_byte"] == other["bits_per_byte"]
    # Another order of the same sums: fp32's 2**-24 each, some hundreds of times over.
    assert two["bits_per_byte"] == pytest.approx(one["bits_per_byte"], rel=1e-5)
    assert two["final_train_loss"] == pytest.approx(one["final_train_loss"], rel=1e-5)
    assert two["final_heldout_loss"] == pytest.approx(math.log(VOCABULARY), rel=0.05)
    assert two["data"] == one["data"]
    assert (two["data"]["vocabulary"], two["data"]["tokenizer"], two["depth"]) == (VOCABULARY, folder, None)
    assert two["model"].startswith("LlamaForCausalLM, initialized from ")
    assert two["sample"].startswith("The ")
    for of_rank in two["ranks"]:
        predicted = of_rank["predicted_bytes"]
        assert of_rank["resident_bytes"] | {"transient": predicted["transient"]} == predicted
        # The two largest units, which are never whole at once here: they are the first and the last.
        assert 0 < of_rank["peak_bytes"]["transient"] <= predicted["transient"]


def test_dropout_rests_while_held_out_text_is_scored(tmp_path):
    settings = ["run.ranks=1", "train.steps=1", "train.learning_rate=1e-12"]
    folder = _save(tmp_path, "gpt2", has_weights=True)
    with_dropout = _train(folder, settings)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert config["resid_pdrop"] > 0
    config |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    without = _train(folder, [*settings, "run.name=without"])
    assert with_dropout["final_train_loss"] != without["final_train_loss"]
    assert with_dropout["bits_per_byte"] == pytest.approx(without["bits_per_byte"], rel=1e-9)


def _train_in_parts(folder):
    """Train at once, and again in two parts, the first of which ends after one step. Runs on a rank."""
    asked = []
    config = load_config(overrides=[*SMALL, f"run.folder={folder}/runs", f"model.source=hf:{folder}", "run.name=parts"])
    train(config, _Nobody(), lambda: asked.append(1) or True)
    return _train(folder, ["run.name=whole"]), dataclasses.asdict(train(config, _Nobody())), len(asked)


@pytest.mark.rotates
def test_dropout_draws_the_same_after_a_run_is_gone_on_with(tmp_path):
    for whole, parts, asked in run_ranks(_train_in_parts, 2, _save(tmp_path, "gpt2", has_weights=True)):
        assert (parts["resumed_at"], asked) == ([1], 1)
        for key in ("steps", "final_train_loss", "final_heldout_loss", "sample"):
            assert parts[key] == whole[key], key


def _prepare(folder, *overrides):
    prepare(load_config(overrides=[*SMALL, f"model.source=hf:{folder}", f"run.folder={folder}/runs", *overrides]))


def test_folders_that_do_not_fit_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"model\.source: there is no folder '/nowhere'"):
        _prepare("/nowhere")
    with pytest.raises(ValueError, match=r"data\.tokenizer: there is no file or folder '/nowhere'"):
        _prepare(_save(tmp_path), "data.tokenizer=/nowhere")
    folder = _save(tmp_path)
    _prepare(folder)
    with pytest.raises(
        ValueError, match=r"max_position_embeddings is 32, but model\.context=33; set a smaller context"
    ):
        _prepare(folder, "model.context=33")
    with pytest.raises(ValueError, match=r"no .*/empty/config\.json"):
        (tmp_path / "empty").mkdir()
        _prepare(f"{folder}/empty", f"data.tokenizer={folder}")
    _config(vocab_size=VOCABULARY - 1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"vocab_size is 299, but data\.tokenizer has 300 tokens"):
        _prepare(folder)
    transformers.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds a 'vit', which is no causal language model"):
        _prepare(folder)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}', "utf-8")
    with pytest.raises(ValueError, match=r"holds no model of transformers: .*unheard-of"):
        _prepare(folder)


def test_a_folder_without_a_tokenizer_reads_bytes(tmp_path):
    _config().save_pretrained(tmp_path)
    told = _train(str(tmp_path), ["run.ranks=1", "train.steps=1"])
    assert (told["data"]["tokenizer"], told["data"]["vocabulary"]) == ("bytes", 256)


def test_an_export_of_a_run_has_configuration_and_tokenizer(tmp_path):
    folder = tmp_path / "model"
    _train(_save(folder), ["run.ranks=1"])
    run = (folder / "runs" / "default").rename(tmp_path / "run")
    shutil.rmtree(folder)  # the run needs its model's folder no longer
    export(zs.latest(run), tmp_path / "hf")
    assert not (tmp_path / "hf" / "learned.json").exists()
    _, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", local_files_only=True, output_loading_info=True
    )
    assert not any(found.values())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert len(tokenizer) == VOCABULARY


def test_an_export_of_a_run_with_a_tokenizer_in_a_file_has_that_one(tmp_path):
    folder = tmp_path / "model"
    _train(_save(folder), ["run.ranks=1", f"data.tokenizer={folder}/learned.json"])
    run = folder / "runs" / "default"
    assert {path.name for path in (run / "export").iterdir()} == {"config.json", "tokenizer.json"}
    assert (run / "export" / "tokenizer.json").read_bytes() == (folder / "learned.json").read_bytes()


def test_pickled_weights_are_refused(tmp_path):
    folder = _save(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"the weights in .* are pickled"):
        _prepare(folder)


def test_encoders_are_refused(tmp_path):
    folder = _save(tmp_path, "bert")
    with pytest.raises(ValueError, match=r"a token sees those after it, so it has nothing to predict"):
        _train(folder, ["run.ranks=1"])
    _save(tmp_path, "bert", is_decoder=True)
    assert _train(folder, ["run.ranks=1", "train.steps=1"])["model"].startswith("BertLMHeadModel")


def test_missing_extra_is_named(tmp_path, monkeypatch):
    folder = _save(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"model\.source=hf:.* needs 'transformers'; .*\"zeroshard\[transformers\]\""):
        _prepare(folder, f"data.tokenizer={folder}/learned.json")
