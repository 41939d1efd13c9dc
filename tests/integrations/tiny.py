"""Tiny models of Transformers, one for each kind that must work, with batches; nothing of the engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.oracle import randint, randn

VOCABULARY = 67
PIXELS = 8


@dataclass(frozen=True)
class Kind:
    """One model class with a configuration.

    Args:
        model: the class.
        config: makes its configuration.
        batch: of (step, rank): the arguments of the model's forward, with labels.
    """

    model: type[nn.Module]
    config: Callable[[], transformers.PretrainedConfig]
    batch: Callable[[int, int], dict[str, Tensor]]

    def build(self) -> nn.Module:
        """Return a model with its own first values."""
        return self.model(self.config())


def text(step: int, rank: int) -> dict[str, Tensor]:
    """Return token ids with themselves as labels; none is the padding token."""
    ids = 1 + randint(VOCABULARY - 1, 2, 8, key=(7, step, rank))
    return {"input_ids": ids, "labels": ids}


def pictures(step: int, rank: int) -> dict[str, Tensor]:
    """Return pictures and their classes."""
    return {
        "pixel_values": randn(2, 3, PIXELS, PIXELS, key=(8, step, rank)),
        "labels": randint(5, 2, key=(9, step, rank)),
    }


def gpt2() -> transformers.PretrainedConfig:
    return transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=24, n_layer=2, n_head=2)


def decoder(kind: type[transformers.PretrainedConfig], **more: Any) -> transformers.PretrainedConfig:
    """Return the configuration of two layers of a decoder with grouped heads."""
    return kind(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        **more,
    )


def llama() -> transformers.PretrainedConfig:
    return decoder(transformers.LlamaConfig)


def qwen3() -> transformers.PretrainedConfig:
    return decoder(transformers.Qwen3Config, head_dim=6, tie_word_embeddings=True)


def mixtral() -> transformers.PretrainedConfig:
    return transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=16,
        output_router_logits=True,
    )


def t5() -> transformers.PretrainedConfig:
    return transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=24,
        d_kv=12,
        d_ff=40,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )


def bert() -> transformers.PretrainedConfig:
    return transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=40,
        max_position_embeddings=16,
    )


def vit() -> transformers.PretrainedConfig:
    return transformers.ViTConfig(
        image_size=PIXELS,
        patch_size=4,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=40,
        num_labels=5,
    )


def kinds() -> dict[str, Kind]:
    """Return the seven kinds by name."""
    return {
        "gpt2": Kind(transformers.GPT2LMHeadModel, gpt2, text),
        "llama": Kind(transformers.LlamaForCausalLM, llama, text),
        "qwen3": Kind(transformers.Qwen3ForCausalLM, qwen3, text),
        "mixtral": Kind(transformers.MixtralForCausalLM, mixtral, text),
        "t5": Kind(transformers.T5ForConditionalGeneration, t5, text),
        "bert": Kind(transformers.BertForMaskedLM, bert, text),
        "vit": Kind(transformers.ViTForImageClassification, vit, pictures),
    }


NAMES = tuple(kinds())


def logits(model: nn.Module, kind: Kind) -> Tensor:
    """Return what the model says of a batch that it was not trained on."""
    model.eval()
    with torch.no_grad():
        found: Tensor = model(**kind.batch(99, 0)).logits
    model.train()
    return found
