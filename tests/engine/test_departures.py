"""Ranks that leave the record while others have posted their votes and gone on: on both transports and on a device.

Gradients are clipped before anybody looks at one, and user code waits for the other ranks between forward and backward,
and at stages 0 to 2 behind the backward, where a rank may still ask for a sum.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S, assert_same
from tools.emulated import gpu
from zeroshard.testing import run_ranks

Route = Callable[[int, int], list[int]]
STEPS = 7


def a_new_block_on_one_rank(step: int, rank: int) -> list[int]:
    return [0, 1, 3] if rank and step == STEPS - 2 else [0, 1]


def new_blocks_on_each_rank(step: int, rank: int) -> list[int]:
    return [0, 2 + rank % 2] if step == STEPS - 2 else [0]


def other_blocks_at_each_step(step: int, rank: int) -> list[int]:
    return [block for block in range(4) if (block + rank + step) % 3]


def another_order_on_one_rank(step: int, rank: int) -> list[int]:
    return [3, 2, 1, 0] if rank and step > STEPS - 3 else [0, 1, 2, 3]


ROUTES = (a_new_block_on_one_rank, new_blocks_on_each_rank, other_blocks_at_each_step, another_order_on_one_rank)


def train(stage: int, route: Route, where: str) -> dict[str, Any]:
    """Train a model in which each rank takes its own route; return losses, norms and parameters."""
    model = models.build(models.Routed)
    optimizer = models.adamw(model, fused=True)
    rank, seen = dist.get_rank(), []
    with gpu(stage) if where == "device" else contextlib.nullcontext():
        settings = zs.Settings(watchdog_s=WATCHDOG_S, shared_memory=where == "host")
        zero = zs.shard(model, optimizer, stage=stage, settings=settings)
        for step in range(STEPS):
            output = model(models.features(step, rank), route(step, rank))
            loss = (output - models.targets(step, rank)).square().mean()
            dist.all_reduce(loss.detach().clone())
            loss.backward()
            if stage < 3:
                dist.barrier()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            seen.append((loss.item(), norm.item()))
        with zero.gathered():
            losses_and_norms = torch.tensor(seen, dtype=torch.float64)
            return {
                "seen": losses_and_norms,
                "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
            }


def everywhere(stage: int) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{route.__name__} {where}", train(stage, route, where))
        for route in ROUTES
        for where in ("messages", "host", "device")
    ]


@pytest.mark.product
@pytest.mark.parametrize(("stage", "world"), [*((stage, 2) for stage in STAGES), (1, 3), (3, 3)])
def test_a_rank_may_leave_the_record_when_others_have_gone_on(stage: int, world: int) -> None:
    for rank, found in enumerate(run_ranks(everywhere, world, stage, timeout_s=2 * TIMEOUT_S)):
        for (_, messages), *others in zip(found[::3], found[1::3], found[2::3], strict=True):
            for where, other in others:
                # Late sums of a device are sums of their own, in another order at more than two ranks.
                is_near = world > 2 and where.endswith("device")
                assert_same(messages, other, f"[rank {rank}/{world}] {where}", 1e-5 if is_near else 0.0)
