"""On a device, sums over replicas have a unit of computation between issue and wait, and values are the same."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from tests.oracle import TIMEOUT_S
from tools.emulated import gpu
from zeroshard.testing import run_ranks
from zeroshard.wire.comm import Pending
from zeroshard.wire.nccl import NcclComm

BLOCKS, WIDTH, STEPS = 6, 16, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()


def train(stage: int, reduce: Any, micro_batches: int) -> dict[str, Any]:
    """Return the parameters, the bytes, and what the last backward issued, waited for and computed, in order."""
    found: list[tuple[str, int]] = []
    plain = NcclComm.reduce_copies

    def reduce_copies(self: NcclComm, own: Tensor, codec: Any, scale: float, tag: Any, **options: Any) -> Pending:
        pending = plain(self, own, codec, scale, tag, **options)
        found.append(("issue", tag.bucket))

        def wait() -> bool:
            found.append(("wait", tag.bucket))
            return pending.wait()

        return Pending(wait)

    with gpu(stage) as device, patch.object(NcclComm, "reduce_copies", reduce_copies):
        model, optimizer = build()
        zero = zs.shard(
            model,
            optimizer,
            stage=stage,
            mesh=2,
            units=[Block],
            precision=zs.Precision(reduce=reduce),
            reduction="mean",
        )
        for block, module in enumerate(model):
            module.register_full_backward_hook(lambda *_, block=block: found.append(("compute", block)))
        for step in range(STEPS):
            for micro in range(micro_batches):
                found.clear()
                model(batch_of(zero.mesh.rank, micro_batches * step + micro)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        memory = zero.memory()
        with zero.gathered():
            parameters = [p.detach().clone() for p in model.parameters()]
        assert not device.host_waits
    return {"found": found, "parameters": parameters, "peak": memory.peak_bytes, "predicted": memory.predicted_bytes}


def alone(micro_batches: int) -> list[Tensor]:
    """Train on the data of four ranks in one process."""
    model, optimizer = build()
    for step in range(STEPS):
        for micro in range(micro_batches):
            for rank in range(4):
                (model(batch_of(rank, micro_batches * step + micro)).square().mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_unit_of_computation_lies_between(stage: int, reduce: torch.dtype, micro_batches: int) -> None:
    tolerance = 1e-5 if reduce is torch.float32 else 2e-2
    expected = alone(micro_batches)
    for rank in run_ranks(train, 4, stage, reduce, micro_batches, timeout_s=TIMEOUT_S):
        events = rank["found"]
        issues = [place for place, (kind, _) in enumerate(events) if kind == "issue"]
        assert len(issues) == BLOCKS
        for place in issues[:-2]:
            wait = events.index(("wait", events[place][1]))
            between = [kind for kind, _ in events[place:wait]]
            assert "compute" in between, events
        if micro_batches == 1:
            assert rank["peak"]["transient"] == rank["predicted"]["transient"]
        for one, other in zip(rank["parameters"], expected, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=tolerance)
