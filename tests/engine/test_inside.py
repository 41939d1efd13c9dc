"""Calls at a wrong moment, in hooks inside a backward or a forward: refused before anything is changed."""

import contextlib
import copy
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard as zs
from tests import models
from tests.oracle import STAGES, TIMEOUT_S, WATCHDOG_S
from zeroshard.testing import RankFailure, run_ranks

Call = Callable[[nn.Module, Optimizer, zs.Zero], Any]
FOLDER = tempfile.gettempdir() + "/never-written"


def enter(context: contextlib.AbstractContextManager[Any]) -> None:
    with context:
        pass


def clear_one(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    model.head.weight.grad = None


def assign_one(model: nn.Module, optimizer: Optimizer, zero: zs.Zero) -> None:
    model.head.weight.grad = torch.zeros(3, models.WIDTH)


CALLS: dict[str, tuple[Call, str]] = {
    "step": (lambda model, optimizer, zero: optimizer.step(), r"optimizer\.step\(\)"),
    "zero_grad": (lambda model, optimizer, zero: optimizer.zero_grad(), r"zero_grad\(\)"),
    "zero_grad of the model": (lambda model, optimizer, zero: model.zero_grad(), r"zero_grad\(\)"),
    "grad = None": (clear_one, r"assignment to \.grad"),
    "grad =": (assign_one, r"assignment to \.grad"),
    "gathered": (lambda model, optimizer, zero: enter(zero.gathered()), r"gathered\(\)"),
    "no_sync": (lambda model, optimizer, zero: enter(zero.no_sync()), r"no_sync\(\)"),
    "profile": (lambda model, optimizer, zero: enter(zero.profile()), "profile"),
    "save": (lambda model, optimizer, zero: zero.save(FOLDER), r"zero\.save\(\)"),
    "load": (lambda model, optimizer, zero: zero.load(FOLDER), r"zero\.load\(\)"),
    "wait": (lambda model, optimizer, zero: zero.wait(), r"zero\.wait\(\)"),
    "attach": (lambda model, optimizer, zero: zero.attach(torch.optim.SGD(model.parameters())), r"attach\(\)"),
    "agree": (lambda model, optimizer, zero: zero.agree(True), r"agree\(\)"),
    "ema": (lambda model, optimizer, zero: zero.ema(0.9), r"ema\(\)"),
    "grad_norm": (lambda model, optimizer, zero: zero.grad_norm(), "norm"),
    "check_copies": (lambda model, optimizer, zero: zero.check_copies(), r"check_copies\(\)"),
}
IN_BACKWARD_ONLY = ("zero_grad", "zero_grad of the model", "grad = None", "grad =")
"""What does no harm in a forward, which uses no gradient."""


def tried(call: Call, *arguments: Any) -> str:
    """Run what must be refused; return the error's text."""
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def train(stage: int, shared_memory: bool, disturb: str | None) -> tuple[list[Any], dict[str, list[str]]]:
    """Train, trying all calls in hooks of the third step; return losses, norms and states, and what was refused."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = zs.shard(
        model, optimizer, stage=stage, settings=zs.Settings(shared_memory=shared_memory, watchdog_s=WATCHDOG_S)
    )
    texts: dict[str, list[str]] = {name: [] for name in CALLS}
    is_trying = False

    def try_all(*_: object) -> None:
        for name, (call, _words) in CALLS.items() if is_trying else ():
            if disturb != "forward" or name not in IN_BACKWARD_ONLY:
                texts[name].append(tried(call, model, optimizer, zero))

    if disturb == "parameter":
        model.blocks[1].up.weight.register_post_accumulate_grad_hook(try_all)
    elif disturb == "tensor":
        model.blocks[1].register_forward_hook(lambda module, args, output: output.register_hook(try_all) and None)
    elif disturb == "forward":
        model.blocks[1].register_forward_hook(lambda *_: try_all())
    seen: list[Any] = []
    for step in range(4):
        is_trying = step == 2
        for micro in range(2):
            loss = models.stack_loss(model, step, dist.get_rank(), micro)
            loss.backward()
        seen += [loss.detach(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
        optimizer.step()
        optimizer.zero_grad()
    with zero.gathered(states=True):
        seen += [copy.deepcopy(dict(model.state_dict())), copy.deepcopy(optimizer.state_dict()["state"])]
    return seen, {name: found for name, found in texts.items() if found}


def disturbed(stage: int) -> list[str]:
    """Return what is wrong with runs in which everything was tried at a wrong moment."""
    problems = []
    for shared_memory in (True, False):
        undisturbed, _ = train(stage, shared_memory, None)
        # At stages that keep parameters whole a forward is the module's own, and calls in it are as anywhere.
        for place in ("parameter", "tensor", *(["forward"] if stage == 3 else [])):
            seen, texts = train(stage, shared_memory, place)
            try:
                torch.testing.assert_close(seen, undisturbed, rtol=0, atol=0)
            except AssertionError as error:
                problems.append(f"{place}, shared_memory={shared_memory}: {error}")
            expected = CALLS.keys() - (IN_BACKWARD_ONLY if place == "forward" else ())
            problems += [f"{place}: {name} was not tried" for name in expected - texts.keys()]
            for name, found in texts.items():
                where = f"inside a {'forward' if place == 'forward' else 'backward'}"
                problems += [f"{place}: {name}: {text}" for text in found if where not in text]
                problems += _without(found, CALLS[name][1])
    return problems


def _without(texts: list[str], words: str) -> list[str]:
    import re

    return [f"{words} is not in: {text}" for text in texts if not re.search(words, text)]


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_a_call_at_a_wrong_moment_changes_nothing(stage: int) -> None:
    assert run_ranks(disturbed, 2, stage, timeout_s=2 * TIMEOUT_S) == [[], []]


def step_in_a_hook(stage: int, shared_memory: bool) -> tuple[str, bool, float]:
    """Let a step in a hook end the backward; return the error, whether values are as before, and the loss after it."""
    model = models.build(models.Stack)
    optimizer = models.sgd(model)
    zero = zs.shard(
        model, optimizer, stage=stage, settings=zs.Settings(shared_memory=shared_memory, watchdog_s=WATCHDOG_S)
    )
    hook = model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with zero.gathered():
        before = [p.detach().clone() for p in model.parameters()]
    text = tried(lambda: models.stack_loss(model, 0, dist.get_rank()).backward())
    hook.remove()
    optimizer.zero_grad()
    with zero.gathered():
        is_same = all(map(torch.equal, before, model.parameters()))
    for step in range(2):
        loss = models.stack_loss(model, step, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return text, is_same, loss.item()


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_after_a_refused_step(stage: int) -> None:
    found = run_ranks(both_transports, 2, step_in_a_hook, stage, timeout_s=TIMEOUT_S)
    plain = run_ranks(loss_of_plain_training, 2, timeout_s=TIMEOUT_S)
    for rank, of_rank in enumerate(found):
        for text, is_same, loss in of_rank:
            assert "optimizer.step() inside a backward" in text
            assert is_same
            assert loss == plain[rank]


def update_by_another_optimizer(stage: int) -> str:
    """Step an optimizer that zeroshard does not know when a gradient has arrived, and drop the gradient."""
    model = models.build(models.Stack)
    zs.shard(model, stage=stage, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    for parameter in model.parameters():
        other = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, other=other: (other.step(), other.zero_grad()))
    return tried(lambda: models.stack_loss(model, 0, dist.get_rank()).backward())


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_in_the_backward_is_refused_as_that(stage: int) -> None:
    for text in run_ranks(update_by_another_optimizer, 2, stage, timeout_s=TIMEOUT_S):
        assert "inside a backward" in text and "Wait until backward() returns" in text and "distributed" not in text


def loss_of_plain_training() -> float:
    model = models.build(models.Stack)
    optimizer = models.sgd(model)
    zs.shard(model, optimizer, stage=0, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    for step in range(2):
        loss = models.stack_loss(model, step, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def both_transports(action: Callable[..., Any], *arguments: Any) -> list[Any]:
    return [action(*arguments, shared_memory) for shared_memory in (True, False)]


# ---- gathered() without writeback


def change_on_one_rank(stage: int, shared_memory: bool) -> list[str]:
    """Change values on rank 1 alone, without writeback; then train, to see that ranks are still together."""
    model = models.build(models.Stack)
    optimizer = models.adamw(model)
    zero = zs.shard(
        model, optimizer, stage=stage, settings=zs.Settings(shared_memory=shared_memory, watchdog_s=WATCHDOG_S)
    )
    models.stack_loss(model, 0, dist.get_rank()).backward()
    optimizer.step()
    optimizer.zero_grad()

    def change(what: Callable[[], Tensor]) -> None:
        with zero.gathered(states=True), torch.no_grad():
            if dist.get_rank() == 1:
                what().add_(1.0)

    def state() -> Tensor:
        return optimizer.state[model.head.weight]["exp_avg"]

    texts = [tried(lambda: change(state)), tried(lambda: change(lambda: model.head.bias))]
    with zero.gathered(states=True, writeback=True):
        pass  # what rank 1 changed is as on rank 0 again
    with zero.gathered(states=True):
        pass  # an unchanged context is left in peace
    models.stack_loss(model, 1, dist.get_rank()).backward()
    optimizer.step()
    return texts


@pytest.mark.product
@pytest.mark.parametrize("stage", STAGES)
def test_a_change_without_writeback_is_every_rank_s_error(stage: int) -> None:
    for rank, of_rank in enumerate(run_ranks(both_transports, 2, change_on_one_rank, stage, timeout_s=TIMEOUT_S)):
        for of_state, of_parameter in of_rank:
            assert f"[rank {rank}/2] Values were changed" in of_parameter
            assert "rank 1: 1 parameter(s) or state(s), 'head.bias' first" in of_parameter
            assert "rank 0:" not in of_parameter
            assert "writeback=True" in of_parameter
            assert "rank 1: 1 parameter(s) or state(s), 'head.weight/exp_avg' first" in of_state


def attach_half() -> tuple[str, str]:
    """Attach an optimizer of which one parameter is taken; then one of the rest, and a group of them."""
    model = models.build(models.Stack)
    first, rest = list(model.head.parameters()), [p for n, p in model.named_parameters() if "head" not in n]
    zero = zs.shard(model, stage=2, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    zero.attach(torch.optim.SGD(first, lr=0.1))
    texts = tried_value(lambda: zero.attach(torch.optim.SGD([*rest, first[0]], lr=0.1)))
    optimizer = torch.optim.SGD(rest[:2], lr=0.1)
    zero.attach(optimizer)
    group = tried_value(lambda: optimizer.add_param_group({"params": [*rest[2:], first[1]]}))
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": rest[2:]})
    models.stack_loss(model, 0, dist.get_rank()).backward()
    optimizer.step()
    return texts, group


def tried_value(action: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:
        action()
    return str(caught.value)


def test_a_refused_attachment_leaves_nothing_behind() -> None:
    for attached, added in run_ranks(attach_half, 2, timeout_s=TIMEOUT_S):
        assert "'head.weight' is in more than one" in attached
        assert "'head.bias' is in more than one" in added


def skips_the_context() -> None:
    model = models.build(models.Stack)
    zero = zs.shard(model, models.adamw(model), stage=1, settings=zs.Settings(watchdog_s=WATCHDOG_S))
    with zero.gathered(), torch.no_grad():
        model.head.bias.add_(1.0)


def test_an_error_that_nothing_catches_is_told_by_all() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(skips_the_context, 2, timeout_s=TIMEOUT_S)
    assert {error.type_name for error in failure.value.errors.values()} == {"RuntimeError"}
