"""The whole model on rank 0: what `state_dict()` has in one process, gathered a unit at a time."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from tests.oracle import STAGES, WATCHDOG_S, randn, seed
from zeroshard.checkpoint.whole_model import state_on_first_rank
from zeroshard.testing import run_ranks

from .test_imports import Net


def gather(stage: int, precision: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[bool]]:
    """Train a step; return the state on the first rank, that of `gathered()`, and which units are whole behind it."""
    seed(3)
    model = Net()
    model.register_buffer("passing", torch.ones(2), persistent=False)
    model.apart = nn.Parameter(torch.ones(3) + dist.get_rank())
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if name != "apart"], lr=0.1)
    zero = zs.shard(
        model, optimizer, stage=stage, precision=precision, ignored=[model.apart],
        settings=zs.Settings(watchdog_s=WATCHDOG_S),
    )  # fmt: skip
    model(randn(4, 5, key=(dist.get_rank(),))).float().square().mean().backward()
    optimizer.step()
    found = state_on_first_rank(zero._engine, model, "a test")
    left = [unit.presence.name == "WHOLE" for unit in zero._engine.units if not unit.spec.is_whole]
    with zero.gathered():
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    return found, expected, left


@pytest.mark.product
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_it_is_the_state_of_one_process(stage: int, precision: str) -> None:
    (found, expected, _), (other, _, left) = run_ranks(gather, 2, stage, precision)
    assert (other, any(left)) == ({}, False)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].device.type == "cpu"
        assert torch.equal(found[name].to(value.dtype), value), name
    # Master weights keep what the parameters' dtype rounds away.
    assert found["blocks.1.weight"].dtype == torch.float32
    assert found["head.weight"].data_ptr() == found["twin.weight"].data_ptr()
