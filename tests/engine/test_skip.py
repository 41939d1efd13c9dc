"""`zs.Settings(non_finite="skip")`: a step with a gradient that is not finite is left out on all ranks, and said."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroshard as zs
from tests.engine.test_guard import Trained, differences, memory_of
from tests.oracle import run_cases
from tests.rotation import third
from zeroshard.core import guard as guards

STAGES = (0, 1, 2, 3)
STEPS = 6
BAD_STEPS = (0, 3, 5)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(stage: int, kind: str, precision: str, spoils: bool) -> tuple[dict[str, Any], list[str], int]:
    """Train with bad steps, or without these; return state, log, and what the guard counted. Runs on a rank."""
    lines = Lines()
    logger = logging.getLogger(guards.__name__)
    logger.addHandler(lines)
    try:
        with memory_of(kind):
            run = Trained(
                stage,
                lambda params: torch.optim.AdamW(params, lr=0.01),
                precision=precision,
                settings=zs.Settings(watchdog_s=20.0, non_finite="skip"),
            )
            for step in range(STEPS):
                if spoils or step not in BAD_STEPS:
                    run.backward(step, is_bad=step in BAD_STEPS)
                    run.optimizer.step()
                    run.optimizer.zero_grad()
            return run.state(), lines.lines, run.zero._engine.guard.skipped
    finally:
        logger.removeHandler(lines)


@pytest.mark.product
@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_bad_step_is_left_out(kind: str) -> None:
    stages = third(STAGES[::-1])
    cases = [
        (stage, kind, precision, spoils)
        for stage in stages
        for precision in ("fp32", "bf16")
        for spoils in (True, False)
    ]
    found = run_cases(train, 2, cases, timeout_s=120.0)
    for stage in stages:
        for precision in ("fp32", "bf16"):
            pairs = zip(found[stage, kind, precision, True], found[stage, kind, precision, False], strict=True)
            for rank, ((state, lines, skipped), (expected, none, never)) in enumerate(pairs):
                where = f"stage {stage}, {precision}, rank {rank}"
                del state["steps"], expected["steps"]  # a skipped one counts
                assert differences(state, expected) == [], where
                assert (skipped, never, none) == (len(BAD_STEPS), 0, []), where
                assert len(lines) == (len(BAD_STEPS) if rank == 0 else 0), where
                assert all("the gradient of 'second.weight' is not finite" in line for line in lines), lines


def test_another_word_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="must be 'raise' or 'skip'; got 'ignore'"):
        zs.shard(model, settings=zs.Settings(non_finite="ignore"))  # type: ignore[arg-type]
    assert isinstance(model(torch.ones(2)), Tensor)


def test_updates_on_the_host_wait_after_a_skipped_step() -> None:
    """Kernels on the host cannot read a device's flag, however many steps were skipped."""
    with memory_of("device"):
        run = Trained(
            2, lambda params: torch.optim.AdamW(params, lr=0.01, fused=True), settings=zs.Settings(non_finite="skip")
        )
    guard = run.zero._engine.guard
    guard.updates_on_host = True
    for step, is_bad in enumerate((False, True, False)):
        run.backward(step, is_bad=is_bad)
        run.optimizer.step()
        assert guard.waits == step + 1
        run.optimizer.zero_grad()
    assert guard.skipped == 1
