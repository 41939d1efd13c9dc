"""`optimizer.step(closure)`: the closure runs once, before the update, and everything after it is that of a step."""

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard as zs
from tests import models
from tests.engine.test_guard import Trained, differences, memory_of
from tests.engine.test_offload_early import in_background
from tests.oracle import STAGES, WATCHDOG_S, Run, Script, assert_matches, run_cases
from tests.rotation import third

STEPS = 3


class Signs(Optimizer):
    """An optimizer of a class that nobody knows, which calls its closure as torch's do."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])
        return loss


class Extended(torch.optim.AdamW):
    """A class whose step calls the step of the class that it extends, whose hooks run inside."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure)


class Twice(Signs):
    """An optimizer that computes the loss again after its update."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        return closure() if closure is not None else loss


def start(run: Run, make: Callable[[nn.Module], Optimizer], **options: Any) -> tuple[nn.Module, Optimizer]:
    model = models.build(models.Stack)
    optimizer = make(model)
    run.shard(model, optimizer, **options)
    return model, optimizer


def closure_of(run: Run, model: nn.Module, optimizer: Optimizer, step: int, clip: float = 0.0) -> Callable[[], Tensor]:
    """Return what a loop passes to `step`."""

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = models.stack_loss(model, step, run.rank)
        run.backward(loss)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        return loss

    return closure


# ---- loops: each is a script that plain torch runs, too


def by_name(run: Run) -> None:
    model, optimizer = start(run, models.adamw)
    for step in range(STEPS):
        run.record(loss=optimizer.step(closure=closure_of(run, model, optimizer, step)))


def by_position_with_a_clip(run: Run) -> None:
    model, optimizer = start(run, lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True))
    for step in range(STEPS):
        run.record(loss=optimizer.step(closure_of(run, model, optimizer, step, clip=0.1)))


def classes_of_other_people(run: Run) -> None:
    for make in (Signs, Extended):
        model, optimizer = start(run, lambda model, make=make: make(model.parameters(), lr=0.01))
        for step in range(STEPS):
            run.record(loss=optimizer.step(closure_of(run, model, optimizer, step)))


def whole_matrices(run: Run) -> None:
    model, optimizer = start(run, lambda model: zs.optim.Muon(zs.optim.muon_groups(model), lr=0.01))
    for step in range(STEPS):
        run.record(loss=optimizer.step(closure_of(run, model, optimizer, step)))


def accumulates(run: Run) -> None:
    """The first micro-batch is another step's closure, called by the loop, as Lightning does."""
    for waits in (True, False):
        model, optimizer = start(run, models.sgd)
        for step in range(STEPS):
            with run.no_sync() if waits else contextlib.nullcontext():
                closure_of(run, model, optimizer, step)()

            def closure(model: nn.Module = model, step: int = step) -> Tensor:
                for micro in (1, 2):
                    loss = models.stack_loss(model, step, run.rank, micro)
                    run.backward(loss)
                return loss

            run.record(loss=optimizer.step(closure))


def leaves_a_batch_out(run: Run) -> None:
    """A closure that computes nothing leaves no gradient."""
    model, optimizer = start(run, models.adamw)
    for step in range(STEPS):
        if step == 1:
            optimizer.zero_grad()
            run.record(loss=optimizer.step(lambda: None))
        else:
            run.record(loss=optimizer.step(closure_of(run, model, optimizer, step)))


def hooks_and_schedulers(run: Run) -> None:
    """Hooks of user code run before the closure, and see the gradients of the step before."""
    model, optimizer = start(run, models.adamw)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(run.grad_norm()))
    optimizer.register_step_post_hook(lambda *_: seen.append(run.grad_norm()))
    for step in range(STEPS):
        run.record(loss=optimizer.step(closure_of(run, model, optimizer, step)))
        scheduler.step()
    run.record(seen=seen, rates=scheduler.get_last_lr())


def two_optimizers(run: Run) -> None:
    model = models.build(models.Stack)
    named = list(model.named_parameters())
    first = torch.optim.SGD([p for name, p in named if "up" in name], lr=0.1, momentum=0.9)
    second = torch.optim.AdamW([p for name, p in named if "up" not in name], lr=0.01)
    run.shard(model, first, second)
    for step in range(STEPS):
        run.record(loss=first.step(closure_of(run, model, first, step)))
        run.record(loss=second.step(closure_of(run, model, second, step)))


def scaler_that_is_off(run: Run) -> None:
    model, optimizer = start(run, models.adamw)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(STEPS):
        run.record(loss=scaler.step(optimizer, closure=closure_of(run, model, optimizer, step)))
        scaler.update()


def scaler_that_skips(run: Run) -> None:
    """With a scaler a loop calls its closure itself; torch refuses closures there."""
    model, optimizer = start(run, models.adamw)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        loss = models.stack_loss(model, step, run.rank) * (float("inf") if step == 1 else 1.0)
        run.backward(scaler.scale(loss))
        with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
            scaler.step(optimizer, closure=lambda: None)
        scaler.step(optimizer)
        scaler.update()
        run.record(scale=scaler.get_scale())


def recomputes(run: Run) -> None:
    model, optimizer = start(run, models.adamw, activations="recompute")
    for step in range(STEPS):
        run.record(loss=optimizer.step(closure_of(run, model, optimizer, step)))


SCRIPTS = (
    by_name,
    by_position_with_a_clip,
    classes_of_other_people,
    whole_matrices,
    accumulates,
    leaves_a_batch_out,
    hooks_and_schedulers,
    two_optimizers,
    scaler_that_is_off,
    scaler_that_skips,
    recomputes,
)


def all_scripts(run: Run) -> None:
    for script in SCRIPTS:
        script(run)


@pytest.mark.product
@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_closure_is_called_once_before_the_update(script: Script, shared_memory: bool) -> None:
    assert_matches(script, 2, STAGES, {"shared_memory": shared_memory})


def test_a_closure_is_called_once_on_one_rank() -> None:
    assert_matches(all_scripts, 1, STAGES)


# ---- with what plain torch has not: the same loop without a closure


def train(kind: str, stage: int, name: str, uses_closure: bool) -> dict[str, Any]:
    """Train with steps that are skipped; return the state, the losses and the number of skipped steps."""
    options: dict[str, Any] = {"precision": name if name in ("fp16", "bf16") else "fp32"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(memory_of("device" if kind == "device" else "host"))
        if name == "background":
            stack.enter_context(in_background())
        if name in ("host", "background"):
            options["offload"] = zs.Offload()
        if name == "files":
            options["offload"] = stack.enter_context(tempfile.TemporaryDirectory())
        settings = zs.Settings(watchdog_s=20.0, non_finite="skip", shared_memory=kind == "host")
        cls = Extended if name == "extended" else torch.optim.AdamW
        run = Trained(stage, lambda params: cls(params, lr=0.01), settings=settings, **options)
        losses = []
        for step in range(5):
            is_bad = step in (1, 3)
            if uses_closure:
                losses.append(run.optimizer.step(lambda: run.backward(step, is_bad=is_bad)))  # noqa: B023 (once)
            else:
                losses.append(run.backward(step, is_bad=is_bad))
                run.optimizer.step()
            run.optimizer.zero_grad()
        guard = run.zero._engine.guard
        return {**run.state(), "losses": dict(enumerate(losses)), "skipped": guard.skipped}


@pytest.mark.product
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "extended", "host", "background", "files"])
def test_steps_are_skipped_as_without_a_closure(name: str) -> None:
    kinds = ("host", "messages", "device") if name in ("fp32", "fp16") else ("host",)
    stages = third(STAGES[::-1]) if name != "background" else (3,)
    cases = [(kind, stage, name, uses) for kind in kinds for stage in stages for uses in (True, False)]
    found = run_cases(train, 2, cases, timeout_s=60.0)
    for kind in kinds:
        for stage in stages:
            pairs = zip(found[kind, stage, name, True], found[kind, stage, name, False], strict=True)
            for rank, (with_closure, without) in enumerate(pairs):
                assert differences(with_closure, without) == [], f"{kind}, stage {stage}, rank {rank}"
                assert without["skipped"] == (0 if name == "fp16" else 2)


# ---- what is refused


def call_twice(stage: int, is_whole: bool) -> tuple[str, bool, list[int]]:
    """Let an optimizer call its closure twice; return the error, and whether its groups have their entries."""
    model = models.build(models.Stack)
    optimizer = Twice(model.parameters())
    if is_whole:
        zs.optim.whole_matrix(optimizer)
    zs.shard(model, optimizer, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    before, calls = [id(p) for p in optimizer.param_groups[0]["params"]], list[int]()

    def closure() -> Tensor:
        calls.append(1)
        loss = models.stack_loss(model, 0, 0)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError) as caught:
        optimizer.step(closure)
    kept = [id(p) for p in optimizer.param_groups[0]["params"]] == before
    closure()
    optimizer.step()
    return str(caught.value), kept, calls


def test_a_second_call_of_the_closure_raises() -> None:
    cases = [(stage, is_whole) for stage in STAGES for is_whole in (False, True)]
    for case, results in run_cases(call_twice, 2, third(cases[::-1])).items():
        for rank, (text, kept, calls) in enumerate(results):
            assert f"[rank {rank}/2] Twice.step() called its closure a second time" in text, case
            assert kept, case
            assert calls == [1, 1], case


def test_other_arguments_of_step_are_refused() -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zs.shard(model, optimizer)
    for arguments in ((None, 1.0), (3.0,)):
        with pytest.raises(TypeError, match=r"AdamW\.step\(\) takes a closure and no other positional argument"):
            optimizer.step(*arguments)


def test_a_closure_is_not_called_where_no_step_is_possible() -> None:
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = zs.shard(model, optimizer)
    with zero.gathered(), pytest.raises(RuntimeError, match="under gathered"):
        optimizer.step(lambda: pytest.fail("called"))
