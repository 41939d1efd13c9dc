"""A causal model of Hugging Face transformers, from a local folder.

Owns loading it and how it is called. The model itself stays unmodified. Must not know the engine, and reaches no
network. Needs transformers (the extra `zeroshard[transformers]`). Read `load_hf` first.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import safetensors
import torch
import torch.nn.functional as F
from torch import Tensor

from zeroshard.train.extras import need
from zeroshard.train.inputs import check_entries
from zeroshard.train.models.language import LanguageModel

__all__ = ["check_hf", "load_hf"]

_CAUSAL_TOLERANCE: Final = 1e-5
_PICKLED: Final = ("*.bin", "*.pt", "*.pth")


def check_hf(folder: str, *, context: int, vocabulary: int) -> Any:
    """Check that a folder holds a model that can be trained on windows and tokens like these.

    Args:
        folder: with a `config.json`.
        context: tokens of a window.
        vocabulary: number of tokens.

    Returns:
        Its `PretrainedConfig`.

    Raises:
        ValueError: there is no model, its weights are not safetensors, or it is too small.
        ImportError: transformers is missing.
    """
    transformers = need("transformers", "transformers", f"model.source=hf:{folder}")
    if not Path(folder, "config.json").is_file():
        raise ValueError(f"model.source: there is no {folder}/config.json; give a folder that save_pretrained() wrote")
    if not _has_weights(folder) and any(found for pattern in _PICKLED for found in Path(folder).glob(pattern)):
        raise ValueError(
            f"model.source: the weights in {folder!r} are pickled, and reading those can run anybody's code; "
            "save them as safetensors, or take them away to start from the configuration alone"
        )
    check_entries(folder, "model.source")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of a file that is not what it should be: KeyError, TypeError, RecursionError, others
        raise ValueError(f"model.source: {folder!r} holds no model of transformers: {error}") from None
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"model.source: {folder!r} holds a {config.model_type!r}, which is no causal language model")
    _check_size("max_position_embeddings", config, context, f"model.context={context}; set a smaller context")
    _check_size("vocab_size", config, vocabulary, f"data.tokenizer has {vocabulary} tokens; use the model's own")
    return config


def load_hf(folder: str, *, context: int, vocabulary: int) -> LanguageModel:
    """Load a model in fp32: with its weights where the folder has them, else initialized from torch's generator.

    Args:
        folder: with a `config.json`, and weights as safetensors or none.
        context: tokens of a window.
        vocabulary: number of tokens.

    Raises:
        ValueError: as `check_hf` does.
        ImportError: transformers is missing.
    """
    config = check_hf(folder, context=context, vocabulary=vocabulary)
    transformers = need("transformers", "transformers", f"model.source=hf:{folder}")
    make = transformers.AutoModelForCausalLM
    if _has_weights(folder):
        transformers.utils.logging.disable_progress_bar()
        model = _load_weights(make, folder)
        origin = "weights from"
    else:
        model = make.from_config(config, dtype=torch.float32, trust_remote_code=False)
        origin = "initialized from"
    model.config.use_cache = False
    _check_causal(model, folder)
    model.train()
    numel = sum(p.numel() for p in model.parameters())
    description = f"{type(model).__name__}, {origin} {folder}: {numel:,} parameters"
    return LanguageModel(model, description, context, _loss_of(model), _logits_of(model))


def _load_weights(make: Any, folder: str) -> Any:
    """Return the model with its weights from the folder, all of them."""
    try:
        model, report = make.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError, safetensors.SafetensorError) as error:
        raise ValueError(f"model.source: the weights in {folder!r} cannot be loaded: {error}") from None
    if report["missing_keys"]:
        # Transformers initializes these at random, and goes on.
        missing = sorted(report["missing_keys"])
        raise ValueError(
            f"model.source: {missing[0]!r} (of {len(missing)} parameters) is not in the weights in {folder!r}; give "
            "all of them, or take the files away to start from the configuration alone"
        )
    return model


@torch.no_grad()
def _check_causal(model: Any, folder: str) -> None:
    """Raise where a token sees the one after it, as an encoder's do: it would read what it is to predict."""
    model.eval()
    logits = model(input_ids=torch.tensor([[0, 1], [0, 2]])).logits[:, 0]
    if (logits[0] - logits[1]).abs().max() > _CAUSAL_TOLERANCE * logits.abs().max():
        raise ValueError(
            f"model.source: in {folder!r} a token sees those after it, so it has nothing to predict; if the "
            "architecture can be a decoder, set is_decoder in its config.json"
        )


def _loss_of(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return how the loss is computed: as the model would, which drops each window's last target, from all of them."""

    def compute_loss(tokens: Tensor, targets: Tensor) -> Tensor:
        output = model(input_ids=tokens)
        loss = F.cross_entropy(output.logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1)
        balance = getattr(output, "aux_loss", None)
        if balance is not None:
            loss = loss + model.config.router_aux_loss_coef * balance
        return loss

    return compute_loss


def _logits_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Return how the logits are computed."""

    def compute_logits(tokens: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=tokens).logits
        return logits.float()

    return compute_logits


def _has_weights(folder: str) -> bool:
    return any(Path(folder).glob("*.safetensors"))


def _check_size(name: str, config: Any, wanted: int, advice: str) -> None:
    """Raise where the model has a limit and it is too low."""
    limit = getattr(config, name, None)
    if limit is not None and limit < wanted:
        raise ValueError(f"model.source: the model's {name} is {limit}, but {advice}")
