"""Small models, one per structure that the engine must handle. They know nothing of the engine."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .oracle import randint, randn, seed

WIDTH = 12  # no multiple of 16, so that buckets need padding and rank boundaries fall inside parameters
VOCABULARY = 19


class Block(nn.Module):
    """A residual block of a norm and two linear layers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """A linear layer, blocks, and a linear layer: the plainest model with units."""

    def __init__(self, depth: int = 3, width: int = WIDTH, kind: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.stem = nn.Linear(5, width)
        self.blocks = nn.ModuleList(kind(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Routed(Stack):
    """A stack that runs the blocks it is told to run, in that order; `spare` is never used."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__(depth)
        self.spare = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, route: Sequence[int]) -> Tensor:
        x = self.stem(x)
        for index in route:
            x = self.blocks[index](x)
        return self.head(x)


class EvenBlock(nn.Module):
    """Two weights without biases, square unless it is wider or narrower between them."""

    def __init__(self, width: int, inner: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(width, inner or width, bias=False)
        self.second = nn.Linear(inner or width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu())


class Even(nn.Module):
    """A stack of square weights: where a weight is whole cache lines for each number of ranks, nothing is padded."""

    def __init__(self, depth: int = 4, width: int = 48) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(EvenBlock(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Attention(nn.Module):
    """A causal attention block with an MLP."""

    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = Block(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mlp(x + self.out(y.transpose(1, 2).reshape(batch, length, width)))


class GPT(nn.Module):
    """A language model whose head may share the embedding's weight."""

    def __init__(self, depth: int = 2, tied: bool = True, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(16, width))
        self.blocks = nn.ModuleList(Attention(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(kind: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Build a model with the same initial parameters on every call."""
    seed(1234)
    return kind(*args, **kwargs)


def features(step: int, rank: int, micro: int = 0, rows: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return one rank's input of `Stack`: (rows, 5)."""
    return randn(rows, 5, key=(1, step, rank, micro), dtype=dtype)


def targets(step: int, rank: int, micro: int = 0, rows: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return one rank's targets of `Stack`: (rows, 3)."""
    return randn(rows, 3, key=(2, step, rank, micro), dtype=dtype)


def stack_loss(model: nn.Module, step: int, rank: int, micro: int = 0) -> Tensor:
    """Return the mean squared error of a `Stack` (or of anything with its inputs and outputs) on one micro-batch."""
    dtype = next(model.parameters()).dtype
    return F.mse_loss(model(features(step, rank, micro, dtype=dtype)), targets(step, rank, micro, dtype=dtype))


def tokens(step: int, rank: int, micro: int = 0, length: int = 9) -> Tensor:
    """Return one rank's token ids: (2, length)."""
    return randint(VOCABULARY, 2, length, key=(3, step, rank, micro))


def gpt_loss(model: nn.Module, step: int, rank: int, micro: int = 0) -> Tensor:
    """Return the cross entropy of a `GPT` on one micro-batch."""
    ids = tokens(step, rank, micro)
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """Return AdamW over all trainable parameters, at a learning rate that makes errors visible in a few steps."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, **{"lr": 1e-2, "weight_decay": 0.1, **options})


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    """Return SGD with momentum over all trainable parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(parameters, **{"lr": 5e-2, "momentum": 0.9, **options})
