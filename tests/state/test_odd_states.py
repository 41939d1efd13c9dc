"""States of optimizers of others: counters with dimensions, containers and stacks of tensors."""

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from tests.oracle import TIMEOUT_S, Run, assert_matches, randn, run_cases
from zeroshard.testing import run_ranks


class Few(nn.Module):
    """Parameters of one and two elements beside a larger one: as many as counters have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.one, self.two = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.one + self.two.sum()


class Counting(torch.optim.Optimizer):
    """Counts in tensors with dimensions; what it calls as torch's counters has a number for each element."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state["turns"] = state.get("turns", torch.zeros(1)) + 1
                state["pair"] = state.get("pair", torch.zeros(2)) + torch.tensor([1.0, 2.0])
                for key in ("step", "mu"):
                    state[key] = state.get(key, torch.zeros_like(p)) + p.grad
                p.sub_(0.1 / state["turns"].item() * (state["step"] + state["mu"]))


def made(kind: type[nn.Module] = Few, optimizer: type[torch.optim.Optimizer] = Counting, **options: Any) -> Any:
    torch.manual_seed(0)
    model = kind()
    return model, optimizer(model.parameters(), **options)


def counted(run: Run) -> None:
    model, optimizer = made()
    run.shard(model, optimizer)
    for step in range(3):
        run.backward(model(randn(4, 8, key=(step, run.rank))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        with run.gathered(states=True):
            run.record(states=(kept := copy.deepcopy(optimizer.state_dict()))["state"])
        with run.gathered(states=True, writeback=True):
            optimizer.load_state_dict(kept)


@pytest.mark.parametrize("world", [1, 2])
def test_a_counter_is_one_whatever_the_size_of_a_slice(world: int) -> None:
    assert_matches(counted, world)


def saved(stage: int, folder: str, steps: range) -> list[Any]:
    model, optimizer = made()
    zero = zs.shard(model, optimizer, stage=stage)
    if steps.start:
        zero.load(folder)
    for step in steps:
        model(randn(4, 8, key=(step,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if not steps.start:
        zero.save(folder)
    with zero.gathered(states=True):
        return [copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in model.parameters()]]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_holds_counters_and_states(stage: int, tmp_path: Path) -> None:
    whole = run_ranks(saved, 1, stage, str(tmp_path / "whole"), range(4), timeout_s=TIMEOUT_S)[0]
    run_ranks(saved, 2, stage, str(tmp_path / "half"), range(2), timeout_s=TIMEOUT_S)
    for resumed in run_ranks(saved, 2, 3, str(tmp_path / "half"), range(2, 4), timeout_s=TIMEOUT_S):
        torch.testing.assert_close(resumed, whole)


class Odd(torch.optim.Optimizer):
    """Keeps what it has of elements in a container, or in one tensor of another shape."""

    def __init__(self, params: Any, form: str) -> None:
        super().__init__(params, {"form": form})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                grads = [p.grad.clone(), p.grad * 2]
                forms = {"list": grads, "dict": {"first": grads[0], "second": grads[1]}, "tensor": torch.stack(grads)}
                self.state[p]["history"] = forms[self.param_groups[0]["form"]]
                p.sub_(0.1 * grads[1])


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def odd(form: str, folder: str) -> list[str]:
    """Return the warning of `zs.shard`, and the errors of what needs whole states, and of a state from before."""
    model, optimizer = made(Few, Odd, form=form)
    with pytest.warns(UserWarning, match="will refuse") as warned:
        zero = zs.shard(model, optimizer, stage=3)
    train(model, optimizer)
    found = [str(one.message) for one in warned]
    for call in (zero.gathered(states=True).__enter__, zero.detach, lambda: zero.save(folder)):
        with pytest.raises((TypeError, zs.CheckpointError)) as caught:
            call()
        found.append(str(caught.value))
    train(model, optimizer)
    zero.save(folder, model_only=True)
    model, optimizer = made(Few, Odd, form=form)
    train(model, optimizer)
    with pytest.raises(TypeError) as caught:
        zs.shard(model, optimizer, stage=3)
    return [*found, str(caught.value)]


def test_states_that_ranks_cannot_join_are_refused_by_name(tmp_path: Path) -> None:
    cases = [(form, str(tmp_path / form)) for form in ("list", "dict", "tensor")]
    for (form, _), by_rank in run_cases(odd, 2, cases, timeout_s=TIMEOUT_S).items():
        for warned, *errors in by_rank:
            assert "will refuse its state 'history'" in warned
            assert len(errors) == 4
            for error in errors:
                assert re.search(rf"Odd keeps, of '[a-z.]+', the state 'history', a {form}", error), error
                assert "under a key of its own" in error


class Global(torch.optim.Optimizer):
    """Keeps a count and a tensor under a key that is no parameter, as torch's `state_dict` allows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        state = self.state["global"]
        state["turns"] = state.get("turns", 0) + 1
        state["seen"] = state.get("seen", torch.zeros(2)) + 1
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(0.1 / (state["turns"] + state["seen"][0].item()) * p.grad)


def steps_of_global(folder: str, stage: int) -> Any:
    """Return states and parameters after four steps: with a load after two, or with a look if there is no folder."""
    model, optimizer = made(optimizer=Global)
    zero = zs.shard(model, optimizer, stage=stage)
    for step in range(4):
        train(model, optimizer)
        if step == 1 and not folder:
            with zero.gathered(states=True):
                assert optimizer.state_dict()["state"]["global"]["turns"] == 2
            with zero.gathered(states=True, writeback=True):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif step == 1:
            zero.save(folder)
            model, optimizer = made(optimizer=Global)
            zero = zs.shard(model, optimizer, stage=stage)
            zero.load(folder)
    with zero.gathered(states=True):
        return [copy.deepcopy(optimizer.state_dict()["state"]), [p.detach().clone() for p in model.parameters()]]


def plain_global() -> Any:
    model, optimizer = made(optimizer=Global)
    for _ in range(4):
        train(model, optimizer)
    return [optimizer.state_dict()["state"], [*model.parameters()]]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_look_at_states_leaves_those_of_no_parameter(stage: int) -> None:
    for found in run_ranks(steps_of_global, 2, "", stage, timeout_s=TIMEOUT_S):
        torch.testing.assert_close(found, plain_global())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_holds_states_of_no_parameter(stage: int, tmp_path: Path) -> None:
    for found in run_ranks(steps_of_global, 2, str(tmp_path / "step-2"), stage, timeout_s=TIMEOUT_S):
        torch.testing.assert_close(found, plain_global())
    assert steps_of_global(str(tmp_path / "again"), stage)[0]["global"]["turns"] == 4


def test_a_state_of_no_parameter_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    model, optimizer = made(optimizer=Global)
    zero = zs.shard(model, optimizer)
    train(model, optimizer)
    optimizer.state["global"]["model"] = model
    with pytest.raises(zs.CheckpointError, match=r"optimizer 0, the state\['global'\]\['model'\] is a "):
        zero.save(tmp_path / "step-1")
    assert list(tmp_path.iterdir()) == []


class Added(torch.optim.SGD):
    """Counts steps in an attribute, which its state dict has."""

    turns = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "turns": self.turns}


class Needy(torch.optim.SGD):
    """Has a state dict that needs parameters."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "dtype": str(self.param_groups[0]["params"][0].dtype)}


class Changed(torch.optim.SGD):
    """Has a state dict of its own, with the entries of torch's."""

    def state_dict(self) -> dict[str, Any]:
        return dict(super().state_dict())


def test_states_of_a_removed_group_are_named_by_a_save(tmp_path: Path) -> None:
    model, optimizer = made(optimizer=torch.optim.Adam)
    *rest, last = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = rest
    optimizer.add_param_group({"params": [last]})
    zero = zs.shard(model, optimizer, stage=1)
    train(model, optimizer)
    group = optimizer.param_groups.pop()
    (name,) = (name for name, parameter in model.named_parameters() if parameter is last)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zero.save(tmp_path / "model", model_only=True)
        assert caught == []
        zero.save(tmp_path / "step-1")
        (one,) = caught
        optimizer.param_groups.append(group)
        zero.save(tmp_path / "step-2")
        assert caught == [one]
    assert one.filename == __file__
    assert f"the states of 1 parameter(s) that are in no group of Adam any more, '{name}'" in str(one.message)


@pytest.mark.parametrize(("kind", "added"), [(Added, "'turns'"), (Needy, r"'\.\.\.'"), (Changed, "")])
def test_what_a_state_dict_adds_is_named_once(kind: type[torch.optim.SGD], added: str, tmp_path: Path) -> None:
    model, optimizer = made(optimizer=kind)
    zero = zs.shard(model, optimizer, stage=1)
    train(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zero.save(tmp_path / "model", model_only=True)
        assert caught == []
        for step in (1, 2):
            zero.save(tmp_path / f"step-{step}")
    assert len(caught) == bool(added)
    for one in caught:
        assert one.filename == __file__
        assert re.search(
            rf"does not save {added}, which {kind.__name__}\.state_dict\(\) adds .* in extra=", str(one.message)
        )
