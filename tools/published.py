"""Models of transformers, timm, torchvision and diffusers: as published, and tiny ones of the same architectures.

Owns which models `tools/models.py` looks at. A library that is not installed contributes nothing. Read that file first.
"""

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MISSING", "REAL", "TINY", "Tiny", "wide"]

VOCABULARY = 99


@dataclass(frozen=True)
class Tiny:
    """A tiny model: how to build one, and one batch of keyword arguments drawn from a generator."""

    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], dict[str, Any]]


def load(library: str) -> Any:
    """Return a library, or None where it is not installed."""
    try:
        return importlib.import_module(library)
    except ImportError:
        return None
    except RuntimeError as error:
        # A torchvision whose compiled part does not load, as a CUDA wheel beside a CPU build of torch, lacks what its
        # import registers functions for; the models that are built here need none of it.
        if "torchvision::" not in str(error):
            raise
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", library)]:
        del sys.modules[name]
    return importlib.import_module(library)


# -- at their real sizes ----------------------------------------------------------------------------------------------

TRANSFORMERS = """
    GPT2LMHeadModel GPTNeoForCausalLM GPTNeoXForCausalLM GPTJForCausalLM OPTForCausalLM BloomForCausalLM
    LlamaForCausalLM MistralForCausalLM MixtralForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM
    GemmaForCausalLM Gemma2ForCausalLM PhiForCausalLM Phi3ForCausalLM FalconForCausalLM MptForCausalLM
    Starcoder2ForCausalLM StableLmForCausalLM Olmo2ForCausalLM MambaForCausalLM Mamba2ForCausalLM
    RecurrentGemmaForCausalLM DeepseekV3ForCausalLM T5ForConditionalGeneration MT5ForConditionalGeneration
    SwitchTransformersForConditionalGeneration BartForConditionalGeneration PegasusForConditionalGeneration
    M2M100ForConditionalGeneration BertForMaskedLM RobertaForMaskedLM DistilBertForMaskedLM AlbertForMaskedLM
    ElectraForMaskedLM DebertaV2ForMaskedLM LongformerForMaskedLM FunnelForMaskedLM ModernBertForMaskedLM
    ViTForImageClassification BeitForImageClassification SwinForImageClassification Swinv2ForImageClassification
    ConvNextForImageClassification ConvNextV2ForImageClassification SegformerForImageClassification
    ResNetForImageClassification RegNetForImageClassification EfficientNetForImageClassification
    MobileViTForImageClassification CvtForImageClassification LevitForImageClassification
    PvtV2ForImageClassification PoolFormerForImageClassification FocalNetForImageClassification
    Dinov2ForImageClassification ViTMAEModel DetrModel DeformableDetrModel DPTModel GLPNModel Mask2FormerModel
    MaskFormerModel SamModel CLIPModel SiglipModel AlignModel FlavaModel Blip2Model ViltModel LxmertModel
    LayoutLMv3Model PaliGemmaModel WhisperForConditionalGeneration Wav2Vec2ForCTC HubertForCTC WavLMForCTC
    EncodecModel ASTForAudioClassification ClapModel SeamlessM4TForTextToText TimesformerModel VideoMAEModel
    PerceiverModel
""".split()

TIMM = """
    resnet50 resnext101_32x8d wide_resnet101_2 densenet201 efficientnet_b7 tf_efficientnetv2_l mobilenetv3_large_100
    regnety_320 convnext_base convnext_xxlarge convnextv2_huge swin_tiny_patch4_window7_224
    swin_large_patch4_window12_384 swinv2_base_window8_256 vit_base_patch16_224 vit_giant_patch14_224
    deit3_large_patch16_224 beit_large_patch16_224 eva02_large_patch14_448 maxvit_large_tf_512 coatnet_2_rw_224
    mixer_l16_224 nfnet_f6 vgg19 inception_v4 xception71 cait_m36_384 mvitv2_large davit_huge focalnet_huge_fl3
    hrnet_w64 dpn131 repvgg_b3 edgenext_base efficientformer_l7 poolformer_m48 caformer_b36 nextvit_large
    fastvit_ma36
""".split()

TORCHVISION = """
    alexnet vgg16 vgg19_bn resnet18 resnet50 resnet152 resnext101_64x4d wide_resnet101_2 densenet161 googlenet
    inception_v3 mobilenet_v2 mobilenet_v3_large mnasnet1_3 squeezenet1_1 shufflenet_v2_x2_0 efficientnet_b7
    efficientnet_v2_l convnext_tiny convnext_large swin_t swin_b swin_v2_b vit_b_16 vit_l_16 vit_h_14 maxvit_t
    deeplabv3_resnet101 fcn_resnet101 lraspp_mobilenet_v3_large fasterrcnn_resnet50_fpn_v2 maskrcnn_resnet50_fpn
    retinanet_resnet50_fpn r3d_18 mvit_v2_s swin3d_b s3d raft_large
""".split()

DIFFUSERS = """
    UNet2DConditionModel UNet2DModel UNet3DConditionModel UNetMotionModel UNetSpatioTemporalConditionModel
    ControlNetModel AutoencoderKLCogVideoX AutoencoderKLWan AutoencoderDC AutoencoderKLMochi AutoencoderOobleck
    AutoencoderKLLTXVideo DiTTransformer2DModel PixArtTransformer2DModel SD3Transformer2DModel
    FluxTransformer2DModel SanaTransformer2DModel CogVideoXTransformer3DModel HunyuanVideoTransformer3DModel
    WanTransformer3DModel QwenImageTransformer2DModel StableAudioDiTModel PriorTransformer UVit2DModel
    AuraFlowTransformer2DModel MochiTransformer3DModel
""".split()


def _of_transformers(library: Any, name: str) -> nn.Module:
    kind = getattr(library, name)
    return kind(kind.config_class())


def _of_timm(library: Any, name: str) -> nn.Module:
    return library.create_model(name, pretrained=False)


def _of_torchvision(library: Any, name: str) -> nn.Module:
    models = importlib.import_module("torchvision.models")
    options: dict[str, Any] = {"weights": None}
    if any(part in name for part in ("rcnn", "retinanet", "deeplab", "fcn", "lraspp")):
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    return models.get_model(name, **options)


def _of_diffusers(library: Any, name: str) -> nn.Module:
    return getattr(library, name)()


def _real() -> tuple[dict[tuple[str, str], Callable[[], nn.Module]], list[str]]:
    """Return the models by (library, name), and the libraries that are missing."""
    found: dict[tuple[str, str], Callable[[], nn.Module]] = {}
    missing = []
    for library, names, make in (
        ("transformers", TRANSFORMERS, _of_transformers),
        ("timm", TIMM, _of_timm),
        ("torchvision", TORCHVISION, _of_torchvision),
        ("diffusers", DIFFUSERS, _of_diffusers),
    ):
        module = load(library)
        if module is None:
            missing.append(library)
        else:
            found |= {(library, name): functools.partial(make, module, name) for name in names}
    return found, missing


# -- tiny -------------------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 2,
    "pad_token_id": 0,
}
VIT = {k: SIZES[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")} | {
    "image_size": 32,
    "patch_size": 8,
}
STAGED = {"depths": [1, 2, 2, 1], "hidden_sizes": [8, 16, 16, 24]}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 2, 2],
    "num_heads": [1, 2, 4],
    "window_size": 4,
}

TEXTS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 24, "n_layer": 3, "n_head": 2},
    "GPTNeoForCausalLM": SIZES | {"num_layers": 3, "num_heads": 4, "attention_types": [[["global"], 3]]},
    "GPTNeoXForCausalLM": SIZES,
    "GPTJForCausalLM": {"vocab_size": 99, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8},
    "OPTForCausalLM": SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "BloomForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4},
    "LlamaForCausalLM": SIZES,
    "MistralForCausalLM": SIZES,
    "MixtralForCausalLM": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2ForCausalLM": SIZES,
    "Qwen2MoeForCausalLM": SIZES
    | {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts_per_tok": 2},
    "Qwen3ForCausalLM": SIZES | {"head_dim": 8},
    "GemmaForCausalLM": SIZES | {"head_dim": 8},
    "Gemma2ForCausalLM": SIZES | {"head_dim": 8},
    "PhiForCausalLM": SIZES,
    "Phi3ForCausalLM": SIZES,
    "FalconForCausalLM": SIZES,
    "MptForCausalLM": {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32},
    "Starcoder2ForCausalLM": SIZES,
    "StableLmForCausalLM": SIZES,
    "Olmo2ForCausalLM": SIZES,
    "MambaForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "BertForMaskedLM": SIZES,
    "RobertaForMaskedLM": SIZES | {"max_position_embeddings": 40},
    "DistilBertForMaskedLM": {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4},
    "AlbertForMaskedLM": SIZES | {"embedding_size": 16},
    "ElectraForMaskedLM": SIZES | {"embedding_size": 16},
    "DebertaV2ForMaskedLM": SIZES,
    "FunnelForMaskedLM": {
        "vocab_size": 99,
        "d_model": 32,
        "d_head": 8,
        "d_inner": 48,
        "n_head": 4,
        "block_sizes": [1, 2],
    },
    "ModernBertForMaskedLM": SIZES,
}
TRANSLATORS: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": T5,
    "MT5ForConditionalGeneration": T5,
    "SwitchTransformersForConditionalGeneration": T5 | {"num_experts": 4, "expert_capacity": 32},
    "BartForConditionalGeneration": DECODER,
    "PegasusForConditionalGeneration": DECODER,
    "M2M100ForConditionalGeneration": DECODER,
}
IMAGES: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": VIT,
    "BeitForImageClassification": VIT,
    "Dinov2ForImageClassification": VIT,
    "SwinForImageClassification": SWIN,
    "Swinv2ForImageClassification": SWIN,
    "FocalNetForImageClassification": {k: SWIN[k] for k in ("image_size", "patch_size", "embed_dim", "depths")},
    "ConvNextForImageClassification": STAGED,
    "ConvNextV2ForImageClassification": STAGED,
    "SegformerForImageClassification": STAGED | {"num_attention_heads": [1, 2, 2, 2], "depths": [1, 1, 2, 1]},
    "ResNetForImageClassification": STAGED | {"embedding_size": 8},
    "RegNetForImageClassification": STAGED | {"embedding_size": 8, "groups_width": 8},
    "PoolFormerForImageClassification": STAGED,
    "PvtV2ForImageClassification": STAGED | {"num_attention_heads": [1, 2, 2, 2], "image_size": 32},
}
TIMM_TINY: dict[str, dict[str, Any]] = {
    "resnet10t": {},
    "vit_tiny_patch16_224": {"img_size": 32, "embed_dim": 24, "depth": 3, "patch_size": 8},
    "convnext_atto": {"depths": (1, 1, 2, 1), "dims": (8, 16, 16, 24)},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32,
        "embed_dim": 8,
        "depths": (1, 1, 2),
        "num_heads": (1, 2, 4),
        "window_size": 4,
    },
    "mixer_s32_224": {"img_size": 64},
    "efficientnet_lite0": {},
    "mobilenetv3_small_050": {},
    "regnetx_002": {},
    "edgenext_xx_small": {},
    "repvgg_a0": {},
    "densenet121": {"block_config": (2, 2, 3, 2), "growth_rate": 8},
}
TORCHVISION_TINY = (
    "squeezenet1_1",
    "shufflenet_v2_x0_5",
    "mobilenet_v3_small",
    "mnasnet0_5",
    "resnet18",
    "efficientnet_b0",
)


WIDENED = set(
    """
    hidden_size intermediate_size moe_intermediate_size shared_expert_intermediate_size n_embd d_model d_ff d_kv d_head
    d_inner ffn_dim word_embed_proj_dim encoder_ffn_dim decoder_ffn_dim embedding_size dim hidden_dim head_dim embed_dim
    dims hidden_sizes block_out_channels vocab_size max_position_embeddings n_positions max_seq_len
    """.split()
)
"""What is wider in a wide model; layers, heads and experts are as many."""


def _widened(sizes: dict[str, Any], factor: int) -> dict[str, Any]:
    def scaled(value: Any) -> Any:
        return type(value)(factor * one for one in value) if isinstance(value, list | tuple) else factor * value

    return {key: scaled(value) if key in WIDENED else value for key, value in sizes.items()}


def _words(generator: torch.Generator, factor: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, 8 * factor), generator=generator)


def _image(generator: torch.Generator, factor: int, size: int = 32) -> Tensor:
    return torch.randn(2 * factor, 3, size, size, generator=generator)


def _tiny_of_transformers(library: Any, factor: int) -> dict[str, Tiny]:
    def make(name: str, sizes: dict[str, Any]) -> nn.Module:
        kind = getattr(library, name)
        return kind(kind.config_class(**_widened(sizes, factor)))

    def texts(generator: torch.Generator) -> dict[str, Any]:
        return {"input_ids": _words(generator, factor)}

    def pairs(generator: torch.Generator) -> dict[str, Any]:
        return {"input_ids": _words(generator, factor), "decoder_input_ids": _words(generator, factor)}

    def images(generator: torch.Generator) -> dict[str, Any]:
        return {"pixel_values": _image(generator, factor)}

    kinds = ((TEXTS, texts), (TRANSLATORS, pairs), (IMAGES, images))
    return {
        f"transformers {name}": Tiny(functools.partial(make, name, sizes), inputs)
        for models, inputs in kinds
        for name, sizes in models.items()
    }


def _tiny_of_timm(library: Any, factor: int) -> dict[str, Tiny]:
    def make(name: str, sizes: dict[str, Any]) -> nn.Module:
        return library.create_model(name, pretrained=False, num_classes=7, **_widened(sizes, factor))

    def inputs(size: int, generator: torch.Generator) -> dict[str, Any]:
        return {"x": _image(generator, factor, size)}

    return {
        f"timm {name}": Tiny(functools.partial(make, name, sizes), functools.partial(inputs, sizes.get("img_size", 32)))
        for name, sizes in TIMM_TINY.items()
    }


def _tiny_of_torchvision(library: Any, factor: int) -> dict[str, Tiny]:
    def make(name: str) -> nn.Module:
        return importlib.import_module("torchvision.models").get_model(name, weights=None, num_classes=7)

    found = {name: functools.partial(make, name) for name in TORCHVISION_TINY}

    def vit() -> nn.Module:
        return library.models.VisionTransformer(32, 8, 3, 2, 24 * factor, 48 * factor, num_classes=7)

    def swin() -> nn.Module:
        return library.models.SwinTransformer([2, 2], 8 * factor, [1, 2], [1, 2], [4, 4], num_classes=7)

    found |= {"VisionTransformer": vit, "SwinTransformer": swin}
    return {
        f"torchvision {name}": Tiny(one, lambda generator: {"x": _image(generator, factor)})
        for name, one in found.items()
    }


def _tiny_of_diffusers(library: Any, factor: int) -> dict[str, Tiny]:
    def normal(generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def image(generator: torch.Generator) -> dict[str, Any]:
        return {"sample": normal(generator, 2, 3, 16, 16), "timestep": torch.tensor([1, 5])}

    def described(generator: torch.Generator) -> dict[str, Any]:
        return image(generator) | {"encoder_hidden_states": normal(generator, 2, 4, 16)}

    def encoded(generator: torch.Generator) -> dict[str, Any]:
        return {"sample": normal(generator, 2, 3, 16, 16)}

    def classified(generator: torch.Generator) -> dict[str, Any]:
        size = {"hidden_states": normal(generator, 2, 3, 8, 8), "timestep": torch.tensor([1, 5])}
        return size | {"class_labels": torch.tensor([1, 2])}

    def joint(generator: torch.Generator) -> dict[str, Any]:
        return {
            "hidden_states": normal(generator, 2, 4, 8, 8),
            "encoder_hidden_states": normal(generator, 2, 4, 16),
            "pooled_projections": normal(generator, 2, 12),
            "timestep": torch.tensor([1, 5]),
        }

    def flux(generator: torch.Generator) -> dict[str, Any]:
        return {
            "hidden_states": normal(generator, 2, 9, 4),
            "encoder_hidden_states": normal(generator, 2, 4, 16),
            "pooled_projections": normal(generator, 2, 12),
            "timestep": torch.tensor([0.1, 0.5]),
            "img_ids": torch.zeros(9, 3),
            "txt_ids": torch.zeros(4, 3),
        }

    def make(name: str, sizes: dict[str, Any]) -> nn.Module:
        return getattr(library, name)(**_widened(sizes, factor))

    plain = {"sample_size": 16, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    downs, ups = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    crossed = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 4,
        "in_channels": 3,
        "out_channels": 3,
    }
    coded = {
        "block_out_channels": (8, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 4,
    }
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
    sizes: dict[str, tuple[dict[str, Any], Callable[[torch.Generator], dict[str, Any]]]] = {
        "UNet2DModel": (plain | {"down_block_types": downs, "up_block_types": ups, "attention_head_dim": 4}, image),
        "UNet2DConditionModel": (plain | crossed, described),
        "AutoencoderKL": (coded, encoded),
        "VQModel": (coded | {"num_vq_embeddings": 16}, encoded),
        "DiTTransformer2DModel": (
            heads
            | {"in_channels": 3, "out_channels": 3, "sample_size": 8, "norm_num_groups": 1, "num_embeds_ada_norm": 10},
            classified,
        ),
        "SD3Transformer2DModel": (
            heads
            | {
                "sample_size": 8,
                "in_channels": 4,
                "out_channels": 4,
                "joint_attention_dim": 16,
                "pooled_projection_dim": 12,
            }
            | {"caption_projection_dim": 16, "pos_embed_max_size": 8},
            joint,
        ),
        "FluxTransformer2DModel": (
            heads
            | {"in_channels": 4, "num_single_layers": 2, "joint_attention_dim": 16, "pooled_projection_dim": 12}
            | {"axes_dims_rope": (2, 2, 4), "guidance_embeds": False},
            flux,
        ),
    }
    return {
        f"diffusers {name}": Tiny(functools.partial(make, name, given), inputs)
        for name, (given, inputs) in sizes.items()
    }


def wide(factor: int) -> dict[str, Tiny]:
    """Return the tiny models, and their inputs, made wider."""
    found: dict[str, Tiny] = {}
    for library, models in (
        ("transformers", _tiny_of_transformers),
        ("timm", _tiny_of_timm),
        ("torchvision", _tiny_of_torchvision),
        ("diffusers", _tiny_of_diffusers),
    ):
        module = load(library)
        if module is not None:
            found |= models(module, factor)
    return found


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    load("torchvision")  # first: the others import it, too
    REAL, MISSING = _real()
    TINY = wide(1)
