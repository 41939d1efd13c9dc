"""Stock `clip_grad_norm_` is exact on sharded gradients, and `zero.grad_norm` agrees with it.

A norm over shards adds squares in another order than a norm over whole tensors, so results here are compared within
the rounding of the dtype: 1e-6 in fp32 and 1e-14 in fp64, relative, for sums of at most a few thousand squares. The
maximum norm has no sum and is compared bit for bit.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests import models
from tests.oracle import STAGES, STAGES_AT, TIMEOUT_S, WORLDS, Plain, Run, Sharded, assert_matches
from zeroshard.testing import run_ranks

RELATIVE = {torch.float32: 1e-6, torch.float64: 1e-14}
NORMS = [1.0, 2.0, math.inf]


def clipped(run: Run, p: float, foreach: bool | None, dtype: torch.dtype) -> dict[str, Any]:
    """Train two steps of SGD with a clip that bites; return what it returned and the parameters."""
    model = models.build(models.Stack).to(dtype)
    optimizer = models.sgd(model, momentum=0.0)
    run.shard(model, optimizer)
    norms: list[Tensor] = []
    for step in range(2):
        run.backward(models.stack_loss(model, step, run.rank))
        norms.append(run.grad_norm(p).detach().clone())
        norms.append(clip_grad_norm_(model.parameters(), 0.1, norm_type=p, foreach=foreach).detach().clone())
        norms.append(run.grad_norm(p).detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    with run.gathered():
        return {"norms": norms, "parameters": {name: q.detach().clone() for name, q in model.named_parameters()}}


WAYS = [*((torch.float32, foreach) for foreach in (None, False, True)), (torch.float64, None)]


def clipped_every_way(stages: Sequence[int], p: float) -> dict[Any, tuple[Any, dict[int, Any]]]:
    results = {}
    for dtype, foreach in WAYS:
        engine = {stage: clipped(Sharded(stage), p, foreach, dtype) for stage in stages}
        results[dtype, foreach] = clipped(Plain(), p, foreach, dtype), engine
    return results


@pytest.mark.product
@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("world", WORLDS)
def test_clip_grad_norm_and_grad_norm_are_exact(world: int, p: float) -> None:
    stages = STAGES_AT[world]
    by_rank = run_ranks(clipped_every_way, world, stages, p, timeout_s=2 * TIMEOUT_S, process_group=world > 1)
    for rank, results in enumerate(by_rank):
        assert len(results) == len(WAYS)
        for (dtype, foreach), (plain, engine) in results.items():
            for stage in stages:
                where = f"[rank {rank}/{world}] stage {stage}, p {p}, foreach {foreach}, {dtype}"
                assert_close(plain, engine[stage], RELATIVE[dtype], where)
    for results in by_rank[1:]:
        for key, (_, engine) in results.items():
            for stage in stages:
                for mine, first in zip(engine[stage]["norms"], by_rank[0][key][1][stage]["norms"], strict=True):
                    assert torch.equal(mine, first), f"ranks disagree on a norm: {mine} and {first}"


def assert_close(plain: dict[str, Any], engine: dict[str, Any], relative: float, where: str) -> None:
    """Require norms and parameters to agree within a relative rounding."""
    for expected, actual in zip(plain["norms"], engine["norms"], strict=True):
        assert actual.ndim == 0, f"{where}: shape {tuple(actual.shape)}"
        assert actual.dtype == expected.dtype, f"{where}: norm in {actual.dtype}, expected {expected.dtype}"
        assert abs(actual - expected) <= relative * expected, f"{where}: norm {actual}, expected {expected}"
    for name, expected in plain["parameters"].items():
        error = torch.linalg.vector_norm(engine["parameters"][name] - expected)
        limit = relative * torch.linalg.vector_norm(expected)
        assert error <= limit, f"{where}: {name} off by {error:.3e}, limit {limit:.3e}"


def generous(run: Run) -> None:
    """Clip at a limit that nothing reaches: the gradients must not change by a bit."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    run.shard(model, optimizer)
    for step in range(3):
        run.backward(models.stack_loss(model, step, run.rank))
        clip_grad_norm_(model.parameters(), 1e6)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.product
@pytest.mark.parametrize("world", WORLDS)
def test_a_limit_that_is_not_reached_changes_nothing(world: int) -> None:
    assert_matches(generous, world)


class Parts(models.Stack):
    """A stack that never runs its middle block."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[2](self.blocks[0](self.stem(x))))


def clip_parts(run: Run) -> list[Tensor]:
    model = models.build(Parts)
    optimizer = models.sgd(model)
    run.shard(model, optimizer)
    norms = []
    for step in range(2):
        run.backward(models.stack_loss(model, step, run.rank))
        norms.append(clip_grad_norm_(model.blocks.parameters(), 1e-2).detach().clone())
        norms.append(clip_grad_norm_(model.head.parameters(), 1e-1).detach().clone())
        norms.append(clip_grad_norm_(model.head.weight, 1e-2).detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    with run.gathered():
        return norms + [q.detach().clone() for q in model.parameters()]


def clip_parts_both() -> tuple[list[Tensor], list[list[Tensor]]]:
    return clip_parts(Plain()), [clip_parts(Sharded(stage)) for stage in STAGES]


@pytest.mark.product
@pytest.mark.parametrize("world", [2, 3])
def test_parts_of_a_model_are_clipped_by_themselves(world: int) -> None:
    for plain, engine in run_ranks(clip_parts_both, world, timeout_s=TIMEOUT_S):
        for stage in STAGES:
            for index, (expected, actual) in enumerate(zip(plain, engine[stage], strict=True)):
                error = torch.linalg.vector_norm(actual - expected)
                limit = 1e-6 * torch.linalg.vector_norm(expected)
                assert error <= limit, f"stage {stage}, value {index}: off by {error:.3e}, limit {limit:.3e}"


def not_finite(run: Run) -> None:
    model = models.build(models.Stack)
    run.shard(model, models.sgd(model))
    loss = models.stack_loss(model, 0, run.rank) * (math.inf if run.rank == 0 else 1.0)
    run.backward(loss)
    try:
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        run.record(error=str(error)[:40], is_finite=torch.isfinite(run.grad_norm()))


@pytest.mark.product
@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_learns_of_a_norm_that_is_not_finite(world: int) -> None:
    for stages in assert_matches(not_finite_records, world):
        for result in stages.values():
            assert result["records"][0]["error"].startswith("The total norm"), result["records"]


def not_finite_records(run: Run) -> None:
    """As `not_finite`, then clear what is not finite, since NaN never equals itself."""
    not_finite(run)
    run.models[-1].zero_grad()


def without_gradients(run: Run) -> None:
    model = models.build(models.Stack)
    optimizer = models.sgd(model)
    run.shard(model, optimizer)
    run.record(norm=run.grad_norm(), clipped=clip_grad_norm_(model.parameters(), 1.0))


def test_the_norm_without_any_gradient_is_zero() -> None:
    assert_matches(without_gradients, 2)


def accumulated(run: Run, p: float) -> list[Tensor]:
    model = models.build(models.Stack)
    run.shard(model, models.sgd(model))
    norms = []
    for micro in range(3):
        run.backward(models.stack_loss(model, 0, run.rank, micro))
        norms.append(run.grad_norm(p).detach().clone())
    return norms


def accumulated_both() -> list[tuple[list[Tensor], list[list[Tensor]]]]:
    return [(accumulated(Plain(), p), [accumulated(Sharded(stage), p) for stage in STAGES]) for p in NORMS]


def norm_of_each_step(run: Run) -> list[Tensor]:
    """Clip once a step, as most loops do."""
    model = models.build(models.Stack)
    optimizer = models.sgd(model)
    run.shard(model, optimizer)
    norms = []
    for step in range(3):
        run.backward(models.stack_loss(model, step, run.rank))
        norms.append(clip_grad_norm_(model.parameters(), 0.1).detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def norms_of_each_step() -> tuple[list[Tensor], list[list[Tensor]]]:
    return norm_of_each_step(Plain()), [norm_of_each_step(Sharded(stage)) for stage in STAGES]


def test_each_step_has_a_norm_of_its_own() -> None:
    for plain, by_stage in run_ranks(norms_of_each_step, 2, timeout_s=TIMEOUT_S):
        for stage, norms in zip(STAGES, by_stage, strict=True):
            for step, (expected, norm) in enumerate(zip(plain, norms, strict=True)):
                assert abs(norm - expected) <= 1e-6 * expected, f"stage {stage}, step {step}: {norm}, not {expected}"


def test_the_norm_follows_each_backward() -> None:
    """A norm is agreed once on first request: the next backward must make it ask again."""
    for plain, engine in run_ranks(accumulated_both, 2, timeout_s=TIMEOUT_S)[0]:
        for stage in STAGES:
            for expected, actual in zip(plain, engine[stage], strict=True):
                assert abs(actual - expected) <= 1e-6 * expected, f"stage {stage}: {actual}, expected {expected}"


def count_agreements() -> list[int]:
    """Return how many bytes of agreement one clip sends, for a shallow and a deep model."""
    sent = []
    for depth in (1, 6):
        model: nn.Module = models.build(models.Stack, depth=depth)
        optimizer = models.sgd(model)
        run = Sharded(3)
        run.shard(model, optimizer)
        for step in range(3):
            before = run.zeros[0].traffic().sent_bytes.get("agree", 0)
            run.backward(models.stack_loss(model, step, run.rank))
            middle = run.zeros[0].traffic().sent_bytes.get("agree", 0)
            clip_grad_norm_(model.parameters(), 1.0)
            after = run.zeros[0].traffic().sent_bytes.get("agree", 0)
            assert after > middle, f"a clip over ranks must agree on something: {before}, {middle}, {after} bytes"
            optimizer.step()
            optimizer.zero_grad()
        sent.append(after - middle)
    return sent


def test_one_clip_is_one_collective() -> None:
    """All norms travel together: less than one double for each parameter and gradient kind, not a message each."""
    shallow, deep = run_ranks(count_agreements, 2, timeout_s=TIMEOUT_S)[0]
    extra = len(list(models.Stack(depth=6).parameters())) - len(list(models.Stack(depth=1).parameters()))
    assert deep - shallow <= 8 * extra * 2, f"{shallow} bytes for a shallow model, {deep} for a deep one"


def maximum_norms(run: Run) -> None:
    """Take the maximum norm, which has no rounding, by every implementation of torch's."""
    model = models.build(models.Stack)
    optimizer = models.sgd(model)
    run.shard(model, optimizer)
    for step, foreach in enumerate((None, True, False)):
        run.backward(models.stack_loss(model, step, run.rank))
        run.record(
            norm=run.grad_norm(math.inf),
            clipped=clip_grad_norm_(model.parameters(), 1e-2, norm_type=math.inf, foreach=foreach),
            after=run.grad_norm(math.inf),
        )
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.product
@pytest.mark.parametrize("world", WORLDS)
def test_the_maximum_norm_is_exact_bit_for_bit(world: int) -> None:
    assert_matches(maximum_norms, world)
