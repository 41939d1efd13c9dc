"""Attributes that code has set on parameters: an optimizer's step reads them on whatever stands for parameters."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from zeroshard.optim.admission import check_optimizers
from zeroshard.optim.keeps import kept_by
from zeroshard.testing import run_ranks

WORLD = 2


class Multiplied(torch.optim.Optimizer):
    """Has a factor for the learning rate of each parameter, and averages gradients of some."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                if p.is_averaged:  # without a default: a trial needs it
                    state = self.state[p]
                    update = state["mean"] = state.get("mean", torch.zeros_like(p)).lerp(update, 0.5)
                p.sub_(update, alpha=group["lr"] * getattr(p, "lr_mul", 1.0))


class Careful(Multiplied):
    """Clips the updates of parameters that ask for it by their norm, so that slices are updated otherwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad / p.grad.norm() if getattr(p, "is_clipped", False) else p.grad, alpha=0.1)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with attributes on parameters, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    for place, parameter in enumerate(model.parameters()):
        parameter.is_averaged = place % 2 == 0  # type: ignore[attr-defined]
    model[0].weight.lr_mul = 10.0  # type: ignore[union-attr]
    return model, Multiplied(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int]) -> None:
    """Make some steps on the inputs of some ranks; a factor changes between them."""
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(WORLD, 4, 8, generator=generator)
        model(inputs[ranks]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.get_parameter("2.weight").lr_mul = float(step)  # type: ignore[attr-defined]


def job(options: dict[str, Any], *, is_whole: bool) -> list[torch.Tensor]:
    model, optimizer = make()
    if is_whole:
        zs.optim.whole_matrix(optimizer)
    zero = zs.shard(model, optimizer, units=[nn.Linear], **options)
    train(model, optimizer, [dist.get_rank()])
    with zero.gathered():
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_steps_read_the_attributes_of_parameters(stage: int, is_whole: bool) -> None:
    model, optimizer = make()
    train(model, optimizer, [*range(WORLD)])
    for found in run_ranks(functools.partial(job, {"stage": stage}, is_whole=is_whole), WORLD):
        torch.testing.assert_close(found, [*model.parameters()])


def test_updates_of_what_lies_elsewhere_read_them(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, [*range(WORLD)])
    filed = zs.Offload(parameters=1.0, states=0.0, to=str(tmp_path))
    cases = ({"offload": "host"}, False), ({"offload": filed}, True)
    for options, is_whole in cases:
        for found in run_ranks(functools.partial(job, {"stage": 3, **options}, is_whole=is_whole), WORLD):
            torch.testing.assert_close(found, [*model.parameters()])


def test_entries_have_the_attributes_of_their_parameters_and_their_own() -> None:
    model, optimizer = make()
    zs.shard(model, optimizer, stage=1)
    weight, entry = model.get_parameter("0.weight"), optimizer.param_groups[0]["params"][0]
    assert entry.lr_mul == 10.0
    weight.lr_mul = 2.0  # type: ignore[attr-defined]
    assert entry.lr_mul == 2.0
    entry.lr_mul = 3.0
    assert (entry.lr_mul, weight.lr_mul) == (3.0, 2.0)  # type: ignore[attr-defined]
    for missing in ("nothing", "_guard"):
        with pytest.raises(AttributeError, match=f"no attribute '{missing}'"):
            getattr(entry, missing)
    assert not hasattr(weight, "_replaced")
    assert not hasattr(copy.deepcopy(entry), "_zeroshard")


def test_trials_have_the_attributes_of_each_parameter() -> None:
    model = nn.Linear(8, 8)
    check_optimizers({}, [Careful(model.parameters())], None, is_cut=True)
    model.bias.is_clipped = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="Careful is not element-wise"):
        check_optimizers({}, [Careful(model.parameters())], None, is_cut=True)


def test_states_that_attributes_ask_for_are_known() -> None:
    kept = kept_by(make()[1])
    assert (kept.failure, kept.per_element, kept.costs[0].per_element) == ("", 1, 1)


def test_attributes_that_fit_one_shape_do_not_fail_the_trial_of_whole_parameters() -> None:
    class Viewed(Multiplied):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                p.sub_(p.grad.view(getattr(p, "form", p.shape)).view_as(p) * getattr(p, "mask", 1.0), alpha=0.1)

    model = nn.Linear(8, 8)
    model.weight.form, model.bias.mask = (4, 16), torch.zeros(8)  # type: ignore[attr-defined]
    optimizer, before = Viewed(model.parameters()), model.bias.detach().clone()
    zs.optim.whole_matrix(optimizer)
    zero = zs.shard(model, optimizer, stage=1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    with zero.gathered():
        assert torch.equal(model.bias, before)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("stage", [0, 1])
def test_counters_in_attributes_are_refused(stage: int, is_whole: bool) -> None:
    """What a step sets on an entry that stands for a parameter ends with that step."""

    class Counting(Multiplied):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                p.steps = getattr(p, "steps", 0) + 1  # type: ignore[attr-defined]
                p.sub_(p.grad / p.steps, alpha=0.1)  # type: ignore[attr-defined]

    model = nn.Linear(8, 8)
    optimizer = Counting(model.parameters())
    if is_whole:
        zs.optim.whole_matrix(optimizer)
    with pytest.raises(ValueError, match=r"Counting does not update what is in its groups.*self\.state\[p\]"):
        zs.shard(model, optimizer, stage=stage)


def named(count: int) -> list[nn.Parameter]:
    """Return parameters with names, as attributes."""
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(count)]
    for place, parameter in enumerate(parameters):
        parameter.full_name = f"layer.{place}"  # type: ignore[attr-defined]
    return parameters


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("is_grouped", [False, True])
def test_names_hide_no_attribute_and_need_no_trials(is_grouped: bool, is_whole: bool) -> None:
    made: list[int] = []

    class Counted(Careful):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, lr)
            made.append(len(self.param_groups))

    def check(parameters: list[nn.Parameter]) -> list[int]:
        optimizer = Counted([{"params": [p]} for p in parameters] if is_grouped else parameters)
        if is_whole:
            zs.optim.whole_matrix(optimizer)
        made.clear()
        kept_by(optimizer)
        check_optimizers({id(p): "p" for p in parameters}, [optimizer], None, is_cut=True)
        return [*made]

    few, many = check(named(2)), check(named(30))
    assert few == many
    late = named(30)
    late[-2].is_clipped = True  # type: ignore[attr-defined]
    if is_whole:
        assert max(check(late)) == 2
        return
    with pytest.raises(ValueError, match="Counted is not element-wise"):
        check(late)


def test_every_name_that_a_step_reads_has_a_trial() -> None:
    class Reading(Careful):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                p.sub_(p.grad / p.grad.norm() if self.found(p) else p.grad, alpha=0.1)

        def found(self, p: Any) -> bool:
            return "11" in p.full_name

    class Looking(Reading):
        def found(self, p: Any) -> bool:
            return "11" in vars(p)["full_name"]

    for cls in (Reading, Looking):
        check_optimizers({}, [cls(named(11))], None, is_cut=True)
        with pytest.raises(ValueError, match="is not element-wise"):
            check_optimizers({}, [cls(named(12))], None, is_cut=True)


def test_states_that_one_of_many_names_asks_for_are_known() -> None:
    parameters = named(12)
    for place, parameter in enumerate(parameters):
        parameter.is_averaged = place == 10  # type: ignore[attr-defined]
    assert kept_by(Multiplied(parameters)).costs[0].per_element == 1
