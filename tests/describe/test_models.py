"""Published models: the units that they get, and tiny ones that train on two ranks as in one process.

A handful of what `python -m tools.models` looks at. timm, torchvision and diffusers are an extra of their own; their
models are skipped, with the reason, where it is not installed.
"""

import pytest

from tools.models import compare, measure
from tools.published import MISSING, REAL, TINY

PLANNED = {
    "transformers": "Swinv2ForImageClassification CLIPModel M2M100ForConditionalGeneration",
    "timm": "swin_large_patch4_window12_384 densenet201 hrnet_w64",
    "torchvision": "resnet50 convnext_large inception_v3",
    "diffusers": "UNet2DConditionModel AutoencoderDC FluxTransformer2DModel",
}
TRAINED = {
    "transformers": "AlbertForMaskedLM T5ForConditionalGeneration SwinForImageClassification Qwen2MoeForCausalLM",
    "timm": "densenet121 efficientnet_lite0",
    "torchvision": "SwinTransformer squeezenet1_1",
    "diffusers": "UNet2DConditionModel AutoencoderKL",
}


def skip_unless_installed(library: str) -> None:
    if library in MISSING:
        pytest.skip(f"{library} is not installed (extra `models`)")


@pytest.mark.parametrize("library", PLANNED)
def test_no_unit_of_a_published_model_breaks_the_rule(library: str) -> None:
    skip_unless_installed(library)
    for name in PLANNED[library].split():
        row = measure(library, name, REAL[library, name])
        assert (row.broken, row.is_warned) == ((), False), row
        assert row.units >= 8, row


@pytest.mark.parametrize("library", TRAINED)
def test_tiny_models_train_as_in_one_process(library: str) -> None:
    skip_unless_installed(library)
    names = [f"{library} {name}" for name in TRAINED[library].split()]
    assert set(names) <= set(TINY)
    # One start of ranks for each library; two of them send messages.
    found = compare(names, shared_memory=library in ("transformers", "torchvision"))
    assert {name: verdict for name, (verdict, _) in found.items()} == dict.fromkeys(names, "equal")


def test_a_model_that_breaks_the_rule_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks looked for in no container, the model is one unit."""
    monkeypatch.setattr("zeroshard.describe.units.find_blocks", lambda model: (set(), float("inf")))
    row = measure("transformers", "LlamaForCausalLM", REAL["transformers", "LlamaForCausalLM"])
    assert row.broken == ("(root) holds 100%",)
    assert row.is_warned
