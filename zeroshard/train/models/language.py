"""A causal language model as the loop uses it, whoever wrote its module.

Owns what the loop may ask of a model. Must not know the engine, the loop or the data. Read `LanguageModel` first.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast, final

import torch
from torch import Tensor, nn

from zeroshard.train.models.gpt import GPT, GPTConfig, initialize

__all__ = ["LanguageModel", "generate", "make_gpt"]


@final
@dataclass(frozen=True)
class LanguageModel:
    """A model and how it is called.

    Args:
        module: what is trained.
        description: one line for people.
        context: longest input, in tokens.
        compute_loss: from tokens and targets, each (batch, time), int64, to the mean loss in nats a token, 0-d.
        compute_logits: from tokens, (batch, time), int64, to the next tokens' logits, (batch, time, vocabulary), fp32.
        weights: what `zs.shard(weights=)` needs for a module on the meta device: a function that initializes one
            module, a folder of safetensors, or None.
        around_steps: returns the context of all forwards and backwards.
    """

    module: nn.Module
    description: str
    context: int
    compute_loss: Callable[[Tensor, Tensor], Tensor]
    compute_logits: Callable[[Tensor], Tensor]
    weights: Callable[[nn.Module], object] | Path | None = None
    around_steps: Callable[[], AbstractContextManager[object]] = nullcontext

    def decayed(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that weight decay suits, in order: matrices, but no embedding and no head tied to it."""
        embeddings = self._embeddings()
        yield from (p for p in self._trained() if p.ndim > 1 and p not in embeddings)

    def undecayed(self) -> Iterator[nn.Parameter]:
        """Yield the other parameters, in order."""
        embeddings = self._embeddings()
        yield from (p for p in self._trained() if p.ndim <= 1 or p in embeddings)

    def _trained(self) -> Iterator[nn.Parameter]:
        yield from (p for p in self.module.parameters() if p.requires_grad)

    def _embeddings(self) -> set[nn.Parameter]:
        return {cast(nn.Parameter, m.weight) for m in self.module.modules() if isinstance(m, nn.Embedding)}


def make_gpt(config: GPTConfig) -> LanguageModel:
    """Make a GPT: initialized from torch's generator, or under `torch.device("meta")` without values."""
    model = GPT(config)
    numel = sum(p.numel() for p in model.parameters())
    description = f"GPT, depth {config.depth}, width {config.width}, {config.heads} heads: {numel:,} parameters"
    weights = initialize if model.embedding.weight.is_meta else None
    return LanguageModel(model, description, config.context, model, model, weights)


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: Tensor,
    *,
    numel: int,
    temperature: float = 0.8,
    seed: int = 0,
    share: Callable[[Tensor], Tensor] = lambda token: token,
) -> Tensor:
    """Continue a prompt, token by token. Each token reads the last `context` ones anew: simple, and fast enough here.

    Args:
        model: whole, inside `zero.gathered()`; or sharded, if all ranks call this alike.
        prompt: (time,), int64, at least one token.
        numel: tokens to add.
        temperature: divides the logits; towards 0 the likeliest token is always taken.
        seed: of the draws.
        share: returns the token that all ranks go on with.

    Returns:
        (time + numel,), int64, on the prompt's device.
    """
    draw = torch.Generator(device=prompt.device).manual_seed(seed)
    tokens = prompt
    for _ in range(numel):
        logits = model.compute_logits(tokens[-model.context :].unsqueeze(0))[0, -1]
        probabilities = torch.softmax(logits / max(temperature, 1e-6), dim=-1)
        tokens = torch.cat([tokens, share(torch.multinomial(probabilities, 1, generator=draw))])
    return tokens
