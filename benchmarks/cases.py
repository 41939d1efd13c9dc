"""What is trained in a benchmark: models, their data, and nothing about ranks or libraries.

Owns the models and the batches, both made from seeds alone, so that every contestant and every rank of a run gets the
same. Plain torch throughout: no contestant may be favoured by the model. Read `CASES` first.

Note: data that can be learned
    Batches are drawn once and used in turn, so that losses fall. On fresh random tokens the loss would stay at the
    logarithm of the vocabulary whatever a contestant did to the gradients, and comparing losses would show nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BATCHES", "CASES", "Case", "make_batch", "make_model"]

BATCHES: Final = 4
"""Batches of a rank, used in turn."""

_HEAD_WIDTH: Final = 64


class Block(nn.Module):
    """What is repeated in a model; contestants that shard by module are told to shard by these."""


@final
class TransformerBlock(Block):
    """Attention and MLP with pre-normalization, as in GPT-2.

    Without biases of queries and keys: the gradient of the latter is zero but for rounding, which AdamW would blow up.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // _HEAD_WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (batch, time, width)."""
        batch, time, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


@final
class GPT(nn.Module):
    """A GPT-2 with learned positions and a tied head; it returns the loss."""

    def __init__(self, layers: int, width: int, vocabulary: int, sequence: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(TransformerBlock(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy of each next token; tokens: (batch, time + 1)."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@final
class NarrowBlock(Block):
    """Ten small layers: twenty parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        """Transform (batch, width)."""
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return x + y


@final
class ExpertBlock(Block):
    """Experts stacked in two tensors, as Mixture-of-Experts models hold them.

    Tokens go to experts by their place, since a learned choice near a tie would make equal runs differ.
    """

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 1)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (batch, width); batch is a multiple of the number of experts."""
        y = self.norm(x)
        routed = y.view(-1, len(self.up), x.shape[-1]).transpose(0, 1)
        mixed = F.gelu(routed @ self.up) @ self.down
        return x + torch.sigmoid(self.gate(y)) * mixed.transpose(0, 1).reshape(x.shape)


@final
class Regression(nn.Module):
    """Blocks on vectors with a squared error at the end; it returns the loss."""

    def __init__(self, blocks: list[Block], width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, width)

    def forward(self, vectors: Tensor) -> Tensor:
        """Return the mean squared error of predicting one half of each row from the other; (batch, 2 * width)."""
        x, target = vectors.chunk(2, dim=-1)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), target)


@final
@dataclass(frozen=True)
class Case:
    """One model and the shape of its data.

    Args:
        title: for tables.
        build: returns the model; random numbers are seeded by the caller.
        batch: returns the micro-batch of a generator, of this many samples.
        tokens: what a sample counts for in tokens per second.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Tensor]
    tokens: int


def _gpt(title: str, layers: int, width: int, vocabulary: int, sequence: int) -> Case:
    return Case(
        title,
        lambda: GPT(layers, width, vocabulary, sequence),
        lambda draw, samples: torch.randint(vocabulary, (samples, sequence + 1), generator=draw),
        sequence,
    )


def _regression(title: str, width: int, rows: int, blocks: Callable[[], list[Block]]) -> Case:
    return Case(
        title,
        lambda: Regression(blocks(), width),
        lambda draw, samples: torch.randn(samples * rows, 2 * width, generator=draw),
        rows,
    )


CASES: Final = {
    "tiny": _gpt("GPT, 0.12M, for trying things out", 2, 64, 256, 32),
    "gpt-8m": _gpt("GPT, 8M (4 layers, width 320, vocabulary 8,192, sequence 256)", 4, 320, 8192, 256),
    "gpt-30m": _gpt("GPT, 30M (8 layers, width 512, vocabulary 8,192, sequence 256)", 8, 512, 8192, 256),
    "gpt-60m": _gpt("GPT, 60M (11 layers, width 640, vocabulary 8,192, sequence 256)", 11, 640, 8192, 256),
    "gpt-124m": _gpt("GPT, 124M (12 layers, width 768, vocabulary 50,304, sequence 256)", 12, 768, 50304, 256),
    "gpt-250m": _gpt("GPT, 250M (19 layers, width 1,024, vocabulary 8,192, sequence 256)", 19, 1024, 8192, 256),
    "gpt-1.3b": _gpt("GPT, 1.3B (24 layers, width 2,048, vocabulary 50,304, sequence 2,048)", 24, 2048, 50304, 2048),
    "gpt-1.3b-8k": _gpt("GPT, 1.3B (24 layers, width 2,048, vocabulary 50,304, sequence 8,192)", 24, 2048, 50304, 8192),
    "small-tensors": _regression("1,002 tensors of at most 4,096 elements", 64, 64, lambda: _narrow(50, 64)),
    "experts": _regression("4 blocks of 8 stacked experts, 34M", 512, 256, lambda: _experts(4, 8, 512)),
}
"""By name, as the command line has them."""


def _narrow(count: int, width: int) -> list[Block]:
    return [NarrowBlock(width) for _ in range(count)]


def _experts(count: int, experts: int, width: int) -> list[Block]:
    return [ExpertBlock(experts, width) for _ in range(count)]


def make_model(case: Case, seed: int = 0) -> nn.Module:
    """Return the model with the parameters of this seed."""
    torch.manual_seed(seed)
    return case.build()


def make_batch(case: Case, samples: int, rank: int, step: int) -> Tensor:
    """Return what a rank trains on at a step: one of its `BATCHES` micro-batches of this many samples."""
    draw = torch.Generator().manual_seed(1000 * rank + step % BATCHES)
    return case.batch(draw, samples)
