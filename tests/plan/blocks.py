"""Transformer blocks as one tensor rank of T holds them: the shapes that `tests/plan/saved.py` has tables of."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.plan.saved import Shape


class GPT2Block(nn.Module):
    """Layer norms, biases, a GELU, and dropout behind both projections."""

    def __init__(self, shape: Shape, dropout: float = 0.1) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        h, own, inner = shape.hidden, shape.own_hidden, shape.own_inner
        self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * own), nn.Linear(own, h)
        self.up, self.down = nn.Linear(h, inner), nn.Linear(inner, h)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.shape.own_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
        x = x + F.dropout(self.out(mixed), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh")), self.dropout)


class LlamaBlock(nn.Module):
    """RMS norms, rotary positions, grouped queries and a gated MLP."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        h, own, inner = shape.hidden, shape.own_hidden, shape.own_inner
        self.norm_1, self.norm_2 = nn.RMSNorm(h), nn.RMSNorm(h)
        self.query, self.out = nn.Linear(h, own, bias=False), nn.Linear(own, h, bias=False)
        self.key, self.value = (nn.Linear(h, shape.own_kv_hidden, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(h, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, h, bias=False)
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.ones(shape.sequence, shape.head_width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        query, key, value = (
            one(y).unflatten(-1, (-1, self.shape.head_width)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        query, key = self.rotate(query), self.rotate(key)
        is_grouped = self.shape.kv_heads != self.shape.heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        made: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + made

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cosine.to(x.dtype) + torch.cat((-second, first), -1) * self.sine.to(x.dtype)
