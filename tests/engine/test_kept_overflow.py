"""fp16: a step was skipped and its gradients were kept. No later step may use them, until `zero_grad`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.engine.test_guard import OPTIMIZERS, Trained, differences, memory_of
from tests.oracle import STAGES, run_cases
from tests.rotation import third

KINDS = ("host", "messages", "device")
"""Where gradients are checked, and for the host how ranks communicate."""


def skipped(run: Trained) -> list[str]:
    """Make a step of each optimizer; return what these have changed."""
    before = run.state()["parameters"]
    for optimizer in run.optimizers:
        optimizer.step()
    return differences(run.state()["parameters"], before)


def accumulate(run: Trained) -> list[str]:
    run.backward(3)
    wrong = skipped(run)
    with run.zero.no_sync():
        run.backward(4)
    run.backward(5)
    return wrong + skipped(run)


def step_again(run: Trained) -> list[str]:
    return skipped(run) + skipped(run)


def clip_by_norm(run: Trained) -> list[str]:
    run.backward(3)
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    return skipped(run)


def clip_by_value(run: Trained) -> list[str]:
    """An infinity would become 0.5 without the check at the reduction."""
    run.backward(3)
    nn.utils.clip_grad_value_(run.model.parameters(), 0.5)
    return skipped(run)


def freeze(run: Trained) -> list[str]:
    run.model.second.requires_grad_(False)
    run.backward(3)
    wrong = skipped(run)
    run.model.second.requires_grad_(True)
    return wrong


def use_other_layers(run: Trained) -> list[str]:
    for p in run.model.first.parameters():
        p.grad = None
    run.model.first(torch.ones(2, 5).half()).sum().backward()
    return skipped(run)


def step_another_optimizer(run: Trained) -> list[str]:
    """The first optimizer's gradients are finite, and it steps last."""
    run.optimizers[0].zero_grad()
    run.backward(3)
    run.optimizers.reverse()
    return [difference for difference in skipped(run) if not difference.startswith("/first")]


def resume(run: Trained, folder: Path) -> list[str]:
    """Gradients are no part of a checkpoint: those that are held stay held."""
    run.zero.save(folder)
    run.zero.load(folder)
    run.backward(3)
    return skipped(run)


AFTER: dict[str, Callable[..., list[str]]] = {
    one.__name__: one
    for one in (
        accumulate,
        step_again,
        clip_by_norm,
        clip_by_value,
        freeze,
        use_other_layers,
        step_another_optimizer,
        resume,
    )
}


def kept(kind: str, stage: int, after: str, name: str, offload: Any, folder: Path) -> list[str]:
    """Skip a step, keep its gradients, and return what was wrong until they were dropped. Runs on a rank."""
    cls, options = OPTIMIZERS[name]

    def make(params: Any) -> list[torch.optim.Optimizer]:
        if after != "step_another_optimizer":
            return [cls(params, **options)]
        weight, bias, *others = params
        return [cls([weight, bias], **options), cls(others, **options)]

    methods = ("first.forward",) if after == "use_other_layers" else ()
    settings = zs.Settings(watchdog_s=20.0, shared_memory=kind == "host", forward_methods=methods)
    with memory_of("device" if kind == "device" else "host"):
        run = Trained(stage, make, precision="fp16", settings=settings, offload=offload)
    run.backward(2)
    for optimizer in run.optimizers:
        optimizer.step()
    run.model.zero_grad()
    run.backward(2, is_bad=True)
    wrong = skipped(run)
    step = AFTER[after]
    wrong += step(run, folder / f"{kind}-{stage}") if after == "resume" else step(run)
    before = run.state()["parameters"]
    run.model.zero_grad()
    run.backward(6)
    run.optimizers[0].step()
    now = run.state()["parameters"]
    if not differences(now, before) or not all(p.isfinite().all() for p in now.values()):
        wrong.append("the step after zero_grad()")
    if run.zero._engine.loss_scale.history[0] != 65536.0:
        wrong.append(f"scales {run.zero._engine.loss_scale.history}")
    return wrong


@pytest.mark.product
@pytest.mark.parametrize("after", AFTER)
def test_gradients_of_a_skipped_step_are_not_used(after: str, tmp_path: Path) -> None:
    cases = [(kind, stage, after, "SGD", None, tmp_path) for kind in KINDS for stage in STAGES]
    found = run_cases(kept, 2, third(cases[::-1]), timeout_s=60.0)
    assert {case[:2]: wrong for case, wrong in found.items() if any(wrong)} == {}


def test_gradients_of_a_skipped_step_are_not_used_on_one_rank(tmp_path: Path) -> None:
    cases = [(kind, 2, after, "SGD", None, tmp_path) for kind in ("host", "device") for after in AFTER]
    found = run_cases(kept, 1, third(cases), timeout_s=60.0)
    assert {case[:3]: wrong for case, wrong in found.items() if any(wrong)} == {}


def assigned(kind: str, stage: int) -> list[str]:
    """Assign a gradient that is not finite. Runs on a rank."""
    with memory_of(kind):
        run = Trained(stage, lambda params: torch.optim.SGD(params, lr=0.1), precision="fp16")
    run.backward(2)
    run.model.second.weight.grad = torch.full((3, 7), float("inf"))
    return skipped(run)


def test_an_assigned_gradient_that_is_not_finite_is_not_used() -> None:
    cases = [(kind, stage) for kind in ("host", "device") for stage in STAGES]
    found = run_cases(assigned, 2, third(cases[::-1]))
    assert {case: wrong for case, wrong in found.items() if any(wrong)} == {}


@pytest.mark.product
@pytest.mark.parametrize("after", ["accumulate", "clip_by_value", "step_again"])
def test_gradients_elsewhere_of_a_skipped_step_are_not_used(after: str, tmp_path: Path) -> None:
    offloads = (zs.Offload(), zs.Offload(states=0.5))
    cases = [("messages", stage, after, "AdamW, a loop", offload, tmp_path) for stage in STAGES for offload in offloads]
    found = run_cases(kept, 2, third(cases[::-1]), timeout_s=60.0)
    assert {case[1:5]: wrong for case, wrong in found.items() if any(wrong)} == {}
