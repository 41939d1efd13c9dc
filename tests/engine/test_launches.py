"""What a step launches on the path of a device, in the steady state: counted on torch's fake process group.

The engine runs its code for NCCL as one rank of many; nothing travels. A launch is a call of an operator on tensors
that is neither a view nor an allocation; see `benchmarks/hosttime.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from benchmarks.gpu import Nobody, fake_ranks
from benchmarks.hosttime import (
    PHASES,
    Contestant,
    Counted,
    Running,
    build,
    count_agreements,
    count_launches,
    make_batch,
)
from zeroshard.core.order import CALM_PASSES
from zeroshard.setup.request import Request
from zeroshard.sharding import shard_over
from zeroshard.table.trace import Ledger
from zeroshard.wire.nccl import NcclComm

BLOCKS, RANKS = 32, 64
CLIP_LAUNCHES = 15
"""Of one `clip_grad_norm_`, of which torch's own functions make seven."""
STEPS = CALM_PASSES + 2
"""Before the one that is counted: passes are agreed in the first, and norms wait until they are calm."""


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextmanager
def steady(stage: int, precision: str, blocks: int = BLOCKS, ranks: int = RANKS) -> Iterator[tuple[Running, Tensor]]:
    with fake_ranks(ranks):
        running, batch = build(Contestant("zeroshard", stage, precision), blocks, clips=True), make_batch()
        for _ in range(STEPS):
            running.step(batch, lambda phase: None)
        yield running, batch


def count(stage: int, precision: str = "fp32", blocks: int = BLOCKS, ranks: int = RANKS) -> Counted:
    with steady(stage, precision, blocks, ranks) as (running, batch):
        return count_launches(running, batch)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_a_clip_is_a_few_launches_and_the_host_reads_none_of_them(stage: int, precision: str) -> None:
    counted = count(stage, precision)
    assert 7 < counted.launches("clip") <= CLIP_LAUNCHES, counted.by_phase["clip"]
    assert not counted.reads("clip")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_the_host_reads_nothing_in_a_step(stage: int, precision: str) -> None:
    counted = count(stage, precision)
    assert counted.launches("backward") > 20 * BLOCKS, "gradients were computed"
    assert {phase: dict(counted.reads(phase)) for phase in PHASES} == {phase: {} for phase in PHASES}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_hosts_wait_for_one_another_when_a_forward_ends_and_before_an_update(stage: int, precision: str) -> None:
    with steady(stage, precision) as (running, batch):
        expected = dict.fromkeys(PHASES, 0) | {"forward": int(stage == 3), "step": 1}
        assert count_agreements(running, batch) == expected


def test_launches_of_a_clip_do_not_depend_on_ranks_or_on_parameters() -> None:
    counts = {count(3, blocks=blocks, ranks=ranks).launches("clip") for blocks, ranks in ((2, 2), (2, 512), (4, 8))}
    assert len(counts) == 1, counts


def test_reads_are_seen() -> None:
    with Counted() as counted:
        values = torch.ones(3)
        (values > 0).nonzero()
        torch.equal(values, values)
        values[0].item()
        counted.note("clip")
    assert set(counted.reads("clip")) == {"aten::nonzero", "aten::equal", "aten::_local_scalar_dense"}
    assert counted.launches("clip") == 5


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("blocks", [1, 8])
def test_buffers_that_follow_cost_one_message_a_step_and_no_read(blocks: int, stage: int) -> None:
    """The first rank packs the message in one launch; the others write numbers of two dtypes, in two."""
    own, followed = (count_with_norms(stage, buffers, blocks) for buffers in ("own", "rank 0"))
    for phase in PHASES:
        is_step = phase == "step"
        assert followed.collectives(phase) - own.collectives(phase) == is_step, phase
        assert followed.launches(phase) - own.launches(phase) == is_step, (phase, followed.by_phase[phase])
        assert not followed.reads(phase), (phase, followed.by_phase[phase])
    assert followed.by_phase["step"] - own.by_phase["step"] == {"aten::cat": 1, "c10d::broadcast_": 1}


def count_with_norms(stage: int, buffers: Literal["rank 0", "own"], blocks: int) -> Counted:
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(blocks)]
    model, batch = nn.Sequential(*made, Mean()), torch.randn(8, 16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    asked = Request(model, optimizer, stage=stage, settings=zs.Settings(buffers=buffers), units=[nn.Sequential])
    with fake_ranks(RANKS):
        shard_over(asked, zs.Mesh(0, RANKS, 0, torch.device("cpu")), emulated_comm)
        running = Running(model, optimizer, clips=True)
        for _ in range(STEPS):
            running.step(batch, lambda phase: None)
        return count_launches(running, batch)


def emulated_comm(mesh: zs.Mesh, settings: zs.Settings, ledger: Ledger) -> NcclComm:
    return NcclComm(Nobody(mesh), ledger)  # type: ignore[arg-type]


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()
