"""The optimizers of `zeroshard train`, by name.

Owns the parameter groups of each optimizer. It must not know the loop or the sharding of states.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

import zeroshard as zs
from zeroshard.train.config import LEARNING_RATE_FACTORS, Train
from zeroshard.train.models.language import LanguageModel

__all__ = ["make_optimizer"]

Groups = list[dict[str, Any]]


def make_optimizer(settings: Train, language: LanguageModel) -> torch.optim.Optimizer:
    """Return the optimizer of the settings, with their learning rate.

    Weight decay applies to matrices, except embeddings and parameters tied to them.
    """
    groups: Groups = [
        {"params": list(language.decayed()), "weight_decay": settings.weight_decay},
        {"params": list(language.undecayed()), "weight_decay": 0.0},
    ]
    return MAKERS[settings.optimizer](groups, settings, language)


def _make_adamw(groups: Groups, settings: Train, language: LanguageModel) -> torch.optim.Optimizer:
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, fused=True)


def _make_adamw8bit(groups: Groups, settings: Train, language: LanguageModel) -> torch.optim.Optimizer:
    return zs.optim.AdamW8bit(groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2))


def _make_muon(groups: Groups, settings: Train, language: LanguageModel) -> torch.optim.Optimizer:
    """Return Muon; AdamW updates the decayed head in a separate group. AdamW's groups use AdamW's learning rate."""
    for_muon = {id(parameter) for parameter in zs.optim.muon_groups(language.module)[0]["params"]}
    parts: Groups = []
    for group in groups:
        for use_muon in (True, False):
            params = [parameter for parameter in group["params"] if (id(parameter) in for_muon) is use_muon]
            parts += [{**group, "params": params, "use_muon": use_muon}] if params else []
    betas = (settings.beta1, settings.beta2)
    adamw_lr = settings.learning_rate / LEARNING_RATE_FACTORS["muon"]
    return zs.optim.Muon(parts, lr=settings.learning_rate, adamw_lr=adamw_lr, adamw_betas=betas)


def _make_adafactor(groups: Groups, settings: Train, language: LanguageModel) -> torch.optim.Optimizer:
    # With the default minimum scale, 0.001, projections initialized to zero would need hundreds of steps to grow.
    return zs.optim.Adafactor(groups, lr=settings.learning_rate, eps=(None, ADAFACTOR_SCALE))


def _make_sgd(groups: Groups, settings: Train, language: LanguageModel) -> torch.optim.Optimizer:
    momentum = settings.beta1
    return torch.optim.SGD(groups, settings.learning_rate, momentum, nesterov=momentum > 0, fused=True)


def _make_lion(groups: Groups, settings: Train, language: LanguageModel) -> torch.optim.Optimizer:
    return zs.optim.Lion(groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2))


ADAFACTOR_SCALE: Final = 0.03
MAKERS: Final[Mapping[str, Callable[[Groups, Train, LanguageModel], torch.optim.Optimizer]]] = MappingProxyType(
    {
        "adafactor": _make_adafactor,
        "adamw": _make_adamw,
        "adamw8bit": _make_adamw8bit,
        "lion": _make_lion,
        "muon": _make_muon,
        "sgd": _make_sgd,
    }
)
