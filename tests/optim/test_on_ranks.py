"""Lion and LAMB on slices: element by element with the bits of data parallelism, norms of whole tensors for LAMB."""

from typing import Any

import pytest
import torch

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, Plain, Run, Sharded, assert_matches, assert_same
from zeroshard.testing import run_ranks


def lion(run: Run) -> None:
    model = models.build(models.Stack, depth=2)
    run.shard(model, optimizer := zs.optim.Lion(model.parameters(), lr=1e-3, weight_decay=0.1))
    for step in range(4):
        run.backward(models.stack_loss(model, step, run.rank))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.product
@pytest.mark.parametrize("world", [2, 3])
def test_lion_has_the_bits_of_data_parallelism(world: int) -> None:
    assert_matches(lion, world)


def lamb(run: Run, options: dict[str, Any]) -> dict[str, Any]:
    """Train with a parameter that no rank uses in some steps, and two groups."""
    model = models.build(models.Routed, depth=3)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 0.03}]
    run.shard(model, optimizer := zs.optim.Lamb(groups, lr=0.01), **options)
    for step in range(5):
        x = models.features(step, run.rank)
        loss = (model(x, [0, 2] if step % 2 else [0, 1, 2]) - models.targets(step, run.rank)).square().mean()
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)
    return run.result()


def lamb_everywhere(options: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return lamb(Plain(), options), [lamb(Sharded(stage), options) for stage in STAGES]


@pytest.mark.product
@pytest.mark.parametrize(
    ("world", "options"), [(1, {}), (2, {}), (3, {"precision": "fp32"}), (4, {"mesh": 2})], ids=str
)
def test_lamb_has_the_same_bits_at_all_stages_and_the_norms_of_whole_tensors(
    world: int, options: dict[str, Any]
) -> None:
    for plain, sharded in run_ranks(lamb_everywhere, world, options, timeout_s=TIMEOUT_S, process_group=world > 1):
        for other in sharded[1:]:
            assert_same(sharded[0], other, "another stage")
        for before, after in zip(plain["parameters"], sharded[0]["parameters"], strict=True):
            for name, value in before.items():
                torch.testing.assert_close(after[name], value, rtol=1e-6, atol=1e-6, msg=name)


def one_step(*, is_local: bool) -> dict[str, torch.Tensor]:
    run, model = Sharded(3), models.build(models.Stack)
    run.shard(model, optimizer := zs.optim.Lamb(model.parameters(), lr=0.01))
    if is_local:
        del optimizer.sums
    models.stack_loss(model, 0, run.rank).backward()
    optimizer.step()
    with run.gathered():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def distance_of_local_norms() -> float:
    exact, local = one_step(is_local=False), one_step(is_local=True)
    return max(float((exact[name] - local[name]).abs().max()) for name in exact)


def test_norms_of_slices_would_be_seen() -> None:
    assert min(run_ranks(distance_of_local_norms, 2, timeout_s=TIMEOUT_S)) > 1e-4
