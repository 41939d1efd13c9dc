"""A small GPT, to be read in one sitting: plain torch, nothing about ranks, shards or stages.

Owns the model and the one dial, `depth`, from which everything else about it follows. Must not know the engine:
sharding happens to a model, it is not part of one. Read `GPTConfig`, then `GPT.forward`, then `Block`.

Note: what was chosen, and why
    By bits per byte after one minute on one core, at depth 4: tied head 2.07, head of its own 2.26 at best; rotary
    positions 2.48, learned ones 3.14; squared ReLU 2.48, GELU 2.55; normalized queries and keys cost 0.13. Layer norm
    and RMS norm came out equal, and torch has a faster kernel for the first. The projections that write into the
    residual stream start at zero, so every block starts as the identity, and depth costs no stability at the first
    steps.
"""

from dataclasses import dataclass
from typing import Final, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Block", "GPT", "GPTConfig"]

_ROTARY_BASE: Final = 10_000.0
_WIDTH_PER_LAYER: Final = 32
_HEAD_WIDTH: Final = 32
_EMBEDDING_STD: Final = 0.05
_LEARNING_RATE: Final = 3e-3
_LEARNING_RATE_WIDTH: Final = 128


@final
@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT and how fast to train it, from one dial.

    Args:
        depth: number of blocks.
        context: longest input, in tokens.
        vocabulary: number of tokens; 256 for bytes.

    Raises:
        ValueError: an argument is less than 1.
    """

    depth: int
    context: int = 128
    vocabulary: int = 256

    def __post_init__(self) -> None:
        for name in ("depth", "context", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPTConfig.{name} must be at least 1, got {getattr(self, name)}")

    @property
    def width(self) -> int:
        """32 per block: models of one family keep one ratio of width to depth, and so one ratio of costs."""
        return _WIDTH_PER_LAYER * self.depth

    @property
    def heads(self) -> int:
        """One head for each 32 of width, hence one for each block."""
        return self.width // _HEAD_WIDTH

    @property
    def batch(self) -> int:
        """Windows of a step: two per block, since the batch that still pays grows as the loss falls.

        Rounded up to fours, so that 1, 2 and 4 ranks can share it out.
        """
        return 4 * -(-self.depth // 2)

    @property
    def learning_rate(self) -> float:
        """Of AdamW at its highest: by one over the square root of the width, as wider sums add up to larger updates."""
        return _LEARNING_RATE * float((_LEARNING_RATE_WIDTH / self.width) ** 0.5)


@final
class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Mix (batch, time, width) over time; no token sees a later one."""
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.out(mixed.transpose(1, 2).reshape(batch, time, width)))


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
        cosine, sine = _rotary_tables(config)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self._initialize()

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

    def _initialize(self) -> None:
        """Start with blocks that change nothing, and with logits near 0."""
        nn.init.normal_(self.embedding.weight, std=_EMBEDDING_STD)
        for block in self.blocks:
            block = cast(Block, block)
            for entering in (block.attention.qkv, block.mlp.up):
                nn.init.normal_(entering.weight, std=self.config.width**-0.5)
            for leaving in (block.attention.out, block.mlp.down):
                nn.init.zeros_(leaving.weight)


def _rotary_tables(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of each place's angles, each (context, head width / 2).

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 15.
    """
    half = _HEAD_WIDTH // 2
    frequencies = _ROTARY_BASE ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(config.context, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair of channels, one from either half, by its place's angle; computed in the angles' dtype."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1).type_as(x)
