"""A language model that `zs.pipeline` has divided: how the loop trains, scores and samples it.

Owns these calls. It must not know the loop or the data. Read `language.py` first.
"""

from dataclasses import replace
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor

import zeroshard as zs
from zeroshard.train.models.language import LanguageModel

__all__ = ["logits_of", "mean_loss", "piped", "summed_loss"]


def mean_loss(output: Any, targets: Tensor) -> Tensor:
    """Return the mean loss in nats a token, 0-d, of a model's output; -1 where no target counts."""
    return F.cross_entropy(logits_of(output).flatten(0, 1), targets.flatten(), ignore_index=-1)


def summed_loss(output: Any, targets: Tensor) -> Tensor:
    """Return the loss in nats a window, 0-d: of all its targets together."""
    total = F.cross_entropy(logits_of(output).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    return total / len(targets)


def piped(language: LanguageModel, pipe: zs.Pipeline) -> LanguageModel:
    """Return a language model whose logits all places compute together, for every rank."""
    return replace(language, compute_logits=lambda tokens: pipe.forward(tokens, take=logits_of))


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output, in fp32."""
    return cast(Tensor, output if isinstance(output, Tensor) else output.logits).float()
