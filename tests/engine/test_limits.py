"""Counters beyond the limits of what carries them: a run across a limit has the bits of one that starts at zero."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S
from zeroshard.core.dtypes import LossScale
from zeroshard.describe.specs import describe_units
from zeroshard.describe.units import UnitPlan
from zeroshard.setup.request import check_bucket_count
from zeroshard.testing import run_ranks
from zeroshard.wire.board import ABOUT, ABOUT_BITS, PLACES, TURNS, WORDS
from zeroshard.wire.comm import Channel, Tag
from zeroshard.wire.linked import TURN_BITS

STEPS = 4
NEAR = 10
"""What is left to a limit when the steps begin; each takes three passes or more."""

Observed = list[tuple[float, Tensor, dict[str, Tensor], dict[str, Any]]]


def train(stage: int, shared_memory: bool, start: dict[str, int]) -> Observed:
    """Take steps with counters that begin where `start` says; return what each step shows of whole values."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = zs.shard(
        model,
        optimizer,
        stage=stage,
        precision=zs.Precision(param=torch.bfloat16, master=torch.bfloat16, rounding="stochastic"),
        settings=zs.Settings(shared_memory=shared_memory, watchdog_s=WATCHDOG_S),
    )
    average = zero.ema(0.9)
    order = zero._engine.order
    assert 0 <= order.count < NEAR, "the counter of passes has another name"
    order.count = start["passes"]
    votes = zero._engine.comm._votes
    for channel in Channel:
        votes[channel] += start["votes"]
    near = set_meetings(zero, start["meetings"]) if shared_memory and start["meetings"] else []
    seen: Observed = []
    for step in range(STEPS):
        loss = models.stack_loss(model, step, dist.get_rank())
        loss.backward()
        grad = model.blocks[1].up.weight.grad
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        with average.swapped(), zero.gathered(states=True):
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
            states = {key: dict(state) for key, state in optimizer.state_dict()["state"].items()}
        assert zero.agree(True, f"step {step}")
        seen.append((loss.item(), whole, weights, states))
    assert order.count > start["passes"] + NEAR, "the passes did not cross their limit"
    if not shared_memory and start["votes"]:
        assert 0 < votes[Channel.PLACES] < start["votes"], "the votes did not cross their limit"
    if near:
        assert any(zero._engine.comm._memory.board._counts[place] < NEAR * STEPS for place in near), (
            "no meetings crossed their limit"
        )
    return seen


def set_meetings(zero: zs.Zero, count: int) -> list[int]:
    """Let all ranks have met `count` times at each place of the board where they met at all; return the places."""
    comm = zero._engine.comm
    board = comm._memory.board
    dist.barrier()
    for place in list(board._counts):
        board._counts[place] = count
        own, first = board._words[board._rank], WORDS * place
        own[first] = count << ABOUT_BITS | own[first] & ABOUT
    dist.barrier()
    return list(board._counts)


def across_limits(stage: int) -> list[str]:
    """Compare runs that begin near the limits with one that begins at zero; return where they differ."""
    undisturbed = train(stage, True, {"passes": 0, "meetings": 0, "votes": 0})
    differences = []
    for shared_memory in (True, False):
        start = {"passes": Tag.PASSES - NEAR, "meetings": TURNS - 1, "votes": (1 << TURN_BITS) - NEAR}
        found = train(stage, shared_memory, start)
        try:
            torch.testing.assert_close(found, undisturbed, rtol=0, atol=0)
        except AssertionError as error:
            differences.append(f"shared_memory={shared_memory}: {error}")
    return differences


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_passes_and_meetings_may_be_any_number(stage: int) -> None:
    assert run_ranks(across_limits, 2, stage, timeout_s=2 * TIMEOUT_S) == [[], []]


@pytest.mark.parametrize("number", [0, Tag.PASSES - 1, Tag.PASSES, 2**31 - 1, 2**31, 2**63])
def test_tags_fit_into_what_carries_them(number: int) -> None:
    tags = [Tag(number + passed, bucket, "") for passed in range(3) for bucket in (0, 1, Tag.BUCKETS - 1)]
    messages = {tag.message(kind) for tag in tags for kind in (Tag.GATHER, Tag.REDUCE)}
    assert len(messages) == 18
    assert min(messages) >= 0 and max(messages) < 2**31
    assert len({tag.about for tag in tags}) == 9
    assert max(tag.about for tag in tags) < 1 << ABOUT_BITS


def test_every_bucket_has_places_of_its_own_on_the_board() -> None:
    tags = [Tag(0, bucket, "") for bucket in (0, 1, Tag.BUCKETS - 1)]
    places = {
        tag.place(kind, has_read=has_read) for tag in tags for kind in (Tag.GATHER, Tag.REDUCE) for has_read in (0, 1)
    }
    assert len(places) == 12
    assert max(places) < Tag.AGREEMENTS < Tag.AGREEMENTS + 1 < PLACES


def test_more_buckets_than_tags_can_tell_apart_are_refused() -> None:
    model = models.build(models.Stack)
    plan = UnitPlan("", model, [("weight", model.head.weight), ("bias", model.head.bias.requires_grad_(False))])
    plans, row = [plan] * (Tag.BUCKETS // 2), zs.Residency()
    check_bucket_count(describe_units(plans, row, zs.Precision(), shard_size=1))
    with pytest.raises(ValueError, match=r"32,770 buckets.*32,768.*units=.*16,385"):
        check_bucket_count(describe_units([*plans, plan], row, zs.Precision(), shard_size=1))


def test_a_loss_scale_stays_finite() -> None:
    scale = LossScale("dynamic")
    scale.value, scale.GROWTH_STEPS = 2.0**120, 1
    for backward in range(1000):
        scale.step(has_overflowed=False, backwards=backward, optimizer=0)
    assert torch.tensor(scale.value).isfinite()
    assert torch.tensor(1.0 / scale.value) > 0
    scale.step(has_overflowed=True, backwards=1000, optimizer=0)
    assert scale.value == 2.0**125


def test_a_rank_may_have_a_great_step_count() -> None:
    """The optimizer's own counters are the user's; the engine's are text where ranks compare them."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zs.shard(model, optimizer)
    zero._sharded[0].steps = zero._engine.order.history.steps = 2**63
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert zero.traffic().steps == 2**63 + 1
