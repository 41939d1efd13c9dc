"""Models by a text: functions by import path, configurations that no shape has, and tokens of a step."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from zeroshard.plan.given import inputs_of, longest_of, module_of
from zeroshard.plan.planning import make_plan
from zeroshard.plan.search import search
from zeroshard.plan.shape.shapes import NoShapeError, shape_of_config
from zeroshard.plan.traced import tokens_of

transformers = pytest.importorskip("transformers")
MODULE = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)), [torch.zeros(5, 64)]

def alone():
    return torch.nn.Linear(4, 4)

def wrong():
    return 3
"""
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
CONFIGURATIONS = {
    "gemma3_text": {**SMALL, "vocab_size": 100, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8},
    "vit": {**SMALL, "image_size": 16, "patch_size": 8, "architectures": ["ViTForImageClassification"]},
    "whisper": {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 100,
        "max_source_positions": 20, "max_target_positions": 16, "num_mel_bins": 8, "pad_token_id": 0,
        "decoder_start_token_id": 1, "architectures": ["WhisperForConditionalGeneration"],
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 100, "state_size": 4},
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 100,
           "decoder_start_token_id": 0},
}  # fmt: skip


def test_a_function_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    plan = make_plan("some_models:make", world_size=2, stage=1)
    assert plan.parameters_numel == 64 * 32 + 32 + 32 * 8 + 8
    assert plan.asked.tokens_per_step == 2 * 5
    more = make_plan("some_models:make", world_size=2, stage=1, batch_tokens=40)
    assert (more.asked.micro_batches, more.asked.tokens_per_step) == (4, 40)
    with pytest.raises(ValueError, match="batch_tokens=41 is not a multiple of 10"):
        make_plan("some_models:make", world_size=2, batch_tokens=41)
    model, inputs = module_of("some_models:alone")
    assert model.weight.is_meta
    assert inputs is None
    for text, message in (
        ("some_models:wrong", "returned a int, and no module"),
        ("some_models:gone", "has no attribute 'gone'"),
        ("no_such_models:make", "No module named 'no_such_models'"),
        ("math:pi", "math:pi: 3.14.* is not a callable object"),
        ("torch.nn:Linear", "torch.nn:Linear: missing a required argument: 'in_features'.*takes no arguments"),
    ):
        with pytest.raises(ValueError, match=message):
            module_of(text)
    with pytest.raises(TypeError, match="needs inputs="):
        make_plan("some_models:alone", world_size=2)


@pytest.mark.parametrize("asked", [{"batch": 1}, {"seq": 64}], ids=str)
def test_a_batch_beside_inputs_is_refused(asked: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"the micro-batch of a Linear is its inputs. Leave batch= and seq= out"):
        make_plan(nn.Linear(4, 4), world_size=2, inputs=[torch.zeros(2, 4)], **asked)


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_configurations_that_no_shape_has_are_traced(kind: str, tmp_path: Path) -> None:
    """Parameters are those of the model that Transformers builds, and its inputs those that its forward takes."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **CONFIGURATIONS[kind]}))
    plan = make_plan(tmp_path, world_size=2, stage=3, batch=2, seq=8, device="a100-40")
    model, _ = module_of(tmp_path)
    assert isinstance(model, nn.Module)
    assert plan.parameters_numel == sum(one.numel() for one in model.parameters())
    assert plan.verdict == "fits"


@pytest.mark.parametrize(
    ("kind", "name", "sequence"),
    [
        ("whisper", "WhisperForConditionalGeneration", 448),
        ("bart", "BartForConditionalGeneration", 1024),
        ("bert", "BertForMaskedLM", 512),
        ("falcon", "FalconForCausalLM", 2048),
    ],
)
def test_a_configuration_without_a_class_is_a_whole_model(kind: str, name: str, sequence: int, tmp_path: Path) -> None:
    """An encoder and its decoder, not the decoder alone, and a sequence that its positions allow."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    model, _ = module_of(tmp_path)
    assert type(model).__name__ == name
    assert longest_of(model) == sequence


def test_images_are_counted_and_not_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", **CONFIGURATIONS["vit"]}))
    plan = make_plan(tmp_path, world_size=2, batch=8, batch_tokens=32)
    assert (plan.asked.batch, plan.asked.sequence, plan.asked.micro_batches) == (8, 1, 2)
    assert plan.asked.tokens_per_step == 32


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "xlnet", "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32, "vocab_size": 100},
        {"model_type": "t5", **CONFIGURATIONS["t5"], "decoder_start_token_id": None},
        {"model_type": "bert", **SMALL, "vocab_size": 100, "architectures": ["BertForSequenceClassification"]},
    ],
    ids=lambda config: config["model_type"],
)
def test_configurations_without_a_length_a_first_token_or_labels_of_tokens(config: dict, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert make_plan(tmp_path, world_size=1, seq=None if config["model_type"] == "xlnet" else 8).verdict == "fits"


def test_inputs_are_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1))
    found = inputs_of(model, 3, 5)
    assert {name: (*one.shape,) for name, one in found.items()} == {"input_ids": (3, 5), "labels": (3, 5)}
    assert all(one.is_meta for one in found.values())


def test_images_of_bytes_are_samples_and_no_tokens() -> None:
    images, labels = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    assert tokens_of([images]) == tokens_of([images, labels]) == tokens_of([images.float()]) == 4
    assert tokens_of([torch.zeros(2, 8, dtype=torch.int32)]) == 16


def test_a_step_has_the_tokens_that_are_asked_for() -> None:
    plan = make_plan("gpt2", world_size=8, tensor=2, batch=2, seq=512, batch_tokens=16384, device="a100-40")
    assert plan.asked.micro_batches == 4
    assert plan.asked.tokens_per_step == 16384
    assert plan == make_plan("gpt2", world_size=8, tensor=2, batch=2, seq=512, micro_batches=4, device="a100-40")
    piped = make_plan("gpt2", world_size=4, pipe=2, schedule="interleaved", seq=512, batch_tokens=16384)
    assert (piped.asked.micro_batches, piped.asked.chunks) == (16, 2)
    with pytest.raises(ValueError, match="micro_batches=1 is below the 2 places of the pipe"):
        make_plan("gpt2", world_size=4, pipe=2, seq=512, batch_tokens=1024)


def test_a_context_may_be_longer_than_the_configuration() -> None:
    longer = make_plan("llama-2-7b", world_size=8, stage=3, seq=8192)
    assert longer.notes == ("llama-2-7b is configured for 4,096 tokens; the run must extend its positions.",)
    with pytest.raises(ValueError, match="gpt2 learned 1,024 positions; got sequence=2,048"):
        make_plan("gpt2", world_size=8, seq=2048)


def test_experts_of_a_traced_model_count_their_operations() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 1000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**sizes, **heads, max_position_embeddings=512)
    shaped, traced = (
        make_plan(one, world_size=2, batch=2, seq=512, stage=0, device="h100")
        for one in (shape_of_config(config.to_dict(), "mixtral"), config)
    )
    assert traced.flops_per_step == pytest.approx(shaped.flops_per_step, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "given", "missing"),
    [
        ("mistral", {}, "num_key_value_heads"),
        ("mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}, "num_experts_per_tok"),
        ("mixtral", {"num_key_value_heads": 2, "num_experts_per_tok": 1}, "num_experts"),
        ("qwen3", {"num_key_value_heads": 2}, "head_dim"),
        ("qwen3_moe", {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 1}, "moe_intermediate_size"),
    ],
)
def test_what_a_configuration_leaves_to_transformers_is_its_default(
    kind: str, given: dict[str, int], missing: str, tmp_path: Path
) -> None:
    config = {
        "model_type": kind,
        **SMALL,
        "num_attention_heads": 2,
        "vocab_size": 100,
        "intermediate_size": 32,
        **given,
    }
    with pytest.raises(NoShapeError, match=f"has no '{missing}'"):
        shape_of_config(config, "one")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, _ = module_of(tmp_path)
    assert type(model).__name__.endswith("ForCausalLM")


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("qwen3_moe", "mlp_only_layers", [0]),
        ("qwen3_moe", "decoder_sparse_step", 2),
        ("gpt2", "add_cross_attention", True),
        ("deepseek_v3", "q_lora_rank", None),
    ],
)
def test_what_shapes_lack_is_traced(kind: str, key: str, value: object) -> None:
    with pytest.raises(NoShapeError, match=f"shapes have no {key}"):
        shape_of_config({"model_type": kind, key: value}, "one")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "LlamaModel"),
        ("mistral", "MistralForSequenceClassification"),
        ("gpt2", "GPT2ForTokenClassification"),
        ("llama", "LlamaForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
    ],
)
def test_a_configuration_is_of_the_class_that_it_names(kind: str, name: str, tmp_path: Path) -> None:
    """A model without a head over the vocabulary is no shape."""
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2} if kind == "gpt2" else {**SMALL, "num_key_value_heads": 1}
    config = {"model_type": kind, **sizes, "vocab_size": 100, "architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = make_plan(tmp_path, world_size=2, batch=2, seq=8)
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, name)(read)
    assert plan.parameters_numel == sum(one.numel() for one in model.parameters())
    is_shape = name.endswith(("ForCausalLM", "LMHeadModel"))
    assert (plan.model == tmp_path.name) is is_shape
    if not is_shape:
        with pytest.raises(NoShapeError, match=f"shapes have no {name}"):
            search(tmp_path, world_size=2)


def test_a_configuration_is_left_as_it_was() -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, architectures=["GPT2ForSequenceClassification"])
    before = config.to_dict()
    assert make_plan(config, world_size=1, batch=2, seq=8).model == "GPT2ForSequenceClassification"
    assert config.to_dict() == before
