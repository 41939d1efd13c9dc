"""Updates of states in the backward: the bits of updates after `clip_grad_norm_` in `step()`, taken or made again.

Owns what may happen between a backward and its step. The oracle is the same program with `update="step"`. Where a test
is about what was updated ahead, it waits for the thread before the step, since a step updates what has not begun.
"""

import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from tests import models
from tests.engine.test_offload_states import rank_of, state_of
from tests.oracle import TIMEOUT_S, WATCHDOG_S, assert_same
from tools.settled import settled
from zeroshard.testing import run_ranks
from zeroshard.update import in_backward
from zeroshard.update.in_backward import InBackward

Made = tuple[Any, torch.optim.Optimizer, zs.Zero]

IN_BACKWARD = "in-backward"


def build(
    max_norm: float | None,
    is_ahead: bool,
    *,
    kind: Any = models.Stack,
    make: Callable[..., torch.optim.Optimizer] = models.adamw,
    stage: int = 2,
    states: float = 1.0,
    parameters: float = 0.0,
    **options: Any,
) -> Made:
    model = models.build(kind)
    optimizer = make(model)
    ahead = {"update": IN_BACKWARD, "max_norm": max_norm} if is_ahead else {}
    offload = zs.Offload(states=states, parameters=parameters, **ahead)  # type: ignore[arg-type]
    given = settled({"watchdog_s": WATCHDOG_S, **options})
    return model, optimizer, zs.shard(model, optimizer, stage=stage, offload=offload, **given)


def source_of(run: Made) -> InBackward:
    source = run[2]._sharded[0].source
    assert isinstance(source, InBackward)
    return source


def await_thread(run: Made) -> int:
    """Wait for all that was begun, and return how many updates that is."""
    jobs = source_of(run)._jobs.values()
    wait([job.future for job in jobs])
    return len(jobs)


def finish(run: Made, max_norm: float | None, is_ahead: bool, *, is_awaited: bool = True) -> Any:
    """Clip, step and forget gradients; return the norm before."""
    model, optimizer, zero = run
    if is_ahead:
        if is_awaited:
            await_thread(run)
        norm = zero.grad_norm() if max_norm else None
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm) if max_norm else None
    optimizer.step()
    optimizer.zero_grad()
    return norm if norm is None or norm.isfinite() else "not finite"


# -- the same bits ----------------------------------------------------------------------------------------------------


def plain(run: Made, step: int) -> torch.Tensor:
    loss = models.stack_loss(run[0], step, rank_of())
    loss.backward()
    return loss


def text(run: Made, step: int) -> torch.Tensor:
    loss = models.gpt_loss(run[0], step, rank_of())
    loss.backward()
    return loss


def accumulates(run: Made, step: int) -> torch.Tensor:
    """Three backwards, one of them without a sum over ranks; at the end of each of the others an update may begin."""
    with run[2].no_sync():
        models.stack_loss(run[0], step, rank_of(), 0).backward()
    models.stack_loss(run[0], step, rank_of(), 1).backward()
    if step == 2:
        return torch.zeros(())
    loss = models.stack_loss(run[0], step, rank_of(), 2)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def leaves_out(run: Made, step: int) -> torch.Tensor:
    """Ranks use other blocks at each step, some blocks no rank uses."""
    route = [block for block in range(3) if (block + step + rank_of()) % 3]
    out = run[0](models.features(step, rank_of()), route)
    loss = (out - models.targets(step, rank_of())).square().mean()
    loss.backward()
    return loss


def overflows(run: Made, step: int) -> torch.Tensor:
    loss = models.stack_loss(run[0], step, rank_of())
    (loss * (float("inf") if step in (1, 3) and rank_of() == 0 else 1.0)).backward()
    return loss


def sgd(model: nn.Module) -> torch.optim.SGD:
    return models.sgd(model, momentum=0.9, nesterov=True)


def plain_sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def nadam(model: nn.Module) -> torch.optim.NAdam:
    return torch.optim.NAdam([{"params": [p]} for p in model.parameters()], lr=0.01)


CASES: dict[str, tuple[Callable[..., torch.Tensor], float | None, dict[str, Any]]] = {
    "never clipped": (plain, 1000.0, {}),
    "always clipped": (plain, 0.05, {}),
    "clipped at times": (text, 4.9, {"kind": models.GPT, "stage": 3}),
    "without clipping": (plain, None, {"states": 0.4}),
    "accumulates": (accumulates, 4.4, {}),
    "leaves-out": (leaves_out, 1.78, {"kind": models.Routed, "stage": 3}),
    "overflows": (overflows, 2.4, {"precision": "fp16"}),
    "bf16": (text, 5.3, {"kind": models.GPT, "precision": "bf16", "stage": 3, "parameters": 0.5}),
    "recompute": (plain, 10.0, {"activations": "recompute", "stage": 3}),
    "sgd": (plain, 2.4, {"make": sgd}),
    "plain sgd": (plain, 10.0, {"make": plain_sgd}),
    "nadam": (plain, 10.0, {"make": nadam, "stage": 3}),
}
"""What is run, the largest norm and options."""
CLIPPED = ("always clipped", "clipped at times", "accumulates")
UNAWAITED = ("never clipped", "clipped at times", "bf16")
STEPS = 5


def train(names: tuple[str, ...], is_ahead: bool, is_awaited: bool) -> dict[str, Any]:
    found = {}
    for name in names:
        script, max_norm, options = CASES[name]
        run = build(max_norm, is_ahead, **options)
        seen: list[Any] = []
        for step in range(STEPS):
            seen.append(script(run, step).detach())
            seen.append(run[2].loss_scale)
            seen.append(finish(run, max_norm, is_ahead, is_awaited=is_awaited))
        found[name] = seen, state_of(run), dict(source_of(run).counts) if is_ahead else {}
        run[2].check_copies()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_updates_in_the_backward_are_the_same(world: int) -> None:
    made: dict[str, Any] = {"timeout_s": 3 * TIMEOUT_S, "process_group": world > 1}
    expected = run_ranks(train, world, (*CASES,), False, False, **made)
    for names, is_awaited in (((*CASES,), True), (UNAWAITED, False)):
        for rank, ahead in enumerate(run_ranks(train, world, names, True, is_awaited, **made)):
            for name in names:
                assert_same(expected[rank][name][:2], ahead[name][:2], name)
                counts = ahead[name][2]
                assert counts["begun"], name
                assert not is_awaited or bool(counts.get("taken")) is (name != "always clipped"), (name, counts)
                assert name not in CLIPPED or counts.get("clipped"), (name, counts)


# -- between a backward and its step ----------------------------------------------------------------------------------


def change_rates(run: Made) -> None:
    run[1].param_groups[0]["lr"] = 0.5


def change_rates_in_place(run: Made) -> None:
    rate = run[1].param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    rate.mul_(0.1)


def change_gradients(run: Made) -> None:
    for p in run[0].parameters():
        p.grad.mul_(0.5)


def replace_gradient(run: Made) -> None:
    run[0].head.bias.grad = torch.full((3,), 0.25)
    run[0].stem.weight.grad = None


def change_slices(run: Made) -> None:
    for group in run[1].param_groups:
        for master in group["params"]:
            master.data.mul_(0.9)


def change_slices_together(run: Made) -> None:
    with torch.no_grad():
        torch._foreach_mul_([master for group in run[1].param_groups for master in group["params"]], 0.9)


def change_slices_gradients(run: Made) -> None:
    for group in run[1].param_groups:
        for master in group["params"]:
            if master.grad is not None:
                master.grad.data.mul_(2)


def change_states(run: Made) -> None:
    for state in run[1].state.values():
        for value in state.values():
            value.data.mul_(0.5)


def change_parameters(run: Made) -> None:
    with torch.no_grad():
        run[0].head.weight.clamp_(-0.1, 0.1)


def write_back(run: Made) -> None:
    with run[2].gathered(writeback=True, states=True):
        run[0].stem.weight.data.add_(1.0)
        next(iter(run[1].state.values()))["exp_avg"].zero_()


def forget(run: Made) -> None:
    run[1].zero_grad()


def forget_by_model(run: Made) -> None:
    run[0].zero_grad()
    models.stack_loss(run[0], 17, rank_of()).backward()


def one_more(run: Made) -> None:
    models.stack_loss(run[0], 18, rank_of()).backward()


def evaluate(run: Made) -> torch.Tensor:
    with torch.no_grad():
        return run[0](models.features(3, 0)).clone()


def fail_in_backward(run: Made) -> None:
    """An exception in a hook ends a backward half way; its gradients count, as those of another one."""
    handle = run[0].blocks[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
    loss = models.stack_loss(run[0], 19, rank_of())
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()


def read_states(run: Made) -> Any:
    return {place: {k: v.clone() for k, v in state.items()} for place, state in enumerate(run[1].state.values())}


def average(run: Made) -> Any:
    one = run[2].ema(0.5)
    one.update()
    return [average.clone() for average in one._averages]


def save_and_load(run: Made) -> Any:
    folder = Path(f"/tmp/{os.environ['IN_BACKWARD_TEST']}")
    run[2].save(folder / "a")
    run[2].save(folder / "b", asynchronous=True)
    run[2].wait()
    run[2].load(folder / "a")


def fork(run: Made) -> None:
    if not (child := os.fork()):
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def move(run: Made) -> None:
    run[2].offload_states()
    run[2].reload_states()


def regroup(run: Made) -> None:
    run[1].param_groups[1]["params"].append(run[1].param_groups[0]["params"].pop())


BETWEEN: tuple[Callable[[Made], Any], ...] = (
    change_rates,
    change_rates_in_place,
    change_gradients,
    replace_gradient,
    change_slices,
    change_slices_together,
    change_slices_gradients,
    change_states,
    change_parameters,
    write_back,
    forget,
    forget_by_model,
    one_more,
    evaluate,
    fail_in_backward,
    read_states,
    average,
    save_and_load,
    fork,
    move,
    regroup,
)
KEPT = (evaluate, average, fork, move)
"""After which all that was updated ahead is taken."""
AGAIN = (forget_by_model, one_more, fail_in_backward)
"""Backwards, after which updates ahead begin again."""


def two_groups(model: nn.Module) -> torch.optim.AdamW:
    head = list(model.head.parameters())
    rest = [p for p in model.parameters() if all(p is not one for one in head)]
    return torch.optim.AdamW([{"params": rest}, {"params": head}], lr=torch.tensor(0.01), weight_decay=0.1)


def interrupt(is_ahead: bool, tmp: str) -> dict[str, Any]:
    """Do something between a backward and its step, in each of some runs; return its result, and what follows."""
    found = {}
    for what in BETWEEN:
        os.environ["IN_BACKWARD_TEST"] = f"{tmp}/{what.__name__}-{is_ahead}"
        run = build(100.0, is_ahead, make=two_groups)
        seen: list[Any] = []
        taken = 0
        for step in range(4):
            plain(run, step)
            if is_ahead:
                begun = await_thread(run)
            if step == 2:
                seen.append(what(run))
                if is_ahead:
                    assert begun > 3
                    before = source_of(run).counts["taken"]
            finish(run, 100.0, is_ahead)
            if is_ahead and step == 2:
                taken = source_of(run).counts["taken"] - before
                assert what in AGAIN or (taken == begun) is (what in KEPT), (what, taken, begun)
        found[what.__name__] = seen, state_of(run)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_what_happens_between_a_backward_and_its_step_counts(world: int, tmp_path: Path) -> None:
    made: dict[str, Any] = {"timeout_s": 3 * TIMEOUT_S, "process_group": world > 1}
    folder = f"../{tmp_path}"
    expected = run_ranks(interrupt, world, False, folder, **made)
    for plain, ahead in zip(expected, run_ranks(interrupt, world, True, folder, **made), strict=True):
        for what in BETWEEN:
            assert_same(plain[what.__name__], ahead[what.__name__], what.__name__)


def hold_states() -> list[bool]:
    """Keep tensors of the optimizer, and see that these are what later steps update."""
    run = build(None, True)
    for step in range(2):
        plain(run, step)
        finish(run, None, True)
    held = [(master, value) for master, state in run[1].state.items() for value in state.values()]
    for step in range(2, 5):
        plain(run, step)
        finish(run, None, True)
    assert source_of(run).counts["taken"]
    now = [(master, value) for master, state in run[1].state.items() for value in state.values()]
    return [one is other for pair in zip(held, now, strict=True) for one, other in zip(*pair, strict=True)]


def test_the_optimizers_tensors_stay_the_same_objects() -> None:
    (same,) = run_ranks(hold_states, 1, process_group=False)
    assert len(same) > 20
    assert all(same)


# -- what is refused --------------------------------------------------------------------------------------------------


def clip_by_scaler(run: Made) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.step(run[1])


CLIPS: dict[str, Callable[[Made], Any]] = {
    "clip_grad_norm_": lambda run: nn.utils.clip_grad_norm_(run[0].parameters(), 1.0),
    "clip_grad_norm_ of slices": lambda run: nn.utils.clip_grad_norm_(run[1].param_groups[0]["params"], 1.0),
    "clip_grad_value_": lambda run: nn.utils.clip_grad_value_(run[0].parameters(), 1.0),
    "clip_grads_with_norm_": lambda run: nn.utils.clip_grads_with_norm_(run[0].parameters(), 1.0, torch.ones(())),
    "GradScaler": clip_by_scaler,
}


def refuse() -> dict[str, list[str]]:
    said: dict[str, list[str]] = {}
    run = build(1.0, True)
    for step in range(2):
        plain(run, step)
        for name, clip in CLIPS.items():
            with pytest.raises(RuntimeError) as error:
                clip(run)
            said.setdefault(name, []).append(str(error.value))
        run[1].step()
        run[1].zero_grad()
    return said


@pytest.mark.parametrize("world", [1, 2])
def test_clipping_by_hand_names_the_mode_and_what_to_write(world: int) -> None:
    for by_name in run_ranks(refuse, world, process_group=world > 1):
        for name, said in by_name.items():
            for one in said:
                assert f"{name.split()[0]}" in one
                assert "Offload(update='in-backward')" in one
                assert ("precision='fp16'" if name == "GradScaler" else "max_norm=") in one
                assert "update='step'" in one


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update": "early"}, "must be 'step' or 'in-backward'; got 'early'"),
        ({"to": "/scratch"}, "to='/scratch'"),
        ({"gradients": 0.0}, "gradients=0.0"),
        ({"states": 0.0, "parameters": 1.0}, "states=0"),
        ({"max_norm": 0.0}, "a norm above 0"),
        ({"max_norm": float("nan")}, "a norm above 0"),
        ({"update": "step", "max_norm": 1.0}, "clip_grad_norm_"),
    ],
)
def test_arguments_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zs.Offload(**{"update": IN_BACKWARD, **options})


def test_text_names_the_mode() -> None:
    asked = zs.offload_of("states=0.5,update=in-backward,max_norm=1.5")
    assert asked == zs.Offload(states=0.5, update=IN_BACKWARD, max_norm=1.5)


def refuse_at_the_start() -> list[str]:
    def own(model: nn.Module) -> torch.optim.Optimizer:
        return type("Own", (torch.optim.AdamW,), {})(model.parameters())  # type: ignore[no-any-return]

    at_random = zs.Precision(param=torch.bfloat16, master=torch.bfloat16, rounding="stochastic")
    said = []
    for options in (
        {"make": own},
        {"make": lambda model: zs.optim.Lion(model.parameters())},
        {"precision": at_random, "kind": models.GPT},
        {"parameters": 1.0, "stage": 3},
        {"stage": 1},
    ):
        try:
            build(1.0, True, **options)  # type: ignore[arg-type]
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("")
    model = models.build(models.Stack)
    halves = [torch.optim.AdamW(part.parameters()) for part in (model.stem, model.blocks, model.head)]
    offload = zs.Offload(update=IN_BACKWARD)
    with pytest.raises(ValueError, match="takes one optimizer") as refused:
        zs.shard(model, halves, stage=2, offload=offload)
    said.append(str(refused.value))
    zero = zs.shard(model, None, stage=2, offload=offload)
    zero.attach(halves[0])
    with pytest.raises(ValueError, match="takes one optimizer"):
        zero.attach(halves[1])
    return said


def test_what_cannot_be_right_is_refused_by_name() -> None:
    expected = ("Own", "Lion", "stochastic", "parameters=", "stage=2 or stage=3", "3: AdamW, AdamW, AdamW")
    for world in (1, 2):
        for said in run_ranks(refuse_at_the_start, world, process_group=world > 1):
            for text, word in zip(said, expected, strict=True):
                # One rank holds whole gradients, which come to the host at each stage.
                assert (word in text) is (world > 1 or "stage" not in word), (word, text)


# -- failures, forks and the end --------------------------------------------------------------------------------------


def fail(folder: str) -> Any:
    """Have the thread run out of memory on the last rank; the step makes the update."""
    run = build(1000.0, True)
    plain_body, logged = in_backward.body_of, list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(in_backward.__name__).addHandler(handler)
    is_last = rank_of() == (dist.get_world_size() if dist.is_initialized() else 1) - 1

    def body(optimizer: Any) -> Any:
        if is_last and len(seen) == 2:
            raise MemoryError("no memory is left")
        return plain_body(optimizer)

    seen: list[Any] = []
    with patch.object(in_backward, "body_of", body):
        for step in range(4):
            plain(run, step)
            finish(run, 1000.0, True)
            seen.append(dict(source_of(run).counts))
    return state_of(run), seen, logged


def pass_by() -> Any:
    run = build(1000.0, False)
    for step in range(4):
        plain(run, step)
        finish(run, 1000.0, False)
    return state_of(run)


@pytest.mark.parametrize("world", [1, 2])
def test_an_update_that_fails_in_the_thread_is_made_by_the_step(world: int) -> None:
    expected = run_ranks(pass_by, world, process_group=world > 1)
    for rank, (state, counts, logged) in enumerate(run_ranks(fail, world, "", process_group=world > 1)):
        assert_same(expected[rank], state)
        is_last = rank == world - 1
        assert (counts[2].get("taken") == counts[1].get("taken")) is is_last
        assert counts[3]["taken"] > counts[2]["taken"]
        assert len(logged) == is_last
        assert not is_last or "MemoryError: no memory is left" in logged[0]


def fork_and_go_on() -> Any:
    """Fork while the thread has work; the child and the parent both make the step."""
    plain_update = in_backward._Job._update

    def update(self: Any) -> None:
        time.sleep(0.02)
        plain_update(self)

    run = build(1000.0, True)
    with patch.object(in_backward._Job, "_update", update):
        for step in range(2):
            plain(run, step)
            if step and not (child := os.fork()):
                finish(run, 1000.0, True)
                plain(run, 2)
                finish(run, 1000.0, True)
                os._exit(7 if source_of(run).counts["taken"] > 5 else 1)
            finish(run, 1000.0, True)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_waits_for_the_thread_and_a_child_may_go_on() -> None:
    assert run_ranks(fork_and_go_on, 1, process_group=False) == [7]


def end_after_a_backward() -> None:
    """End the interpreter between a backward and its step."""
    plain_update = in_backward._Job._update

    def update(self: Any) -> None:
        time.sleep(0.05)
        plain_update(self)

    run = build(1000.0, True)
    plain(run, 0)
    finish(run, 1000.0, True)
    with patch.object(in_backward._Job, "_update", update):
        plain(run, 1)
    print("made")


def test_a_program_may_end_after_a_backward() -> None:
    code = "from tests.engine import test_offload_in_backward as t; t.end_after_a_backward()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("made\n", 0), done.stderr


def let_go() -> list[bool]:
    run = model, optimizer, zero = build(1000.0, True)
    for step in range(2):
        plain(run, step)
        if not step:
            finish(run, 1000.0, True)
    thread = next(one for one in threading.enumerate() if one.name.startswith("zeroshard-update"))
    gone = [weakref.ref(model), weakref.ref(zero._engine)]
    del run, model, optimizer, zero
    gc.collect()
    while thread.is_alive():
        time.sleep(0.01)
        gc.collect()
    return [one() is None for one in gone]


def test_a_model_that_is_deleted_after_a_backward_goes_with_its_thread() -> None:
    assert run_ranks(let_go, 1, process_group=False) == [[True, True]]


def hold_bytes(is_ahead: bool) -> dict[str, int]:
    run = build(1.0, is_ahead, states=0.6)
    plain(run, 0)
    finish(run, 1.0, is_ahead)
    memory = run[2].memory()
    assert all(memory.resident_bytes[column] == memory.predicted_bytes[column] for column in ("states", "parameters"))
    assert ("in the backward" in run[2].summary()) is is_ahead
    return {"held": memory.resident_bytes["host"], "predicted": memory.predicted_bytes["host"]}


@pytest.mark.parametrize("world", [1, 2])
def test_the_second_copy_is_counted(world: int) -> None:
    plain, ahead = (run_ranks(hold_bytes, world, is_ahead, process_group=world > 1) for is_ahead in (False, True))
    for one, other in zip(plain, ahead, strict=True):
        # Between steps there are no gradients, which the prediction counts once.
        assert other["held"] == 2 * one["held"] > 0
        assert other["predicted"] - other["held"] == one["predicted"] - one["held"]
