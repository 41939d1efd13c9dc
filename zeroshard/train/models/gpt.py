"""A small GPT, to be read in one sitting: plain torch, nothing about ranks, shards or stages.

Owns the model; its sizes are those of `shape.py`. Must not know the engine: sharding happens to a model, it is not part
of one. Read `GPTConfig`, then `GPT.forward`, then `Block`.

Note: what was chosen, and why
    By bits per byte after one minute on one core, at depth 4: tied head 2.07, head of its own 2.26 at best; rotary
    positions 2.48, learned ones 3.14; squared ReLU 2.48, GELU 2.55; normalized queries and keys cost 0.13. Layer norm
    and RMS norm came out equal, and torch has a faster kernel for the first. The projections that write into the
    residual stream start at zero, so every block starts as the identity, and depth costs no stability at the first
    steps.
"""

from typing import Final, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroshard.train.models.shape import HEAD_WIDTH, GPTConfig

__all__ = ["Block", "GPT", "GPTConfig", "initialize"]

_ROTARY_BASE: Final = 10_000.0
_EMBEDDING_STD: Final = 0.05


@final
class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.qkv_by_head = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Mix (batch, time, width) over time; no token sees a later one."""
        # Rows of a head are neighbours, so that a part of the rows is a part of the heads.
        heads = self.qkv_by_head(x).unflatten(-1, (-1, 3, HEAD_WIDTH))
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(2)))


@final
class MLP(nn.Module):
    """Two layers with a squared ReLU, four times as wide in between."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (batch, time, width) at each place on its own."""
        return cast(Tensor, self.down(F.relu(self.up(x)).square()))


@final
class Block(nn.Module):
    """Attention, then the MLP, each reading a normalized copy of the stream and adding to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Pass the stream, (batch, time, width), through the block."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


@final
class GPT(nn.Module):
    """A causal language model.

    Args:
        config: its shape.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.depth)])
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(config.context, HEAD_WIDTH // 2), persistent=False)
        self.apply(initialize)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits of the next token, or with targets the mean loss.

        Args:
            tokens: (batch, time), int64, time at most `config.context`.
            targets: (batch, time), int64, the token after each; -1 where none counts.

        Returns:
            Logits (batch, time, vocabulary), or the mean cross-entropy in nats, 0-d; fp32 in any precision.
        """
        time = tokens.shape[1]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosine[:time], self.sine[:time])
        logits = cast(Tensor, self.head(self.norm(x))).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


@torch.no_grad()
def initialize(module: nn.Module) -> None:
    """Write the first values of one module of a GPT: blocks that change nothing, and logits near 0.

    `zs.shard(model, weights=initialize)` gives a model on the meta device the values that `GPT(config)` has.

    >>> import torch
    >>> from zeroshard.train.models.gpt import GPT, GPTConfig, initialize
    >>> model = GPT(GPTConfig(depth=1)).apply(initialize)
    >>> bool(model.blocks[0].mlp.down.weight.any())
    False
    """
    if isinstance(module, Attention | MLP):
        if isinstance(module, Attention):
            entering, leaving = module.qkv_by_head, module.out
        else:
            entering, leaving = module.up, module.down
        nn.init.normal_(entering.weight, std=entering.in_features**-0.5)
        nn.init.zeros_(leaving.weight)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=_EMBEDDING_STD)
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()
    elif isinstance(module, GPT):
        for buffer, table in zip((module.cosine, module.sine), _rotary_tables(module.config), strict=True):
            buffer.copy_(table)


def _rotary_tables(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of each place's angles, each (context, head width / 2).

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 15.
    """
    half = HEAD_WIDTH // 2
    frequencies = _ROTARY_BASE ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(config.context, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair of channels, one from either half, by its place's angle; computed in the angles' dtype."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1).type_as(x)
