"""C_B: buffers of the wire do not grow with the model, nor with its largest unit."""

from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests import models
from tests.models import WIDTH
from tests.oracle import TIMEOUT_S, WATCHDOG_S, assert_same, randint
from zeroshard.table.layout import plan_layout
from zeroshard.table.spec import BucketSpec, Formats, itemsize
from zeroshard.table.stages import row_of_stage
from zeroshard.table.wires import Messages, Native, Wire
from zeroshard.testing import run_ranks

LIMIT = 1 << 20
SHORT_LAST = 3 << 19
"""Bytes of pieces of which the last one has less than half."""
ROWS = 40_000
"""Of an embedding that is most of the model: seven pieces of the smallest size on two ranks."""


class Wide(nn.Module):
    """A large table, and a few small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = (
            nn.Embedding(ROWS, 2 * WIDTH),
            nn.ModuleList(models.Block(2 * WIDTH) for _ in range(2)),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def train(stage: int, wire_bytes: int, copies: int) -> list[Any]:
    """Return the losses and the table after two steps by messages."""
    model = models.build(Wide)
    optimizer = models.adamw(model)
    settings = zs.Settings(shared_memory=False, wire_bytes=wire_bytes, watchdog_s=WATCHDOG_S)
    zero = zs.shard(model, optimizer, stage=stage, mesh=copies, settings=settings)
    losses = []
    for step in range(2):
        loss = model(randint(ROWS, 64, key=(step, zero.mesh.rank))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with zero.gathered():
        return [losses, model.table.weight.detach().clone()]


def both(stage: int, copies: int) -> tuple[list[Any], list[Any]]:
    return train(stage, 1, copies), train(stage, 1 << 30, copies)


@pytest.mark.product
@pytest.mark.parametrize(("world", "copies"), [(2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("stage", [1, 3])
def test_pieces_change_no_bit(stage: int, world: int, copies: int) -> None:
    for pieces, whole in run_ranks(both, world, stage, copies, timeout_s=TIMEOUT_S):
        assert_same(whole, pieces, f"stage {stage}")


def transient(wire_bytes: int, stage: int) -> tuple[int, int]:
    """Return the transient bytes of a step, held at most and predicted."""
    model = models.build(Wide)
    optimizer = models.adamw(model)
    settings = zs.Settings(shared_memory=False, wire_bytes=wire_bytes)
    zero = zs.shard(model, optimizer, stage=stage, settings=settings)
    for step in range(2):
        model(torch.tensor([step])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    memory = zero.memory()
    return memory.peak_bytes["transient"], memory.predicted_bytes["transient"]


@pytest.mark.product
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("wire_bytes", [LIMIT, SHORT_LAST])
def test_what_pieces_take_is_predicted(stage: int, wire_bytes: int) -> None:
    for held, predicted in run_ranks(transient, 2, wire_bytes, stage, timeout_s=TIMEOUT_S):
        assert held == predicted
    (whole, _), _ = run_ranks(transient, 2, 1 << 30, stage, timeout_s=TIMEOUT_S)
    assert whole - held >= ROWS * 2 * WIDTH * 4 // 2 - 2 * wire_bytes


def largest_exchange(numel: int, world: int, reduce: str, wire: Wire) -> int:
    """Return the bytes of the buffers that the reduction of an embedding takes, which is half of a model."""
    layout, formats = plan_layout([numel // 2], 4, world), Formats("float32", reduce, "float32", "float32", "float32")
    bucket = BucketSpec("table", 0, ("table",), layout, formats, row_of_stage(2), 0, 1)
    return sum(count * itemsize(dtype) for count, dtype in wire.among_shards(bucket))


@pytest.mark.product
@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize(
    ("wire", "reduce"),
    # A converted unit is one message of NCCL's.
    [(Messages(), "float32"), (Messages(), "bfloat16"), (Native(), "float32")],
    ids=["messages-float32", "messages-bfloat16", "native-float32"],
)
def test_buffers_do_not_grow_with_the_model(wire: Wire, reduce: str, world: int) -> None:
    sizes = [largest_exchange(numel, world, reduce, wire) for numel in (80_000_000, 250_000_000, 8_000_000_000)]
    assert len(set(sizes)) == 1
    assert sizes[0] <= wire.wire_bytes
    # A large model's buffers are those of one of 8 million parameters, or it has none that fill them.
    assert largest_exchange(8_000_000, world, reduce, wire) <= sizes[0]
