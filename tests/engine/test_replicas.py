"""Replicas of sharded state (hybrid sharding): `replicate x shard` meshes against one copy over all ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroshard as zs
from tests import models
from tests.oracle import assert_same
from zeroshard.testing import RankFailure, run_ranks

STEPS = 6
BLOCKS = 2
NUMEL = BLOCKS * (2 * 32 * 32) + 32 * 32  # every tensor and shard below is a multiple of 64 bytes: no padding


def train(
    stage: int, mesh: DeviceMesh | int = 1
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, int], dict[str, int], float]:
    rank = dist.get_rank()
    torch.manual_seed(rank)  # rank 0's values must win
    model = models.Even(BLOCKS, width=32).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero = zs.shard(model, optimizer, stage=stage, mesh=mesh, settings=zs.Settings(watchdog_s=5))
    losses = []
    for step in range(STEPS):
        x = torch.randn(3, 32, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
        loss = model(x).square().mean()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    sent = dict(zero.traffic().sent_bytes)
    memory = zero.memory().resident_bytes
    with zero.gathered():
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return losses, parameters, sent, memory, norm


def both(stage: int) -> tuple[object, object]:
    return train(stage, 1), train(stage, 2)


@pytest.mark.product
@pytest.mark.parametrize("stage", range(4))
def test_two_replicas_of_two_train_as_one_copy_over_four(stage: int) -> None:
    for one, two in run_ranks(both, 4, stage):
        assert two[0] == pytest.approx(one[0], rel=1e-12)
        assert two[4] == pytest.approx(one[4], rel=1e-12)
        for name, expected in one[1].items():
            assert torch.linalg.vector_norm(two[1][name] - expected) <= 1e-6 * torch.linalg.vector_norm(expected), name


@pytest.mark.product
@pytest.mark.parametrize("stage", range(4))
def test_bytes_by_axis_are_the_formulas(stage: int) -> None:
    bytes_all = NUMEL * 8
    inside = (2 - 1) / 2  # (S-1)/S of the payload for each collective among the two ranks of a copy
    across = 2 * (2 - 1) / 2 / 2  # an all-reduce among two replicas, of the half that a rank keeps
    ends = 2 * 32 * 32 + 32 * 32  # root and last block stay for their backward
    gathered = [0, NUMEL, NUMEL, 2 * NUMEL - ends][stage]
    reduces = [2, 1, 1, 1][stage]
    for _, (_, _, sent, memory, _) in run_ranks(both, 4, stage):
        assert sent.get("gather", 0) == STEPS * gathered * 8 * inside
        assert sent["reduce"] == STEPS * reduces * inside * bytes_all
        assert sent["replicate"] == STEPS * across * bytes_all
        assert memory["states"] == 2 * bytes_all // (1 if stage == 0 else 2)


def by_axes() -> list[object]:
    names = ("replicate", "shard")
    across = init_device_mesh("cpu", (2, 2), mesh_dim_names=names[::-1])
    return [train(3, 2), train(3, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=names)), train(3, mesh=across)]


@pytest.mark.parametrize(("replicas", "error"), [(0, ValueError), ("2", TypeError), (True, TypeError)])
def test_what_is_no_number_of_replicas_is_refused_by_name(replicas: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^replicas must be"):
        zs.shard(nn.Linear(2, 2), replicas=replicas)


def test_replicas_are_an_axis_of_a_mesh() -> None:
    for by_number, by_name, across in run_ranks(by_axes, 4):
        assert_same(by_number, by_name)
        # Other ranks share a copy here, so sums have another order.
        assert_same(by_number[1], across[1], relative=1e-6)
        assert across[2:4] == by_number[2:4]


def uneven() -> None:
    model = models.Even(BLOCKS, width=32)
    zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=2, settings=zs.Settings(watchdog_s=5))


@pytest.mark.product
@pytest.mark.parametrize(("world_size", "words"), [(3, "must divide the 3 rank"), (2, "call the axis 'shard'")])
def test_replicas_that_leave_no_shards_are_refused(world_size: int, words: str) -> None:
    with pytest.raises(RankFailure, match=words):
        run_ranks(uneven, world_size)


def accumulate(stage: int, is_deferred: bool, set_to_none: bool = True) -> tuple[dict[str, torch.Tensor], int]:
    """Train with three micro-batches a step; return the parameters and the bytes sent between copies."""
    torch.manual_seed(0)
    model = models.Even(BLOCKS, width=32).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    zero = zs.shard(model, optimizer, stage=stage, mesh=2, settings=zs.Settings(watchdog_s=5))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        for micro_batch in range(3):
            x = torch.randn(3, 32, generator=generator, dtype=torch.float64)
            if is_deferred and micro_batch < 2:
                with zero.no_sync("replicate"):
                    model(x).square().mean().backward()
                with pytest.raises(RuntimeError, match="not summed over all ranks"):
                    optimizer.step()
            else:
                # The last one leaves a block out: what was deferred of it must be summed all the same.
                (model if micro_batch < 2 else nn.Sequential(model.stem))(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    with zero.gathered():
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return parameters, zero.traffic().sent_bytes["replicate"]


def deferred_and_not(stage: int) -> list[tuple[dict[str, torch.Tensor], int]]:
    return [
        accumulate(stage, False),
        accumulate(stage, True),
        accumulate(stage, False, False),
        accumulate(stage, True, False),
    ]


@pytest.mark.product
@pytest.mark.parametrize("stage", range(3))
def test_sums_over_copies_can_wait_for_the_last_micro_batch(stage: int) -> None:
    for results in run_ranks(deferred_and_not, 4, stage):
        (expected, sent), (actual, sent_deferred), (kept, _), (kept_deferred, sent_kept) = results
        # Gradients that are zeroed and kept are there in the next step, also of what is not used then.
        for name, value in kept.items():
            assert torch.linalg.vector_norm(kept_deferred[name] - value) <= 1e-12 * torch.linalg.vector_norm(value), (
                name
            )
        assert sent_kept == sent_deferred
        # An all-reduce between two copies sends what a rank keeps once; what is recorded is reduced, used or not.
        assert sent == 2 * 3 * NUMEL * 8 // 2
        assert sent_deferred == 2 * NUMEL * 8 // 2
        for name, value in expected.items():
            assert torch.linalg.vector_norm(actual[name] - value) <= 1e-12 * torch.linalg.vector_norm(value), name


def defer_too_late() -> None:
    model = models.Even(BLOCKS, width=32)
    zero = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=2, settings=zs.Settings(watchdog_s=5))
    with pytest.raises(ValueError, match="'all' or 'replicate'; got 'shard'"), zero.no_sync("shard"):
        pass
    model(torch.ones(1, 32)).sum().backward()
    with (
        pytest.raises(RuntimeError, match="after a backward that summed gradients over all replicas"),
        zero.no_sync("replicate"),
    ):
        pass


def test_deferral_begins_with_the_first_micro_batch() -> None:
    run_ranks(defer_too_late, 4)
