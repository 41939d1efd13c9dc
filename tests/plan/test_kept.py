"""The states of optimizers by their groups: of plans and of predictions, as a run has them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.optim.keeps import kept_by
from zeroshard.plan.machine.profiles import host_device
from zeroshard.plan.named import Passing, States
from zeroshard.plan.trace.passing import passing_of
from zeroshard.table.bytes import Cost
from zeroshard.testing import run_ranks


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))


def groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Return the matrices of a model, with options, and the rest."""
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    return [{"params": matrices, **options}, {"params": vectors}]


class Wide(torch.optim.Optimizer):
    """Momentum in a dtype of its own."""

    def __init__(self, params: Any, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(params, {"dtype": dtype})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["sum"] = torch.zeros_like(parameter, dtype=group["dtype"])
                state["sum"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(0.1 * state["sum"].to(parameter.dtype))


class Lazy(Wide):
    """Makes a second state in its eighth step, and draws numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter, state in self.state.items():
            state["steps"] = state.get("steps", 0) + 1
            if state["steps"] == 8:
                state["slow"] = torch.rand_like(parameter)


MADE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "momentum of a group": lambda model: torch.optim.SGD(groups(model, momentum=0.9), lr=0.1),
    "no momentum of a group": lambda model: torch.optim.SGD(groups(model, momentum=0.0), lr=0.1, momentum=0.9),
    "amsgrad of a group": lambda model: torch.optim.AdamW(groups(model, amsgrad=True)),
    "float64 and bfloat16": lambda model: Wide(groups(model, dtype=torch.bfloat16)),
    "two of RMSprop": lambda model: torch.optim.RMSprop(groups(model, centered=True), momentum=0.9),
}


def columns_of_a_run(name: str, row: dict[str, Any]) -> list[dict[str, int]]:
    """Return the resident bytes after three steps, and the predicted ones."""
    model = two_layers()
    optimizer = MADE[name](model)
    zero = zs.shard(model, optimizer, settings=zs.Settings(shared_memory=False), **row)
    for _ in range(3):
        model(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    memory = zero.memory()
    return [dict(memory.resident_bytes), dict(memory.predicted_bytes)]


@pytest.mark.parametrize("name", MADE)
def test_states_of_groups_are_those_of_a_run(name: str) -> None:
    model = two_layers()
    plan = zs.plan(
        model, world_size=2, stage=2, device=host_device(), precision="fp32", inputs=[torch.ones(2, 16)],
        optimizer=MADE[name](model), loss=Tensor.sum, shared_memory=False,
    )  # fmt: skip
    for rank, (found, predicted) in zip(plan.ranks, run_ranks(columns_of_a_run, 2, name, {"stage": 2}), strict=False):
        assert found["states"] == predicted["states"] == rank.resident_bytes["states"]


def test_states_of_a_group_that_is_added_are_predicted() -> None:
    model = two_layers()
    first, second = groups(model)
    optimizer = torch.optim.SGD([first], lr=0.1)
    zero = zs.shard(model)
    zero.attach(optimizer)
    before = zero.memory().predicted_bytes["states"]
    optimizer.add_param_group({**second, "momentum": 0.9})
    assert zero.memory().predicted_bytes["states"] == before + 4 * (32 + 16)


def test_the_room_of_states_is_that_of_all_groups() -> None:
    optimizer = torch.optim.SGD(groups(two_layers(), momentum=0.9), lr=0.1)
    kept = kept_by(optimizer)
    assert kept.costs == {0: Cost(1, 0), 1: Cost(0, 0)}
    assert kept.per_element == 1


def test_a_step_takes_what_the_greediest_group_takes() -> None:
    plain, heavy = ([nn.Parameter(torch.ones(4))] for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": plain}, {"params": heavy, "amsgrad": True, "foreach": True}])
    alone = torch.optim.AdamW(heavy, amsgrad=True, foreach=True)
    found, least = (passing_of(one, States(0, 0), is_cpu=True) for one in (optimizer, alone))
    loop = passing_of(torch.optim.AdamW(plain), States(0, 0), is_cpu=True)
    assert found == Passing(*(max(getattr(a, k) for a in (least, loop)) for k in ("total", "own", "before")))
    assert found.total > loop.total


@pytest.mark.parametrize(("dtype", "cost"), [(torch.float64, Cost(0, 0, 8)), (torch.float32, Cost(1, 0))])
def test_states_of_another_dtype_have_its_size(dtype: torch.dtype, cost: Cost) -> None:
    assert kept_by(Wide([nn.Parameter(torch.ones(4))], dtype)).costs == {0: cost}
    assert cost.saved_bytes(4) == dtype.itemsize
    assert Cost(0, 4, 2, 8, 256).saved_bytes(4) == 8  # what lies packed is a number each


CAPTURABLE = [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop]


@pytest.mark.parametrize("kind", CAPTURABLE, ids=lambda kind: kind.__name__)
def test_capturable_optimizers_keep_what_others_do(kind: Any) -> None:
    parameters = [nn.Parameter(torch.ones(4))]
    kept, plain = (kept_by(kind(parameters, capturable=is_so)) for is_so in (True, False))
    assert (kept.failure, kept.costs) == ("", plain.costs)
    assert plain.costs[0].per_element


def test_a_plan_of_a_capturable_optimizer_has_the_states_of_the_other() -> None:
    def states(**options: Any) -> int:
        model = two_layers()
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        plan = zs.plan(model, world_size=2, stage=2, device="h100-80", optimizer=optimizer, inputs=[torch.ones(2, 16)])
        return plan.resident_bytes["states"]

    assert states(capturable=True) == states() > 0
    rate = torch.tensor(1e-3)
    assert states(capturable=True, foreach=True, lr=rate) == states()
    assert states(capturable=True, foreach=True, lr=rate, betas=(torch.tensor(0.9), torch.tensor(0.99))) == states()


def test_a_trial_that_fails_says_with_what() -> None:
    class Needy(Wide):
        def step(self, closure: Any = None) -> None:
            raise ArithmeticError("no number is right")

    model, inputs = two_layers(), [torch.ones(2, 16)]
    optimizer = Needy(model.parameters())
    with pytest.raises(ValueError, match=r"Needy cannot be determined: .* ArithmeticError: no number is right\. Give"):
        zs.plan(model, world_size=2, stage=0, device="h100-80", optimizer=optimizer, inputs=inputs)


def test_a_step_of_a_capturable_optimizer_takes_what_its_lists_take() -> None:
    optimizer = torch.optim.NAdam([nn.Parameter(torch.ones(4))], capturable=True)
    assert passing_of(optimizer, States(0, 0), is_cpu=False) == Passing(total=1)


def test_states_that_a_later_step_makes_count_and_no_numbers_are_drawn() -> None:
    before = torch.random.get_rng_state()
    assert kept_by(Lazy([nn.Parameter(torch.ones(4))])).costs == {0: Cost(1, 0, 8)}
    matrix = zs.optim.whole_matrix(Lazy([nn.Parameter(torch.ones(4, 4))]))
    assert len(kept_by(matrix).shapes[0, 2]) == 2
    assert torch.equal(torch.random.get_rng_state(), before)
