"""A class whose step calls the step of the class that it extends: torch runs the hooks of both, and it is one step."""

from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.engine.test_guard import Trained, differences, memory_of
from tests.oracle import STAGES, run_cases
from tests.rotation import third

BAD_STEPS = (1, 2)


class Named(torch.optim.AdamW):
    """A class with the step of the class that it extends."""


class Extended(torch.optim.AdamW):
    """As many do."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Failing(Extended):
    """Fails once, after the step that it extends."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.fails:
            self.fails = False
            raise OSError("a disk is full")
        return loss


def train(kind: str, stage: int, cls: type[torch.optim.AdamW], precision: str) -> dict[str, Any]:
    """Train with steps that are skipped, and gradients kept after one; return what a step changes. Runs on a rank."""
    torch.optim.AdamW([torch.zeros(1)])  # since then torch runs the hooks in this class's step, too
    settings = zs.Settings(watchdog_s=20.0, non_finite="skip", shared_memory=kind == "host")
    with memory_of("device" if kind == "device" else "host"):
        run = Trained(stage, lambda params: cls(params, lr=0.01, fused=True), precision=precision, settings=settings)
        for step in range(5):
            run.backward(step, is_bad=step in BAD_STEPS)
            run.optimizer.step()
            if step != 1 or precision != "fp16":
                run.optimizer.zero_grad()
        counts = {"skipped": run.zero._engine.guard.skipped, "sent": run.zero.traffic().sent_bytes}
        counts["sent"].pop("state", None)
        scale = run.zero._engine.loss_scale
        return {**counts, **run.state(), "history": list(scale.history) if scale is not None else []}


@pytest.mark.product
@pytest.mark.parametrize("kind", ["host", "messages", "device"])
def test_it_is_one_step(kind: str) -> None:
    pairs = third([(stage, precision) for stage in STAGES[::-1] for precision in ("fp32", "bf16", "fp16")])
    cases = [(kind, stage, cls, precision) for stage, precision in pairs for cls in (Named, Extended)]
    found = run_cases(train, 2, cases, timeout_s=60.0)
    for stage, precision in pairs:
        both = (found[kind, stage, cls, precision] for cls in (Extended, Named))
        for rank, (extended, plain) in enumerate(zip(*both, strict=True)):
            assert differences(extended, plain) == [], f"stage {stage}, {precision}, rank {rank}"


def test_a_step_after_one_that_failed_is_a_step() -> None:
    run = Trained(2, lambda params: Failing(params, lr=0.01), settings=zs.Settings(elementwise=True))
    run.backward(2)
    run.optimizer.fails = True
    with pytest.raises(OSError, match="a disk is full"):
        run.optimizer.step()
    for step in (3, 4):
        before = run.state()
        run.optimizer.zero_grad()
        run.backward(step)
        run.optimizer.step()
        assert differences(run.state()["parameters"], before["parameters"])
        assert run.state()["steps"] == [before["steps"][0] + 1]
