"""A causal model of Hugging Face transformers, from a local folder.

Owns loading it and how it is called. The model itself stays unmodified. Must not know the engine, and reaches no
network. Needs transformers (the extra `zeroshard[transformers]`). Read `load_hf` first.

Note: one unit at a time
    A model is built on the meta device, and `zs.shard` gives it values unit by unit: drawn, or read from its folder,
    also under the names of a base model or of single experts, which are mapped as transformers maps them. What the
    files do not give is an error that names the parameter.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from zeroshard.train.extras import need
from zeroshard.train.inputs import check_entries
from zeroshard.train.models.language import LanguageModel
from zeroshard.train.models.lora import add_lora, first_values

__all__ = ["check_causal", "check_folder", "check_hf", "load_hf"]

_CAUSAL_TOLERANCE: Final = 1e-5
_CAUSAL_TOLERANCE_HALF: Final = 1e-2
_PICKLED: Final = ("*.bin", "*.pt", "*.pth")


def check_folder(folder: str) -> None:
    """Raise ValueError unless a folder holds a `config.json`, and no weights but safetensors."""
    if not Path(folder).is_dir():
        raise ValueError(f"model.source: there is no folder {folder!r}; give one that save_pretrained() wrote")
    if not Path(folder, "config.json").is_file():
        raise ValueError(f"model.source: there is no {folder}/config.json; give a folder that save_pretrained() wrote")
    if not _has_weights(folder) and any(found for pattern in _PICKLED for found in Path(folder).glob(pattern)):
        raise ValueError(
            f"model.source: the weights in {folder!r} are pickled, and reading those can run anybody's code; "
            "save them as safetensors, or take them away to start from the configuration alone"
        )
    check_entries(folder, "model.source")


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
    check_folder(folder)
    transformers = need("transformers", "transformers", f"model.source=hf:{folder}")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of a file that is not what it should be: KeyError, TypeError, RecursionError, others
        raise ValueError(f"model.source: {folder!r} holds no model of transformers: {error}") from None
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"model.source: {folder!r} holds a {config.model_type!r}, which is no causal language model")
    _check_size("max_position_embeddings", config, context, f"model.context={context}; set a smaller context")
    _check_size("vocab_size", config, vocabulary, f"data.tokenizer has {vocabulary} tokens; use the model's own")
    return config


def load_hf(folder: str, *, context: int, vocabulary: int, lora: str = "", reads: bool = True) -> LanguageModel:
    """Make a model in fp32 on the meta device, so that no rank ever holds all of it.

    `weights` of what is returned is the folder, where it has weights, or None: `zs.shard` then initializes the model
    as transformers does, from torch's generator.

    Args:
        folder: with a `config.json`, and weights as safetensors or none.
        context: tokens of a window.
        vocabulary: number of tokens.
        lora: the setting `model.lora`.
        reads: whether the files of the folder give the values; if not, they are drawn, for a checkpoint to replace.

    Raises:
        ValueError: as `check_hf` does, or the adapters do not fit the model.
        ImportError: transformers or peft is missing.
    """
    config = check_hf(folder, context=context, vocabulary=vocabulary)
    transformers = need("transformers", "transformers", f"model.source=hf:{folder}")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    weights: Path | Callable[[torch.nn.Module], object] | None = (
        Path(folder) if reads and _has_weights(folder) else None
    )
    origin = "initialized from" if weights is None else "weights from"
    model.config.use_cache = False
    model.train()
    name = type(model).__name__
    if lora:
        with torch.device("meta"):
            model = add_lora(model, lora)
        weights = first_values(model, weights if isinstance(weights, Path) else None)
    numel = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    description = f"{name}, {origin} {folder}: {numel:,} parameters" + f", {trained:,} of them trained" * bool(lora)
    return LanguageModel(model, description, context, _loss_of(model), _logits_of(model), weights)


@torch.no_grad()
def check_causal(language: LanguageModel, folder: str, device: torch.device, *, is_half: bool) -> None:
    """Raise where a token sees the one after it, as an encoder's do: it would read what it is to predict.

    Args:
        language: a model that has its values; it may be sharded.
        is_half: whether it computes in half precision.

    Raises:
        ValueError: on every rank alike.

    Collective: a forward pass; every rank must call.
    """
    language.module.eval()
    logits = language.compute_logits(torch.tensor([[0, 1], [0, 2]], device=device))[:, 0]
    language.module.train()
    tolerance = _CAUSAL_TOLERANCE_HALF if is_half else _CAUSAL_TOLERANCE
    if (logits[0] - logits[1]).abs().max() > tolerance * logits.abs().max():
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
