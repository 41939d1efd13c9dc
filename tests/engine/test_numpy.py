"""Parameters that numpy was shown: torch cannot give their memory back, and training goes on all the same."""

import warnings

import numpy as np
import pytest

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S
from zeroshard.testing import run_ranks


def looked_at(stage: int, shares: bool, looks: bool) -> tuple[list[np.ndarray], list[str]]:
    """Train, with or without a look at the parameters through numpy; return them at the end, and what was warned of."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer, stage=stage, settings=zs.Settings(shared_memory=shares, watchdog_s=WATCHDOG_S))
    seen = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(3):
            models.stack_loss(model, step, zero.mesh.rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            if looks:
                with zero.gathered():
                    seen += [p.detach().numpy() for p in model.parameters()]
    assert not looks or all(np.isfinite(array).all() for array in seen)
    with zero.gathered():
        return [p.detach().clone().numpy() for p in model.parameters()], [str(one.message) for one in warned]


@pytest.mark.product
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_look_through_numpy_changes_nothing(stage: int, shares: bool) -> None:
    plain = run_ranks(looked_at, 2, stage, shares, False, timeout_s=TIMEOUT_S)
    seen = run_ranks(looked_at, 2, stage, shares, True, timeout_s=TIMEOUT_S)
    for (expected, _), (found, warned) in zip(plain, seen, strict=True):
        assert all(map(np.array_equal, expected, found))
        told = [text for text in warned if "numpy shares the memory" in text]
        # Once a unit, and only where memory comes and goes.
        assert bool(told) == (stage == 3 and not shares)
        assert len(told) == len(set(told))
