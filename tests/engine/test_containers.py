"""Models built of containers other than a ModuleList, at every stage: what they compute is what plain training gives.

Their members are units, so each is released before the next but one runs; what reads a member without calling it finds
its values all the same.
"""

import pytest
import torch
from torch import Tensor, nn

from tests import models
from tests.models import WIDTH, Block
from tests.oracle import STAGES, Run, assert_matches


class Mixed(nn.Module):
    """Blocks in containers of each kind, in nested ones, shared, called twice, not called, and iterated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(5, WIDTH), nn.LayerNorm(WIDTH))
        self.parts = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block(), Block()))
        self.branches = nn.ModuleDict({"left": Block(), "right": Block(), "unused": Block()})
        self.grid = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])
        self.iterated = nn.ModuleList([nn.Sequential(Block(), nn.ReLU()), nn.Sequential(Block(), nn.ReLU())])
        self.read = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.attention = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.shared = nn.ModuleList([self.parts[0][0], Block()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts(self.stem(x))
        x = self.branches["left"](x) + self.branches["right"](x)
        for row in self.grid:
            for block in row:
                x = block(block(x))
        for sequence in self.iterated:
            for module in sequence:
                x = module(x)
        for layer in self.read:
            x = x + nn.functional.linear(x, layer.weight, layer.bias)
        for attention in self.attention:
            x = x + attention(x, x, x, need_weights=False)[0]
        for block in self.shared:
            x = block(x)
        return self.head(x)


def train(run: Run) -> None:
    model = models.build(Mixed)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            run.record(loss=loss, evaluated=models.stack_loss(model, 100 + step, run.rank))


@pytest.mark.product
@pytest.mark.parametrize("shared_memory", [True, False])
def test_containers(shared_memory: bool) -> None:
    assert_matches(train, 2, STAGES, {"shared_memory": shared_memory})
